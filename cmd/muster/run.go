package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/muster-hpc/muster/cmd/internal/launch"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/rpc/client"
)

// cancelTimeout bounds the request that ends a job after its command was interrupted.
const cancelTimeout = 10 * time.Second

func (a *app) runCommand() *cobra.Command {
	var r request
	var label, killOnBadExit, detach, pty bool
	var stdin, multiProg string
	var wait uint32
	c := &cobra.Command{
		Use:   "run [flags] COMMAND [ARGUMENT…]",
		Short: "Run a command on every node of a new job, attached to this terminal",
		Long: `Run a command as the tasks of a new job, without a script: output and stdin are attached to this terminal, and the exit code is
the highest of the tasks' (128 plus the number for a signal). An interrupt cancels the job.
If the job starts again after a failure that was not its own, the output goes on with the next attempt.`,
		Example: `  muster run -N4 --gpus-per-node 8 nvidia-smi -L
  muster run -n16 --label hostname
  muster run --pty --gpus-per-node 1 bash
  muster run -n4 --multi-prog ranks.conf`,
		Args: func(c *cobra.Command, args []string) error {
			if multiProg != "" && len(args) == 0 {
				return nil
			}
			return atLeastOne("a command")(c, args)
		},
		RunE: func(c *cobra.Command, args []string) error {
			switch {
			case multiProg != "" && len(args) > 0:
				return usagef("--multi-prog says what each rank runs; %s is too much", args[0])
			case multiProg != "":
				args = []string{multiProg}
			case pty && detach:
				return usagef("--pty shows a terminal here, and --detach leaves: give one of them")
			}
			spec, err := r.spec()
			if err != nil {
				return err
			}
			spec.Kind, spec.Args = apiv1.JobKind_JOB_KIND_RUN, args
			if !detach && !spec.GetAutomaticRecovery() {
				spec.Requeue = false // nobody would be there to see it start again
			}
			spec.TaskOptions.Label = label
			if killByDefault(spec); c.Flags().Changed("kill-on-bad-exit") {
				spec.TaskOptions.KillOnBadExit = killOnBadExit
			}
			if multiProg != "" {
				if err := programs(spec, multiProg); err != nil {
					return err
				}
			}
			if spec.Name == "" {
				spec.Name = filepath.Base(args[0])
			}
			a.patient = true
			o := launch.Options{Program: "muster run", Label: label, Stdin: a.in, Stdout: a.out, Stderr: a.errOut, StdinRank: -1}
			switch stdin {
			case "all":
				spec.TaskOptions.StdinAll = true
			case "none":
				o.Stdin = eof{}
			case "first":
				o.StdinRank = 0
			default:
				return usagef("--stdin is %q; it is all, first or none", stdin)
			}
			if pty {
				defer a.terminal(spec, &o)()
			}
			return a.run(c.Context(), spec, o, detach, time.Duration(wait)*time.Second)
		},
	}
	c.Flags().SetInterspersed(false)
	r.flags(c.Flags())
	c.Flags().BoolVarP(&label, "label", "l", false, "put the task's rank in front of each line")
	c.Flags().BoolVar(&killOnBadExit, "kill-on-bad-exit", false, "end all tasks when one fails (default: with GPUs on several nodes)")
	c.Flags().BoolVar(&pty, "pty", false, "give task 0 a terminal, and show it on this one")
	c.Flags().StringVar(&multiProg, "multi-prog", "", "`file` that says what each rank runs, instead of COMMAND")
	c.Flags().Uint32VarP(&wait, "wait", "W", 0, "end the job this many `seconds` after its first task has ended (0: never)")
	c.Flags().StringVar(&stdin, "stdin", "all", "which tasks read this terminal: `all`, first or none")
	c.Flags().BoolVar(&detach, "detach", false, "print the job id and return; read the output with `muster logs`")
	return c
}

// eof is an empty stdin.
type eof struct{}

func (eof) Read([]byte) (int, error) { return 0, io.EOF }

