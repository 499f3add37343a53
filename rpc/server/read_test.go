package server

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
	"github.com/muster-hpc/muster/rpc"
	"github.com/muster-hpc/muster/rpc/client"
)

func TestReadThroughALaggingFollowerSeesWhatWasAcknowledged(t *testing.T) {
	c := newCluster(t, 2)
	follower := c.members[1]
	follower.lag(true)
	id := submitOne(t, c.user(1000, "alice", c.members[0]), "a")
	alice := c.user(1000, "alice", follower)
	stale, err := alice.Jobs().ListJobs(t.Context(), &apiv1.ListJobsRequest{Read: &apiv1.ReadOptions{
		Consistency: apiv1.ReadConsistency_READ_CONSISTENCY_STALE}})
	if err != nil || len(stale.Jobs) != 0 || stale.Info.AgeMs == 0 {
		t.Errorf("a stale read: %v, %v", stale, err)
	}
	time.AfterFunc(100*time.Millisecond, func() { follower.lag(false) })
	answer, err := alice.Jobs().GetJob(t.Context(), &apiv1.GetJobRequest{JobId: id})
	if err != nil || answer.Job.Spec.Name != "a" {
		t.Errorf("a linearizable read: %v, %v", answer, err)
	}
}

func TestReadAtARevisionWaitsForIt(t *testing.T) {
	c := newCluster(t, 2)
	follower := c.members[1]
	follower.lag(true)
	answer, err := c.user(1000, "alice", c.members[0]).Jobs().SubmitJobs(t.Context(), &apiv1.SubmitJobsRequest{
		RequestId: client.NewRequestID(), Jobs: []*apiv1.JobSubmission{batch("a")}})
	if err != nil {
		t.Fatal(err)
	}
	c.elect(nil) // no leader is needed for this
	time.AfterFunc(50*time.Millisecond, func() { follower.lag(false) })
	got, err := c.user(1000, "alice", follower).Jobs().GetJob(t.Context(), &apiv1.GetJobRequest{JobId: answer.Results[0].JobId,
		Read: &apiv1.ReadOptions{AtLeast: answer.Revision}})
	if err != nil || got.Job == nil {
		t.Error(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err = follower.server.view(ctx, &apiv1.ReadOptions{AtLeast: &apiv1.Revision{Incarnation: 1, Index: 1 << 40}})
	if rpc.Reason(err) != rpc.ReasonBehind {
		t.Errorf("a revision that is not there: %v", err)
	}
}

func TestConcurrentReadsShareQuestionsToTheLeader(t *testing.T) {
	c := newCluster(t, 2)
	before := c.members[0].readIndex.Load()
	var group sync.WaitGroup
	for range 200 {
		group.Go(func() {
			if _, err := c.members[1].server.view(t.Context(), nil); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	if n := c.members[0].readIndex.Load() - before; n > 50 {
		t.Errorf("200 concurrent reads asked the leader %d times", n)
	}
}

func TestReadNeverUsesAnIndexFromBeforeIt(t *testing.T) {
	c := newCluster(t, 2)
	alice := c.user(1000, "alice", c.members[0])
	var group sync.WaitGroup
	for i := range 8 {
		group.Go(func() {
			for j := range 10 {
				id := submitOne(t, alice, fmt.Sprintf("w%d.%d", i, j))
				view, err := c.members[1].server.view(t.Context(), nil)
				if err != nil {
					t.Error(err)
				} else if view.Job(id) == nil {
					t.Errorf("job %d was acknowledged before the read, which does not see it", id)
				}
			}
		})
	}
	group.Wait()
}

func TestListPagesFiltersAndAbridges(t *testing.T) {
	c := newCluster(t, 1)
	n1, _ := c.join("n1")
	alice, bob := c.user(1000, "alice"), c.user(2000, "bob")
	var ids []uint32
	for i := range 5 {
		ids = append(ids, submitOne(t, alice, fmt.Sprintf("a%d", i)))
	}
	ids = append(ids, submitOne(t, bob, "b"))
	c.place(ids[0], n1)
	list := func(request *apiv1.ListJobsRequest) []uint32 {
		t.Helper()
		answer, err := alice.Jobs().ListJobs(t.Context(), request)
		if err != nil {
			t.Fatal(err)
		}
		var got []uint32
		for _, job := range answer.Jobs {
			got = append(got, job.Id)
		}
		return got
	}
	for name, f := range map[string]struct {
		filter *apiv1.JobFilter
		want   []uint32
	}{
		"all":           {nil, ids},
		"user":          {&apiv1.JobFilter{Uids: []uint32{2000}}, ids[5:]},
		"ids":           {&apiv1.JobFilter{JobIds: []uint32{ids[3], ids[1], 9999}}, []uint32{ids[1], ids[3]}},
		"names":         {&apiv1.JobFilter{Names: []string{"a2", "b"}}, []uint32{ids[2], ids[5]}},
		"names of user": {&apiv1.JobFilter{Names: []string{"a2", "b"}, Uids: []uint32{1000}}, ids[2:3]},
		"state":         {&apiv1.JobFilter{States: []apiv1.JobState{apiv1.JobState_JOB_STATE_CONFIGURING}}, ids[:1]},
		"pending":       {&apiv1.JobFilter{States: []apiv1.JobState{apiv1.JobState_JOB_STATE_PENDING}}, ids[1:]},
		"node":          {&apiv1.JobFilter{Nodes: []string{"n1"}}, ids[:1]},
		"unknown node":  {&apiv1.JobFilter{Nodes: []string{"n9"}}, nil},
		"partition":     {&apiv1.JobFilter{Partitions: []string{"gpu"}}, ids},
		"active":        {&apiv1.JobFilter{Active: true}, ids},
	} {
		if got := list(&apiv1.ListJobsRequest{Filter: f.filter}); fmt.Sprint(got) != fmt.Sprint(f.want) {
			t.Errorf("%s: %v, should be %v", name, got, f.want)
		}
	}
	var paged []uint32
	token := ""
	for pages := 1; ; pages++ {
		answer, err := alice.Jobs().ListJobs(t.Context(), &apiv1.ListJobsRequest{Page: &apiv1.Page{Size: 4, Token: token}, Brief: true, Steps: true})
		if err != nil {
			t.Fatal(err)
		}
		for _, job := range answer.Jobs {
			paged = append(paged, job.Id)
			if job.Spec.WorkDir != "" || job.Spec.ScriptBlob != "" || job.Spec.Name == "" || job.Spec.Resources == nil {
				t.Errorf("brief: %v", job.Spec)
			}
		}
		if pages == 1 && (len(answer.Steps) != 1 || answer.Steps[0].JobId != ids[0]) {
			t.Errorf("steps: %v", answer.Steps)
		}
		if token = answer.NextToken; token == "" {
			if pages != 2 {
				t.Errorf("%d pages", pages)
			}
			break
		}
	}
	if fmt.Sprint(paged) != fmt.Sprint(ids) {
		t.Errorf("paged: %v", paged)
	}
	if _, err := alice.Jobs().ListJobs(t.Context(), &apiv1.ListJobsRequest{Page: &apiv1.Page{Token: "?"}}); rpc.Reason(err) != rpc.ReasonMalformed {
		t.Errorf("a bad token: %v", err)
	}
}

func TestClusterIsDescribed(t *testing.T) {
	c := newCluster(t, 3)
	submitOne(t, c.user(1000, "alice"), "a")
	answer, err := c.user(1000, "alice", c.members[1]).Cluster().GetCluster(t.Context(), &apiv1.GetClusterRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if answer.AnsweredBy != "id-c2" || len(answer.Members) != 3 || answer.JobsByState["PENDING"] != 1 || len(answer.Digest) != 16 || answer.Scheduler != nil {
		t.Errorf("%v", answer)
	}
	for i, member := range answer.Members {
		if member.Name != fmt.Sprintf("c%d", i+1) || member.Leader != (i == 0) || member.AppliedIndex == 0 {
			t.Errorf("member %v", member)
		}
	}
}

func TestStepIsAwaited(t *testing.T) {
	c := newCluster(t, 2)
	n1, epoch := c.join("n1")
	alice := c.user(1000, "alice", c.members[1])
	id := submitOne(t, alice, "a")
	batchStep := uint32(4294967291)
	if _, err := alice.Jobs().GetStep(t.Context(), &apiv1.GetStepRequest{JobId: id, StepId: batchStep, WaitBeginMs: 20}); rpc.Reason(err) != "STEP_UNKNOWN" {
		t.Errorf("a step that does not begin in time: %v", err)
	}
	begun := make(chan error, 1)
	go func() {
		_, err := alice.Jobs().GetStep(t.Context(), &apiv1.GetStepRequest{JobId: id, StepId: batchStep, Attempt: 1, WaitBeginMs: 20_000})
		begun <- err
	}()
	fence := c.place(id, n1)
	if err := <-begun; err != nil {
		t.Errorf("a step that begins while it is awaited: %v", err)
	}
	answer, err := alice.Jobs().GetStep(t.Context(), &apiv1.GetStepRequest{JobId: id, StepId: batchStep, WaitEndMs: 50})
	if err != nil || answer.Step.State != apiv1.StepState_STEP_STATE_PREPARING || len(answer.Shares) != 1 || answer.Shares[0].AgentAddress != "n1:7" {
		t.Fatalf("before its end: %v, %v", answer, err)
	}
	c.apply(memberPrincipal, &logv1.Command{DecidedInTerm: c.term, Op: &logv1.Command_StartAttempt{StartAttempt: &logv1.StartAttempt{
		JobId: id, Fence: fence, Prepared: []*apiv1.PreparedNode{{Node: n1, Address: "10.0.0.1", Port: 4000}}}}})
	time.AfterFunc(100*time.Millisecond, func() {
		c.apply(&apiv1.Principal{Kind: apiv1.PrincipalKind_PRINCIPAL_KIND_NODE, Name: "n1"}, &logv1.Command{Op: &logv1.Command_ReportTasks{
			ReportTasks: &logv1.ReportTasks{Node: n1, Epoch: epoch, Instance: instance("n1"), Reports: []*logv1.TaskReport{{JournalId: 1, JobId: id,
				Fence: fence, Event: &logv1.TaskReport_StepEnded{StepEnded: &logv1.StepEnded{StepId: batchStep, Exits: []*apiv1.TaskExit{{Count: 1, Code: 3}}}}}}}}})
	})
	began := time.Now()
	answer, err = alice.Jobs().GetStep(t.Context(), &apiv1.GetStepRequest{JobId: id, StepId: batchStep, WaitEndMs: 20_000})
	if err != nil || answer.Step.State != apiv1.StepState_STEP_STATE_FAILED || answer.Step.Exits[0].Code != 3 {
		t.Errorf("at its end: %v, %v", answer, err)
	}
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("took %s", took)
	}
	if _, err := alice.Jobs().GetStep(t.Context(), &apiv1.GetStepRequest{JobId: id, StepId: 7}); rpc.Reason(err) != "STEP_UNKNOWN" {
		t.Errorf("a step that is not there: %v", err)
	}
}
