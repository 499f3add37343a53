package control

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/muster-hpc/muster/fsm/replica"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	peerv1 "github.com/muster-hpc/muster/proto/muster/peer/v1"
)

func TestAGangStartsOnlyWhenEveryNodeIsPrepared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil, Faults{})
		defer r.end()
		agents := r.cluster(3)
		agents[2].lazy.Store(true)
		id := r.submit(spec(3))
		r.eventually(3*time.Millisecond, "placed", func() bool { return r.log.View().Attempt(id, 1) != nil })
		time.Sleep(30 * time.Second)
		synctest.Wait()
		if r.running(id)() {
			t.Fatal("started though n3 is not prepared")
		}
		agents[2].lazy.Store(false)
		r.eventually(5*time.Second, "started", r.running(id))
		a := r.log.View().Attempt(id, 1)
		if len(a.Prepared) != 3 || a.Prepared[0].Port != 29500 || a.Prepared[2].Address != "n3" {
			t.Errorf("prepared %v", a.Prepared)
		}
	})
}

// The planted bug is seen: without the barrier the gang starts though a node never gets ready.
func TestStartingUnpreparedWouldBeSeen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil, Faults{StartUnprepared: true})
		defer r.end()
		r.cluster(2)[1].lazy.Store(true)
		id := r.submit(spec(2))
		r.eventually(time.Second, "the bug starts it", r.running(id))
	})
}

func TestALaunchThatNeverGetsReadyEndsWithTheNodesNamesAndWithoutAHotLoop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil, Faults{})
		defer r.end()
		agents := r.cluster(2)
		agents[1].lazy.Store(true)
		id := r.submit(spec(2))
		r.eventually(61*time.Second, "given up", func() bool {
			a := r.log.View().Attempt(id, 1)
			return a.GetState() == apiv1.AttemptState_ATTEMPT_STATE_ENDING
		})
		a := r.log.View().Attempt(id, 1)
		if a.Failure != apiv1.FailureClass_FAILURE_CLASS_LAUNCH || a.FaultNode != "n2" || !strings.Contains(a.EndSentence, "node n2 did not get ready within 1m0s") {
			t.Errorf("attempt %v", a)
		}
		time.Sleep(10 * time.Minute)
		for _, cmd := range []any{&logv1.Command_Place{}, &logv1.Command_EndAttempt{}} {
			if n := r.log.count(cmd); n > 5 {
				t.Errorf("%d proposals of %T", n, cmd)
			}
		}
		if n := r.log.count(&logv1.Command_ExplainJobs{}); n > 20 {
			t.Errorf("%d explanations of one job", n)
		}
	})
}

func TestAStalePlacementIsTriedAgainWithBackOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil, Faults{})
		defer r.end()
		r.cluster(1)
		refusals := 0
		r.log.mu.Lock()
		r.log.before = func(cmd *logv1.Command) *apiv1.ErrorDetail {
			if cmd.GetPlace() != nil && refusals < 6 {
				refusals++
				return &apiv1.ErrorDetail{Reason: "CPUS_TAKEN", Sentence: "stale"}
			}
			return nil
		}
		r.log.mu.Unlock()
		id := r.submit(spec(1))
		took := r.eventually(10*time.Second, "started", r.running(id))
		// 20+40+80+160+320+640 ms of back-off.
		if refusals != 6 || took < 1200*time.Millisecond || r.log.count(&logv1.Command_Place{}) != 7 {
			t.Errorf("%d refusals, %v, %d placements", refusals, took, r.log.count(&logv1.Command_Place{}))
		}
	})
}

func TestALeaderChangeAmidTheBarrierGoesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil, Faults{})
		defer r.end()
		agents := r.cluster(2)
		agents[1].lazy.Store(true)
		id := r.submit(spec(2))
		r.eventually(time.Second, "placed", func() bool { return r.log.View().Attempt(id, 1) != nil })
		r.depose()
		if _, err := r.control.ReportLiveness(t.Context(), nil); !errors.Is(err, ErrNotLeading) {
			t.Fatalf("a deposed leader answers %v", err)
		}
		agents[1].lazy.Store(false)
		r.lead()
		r.eventually(4*time.Second, "started by the next leader", r.running(id))
		if a := r.log.View().Attempt(id, 1); a.Fence.Placement != 1 || r.job(id).Status.Attempt != 1 {
			t.Errorf("%v", a)
		}
	})
}

