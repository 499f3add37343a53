package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/muster-hpc/muster/cmd/internal/config"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/notation"
)

func (a *app) showCommand() *cobra.Command {
	c := &cobra.Command{Use: "show job|step|node|partition NAME", Short: "Show everything about one thing", Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			return usagef("show what? %s", c.UseLine())
		}}
	c.AddCommand(
		&cobra.Command{Use: "job JOB", Short: "Show a job with its attempts and steps", Args: exactlyOne("a job id"),
			RunE: func(c *cobra.Command, args []string) error { return a.showJob(c.Context(), args[0]) }},
		&cobra.Command{Use: "step JOB.STEP", Short: "Show a step (JOB.batch: the batch script)", Args: exactlyOne("a step as in 17.0"),
			RunE: func(c *cobra.Command, args []string) error { return a.showStep(c.Context(), args[0]) }},
		&cobra.Command{Use: "node NODE", Short: "Show a node", Args: exactlyOne("a node's name"),
			RunE: func(c *cobra.Command, args []string) error { return a.showNode(c.Context(), args[0]) }},
		&cobra.Command{Use: "partition NAME", Short: "Show a partition", Args: exactlyOne("a partition's name"),
			RunE: func(c *cobra.Command, args []string) error { return a.showPartition(c.Context(), args[0]) }},
	)
	return c
}

func (a *app) showJob(ctx context.Context, text string) error {
	ids, err := parseJobs([]string{text})
	if err != nil {
		return err
	}
	if len(ids) != 1 {
		return usagef("show job takes one job id, not %q", text)
	}
	c, err := a.open(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	answer, err := c.Jobs().GetJob(ctx, &apiv1.GetJobRequest{JobId: ids[0]})
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(answer)
	}
	now := time.Now()
	jobFields(answer.Job, now).write(a.out)
	if len(answer.Shares) > 0 {
		t := table{header: []string{"NODE", "TASKS", "CPUS", "GPUS", "MEMORY"}, right: map[int]bool{1: true}}
		for _, s := range answer.Shares {
			t.add(s.Node, strconv.Itoa(int(s.Tasks)), s.Cpus, s.Gpus, config.FormatMemory(s.MemoryMb))
		}
		fmt.Fprintln(a.out)
		t.write(a.out, a.colour)
	}
	if len(answer.Attempts) > 0 {
		t := table{header: []string{"ATTEMPT", "STATE", "STARTED", "ENDED", "END"}, right: map[int]bool{0: true}, paint: states(1)}
		for _, at := range answer.Attempts {
			state := strings.TrimPrefix(at.State.String(), "ATTEMPT_STATE_")
			t.add(strconv.Itoa(int(at.Number)), state, moment(at.StartTime), moment(at.EndTime), attemptEnd(at))
		}
		fmt.Fprintln(a.out)
		t.write(a.out, a.colour)
	}
	if len(answer.Steps) > 0 {
		t := table{header: []string{"STEP", "ATTEMPT", "NAME", "STATE", "TASKS", "NODES", "TIME", "SKEW", "END"},
			right: map[int]bool{1: true, 4: true, 6: true, 7: true}, paint: states(3)}
		for _, s := range answer.Steps {
			t.add(stepName(s), strconv.Itoa(int(s.Attempt)), s.Spec.GetName(), stepState(s), strconv.Itoa(int(s.NumTasks)), s.NodeList,
				elapsed(s.StartTime, s.EndTime, now), startSkew(s), stepEnd(s))
		}
		fmt.Fprintln(a.out)
		t.write(a.out, a.colour)
	}
	return nil
}

func attemptEnd(at *apiv1.Attempt) string {
	class := strings.ToLower(strings.TrimPrefix(at.Failure.String(), "FAILURE_CLASS_"))
	if at.Failure == apiv1.FailureClass_FAILURE_CLASS_UNSPECIFIED {
		class = ""
	}
	switch {
	case class == "":
		return at.EndSentence
	case at.EndSentence == "":
		return class
	}
	return class + ": " + at.EndSentence
}

// startSkew is the time between the first and the last node that began a step, by the nodes' own clocks; empty until two nodes have told.
func startSkew(s *apiv1.Step) string {
	if s.StartSkewUs == 0 {
		return ""
	}
	return fmt.Sprintf("%.1f ms", float64(s.StartSkewUs)/1000)
}

