package run

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"

	"github.com/muster-hpc/muster/node/run/cgroup"
)

// Conclude returns how the step in a directory ended, when no supervisor lives there any more (ErrAlive if one does).
//
//   - There is a result: that one.
//   - Nothing was executed: phase FAILED, not the user's fault. Launch may be tried again in a new directory.
//   - The supervisor was lost while tasks may have been running: leftovers are killed until none is left, then every
//     task ended with signal 9, ended_by_supervisor, phase ENDED and a sentence.
//
// What it found is put on disk as the result before it returns, so that it stays true. ctx bounds the wait for
// leftovers; its error means that the step has not ended yet and Conclude must be called again.
func Conclude(ctx context.Context, dir string) (*supervisorv1.StepState, error) {
	return conclude(ctx, dir, false)
}

// Abandon is Conclude for a step of which processes sleep in the kernel whatever is sent to them: when ctx ends they are left, and
// named in the state as stuck. Others are waited for.
func Abandon(ctx context.Context, dir string) (*supervisorv1.StepState, error) {
	return conclude(ctx, dir, true)
}

func conclude(ctx context.Context, dir string, abandon bool) (*supervisorv1.StepState, error) {
	lock, err := Lock(dir) // Nobody launches or concludes here meanwhile.
	if err != nil {
		return nil, fmt.Errorf("concluding a step: %w", err)
	}
	defer lock.Close()
	if state, err := ReadResult(dir); err == nil || !errors.Is(err, fs.ErrNotExist) {
		return state, err
	}
	state := &supervisorv1.StepState{Version: Version}
	plan, planErr := ReadPlan(dir)
	if planErr == nil && plan.GetCookie() == "" { // as an empty file is read
		planErr = fmt.Errorf("the plan in %s is damaged", dir)
	}
	_, err = os.Lstat(filepath.Join(dir, StartedFile))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if _, err := destroyGroups(ctx, plan); err != nil {
			return nil, fmt.Errorf("concluding the step in %s: %w", dir, err)
		}
		state.Phase = supervisorv1.Phase_PHASE_FAILED
		state.Sentence = "The supervisor ended before the step was started; its log in " + dir + " says more."
	case err != nil:
		return nil, fmt.Errorf("concluding the step in %s: %w", dir, err)
	case planErr != nil:
		crashed, err := bootedSince(dir)
		if err != nil || !crashed { // its processes may be here, and without the plan nobody knows which they are
			return nil, errors.Join(planErr, err)
		}
		lost(state, plan)
	default:
		stuck, err := settle(ctx, plan)
		if err != nil && !(abandon && asleep(stuck)) {
			return nil, fmt.Errorf("concluding the step in %s: %w", dir, err)
		}
		lost(state, plan)
		if err != nil {
			state.Stuck = StuckProcesses(stuck)
			state.Sentence = "The supervisor of this step was lost, and processes of it do not end: " + cgroup.Describe(stuck) + "."
		}
	}
	if err := WriteResult(dir, state); err != nil {
		return nil, err
	}
	return state, nil
}

// settle kills what is left of a step; with the error come those that do not end.
func settle(ctx context.Context, plan *supervisorv1.StepPlan) ([]cgroup.Process, error) {
	stuck, groups := destroyGroups(ctx, plan)
	if groups != nil && len(stuck) == 0 {
		return nil, groups
	}
	// Also where the groups are not empty: others may have left them.
	if _, err := KillLeftovers(ctx, plan.GetCookie()); err != nil {
		return append(stuck, Marked(plan.GetCookie())...), errors.Join(groups, err)
	}
	return stuck, groups
}

// asleep reports whether there are processes, and all of them sleep in the kernel whatever is sent to them.
func asleep(all []cgroup.Process) bool {
	return len(all) > 0 && !slices.ContainsFunc(all, func(p cgroup.Process) bool { return p.State != "D" })
}

// bootedSince reports whether the machine was booted after the step's start: nothing of it can be left.
func bootedSince(dir string) (bool, error) {
	started, err := ReadStarted(dir)
	if err != nil {
		return false, err
	}
	boot, err := BootID()
	return started.BootID != boot, err
}

// lost fills in the end of a step whose supervisor died with its tasks.
func lost(state *supervisorv1.StepState, plan *supervisorv1.StepPlan) {
	state.Phase = supervisorv1.Phase_PHASE_ENDED
	state.Sentence = "The supervisor of this step was lost; its processes were killed."
	for _, t := range plan.GetTasks() {
		state.Tasks = append(state.Tasks, &supervisorv1.TaskState{Rank: t.GetRank(), Ended: true, Exit: &apiv1.TaskExit{
			FirstRank: t.GetRank(), Count: 1, Signal: 9, EndedBySupervisor: true}})
	}
}
