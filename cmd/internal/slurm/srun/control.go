package srun

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/muster-hpc/muster/cmd/internal/launch"
	"github.com/muster-hpc/muster/cmd/internal/slurm/session"
	"github.com/muster-hpc/muster/cmd/internal/slurm/submit"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/rpc"
)

// Bounds of ending a step; rows of docs/limits.md.
const (
	// twice is how close two Ctrl-C must be to end the step. A signal that comes again as soon after an end was ordered is the same
	// one: timeout and others send it to the process and to its group.
	twice = time.Second
	// afterGrace is how long beyond the job's time between TERM and KILL nodes are waited for once an end was ordered.
	afterGrace = 10 * time.Second
	// usualGrace is taken if nobody tells that time within askGrace.
	usualGrace = 30 * time.Second
	askGrace   = 2 * time.Second
)

// control turns srun's signals into signals and ends of its step.
type control struct {
	run     *run
	cluster session.Cluster
	step    *apiv1.Step
	whole   bool   // the job is srun's own: it ends as a whole
	giveUp  func() // stops waiting for the end at once
	abandon func() // stops waiting for nodes that do not answer; nil if nobody waits

	calls  sync.WaitGroup // orders of an end on their way
	mu     sync.Mutex
	last   time.Time      // last Ctrl-C
	ended  time.Time      // when an end was ordered; zero before
	reason syscall.Signal // that ordered it, or would not wait for it
	timer  *time.Timer    // calls abandon
}

// listen handles signals until stop is called.
func (c *control) listen(ctx context.Context) (stop func()) {
	var group sync.WaitGroup
	done := make(chan struct{})
	group.Add(1)
	go func() {
		defer group.Done()
		for {
			select {
			case s := <-c.run.heard:
				if number, ok := s.(syscall.Signal); ok {
					c.handle(ctx, number)
				}
			case <-done:
				return
			}
		}
	}()
	return func() {
		close(done)
		group.Wait()
		c.calls.Wait()
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.timer != nil {
			c.timer.Stop()
		}
	}
}

func (c *control) handle(ctx context.Context, s syscall.Signal) {
	switch s {
	case syscall.SIGINT:
		c.interrupt(ctx)
	case syscall.SIGTERM, syscall.SIGHUP:
		c.terminate(ctx, s)
	case syscall.SIGCONT:
		if c.run.terminal.IsRaw() { // srun was stopped, and a shell has put the terminal back meanwhile
			c.run.startTerminal()
			return
		}
		c.send(ctx, uint32(s))
	default:
		c.send(ctx, uint32(s))
	}
}

// terminate ends the step; another such signal later stops waiting for its end.
func (c *control) terminate(ctx context.Context, s syscall.Signal) {
	now := c.run.s.Now()
	c.mu.Lock()
	before := c.ended
	c.mu.Unlock()
	switch {
	case before.IsZero():
		c.run.s.Line("error: got %s: ending step %d.%d", describe(s), c.step.GetJobId(), c.step.GetId())
		c.order(ctx, s)
	case now.Sub(before) > twice:
		c.leave(s)
	}
}

// leave stops waiting for the end that was ordered.
func (c *control) leave(s syscall.Signal) {
	c.mu.Lock()
	c.reason = s
	c.mu.Unlock()
	c.run.s.Line("not waiting for the end of step %d.%d; it is being ended", c.step.GetJobId(), c.step.GetId())
	c.giveUp()
}

// order ends the step for a signal, without holding up those that follow.
func (c *control) order(ctx context.Context, s syscall.Signal) {
	c.mu.Lock()
	c.ended, c.reason = c.run.s.Now(), s
	c.mu.Unlock()
	c.calls.Go(func() { c.end(ctx) })
}

// left turns the end of an attachment that a signal or a silent node caused into srun's exit code.
func (c *control) left(err error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.reason != 0 && (errors.Is(err, launch.ErrAbandoned) || errors.Is(err, context.Canceled)):
		return &leftError{code: 128 + int(c.reason), cause: err}
	case errors.Is(err, launch.ErrAbandoned): // --wait ordered the end
		return &leftError{code: submit.CodeRefused, cause: err}
	}
	return err
}

func describe(s os.Signal) string {
	if s == syscall.SIGHUP {
		return "SIGHUP"
	}
	return "SIGTERM"
}

