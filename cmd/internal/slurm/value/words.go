package value

import (
	"fmt"
	"strconv"
	"strings"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// State is how a job's state is written.
type State struct {
	// Code is squeue's short form ("PD").
	Code string
	// Word is the long form ("PENDING").
	Word string
}

var states = map[apiv1.JobState]State{
	apiv1.JobState_JOB_STATE_PENDING:       {"PD", "PENDING"},
	apiv1.JobState_JOB_STATE_CONFIGURING:   {"CF", "CONFIGURING"},
	apiv1.JobState_JOB_STATE_RUNNING:       {"R", "RUNNING"},
	apiv1.JobState_JOB_STATE_COMPLETED:     {"CD", "COMPLETED"},
	apiv1.JobState_JOB_STATE_FAILED:        {"F", "FAILED"},
	apiv1.JobState_JOB_STATE_CANCELLED:     {"CA", "CANCELLED"},
	apiv1.JobState_JOB_STATE_TIMEOUT:       {"TO", "TIMEOUT"},
	apiv1.JobState_JOB_STATE_NODE_FAIL:     {"NF", "NODE_FAIL"},
	apiv1.JobState_JOB_STATE_OUT_OF_MEMORY: {"OOM", "OUT_OF_MEMORY"},
	apiv1.JobState_JOB_STATE_DEADLINE:      {"DL", "DEADLINE"},
	apiv1.JobState_JOB_STATE_PREEMPTED:     {"PR", "PREEMPTED"},
	apiv1.JobState_JOB_STATE_BOOT_FAIL:     {"BF", "BOOT_FAIL"},
}

// Completing is the state of a job whose tasks are being ended.
var Completing = State{"CG", "COMPLETING"}

// unusedStates are states of Slurm that no job of Muster is ever in; filters accept them and select nothing.
var unusedStates = map[string]bool{
	"S": true, "SUSPENDED": true, "ST": true, "STOPPED": true, "SI": true, "SIGNALING": true, "SE": true,
	"SPECIAL_EXIT": true, "SO": true, "STAGE_OUT": true, "RS": true, "RESIZING": true, "RQ": true, "REQUEUED": true,
	"RF": true, "REQUEUE_FED": true, "RH": true, "REQUEUE_HOLD": true, "RD": true, "RESV_DEL_HOLD": true,
	"RV": true, "REVOKED": true,
}

// StateOf returns how a job's state is written now.
func StateOf(status *apiv1.JobStatus) State {
	if status.GetCompleting() {
		return Completing
	}
	return states[status.GetState()]
}

// Ended tells whether a job has ended for good.
func Ended(state apiv1.JobState) bool {
	switch state {
	case apiv1.JobState_JOB_STATE_UNSPECIFIED, apiv1.JobState_JOB_STATE_PENDING, apiv1.JobState_JOB_STATE_CONFIGURING,
		apiv1.JobState_JOB_STATE_RUNNING:
		return false
	}
	return true
}

// StateFilter is a parsed list of states.
type StateFilter struct {
	// All selects every job.
	All bool
	// States selects jobs in these states.
	States map[apiv1.JobState]bool
	// Completing selects jobs that are completing.
	Completing bool
}

// Match tells whether a job is selected.
func (f StateFilter) Match(status *apiv1.JobStatus) bool {
	if f.All {
		return true
	}
	if status.GetCompleting() {
		return f.Completing
	}
	return f.States[status.GetState()]
}

// ParseStates reads a list such as "PD,RUNNING" or "all", in any case.
func ParseStates(list string) (StateFilter, error) {
	f := StateFilter{States: map[apiv1.JobState]bool{}}
	for word := range strings.SplitSeq(list, ",") {
		word = strings.ToUpper(strings.TrimSpace(word))
		if word == "ALL" {
			f.All = true
			continue
		}
		if word == Completing.Code || word == Completing.Word {
			f.Completing = true
			continue
		}
		found := unusedStates[word]
		for state, text := range states {
			if word == text.Code || word == text.Word {
				f.States[state], found = true, true
			}
		}
		if !found {
			return f, fmt.Errorf("Invalid job state specified: %s", word)
		}
	}
	return f, nil
}

// StateWords lists the long forms of all states that Muster has, for messages.
func StateWords() string {
	var words []string
	for _, state := range []apiv1.JobState{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12} {
		words = append(words, states[state].Word)
	}
	return strings.Join(append(words, Completing.Word), ",")
}

var reasons = map[apiv1.WaitReason]string{
	apiv1.WaitReason_WAIT_REASON_UNSPECIFIED:          "None",
	apiv1.WaitReason_WAIT_REASON_RESOURCES:            "Resources",
	apiv1.WaitReason_WAIT_REASON_PRIORITY:             "Priority",
	apiv1.WaitReason_WAIT_REASON_JOB_HELD_USER:        "JobHeldUser",
	apiv1.WaitReason_WAIT_REASON_JOB_HELD_ADMIN:       "JobHeldAdmin",
	apiv1.WaitReason_WAIT_REASON_BEGIN_TIME:           "BeginTime",
	apiv1.WaitReason_WAIT_REASON_REQ_NODE_NOT_AVAIL:   "ReqNodeNotAvail",
	apiv1.WaitReason_WAIT_REASON_PARTITION_DOWN:       "PartitionDown",
	apiv1.WaitReason_WAIT_REASON_PARTITION_NODE_LIMIT: "PartitionNodeLimit",
	apiv1.WaitReason_WAIT_REASON_PARTITION_TIME_LIMIT: "PartitionTimeLimit",
	apiv1.WaitReason_WAIT_REASON_LAUNCH_BACKOFF:       "BeginTime",
	apiv1.WaitReason_WAIT_REASON_CLEANING:             "Cleaning",
	apiv1.WaitReason_WAIT_REASON_NON_ZERO_EXIT_CODE:   "NonZeroExitCode",
	apiv1.WaitReason_WAIT_REASON_TIME_LIMIT:           "TimeLimit",
	apiv1.WaitReason_WAIT_REASON_NODE_DOWN:            "NodeDown",
	apiv1.WaitReason_WAIT_REASON_JOB_LAUNCH_FAILURE:   "JobLaunchFailure",
	apiv1.WaitReason_WAIT_REASON_OUT_OF_MEMORY:        "OutOfMemory",
	apiv1.WaitReason_WAIT_REASON_RAISED_SIGNAL:        "RaisedSignal",
	apiv1.WaitReason_WAIT_REASON_DEPENDENCY:           "Dependency",
	apiv1.WaitReason_WAIT_REASON_BAD_CONSTRAINTS:      "BadConstraints",
}

// Reason writes why a job waits or ended, as squeue's %r does.
func Reason(status *apiv1.JobStatus) string {
	if status.GetReason() == apiv1.WaitReason_WAIT_REASON_RAISED_SIGNAL && status.GetExitSignal() != 0 {
		return fmt.Sprintf("RaisedSignal:%d(%s)", status.GetExitSignal(), SignalWord(int(status.GetExitSignal())))
	}
	if word, ok := reasons[status.GetReason()]; ok {
		return word
	}
	return status.GetReason().String()
}

// SignalWord is the C library's text of common signals with blanks replaced, as Slurm writes it in a reason.
func SignalWord(n int) string {
	for name, s := range signals {
		if int(s) == n {
			switch name {
			case "KILL":
				return "Killed"
			case "TERM":
				return "Terminated"
			case "SEGV":
				return "Segmentation_fault"
			case "ABRT":
				return "Aborted"
			case "INT":
				return "Interrupt"
			case "HUP":
				return "Hangup"
			}
			return "SIG" + name
		}
	}
	return strconv.Itoa(n)
}

// ExitCode writes "CODE:SIGNAL".
func ExitCode(code, signal uint32) string {
	return strconv.FormatUint(uint64(code), 10) + ":" + strconv.FormatUint(uint64(signal), 10)
}

// AccountedExitCode writes a code as sacct does: a shell's 128+n is written as n (a code above 128 loses 128), which
// scontrol does not do.
func AccountedExitCode(code, signal uint32) string {
	if code > 128 && signal == 0 {
		code -= 128
	}
	return ExitCode(code, signal)
}

// Null writes "(null)" for an empty string, as Slurm does.
func Null(s string) string {
	if s == "" {
		return "(null)"
	}
	return s
}

// Size writes MiB with the largest unit that divides it ("64G", "1000M"); 0 is "0".
func Size(mb uint64) string {
	switch {
	case mb == 0:
		return "0"
	case mb%(1<<20) == 0:
		return strconv.FormatUint(mb>>20, 10) + "T"
	case mb%(1<<10) == 0:
		return strconv.FormatUint(mb>>10, 10) + "G"
	}
	return strconv.FormatUint(mb, 10) + "M"
}
