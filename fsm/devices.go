package fsm

import (
	"math/bits"
	"slices"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"

	"github.com/muster-hpc/muster/fsm/shape"
	"github.com/muster-hpc/muster/fsm/state"
)

// overlap reports whether two masks have a device in common.
func overlap(a, b []uint64) bool {
	for i := range min(len(a), len(b)) {
		if a[i]&b[i] != 0 {
			return true
		}
	}
	return false
}

// beyond reports whether a mask has a device with a number of n or more.
func beyond(mask []uint64, n uint32) bool {
	for i, w := range slices.Backward(mask) {
		if w != 0 {
			return uint64(64*i+bits.Len64(w)) > uint64(n)
		}
	}
	return false
}

// with returns the union of two masks as a new one, without trailing zero words.
func with(a, b []uint64) []uint64 {
	sum := make([]uint64, max(len(a), len(b)))
	copy(sum, a)
	for i, w := range b {
		sum[i] |= w
	}
	return trim(sum)
}

// without returns the devices of a that are not in b as a new mask, without trailing zero words.
func without(a, b []uint64) []uint64 {
	rest := slices.Clone(a)
	for i := range min(len(a), len(b)) {
		rest[i] &^= b[i]
	}
	return trim(rest)
}

func trim(mask []uint64) []uint64 {
	for len(mask) > 0 && mask[len(mask)-1] == 0 {
		mask = mask[:len(mask)-1]
	}
	if len(mask) == 0 {
		return nil
	}
	return mask
}

// held is what an attempt holds on one node.
type held struct {
	cpus, gpus []uint64
	memory     uint64
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
				cpus: g.CpuMask, gpus: g.GpuMask, memory: g.MemoryMb, epoch: a.Placement.Epochs[i+at], placement: a.Fence.Placement,
			}, i + at
		}
		i += len(g.Nodes)
	}
	for _, l := range a.Leftovers {
		if l.Node == node {
			return &held{
				cpus: l.CpuMask, gpus: l.GpuMask, memory: l.MemoryMb, leftover: true, epoch: l.Epoch, placement: l.Placement,
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
		n.CpusAllocatedMask = with(n.CpusAllocatedMask, g.CpuMask)
		n.GpusAllocatedMask = with(n.GpusAllocatedMask, g.GpuMask)
		n.CpusAllocated = uint32(shape.Count(n.CpusAllocatedMask))
		n.MemoryAllocatedMb += g.MemoryMb
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
		n.CpusAllocatedMask = without(n.CpusAllocatedMask, h.cpus)
		n.GpusAllocatedMask = without(n.GpusAllocatedMask, h.gpus)
		n.CpusAllocated = uint32(shape.Count(n.CpusAllocatedMask))
		n.MemoryAllocatedMb -= h.memory
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
