package node

import (
	"log/slog"
	"path/filepath"
	"testing"
	"time"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"

	"github.com/muster-hpc/muster/node/run/cgroup"
)

// Devices of an attempt are given back without a process that nothing ends only when the controllers were told not to use them.
func TestStuckProcessesHoldTheirAttemptUntilTheirDevicesAreQuarantined(t *testing.T) {
	now := time.Hour
	a, err := Open(Config{Dir: filepath.Join(t.TempDir(), "agent"), Spec: &apiv1.NodeSpec{Name: "n1"}, Controllers: newFake(t), Refusal: refusalOf,
		Supervisor: supervisorPath, Log: slog.New(slog.DiscardHandler), Boot: func() time.Duration { return now }})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = a.Close() })
	self, ok := cgroup.Look(1) // one that is certainly there for as long as the test
	if !ok {
		t.Skip("process 1 is not to be seen")
	}
	asleep, running := self, self
	asleep.State, running.State = "D", "R"
	order := &nodev1.DesiredAttempt{Job: &apiv1.Job{Id: 5}, Fence: &apiv1.Fence{Attempt: 1}, GpuMask: []uint64{6},
		Steps: []*nodev1.DesiredStep{{Step: &apiv1.Step{Id: 0}}}}
	s := newStep(keyOf(5, order.Fence), &nodev1.StepRecord{Order: order}, t.TempDir())
	at := &attempt{record: &nodev1.AttemptRecord{JobId: 5, Fence: order.Fence}, steps: map[uint32]*step{0: s}}
	if a.quarantined(at, nil) || a.quarantined(at, []cgroup.Process{asleep, running}) || at.noted != 0 {
		t.Error("what may still end was given up")
	}
	a.lease.grantedAt = now
	if a.quarantined(at, []cgroup.Process{asleep}) {
		t.Error("the controllers cannot know of it yet")
	}
	a.ailments.mu.Lock()
	noted := len(a.ailments.stuck)
	a.ailments.mu.Unlock()
	if noted != 1 {
		t.Errorf("%d processes are noted", noted)
	}
	c := a.ailments.stuckTasks()
	if c.GetSeverity() != severityFailed || len(c.GetGpuMask()) != 1 || c.GetGpuMask()[0] != 6 {
		t.Errorf("the condition is %v", c)
	}
	now += a.stuckAfter
	if a.quarantined(at, []cgroup.Process{asleep}) {
		t.Error("no Sync was granted since")
	}
	a.lease.grantedAt = now
	if !a.quarantined(at, []cgroup.Process{asleep}) {
		t.Error("the controllers know, and the rest of the attempt is held")
	}
	if unknown := (&attempt{record: at.record}); a.quarantined(unknown, []cgroup.Process{asleep}) {
		t.Error("nobody knows which devices they have")
	}
}