func TestNoGrantBeforeACommitThatFollows(t *testing.T) {
	for _, planted := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, nil, Faults{GrantWithoutCommit: planted})
			defer r.end()
			a := r.cluster(1)[0]
			time.Sleep(time.Second)
			a.stop()
			hold := make(chan struct{})
			r.log.mu.Lock()
			r.log.paused = hold
			r.log.mu.Unlock()
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			answered := make(chan error, 1)
			var response *peerv1.ReportLivenessResponse
			before := r.log.View().Revision().Index
			go func() {
				var err error
				response, err = r.control.ReportLiveness(ctx, []*peerv1.Beat{{Node: a.number, Epoch: a.epoch, Instance: a.instance, Sequence: 99}})
				answered <- err
			}()
			time.Sleep(20 * time.Second)
			early := len(answered) > 0
			if early != planted {
				t.Fatalf("answered without a commit: %v, planted: %v", early, planted)
			}
			close(hold)
			if err := <-answered; err != nil {
				t.Fatal(err)
			}
			if !planted && (response.Index <= before || response.Term != 1) {
				t.Errorf("answered with index %d, before it was %d", response.Index, before)
			}
			if n := r.log.count(&logv1.Command_Tick{}); n > 10 {
				t.Errorf("%d ticks", n)
			}
		})
	}
}

// An entry that was proposed before the batch came in does not acknowledge it.
func TestAnEntryFromBeforeDoesNotAcknowledge(t *testing.T) {
	var c commits
	c.wake = newSignal()
	cut := c.cut()
	done := c.wait(time.Time{})
	c.done(cut, 7)
	select {
	case index := <-done:
		t.Fatalf("acknowledged by entry %d", index)
	default:
	}
	c.done(c.cut(), 8)
	if index := <-done; index != 8 {
		t.Fatal(index)
	}
}

func TestAnIdleClusterOfAnySizeWritesFewEntriesAndLosesNoLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil, Faults{})
		defer r.end()
		agents := r.cluster(60)
		time.Sleep(10 * time.Second)
		before := r.log.count(&logv1.Command_Tick{})
		longest := time.Duration(0)
		for range 300 {
			time.Sleep(100 * time.Millisecond)
			r.control.reign.nodes.mu.Lock()
			for _, x := range r.control.reign.nodes.lives {
				longest = max(longest, time.Since(x.granted))
			}
			r.control.reign.nodes.mu.Unlock()
		}
		// Two a second, and the marks at which digests are compared.
		if n := r.log.count(&logv1.Command_Tick{}) - before; n > 30*2+5 {
			t.Errorf("%d entries in 30 s", n)
		}
		// The agents send a Sync 3 s after the answer to the last.
		if most := 3*time.Second + 2*patienceMost + 200*time.Millisecond; longest > most {
			t.Errorf("a grant was %v old; at most %v is meant", longest, most)
		}
		if n := r.control.Status().OverdueNodes; n > 0 {
			t.Errorf("%d of %d nodes are overdue", n, len(agents))
		}
	})
}

func TestAnAgentWithoutALeaseIsNotKeptWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil, Faults{})
		defer r.end()
		r.cluster(3)
		time.Sleep(time.Second)
		answerTime := func(b *peerv1.Beat) time.Duration {
			began := time.Now()
			if _, err := r.control.ReportLiveness(t.Context(), []*peerv1.Beat{b}); err != nil {
				t.Fatal(err)
			}
			return time.Since(began)
		}
		a, err := r.join("n4", "boot", "new")
		if err != nil {
			t.Fatal(err)
		}
		a.stop()
		beat := func(sequence, grant uint64) *peerv1.Beat {
			return &peerv1.Beat{Node: a.number, Epoch: a.epoch, Instance: a.instance, Sequence: sequence, LastGrant: grant}
		}
		if d := answerTime(beat(11, 0)); d > 2*commitTime {
			t.Errorf("the first grant took %v", d)
		}
		if d := answerTime(beat(12, 11)); d < 2*commitTime || d > patienceMost+2*commitTime {
			t.Errorf("the second grant took %v: it can wait for others, but not longer than %v", d, patienceMost)
		}
		preparing := beat(13, 12)
		preparing.Actual = []*nodev1.ActualAttempt{{JobId: 1, State: nodev1.WorkState_WORK_STATE_PREPARING, Fence: &apiv1.Fence{}}}
		if d := answerTime(preparing); d > 2*commitTime {
			t.Errorf("one that prepares waited %v", d)
		}
		time.Sleep(6 * time.Second)
		if d := answerTime(beat(14, 13)); d > 2*commitTime {
			t.Errorf("one that missed a renewal waited %v", d)
		}
	})
}

