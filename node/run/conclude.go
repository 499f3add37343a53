package run

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
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
		if err := destroyGroups(ctx, plan); err != nil {
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
		if err := destroyGroups(ctx, plan); err != nil {
			return nil, fmt.Errorf("concluding the step in %s: %w", dir, err)
		}
		if _, err := KillLeftovers(ctx, plan.GetCookie()); err != nil {
			return nil, fmt.Errorf("concluding the step in %s: %w", dir, err)
		}
		lost(state, plan)
	}
	if err := WriteResult(dir, state); err != nil {
		return nil, err
	}
	return state, nil
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
