package fsm

import (
	"fmt"
	"slices"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"

	"github.com/muster-hpc/muster/fsm/shape"
	"github.com/muster-hpc/muster/fsm/state"
)

// CheckInvariants recomputes from the records what must hold in every published state, and returns the first violation: the
// single ownership of devices and attempts (guarantee G2), the order of attempts, and that indexes, counters and the digest say
// what the tables say. It looks at everything, so it is for tests.
func CheckInvariants(v *View) error {
	if v.Digest() != v.Recompute() {
		return fmt.Errorf("the digest is %016x, recomputed %016x", v.Digest(), v.Recompute())
	}
	if err := v.CheckIndexes(); err != nil {
		return err
	}
	for job := range v.Jobs(0) {
		if err := checkJob(v, job); err != nil {
			return fmt.Errorf("job %d: %w", job.Id, err)
		}
	}
	return checkDevices(v)
}

// checkJob checks a job against its attempts and steps.
func checkJob(v *View, job *apiv1.Job) error {
	var attempts []*apiv1.Attempt
	for a := range v.Attempts(job.Id) {
		if int(a.Number) != len(attempts)+1 {
			return fmt.Errorf("attempt %d follows attempt %d", a.Number, len(attempts))
		}
		if n := len(attempts); n > 0 && attempts[n-1].State != apiv1.AttemptState_ATTEMPT_STATE_ENDED {
			return fmt.Errorf("attempt %d began before attempt %d was accounted for on nodes %v", a.Number, attempts[n-1].Number, attempts[n-1].Unaccounted)
		}
		if err := checkAttempt(v, a); err != nil {
			return fmt.Errorf("attempt %d: %w", a.Number, err)
		}
		attempts = append(attempts, a)
	}
	if len(attempts) != int(job.Status.Attempt) {
		return fmt.Errorf("it has %d attempts and says %d", len(attempts), job.Status.Attempt)
	}
	var last apiv1.AttemptState
	if len(attempts) > 0 {
		last = attempts[len(attempts)-1].State
	}
	s := job.Status
	var consistent bool
	switch last {
	case attemptPreparing:
		consistent = s.State == jobConfiguring && !s.Completing
	case attemptRunning:
		consistent = s.State == jobRunning && !s.Completing
	case attemptEnding:
		consistent = (s.State == jobConfiguring || s.State == jobRunning) && s.Completing
	default:
		consistent = (s.State == jobPending || state.Ended(s.State)) && !s.Completing
	}
	if !consistent {
		return fmt.Errorf("it is %s (completing: %t) and its last attempt is %s", s.State, s.Completing, last)
	}
	return nil
}

func checkAttempt(v *View, a *apiv1.Attempt) error {
	inPlace := nodesOf(a.Placement)
	live := a.State == attemptPreparing || a.State == attemptRunning
	if live {
		// Only what runs and does not stop itself outlives the silence of its node, and with it the epoch.
		endures := a.State == attemptRunning && !v.Job(a.JobId).Spec.AutomaticRecovery
		for i, number := range inPlace {
			n := v.Node(number)
			same := n.State == nodeUp && n.Epoch == a.Placement.Epochs[i]
			silent := endures && n.Epoch > a.Placement.Epochs[i] && (n.State == nodeUp || n.LostOnSilence)
			if a.State == attemptRunning && v.Job(a.JobId).Spec.NoKill && !slices.Contains(a.Unaccounted, number) {
				continue // lost: it goes on without it
			}
			if !slices.Contains(a.Unaccounted, number) || !same && !silent {
				return fmt.Errorf("it is live on node %d (epoch %d of %d, %s, unaccounted nodes %v)", number, a.Placement.Epochs[i], n.Epoch,
					n.State, a.Unaccounted)
			}
		}
	}
	if (len(a.Unaccounted) == 0) != (a.State == attemptEnded) {
		return fmt.Errorf("it is %s with unaccounted nodes %v", a.State, a.Unaccounted)
	}
	for _, number := range a.Unaccounted {
		if h, _ := holding(a, number); h == nil {
			return fmt.Errorf("node %d has not accounted for it and holds nothing of it", number)
		}
	}
	if err := checkStepDevices(v, a); err != nil {
		return err
	}
	for step := range v.AttemptSteps(a.JobId, a.Number) {
		ended := state.StepEnded(step.State)
		switch {
		case ended != (len(step.Unreported) == 0):
			return fmt.Errorf("step %d is %s with unreported nodes %v", step.Id, step.State, step.Unreported)
		case !ended && !live && !step.Ending:
			return fmt.Errorf("step %d is not being ended", step.Id)
		case !ended && a.State == attemptEnded:
			return fmt.Errorf("step %d outlives it", step.Id)
		}
	}
	return nil
}