func TestASilentNodeIsLostAfterAMinuteAndFencedOnlyForJobsThatStopThemselves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil, Faults{})
		defer r.end()
		agents := r.cluster(5)
		optedIn, other := spec(1), spec(1)
		optedIn.AutomaticRecovery = true
		optedIn.Resources.GpusPerNode, other.Resources.GpusPerNode = 4, 4
		a, b := r.submit(optedIn), r.submit(other)
		r.eventually(10*time.Second, "both run", func() bool { return r.running(a)() && r.running(b)() })
		if list := r.job(a).Status.NodeList + r.job(b).Status.NodeList; list != "n1n1" {
			t.Fatalf("placed on %s", list)
		}
		agents[0].stop()
		heard := time.Now()
		time.Sleep(11 * time.Second)
		c := spec(1)
		c.Resources.GpusPerNode = 1
		d := r.submit(c)
		r.eventually(5*time.Second, "another runs", r.running(d))
		if list := r.job(d).Status.NodeList; list == "n1" {
			t.Errorf("placed on a silent node: %s", list)
		}
		r.eventually(52*time.Second, "n1 lost", r.down("n1"))
		if took := time.Since(heard); took < 57*time.Second || took > 62*time.Second {
			t.Errorf("lost after %v", took)
		}
		r.eventually(time.Second, "the one that stops itself runs elsewhere", func() bool { return r.job(a).Status.Attempt == 2 })
		time.Sleep(5 * time.Minute)
		if s := r.job(b).Status; s.Attempt != 1 || s.State != apiv1.JobState_JOB_STATE_RUNNING || s.Completing {
			t.Errorf("the other did not opt in: absence of information must not end it: %v", s)
		}
	})
}

func TestFortyPercentSilentLosesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil, Faults{})
		defer r.end()
		agents := r.cluster(10)
		time.Sleep(5 * time.Second)
		for _, a := range agents[:3] {
			a.stop()
		}
		agents[3].deaf.Store(true) // It is heard, but does not get its grants.
		time.Sleep(10 * time.Minute)
		for n := range r.log.View().Nodes() {
			if n.State != apiv1.NodeState_NODE_STATE_UP {
				t.Errorf("node %s lost", n.Spec.Name)
			}
		}
		s := r.control.Status()
		if s.OverdueNodes != 4 || len(s.Alarms) != 1 || !strings.Contains(s.Alarms[0], "4 of 10 nodes are overdue") {
			t.Errorf("status %v", s)
		}
		agents[3].deaf.Store(false)
		if _, err := r.join("n1", "boot2", "new"); err != nil {
			t.Fatal(err)
		}
		r.eventually(2*time.Minute, "two silent are lost", func() bool { return r.down("n2")() && r.down("n3")() })
		if len(r.control.Status().Alarms) != 0 {
			t.Errorf("status %v", r.control.Status())
		}
	})
}

