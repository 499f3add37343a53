package srun

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"

	"github.com/muster-hpc/muster/cmd/internal/launch"
	"github.com/muster-hpc/muster/cmd/internal/slurm/session"
	"github.com/muster-hpc/muster/cmd/internal/slurm/submit"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/rpc"
)

// step runs within the enclosing job.
func (r *run) step(ctx context.Context, cluster session.Cluster) int {
	if err := r.fillFromJob(ctx, cluster); err != nil {
		submit.Explain(r.s, fmt.Sprintf("Unable to confirm allocation for job %d", r.job), err)
		return submit.CodeRefused
	}
	spec, err := r.stepSpec()
	if err != nil {
		return fail(r.s, err)
	}
	r.runProgram(ctx, "prolog", r.prolog, nil)
	answer, code := r.create(ctx, cluster, spec)
	if answer == nil {
		return code
	}
	r.trace.Mark("step created")
	step := answer.GetStep()
	if r.options.Has("verbose") {
		r.s.Line("step %d.%d on %s, %d tasks", r.job, step.GetId(), step.GetNodeList(), step.GetNumTasks())
	}
	outcome, err := r.follow(ctx, cluster, step, answer.GetShares(), false)
	r.runProgram(ctx, "epilog", r.epilog, step)
	if err != nil {
		return r.lost(err)
	}
	return outcome.ExitCode
}

// stepSpec is what the step is, once its shape is known.
func (r *run) stepSpec() (*apiv1.StepSpec, error) {
	spec := r.spec
	r.killByDefault(r.options, spec.GetTaskOptions(), spec.GetResources())
	if r.multiProg != "" {
		programs, err := submit.Programs(r.multiProg, spec.GetResources().GetNtasks())
		if err != nil {
			return nil, err
		}
		spec.TaskOptions.Programs = programs
	}
	return &apiv1.StepSpec{
		Name: spec.GetName(), Args: spec.GetArgs(), WorkDir: spec.GetWorkDir(), StdinPath: spec.GetStdinPath(),
		StdoutPath: spec.GetStdoutPath(), StderrPath: spec.GetStderrPath(), OpenAppend: spec.GetOpenAppend(),
		Umask: spec.GetUmask(), Resources: spec.GetResources(), TaskOptions: spec.GetTaskOptions(),
		TimeLimitS: spec.GetTimeLimitS(), SubmitHost: spec.GetSubmitHost(), Parts: r.parts,
		WarnSignal: spec.GetWarnSignal(), NoKill: spec.GetNoKill(),
	}, nil
}

// busy is the reason code of a step that other steps of its job leave no room for.
const busy = "STEP_BUSY"

// create makes the step. While other steps have what it asks for it waits: it asks again whenever something of the job has changed. The
// answer is nil if there is no step, and code is then srun's exit code.
func (r *run) create(ctx context.Context, cluster session.Cluster, spec *apiv1.StepSpec) (answer *apiv1.CreateStepResponse, code int) {
	ask := func() (*apiv1.CreateStepResponse, error) {
		// A refusal is remembered like any other answer: each try is a request of its own.
		return cluster.Jobs().CreateStep(ctx, &apiv1.CreateStepRequest{
			RequestId: r.s.RequestID(), JobId: r.job, Attempt: r.attempt, Environment: r.env, Spec: spec,
		})
	}
	answer, err := ask()
	if err == nil {
		return answer, 0
	}
	if rpc.Reason(err) != busy || r.immediate != nil && *r.immediate == 0 {
		return nil, r.noStep(err)
	}
	if !r.options.Has("quiet") {
		r.s.Line("Job %d step creation temporarily disabled, retrying (Requested nodes are busy)", r.job)
	}
	if r.options.Has("verbose") {
		r.s.Line("%s", r.s.Sentence(err))
	}
	changes := r.changes(ctx, cluster)
	defer changes.stop()
	limit, stop := r.patience()
	defer stop()
	for {
		select {
		case <-changes.seen:
			if answer, err = ask(); err == nil {
				return r.afterWaiting(ctx, cluster, answer)
			}
			if rpc.Reason(err) != busy {
				return nil, r.noStep(err)
			}
		case <-changes.over:
			return nil, r.noStep(changes.err)
		case <-limit:
			return nil, r.noStep(err)
		case heard := <-r.heard:
			if ends(heard) {
				return nil, r.givenUp(heard)
			}
		case <-ctx.Done():
			return nil, 128 + int(syscall.SIGINT)
		}
	}
}

