package fsm

import (
	"fmt"
	"testing"

	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

func rejoin(boot, nonce string, highest uint32) *logv1.JoinNode {
	return &logv1.JoinNode{Spec: nodeSpec("n1", 8, 4), Instance: instance(boot, nonce), TakesOver: true, HighestJobId: highest}
}

// A join that was under way for longer than a lease looks to the leader like another reboot. Nothing of the present boot may be accounted
// for by it.
func TestAJoinOfAFormerBootThatComesLateChangesNothing(t *testing.T) {
	r := twoNodes(t)
	r.must(agentOf("n1"), rejoin("second", "2", 0))
	job := r.submit(alice, batchSpec())
	r.start(job, r.placement(1, 0, 1))
	before := r.check().Node(1)
	if got := r.do(agentOf("n1"), rejoin("boot-n1", "1", 0)).Refusal.GetReason(); got != "NODE_BOOT_OVER" {
		t.Fatalf("the former boot was answered with %q", got)
	}
	if s := r.status(job); s.State != jobRunning || s.Completing {
		t.Errorf("the job is %s", text(s))
	}
	if n := r.check().Node(1); n.Epoch != before.Epoch || !sameInstance(n.Instance, before.Instance) {
		t.Errorf("the node is %v; it was %v", n, before)
	}
	if result := r.must(agentOf("n1"), rejoin("second", "2", 0)); result.NodeEpoch != before.Epoch {
		t.Errorf("the present boot returned as %v", result)
	}
}

func TestFormerBootsAreRememberedUpToABound(t *testing.T) {
	r := twoNodes(t)
	for i := range maxFormerBoots + 3 {
		r.must(agentOf("n1"), rejoin(fmt.Sprint("boot ", i), "1", 0))
	}
	n := r.check().Node(1)
	if len(n.FormerBootIds) != maxFormerBoots || n.FormerBootIds[0] != "boot 2" || n.FormerBootIds[maxFormerBoots-1] != fmt.Sprint("boot ", maxFormerBoots+1) {
		t.Errorf("it remembers %q", n.FormerBootIds)
	}
}

func TestOneNodeCannotUseUpTheJobIDs(t *testing.T) {
	r := twoNodes(t)
	next := r.check().NextJobID()
	for _, highest := range []uint32{next + maxJobIDJump, maxJobID - 1, ^uint32(0)} {
		if got := r.do(agentOf("n1"), rejoin("boot-n1", "1", highest)).Refusal.GetReason(); got != "JOB_IDS_JUMP" {
			t.Errorf("work of job %d was answered with %q", highest, got)
		}
	}
	if got := r.check().NextJobID(); got != next {
		t.Errorf("a refused join moved the next job id from %d to %d", next, got)
	}
	r.must(agentOf("n1"), rejoin("boot-n1", "1", next+maxJobIDJump-1))
	if got := r.check().NextJobID(); got != next+maxJobIDJump {
		t.Errorf("the next job id is %d", got)
	}
}

// The outcome of an old command is a matter of the state's level: a log that was written before gives the same state for ever.
func TestAtLevelOneLateJoinsAndJobIDsAreTakenAsBefore(t *testing.T) {
	r := newRig(t)
	r.bootAt(1)
	r.join("n1", 8, 4)
	r.must(agentOf("n1"), rejoin("second", "2", 0))
	if result := r.must(agentOf("n1"), rejoin("boot-n1", "1", 3_000_000_000)); result.NodeEpoch != 3 {
		t.Errorf("it joined as %v", result)
	}
	if v := r.check(); v.NextJobID() != 3_000_000_001 || v.Node(1).FormerBootIds != nil {
		t.Errorf("next job id %d, former boots %q", v.NextJobID(), v.Node(1).FormerBootIds)
	}
}
