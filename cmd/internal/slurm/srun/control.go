package srun

import (
	"context"
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/muster-hpc/muster/cmd/internal/slurm/session"
	"github.com/muster-hpc/muster/cmd/internal/slurm/submit"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/rpc"
)

// twice is how close two Ctrl-C must be to end the step; a row of docs/limits.md.
const twice = time.Second

// control turns srun's signals into signals and ends of its step.
type control struct {
	run     *run
	cluster session.Cluster
	step    *apiv1.Step
	whole   bool   // the job is srun's own: it ends as a whole
	giveUp  func() // stops waiting for the end

	mu    sync.Mutex
	last  time.Time // last Ctrl-C
	ended bool      // an end was ordered
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
	return func() { close(done); group.Wait() }
}

func (c *control) handle(ctx context.Context, s syscall.Signal) {
	switch s {
	case syscall.SIGINT:
		c.interrupt(ctx)
	case syscall.SIGTERM, syscall.SIGHUP:
		c.run.s.Line("error: got %s: ending step %d.%d", describe(s), c.step.GetJobId(), c.step.GetId())
		c.end(ctx)
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

func describe(s os.Signal) string {
	if s == syscall.SIGHUP {
		return "SIGHUP"
	}
	return "SIGTERM"
}

// interrupt handles Ctrl-C: the first says how the step is, a second within a second ends it, a third after that gives up.
func (c *control) interrupt(ctx context.Context) {
	s, now := c.run.s, c.run.s.Now()
	c.mu.Lock()
	again := !c.last.IsZero() && now.Sub(c.last) <= twice
	c.last = now
	ended := c.ended
	c.mu.Unlock()
	switch {
	case ended && again:
		s.Line("not waiting for the end of step %d.%d; it is being ended", c.step.GetJobId(), c.step.GetId())
		c.giveUp()
	case again, c.run.options.Has("quit-on-interrupt"):
		s.Line("forcing job termination")
		c.end(ctx)
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
	c.ended = true
	c.mu.Unlock()
	c.call(ctx, 0)
}

// send sends a signal to the tasks.
func (c *control) send(ctx context.Context, signal uint32) { c.call(ctx, signal) }

func (c *control) call(ctx context.Context, signal uint32) {
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
		}
		return
	}
	for _, refusal := range answer.GetRefusals() {
		if !over[refusal.GetReason()] {
			submit.ExplainDetail(c.run.s, "Unable to signal the step", refusal, nil)
		}
	}
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
