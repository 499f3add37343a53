package node

import (
	"path/filepath"
	"testing"

	"github.com/muster-hpc/muster/node/environ"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
)

func TestAnAttemptOfWhichAStepIsMissingIsNotPrepared(t *testing.T) {
	at := &attempt{record: &nodev1.AttemptRecord{JobId: 1, Fence: &apiv1.Fence{Attempt: 1}}, steps: map[uint32]*step{}}
	with := func(ids ...uint32) *nodev1.DesiredAttempt {
		order := &nodev1.DesiredAttempt{}
		for _, id := range ids {
			order.Steps = append(order.Steps, &nodev1.DesiredStep{Step: &apiv1.Step{Id: id}})
		}
		return order
	}
	preparing := nodev1.WorkState_WORK_STATE_PREPARING
	if got := at.state(nil); got != preparing {
		t.Errorf("an agent that has not heard what belongs to it says %v", got)
	}
	if got := at.state(with(0)); got != preparing {
		t.Errorf("an agent that has forgotten the step says %v", got)
	}
	if got := at.state(with()); got != prepared {
		t.Errorf("a node without steps says %v", got)
	}
	at.steps[0] = &step{id: 0, phase: PhasePrepared}
	if got := at.state(with(0)); got != prepared {
		t.Errorf("with its step prepared it says %v", got)
	}
	if got := at.state(with(0, 1)); got != preparing {
		t.Errorf("with one of two steps it says %v", got)
	}
}

func TestControllersAreToldOnlyWhatTheyWaitFor(t *testing.T) {
	f, work := newFake(t), t.TempDir()
	f.begin(filepath.Join(t.TempDir(), "agent"), nil)
	f.batch(3, work, "#!/bin/sh\nexit 0\n", nil)
	f.eventually("prepared", func() bool { return f.state(3, environ.BatchStep) == prepared })
	f.mu.Lock()
	before := f.lastSync.GetSequence()
	f.mu.Unlock()
	f.want(3, running)
	f.finish(3)
	f.update(func() { f.desired = nil })
	f.eventually("nothing left to report", func() bool { return len(f.actual) == 0 && len(f.lastSync.GetReports()) == 0 })
	// Three orders (run, end, none) and two reports (step ended, reaped) with their acknowledgements: what happens in between on
	// the node (started, ending) causes none.
	f.mu.Lock()
	defer f.mu.Unlock()
	if n := f.lastSync.GetSequence() - before; n > 8 {
		t.Errorf("%d Syncs", n)
	}
}
