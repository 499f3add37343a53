package server

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect/v2"
	"google.golang.org/protobuf/proto"

	"github.com/muster-hpc/muster/fsm"
	"github.com/muster-hpc/muster/ops/pki"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
	"github.com/muster-hpc/muster/rpc"
	"github.com/muster-hpc/muster/rpc/client"
)

func jobNames(c *cluster) map[string]int {
	names := map[string]int{}
	for job := range c.members[0].View().Jobs(0) {
		names[job.Spec.Name]++
	}
	return names
}

func TestFollowerPassesWritesOn(t *testing.T) {
	c := newCluster(t, 3)
	id := submitOne(t, c.user(1000, "alice", c.members[1]), "a")
	job := c.members[0].View().Job(id)
	if job == nil || job.Owner.Uid != 1000 || job.Owner.User != "alice" || job.Owner.Gid != 100 {
		t.Fatalf("job %v", job)
	}
}

func TestLostAnswersDoNotDoubleAJob(t *testing.T) {
	c := newCluster(t, 3)
	for i, at := range []*fakeReplica{c.members[0], c.members[1]} {
		c.members[0].loseAnswer.Store(3)
		submitOne(t, c.user(1000, "alice", at), fmt.Sprintf("job%d", i))
	}
	for name, n := range jobNames(c) {
		if n != 1 {
			t.Errorf("%s exists %d times", name, n)
		}
	}
	if len(jobNames(c)) != 2 {
		t.Errorf("jobs: %v", jobNames(c))
	}
}

func TestWriteWithoutRequestIDIsNotRepeated(t *testing.T) {
	c := newCluster(t, 1)
	for c.members[0].View().Member(c.members[0].ID()) == nil { // what it proposes by itself comes first
		changed := c.members[0].Changed()
		if c.members[0].View().Member(c.members[0].ID()) == nil {
			<-changed
		}
	}
	c.members[0].loseAnswer.Store(1)
	before := c.members[0].proposals.Load()
	_, err := c.members[0].server.propose(t.Context(), &logv1.Command{Principal: memberPrincipal,
		Op: &logv1.Command_CancelJobs{CancelJobs: &logv1.CancelJobs{JobIds: []uint32{1}}}}, false)
	if rpc.Reason(err) != rpc.ReasonOutcomeUnknown || c.members[0].proposals.Load() != before+1 {
		t.Errorf("%v after %d proposals", err, c.members[0].proposals.Load()-before)
	}
}

func TestElectionIsWaitedOutByWritesAndReads(t *testing.T) {
	c := newCluster(t, 3)
	c.elect(nil)
	alice := c.user(1000, "alice", c.members[1])
	var group sync.WaitGroup
	for i := range 4 {
		group.Go(func() {
			if i%2 == 0 {
				submitOne(t, alice, fmt.Sprintf("w%d", i))
			} else if _, err := alice.Jobs().ListJobs(t.Context(), &apiv1.ListJobsRequest{}); err != nil {
				t.Errorf("read: %v", err)
			}
		})
	}
	time.AfterFunc(100*time.Millisecond, func() { c.elect(c.members[2]) })
	group.Wait()
	if len(jobNames(c)) != 2 {
		t.Errorf("jobs: %v", jobNames(c))
	}
}

func TestForwardToAPausedLeaderIsAbandonedForTheNext(t *testing.T) {
	c := newCluster(t, 3)
	c.members[0].paused.Store(true)
	done := make(chan uint32)
	go func() { done <- submitOne(t, c.user(1000, "alice", c.members[1]), "a") }()
	time.AfterFunc(100*time.Millisecond, func() { c.elect(c.members[2]) })
	began := time.Now()
	select {
	case <-done:
	case <-time.After(5 * time.Second):
		t.Fatal("the follower still waits for the paused leader")
	}
	if took := time.Since(began); took > time.Second {
		t.Errorf("took %s", took)
	}
	if jobNames(c)["a"] != 1 {
		t.Errorf("jobs: %v", jobNames(c))
	}
}

