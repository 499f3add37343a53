package server

import (
	"context"
	"fmt"
	"testing"
	"time"

	"connectrpc.com/connect/v2"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	"github.com/muster-hpc/muster/proto/muster/node/v1/nodev1connect"
	"github.com/muster-hpc/muster/rpc"
)

// syncer is an agent that syncs by hand.
type syncer struct {
	t        testing.TB
	service  nodev1connect.AgentServiceClient
	node     uint32
	epoch    uint32
	name     string
	sequence uint64
	holds    *apiv1.Revision
	seen     *apiv1.Revision
	granted  uint64
}

func (c *cluster) syncer(name string, at *fakeReplica) *syncer {
	c.t.Helper()
	number, epoch := c.join(name)
	return &syncer{t: c.t, service: c.agentOf(name).Agents(at.address), node: number, epoch: epoch, name: name}
}

func (a *syncer) request(holdMs uint32) *nodev1.SyncRequest {
	a.sequence++
	return &nodev1.SyncRequest{Node: a.node, Epoch: a.epoch, Instance: instance(a.name), Sequence: a.sequence, Seen: a.seen,
		Holds: a.holds, HoldMs: holdMs, LastGrant: a.granted}
}

// send syncs and takes in the answer.
func (a *syncer) send(request *nodev1.SyncRequest) *nodev1.SyncResponse {
	a.t.Helper()
	answer, err := a.service.Sync(a.t.Context(), request)
	if err != nil {
		a.t.Fatalf("sync: %v", err)
	}
	a.seen = answer.Revision
	if !answer.Unchanged && !answer.Rejoin {
		a.holds = answer.Revision
	}
	if answer.Grant != nil {
		a.granted = answer.Grant.Sequence
	}
	return answer
}

// settle syncs until the agent has a lease and nothing is new.
func (a *syncer) settle() {
	a.t.Helper()
	for range 10 {
		if a.send(a.request(500)); a.granted > 0 && a.holds != nil {
			return
		}
	}
	a.t.Fatal("no lease after ten Syncs")
}

func TestJoinThroughAFollower(t *testing.T) {
	c := newCluster(t, 2)
	answer, err := c.agentOf("n1").Agents(c.members[1].address).Join(t.Context(), &nodev1.JoinRequest{Spec: nodeSpec("n1"), Instance: instance("n1")})
	if err != nil || answer.Number != 1 || answer.Epoch == 0 {
		t.Fatalf("%v, %v", answer, err)
	}
	if node := c.members[0].View().Node(1); node.GetSpec().GetName() != "n1" {
		t.Errorf("node %v", node)
	}
}

func TestFirstSyncBringsEverythingAndTheLeaseFollowsAtOnce(t *testing.T) {
	for i, name := range []string{"leader", "follower"} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t, 2)
			a := c.syncer("n1", c.members[i])
			first := a.send(a.request(2000))
			if first.Unchanged || first.Rejoin || first.Settings.GetLeaseMs() != 3000 || len(first.Members) != 2 {
				t.Errorf("first: %v", first)
			}
			began := time.Now()
			a.settle()
			if took := time.Since(began); took > 500*time.Millisecond {
				t.Errorf("the lease came after %s", took)
			}
			if second := a.send(a.request(10)); len(second.Members) != 0 {
				t.Error("the controllers are told again although nothing changed")
			}
		})
	}
}

func TestSyncIsHeldUntilItsNodeIsTouched(t *testing.T) {
	c := newCluster(t, 2)
	a, other := c.syncer("n1", c.members[1]), c.syncer("n2", c.members[1])
	a.settle()
	other.settle()
	id := submitOne(t, c.user(1000, "alice"), "a")
	got := make(chan *nodev1.SyncResponse, 2)
	began := time.Now()
	go func() { got <- a.send(a.request(900)) }()
	time.AfterFunc(100*time.Millisecond, func() { c.place(id, a.node) })
	answer := <-got
	if took := time.Since(began); took < 90*time.Millisecond || took > 700*time.Millisecond {
		t.Errorf("held for %s", took)
	}
	if len(answer.Desired) != 1 || answer.Desired[0].Job.Id != id || answer.Desired[0].Want != nodev1.WorkState_WORK_STATE_PREPARED {
		t.Fatalf("desired %v", answer.Desired)
	}
	began = time.Now()
	quiet := other.send(other.request(300))
	if took := time.Since(began); !quiet.Unchanged || took < 250*time.Millisecond {
		t.Errorf("the other node was woken after %s: %v", took, quiet)
	}
	if quiet.Grant == nil {
		t.Error("no grant at the end of the hold")
	}
}

func TestControllerBelowWhatTheAgentHasSeenRefuses(t *testing.T) {
	c := newCluster(t, 2)
	a := c.syncer("n1", c.members[1])
	a.settle()
	c.members[1].lag(true)
	submitOne(t, c.user(1000, "alice", c.members[0]), "a")
	a.seen = c.members[0].View().Revision()
	_, err := a.service.Sync(t.Context(), a.request(100))
	if connect.CodeOf(err) != connect.CodeUnavailable || rpc.Reason(err) != rpc.ReasonBehind {
		t.Errorf("got %v", err)
	}
}

