package supervise_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
	"golang.org/x/sys/unix"
)

// A task has its limits and its priority from its first instruction on, and so has one that the kernel does not let be stopped before it.
func TestLimitsAndPriorityHoldOnEveryWay(t *testing.T) {
	const look = "ulimit -Sn; cut -d' ' -f19 /proc/$$/stat; ulimit -Sc; ulimit -Hn"
	special := filepath.Join(t.TempDir(), "sh") // a program that gets other rights at exec cannot be traced
	b, err := os.ReadFile("/bin/sh")
	if err == nil {
		err = os.WriteFile(special, b, 0o755)
	}
	if err == nil {
		err = os.Chmod(special, 0o755|os.ModeSetgid)
	}
	if err != nil {
		t.Fatal(err)
	}
	var hard unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &hard); err != nil {
		t.Fatal(err)
	}
	for name, program := range map[string]string{"at once": "sh", "through a stage": special} {
		plan := shell("")
		plan.Tasks[0].Args = []string{program, "-c", look}
		nice := int32(7)
		plan.Nice = &nice
		plan.ResourceLimits = []*supervisorv1.ResourceLimit{{Resource: unix.RLIMIT_NOFILE, Soft: 77}, {Resource: unix.RLIMIT_CORE, Soft: 0}}
		s := launch(t, normal, plan)
		s.start()
		wantExit(t, s.ended(), 0, "0:0")
		if got := strings.Fields(s.file("out.0")); len(got) != 4 || got[0] != "77" || got[1] != "7" || got[2] != "0" || got[3] == "77" {
			t.Errorf("%s: the limits are %q", name, got)
		}
		if got := s.file("err.0"); got != "" {
			t.Errorf("%s: stderr %q", name, got)
		}
	}
}

func TestLimitsThatTheNodeCutsAreSaid(t *testing.T) {
	// The supervisor inherits the hard limit of this process's child; it is lowered there only.
	plan := shell("ulimit -Sn")
	plan.ResourceLimits = []*supervisorv1.ResourceLimit{{Resource: unix.RLIMIT_NOFILE, Soft: 1 << 62}}
	s := launch(t, normal, plan)
	s.start()
	s.ended()
	if got := s.file("err.0"); !strings.Contains(got, "NOFILE ") || !strings.Contains(got, " instead of 4611686018427387904") {
		t.Errorf("stderr %q", got)
	}
}