func TestLostNodesCountWhileNobodyProvedThemDead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil, Faults{})
		defer r.end()
		agents := r.cluster(5)
		root := &apiv1.Principal{Kind: apiv1.PrincipalKind_PRINCIPAL_KIND_USER, Name: "root"}
		// That an operator drained it before proves nothing.
		r.must(&logv1.Command{Principal: root, Op: &logv1.Command_UpdateNodes{UpdateNodes: &logv1.UpdateNodes{Request: &apiv1.UpdateNodesRequest{
			Names: []string{"n1"}, Change: &apiv1.UpdateNodesRequest_Drain{Drain: true}, Reason: "new fans"}}}})
		agents[0].stop()
		r.eventually(2*time.Minute, "n1 lost", r.down("n1"))
		if n := r.control.Status().OverdueNodes; n != 1 {
			t.Fatalf("%d nodes overdue; n1 may be alive", n)
		}
		agents[1].stop()
		time.Sleep(5 * time.Minute)
		if r.down("n2")() {
			t.Fatal("a second node was declared lost: 2 of 5 are more than 20 %")
		}
		r.must(&logv1.Command{Principal: root, Op: &logv1.Command_UpdateNodes{UpdateNodes: &logv1.UpdateNodes{Request: &apiv1.UpdateNodesRequest{
			Names: []string{"n1"}, Change: &apiv1.UpdateNodesRequest_Down{Down: true}, Reason: "burnt"}}}})
		r.eventually(time.Second, "n2 lost once n1 is asserted dead", r.down("n2"))
	})
}

func TestANewLeaderStartsEveryLeaseAfresh(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil, Faults{})
		defer r.end()
		r.cluster(6)[0].stop()
		time.Sleep(55 * time.Second)
		r.depose()
		r.lead()
		time.Sleep(55 * time.Second)
		if r.down("n1")() {
			t.Fatal("lost before a whole minute of the new term")
		}
		r.eventually(6*time.Second, "n1 lost", r.down("n1"))
	})
}

func TestASecondInstanceIsRefusedUntilTheFirstIsSilent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil, Faults{})
		defer r.end()
		first := r.cluster(4)[0]
		time.Sleep(20 * time.Second)
		for _, boot := range []string{"boot", "other"} {
			_, err := r.join("n1", boot, "clone")
			var refused *RefusedError
			if !errors.As(err, &refused) || refused.Detail.Reason != "NODE_NAME_TAKEN" || !strings.Contains(refused.Detail.Sentence, "another agent joined as node n1") {
				t.Fatalf("boot %s: %v", boot, err)
			}
		}
		if _, err := r.control.JoinNode(t.Context(), &peerv1.JoinNodeRequest{CertificateName: "n2"}); err == nil {
			t.Error("joined with another's certificate")
		}
		first.stop()
		time.Sleep(5500 * time.Millisecond)
		if _, err := r.join("n1", "boot", "clone"); err == nil {
			t.Fatal("the same boot took over before the lease ended")
		}
		if _, err := r.join("n1", "other", "rebooted"); err != nil {
			t.Fatalf("a reboot is let in once the old one is overdue: %v", err)
		}
		if n := r.log.View().NodeByName("n1"); n.Epoch != 2 {
			t.Errorf("epoch %d", n.Epoch)
		}
		response, err := r.control.ReportLiveness(t.Context(), []*peerv1.Beat{{Node: first.number, Epoch: 1, Instance: first.instance, Sequence: 1000}})
		if err != nil || !slices.Equal(response.Refused, []uint32{first.number}) {
			t.Errorf("the first instance is answered %v, %v", response, err)
		}
	})
}

func TestReasonsReachTheState(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil, Faults{})
		defer r.end()
		r.cluster(2)
		first, blocked, behind := r.submit(spec(1)), r.submit(spec(2)), r.submit(spec(2))
		r.eventually(5*time.Second, "the first runs", r.running(first))
		r.eventually(5*time.Second, "reasons", func() bool {
			return r.job(behind).Status.Reason == apiv1.WaitReason_WAIT_REASON_PRIORITY
		})
		s := r.job(blocked).Status
		if s.Reason != apiv1.WaitReason_WAIT_REASON_RESOURCES || s.Sentence != "needs 2 nodes with 8 free GPUs in partition main; 1 is free now" {
			t.Errorf("%v %q", s.Reason, s.Sentence)
		}
		before := r.log.count(&logv1.Command_ExplainJobs{})
		time.Sleep(time.Minute)
		if n := r.log.count(&logv1.Command_ExplainJobs{}); n != before {
			t.Errorf("%d explanations while nothing changed", n-before)
		}
	})
}

