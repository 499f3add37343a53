package srun

import (
	"context"
	"time"

	"github.com/muster-hpc/muster/cmd/internal/slurm/session"
	"github.com/muster-hpc/muster/cmd/internal/slurm/submit"
	"github.com/muster-hpc/muster/cmd/internal/slurm/value"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// Bounds of waiting for an allocation; rows of docs/limits.md.
const (
	// sayQueued is after how long srun says that its job waits.
	sayQueued = 300 * time.Millisecond
	// watchRetry is the pause before a broken watch is opened again.
	watchRetry = 200 * time.Millisecond
)

// test asks whether the cluster would take the job, and runs nothing.
func (r *run) test(ctx context.Context, cluster session.Cluster) int {
	answer, err := cluster.Jobs().SubmitJobs(ctx, &apiv1.SubmitJobsRequest{
		Jobs: []*apiv1.JobSubmission{{Spec: r.spec, Environment: r.env}}, ValidateOnly: true,
	})
	if err != nil {
		submit.Explain(r.s, "allocation failure", err)
		return submit.CodeRefused
	}
	result := answer.GetResults()[0]
	if refusal := result.GetRefusal(); refusal != nil {
		submit.ExplainDetail(r.s, "allocation failure", refusal, r.spec)
		return submit.CodeRefused
	}
	for _, warning := range result.GetWarnings() {
		r.s.Line("warning: %s", warning)
	}
	r.s.Line("the request is valid; no start time is estimated yet")
	return 0
}

// allocate submits the job, waits for its nodes and runs the program there.
func (r *run) allocate(ctx context.Context, cluster session.Cluster) int {
	r.runProgram(ctx, "prolog", r.prolog, nil)
	answer, err := cluster.Jobs().SubmitJobs(ctx, &apiv1.SubmitJobsRequest{
		RequestId: r.s.RequestID(), Jobs: []*apiv1.JobSubmission{{Spec: r.spec, Environment: r.env}},
	})
	if err != nil {
		submit.Explain(r.s, "Unable to allocate resources", err)
		return submit.CodeRefused
	}
	r.trace.Mark("submitted")
	result := answer.GetResults()[0]
	if refusal := result.GetRefusal(); refusal != nil {
		submit.ExplainDetail(r.s, "Unable to allocate resources", refusal, r.spec)
		return submit.CodeRefused
	}
	for _, warning := range result.GetWarnings() {
		r.s.Line("warning: %s", warning)
	}
	q := &queue{run: r, cluster: cluster, id: result.GetJobId(), since: r.s.Now()}
	return q.serve(ctx)
}

// queue follows srun's own job through its attempts.
type queue struct {
	run     *run
	cluster session.Cluster
	id      uint32
	since   time.Time // when it was submitted
	said    bool      // that the job waits
	// impatient: the time of --immediate is over, which was said.
	impatient bool
}

// serve waits for each attempt and attaches to it, until one has run or the job has ended.
func (q *queue) serve(ctx context.Context) int {
	r := q.run
	for attempt, step := uint32(1), q.soon(ctx); ; attempt, step = attempt+1, nil {
		if step == nil {
			job, err := q.await(ctx, attempt)
			if err != nil {
				return r.lost(err)
			}
			r.trace.Mark("allocated")
			status := job.GetStatus()
			attempt = status.GetAttempt()
			if value.Ended(status.GetState()) && (attempt == 0 || status.GetStartTime() == nil) {
				return q.over(job)
			}
			if q.said {
				r.s.Line("job %d has been allocated resources", q.id)
				q.said = false
			}
			step, err = q.cluster.Jobs().GetStep(ctx, &apiv1.GetStepRequest{JobId: q.id, StepId: 0, Attempt: attempt})
			if err != nil {
				submit.Explain(r.s, "Unable to run the job step", err)
				return submit.CodeRefused
			}
		}
		r.trace.Mark("step known")
		r.trace.At("committed: placement", step.GetStep().GetCreateTime().AsTime())
		outcome, err := r.follow(ctx, q.cluster, step.GetStep(), step.GetShares(), true)
		if err != nil {
			r.runProgram(ctx, "epilog", r.epilog, step.GetStep())
			return r.lost(err)
		}
		if len(outcome.Exits) > 0 || outcome.Step.GetStartTime() != nil || outcome.Step.GetState() == apiv1.StepState_STEP_STATE_CANCELLED && q.finalSoon(ctx) {
			r.runProgram(ctx, "epilog", r.epilog, step.GetStep())
			return outcome.ExitCode
		}
		// The attempt ended before its program ran: the job waits for other nodes.
	}
}

// soon returns the first attempt's step if the job gets its nodes at once, as on an idle cluster; nil if it waits, or has
// ended. It saves opening a watch.
func (q *queue) soon(ctx context.Context) *apiv1.GetStepResponse {
	step, err := q.cluster.Jobs().GetStep(ctx, &apiv1.GetStepRequest{
		JobId: q.id, StepId: 0, Attempt: 1, WaitBeginMs: uint32(sayQueued / time.Millisecond),
	})
	if err != nil {
		return nil // whatever is wrong, the watch finds out
	}
	return step
}

// finalSoon tells whether the job has ended, so that no further attempt comes.
func (q *queue) finalSoon(ctx context.Context) bool {
	answer, err := q.cluster.Jobs().GetJob(ctx, &apiv1.GetJobRequest{JobId: q.id})
	return err == nil && (value.Ended(answer.GetJob().GetStatus().GetState()) || answer.GetJob().GetStatus().GetCompleting())
}

// over says why a job ended without having run.
func (q *queue) over(job *apiv1.Job) int {
	s := q.run.s
	if q.impatient {
		return submit.CodeRefused
	}
	if job.GetStatus().GetState() == apiv1.JobState_JOB_STATE_CANCELLED {
		s.Line("Job allocation %d has been revoked", q.id)
		s.Line("Force Terminated JobId=%d", q.id)
		return submit.CodeRefused
	}
	sentence := job.GetStatus().GetSentence()
	if sentence == "" {
		sentence = "it ended as " + value.StateOf(job.GetStatus()).Word + " before its program ran"
	}
	s.Errorf("Job allocation %d has been revoked: %s", q.id, sentence)
	return submit.CodeRefused
}

// await returns the job once it has the attempt or has ended.
func (q *queue) await(ctx context.Context, attempt uint32) (*apiv1.Job, error) {
	r := q.run
	jobs := make(chan *apiv1.Job)
	watchCtx, cancel := context.WithCancel(ctx)
	watched := make(chan error, 1)
	go func() {
		defer close(jobs)
		watched <- watch(watchCtx, q.cluster, q.id, func(batch *apiv1.WatchJobsResponse) error { return send(watchCtx, batch, q.id, jobs) })
	}()
	limit, stop := r.patience()
	defer stop()
	defer func() {
		cancel()
		for range jobs { // closed when the watch has ended
		}
	}()
	timer := time.NewTimer(max(0, sayQueued-r.s.Now().Sub(q.since)))
	defer timer.Stop()
	for {
		select {
		case job, ok := <-jobs:
			if !ok {
				return nil, <-watched
			}
			status := job.GetStatus()
			if value.Ended(status.GetState()) || status.GetAttempt() >= attempt && status.GetState() != apiv1.JobState_JOB_STATE_PENDING {
				return job, nil
			}
		case <-timer.C:
			if !q.said && !r.options.Has("quiet") {
				r.s.Line("job %d queued and waiting for resources", q.id)
			}
			q.said = !r.options.Has("quiet")
		case <-limit:
			limit = nil
			r.s.Errorf("Unable to allocate resources: Requested nodes are busy")
			q.impatient = true
			q.revoke(ctx)
		case heard := <-r.heard:
			if ends(heard) {
				q.revoke(ctx)
			}
		}
	}
}

// send gives the job of a batch to whoever waits for it.
func send(ctx context.Context, batch *apiv1.WatchJobsResponse, id uint32, jobs chan<- *apiv1.Job) error {
	for _, job := range batch.GetJobs() {
		if job.GetId() != id {
			continue
		}
		select {
		case jobs <- job:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// revoke cancels the waiting job; the watch then shows its end.
func (q *queue) revoke(ctx context.Context) {
	_, err := q.cluster.Jobs().CancelJobs(ctx, &apiv1.CancelJobsRequest{
		RequestId: q.run.s.RequestID(), Filter: &apiv1.JobFilter{JobIds: []uint32{q.id}},
	})
	if err != nil {
		submit.Explain(q.run.s, "Unable to cancel the job", err)
	}
}