// checkStepDevices checks that the steps of an attempt have devices of the attempt, and none twice unless they overlap.
func checkStepDevices(v *View, a *apiv1.Attempt) error {
	if v.Level() < levelLaunch {
		return nil
	}
	uses := make(map[uint32]*shape.Hold)
	var wrong error
	for step := range v.LiveSteps(a.JobId, a.Number) {
		for _, g := range step.Placement.Groups {
			for _, number := range g.Nodes {
				h, _ := holding(a, number)
				if h == nil || shape.Without(g.CpuMask, h.cpus) != nil || shape.Without(g.GpuMask, h.gpus) != nil || shape.GresWithout(g.Gres, h.gres) != nil {
					return fmt.Errorf("step %d has devices of node %d that it has not", step.Id, number)
				}
			}
		}
		if step.Id == BatchStep {
			continue
		}
		holdOf(step, func(number uint32, h shape.Hold) {
			u := uses[number]
			if u == nil {
				u = &shape.Hold{}
				uses[number] = u
			}
			if shape.Overlap(u.CPUMask, h.CPUMask) || shape.Overlap(u.GPUMask, h.GPUMask) || shape.GresOverlap(u.Gres, h.Gres) {
				wrong = fmt.Errorf("step %d has devices of node %d that another step has for itself", step.Id, number)
			}
			u.CPUMask, u.GPUMask, u.Gres = shape.Union(u.CPUMask, h.CPUMask), shape.Union(u.GPUMask, h.GPUMask), shape.GresUnion(u.Gres, h.Gres)
			if u.MemoryMB += h.MemoryMB; h.MemoryMB > 0 {
				if has, _ := holding(a, number); u.MemoryMB > has.memory {
					wrong = fmt.Errorf("steps have %d MiB of node %d for themselves; it has %d", u.MemoryMB, number, has.memory)
				}
			}
		})
	}
	return wrong
}

// checkDevices recomputes what every node has given away.
func checkDevices(v *View) error {
	type use struct {
		cpus, gpus []uint64
		memory     uint64
		gres       []*apiv1.GresShare
		owners     []uint64
	}
	uses := make(map[uint32]*use)
	for a := range v.LiveAttempts() {
		for _, number := range a.Unaccounted {
			u := uses[number]
			if u == nil {
				u = &use{}
				uses[number] = u
			}
			h, _ := holding(a, number)
			if shape.Overlap(u.cpus, h.cpus) || shape.Overlap(u.gpus, h.gpus) || shape.GresOverlap(u.gres, h.gres) {
				return fmt.Errorf("devices of node %d belong to job %d, attempt %d, and to another of %v too", number, a.JobId, a.Number, u.owners)
			}
			u.cpus, u.gpus, u.memory = shape.Union(u.cpus, h.cpus), shape.Union(u.gpus, h.gpus), u.memory+h.memory
			u.gres = shape.GresUnion(u.gres, h.gres)
			u.owners = append(u.owners, state.PackAttempt(a.JobId, a.Number))
		}
	}
	for n := range v.Nodes() {
		u := uses[n.Number]
		if u == nil {
			u = &use{}
		}
		slices.Sort(u.owners)
		if !slices.Equal(u.owners, n.Owners) || !slices.Equal(shape.Trim(u.cpus), shape.Trim(n.CpusAllocatedMask)) ||
			!slices.Equal(shape.Trim(u.gpus), shape.Trim(n.GpusAllocatedMask)) || u.memory != n.MemoryAllocatedMb ||
			shape.Count(u.cpus) != uint64(n.CpusAllocated) || !shape.GresEqual(u.gres, n.GresAllocated) {
			return fmt.Errorf("node %s says owners %v, CPUs %x, GPUs %x, memory %d, %v; its attempts say %v, %x, %x, %d, %v", n.Spec.Name,
				n.Owners, n.CpusAllocatedMask, n.GpusAllocatedMask, n.MemoryAllocatedMb, n.GresAllocated, u.owners, u.cpus, u.gpus, u.memory, u.gres)
		}
	}
	return nil
}