// run submits the job, follows its attempts, and returns the command's exit code as an error if it is not 0.
func (a *app) run(ctx context.Context, spec *apiv1.JobSpec, o launch.Options, detach bool, wait time.Duration) error {
	c, err := a.open(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	answer, err := submitJobs(ctx, c, spec, nil, 1)
	if err != nil {
		return err
	}
	if len(answer.Results) != 1 {
		return fmt.Errorf("the cluster answered one submission with %d results", len(answer.Results))
	}
	result := answer.Results[0]
	for _, warning := range result.Warnings {
		fmt.Fprintln(a.errOut, "muster: note:", warning)
	}
	if result.Refusal != nil {
		return a.refused([]*apiv1.ErrorDetail{result.Refusal})
	}
	o.Job = result.JobId
	if detach {
		if a.json {
			return a.printJSON(answer)
		}
		fmt.Fprintf(a.out, "Submitted job %d\n", o.Job)
		return nil
	}
	defer a.impatient(ctx, c, &o, wait)()
	return a.follow(ctx, c, o)
}

// follow attaches to each attempt of a job until it has ended for good.
func (a *app) follow(ctx context.Context, c *client.Client, o launch.Options) error {
	said := ""
	for o.Attempt = 1; ; o.Attempt++ {
		job, err := awaitAttempt(ctx, c, o.Job, o.Attempt, func(j *apiv1.Job) {
			if sentence := why(j); sentence != "" && sentence != said {
				fmt.Fprintf(a.errOut, "muster run: job %d waits: %s\n", o.Job, sentence)
				said = sentence
			}
		})
		if err != nil {
			return a.interrupted(ctx, c, o.Job, err)
		}
		if job.Status.Attempt < o.Attempt || job.Status.StartTime == nil {
			return a.ending(job)
		}
		outcome, err := launch.Attach(ctx, c, o)
		if err != nil {
			return a.interrupted(ctx, c, o.Job, err)
		}
		job, err = awaitDecision(ctx, c, o.Job, o.Attempt)
		switch {
		case err != nil && outcome.ExitCode == 0:
			return a.interrupted(ctx, c, o.Job, err)
		case err == nil && (!ended(job) || job.Status.Attempt > o.Attempt):
			fmt.Fprintf(a.errOut, "muster run: job %d starts again: %s\n", o.Job, why(job))
			continue
		case outcome.ExitCode != 0:
			return &exitError{code: outcome.ExitCode}
		}
		return a.ending(job)
	}
}

// ending turns the end of a job into an exit code.
func (a *app) ending(job *apiv1.Job) error {
	if job.Status.State == apiv1.JobState_JOB_STATE_COMPLETED {
		return nil
	}
	code := int(job.Status.ExitCode)
	if job.Status.ExitSignal != 0 {
		code = 128 + int(job.Status.ExitSignal)
	}
	if code == 0 {
		code = exitFailed
	}
	return &exitError{code: code, err: fmt.Errorf("job %d ended as %s: %s", job.Id, jobState(job), why(job))}
}

// interrupted ends the job if the user interrupted the command; a job is never left behind by accident.
func (a *app) interrupted(ctx context.Context, c *client.Client, job uint32, cause error) error {
	if ctx.Err() == nil && !errors.Is(cause, launch.ErrOutput) {
		return cause
	}
	cancelContext, cancel := context.WithTimeout(context.WithoutCancel(ctx), cancelTimeout)
	defer cancel()
	_, err := c.Jobs().CancelJobs(cancelContext, &apiv1.CancelJobsRequest{
		RequestId: client.NewRequestID(), Filter: &apiv1.JobFilter{JobIds: []uint32{job}},
	})
	if err != nil {
		return fmt.Errorf("interrupted, and job %d could not be cancelled (end it with `muster cancel %d`): %w", job, job, err)
	}
	fmt.Fprintf(a.errOut, "muster run: job %d was cancelled\n", job)
	return &exitError{code: 130}
}

// awaitAttempt waits until the attempt runs or the job has ended for good; wait is called with each state on the way.
func awaitAttempt(ctx context.Context, c *client.Client, id, attempt uint32, waits func(*apiv1.Job)) (*apiv1.Job, error) {
	return awaitJob(ctx, c, id, func(j *apiv1.Job) bool {
		if ended(j) || j.Status.Attempt > attempt {
			return true
		}
		if j.Status.Attempt == attempt && j.Status.State == apiv1.JobState_JOB_STATE_RUNNING {
			return true
		}
		if j.Status.State == apiv1.JobState_JOB_STATE_PENDING {
			waits(j)
		}
		return false
	})
}

// awaitDecision waits until it is known what follows an attempt: the job's end, or another attempt.
func awaitDecision(ctx context.Context, c *client.Client, id, attempt uint32) (*apiv1.Job, error) {
	return awaitJob(ctx, c, id, func(j *apiv1.Job) bool {
		return ended(j) || j.Status.Attempt > attempt || j.Status.State == apiv1.JobState_JOB_STATE_PENDING
	})
}

// watchPause is the time before a broken watch is begun again.
const watchPause = 200 * time.Millisecond

// awaitJob watches one job until done says so. A watch that breaks is begun again: controllers come and go.
func awaitJob(ctx context.Context, c *client.Client, id uint32, done func(*apiv1.Job) bool) (*apiv1.Job, error) {
	for {
		answer, err := c.Jobs().GetJob(ctx, &apiv1.GetJobRequest{JobId: id})
		if err != nil {
			return nil, err
		}
		if done(answer.Job) {
			return answer.Job, nil
		}
		job, err := watchJob(ctx, c, answer.Job, answer.Info.GetRevision(), done)
		if job != nil || err != nil {
			return job, err
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(watchPause):
		}
	}
}

// watchJob watches a job from a revision; nil without an error means that the watch broke.
func watchJob(ctx context.Context, c *client.Client, job *apiv1.Job, after *apiv1.Revision, done func(*apiv1.Job) bool) (*apiv1.Job, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.Jobs().WatchJobs(ctx, &apiv1.WatchJobsRequest{Filter: &apiv1.JobFilter{JobIds: []uint32{job.Id}}, After: after})
	if err != nil {
		return nil, ctx.Err()
	}
	defer stream.Close()
	for {
		change, err := stream.Receive()
		if err != nil || change.Relist {
			return nil, ctx.Err()
		}
		for _, j := range change.Jobs {
			if j.Id == job.Id && done(j) {
				return j, nil
			}
		}
	}
}
