package server

import (
	"slices"
	"strings"
	"testing"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/rpc"
)

// TestAnElectionIsNotTakenForALackOfQuorum: without a leader, but with everybody there, nobody says so.
func TestAnElectionIsNotTakenForALackOfQuorum(t *testing.T) {
	c := newCluster(t, 3)
	c.elect(nil)
	if said := c.members[0].server.missing(t.Context()); said != "" {
		t.Errorf("it says: %s", said)
	}
	c.members[1].Quarantine("a test says so")
	c.members[2].Quarantine("a test says so")
	if said := c.members[0].server.missing(t.Context()); said == "" {
		t.Error("members that are set aside do not vote")
	}
}

func TestALeaderIsNotChosenWhoseDiskIsFull(t *testing.T) {
	c := newCluster(t, 3)
	c.members[1].full.Store(true)
	user := c.user(0, "root")
	transfer := func(to string) (*apiv1.ChangeMemberResponse, error) {
		return user.Cluster().ChangeMember(t.Context(), &apiv1.ChangeMemberRequest{Change: &apiv1.ChangeMemberRequest_Transfer{Transfer: to}})
	}
	ctx := t.Context()
	err := c.members[0].server.mayLead(ctx, "id-c2")
	if rpc.Reason(err) != rpc.ReasonDiskFull || !strings.Contains(rpc.Sentence(err), "c2") {
		t.Errorf("the transfer to a full member: %v", err)
	}
	answer, err := transfer("id-c3")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range answer.Members {
		if m.Leader != (m.Name == "c3") || m.AppliedIndex == 0 || (m.Name == "c2") != slices.Contains(m.Troubles, diskFull) {
			t.Errorf("after the transfer: %v", m)
		}
	}
}

func TestSilentNodesAreListedByEveryController(t *testing.T) {
	c := newCluster(t, 2)
	number, _ := c.join("n1")
	c.join("n2")
	c.members[0].control.mu.Lock()
	c.members[0].control.silent = []*apiv1.SilentNode{{Node: number, SilentMs: 14_000}}
	c.members[0].control.mu.Unlock()
	for _, at := range c.members {
		answer, err := c.user(1000, "u", at).Cluster().ListNodes(t.Context(), &apiv1.ListNodesRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if len(answer.Silent) != 1 || answer.Silent[0].Node != number || answer.Silent[0].SilentMs != 14_000 {
			t.Errorf("%s says %v", at.name, answer.Silent)
		}
	}
}
