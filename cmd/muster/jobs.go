package main

import (
	"context"
	"fmt"
	"os/user"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/rpc/client"
)

// selection picks jobs by flags; see apiv1.JobFilter.
type selection struct {
	users, states, partitions, names, accounts []string
	nodes                                      string
	mine                                       bool
}

func (s *selection) flags(f *pflag.FlagSet) {
	f.StringSliceVarP(&s.users, "user", "u", nil, "jobs of these `users` (names or ids)")
	f.BoolVar(&s.mine, "me", false, "own jobs")
	f.StringSliceVarP(&s.states, "state", "s", nil, "jobs in these `states`")
	f.StringSliceVarP(&s.partitions, "partition", "p", nil, "jobs of these `partitions`")
	f.StringSliceVarP(&s.names, "name", "J", nil, "jobs of these `names`")
	f.StringSliceVarP(&s.accounts, "account", "A", nil, "jobs of these `accounts`")
	f.StringVarP(&s.nodes, "node", "w", "", "jobs on these nodes, `n[1-2]`")
}

// filter makes the API's filter.
func (s *selection) filter(ids []string) (*apiv1.JobFilter, error) {
	jobs, err := parseJobs(ids)
	if err != nil {
		return nil, err
	}
	filter := &apiv1.JobFilter{JobIds: jobs, Partitions: s.partitions, Names: s.names, Accounts: s.accounts}
	if s.nodes != "" {
		if filter.Nodes, err = parseNames([]string{s.nodes}); err != nil {
			return nil, err
		}
	}
	for _, state := range s.states {
		value, err := parseState(state)
		if err != nil {
			return nil, err
		}
		filter.States = append(filter.States, value)
	}
	if s.mine {
		filter.Uids = append(filter.Uids, uint32(syscall.Getuid()))
	}
	for _, name := range s.users {
		uid, err := strconv.ParseUint(name, 10, 32)
		if err != nil {
			account, lookupErr := user.Lookup(name)
			if lookupErr != nil {
				return nil, usagef("there is no user %q here: write a user id", name)
			}
			if uid, err = strconv.ParseUint(account.Uid, 10, 32); err != nil {
				return nil, fmt.Errorf("user %s has the id %q: %w", name, account.Uid, err)
			}
		}
		filter.Uids = append(filter.Uids, uint32(uid))
	}
	return filter, nil
}

func (a *app) jobsCommand() *cobra.Command {
	var s selection
	var all bool
	var limit int
	c := &cobra.Command{
		Use: "jobs [flags] [JOB…]", Short: "List jobs",
		Long: "List jobs that have not ended; with --all, a --state of the end, or job ids, also others that the cluster remembers.",
		RunE: func(c *cobra.Command, args []string) error {
			filter, err := s.filter(args)
			if err != nil {
				return err
			}
			filter.Active = !all && len(args) == 0 && len(s.states) == 0
			return a.listJobs(c.Context(), filter, limit)
		},
	}
	s.flags(c.Flags())
	c.Flags().BoolVarP(&all, "all", "a", false, "also jobs that have ended")
	c.Flags().IntVar(&limit, "limit", 0, "at most `n` jobs, the newest (0: all)")
	return c
}

func (a *app) listJobs(ctx context.Context, filter *apiv1.JobFilter, limit int) error {
	c, err := a.open(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	whole := &apiv1.ListJobsResponse{}
	err = every(ctx, c, &apiv1.ListJobsRequest{Filter: filter, Brief: !a.json}, func(page *apiv1.ListJobsResponse) error {
		whole.Jobs, whole.Info = append(whole.Jobs, page.Jobs...), page.Info
		if limit > 0 && len(whole.Jobs) > limit {
			whole.Jobs = whole.Jobs[len(whole.Jobs)-limit:]
		}
		return nil
	})
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(whole)
	}
	t := table{
		header: []string{"JOB", "NAME", "USER", "PARTITION", "STATE", "TIME", "NODES", "GPUS", "EXIT", "NODELIST / REASON"},
		right:  map[int]bool{0: true, 5: true, 6: true, 7: true},
		paint:  states(4),
	}
	now := time.Now()
	for _, j := range whole.Jobs {
		t.add(jobRow(j, now)...)
	}
	t.write(a.out, a.colour)
	return nil
}

func jobRow(j *apiv1.Job, now time.Time) []string {
	st := j.Status
	where, exit := st.NodeList, ""
	switch {
	case ended(j):
		exit = exitText(st.ExitCode, st.ExitSignal)
		if sentence := why(j); sentence != "" && st.State != apiv1.JobState_JOB_STATE_COMPLETED {
			where = strings.TrimSpace(where + " (" + sentence + ")")
		}
	case st.State == apiv1.JobState_JOB_STATE_PENDING:
		where = "(" + why(j) + ")"
		if why(j) == "" {
			where = ""
		}
	}
	nodes, gpus := "", ""
	if st.NumNodes > 0 {
		nodes = strconv.Itoa(int(st.NumNodes))
	} else if n := j.Spec.GetResources().GetNodesMin(); n > 0 {
		nodes = strconv.Itoa(int(n))
	}
	if st.NumGpus > 0 {
		gpus = strconv.Itoa(int(st.NumGpus))
	}
	start := st.StartTime
	if st.State == apiv1.JobState_JOB_STATE_PENDING {
		start = nil
	}
	return []string{
		strconv.Itoa(int(j.Id)), j.Spec.Name, j.Owner.GetUser(), st.Partition, jobState(j), elapsed(start, st.EndTime, now), nodes, gpus, exit, where,
	}
}