func TestBeginTimeWakesThePlanner(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil, Faults{})
		defer r.end()
		r.cluster(1)
		s := spec(1)
		at := time.Now().Add(30 * time.Second)
		s.BeginTime = stamp(at)
		id := r.submit(s)
		r.eventually(time.Minute, "started", r.running(id))
		if late := time.Since(at); late < 0 || late > 4*time.Second {
			t.Errorf("started %v after its begin time", late)
		}
	})
}

// A thousand jobs of one task flow through four nodes.
func TestManySmallJobsArePlacedInFewPasses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil, Faults{})
		defer r.end()
		r.cluster(4)
		s := spec(1)
		s.Resources = &apiv1.ResourceRequest{Ntasks: 1}
		for range 300 {
			r.submit(s)
		}
		r.eventually(10*time.Second, "256 placed", func() bool { return r.control.Status().Placed == 256 })
	})
}

func TestFinishedJobsLeaveAfterTheirTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, &apiv1.Settings{FinishedJobRetentionS: 600}, Faults{})
		defer r.end()
		id, kept := r.submit(spec(1)), r.submit(spec(1))
		r.must(&logv1.Command{Principal: &apiv1.Principal{Kind: apiv1.PrincipalKind_PRINCIPAL_KIND_USER, Name: "root"},
			Op: &logv1.Command_CancelJobs{CancelJobs: &logv1.CancelJobs{JobIds: []uint32{id}}}})
		time.Sleep(9 * time.Minute)
		if r.job(id) == nil {
			t.Fatal("removed too early")
		}
		r.eventually(2*time.Minute, "removed", func() bool { return r.job(id) == nil })
		if r.job(kept) == nil {
			t.Fatal("a waiting job was removed")
		}
		time.Sleep(10 * time.Minute)
		if n := r.log.count(&logv1.Command_Prune{}); n > 2 {
			t.Errorf("%d prunes", n)
		}
	})
}

func TestTheMajorityOfDigestsIsRight(t *testing.T) {
	voters := map[string]bool{"a": true, "b": true, "c": true, "l": false}
	for _, c := range []struct {
		found     map[string]uint64
		wrong     []string
		undecided bool
	}{
		{map[string]uint64{"a": 1, "b": 1, "c": 1, "l": 1}, nil, false},
		{map[string]uint64{"a": 1, "b": 1, "c": 2, "l": 3}, []string{"c", "l"}, false},
		{map[string]uint64{"a": 2, "b": 1, "c": 1}, []string{"a"}, false},
		{map[string]uint64{"a": 1, "b": 2}, nil, true},
		{map[string]uint64{"a": 1, "b": 2, "c": 3}, nil, true},
		{map[string]uint64{"a": 1, "l": 2}, nil, false},
		{map[string]uint64{}, nil, false},
	} {
		if j := judge(c.found, voters); !slices.Equal(j.wrong, c.wrong) || j.undecided != c.undecided {
			t.Errorf("%v: %+v", c.found, j)
		}
	}
}

type fakePeers struct {
	mu     sync.Mutex
	digest map[string]uint64
	told   []string
}

func (p *fakePeers) heard() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.told)
}

func (p *fakePeers) answer(id string, digest uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.digest[id] = digest
}

func (p *fakePeers) Digest(_ context.Context, id string, _ uint64) (*peerv1.DigestResponse, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if d, ok := p.digest[id]; ok {
		return &peerv1.DigestResponse{Digest: &d}, nil
	}
	return nil, errors.New("does not answer")
}

func (p *fakePeers) Quarantine(_ context.Context, id string, q *peerv1.QuarantineRequest) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.told = append(p.told, fmt.Sprintf("%s %d", id, q.Digest))
	return nil
}