func TestWithoutALeaderTheDeadlineIsExplained(t *testing.T) {
	c := newCluster(t, 3)
	c.elect(nil)
	ctx, cancel := context.WithTimeout(t.Context(), 150*time.Millisecond)
	defer cancel()
	_, err := c.members[1].server.propose(ctx, &logv1.Command{RequestId: client.NewRequestID(), Principal: memberPrincipal,
		Op: &logv1.Command_CancelJobs{}}, false)
	if rpc.Reason(err) != rpc.ReasonNoLeader || !strings.Contains(rpc.Sentence(err), "quorum") {
		t.Errorf("got %v", err)
	}
}

func TestTransferFailsNoCall(t *testing.T) {
	c := newCluster(t, 3)
	alice := c.user(1000, "alice")
	stop := make(chan struct{})
	var group sync.WaitGroup
	total := 0
	group.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				total = i
				return
			default:
				submitOne(t, alice, fmt.Sprintf("j%d", i))
			}
		}
	})
	for range 10 {
		for _, r := range c.members {
			if r.Leader().IsSelf {
				if err := r.server.TransferLeadership(t.Context()); err != nil {
					t.Error(err)
				}
				break
			}
		}
		before := c.members[0].View().Revision().GetIndex()
		if _, err := c.members[0].WaitIndex(t.Context(), before+3); err != nil { // let calls meet each leader
			t.Error(err)
		}
	}
	close(stop)
	group.Wait()
	if got := len(jobNames(c)); got != total || total == 0 {
		t.Errorf("%d jobs were acknowledged, %d exist", total, got)
	}
}

func TestRequestIDsAreChecked(t *testing.T) {
	good := client.NewRequestID()
	for id, ok := range map[string]bool{
		good: true, "": false, strings.ToUpper(good): strings.ToUpper(good) == good, good + "0": false,
		"00000000-0000-4000-8000-000000000000": false, strings.ReplaceAll(good, "-", ""): false, "zz" + good[2:]: false,
	} {
		if err := checkRequestID(id); (err == nil) != ok {
			t.Errorf("%q: %v", id, err)
		}
	}
}

func TestPartsOfARequestHaveStableDifferentIDs(t *testing.T) {
	id := client.NewRequestID()
	seen := map[string]bool{}
	for part := range 20 {
		p := partID(id, part)
		if err := checkRequestID(p); err != nil || seen[p] || p != partID(id, part) || p[:13] != id[:13] {
			t.Errorf("part %d: %q of %q: %v", part, p, id, err)
		}
		seen[p] = true
	}
	if partID(id, 0) != id {
		t.Error("the first part has another id")
	}
}

func TestLargeScriptIsUploadedInPieces(t *testing.T) {
	c := newCluster(t, 2)
	alice := c.user(1000, "alice", c.members[1])
	script := append([]byte("#!/bin/sh\n"), bytes.Repeat([]byte("# 4 MiB less a little\n"), 180_000)...)
	job := batch("big")
	job.Script = script
	request := &apiv1.SubmitJobsRequest{RequestId: client.NewRequestID(), Jobs: []*apiv1.JobSubmission{job}}
	answer, err := alice.Jobs().SubmitJobs(t.Context(), request)
	if err != nil || answer.Results[0].Refusal != nil {
		t.Fatalf("%v, %v", answer, err)
	}
	stored := c.members[0].View().Job(answer.Results[0].JobId)
	got, err := alice.Cluster().GetBlob(t.Context(), &apiv1.GetBlobRequest{Sha256: stored.Spec.ScriptBlob, JobId: stored.Id})
	if err != nil || !bytes.Equal(got.Data, script) {
		t.Fatalf("%d bytes came back of %d: %v", len(got.GetData()), len(script), err)
	}
	job.Script = bytes.Repeat([]byte("x"), rpc.MaxScriptBytes+1)
	answer, err = alice.Jobs().SubmitJobs(t.Context(), &apiv1.SubmitJobsRequest{RequestId: client.NewRequestID(), Jobs: []*apiv1.JobSubmission{job}})
	if err != nil || answer.Results[0].Refusal.GetReason() != rpc.ReasonTooLarge {
		t.Errorf("5 MB: %v, %v", answer, err)
	}
}