func (a *app) cancelCommand() *cobra.Command {
	var s selection
	var signal string
	var batch, full bool
	c := &cobra.Command{
		Use: "cancel [flags] [JOB…]", Short: "Cancel jobs, or send them a signal",
		Long:    "Cancel jobs by id or by what they are (--me, --state, …; at least one is needed), or send them a signal.",
		Example: "  muster cancel 17 20-25\n  muster cancel --me --state pending\n  muster cancel --signal USR1 17",
		RunE: func(c *cobra.Command, args []string) error {
			filter, err := s.filter(args)
			if err != nil {
				return err
			}
			if len(args) == 0 && !s.mine && len(s.users)+len(s.states)+len(s.partitions)+len(s.names)+len(s.accounts)+len(filter.Nodes) == 0 {
				return usagef("cancel needs job ids or a choice (--me, --state …): %s", c.UseLine())
			}
			filter.Active = len(args) == 0
			in := &apiv1.CancelJobsRequest{RequestId: client.NewRequestID(), Filter: filter, BatchOnly: batch, Full: full}
			if signal != "" {
				if in.Signal, err = parseSignal(signal); err != nil {
					return err
				}
			} else if batch || full {
				return usagef("--batch and --full go with --signal")
			}
			return a.cancel(c.Context(), in)
		},
	}
	s.flags(c.Flags())
	c.Flags().StringVar(&signal, "signal", "", "send this `signal` (name or number) instead of ending the job")
	c.Flags().BoolVar(&batch, "batch", false, "with --signal: only the batch script")
	c.Flags().BoolVar(&full, "full", false, "with --signal: the batch script and all steps")
	return c
}

func (a *app) cancel(ctx context.Context, in *apiv1.CancelJobsRequest) error {
	c, err := a.open(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	answer, err := c.Jobs().CancelJobs(ctx, in)
	if err != nil {
		return err
	}
	if a.json {
		if err := a.printJSON(answer); err != nil {
			return err
		}
	} else {
		verb := "Cancelled"
		if in.Signal != 0 {
			verb = "Signalled"
		}
		for _, id := range answer.JobIds {
			fmt.Fprintf(a.out, "%s job %d\n", verb, id)
		}
		if len(answer.JobIds)+len(answer.Refusals) == 0 {
			fmt.Fprintln(a.errOut, "muster: no job matches")
		}
	}
	return a.refused(answer.Refusals)
}

// signals are those that make sense for a job.
var signals = map[string]syscall.Signal{
	"HUP": syscall.SIGHUP, "INT": syscall.SIGINT, "QUIT": syscall.SIGQUIT, "ABRT": syscall.SIGABRT, "KILL": syscall.SIGKILL,
	"USR1": syscall.SIGUSR1, "USR2": syscall.SIGUSR2, "TERM": syscall.SIGTERM, "CONT": syscall.SIGCONT, "STOP": syscall.SIGSTOP,
	"TSTP": syscall.SIGTSTP, "ALRM": syscall.SIGALRM, "URG": syscall.SIGURG, "PIPE": syscall.SIGPIPE,
}

func parseSignal(text string) (uint32, error) {
	if n, err := strconv.ParseUint(text, 10, 32); err == nil && n >= 1 && n <= 64 {
		return uint32(n), nil
	}
	if s, ok := signals[strings.TrimPrefix(strings.ToUpper(text), "SIG")]; ok {
		return uint32(s), nil
	}
	return 0, usagef("--signal %q: write a name such as USR1 or TERM, or a number from 1 to 64", text)
}

func (a *app) holdCommand() *cobra.Command {
	return &cobra.Command{
		Use: "hold JOB…", Short: "Keep waiting jobs from starting", Args: atLeastOne("job ids"),
		RunE: func(c *cobra.Command, args []string) error {
			return a.update(c.Context(), args, "Held", &apiv1.UpdateJobRequest{Change: &apiv1.UpdateJobRequest_Hold{Hold: true}})
		},
	}
}

func (a *app) releaseCommand() *cobra.Command {
	return &cobra.Command{
		Use: "release JOB…", Short: "Let held jobs start", Args: atLeastOne("job ids"),
		RunE: func(c *cobra.Command, args []string) error {
			return a.update(c.Context(), args, "Released", &apiv1.UpdateJobRequest{Change: &apiv1.UpdateJobRequest_Hold{Hold: false}})
		},
	}
}

func (a *app) requeueCommand() *cobra.Command {
	var hold bool
	c := &cobra.Command{
		Use: "requeue JOB…", Short: "End the current attempt of jobs and queue them again", Args: atLeastOne("job ids"),
		RunE: func(c *cobra.Command, args []string) error {
			return a.update(c.Context(), args, "Requeued", &apiv1.UpdateJobRequest{Change: &apiv1.UpdateJobRequest_Requeue{Requeue: true}, RequeueHold: hold})
		},
	}
	c.Flags().BoolVar(&hold, "hold", false, "and hold them")
	return c
}

// update changes jobs.
func (a *app) update(ctx context.Context, ids []string, verb string, in *apiv1.UpdateJobRequest) error {
	jobs, err := parseJobs(ids)
	if err != nil {
		return err
	}
	in.JobIds, in.RequestId = jobs, client.NewRequestID()
	c, err := a.open(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	answer, err := c.Jobs().UpdateJob(ctx, in)
	if err != nil {
		return err
	}
	if a.json {
		if err := a.printJSON(answer); err != nil {
			return err
		}
	} else if done := len(jobs) - len(answer.Refusals); done > 0 {
		refused := map[string]bool{}
		for _, r := range answer.Refusals {
			refused[r.Subject] = true
		}
		for _, id := range jobs {
			if !refused[fmt.Sprintf("job %d", id)] {
				fmt.Fprintf(a.out, "%s job %d\n", verb, id)
			}
		}
	}
	return a.refused(answer.Refusals)
}
