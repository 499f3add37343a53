package server

import (
	"testing"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/muster/api/v1/apiv1connect"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

func jobFor(name, partition string) *apiv1.JobSubmission {
	spec := &apiv1.JobSpec{Name: name, Kind: apiv1.JobKind_JOB_KIND_BATCH, WorkDir: "/", Resources: &apiv1.ResourceRequest{}}
	if partition != "" {
		spec.Partitions = []string{partition}
	}
	return &apiv1.JobSubmission{Spec: spec, Script: []byte("#!/bin/sh\n")}
}

func TestWhatIsOnlyValidatedIsNotStored(t *testing.T) {
	c := newCluster(t, 1)
	c.join("n1")
	alice := c.user(1000, "alice")
	answer, err := alice.Jobs().SubmitJobs(t.Context(), &apiv1.SubmitJobsRequest{ValidateOnly: true,
		Jobs: []*apiv1.JobSubmission{jobFor("good", ""), jobFor("bad", "no-such")}})
	if err != nil || len(answer.Results) != 2 {
		t.Fatalf("%v, %v", answer, err)
	}
	if good := answer.Results[0]; good.Refusal != nil || good.JobId != 0 {
		t.Errorf("the good job: %v", good)
	}
	if bad := answer.Results[1]; bad.Refusal.GetReason() != "PARTITION_UNKNOWN" || bad.JobId != 0 {
		t.Errorf("the bad job: %v", bad)
	}
	if list := listed(t, alice.Jobs(), &apiv1.ListJobsRequest{}); len(list.Jobs) != 0 {
		t.Errorf("stored: %v", list.Jobs)
	}
}

func listed(t *testing.T, jobs apiv1connect.JobServiceClient, request *apiv1.ListJobsRequest) *apiv1.ListJobsResponse {
	t.Helper()
	answer, err := jobs.ListJobs(t.Context(), request)
	if err != nil {
		t.Fatal(err)
	}
	return answer
}

func TestStepsThatEndedAreListedIfAskedFor(t *testing.T) {
	c := newCluster(t, 1)
	n1, epoch := c.join("n1")
	alice := c.user(1000, "alice")
	id := submitOne(t, alice, "a")
	fence := c.place(id, n1)
	const batchStep = 4294967291
	c.apply(memberPrincipal, &logv1.Command{DecidedInTerm: c.term, Op: &logv1.Command_StartAttempt{StartAttempt: &logv1.StartAttempt{
		JobId: id, Fence: fence, Prepared: []*apiv1.PreparedNode{{Node: n1, Address: "10.0.0.1", Port: 4000}}}}})
	c.apply(&apiv1.Principal{Kind: apiv1.PrincipalKind_PRINCIPAL_KIND_NODE, Name: "n1"}, &logv1.Command{Op: &logv1.Command_ReportTasks{
		ReportTasks: &logv1.ReportTasks{Node: n1, Epoch: epoch, Instance: instance("n1"), Reports: []*logv1.TaskReport{{JournalId: 1, JobId: id,
			Fence: fence, Event: &logv1.TaskReport_StepEnded{StepEnded: &logv1.StepEnded{StepId: batchStep, Exits: []*apiv1.TaskExit{{Count: 1, Code: 3}}}}}}}}})
	if running := listed(t, alice.Jobs(), &apiv1.ListJobsRequest{Steps: true}); len(running.Steps) != 0 {
		t.Errorf("running steps: %v", running.Steps)
	}
	all := listed(t, alice.Jobs(), &apiv1.ListJobsRequest{AllSteps: true})
	if len(all.Steps) != 1 || all.Steps[0].Id != batchStep || all.Steps[0].Exits[0].Code != 3 {
		t.Errorf("all steps: %v", all.Steps)
	}
}