func TestThousandJobsInOneCallExistOnceEachAlsoWhenRepeated(t *testing.T) {
	c := newCluster(t, 1)
	alice := c.user(1000, "alice")
	request := &apiv1.SubmitJobsRequest{RequestId: client.NewRequestID()}
	for i := range 1000 {
		job := batch(fmt.Sprintf("job%d", i))
		job.Spec.Comment = strings.Repeat("c", 500) // so that they need several log entries
		job.Script = []byte("#!/bin/sh\n")
		request.Jobs = append(request.Jobs, job)
	}
	request.Jobs[500].Spec = &apiv1.JobSpec{Name: "bad", Kind: apiv1.JobKind_JOB_KIND_BATCH, WorkDir: "/tmp", Partitions: []string{"nosuch"},
		Resources: &apiv1.ResourceRequest{NodesMin: 1}}
	first, err := alice.Jobs().SubmitJobs(t.Context(), request)
	if err != nil {
		t.Fatal(err)
	}
	second, err := alice.Jobs().SubmitJobs(t.Context(), request)
	if err == nil {
		for i := range first.Results {
			if first.Results[i].JobId != second.Results[i].JobId {
				t.Fatalf("job %d: id %d, then %d", i, first.Results[i].JobId, second.Results[i].JobId)
			}
		}
	} else if rpc.Reason(err) != "ANSWERED_BEFORE" {
		t.Fatal(err)
	}
	names := jobNames(c)
	if len(names) != 999 || names["bad"] != 0 {
		t.Errorf("%d names", len(names))
	}
	if refusal := first.Results[500].Refusal; refusal == nil || !strings.Contains(refusal.Sentence, "nosuch") {
		t.Errorf("the bad one: %v", first.Results[500])
	}
	for i, result := range first.Results {
		if i != 500 && c.members[0].View().Job(result.JobId).GetSpec().GetName() != fmt.Sprintf("job%d", i) {
			t.Fatalf("result %d names job %d, which is another", i, result.JobId)
		}
	}
}

