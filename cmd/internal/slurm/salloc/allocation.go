package salloc

import (
	"context"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/term"

	"github.com/muster-hpc/muster/cmd/internal/slurm/follow"
	"github.com/muster-hpc/muster/cmd/internal/slurm/session"
	"github.com/muster-hpc/muster/cmd/internal/slurm/submit"
	"github.com/muster-hpc/muster/cmd/internal/slurm/value"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/rpc"
)

// Bounds; rows of docs/limits.md.
const (
	// sayQueued is after how long salloc says that its job waits.
	sayQueued = 300 * time.Millisecond
	// ringAfter is how long the job must have waited for the bell to ring unasked.
	ringAfter = 10 * time.Second
)

// allocation is the job and what is known of it.
type allocation struct {
	*run
	cluster session.Cluster
	id      uint32
	since   time.Time // when it was submitted
	jobs    chan *apiv1.Job
	over    bool // the job has ended, or is ending
}

// allocate submits the job, waits for its nodes, runs the command and gives the nodes back.
func (r *run) allocate(ctx context.Context, cluster session.Cluster) int {
	answer, err := cluster.Jobs().SubmitJobs(ctx, &apiv1.SubmitJobsRequest{RequestId: r.s.RequestID(), Jobs: []*apiv1.JobSubmission{{Spec: r.spec}}})
	if err != nil {
		submit.Explain(r.s, "Unable to allocate resources", err)
		return submit.CodeRefused
	}
	result := answer.GetResults()[0]
	if refusal := result.GetRefusal(); refusal != nil {
		submit.ExplainDetail(r.s, "Unable to allocate resources", refusal, r.spec)
		return submit.CodeRefused
	}
	for _, warning := range result.GetWarnings() {
		r.s.Line("warning: %s", warning)
	}
	a := &allocation{run: r, cluster: cluster, id: result.GetJobId(), since: r.s.Now(), jobs: make(chan *apiv1.Job)}
	watchCtx, cancel := context.WithCancel(ctx)
	watched := make(chan error, 1)
	go func() { watched <- follow.Job(watchCtx, cluster, a.id, a.jobs) }()
	defer func() {
		cancel()
		for range a.jobs { // closed when the watch has ended
		}
	}()
	job, code := a.await(ctx, watched)
	if job == nil {
		return code
	}
	return a.use(ctx, job)
}

// await returns the job when it runs; nil and an exit code if it never will.
func (a *allocation) await(ctx context.Context, watched <-chan error) (*apiv1.Job, int) {
	said, jobs := false, a.jobs
	queued := time.NewTimer(sayQueued)
	defer queued.Stop()
	var late <-chan time.Time
	if a.immediate > 0 {
		timer := time.NewTimer(a.immediate)
		defer timer.Stop()
		late = timer.C
	}
	for {
		select {
		case job, ok := <-jobs:
			switch {
			case !ok:
				a.s.Errorf("job %d cannot be watched: %s", a.id, a.s.Sentence(<-watched))
				a.giveBack(ctx, 0, 0)
				return nil, submit.CodeRefused
			case value.Ended(job.GetStatus().GetState()), job.GetStatus().GetCompleting() && job.GetStatus().GetEndTime() != nil:
				return nil, a.ended(job)
			case job.GetStatus().GetState() == apiv1.JobState_JOB_STATE_RUNNING:
				if said {
					a.say("job %d has been allocated resources", a.id)
				}
				a.say("Granted job allocation %d", a.id)
				a.say("Nodes %s are ready for job", job.GetStatus().GetNodeList())
				a.ring()
				return job, 0
			}
		case <-queued.C:
			said = true
			a.say("Pending job allocation %d", a.id)
			a.say("job %d queued and waiting for resources", a.id)
		case <-late:
			a.giveBack(ctx, 0, 0)
			a.s.Errorf("Unable to allocate resources: Requested nodes are busy\njob %d was not started within %v (--immediate) and is cancelled", a.id, a.immediate)
			return nil, submit.CodeRefused
		case heard := <-a.heard:
			switch heard {
			case syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT:
				a.giveBack(ctx, 0, 0)
				a.s.Line("Job allocation %d has been revoked.", a.id)
				return nil, submit.CodeRefused
			}
		case <-ctx.Done():
			a.giveBack(ctx, 0, 0)
			return nil, submit.CodeRefused
		}
	}
}

