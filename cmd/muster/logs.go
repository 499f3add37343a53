package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/muster-hpc/muster/cmd/internal/launch"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	"github.com/muster-hpc/muster/rpc/client"
)

// logRequest is what to read.
type logRequest struct {
	job, step, attempt uint32
	stepGiven          bool
	rank               int64 // -1: all
	label, follow      bool
}

func (a *app) logsCommand() *cobra.Command {
	r := logRequest{}
	c := &cobra.Command{
		Use: "logs [flags] JOB[.STEP]", Short: "Print the output of a job's tasks",
		Long: `Print what the tasks of a step wrote, as it lies on their nodes (in the spool, or in the files of --output): stdout to stdout,
stderr to stderr. Without a step: the batch script of a batch job, the command of others. With --follow it goes on until the job has ended, also over its
restarts.`,
		Example: "  muster logs --follow 17\n  muster logs --rank 3 17.0",
		Args:    exactlyOne("a job"),
		RunE: func(c *cobra.Command, args []string) error {
			var err error
			if strings.Contains(args[0], ".") {
				r.job, r.step, err = parseStep(args[0])
				r.stepGiven = true
			} else {
				var ids []uint32
				if ids, err = parseJobs(args); err == nil {
					r.job = ids[0]
				}
				if len(ids) > 1 {
					err = usagef("logs takes one job, not %q", args[0])
				}
			}
			if err != nil {
				return err
			}
			a.patient = r.follow
			return a.logs(c.Context(), r)
		},
	}
	c.Flags().BoolVarP(&r.follow, "follow", "f", false, "wait for more, until the job has ended")
	c.Flags().BoolVarP(&r.label, "label", "l", false, "put the task's rank in front of each line (with --follow)")
	c.Flags().Int64Var(&r.rank, "rank", -1, "only this `rank`")
	c.Flags().Uint32Var(&r.attempt, "attempt", 0, "only this `attempt` (default: the latest; with --follow it and all later ones)")
	return c
}

func (a *app) logs(ctx context.Context, r logRequest) error {
	c, err := a.open(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	answer, err := c.Jobs().GetJob(ctx, &apiv1.GetJobRequest{JobId: r.job})
	if err != nil {
		return err
	}
	job := answer.Job
	if !r.stepGiven && job.Spec.Kind == apiv1.JobKind_JOB_KIND_BATCH {
		r.step = batchStep
	}
	if !r.follow {
		return a.readOnce(ctx, c, r)
	}
	only := r.attempt != 0
	if r.attempt == 0 {
		r.attempt = max(job.Status.Attempt, 1)
	}
	for ; ; r.attempt++ {
		job, err := awaitAttempt(ctx, c, r.job, r.attempt, func(j *apiv1.Job) {
			fmt.Fprintf(a.errOut, "muster: job %d waits: %s\n", j.Id, why(j))
		})
		if err != nil {
			return err
		}
		if job.Status.Attempt >= r.attempt {
			if err := a.followAttempt(ctx, c, r); err != nil {
				return err
			}
		}
		if job, err = awaitDecision(ctx, c, r.job, r.attempt); err != nil {
			return err
		}
		if only || ended(job) && job.Status.Attempt <= r.attempt {
			return nil
		}
		fmt.Fprintf(a.errOut, "muster: job %d starts again: %s\n", r.job, why(job))
	}
}

// followAttempt prints the output of one attempt until its step has ended. An attempt that ended before the step was
// made has no output.
func (a *app) followAttempt(ctx context.Context, c *client.Client, r logRequest) error {
	o := launch.Options{
		Program: "muster", Job: r.job, Attempt: r.attempt, Step: r.step, Label: r.label, Stdout: a.out, Stderr: a.errOut, StdinRank: -1, Quiet: true,
	}
	if r.rank >= 0 {
		rank := uint32(r.rank)
		o.OnlyStdout, o.OnlyStderr = &rank, &rank
	}
	outcome, err := launch.Attach(ctx, c, o)
	if err == nil && outcome.Cut {
		return &exitError{code: exitFailed}
	}
	if err != nil && !r.stepGiven {
		job, lookErr := c.Jobs().GetJob(ctx, &apiv1.GetJobRequest{JobId: r.job})
		if lookErr == nil && !slices.ContainsFunc(job.Steps, func(s *apiv1.Step) bool { return s.Attempt == r.attempt && s.Id == r.step }) {
			return nil
		}
	}
	return err
}

// readOnce prints what is there now.
func (a *app) readOnce(ctx context.Context, c *client.Client, r logRequest) error {
	answer, err := c.Jobs().GetStep(ctx, &apiv1.GetStepRequest{JobId: r.job, StepId: r.step, Attempt: r.attempt})
	if err != nil {
		return err
	}
	first := uint32(0)
	for _, share := range answer.Shares {
		ranks := first
		first += share.Tasks
		if r.rank >= 0 && (uint32(r.rank) < ranks || uint32(r.rank) >= first) && answer.Step.Spec.GetTaskOptions().GetDistribution() != "cyclic" {
			continue
		}
		if err := a.readNode(ctx, c, r, answer.Step.Attempt, share); err != nil {
			return err
		}
	}
	if r.rank >= int64(first) {
		return usagef("step %s has %d tasks: there is no rank %d", stepName(answer.Step), first, r.rank)
	}
	return nil
}

// readNode prints what one node has. Its spool is read from the beginning to its present end.
func (a *app) readNode(ctx context.Context, c *client.Client, r logRequest, attempt uint32, share *apiv1.NodeShare) error {
	in := &nodev1.ReadOutputRequest{JobId: r.job, StepId: r.step, Attempt: attempt}
	if r.rank >= 0 {
		in.Ranks = []uint32{uint32(r.rank)}
	}
	stream, err := c.Node(share.AgentAddress).ReadOutput(ctx, in)
	if err != nil {
		return fmt.Errorf("read the output on %s: %w", share.Node, err)
	}
	defer stream.Close()
	for {
		piece, err := stream.Receive()
		if errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("read the output on %s: %w", share.Node, err)
		}
		to := a.out
		if piece.Stream == nodev1.OutputStream_OUTPUT_STREAM_STDERR {
			to = a.errOut
		}
		if _, err := to.Write(piece.Data); err != nil {
			return fmt.Errorf("write the output of rank %d: %w", piece.Rank, err)
		}
	}
}
