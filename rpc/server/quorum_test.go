package server

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/muster-hpc/muster/fsm"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
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
	transfer := func(at *fakeReplica, to string) (*apiv1.ChangeMemberResponse, error) {
		return c.user(0, "root", at).Cluster().ChangeMember(t.Context(), &apiv1.ChangeMemberRequest{Change: &apiv1.ChangeMemberRequest_Transfer{Transfer: to}})
	}
	for _, at := range c.members { // followers pass it on
		began := time.Now()
		_, err := transfer(at, "id-c2")
		if rpc.Reason(err) != rpc.ReasonMemberFull || !strings.Contains(rpc.Sentence(err), "the disk of controller c2 is full") {
			t.Errorf("the transfer to a full member, asked of %s: %v", at.name, err)
		}
		if d := time.Since(began); d > 5*time.Second {
			t.Errorf("%s took %v: a refusal is not asked for again", at.name, d)
		}
		if !c.members[0].leads() {
			t.Fatal("leadership has moved")
		}
	}
	answer, err := transfer(c.members[1], "id-c3")
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

// TestACopiedDirectoryIsShownByEveryController: the copy was started while the original was away, and told the cluster its address.
func TestACopiedDirectoryIsShownByEveryController(t *testing.T) {
	c := newCluster(t, 3)
	original := c.members[1]
	machine := fsm.New()
	copied := &fakeReplica{cluster: c, name: "c2", moved: "raft-elsewhere", machine: machine, view: machine.Publish(), published: make(chan struct{})}
	c.mu.Lock()
	copied.catchUp()
	c.mu.Unlock()
	c.serve(copied)
	shown := map[*fakeReplica]string{
		c.members[0]: "says that it is at raft-elsewhere, but the others reach it at raft-c2: its data directory was moved or copied",
		c.members[2]: "says that it is at raft-elsewhere, but the others reach it at raft-c2: its data directory was moved or copied",
		original:     "a copy of it answers at " + copied.address,
	}
	var wrong []string
	for range 3 { // the original may announce itself once more, if it began to before the copy did
		c.apply(&apiv1.Principal{Kind: memberPrincipal.Kind, Name: "c2"}, &logv1.Command{Op: &logv1.Command_AnnounceMember{
			AnnounceMember: &logv1.AnnounceMember{Member: copied.self()}}})
		wrong = nil
		for at, trouble := range shown {
			answer, err := c.user(0, "root", at).Cluster().GetCluster(t.Context(), &apiv1.GetClusterRequest{})
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range answer.Members {
				if has := slices.Contains(m.Troubles, trouble); has != (m.Name == "c2") {
					wrong = append(wrong, fmt.Sprintf("%s says of %s: %v", at.address, m.Name, m.Troubles))
				}
			}
		}
		if len(wrong) == 0 {
			return
		}
	}
	t.Errorf("after every announcement of the copy: %v", wrong)
}
