package fsm

import (
	"errors"
	"slices"

	"google.golang.org/protobuf/proto"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"

	"github.com/muster-hpc/muster/fsm/shape"
	"github.com/muster-hpc/muster/fsm/state"
)

// levelLaunch is the feature level from which steps have devices of their own, ends are dated by the time that nodes measured, exits are
// taken rank by rank, and a failed preparation of a step is charged to its node.
const levelLaunch = 2

// layStep lays a step out in the attempt. At feature level 1 steps share the allocation; later each has its own devices.
func (m *Machine) layStep(spec *apiv1.StepSpec, a *apiv1.Attempt) (*shape.Layout, *apiv1.ErrorDetail) {
	impossible := func(reason string, err error) *apiv1.ErrorDetail {
		return refuse(reason, jobSubject(a.JobId), "the step %s", err.Error())
	}
	shares := m.shares(a)
	if m.s.Level() < levelLaunch {
		placement, tasks, err := shape.Step(spec.Resources, shares)
		if err != nil {
			return nil, impossible("STEP_IMPOSSIBLE", err)
		}
		return &shape.Layout{Placement: placement, Tasks: tasks}, nil
	}
	if !m.faults.StepsShareDevices {
		m.holds(a, shares)
	}
	parts := []shape.Part{{Resources: spec.Resources, Options: spec.TaskOptions}}
	for _, p := range spec.Parts {
		parts = append(parts, shape.Part{Resources: p.Resources, Options: p.TaskOptions})
	}
	layout, err := shape.Lay(parts, shares)
	var busy *shape.BusyError
	switch {
	case errors.As(err, &busy):
		return nil, impossible("STEP_BUSY", err)
	case err != nil:
		return nil, impossible("STEP_IMPOSSIBLE", err)
	default:
		return layout, nil
	}
}

// shares returns what an attempt has on its nodes, in rank order; nodes that it lost are left out.
func (m *Machine) shares(a *apiv1.Attempt) []shape.Share {
	var shares []shape.Share
	var left map[uint32]bool
	if m.s.Job(a.JobId).Spec.NoKill {
		left = setOf(a.Unaccounted)
	}
	i := 0
	for _, g := range a.Placement.Groups {
		for _, n := range g.Nodes {
			if left == nil || left[n] {
				spec := m.s.Node(n).Spec
				shares = append(shares, shape.Share{
					Node: n, Name: spec.Name, CPUMask: g.CpuMask, GPUMask: g.GpuMask, MemoryMB: g.MemoryMb, Gres: g.Gres, Spec: spec,
					Epoch: a.Placement.Epochs[i],
				})
			}
			i++
		}
	}
	return shares
}

// holds fills in what live steps of an attempt have for themselves.
func (m *Machine) holds(a *apiv1.Attempt, shares []shape.Share) {
	var index map[uint32]int // only looked up
	for step := range m.s.LiveSteps(a.JobId, a.Number) {
		if !ownsDevices(step) {
			continue
		}
		if index == nil {
			index = make(map[uint32]int, len(shares))
			for i := range shares {
				index[shares[i].Node] = i
			}
		}
		holdOf(step, func(node uint32, h shape.Hold) {
			if i, has := index[node]; has {
				h.Step = stepSubject(step.JobId, step.Id)
				shares[i].Holds = append(shares[i].Holds, h)
			}
		})
	}
}

// ownsDevices reports whether a step has devices for itself: the batch step never has, and who overlaps keeps nothing from others.
func ownsDevices(step *apiv1.Step) bool {
	return step.Id != BatchStep && !state.StepEnded(step.State)
}

// holdOf calls f with what each part of a live step has for itself on each of the nodes that have not reported its end.
func holdOf(step *apiv1.Step, f func(node uint32, h shape.Hold)) {
	unreported := setOf(step.Unreported)
	part, tasks := 0, uint32(0)
	for _, g := range step.Placement.Groups {
		for part < len(step.PartRanks) && tasks >= step.PartRanks[part] {
			part++
		}
		resources := step.Spec.Resources
		if part > 0 {
			resources = step.Spec.Parts[part-1].Resources
		}
		tasks += g.Tasks * uint32(len(g.Nodes))
		if resources.GetOverlap() {
			continue
		}
		h := shape.Hold{CPUMask: g.CpuMask, GPUMask: g.GpuMask, Gres: g.Gres}
		if shape.AsksMemory(resources) {
			h.MemoryMB = g.MemoryMb
		}
		for _, n := range g.Nodes {
			if unreported[n] {
				f(n, h)
			}
		}
	}
}

// setOf returns node numbers as a set, which is only looked up.
func setOf(nodes []uint32) map[uint32]bool {
	set := make(map[uint32]bool, len(nodes))
	for _, n := range nodes {
		set[n] = true
	}
	return set
}

// shareSteps makes steps that began at feature level 1 share their devices to their end, as they did so far.
func (m *Machine) shareSteps() {
	for a := range m.s.LiveAttempts() {
		for _, step := range slices.Collect(m.s.LiveSteps(a.JobId, a.Number)) {
			next := state.CopyStep(step)
			next.Revision = m.rev
			next.Spec = proto.Clone(step.Spec).(*apiv1.StepSpec)
			if next.Spec.Resources == nil {
				next.Spec.Resources = &apiv1.ResourceRequest{}
			}
			next.Spec.Resources.Overlap = true
			m.s.PutStep(next)
		}
	}
}