func TestDigestsWithoutAMajorityBlockEveryDecision(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil, Faults{})
		defer r.end()
		r.cluster(1)
		r.log.mu.Lock()
		r.log.servers = []replica.Server{{ID: "c1", Voter: true}, {ID: "c2", Voter: true}, {ID: "c3", Voter: true}}
		r.log.mu.Unlock()
		r.depose()
		peers := &fakePeers{digest: map[string]uint64{"c2": 7}}
		var mu sync.Mutex
		var said []string
		r.control.cfg.Peers = peers
		r.control.cfg.Block = func(sentence string) {
			mu.Lock()
			defer mu.Unlock()
			said = append(said, sentence)
		}
		r.lead()
		r.eventually(30*time.Second, "blocked", func() bool { return len(r.control.Status().Alarms) == 1 })
		places := r.log.count(&logv1.Command_Place{})
		id := r.submit(spec(1))
		time.Sleep(30 * time.Second)
		if r.log.count(&logv1.Command_Place{}) != places {
			t.Error("placed while the states differ")
		}
		if _, err := r.control.JoinNode(t.Context(), &peerv1.JoinNodeRequest{}); err == nil {
			t.Error("joined while the states differ")
		}
		peers.answer("c3", 7)
		r.eventually(30*time.Second, "the majority decides", func() bool { return r.log.reason() != "" })
		mu.Lock()
		defer mu.Unlock()
		if !strings.Contains(said[0], "no majority agrees") || said[len(said)-1] != "" {
			t.Errorf("said %q", said)
		}
		if r.job(id).Status.State != apiv1.JobState_JOB_STATE_PENDING {
			t.Error("placed by a leader whose state is wrong")
		}
	})
}

func TestAMemberThatDiffersIsQuarantined(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil, Faults{})
		defer r.end()
		r.depose()
		r.log.servers = []replica.Server{{ID: "c1", Voter: true}, {ID: "c2", Voter: true}, {ID: "c3", Voter: true}}
		peers := &mirrorPeers{log: r.log, wrong: "c3"}
		r.control.cfg.Peers = peers
		r.lead()
		r.eventually(30*time.Second, "told", func() bool { return len(peers.fake.heard()) > 0 })
		if !strings.HasPrefix(peers.fake.heard()[0], "c3 ") || r.log.reason() != "" {
			t.Errorf("told %v, self %q", peers.fake.heard(), r.log.reason())
		}
	})
}

// mirrorPeers have the leader's digests, but for one.
type mirrorPeers struct {
	log   *fakeLog
	wrong string
	fake  fakePeers
}

func (p *mirrorPeers) Digest(_ context.Context, id string, index uint64) (*peerv1.DigestResponse, error) {
	d, ok := p.log.DigestAt(index)
	if !ok {
		return &peerv1.DigestResponse{}, nil
	}
	if id == p.wrong {
		d++
	}
	return &peerv1.DigestResponse{Digest: &d}, nil
}

func (p *mirrorPeers) Quarantine(ctx context.Context, id string, q *peerv1.QuarantineRequest) error {
	return p.fake.Quarantine(ctx, id, q)
}

func TestAMemberThatRejoinedVotesAndItsFormerSelfIsRemoved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil, Faults{})
		defer r.end()
		for id, name := range map[string]string{"c1": "c1", "old": "c2", "new": "c2", "c3": "c3"} {
			r.must(&logv1.Command{Principal: &apiv1.Principal{Kind: apiv1.PrincipalKind_PRINCIPAL_KIND_MEMBER, Name: name},
				Op: &logv1.Command_AnnounceMember{AnnounceMember: &logv1.AnnounceMember{Member: &apiv1.Member{Id: id, Name: name, SupportedLevel: 2, RaftAddress: "x:1", ApiAddress: "x:2"}}}})
		}
		r.log.mu.Lock()
		r.log.servers = []replica.Server{
			{ID: "c1", Voter: true}, {ID: "old", Voter: true, LastContact: time.Minute}, {ID: "c3", Voter: true, LastContact: time.Minute},
			{ID: "new", LastContact: time.Millisecond}, {ID: "stranger", LastContact: time.Millisecond},
		}
		r.log.mu.Unlock()
		r.eventually(10*time.Second, "removed", func() bool { return len(r.log.Servers()) == 4 })
		time.Sleep(time.Minute)
		r.log.mu.Lock()
		defer r.log.mu.Unlock()
		if !slices.Equal(r.log.promoted, []string{"new"}) || !slices.Equal(r.log.removed, []string{"old"}) {
			t.Errorf("promoted %v, removed %v", r.log.promoted, r.log.removed)
		}
		if r.log.view.Member("old") != nil {
			t.Error("the former self is still known")
		}
	})
}
