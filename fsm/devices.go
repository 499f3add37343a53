package fsm

import (
	"slices"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"

	"github.com/muster-hpc/muster/fsm/shape"
	"github.com/muster-hpc/muster/fsm/state"
)

// held is what an attempt holds on one node.
type held struct {
	cpus, gpus []uint64
	memory     uint64
	gres       []*apiv1.GresShare
	leftover   bool
	epoch      uint32
	placement  uint32
}

// holding returns what an attempt holds, or held at its end, on a node, and whether it is in the present placement's
// groups (with its index in rank order). nil if it has nothing there.
func holding(a *apiv1.Attempt, node uint32) (*held, int) {
	i := 0
	for _, g := range a.Placement.Groups {
		if at := slices.Index(g.Nodes, node); at >= 0 {
			return &held{
				cpus: g.CpuMask, gpus: g.GpuMask, memory: g.MemoryMb, gres: g.Gres, epoch: a.Placement.Epochs[i+at], placement: a.Fence.Placement,
			}, i + at
		}
		i += len(g.Nodes)
	}
	for _, l := range a.Leftovers {
		if l.Node == node {
			return &held{
				cpus: l.CpuMask, gpus: l.GpuMask, memory: l.MemoryMb, gres: l.Gres, leftover: true, epoch: l.Epoch, placement: l.Placement,
			}, -1
		}
	}
	return nil, -1
}

// nodesOf returns the node numbers of a placement in rank order, in a new list.
func nodesOf(p *apiv1.Placement) []uint32 {
	var nodes []uint32
	for _, g := range p.GetGroups() {
		nodes = append(nodes, g.Nodes...)
	}
	return nodes
}

// changeNode stores a changed node.
func (m *Machine) changeNode(n *apiv1.Node, change func(*apiv1.Node)) *apiv1.Node {
	next := state.CopyNode(n)
	next.Revision = m.rev
	change(next)
	m.s.PutNode(next)
	return next
}

// takeDevices makes an attempt the owner of devices.
func (m *Machine) takeDevices(number uint32, owner uint64, g *apiv1.NodeGroup) {
	m.changeNode(m.s.Node(number), func(n *apiv1.Node) {
		n.Owners = append(slices.Clone(n.Owners), owner)
		slices.Sort(n.Owners)
		n.CpusAllocatedMask = shape.Union(n.CpusAllocatedMask, g.CpuMask)
		n.GpusAllocatedMask = shape.Union(n.GpusAllocatedMask, g.GpuMask)
		n.CpusAllocated = uint32(shape.Count(n.CpusAllocatedMask))
		n.MemoryAllocatedMb += g.MemoryMb
		n.GresAllocated = shape.GresUnion(n.GresAllocated, g.Gres)
	})
}

// freeDevices takes the devices of an attempt back on one node.
func (m *Machine) freeDevices(a *apiv1.Attempt, number uint32) {
	h, _ := holding(a, number)
	owner := state.PackAttempt(a.JobId, a.Number)
	n := m.s.Node(number)
	if h == nil || !slices.Contains(n.Owners, owner) {
		return
	}
	m.changeNode(n, func(n *apiv1.Node) {
		n.Owners = slices.DeleteFunc(slices.Clone(n.Owners), func(o uint64) bool { return o == owner })
		n.CpusAllocatedMask = shape.Without(n.CpusAllocatedMask, h.cpus)
		n.GpusAllocatedMask = shape.Without(n.GpusAllocatedMask, h.gpus)
		n.CpusAllocated = uint32(shape.Count(n.CpusAllocatedMask))
		n.MemoryAllocatedMb -= h.memory
		n.GresAllocated = shape.GresWithout(n.GresAllocated, h.gres)
		n.LastBusyTime = m.now()
	})
}

// touchPlacement marks the desired sets of a placement's nodes as changed.
func (m *Machine) touchPlacement(p *apiv1.Placement) {
	for _, g := range p.GetGroups() {
		for _, n := range g.Nodes {
			m.s.Touch(n)
		}
	}
}

// touchAttempt marks the desired sets of all nodes that have not accounted for an attempt as changed.
func (m *Machine) touchAttempt(a *apiv1.Attempt) {
	for _, n := range a.Unaccounted {
		m.s.Touch(n)
	}
}