// afterWaiting is the step, unless a signal came while it was being made: then it is ended, and nothing is left behind.
func (r *run) afterWaiting(ctx context.Context, cluster session.Cluster, answer *apiv1.CreateStepResponse) (*apiv1.CreateStepResponse, int) {
	select {
	case heard := <-r.heard:
		if ends(heard) {
			(&control{run: r, cluster: cluster, step: answer.GetStep()}).end(ctx)
			return nil, r.givenUp(heard)
		}
	default:
	}
	if !r.options.Has("quiet") {
		r.s.Line("Step created for StepId=%d.%d", r.job, answer.GetStep().GetId())
	}
	return answer, 0
}

func (r *run) noStep(err error) int {
	submit.Explain(r.s, fmt.Sprintf("Unable to create step for job %d", r.job), err)
	return submit.CodeRefused
}

// givenUp says that the user does not wait any longer for the step.
func (r *run) givenUp(heard os.Signal) int {
	number := 0
	if s, ok := heard.(syscall.Signal); ok {
		number = int(s)
	}
	r.s.Line("Cancelled pending job step with signal %d", number)
	r.s.Errorf("Unable to create step for job %d: Job/step already completing or completed", r.job)
	return submit.CodeRefused
}

// ends tells whether a signal makes srun give up while it waits.
func ends(heard os.Signal) bool {
	switch heard {
	case syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT:
		return true
	}
	return false
}

// follow attaches until the step's end, with signals handled. whole tells that the job is srun's own.
func (r *run) follow(ctx context.Context, cluster session.Cluster, step *apiv1.Step, shares []*apiv1.NodeShare, whole bool) (launch.Outcome, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	control := &control{run: r, cluster: cluster, step: step, whole: whole, giveUp: cancel}
	f, err := r.openFiles(step, step.GetAttempt() > 1)
	if err != nil {
		control.end(ctx)
		return launch.Outcome{}, err
	}
	abandoned := make(chan struct{})
	control.abandon = func() { close(abandoned) }
	stop := control.listen(ctx)
	defer stop()
	options := launch.Options{
		Program: r.s.Program, Job: step.GetJobId(), Attempt: step.GetAttempt(), Step: step.GetId(),
		Label: r.spec.GetTaskOptions().GetLabel(), Stdout: f.stdout, Stderr: f.stderr, Messages: r.s.Stderr, StdinRank: r.streams.stdinRank,
		NoStdout: r.streams.noStdout, NoStderr: r.streams.noStderr, OnlyStdout: r.streams.onlyStdout, OnlyStderr: r.streams.onlyStderr,
		Created: step, Shares: shares, Trace: r.trace, Progress: &r.progress, Abandon: abandoned,
	}
	if r.streams.stdin {
		options.Stdin = f.stdin
	}
	if r.wait > 0 {
		options.FirstEnd = func() { control.endAfter(ctx, r.wait) }
	}
	if r.terminal != nil {
		resized, silence := r.resized()
		defer silence()
		options.Terminal, options.Resized, options.Started = r.terminal, resized, r.startTerminal
	}
	outcome, err := launch.Attach(ctx, cluster, options)
	r.terminal.Restore()
	if closed := f.close(); closed != nil && err == nil {
		err = fmt.Errorf("%w: %w", launch.ErrOutput, closed)
	}
	if errors.Is(err, launch.ErrOutput) {
		control.end(context.WithoutCancel(ctx))
	}
	return outcome, control.left(err)
}

// leftError is that the end of a step was not waited for, which was said.
type leftError struct {
	code  int // srun's exit code
	cause error
}

// Error says why.
func (e *leftError) Error() string { return e.cause.Error() }

// Unwrap is why.
func (e *leftError) Unwrap() error { return e.cause }

// startTerminal gives the keys to the step, now that there is somebody who reads them. Until then Ctrl-C is heard by srun.
func (r *run) startTerminal() {
	if err := r.terminal.Raw(); err != nil {
		r.s.Errorf("%v", err)
	}
}

// resized tells when the size of the terminal changes.
func (r *run) resized() (<-chan os.Signal, func()) {
	if r.s.Signals == nil {
		return nil, func() {}
	}
	return r.s.Signals(syscall.SIGWINCH)
}
