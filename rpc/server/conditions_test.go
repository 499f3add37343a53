package server

import (
	"testing"

	"google.golang.org/protobuf/proto"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
)

func lost(gpu uint) *apiv1.Condition {
	return &apiv1.Condition{Owner: "gpu", Code: "GPU_LOST", Severity: apiv1.ConditionSeverity_CONDITION_SEVERITY_FAILED,
		Reason: "it has fallen off the bus", GpuMask: []uint64{1 << gpu}}
}

// conditionsOf has the conditions that the cluster knows.
func (a *syncer) conditionsOf(c *cluster) []*apiv1.Condition {
	return c.members[0].View().Node(a.node).GetConditions()
}

func (a *syncer) say(known bool, conditions ...*apiv1.Condition) *nodev1.SyncResponse {
	request := a.request(0)
	request.Conditions, request.ConditionsKnown = conditions, known
	return a.send(request)
}

func TestWhatChecksFindReachesTheStateAndIsWrittenOnlyWhenItChanges(t *testing.T) {
	for name, at := range map[string]int{"leader": 0, "follower": 1} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t, 3)
			a := c.syncer("n1", c.members[at])
			if a.say(false); len(a.conditionsOf(c)) != 0 {
				t.Fatal("an agent that knows nothing changed something")
			}
			a.say(true, lost(3))
			if got := a.conditionsOf(c); len(got) != 1 || got[0].Reason != lost(3).Reason {
				t.Fatalf("the state has %v", got)
			}
			before := c.members[0].View().Node(a.node).Revision
			a.say(true, lost(3))
			a.say(false)
			if after := c.members[0].View().Node(a.node).Revision; after.Index != before.Index || len(a.conditionsOf(c)) != 1 {
				t.Errorf("the same was written again, or forgotten: %v, then %v", before, after)
			}
			if a.say(true); len(a.conditionsOf(c)) != 0 {
				t.Errorf("the condition stays: %v", a.conditionsOf(c))
			}
		})
	}
}

func TestNonsenseOfAChecksCostsNoLeaseAndIsNotRepeated(t *testing.T) {
	c := newCluster(t, 1)
	a := c.syncer("n1", c.members[0])
	bad := lost(1)
	bad.Reason = "forged\nline"
	a.say(true, bad) // fails the test if the Sync fails
	twice := []*apiv1.Condition{lost(1), lost(2)}
	a.say(true, twice...)
	a.say(true, twice...)
	if got := a.conditionsOf(c); len(got) != 0 {
		t.Fatalf("the state has %v", got)
	}
	if n := reportsOfHealth(t, c); n != 1 {
		t.Errorf("what was refused was proposed %d times", n)
	}
	a.say(true, lost(1))
	if got := a.conditionsOf(c); len(got) != 1 {
		t.Errorf("the state has %v", got)
	}
}

// reportsOfHealth counts the commands in the log.
func reportsOfHealth(t *testing.T, c *cluster) (n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, data := range c.entries {
		entry := &logv1.Batch{}
		if err := proto.Unmarshal(data, entry); err != nil {
			t.Fatal(err)
		}
		for _, command := range entry.Commands {
			if command.GetReportHealth() != nil {
				n++
			}
		}
	}
	return n
}