// interrupt handles Ctrl-C: the first says how the step is, a second within a second ends it, one after that gives up.
func (c *control) interrupt(ctx context.Context) {
	s, now := c.run.s, c.run.s.Now()
	c.mu.Lock()
	again := !c.last.IsZero() && now.Sub(c.last) <= twice
	c.last = now
	ended := !c.ended.IsZero()
	c.mu.Unlock()
	switch {
	case ended:
		c.leave(syscall.SIGINT)
	case again, c.run.options.Has("quit-on-interrupt"):
		s.Line("forcing job termination")
		c.order(ctx, syscall.SIGINT)
	case c.run.options.Has("disable-status"):
		c.send(ctx, uint32(syscall.SIGINT))
	default:
		s.Line("interrupt (one more within 1 sec to abort)")
		c.states()
	}
}

// states says how the tasks are.
func (c *control) states() {
	name := fmt.Sprintf("%d.%d", c.step.GetJobId(), c.step.GetId())
	for _, line := range c.run.progress.Lines(name, c.step.GetNumTasks()) {
		c.run.s.Line("%s", line)
	}
}

// end ends the step, or the job if it is srun's own.
func (c *control) end(ctx context.Context) {
	c.mu.Lock()
	if c.ended.IsZero() {
		c.ended = c.run.s.Now()
	}
	c.mu.Unlock()
	if !c.call(ctx, 0) || c.abandon == nil {
		return
	}
	wait := c.grace(ctx) + afterGrace
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.timer == nil && ctx.Err() == nil {
		c.timer = time.AfterFunc(wait, c.abandon)
	}
}

// grace asks for the time between TERM and KILL of the job.
func (c *control) grace(ctx context.Context) time.Duration {
	ctx, cancel := context.WithTimeout(ctx, askGrace)
	defer cancel()
	job, err := c.cluster.Jobs().GetJob(ctx, &apiv1.GetJobRequest{JobId: c.step.GetJobId()})
	if s := job.GetJob().GetSpec().GetKillGraceS(); err == nil && s != 0 {
		return time.Duration(s) * time.Second
	}
	cluster, err := c.cluster.Cluster().GetCluster(ctx, &apiv1.GetClusterRequest{})
	if s := cluster.GetConfiguration().GetSettings().GetKillGraceS(); err == nil && s != 0 {
		return time.Duration(s) * time.Second
	}
	return usualGrace
}

// send sends a signal to the tasks.
func (c *control) send(ctx context.Context, signal uint32) { c.call(ctx, signal) }

// call tells whether the controllers took the order, or had ended the step already.
func (c *control) call(ctx context.Context, signal uint32) bool {
	request := &apiv1.CancelJobsRequest{
		RequestId: c.run.s.RequestID(), Filter: &apiv1.JobFilter{JobIds: []uint32{c.step.GetJobId()}}, Signal: signal,
	}
	if !c.whole || signal != 0 {
		id := c.step.GetId()
		request.Step = &id
	}
	answer, err := c.cluster.Jobs().CancelJobs(ctx, request)
	if err != nil {
		if !over[rpc.Reason(err)] {
			submit.Explain(c.run.s, "Unable to signal the step", err)
			return false
		}
		return true
	}
	taken := true
	for _, refusal := range answer.GetRefusals() {
		if !over[refusal.GetReason()] {
			submit.ExplainDetail(c.run.s, "Unable to signal the step", refusal, nil)
			taken = false
		}
	}
	return taken
}

// over are refusals because the step has ended meanwhile, or its job is about to: it did run, so that a job that does not
// run is ending.
var over = map[string]bool{"JOB_NOT_RUNNING": true, "JOB_ENDED": true, "STEP_ENDED": true, "ATTEMPT_ENDED": true, "STEP_UNKNOWN": true, "JOB_UNKNOWN": true}

// endAfter ends the step after d unless ctx ends before (--wait).
func (c *control) endAfter(ctx context.Context, d time.Duration) {
	go func() { // it ends with ctx, which ends with the attachment
		timer := time.NewTimer(d)
		defer timer.Stop()
		select {
		case <-ctx.Done():
		case <-timer.C:
			c.run.s.Line("First task exited %ds ago", int(d/time.Second))
			c.states()
			c.run.s.Line("Terminating StepId=%d.%d", c.step.GetJobId(), c.step.GetId())
			c.end(ctx)
		}
	}()
}