// ended says why a job ended that never ran.
func (a *allocation) ended(job *apiv1.Job) int {
	a.s.Line("Job allocation %d has been revoked.", a.id)
	if sentence := job.GetStatus().GetSentence(); sentence != "" {
		a.s.Errorf("Unable to allocate resources: %s", sentence)
	}
	return submit.CodeRefused
}

// ring rings the bell of the terminal if it was asked for, or if the user waited for long.
func (a *allocation) ring() {
	out, ok := a.s.Stdout.(*os.File)
	if !ok || !term.IsTerminal(int(out.Fd())) {
		return
	}
	v, asked := a.options.Get("bell")
	if asked && v.Text != "no" || !asked && a.s.Now().Sub(a.since) > ringAfter {
		fmt.Fprint(out, "\a")
	}
}

// use runs the command within the allocation.
func (a *allocation) use(ctx context.Context, job *apiv1.Job) int {
	if a.options.Has("no-shell") {
		return 0
	}
	answer, err := a.cluster.Jobs().GetJob(ctx, &apiv1.GetJobRequest{JobId: a.id})
	if err != nil {
		submit.Explain(a.s, "Unable to look up the allocation", err)
		a.relinquish(ctx, submit.CodeRefused, 0)
		return submit.CodeRefused
	}
	c := &command{args: a.words, env: environment(a.run, answer, a.cluster.ClusterName()), dir: a.spec.GetWorkDir(), s: a.s}
	if err := c.start(); err != nil {
		a.s.Errorf("Unable to exec command \"%s\": %v", a.words[0], err)
		a.relinquish(ctx, submit.CodeRefused, 0)
		return submit.CodeRefused
	}
	attempt := job.GetStatus().GetAttempt()
	jobs := a.jobs
	for {
		select {
		case job, ok := <-jobs:
			if !ok {
				jobs = nil // it cannot be watched any more; the command goes on
				continue
			}
			status := job.GetStatus()
			gone := value.Ended(status.GetState()) || status.GetCompleting() || status.GetAttempt() != attempt
			if gone && !a.over {
				a.over = true
				a.revoked(c, status)
			}
		case heard := <-a.heard:
			if number, ok := heard.(syscall.Signal); ok {
				c.signal(number)
			}
		case end := <-c.ended:
			a.relinquish(ctx, end.code, end.signal)
			return end.exit()
		}
	}
}

// revoked tells the user, and the command if that was asked for, that the job is no more.
func (a *allocation) revoked(c *command, status *apiv1.JobStatus) {
	a.s.Line("Job allocation %d has been revoked.", a.id)
	if sentence := status.GetSentence(); sentence != "" {
		a.say("job %d: %s", a.id, sentence)
	}
	if !a.kill.asked {
		return
	}
	signal := a.kill.signal
	if signal == 0 {
		if signal = syscall.SIGTERM; c.interactive {
			signal = syscall.SIGHUP
		}
	}
	c.signal(signal)
	c.signal(syscall.SIGCONT) // one that is stopped would not notice
}

// relinquish gives the nodes back unless they are gone.
func (a *allocation) relinquish(ctx context.Context, code, signal int) {
	if a.over {
		return
	}
	a.say("Relinquishing job allocation %d", a.id)
	a.giveBack(ctx, code, signal)
}

// giveBack ends the job as its command ended. It works after an interrupt, too.
func (a *allocation) giveBack(ctx context.Context, code, signal int) {
	ctx = context.WithoutCancel(ctx)
	request := &apiv1.CancelJobsRequest{
		RequestId: a.s.RequestID(), Filter: &apiv1.JobFilter{JobIds: []uint32{a.id}}, Complete: true, ExitCode: uint32(code), ExitSignal: uint32(signal),
	}
	answer, err := a.cluster.Jobs().CancelJobs(ctx, request)
	if reason := rpc.Reason(err); reason == "LEVEL_TOO_LOW" || reason == "UNKNOWN_FIELD" { // the controllers are older, or being upgraded
		request = &apiv1.CancelJobsRequest{RequestId: a.s.RequestID(), Filter: request.GetFilter()}
		answer, err = a.cluster.Jobs().CancelJobs(ctx, request)
	}
	if err != nil {
		a.s.Errorf("Unable to clean up job allocation %d: %s\nIt keeps its nodes until its time limit, or until you call: scancel %d", a.id, a.s.Sentence(err), a.id)
		return
	}
	for _, refusal := range answer.GetRefusals() {
		if refusal.GetReason() != "JOB_ENDED" {
			submit.ExplainDetail(a.s, fmt.Sprintf("Unable to clean up job allocation %d", a.id), refusal, nil)
		}
	}
}
