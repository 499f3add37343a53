package submit

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// inside are reasons that only the parts of a cluster and its operators' programs get, never one of the Slurm-named commands.
var inside = strings.Fields(`
	ALREADY_BOOTSTRAPPED ATTEMPT_GOES_ON ATTEMPT_LIVE ATTEMPT_NOT_PREPARING ATTEMPT_UNACCOUNTED ATTEMPT_UNKNOWN BOOTSTRAP_INVALID
	CONFIGURATION_CHANGED CONFIGURATION_INVALID CPUS_TAKEN DIGEST_EQUAL FAILURE_MISSING FENCE_STALE GPUS_TAKEN GRES_TAKEN HEALTH_INVALID JOB_IDS_JUMP JOB_HELD LEVEL_MISSTATED
	LEVEL_NOT_HIGHER LEVEL_UNSUPPORTED MEMBERS_TOO_MANY MEMBER_DISK_FULL MEMBER_INVALID MEMBER_TOO_OLD MEMBER_UNKNOWN MEMORY_TAKEN NODE_DOWN NODE_DRAINED
	NODE_BOOT_OVER NODE_EPOCH NODE_EXCLUSIVE NODE_INVALID NODE_NAME_TAKEN NODE_NOT_LOST NODE_SHARED NODE_UNACCOUNTED NODE_UNPREPARED NOT_CAUGHT_UP
	NOT_PREPARED PLACEMENT_INVALID PLACEMENT_STALE REPORT_MALFORMED STATES_DIFFER STATE_INVALID STEP_NOT_PREPARING`)

// reasonInSource finds reason codes where they are given.
var reasonInSource = regexp.MustCompile(`(?:refuse\(|Refuse\(connect\.\w+, |Reason\w+ += )"([A-Z][A-Z_]+)"`)

func TestEveryReasonOfTheClusterHasSlurmsWords(t *testing.T) {
	expected := map[string]bool{}
	for _, name := range inside {
		expected[name] = true
	}
	found := map[string]bool{}
	for _, dir := range []string{"fsm", "rpc", "rpc/server", "rpc/client"} {
		files, err := filepath.Glob(filepath.Join("../../../..", dir, "*.go"))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, match := range reasonInSource.FindAllSubmatch(text, -1) {
				found[string(match[1])] = true
			}
		}
	}
	if len(found) < 80 {
		t.Fatalf("only %d reasons were found in the sources", len(found))
	}
	for reason := range found {
		if Wording(reason) == "" && !expected[reason] {
			t.Errorf("%s has no line of Slurm's, and is not one that only parts of the cluster get", reason)
		}
	}
}
