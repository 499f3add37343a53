package supervise

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/muster-hpc/muster/node/run/cgroup"
	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
)

// removeTimeout bounds the wait for the step's groups to become empty once its last process is reaped. The agent removes
// what is left. A row of docs/limits.md.
const removeTimeout = 500 * time.Millisecond

// confinement is the control groups of the step. A nil confinement has none and does nothing.
type confinement struct {
	step  *cgroup.Group
	tasks []*cgroup.Group
	// missing are sentences about limits that the machine does not offer.
	missing []string
	// denied: killing by group failed; it was said.
	denied bool
}

// confine makes the groups of a plan and sets their limits; nil if the plan has none.
func confine(plan *supervisorv1.StepPlan) (*confinement, error) {
	where := plan.GetControlGroups()
	if where == nil {
		return nil, nil
	}
	roots := make(map[string]string)
	for _, root := range where.GetRoots() {
		roots[root.GetController()] = root.GetPath()
	}
	h, err := cgroup.New(cgroup.Version(where.GetVersion()), roots)
	if err != nil {
		return nil, fmt.Errorf("the step's control groups: %w", err)
	}
	job, err := h.Job(where.GetJobId(), where.GetAttempt())
	if err != nil {
		return nil, fmt.Errorf("the job's control groups: %w", err)
	}
	c := new(confinement)
	if err := c.limit(job, where.GetJob()); err != nil {
		return nil, fmt.Errorf("limiting the job: %w", err)
	}
	if c.step, err = h.Step(where.GetJobId(), where.GetAttempt(), where.GetStepId()); err != nil {
		return nil, fmt.Errorf("the step's control groups: %w", err)
	}
	if err := c.limit(c.step, where.GetStep()); err != nil {
		return c, fmt.Errorf("limiting the step: %w", err)
	}
	for _, t := range plan.GetTasks() {
		group, err := c.step.Task(t.GetRank())
		if err != nil {
			return c, fmt.Errorf("the control groups of rank %d: %w", t.GetRank(), err)
		}
		c.tasks = append(c.tasks, group)
	}
	return c, nil
}

func (c *confinement) limit(g *cgroup.Group, l *supervisorv1.GroupLimits) error {
	limits := cgroup.Limits{CPUs: l.GetCpuMask(), CPUShares: l.GetCpuShares(), MemoryMB: l.GetMemoryMb(), SwapMB: l.GetSwapMb(), PIDs: l.GetPids()}
	names, others := l.GetDeniedDevices(), true
	if len(l.GetAllowedDevices()) > 0 {
		names, others = l.GetAllowedDevices(), false
	}
	if len(names) > 0 {
		limits.Devices = &cgroup.DeviceRules{Others: others}
		for _, name := range names {
			d, err := cgroup.ParseDevice(name)
			if err != nil {
				return err
			}
			limits.Devices.Listed = append(limits.Devices.Listed, d)
		}
	}
	missing, err := g.Apply(limits)
	for _, sentence := range missing {
		if !slices.Contains(c.missing, sentence) {
			c.missing = append(c.missing, sentence)
		}
	}
	return err
}

// task is the group of the i-th task; nil if there is none.
func (c *confinement) task(i int) *cgroup.Group {
	if c == nil {
		return nil
	}
	return c.tasks[i]
}

// kill reaches what left its parents, session and environment.
func (c *confinement) kill(log *slog.Logger) {
	if c == nil {
		return
	}
	if err := c.step.Kill(); err != nil && !c.denied {
		c.denied = true
		log.Error("the step's control group cannot be killed; its processes are killed one by one", "error", err)
	}
}

// usage is what the i-th task used so far; nil if nothing counts it.
func (c *confinement) usage(i int) *supervisorv1.TaskUsage {
	if c == nil {
		return nil
	}
	u := c.tasks[i].Usage()
	return &supervisorv1.TaskUsage{UserNs: u.UserNS, SystemNs: u.SystemNS, PeakBytes: u.PeakBytes, MemoryKills: c.tasks[i].OOM().Kills}
}

// verdict is the sentence for a rank of which processes were killed for memory.
func (c *confinement) verdict(rank uint32, node string) string {
	return c.step.OOM().Verdict(rank, node)
}

// remove removes the step's groups. The job's are the agent's.
func (c *confinement) remove(log *slog.Logger) {
	if c == nil || c.step == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), removeTimeout)
	defer cancel()
	if stuck, err := c.step.Remove(ctx); err != nil {
		log.Warn("the step's control groups are left to the agent", "stuck", cgroup.Describe(stuck), "error", err)
	}
}
