package srun

import (
	"context"
	"sync"
	"time"

	"connectrpc.com/connect/v2"

	"github.com/muster-hpc/muster/cmd/internal/slurm/session"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// watch gives every change of a job and its steps to seen, first the present state, until ctx ends, seen fails or asking again is
// pointless. A watch that breaks goes on where it was.
func watch(ctx context.Context, cluster session.Cluster, job uint32, seen func(*apiv1.WatchJobsResponse) error) error {
	var after *apiv1.Revision
	for {
		err := watchOnce(ctx, cluster, job, &after, seen)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil && permanent(err) {
			return err
		}
		timer := time.NewTimer(watchRetry)
		select {
		case <-ctx.Done():
		case <-timer.C:
		}
		timer.Stop()
	}
}

func watchOnce(ctx context.Context, cluster session.Cluster, job uint32, after **apiv1.Revision, seen func(*apiv1.WatchJobsResponse) error) error {
	stream, err := cluster.Jobs().WatchJobs(ctx, &apiv1.WatchJobsRequest{Filter: &apiv1.JobFilter{JobIds: []uint32{job}}, After: *after})
	if err != nil {
		return err
	}
	defer stream.Close()
	for {
		batch, err := stream.Receive()
		if err != nil {
			return err
		}
		if batch.GetRelist() {
			*after = nil
			return nil
		}
		if err := seen(batch); err != nil {
			return err
		}
		*after = batch.GetRevision()
	}
}

// permanent tells whether watching again is pointless.
func permanent(err error) bool {
	switch connect.CodeOf(err) {
	case connect.CodePermissionDenied, connect.CodeInvalidArgument, connect.CodeUnimplemented, connect.CodeUnauthenticated:
		return true
	}
	return false
}

// changes tells when something of a job has changed that may leave room for a step.
type changes struct {
	seen chan struct{} // has one value when something has
	over chan struct{} // closed when watching is pointless
	err  error         // why, then
	stop func()
}

// changes begins to watch the enclosing job. The present state counts as a change: the step that was in the way may have ended before.
func (r *run) changes(ctx context.Context, cluster session.Cluster) *changes {
	ctx, cancel := context.WithCancel(ctx)
	c := &changes{seen: make(chan struct{}, 1), over: make(chan struct{})}
	first := true
	var group sync.WaitGroup
	group.Go(func() {
		err := watch(ctx, cluster, r.job, func(batch *apiv1.WatchJobsResponse) error {
			if !first && !freed(batch) {
				return nil
			}
			first = false
			select {
			case c.seen <- struct{}{}:
			default: // it is known
			}
			return nil
		})
		if ctx.Err() == nil {
			c.err = err
			close(c.over)
		}
	})
	c.stop = func() { cancel(); group.Wait() }
	return c
}

// freed tells whether a batch of changes may have left room: the job has changed, a step has ended or some of its nodes have.
func freed(batch *apiv1.WatchJobsResponse) bool {
	if len(batch.GetJobs()) > 0 {
		return true
	}
	for _, step := range batch.GetSteps() {
		nodes := 0
		for _, g := range step.GetPlacement().GetGroups() {
			nodes += len(g.GetNodes())
		}
		if step.GetState() > apiv1.StepState_STEP_STATE_RUNNING || len(step.GetUnreported()) < nodes {
			return true
		}
	}
	return false
}

// patience is how long srun waits for resources; it never ends without --immediate.
func (r *run) patience() (<-chan time.Time, func()) {
	if r.immediate == nil {
		return nil, func() {}
	}
	timer := time.NewTimer(*r.immediate)
	return timer.C, func() { timer.Stop() }
}
