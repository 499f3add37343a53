package server

import (
	"context"
	"fmt"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/muster/api/v1/apiv1connect"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
	"github.com/muster-hpc/muster/rpc"
	"github.com/muster-hpc/muster/rpc/client"
)

// watcher receives one stream into a picture of the state.
type watcher struct {
	t      *testing.T
	stream apiv1connect.JobServiceWatchJobsClientStream
	jobs   map[uint32]*apiv1.Job
	after  *apiv1.Revision
	relist bool
}

func watchJobs(t *testing.T, c *client.Client, request *apiv1.WatchJobsRequest) *watcher {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	t.Cleanup(cancel)
	stream, err := c.Jobs().WatchJobs(ctx, request)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stream.Close() })
	return &watcher{t: t, stream: stream, jobs: map[uint32]*apiv1.Job{}}
}

// until receives until the picture is right.
func (w *watcher) until(what string, right func() bool) {
	w.t.Helper()
	for !right() {
		message, err := w.stream.Receive()
		if err != nil {
			w.t.Fatalf("waiting for %s: %v", what, err)
		}
		for _, job := range message.Jobs {
			w.jobs[job.Id] = job
		}
		for _, id := range message.Removed {
			delete(w.jobs, id)
		}
		if message.Revision != nil {
			w.after = message.Revision
		}
		w.relist = message.Relist
	}
}

func TestWatchBeginsWithThePresentAndFollows(t *testing.T) {
	c := newCluster(t, 2)
	alice := c.user(1000, "alice", c.members[1])
	first := submitOne(t, alice, "a")
	w := watchJobs(t, alice, &apiv1.WatchJobsRequest{Filter: &apiv1.JobFilter{Uids: []uint32{1000}}})
	w.until("the present", func() bool { return w.after != nil })
	if len(w.jobs) != 1 || w.jobs[first] == nil {
		t.Fatalf("the present: %v", w.jobs)
	}
	submitOne(t, c.user(2000, "bob"), "not for alice")
	second := submitOne(t, alice, "b")
	w.until("the second job", func() bool { return w.jobs[second] != nil })
	if len(w.jobs) != 2 {
		t.Errorf("jobs of others: %v", w.jobs)
	}
	if _, err := alice.Jobs().CancelJobs(t.Context(), &apiv1.CancelJobsRequest{RequestId: client.NewRequestID(),
		Filter: &apiv1.JobFilter{JobIds: []uint32{first}}}); err != nil {
		t.Fatal(err)
	}
	w.until("the cancelled job", func() bool { return w.jobs[first].GetStatus().GetState() == apiv1.JobState_JOB_STATE_CANCELLED })
	c.apply(memberPrincipal, &logv1.Command{DecidedInTerm: c.term, Op: &logv1.Command_Prune{Prune: &logv1.Prune{JobIds: []uint32{first}}}})
	w.until("the removal", func() bool { return w.jobs[first] == nil })
}

func TestWatcherOfActiveJobsSeesThemEnd(t *testing.T) {
	c := newCluster(t, 1)
	alice := c.user(1000, "alice")
	id := submitOne(t, alice, "a")
	w := watchJobs(t, alice, &apiv1.WatchJobsRequest{Filter: &apiv1.JobFilter{Active: true}})
	w.until("the present", func() bool { return w.after != nil })
	if _, err := alice.Jobs().CancelJobs(t.Context(), &apiv1.CancelJobsRequest{RequestId: client.NewRequestID(),
		Filter: &apiv1.JobFilter{JobIds: []uint32{id}}}); err != nil {
		t.Fatal(err)
	}
	w.until("its end", func() bool { return w.jobs[id].GetStatus().GetState() == apiv1.JobState_JOB_STATE_CANCELLED })
}

func TestWatchIsResumedElsewhereWithoutAGap(t *testing.T) {
	c := newCluster(t, 3)
	alice := c.user(1000, "alice", c.members[0])
	w := watchJobs(t, alice, &apiv1.WatchJobsRequest{})
	w.until("the present", func() bool { return w.after != nil })
	if len(w.jobs) != 0 {
		t.Fatalf("jobs: %v", w.jobs)
	}
	var ids []uint32
	for i := range 5 {
		ids = append(ids, submitOne(t, alice, fmt.Sprintf("j%d", i)))
	}
	resumed := watchJobs(t, c.user(1000, "alice", c.members[2]), &apiv1.WatchJobsRequest{After: w.after})
	resumed.until("what was missed", func() bool { return len(resumed.jobs) == 5 })
	for _, id := range ids {
		if resumed.jobs[id] == nil {
			t.Errorf("job %d was missed", id)
		}
	}
}

func TestManyChangesComeInPiecesAndCompletely(t *testing.T) {
	c := newCluster(t, 1)
	alice := c.user(1000, "alice")
	after := c.members[0].View().Revision()
	for range 3 {
		request := &apiv1.SubmitJobsRequest{RequestId: client.NewRequestID()}
		for i := range 700 {
			request.Jobs = append(request.Jobs, batch(fmt.Sprintf("j%d", i)))
			request.Jobs[i].Script = []byte("#!/bin/sh\n")
		}
		if _, err := alice.Jobs().SubmitJobs(t.Context(), request); err != nil {
			t.Fatal(err)
		}
	}
	for name, request := range map[string]*apiv1.WatchJobsRequest{"from the beginning": {}, "resumed": {After: after}} {
		w := watchJobs(t, alice, request)
		w.until("a revision", func() bool { return w.after != nil })
		if len(w.jobs) != 2100 {
			t.Errorf("%s: %d jobs when the revision came", name, len(w.jobs))
		}
	}
}

func TestWatchOfAnotherIncarnationMustListAgain(t *testing.T) {
	c := newCluster(t, 1)
	old := proto.CloneOf(c.members[0].View().Revision())
	old.Incarnation = 0
	w := watchJobs(t, c.user(1000, "alice"), &apiv1.WatchJobsRequest{After: old})
	w.until("relist", func() bool { return w.relist })
	if _, err := w.stream.Receive(); err == nil {
		t.Error("the stream goes on after relist")
	}
}

func TestWatchEndsWithItsController(t *testing.T) {
	c := newCluster(t, 2)
	quarantined := watchJobs(t, c.user(1000, "alice", c.members[0]), &apiv1.WatchJobsRequest{})
	quarantined.until("the present", func() bool { return quarantined.after != nil })
	draining := watchJobs(t, c.user(1000, "alice", c.members[1]), &apiv1.WatchJobsRequest{})
	draining.until("the present", func() bool { return draining.after != nil })
	c.members[0].Quarantine("its digest differs")
	c.members[1].server.Drain()
	for reason, w := range map[string]*watcher{rpc.ReasonQuarantined: quarantined, rpc.ReasonShuttingDown: draining} {
		for {
			if _, err := w.stream.Receive(); err != nil {
				if rpc.Reason(err) != reason {
					t.Errorf("ended with %v, should be %s", err, reason)
				}
				break
			}
		}
	}
}
