package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/muster-hpc/muster/cmd/internal/slurm/value"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/rpc"
	"github.com/muster-hpc/muster/rpc/client"
)

func (a *app) eventsCommand() *cobra.Command {
	var s selection
	var after string
	var present bool
	c := &cobra.Command{
		Use: "events [flags] [JOB…]", Short: "Print changes of jobs and steps as they happen",
		Long: `Print changes of jobs and steps, in order, until interrupted. Each line ends with its revision (with --json: field "revision"
of the object): give it to --after, at any controller and at any time, and the changes go on from there without a gap. If the cluster
no longer remembers that revision, a line says so and the present state follows.
With --json each line is one WatchJobsResponse.`,
		RunE: func(c *cobra.Command, args []string) error {
			filter, err := s.filter(args)
			if err != nil {
				return err
			}
			from, err := parseRevision(after)
			if err != nil {
				return err
			}
			return a.events(c.Context(), filter, from, present)
		},
	}
	s.flags(c.Flags())
	c.Flags().StringVar(&after, "after", "", "changes after this `revision`, as printed")
	c.Flags().BoolVar(&present, "present", false, "first the present state of all jobs")
	return c
}

// formatRevision and parseRevision write and read INCARNATION.INDEX.ORDINAL.
func formatRevision(r *apiv1.Revision) string {
	return fmt.Sprintf("%d.%d.%d", r.GetIncarnation(), r.GetIndex(), r.GetOrdinal())
}

func parseRevision(text string) (*apiv1.Revision, error) {
	if text == "" {
		return nil, nil
	}
	parts := strings.Split(text, ".")
	if len(parts) == 3 {
		incarnation, err1 := strconv.ParseUint(parts[0], 10, 64)
		index, err2 := strconv.ParseUint(parts[1], 10, 64)
		ordinal, err3 := strconv.ParseUint(parts[2], 10, 32)
		if err1 == nil && err2 == nil && err3 == nil {
			return &apiv1.Revision{Incarnation: incarnation, Index: index, Ordinal: uint32(ordinal)}, nil
		}
	}
	return nil, usagef("--after %q: write a revision as events prints it, for example 1.4711.0", text)
}

// events prints changes; a stream that breaks goes on at the next controller.
func (a *app) events(ctx context.Context, filter *apiv1.JobFilter, after *apiv1.Revision, present bool) error {
	c, err := a.open(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	if after == nil && !present {
		answer, err := c.Jobs().ListJobs(ctx, &apiv1.ListJobsRequest{Page: &apiv1.Page{Size: 1}, Brief: true})
		if err != nil {
			return err
		}
		after = answer.Info.GetRevision()
	}
	for {
		after, err = a.watchOnce(ctx, c, filter, after)
		if ctx.Err() != nil {
			return nil // interrupted: the usual end
		}
		if err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(watchPause):
		}
	}
}

// watchOnce prints changes until the stream breaks, and returns where to go on. An error is one that another try will
// not cure.
func (a *app) watchOnce(ctx context.Context, c *client.Client, filter *apiv1.JobFilter, after *apiv1.Revision) (*apiv1.Revision, error) {
	stream, err := c.Jobs().WatchJobs(ctx, &apiv1.WatchJobsRequest{Filter: filter, After: after})
	if err != nil {
		if rpc.Reason(err) != "" && !noAnswer(err) {
			return after, err
		}
		return after, nil
	}
	defer stream.Close()
	for {
		change, err := stream.Receive()
		if err != nil && rpc.Reason(err) != "" && !noAnswer(err) {
			return after, err // a controller said no
		} else if err != nil {
			return after, nil // the controller ended or died, in the middle of a message perhaps
		}
		if change.Relist {
			fmt.Fprintf(a.errOut, "muster: the cluster no longer remembers revision %s; the present state follows\n", formatRevision(after))
			return nil, nil
		}
		if change.Revision != nil {
			after = change.Revision
		}
		if len(change.Jobs)+len(change.Steps)+len(change.Removed) == 0 {
			continue
		}
		if a.json {
			if err := a.printJSONLine(change); err != nil {
				return after, err
			}
			continue
		}
		a.printChange(change)
	}
}

func (a *app) printChange(change *apiv1.WatchJobsResponse) {
	at := formatRevision(change.Revision)
	line := func(format string, args ...any) {
		text := time.Now().Format("15:04:05") + "  " + fmt.Sprintf(format, args...)
		fmt.Fprintf(a.out, "%s  [%s]\n", strings.TrimRight(text, " "), at)
	}
	colour := func(state string) string {
		if a.colour {
			return paintState(state)
		}
		return state
	}
	for _, j := range change.Jobs {
		detail := j.Status.NodeList
		if sentence := why(j); sentence != "" {
			detail = strings.TrimSpace(detail + " (" + sentence + ")")
		}
		if ended(j) {
			detail = strings.TrimSpace(detail + " exit " + exitText(j.Status.ExitCode, j.Status.ExitSignal))
		}
		line("job %d %s  %s  attempt %d  %s", j.Id, value.Safe(j.Spec.GetName()), colour(jobState(j)), j.Status.Attempt, value.Safe(detail))
	}
	for _, s := range change.Steps {
		line("step %s %s  %s  attempt %d  %s %s", stepName(s), value.Safe(s.Spec.GetName()), colour(stepState(s)), s.Attempt, s.NodeList, value.Safe(stepEnd(s)))
	}
	for _, id := range change.Removed {
		line("job %d  removed from the hot state", id)
	}
}
