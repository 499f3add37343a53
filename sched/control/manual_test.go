package control

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/muster-hpc/muster/fsm"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	peerv1 "github.com/muster-hpc/muster/proto/muster/peer/v1"
)

// An agent that was killed while it prepared comes back, knows the attempt, and has forgotten the step.
func TestANodeThatHasForgottenTheStepIsNotPrepared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &rig{t: t, log: newFakeLog()}
		r.must(&logv1.Command{Op: &logv1.Command_Bootstrap{Bootstrap: &logv1.Bootstrap{Incarnation: 1, ClusterId: "x",
			Configuration: &apiv1.Configuration{ClusterName: "test", Partitions: []*apiv1.Partition{{Name: "main", Nodes: "ALL", IsDefault: true}}}}}})
		m := NewManual("c1", r.log.term, time.Now(), Faults{})
		instance := &apiv1.Instance{BootId: "boot", Nonce: "1"}
		join, refusal := m.Join(r.log.View(), &nodev1.JoinRequest{Spec: nodeSpec("n1"), Instance: instance}, time.Now())
		if refusal != nil {
			t.Fatal(refusal)
		}
		joined := r.must(join)
		m.Joined(joined, instance, time.Now())
		id := r.submit(spec(1))
		placed := m.Plan(r.log.View(), time.Now())
		if len(placed) != 1 || placed[0].GetPlace().GetJobId() != id {
			t.Fatalf("planned %v", placed)
		}
		r.must(placed[0])
		m.Placed(id, false, false, time.Now())
		fence := r.log.View().Attempt(id, 1).Fence
		beat := func(sequence uint64, steps ...*nodev1.ActualStep) []*logv1.Command {
			if refused := m.Hear(r.log.View(), []*peerv1.Beat{{Node: joined.NodeNumber, Epoch: joined.NodeEpoch, Instance: instance, Sequence: sequence,
				Actual: []*nodev1.ActualAttempt{{JobId: id, Fence: fence, State: nodev1.WorkState_WORK_STATE_PREPARED, Address: "n1", Steps: steps}}}},
				time.Now()); len(refused) > 0 {
				t.Fatal("the beat was refused")
			}
			return m.Start(r.log.View(), time.Now())
		}
		if started := beat(1); len(started) > 0 {
			t.Fatalf("a node that has prepared no step is taken for prepared: %v", started)
		}
		started := beat(2, &nodev1.ActualStep{StepId: fsm.BatchStep, State: nodev1.WorkState_WORK_STATE_PREPARED})
		if len(started) != 1 || started[0].GetStartAttempt() == nil {
			t.Fatalf("it is prepared now, and the leader decides %v", started)
		}
	})
}
