package node

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"

	"github.com/muster-hpc/muster/node/run"
)

// Output is where one stream of a task goes.
type Output struct {
	// Path of the file, absolute.
	Path string
	// Spool: the file is in the step's directory, and not one that the user named.
	Spool bool
}

// TaskOutput is where the streams of one task go.
type TaskOutput struct {
	// Rank of the task in the step.
	Rank uint32
	// Stdout and Stderr of it; the same path means that both go to one file.
	Stdout, Stderr Output
}

// StepView is what readers of output need to know of a step.
type StepView struct {
	// Attempt it belongs to.
	Attempt uint32
	// Owner of the job.
	Owner *apiv1.JobOwner
	// Tasks of this node in the order of their local ids.
	Tasks []TaskOutput
	// Started: its tasks were executed.
	Started bool
	// Over: no process of it is left, so that its output is complete.
	Over bool
	// Exits of this node's tasks, once it is over.
	Exits []*apiv1.TaskExit
	// Ended are the ends of single tasks that are known while the step is not over.
	Ended []*apiv1.TaskExit
}

// ErrNoStep means that the node knows no such step.
var ErrNoStep = errors.New("the node knows no such step")

// ErrStepOver means that the step has ended.
var ErrStepOver = errors.New("the step has ended")

// find returns the step under the highest fence; attempt 0 means the latest that has it. a.mu is held.
func (a *Agent) find(job, attempt, step uint32) *located {
	var best *located
	for key, at := range a.attempts {
		if key.job != job || attempt != 0 && key.attempt != attempt {
			continue
		}
		s := at.steps[step]
		if s != nil && (best == nil || CompareFences(at.record.GetFence(), best.attempt.record.GetFence()) > 0) {
			best = &located{s, at}
		}
	}
	return best
}

// located is a step with its attempt.
type located struct {
	*step
	attempt *attempt
}

// Step returns a step as it is now; attempt 0 means the latest on this node that has it. false if there is none.
func (a *Agent) Step(job, attempt, step uint32) (StepView, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := a.find(job, attempt, step)
	if s == nil {
		return StepView{}, false
	}
	view := StepView{
		Attempt: s.key.attempt, Owner: s.record.GetOrder().GetJob().GetOwner(),
		Started: s.startNS != 0, Over: s.phase.over(),
	}
	for _, f := range s.record.GetFiles() {
		t := TaskOutput{
			Rank:   f.GetRank(),
			Stdout: Output{filepath.Join(s.dir, run.OutFile(f.GetRank())), true},
			Stderr: Output{filepath.Join(s.dir, run.ErrFile(f.GetRank())), true},
		}
		if f.GetStdoutPath() != "" {
			t.Stdout = Output{f.GetStdoutPath(), false}
		}
		if f.GetStderrPath() != "" {
			t.Stderr = Output{f.GetStderrPath(), false}
		}
		view.Tasks = append(view.Tasks, t)
	}
	if view.Over {
		view.Exits = s.exits()
	} else {
		view.Ended = s.taskEnds
	}
	return view, true
}

// Changed returns a channel that is closed when something on the node has changed since the call.
func (a *Agent) Changed() <-chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.changed
}

// Input writes a piece to the stdin of a step's tasks here, once they run, and returns how much of the stream was
// taken. It waits while their pipes are full. ErrNoStep, ErrStepOver, or the context's error.
func (a *Agent) Input(ctx context.Context, job, attempt, step uint32, offset uint64, data []byte, end bool) (uint64, error) {
	for {
		a.mu.Lock()
		s := a.find(job, attempt, step)
		if s == nil {
			a.mu.Unlock()
			return 0, ErrNoStep
		}
		handle, phase, changed := s.handle, s.phase, a.changed
		a.mu.Unlock()
		if phase.over() {
			return 0, ErrStepOver
		}
		if handle != nil && phase == PhaseRunning {
			taken, err := handle.Input(ctx, offset, data, end)
			if err == nil || !errors.Is(err, run.ErrClosed) {
				return taken, err
			}
		}
		wait, cancel := context.WithTimeout(ctx, attachRetry) // also a new connection, which is no change
		select {
		case <-changed:
		case <-wait.Done():
		}
		cancel()
		if ctx.Err() != nil {
			return 0, fmt.Errorf("write to the step's stdin: %w", ctx.Err())
		}
	}
}

// ErrNoTerminal means that the step's supervisor knows no terminals: it is older than they are.
var ErrNoTerminal = errors.New("the step has no terminal")

// ResizeTerminal tells the size of the user's terminal to a step, once its supervisor is there. Without a terminal of its own the step is not
// concerned. ErrNoStep, ErrStepOver, ErrNoTerminal, or the context's error.
func (a *Agent) ResizeTerminal(ctx context.Context, job, attempt, step, rows, columns uint32) error {
	for {
		a.mu.Lock()
		s := a.find(job, attempt, step)
		if s == nil {
			a.mu.Unlock()
			return ErrNoStep
		}
		handle, phase, changed := s.handle, s.phase, a.changed
		a.mu.Unlock()
		if phase.over() {
			return ErrStepOver
		}
		if handle != nil && phase != PhasePreparing {
			err := handle.Resize(ctx, rows, columns)
			switch {
			case refused(err):
				return fmt.Errorf("%w: %w", ErrNoTerminal, err)
			case err == nil || !errors.Is(err, run.ErrClosed):
				return err
			}
		}
		wait, cancel := context.WithTimeout(ctx, attachRetry) // also a new connection, which is no change
		select {
		case <-changed:
		case <-wait.Done():
		}
		cancel()
		if ctx.Err() != nil {
			return fmt.Errorf("resize the step's terminal: %w", ctx.Err())
		}
	}
}

// Status describes the agent.
func (a *Agent) Status() *nodev1.StatusResponse {
	a.mu.Lock()
	defer a.mu.Unlock()
	left := max(0, a.lease.end-a.boot())
	return &nodev1.StatusResponse{
		Node: a.cfg.Spec.GetName(), Actual: a.actual(), Controller: a.control.current,
		LeaseLeftMs: uint64(left / time.Millisecond), Unacknowledged: uint64(a.journal.Count()), Instance: a.instance,
	}
}

// Settings returns the cluster's settings as last heard; nil before the node has joined.
func (a *Agent) Settings() *apiv1.Settings {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.control.settings
}

// Cluster returns the cluster's name, and the controllers' API addresses with the one in use first.
func (a *Agent) Cluster() (name string, controllers []string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	current := a.control.pick(a.cfg.Spec.GetName())
	controllers = append(controllers, current)
	for _, address := range a.control.addresses {
		if address != current {
			controllers = append(controllers, address)
		}
	}
	return a.control.cluster, controllers
}

func (a *Agent) clusterName() string {
	name, _ := a.Cluster()
	return name
}
