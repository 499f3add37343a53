package submit

import (
	"fmt"
	"strings"

	"github.com/muster-hpc/muster/cmd/internal/slurm/session"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/rpc"
)

// Wording is Slurm's text for a reason code; empty if it has none, and Muster's sentence stands alone.
func Wording(reason string) string { return wordings[reason] }

// wordings maps reason codes to what Slurm's commands print for the same mistake.
var wordings = map[string]string{
	"PARTITION_UNKNOWN":     "Invalid partition name specified",
	"PARTITION_DOWN":        "Required partition not available (inactive or drain)",
	"TIME_LIMIT_INVALID":    "Requested time limit is invalid (missing or exceeds some limit)",
	"NODES_TOO_MANY":        "More processors requested than permitted",
	"NODE_NOT_IN_PARTITION": "Requested node configuration is not available",
	"RESOURCES_IMPOSSIBLE":  "Requested node configuration is not available",
	"STEP_IMPOSSIBLE":       "Requested node configuration is not available",
	"STEP_BUSY":             "Requested nodes are busy",
	"OPTION_INVALID":        "Invalid argument",
	"PROGRAMS_INVALID":      "Invalid argument",
	"NODE_UNKNOWN":          "Invalid node name specified",
	"JOB_UNKNOWN":           "Invalid job id specified",
	"STEP_UNKNOWN":          "Invalid job id specified",
	"JOB_ENDED":             "Job/step already completing or completed",
	"STEP_ENDED":            "Job/step already completing or completed",
	"ATTEMPT_ENDED":         "Job/step already completing or completed",
	"ATTEMPT_STALE":         "Job/step already completing or completed",
	"JOB_NOT_RUNNING":       "Job is not running",
	"JOB_PENDING":           "Job is pending execution",
	"JOB_NOT_PENDING":       "Job is no longer pending execution",
	"JOB_NOT_REQUEUEABLE":   "Requested operation is presently disabled",
	"JOB_NOT_BATCH":         "Requested operation is presently disabled",
	"STEPS_TOO_MANY":        "Step limit reached for this job",
	"NOT_OWNER":             "Access/permission denied",
	"NOT_ALLOWED":           "Access/permission denied",
	"PERMISSION_DENIED":     "Access/permission denied",
	"UNAUTHENTICATED":       "Protocol authentication error",
	"TOKEN_EXPIRED":         "Protocol authentication error",
	"TOO_LARGE":             "Pathname of a file, directory or other parameter too long",
	"TOO_LONG":              "Pathname of a file, directory or other parameter too long",
	"NO_LEADER":             "Unable to contact slurm controller (connect failure)",
	"NO_ANSWER":             "Unable to contact slurm controller (connect failure)",
	"NO_CONTROLLERS":        "Unable to contact slurm controller (connect failure)",
	"NO_AGENT":              "Unable to contact slurm controller (connect failure)",
	"JOBS_TOO_MANY":         "Resource temporarily unavailable",
	"JOB_IDS_EXHAUSTED":     "Resource temporarily unavailable",
	"SIGNALS_TOO_MANY":      "Resource temporarily unavailable",
	"UPLOADS_TOO_MANY":      "Resource temporarily unavailable",
	"UPLOAD_INTERRUPTED":    "Resource temporarily unavailable",
	"BUSY":                  "Resource temporarily unavailable",
	"DISK_FULL":             "Resource temporarily unavailable",
	"REQUEST_INVALID":       "Requested node configuration is not available",
	"PARTITION_MISSING":     "No partition specified or system default partition",
	"TOO_MANY":              "More processors requested than permitted",
	"SUBMITTER_NOT_USER":    "Access/permission denied",
	"NOT_YOUR_NODE":         "Access/permission denied",
	"BLOB_TOO_LARGE":        "Pathname of a file, directory or other parameter too long",
	"SPEC_INVALID":          "Invalid argument",
	"WORK_DIR_INVALID":      "Invalid argument",
	"SCRIPT_MISSING":        "Invalid argument",
	"COMMAND_MISSING":       "Invalid argument",
	"CHANGE_MISSING":        "Invalid argument",
	"REASON_MISSING":        "Invalid argument",
	"SIGNAL_INVALID":        "Invalid argument",
	"EMPTY_FILTER":          "Invalid argument",
	"MALFORMED":             "Invalid argument",
	"COMMAND_MALFORMED":     "Invalid argument",
	"REQUEST_ID_INVALID":    "Invalid argument",
	"UNKNOWN_FIELD":         "Incompatible versions of client and server code",
	"LEVEL_TOO_LOW":         "Incompatible versions of client and server code",
	"REQUEST_ID_REUSED":     "Duplicate job id",
	"ANSWERED_BEFORE":       "Duplicate job id",
	"OUTCOME_UNKNOWN":       "Socket timed out on send/recv operation",
	"REQUEST_TOO_OLD":       "Socket timed out on send/recv operation",
	"REQUEST_TOO_LARGE":     "Pathname of a file, directory or other parameter too long",
	"REQUEST_MALFORMED":     "Unspecified error",
	"REQUEST_FROM_FUTURE":   "Socket timed out on send/recv operation",
	"NOT_LEADER":            "Unable to contact slurm controller (connect failure)",
	"NO_QUORUM":             "Unable to contact slurm controller (connect failure)",
	"STALE_TERM":            "Unable to contact slurm controller (connect failure)",
	"BEHIND":                "Unable to contact slurm controller (connect failure)",
	"QUARANTINED":           "Unable to contact slurm controller (connect failure)",
	"SHUTTING_DOWN":         "Unable to contact slurm controller (connect failure)",
	"NOT_BOOTSTRAPPED":      "Unable to contact slurm controller (connect failure)",
	"WRONG_PEER":            "Unable to contact slurm controller (connect failure)",
	"SUBMIT_HOOK":           "Unspecified error",
	"BLOB_UNKNOWN":          "Unspecified error",
	"BLOB_INVALID":          "Unspecified error",
	"BLOB_OFFSET":           "Unspecified error",
	"BLOB_HASH_MISMATCH":    "Unspecified error",
	"INTERNAL":              "Unspecified error",
}

// Explain prints a failed call: Slurm's words first where it has some, then Muster's sentence.
func Explain(s *session.Session, what string, err error) {
	if detail := rpc.Detail(err); detail != nil {
		ExplainDetail(s, what, detail, nil)
		return
	}
	s.Errorf("%s: %s", what, s.Sentence(err))
}

// ExplainDetail is Explain for a refusal; spec is what was submitted, if anything was.
func ExplainDetail(s *session.Session, what string, detail *apiv1.ErrorDetail, spec *apiv1.JobSpec) {
	if detail.GetReason() == "PARTITION_UNKNOWN" && spec != nil {
		name := strings.TrimPrefix(detail.GetSubject(), "partition ")
		if name == "" {
			name = strings.Join(spec.GetPartitions(), ",")
		}
		s.Errorf("invalid partition specified: %s", name)
	}
	text := Wording(detail.GetReason())
	switch {
	case text == "":
		s.Errorf("%s: %s", what, detail.GetSentence())
	case detail.GetSentence() == "":
		s.Errorf("%s: %s", what, text)
	default:
		s.Errorf("%s: %s\n%s", what, text, detail.GetSentence())
	}
}

// Summary is a refusal in one line, for commands that print one line for each object.
func Summary(detail *apiv1.ErrorDetail) string {
	text := Wording(detail.GetReason())
	if text == "" {
		return detail.GetSentence()
	}
	return fmt.Sprintf("%s (%s)", text, detail.GetSentence())
}