// stepEnd sums up the exits of a step that are not 0.
func stepEnd(s *apiv1.Step) string {
	var parts []string
	for _, e := range s.Exits {
		if e.Code == 0 && e.Signal == 0 && e.LaunchError == "" {
			continue
		}
		who := fmt.Sprintf("task %d", e.FirstRank)
		if e.Count > 1 {
			who = fmt.Sprintf("tasks %d-%d", e.FirstRank, e.FirstRank+e.Count-1)
		}
		what := "exit " + exitText(e.Code, e.Signal)
		if e.LaunchError != "" {
			what = e.LaunchError
		}
		if parts = append(parts, who+": "+what); len(parts) == 3 {
			parts = append(parts, "…")
			break
		}
	}
	if s.EndSentence != "" {
		parts = append([]string{s.EndSentence}, parts...)
	}
	return strings.Join(parts, "; ")
}

func jobFields(j *apiv1.Job, now time.Time) *fields {
	f := &fields{}
	sp, st, q := j.Spec, j.Status, j.Spec.GetResources()
	f.add("Job", "%d %s", j.Id, sp.Name)
	f.add("State", "%s", jobState(j))
	f.add("Reason", "%s", why(j))
	f.add("User", "%s (%d)", j.Owner.GetUser(), j.Owner.GetUid())
	f.add("Account", "%s", sp.Account)
	f.add("Partition", "%s", st.Partition)
	f.add("Priority", "%d", st.Priority)
	f.add("Submitted", "%s", moment(st.SubmitTime))
	f.add("Started", "%s", moment(st.StartTime))
	f.add("Ended", "%s", moment(st.EndTime))
	f.add("Run time", "%s", elapsed(st.StartTime, st.EndTime, now))
	if st.TimeLimitS > 0 {
		f.add("Time limit", "%s", config.FormatTime(st.TimeLimitS))
	}
	if ended(j) {
		f.add("Exit code", "%s", exitText(st.ExitCode, st.ExitSignal))
	}
	if st.Attempt > 0 {
		f.add("Attempt", "%d (started again %d times)", st.Attempt, st.Restarts)
	}
	f.add("Nodes", "%s", st.NodeList)
	f.add("Asks for", "%s", asked(q))
	f.add("Recovery", "%s", recovery(sp))
	f.add("Command", "%s", strings.TrimSpace(strings.TrimPrefix(sp.CommandLine, "(null)")))
	f.add("Directory", "%s", sp.WorkDir)
	f.add("Output", "%s", sp.StdoutPath)
	f.add("Comment", "%s", sp.Comment)
	return f
}

func recovery(sp *apiv1.JobSpec) string {
	switch {
	case sp.AutomaticRecovery && sp.Requeue:
		return "automatic: stops itself where a node loses contact, starts again elsewhere"
	case sp.Requeue:
		return "starts again after a failure that was not its own"
	}
	return "never starts again"
}

// asked writes a request in words.
func asked(q *apiv1.ResourceRequest) string {
	var parts []string
	add := func(n uint64, format string) {
		if n > 0 {
			parts = append(parts, fmt.Sprintf(format, n))
		}
	}
	if q.GetNodesMax() > q.GetNodesMin() {
		parts = append(parts, fmt.Sprintf("%d-%d nodes", q.NodesMin, q.NodesMax))
	} else {
		add(uint64(q.GetNodesMin()), "nodes: %d")
	}
	add(uint64(q.GetNtasks()), "tasks: %d")
	add(uint64(q.GetNtasksPerNode()), "tasks per node: %d")
	add(uint64(q.GetCpusPerTask()), "CPUs per task: %d")
	gpu := strings.TrimSpace(q.GetGpuType() + " GPUs")
	add(uint64(q.GetGpusPerNode()), gpu+" per node: %d")
	add(uint64(q.GetGpusTotal()), gpu+": %d")
	add(uint64(q.GetGpusPerTask()), gpu+" per task: %d")
	add(q.GetMemoryPerNodeMb(), "MiB per node: %d")
	add(q.GetMemoryPerCpuMb(), "MiB per CPU: %d")
	add(q.GetMemoryPerGpuMb(), "MiB per GPU: %d")
	if q.GetExclusive() {
		parts = append(parts, "whole nodes")
	}
	return strings.Join(parts, ", ")
}

// parseStep reads "17.0", "17.batch".
func parseStep(text string) (job, step uint32, err error) {
	first, second, ok := strings.Cut(text, ".")
	id, err1 := strconv.ParseUint(first, 10, 32)
	number, err2 := strconv.ParseUint(second, 10, 32)
	if second == "batch" {
		number, err2 = batchStep, nil
	}
	if !ok || err1 != nil || err2 != nil || id == 0 {
		return 0, 0, usagef("%q names no step: write JOB.STEP, for example 17.0 or 17.batch", text)
	}
	return uint32(id), uint32(number), nil
}