func TestPlantedBugOfAnsweringBelowIsNoticed(t *testing.T) {
	c := newCluster(t, 2, Faults{AnswerBelowSeen: true})
	a := c.syncer("n1", c.members[1])
	a.settle()
	c.members[1].lag(true)
	submitOne(t, c.user(1000, "alice", c.members[0]), "a")
	a.seen = c.members[0].View().Revision()
	if _, err := a.service.Sync(t.Context(), a.request(10)); err != nil {
		t.Errorf("the planted bug is not there, so the test before this proves nothing: %v", err)
	}
}

func TestOlderSyncIsAnsweredEmptyAndNewerOneEndsTheHold(t *testing.T) {
	c := newCluster(t, 1)
	a := c.syncer("n1", c.members[0])
	a.settle()
	old := a.request(900)
	held := make(chan *nodev1.SyncResponse)
	go func() {
		answer, err := a.service.Sync(context.Background(), old)
		if err != nil {
			t.Error(err)
		}
		held <- answer
	}()
	for { // until the old one is being held
		s := c.members[0].server.sessions.of(old)
		s.mu.Lock()
		begun := s.sequence == old.Sequence
		s.mu.Unlock()
		if begun {
			break
		}
		time.Sleep(time.Millisecond)
	}
	began := time.Now()
	newer := a.request(200)
	go a.service.Sync(context.Background(), newer)
	if answer := <-held; !answer.Unchanged || time.Since(began) > 150*time.Millisecond {
		t.Errorf("the older hold ended after %s with %v", time.Since(began), answer)
	}
	old.Holds = nil // it would bring everything if it counted
	began = time.Now()
	answer, err := a.service.Sync(t.Context(), old)
	if err != nil || !answer.Unchanged || len(answer.Desired) != 0 || answer.Grant != nil || time.Since(began) > 150*time.Millisecond {
		t.Errorf("an older Sync: %v, %v, after %s", answer, err, time.Since(began))
	}
}

func TestStrangersMustJoinAgain(t *testing.T) {
	c := newCluster(t, 1)
	a := c.syncer("n1", c.members[0])
	for name, change := range map[string]func(*nodev1.SyncRequest){
		"older epoch":  func(r *nodev1.SyncRequest) { r.Epoch-- },
		"another life": func(r *nodev1.SyncRequest) { r.Instance = &apiv1.Instance{BootId: "boot-n1", Nonce: "clone"} },
		"another boot": func(r *nodev1.SyncRequest) { r.Instance = &apiv1.Instance{BootId: "x", Nonce: "nonce-n1"} },
		"unknown node": func(r *nodev1.SyncRequest) { r.Node = 99 },
		"no instance":  func(r *nodev1.SyncRequest) { r.Instance = nil },
	} {
		request := a.request(500)
		change(request)
		began := time.Now()
		answer, err := a.service.Sync(t.Context(), request)
		if err != nil || !answer.Rejoin || len(answer.Desired) != 0 || answer.Grant != nil || time.Since(began) > 300*time.Millisecond {
			t.Errorf("%s: %v, %v", name, answer, err)
		}
	}
	a.settle()
	time.AfterFunc(50*time.Millisecond, func() {
		c.apply(memberPrincipal, &logv1.Command{DecidedInTerm: c.term, Op: &logv1.Command_LoseNode{LoseNode: &logv1.LoseNode{
			Node: a.node, Epoch: a.epoch, Sentence: "silent"}}})
	})
	if answer := a.send(a.request(900)); !answer.Rejoin || answer.Grant != nil {
		t.Errorf("a lost node: %v", answer)
	}
}

func TestReportsAreAcknowledgedWhenCommitted(t *testing.T) {
	c := newCluster(t, 2)
	a := c.syncer("n1", c.members[1])
	id := submitOne(t, c.user(1000, "alice"), "a")
	fence := c.place(id, a.node)
	a.settle()
	report := func(journal uint64) []*logv1.TaskReport {
		return []*logv1.TaskReport{{JournalId: journal, JobId: id, Fence: fence, Event: &logv1.TaskReport_PrepareFailed{
			PrepareFailed: &logv1.PrepareFailed{Sentence: "no such directory", UsersFault: true}}}}
	}
	request := a.request(900)
	request.Reports = report(17)
	answer := a.send(request)
	if answer.Acknowledged != 17 {
		t.Errorf("acknowledged %d", answer.Acknowledged)
	}
	if attempt := c.members[0].View().Attempt(id, 1); attempt.State != apiv1.AttemptState_ATTEMPT_STATE_ENDING {
		t.Errorf("attempt %v", attempt)
	}
	if len(answer.Desired) != 1 || answer.Desired[0].Want != nodev1.WorkState_WORK_STATE_ENDED {
		t.Errorf("the answer does not show the effect: %v", answer)
	}
	c.elect(nil)
	request = a.request(900)
	request.Reports = report(18)
	began := time.Now()
	if answer := a.send(request); answer.Acknowledged != 0 || answer.Grant != nil && answer.Grant.Sequence == request.Sequence {
		t.Errorf("without a leader: %v", answer)
	}
	if took := time.Since(began); took > 2*time.Second {
		t.Errorf("without a leader it took %s", took)
	}
}

