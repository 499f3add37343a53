package node

import (
	"path/filepath"
	"testing"

	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"

	"github.com/muster-hpc/muster/node/environ"
)

// Another node took the place of a peer while this one was prepared: it prepares again under the new fence, its program sees the new
// list of nodes, and what was prepared before is reaped and never runs. The one that left ends what it has and reports it.
func TestANodeThatStaysPreparesAgainUnderTheNewFenceAndOneThatLeavesIsReaped(t *testing.T) {
	f, work, dir := newFake(t), t.TempDir(), filepath.Join(t.TempDir(), "agent")
	f.begin(dir, nil)
	two := func(d *nodev1.DesiredAttempt) { d.NodeList, d.CpusPerNode, d.TasksPerNode = "n[1-2]", "1(x2)", "1(x2)" }
	f.batch(8, work, "#!/bin/sh\necho $SLURM_JOB_NODELIST >> list\n", two)
	f.batch(9, work, "#!/bin/sh\necho ran >> left\n", two)
	f.eventually("both are prepared", func() bool {
		return f.state(8, environ.BatchStep) == prepared && f.state(9, environ.BatchStep) == prepared
	})
	f.update(func() {
		f.desired[0].Fence = &apiv1.Fence{Incarnation: 1, Attempt: 1, Placement: 2}
		f.desired[0].NodeList = "n[1,3]"
		f.desired[1].Want, f.desired[1].Steps = ended, nil // As the order for a leftover is.
	})
	under := func(job, placement uint32) bool {
		for _, a := range f.actual {
			if a.JobId == job && a.Fence.Placement == placement {
				return len(a.Steps) == 1 && a.Steps[0].State == prepared && a.State == prepared
			}
		}
		return false
	}
	f.eventually("prepared again", func() bool { return under(8, 2) })
	f.eventually("the other is reaped", func() bool { return f.reaped(9) })
	f.want(8, running)
	f.eventually("ended", func() bool {
		for _, r := range f.reports {
			if r.JobId == 8 && r.Fence.Placement == 2 && r.GetStepEnded() != nil {
				return true
			}
		}
		return false
	})
	if got := read(t, filepath.Join(work, "list")); got != "n[1,3]\n" {
		t.Errorf("the program saw %q", got)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, r := range f.reports {
		if _, failed := r.Event.(*logv1.TaskReport_PrepareFailed); failed {
			t.Errorf("a failure was reported: %v", r)
		}
	}
}
