package run

import (
	"context"
	"fmt"

	"github.com/muster-hpc/muster/node/run/cgroup"
	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
)

// destroyGroups kills everything in the control groups of a plan's step and removes them: they know the processes that
// lost the cookie, too. A plan without groups has none. The error names processes that do not end.
func destroyGroups(ctx context.Context, plan *supervisorv1.StepPlan) ([]cgroup.Process, error) {
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
		return nil, fmt.Errorf("removing the step's control groups: %w", err)
	}
	name := cgroup.Name{Job: where.GetJobId(), Attempt: where.GetAttempt(), Step: where.GetStepId(), IsStep: true}
	stuck, err := h.Find(name).Destroy(ctx)
	if err != nil {
		return stuck, fmt.Errorf("removing the step's control groups: %w", err)
	}
	return nil, nil
}

// StuckProcesses are processes in the words of the protocol.
func StuckProcesses(all []cgroup.Process) []*supervisorv1.StuckProcess {
	var told []*supervisorv1.StuckProcess
	for _, p := range all {
		told = append(told, &supervisorv1.StuckProcess{Pid: uint32(p.PID), Name: p.Name, State: p.State, WaitsIn: p.Where, StartTicks: p.Start})
	}
	return told
}

// Haunted returns those of a step's stuck processes that still exist: what the step held, its devices above all, is not free
// before there are none.
func Haunted(state *supervisorv1.StepState) []cgroup.Process {
	var left []cgroup.Process
	for _, stuck := range state.GetStuck() {
		p, ok := cgroup.Look(int(stuck.GetPid()))
		if ok && p.Start == stuck.GetStartTicks() && p.State != "Z" && p.State != "X" {
			left = append(left, p)
		}
	}
	return left
}