func TestBlobsAreReadByThoseConcernedOnly(t *testing.T) {
	c := newCluster(t, 1)
	n1, _ := c.join("n1")
	c.join("n2")
	alice := c.user(1000, "alice")
	id := submitOne(t, alice, "a")
	bobs := submitOne(t, c.user(2000, "bob"), "b")
	c.place(id, n1)
	request := &apiv1.GetBlobRequest{Sha256: c.members[0].View().Job(id).Spec.ScriptBlob, JobId: id}
	for name, who := range map[string]struct {
		client  *client.Client
		request *apiv1.GetBlobRequest
		ok      bool
	}{
		"owner":                   {alice, request, true},
		"operator":                {c.user(0, "root"), request, true},
		"another user":            {c.user(2000, "bob"), request, false},
		"another user by own job": {c.user(2000, "bob"), &apiv1.GetBlobRequest{Sha256: request.Sha256, JobId: bobs}, false},
		"a node that runs it":     {c.agentOf("n1"), request, true},
		"a node that does not":    {c.agentOf("n2"), request, false},
		"owner without the job":   {alice, &apiv1.GetBlobRequest{Sha256: request.Sha256}, false},
	} {
		_, err := who.client.Cluster().GetBlob(t.Context(), who.request)
		if (err == nil) != who.ok || err != nil && connect.CodeOf(err) != connect.CodePermissionDenied {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestCancelByFilterTouchesOnlyOwnJobs(t *testing.T) {
	c := newCluster(t, 1)
	alice, bob := c.user(1000, "alice"), c.user(2000, "bob")
	a, b := submitOne(t, alice, "same"), submitOne(t, bob, "same")
	cancel := func(who *client.Client, filter *apiv1.JobFilter) (*apiv1.CancelJobsResponse, error) {
		return who.Jobs().CancelJobs(t.Context(), &apiv1.CancelJobsRequest{RequestId: client.NewRequestID(), Filter: filter})
	}
	if _, err := cancel(alice, &apiv1.JobFilter{}); rpc.Reason(err) != "EMPTY_FILTER" {
		t.Errorf("an empty filter: %v", err)
	}
	answer, err := cancel(alice, &apiv1.JobFilter{JobIds: []uint32{b}})
	if err != nil || len(answer.JobIds) != 0 || len(answer.Refusals) != 1 {
		t.Errorf("another's job: %v, %v", answer, err)
	}
	answer, err = cancel(alice, &apiv1.JobFilter{Names: []string{"same"}})
	if err != nil || len(answer.JobIds) != 1 || answer.JobIds[0] != a {
		t.Errorf("by name: %v, %v", answer, err)
	}
	answer, err = cancel(c.user(0, "root"), &apiv1.JobFilter{Names: []string{"same"}})
	if err != nil || len(answer.JobIds) != 1 || answer.JobIds[0] != b {
		t.Errorf("by an operator: %v, %v", answer, err)
	}
}

// hook writes a submission program and configures it.
func (c *cluster) hook(script string) {
	c.t.Helper()
	path := filepath.Join(c.t.TempDir(), "hook")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+script), 0o755); err != nil {
		c.t.Fatal(err)
	}
	config := proto.CloneOf(configuration())
	config.Settings.SubmitHook = path
	c.apply(memberPrincipal, &logv1.Command{Op: &logv1.Command_Configure{Configure: &logv1.Configure{Configuration: config}}})
}

func TestSubmissionProgramMayChangeOrRefuse(t *testing.T) {
	c := newCluster(t, 2)
	alice := c.user(1000, "alice", c.members[1])
	for name, h := range map[string]struct {
		script   string
		sentence string
		account  string
	}{
		"says nothing":    {"cat >/dev/null", "", ""},
		"changes":         {`sed 's/}$/,"account":"physics-'$MUSTER_UID'"}/'`, "", "physics-1000"},
		"refuses":         {"cat >/dev/null; echo 'set an account, please' >&2; exit 3", "set an account, please", ""},
		"refuses dumbly":  {"exit 3", "refused the job without saying why", ""},
		"prints nonsense": {"echo nonsense", "no job specification", ""},
		"prints too much": {"head -c 2000000 /dev/zero", "more than", ""},
	} {
		c.hook(h.script)
		answer, err := alice.Jobs().SubmitJobs(t.Context(), &apiv1.SubmitJobsRequest{RequestId: client.NewRequestID(),
			Jobs: []*apiv1.JobSubmission{batch("x")}})
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		refusal := answer.Results[0].Refusal
		if h.sentence == "" {
			if refusal != nil || c.members[0].View().Job(answer.Results[0].JobId).Spec.Account != h.account {
				t.Errorf("%s: %v", name, answer)
			}
		} else if refusal.GetReason() != rpc.ReasonSubmitHook || !strings.Contains(refusal.Sentence, h.sentence) {
			t.Errorf("%s: %v", name, refusal)
		}
	}
}

func TestMissingSubmissionProgramRefusesWithASentence(t *testing.T) {
	c := newCluster(t, 1)
	c.hook("exit 0")
	if err := os.Remove(c.members[0].View().Settings().SubmitHook); err != nil {
		t.Fatal(err)
	}
	answer, err := c.user(1000, "alice").Jobs().SubmitJobs(t.Context(), &apiv1.SubmitJobsRequest{RequestId: client.NewRequestID(),
		Jobs: []*apiv1.JobSubmission{batch("x")}})
	if err != nil || !strings.Contains(answer.Results[0].Refusal.GetSentence(), "cannot be run") {
		t.Errorf("%v, %v", answer, err)
	}
}

func TestRefusalOnRepetitionDoesNotDenyAJobThatExists(t *testing.T) {
	c := newCluster(t, 1)
	alice := c.user(1000, "alice")
	request := &apiv1.SubmitJobsRequest{RequestId: client.NewRequestID(), Jobs: []*apiv1.JobSubmission{batch("x")}}
	if _, err := alice.Jobs().SubmitJobs(t.Context(), request); err != nil {
		t.Fatal(err)
	}
	c.hook("exit 1") // the site refuses everything from now on
	_, err := alice.Jobs().SubmitJobs(t.Context(), request)
	if rpc.Reason(err) != "ANSWERED_BEFORE" {
		t.Errorf("got %v", err)
	}
}

func TestMembersMayBeChangedByOperatorsAndMembersOnly(t *testing.T) {
	c := newCluster(t, 2)
	request := &apiv1.ChangeMemberRequest{Change: &apiv1.ChangeMemberRequest_Transfer{Transfer: "-"}}
	if _, err := c.user(1000, "alice").Cluster().ChangeMember(t.Context(), request); rpc.Reason(err) != rpc.ReasonNotAllowed {
		t.Errorf("alice: %v", err)
	}
	answer, err := c.user(0, "root", c.members[1]).Cluster().ChangeMember(t.Context(), request)
	if err != nil || len(answer.Members) != 2 || !c.members[1].Leader().IsSelf {
		t.Errorf("root, through a follower: %v, %v", answer, err)
	}
	member := c.direct(c.issue("c3", pki.RoleController).ClientTLS(pki.RoleController, ""), "")
	if _, err := member.Cluster().ChangeMember(t.Context(), &apiv1.ChangeMemberRequest{Change: &apiv1.ChangeMemberRequest_AddLearner{
		AddLearner: &apiv1.Member{Id: "x", Name: "c3", RaftAddress: "r"}}}); err != nil {
		t.Errorf("a new controller: %v", err)
	}
	if _, err := member.Cluster().ChangeMember(t.Context(), &apiv1.ChangeMemberRequest{Change: &apiv1.ChangeMemberRequest_AddLearner{
		AddLearner: &apiv1.Member{Id: "x", Name: "c1", RaftAddress: "r"}}}); rpc.Reason(err) != rpc.ReasonNotAllowed {
		t.Errorf("a controller adds another: %v", err)
	}
}

func TestNothingIsProposedWhileStatesDiffer(t *testing.T) {
	c := newCluster(t, 2)
	c.members[0].server.Block("c1 and c2 differ")
	before := c.members[0].proposals.Load()
	for _, at := range c.members {
		_, err := c.user(1000, "alice", at).Jobs().SubmitJobs(t.Context(), &apiv1.SubmitJobsRequest{RequestId: client.NewRequestID(),
			Jobs: []*apiv1.JobSubmission{batch("x")}})
		if rpc.Reason(err) != "STATES_DIFFER" || !strings.Contains(rpc.Sentence(err), "c1 and c2 differ") {
			t.Errorf("got %v", err)
		}
	}
	if c.members[0].proposals.Load() != before {
		t.Error("something was proposed")
	}
	c.members[0].server.Block("")
	submitOne(t, c.user(1000, "alice"), "x")
}

func TestControllerThatLagsDoesNotRefuseByItsOldState(t *testing.T) {
	c := newCluster(t, 2)
	follower := c.members[1]
	alice := c.user(1000, "alice", follower)
	submitOne(t, alice, "first") // it has caught up once
	follower.lag(true)
	config := proto.CloneOf(configuration())
	config.Partitions = append(config.Partitions, &apiv1.Partition{Name: "new", Nodes: "ALL"})
	c.apply(memberPrincipal, &logv1.Command{Op: &logv1.Command_Configure{Configure: &logv1.Configure{Configuration: config}}})
	time.AfterFunc(100*time.Millisecond, func() { follower.lag(false) })
	job := batch("x")
	job.Spec.Partitions = []string{"new"}
	answer, err := alice.Jobs().SubmitJobs(t.Context(), &apiv1.SubmitJobsRequest{RequestId: client.NewRequestID(), Jobs: []*apiv1.JobSubmission{job}})
	if err != nil || answer.Results[0].Refusal != nil {
		t.Errorf("%v, %v", answer, err)
	}
}

func TestControllerThatKnowsNothingYetAsksTheSubmissionProgramAllTheSame(t *testing.T) {
	c := newCluster(t, 2)
	c.hook("cat >/dev/null; echo never >&2; exit 1")
	late := c.members[1]
	late.mu.Lock()
	late.machine = fsm.New()
	late.view, late.applied = late.machine.Publish(), 0
	late.mu.Unlock()
	late.lag(true)
	time.AfterFunc(100*time.Millisecond, func() { late.lag(false) })
	answer, err := late.server.submit(rpc.WithPrincipal(t.Context(), &apiv1.Principal{Kind: apiv1.PrincipalKind_PRINCIPAL_KIND_USER, Uid: 1000, Name: "alice"}),
		&apiv1.SubmitJobsRequest{RequestId: client.NewRequestID(), Jobs: []*apiv1.JobSubmission{batch("x")}})
	if err != nil || answer.Results[0].Refusal.GetReason() != rpc.ReasonSubmitHook {
		t.Errorf("%v, %v", answer, err)
	}
}
