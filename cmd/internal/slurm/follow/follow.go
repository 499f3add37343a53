// Package follow watches one job through everything that becomes of it, over controllers that die and are replaced.
//
// Invariants: no change is missed for good: a watch that breaks is opened again where it was, and one that is too old begins anew
// with the job as it is. Only a refusal that would be repeated ends it before its context does.
//
// It is called by commands that live as long as a job (salloc). It never changes anything.
package follow

import (
	"context"
	"time"

	"connectrpc.com/connect/v2"

	"github.com/muster-hpc/muster/cmd/internal/slurm/session"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// retry is the pause before a broken watch is opened again; a row of docs/limits.md.
const retry = 200 * time.Millisecond

// Job sends the job to jobs now and whenever it changes, until ctx ends or asking again is pointless, which the error says. It closes
// jobs when it returns.
func Job(ctx context.Context, cluster session.Cluster, id uint32, jobs chan<- *apiv1.Job) error {
	defer close(jobs)
	w := watch{cluster: cluster, id: id, jobs: jobs}
	for {
		err := w.once(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		switch connect.CodeOf(err) {
		case connect.CodePermissionDenied, connect.CodeInvalidArgument, connect.CodeUnimplemented, connect.CodeUnauthenticated:
			if err != nil {
				return err
			}
		}
		timer := time.NewTimer(retry)
		select {
		case <-ctx.Done():
		case <-timer.C:
		}
		timer.Stop()
	}
}

// watch is where a watch stands.
type watch struct {
	cluster session.Cluster
	id      uint32
	jobs    chan<- *apiv1.Job
	after   *apiv1.Revision
}

// once follows one connection until it breaks, or must begin anew.
func (w *watch) once(ctx context.Context) error {
	stream, err := w.cluster.Jobs().WatchJobs(ctx, &apiv1.WatchJobsRequest{Filter: &apiv1.JobFilter{JobIds: []uint32{w.id}}, After: w.after})
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
			w.after = nil
			return nil
		}
		for _, job := range batch.GetJobs() {
			if job.GetId() != w.id {
				continue
			}
			select {
			case w.jobs <- job:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		w.after = batch.GetRevision()
	}
}