func TestNoGrantWithoutACommittedAndAppliedEntry(t *testing.T) {
	for _, fault := range []bool{false, true} {
		t.Run(fmt.Sprintf("planted=%t", fault), func(t *testing.T) {
			c := newCluster(t, 2, Faults{GrantUncommitted: fault})
			a := c.syncer("n1", c.members[1])
			a.send(a.request(0))
			c.members[1].lag(true) // the leader commits, this controller does not apply
			for range 3 {
				a.send(a.request(100))
			}
			// The beat of the first Sync may have been applied before the lag began; what follows may not.
			if got := a.granted > 1; got != fault {
				t.Errorf("granted up to sequence %d", a.granted)
			}
		})
	}
}

func TestRefusedBeatsGetNoGrant(t *testing.T) {
	c := newCluster(t, 2)
	a := c.syncer("n1", c.members[1])
	c.members[0].control.refuse[a.node] = true
	for range 3 {
		if answer := a.send(a.request(50)); answer.Grant != nil {
			t.Errorf("granted %v", answer.Grant)
		}
	}
}

func TestLeaderThatDoesNotAnswerGrantsNothingAndTheNextOneDoes(t *testing.T) {
	c := newCluster(t, 3)
	a := c.syncer("n1", c.members[1])
	block := make(chan struct{})
	defer close(block)
	c.members[0].control.mu.Lock()
	c.members[0].control.block = block
	c.members[0].control.mu.Unlock()
	for range 2 {
		if answer := a.send(a.request(50)); answer.Grant != nil {
			t.Errorf("granted %v", answer.Grant)
		}
	}
	c.elect(c.members[2])
	a.settle()
}

func TestBeatsTravelInBatches(t *testing.T) {
	c := newCluster(t, 2)
	block := make(chan struct{})
	leader := c.members[0].control
	leader.mu.Lock()
	leader.block = block
	leader.mu.Unlock()
	batcher := c.members[1].server.liveness
	for i := range 100 {
		request := &nodev1.SyncRequest{Node: uint32(i%50 + 1), Sequence: uint64(i + 1), Instance: &apiv1.Instance{}}
		batcher.add(request, c.members[1].server.sessions.of(request))
	}
	close(block)
	deadline := time.Now().Add(5 * time.Second)
	for {
		batcher.mu.Lock()
		idle := batcher.inFlight == 0
		batcher.mu.Unlock()
		if idle {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the batches do not end")
		}
		time.Sleep(time.Millisecond)
	}
	beats, batches := leader.seen()
	newest := map[uint32]uint64{}
	for _, b := range beats {
		newest[b.Node] = max(newest[b.Node], b.Sequence)
	}
	for n := uint32(1); n <= 50; n++ {
		if newest[n] != uint64(n)+50 {
			t.Errorf("node %d: newest beat %d", n, newest[n])
		}
	}
	if batches > 5 {
		t.Errorf("%d batches", batches)
	}
}

func TestReadinessDoesNotWaitForTheBatchBefore(t *testing.T) {
	c := newCluster(t, 2)
	block := make(chan struct{})
	defer close(block)
	leader := c.members[0].control
	leader.mu.Lock()
	leader.block = block
	leader.mu.Unlock()
	server := c.members[1].server
	plain := &nodev1.SyncRequest{Node: 1, Sequence: 1, Instance: &apiv1.Instance{},
		Actual: []*nodev1.ActualAttempt{{JobId: 5, State: nodev1.WorkState_WORK_STATE_RUNNING}}}
	ready := &nodev1.SyncRequest{Node: 2, Sequence: 1, Instance: &apiv1.Instance{},
		Actual: []*nodev1.ActualAttempt{{JobId: 7, State: nodev1.WorkState_WORK_STATE_PREPARED}}}
	server.liveness.add(plain, server.sessions.of(plain))
	server.liveness.add(ready, server.sessions.of(ready))
	deadline := time.Now().Add(5 * time.Second)
	for {
		beats, _ := leader.seen()
		if len(beats) == 2 {
			for _, b := range beats {
				if b.Node == 1 && len(b.Actual) != 0 || b.Node == 2 && len(b.Actual) != 1 {
					t.Errorf("beat %v", b)
				}
			}
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d beats have arrived while the first batch is on its way", len(beats))
		}
		time.Sleep(time.Millisecond)
	}
}

func TestDrainingEndsHolds(t *testing.T) {
	c := newCluster(t, 1)
	a := c.syncer("n1", c.members[0])
	a.settle()
	time.AfterFunc(50*time.Millisecond, c.members[0].server.Drain)
	began := time.Now()
	_, err := a.service.Sync(t.Context(), a.request(900))
	if rpc.Reason(err) != rpc.ReasonShuttingDown || time.Since(began) > 500*time.Millisecond {
		t.Errorf("%v after %s", err, time.Since(began))
	}
}
