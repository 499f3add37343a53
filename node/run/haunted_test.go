package run_test

import (
	"os/exec"
	"testing"

	"github.com/muster-hpc/muster/node/run"
	"github.com/muster-hpc/muster/node/run/cgroup"
	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
)

func TestStepIsHauntedUntilItsStuckProcessIsGone(t *testing.T) {
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	p, ok := cgroup.Look(cmd.Process.Pid)
	if !ok {
		t.Fatal("the process is not seen")
	}
	state := &supervisorv1.StepState{Stuck: []*supervisorv1.StuckProcess{{Pid: uint32(p.PID), StartTicks: p.Start}}}
	if left := run.Haunted(state); len(left) != 1 || left[0].PID != p.PID {
		t.Errorf("left: %v", left)
	}
	// Another process may have the number later.
	state.Stuck[0].StartTicks--
	if left := run.Haunted(state); len(left) != 0 {
		t.Errorf("another process counts: %v", left)
	}
	state.Stuck[0].StartTicks++
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	if left := run.Haunted(state); len(left) != 0 || len(run.Haunted(nil)) != 0 {
		t.Errorf("left: %v", left)
	}
}