func (a *app) showStep(ctx context.Context, text string) error {
	job, step, err := parseStep(text)
	if err != nil {
		return err
	}
	c, err := a.open(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	answer, err := c.Jobs().GetStep(ctx, &apiv1.GetStepRequest{JobId: job, StepId: step})
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(answer)
	}
	s, f := answer.Step, &fields{}
	f.add("Step", "%s %s", stepName(s), s.Spec.GetName())
	f.add("Attempt", "%d", s.Attempt)
	f.add("State", "%s", stepState(s))
	f.add("Tasks", "%d on %s", s.NumTasks, s.NodeList)
	f.add("Command", "%s", strings.Join(s.Spec.GetArgs(), " "))
	f.add("Started", "%s", moment(s.StartTime))
	f.add("Ended", "%s", moment(s.EndTime))
	f.add("Run time", "%s", elapsed(s.StartTime, s.EndTime, time.Now()))
	f.add("Start skew", "%s", startSkew(s))
	f.add("End", "%s", stepEnd(s))
	f.write(a.out)
	return nil
}

func (a *app) showNode(ctx context.Context, name string) error {
	c, err := a.open(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	answer, err := c.Cluster().ListNodes(ctx, &apiv1.ListNodesRequest{Names: []string{name}})
	if err != nil {
		return err
	}
	if len(answer.Nodes) == 0 {
		return fmt.Errorf("there is no node %s: see `muster nodes`", name)
	}
	n := answer.Nodes[0]
	if a.json {
		return a.printJSON(n)
	}
	f := &fields{}
	f.add("Node", "%s (number %d)", n.Spec.Name, n.Number)
	f.add("State", "%s", stateIn(n, answer))
	if n.Reason != "" {
		f.add("Reason", "%s (%s, %s)", n.Reason, n.ReasonBy, moment(n.ReasonTime))
	}
	f.add("Partitions", "%s", partitionsOf(n.Spec.Name, answer.Partitions))
	f.add("CPUs", "%d of %d allocated (%s)", n.CpusAllocated, n.Spec.Cpus, notation.Mask(n.CpusAllocatedMask))
	f.add("Memory", "%s of %s allocated", config.FormatMemory(n.MemoryAllocatedMb), config.FormatMemory(n.Spec.MemoryMb))
	if len(n.Spec.Gpus) > 0 {
		busy := notation.Mask(n.GpusAllocatedMask)
		f.add("GPUs", "%s (%s)", gpuCounts(n), busy)
	}
	var owners []string
	for _, o := range n.Owners {
		owners = append(owners, fmt.Sprintf("%d (attempt %d)", o>>32, uint32(o)))
	}
	f.add("Jobs", "%s", strings.Join(owners, ", "))
	f.add("Agent", "%s, version %s", n.Spec.AgentAddress, n.Spec.AgentVersion)
	f.add("Epoch", "%d", n.Epoch)
	f.add("Boot", "%s", n.Instance.GetBootId())
	f.add("Joined", "%s", moment(n.JoinTime))
	if n.Spec.Declared {
		f.add("Hardware", "declared, not detected")
	}
	f.add("Limitations", "%s", strings.Join(n.Spec.Limitations, "; "))
	if n.HealthDrainWithheld {
		f.add("Drain", "withheld: checks have drained as many nodes within the hour as they may (setting health_drain_percent)")
	}
	f.write(a.out)
	a.writeDevices(n)
	writeConditions(a.out, n)
	return nil
}

func (a *app) showPartition(ctx context.Context, name string) error {
	c, err := a.open(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	answer, err := c.Cluster().ListNodes(ctx, &apiv1.ListNodesRequest{})
	if err != nil {
		return err
	}
	var known []string
	for _, p := range answer.Partitions {
		if p.Name != name {
			known = append(known, p.Name)
			continue
		}
		if a.json {
			return a.printJSON(p)
		}
		f := &fields{}
		f.add("Partition", "%s", p.Name)
		f.add("State", "%s", map[bool]string{false: "UP", true: "DOWN"}[p.Down])
		f.add("Default", "%s", map[bool]string{false: "no", true: "yes"}[p.IsDefault])
		f.add("Nodes", "%s", p.Nodes)
		limit := func(seconds uint32) string {
			if seconds == 0 {
				return "unlimited"
			}
			return config.FormatTime(seconds)
		}
		f.add("Longest time", "%s", limit(p.MaxTimeS))
		f.add("Default time", "%s", map[bool]string{true: "the longest", false: config.FormatTime(p.DefaultTimeS)}[p.DefaultTimeS == 0])
		if p.MaxNodes > 0 {
			f.add("Most nodes", "%d", p.MaxNodes)
		}
		f.add("Tier", "%d", p.PriorityTier)
		if p.Exclusive {
			f.add("Whole nodes", "always")
		}
		f.write(a.out)
		return nil
	}
	return fmt.Errorf("there is no partition %s: this cluster has %s", name, strings.Join(known, ", "))
}
