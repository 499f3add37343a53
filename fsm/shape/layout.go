package shape

import (
	"fmt"
	"slices"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// Share is what an allocation has on one node.
type Share struct {
	// Node is the node's number.
	Node uint32
	// Name is the node's name.
	Name string
	// CPUMask and GPUMask are the devices.
	CPUMask, GPUMask []uint64
	// MemoryMB is the memory in MiB.
	MemoryMB uint64
	// Epoch is the node's epoch in the placement.
	Epoch uint32
	// Gres are the other devices.
	Gres []*apiv1.GresShare
	// Spec says of which type the devices are.
	Spec *apiv1.NodeSpec
	// Holds is what live steps have for themselves.
	Holds []Hold
}

// MaxTasks bounds the tasks of a step; see docs/limits.md.
const MaxTasks = 1 << 20

// Step lays the tasks of a step out as feature level 1 does, on the nodes of an allocation, given in rank order. The step shares the allocation: its nodes
// keep their masks. Tasks are counted out one by one over the nodes, none beyond a node's CPUs; ranks follow from that and
// the step's distribution. An error is a sentence for the user without a subject ("asks for …").
func Step(r *apiv1.ResourceRequest, allocation []Share) (*apiv1.Placement, uint32, error) {
	chosen, err := choose(r, allocation)
	if err != nil {
		return nil, 0, err
	}
	need := Of(r)
	tasks := need.Tasks
	if r.GetNtasks() == 0 && need.GPUsPerTask == 0 {
		tasks = uint64(len(chosen)) * need.TasksPerNode()
	}
	if tasks > MaxTasks {
		return nil, 0, fmt.Errorf("asks for %d tasks; a step has at most %d", tasks, MaxTasks)
	}
	if len(chosen) > int(tasks) {
		chosen = chosen[:tasks]
	}
	counts, err := deal(need, tasks, chosen)
	if err != nil {
		return nil, 0, err
	}
	return group(chosen, counts), uint32(tasks), nil
}

// choose picks the step's nodes.
func choose(r *apiv1.ResourceRequest, allocation []Share) ([]Share, error) {
	var chosen []Share
	for _, s := range allocation {
		if !slices.Contains(r.GetExclude(), s.Name) {
			chosen = append(chosen, s)
		}
	}
	for _, name := range r.GetNodeList() {
		if !slices.ContainsFunc(chosen, func(s Share) bool { return s.Name == name }) {
			return nil, fmt.Errorf("asks for node %s, which is not in the allocation or is excluded", name)
		}
	}
	need := Of(r)
	want := uint64(len(chosen))
	switch {
	case r.GetNodesMin() > 0 || len(r.GetNodeList()) > 0:
		want = need.NodesMin
	case need.PerNode > 0 && r.GetNtasks() > 0:
		want = need.NodesMin
	case r.GetNtasks() > 0 || need.GPUsPerTask > 0 && need.GPUsTotal > 0:
		want = min(want, need.Tasks)
	}
	if want > uint64(len(chosen)) || want == 0 {
		return nil, fmt.Errorf("asks for %d nodes; the allocation has %d for it", max(1, want), len(chosen))
	}
	if len(r.GetNodeList()) > 0 {
		// Named nodes are in; the others fill up in rank order.
		spare := int(want) - len(r.GetNodeList())
		if spare < 0 {
			return nil, fmt.Errorf("names %d nodes and asks for %d", len(r.GetNodeList()), want)
		}
		chosen = slices.DeleteFunc(chosen, func(s Share) bool {
			if slices.Contains(r.GetNodeList(), s.Name) {
				return false
			}
			spare--
			return spare < 0
		})
	}
	chosen = chosen[:min(int(want), len(chosen))]
	for _, s := range chosen {
		if err := fits(r, s); err != nil {
			return nil, err
		}
	}
	return chosen, nil
}

// fits checks what a step asks of each node.
func fits(r *apiv1.ResourceRequest, s Share) error {
	if gpus := Count(s.GPUMask); uint64(r.GetGpusPerNode()) > gpus {
		return fmt.Errorf("asks for %d GPUs per node; the allocation has %d on node %s", r.GetGpusPerNode(), gpus, s.Name)
	}
	if r.GetMemoryPerNodeMb() > s.MemoryMB && s.MemoryMB > 0 {
		return fmt.Errorf("asks for %d MiB of memory per node; the allocation has %d on node %s", r.GetMemoryPerNodeMb(), s.MemoryMB, s.Name)
	}
	return nil
}

// capacity returns how many tasks a node's share can hold.
func capacity(need Need, s Share) uint64 {
	room := Count(s.CPUMask) / need.CPUsPerTask
	if need.GPUsPerTask > 0 {
		room = min(room, Count(s.GPUMask)/need.GPUsPerTask)
	}
	if need.PerNode > 0 {
		room = min(room, need.PerNode)
	}
	return room
}

// deal counts tasks out over nodes, one round after the other.
func deal(need Need, tasks uint64, nodes []Share) ([]uint32, error) {
	room := make([]uint64, len(nodes))
	total := uint64(0)
	for i, s := range nodes {
		room[i] = capacity(need, s)
		total += room[i]
	}
	if total < tasks {
		return nil, fmt.Errorf("asks for %d tasks of %d CPUs each; the %d nodes of the allocation have room for %d",
			tasks, need.CPUsPerTask, len(nodes), total)
	}
	counts := make([]uint32, len(nodes))
	for left := tasks; left > 0; {
		for i := range nodes {
			if left > 0 && uint64(counts[i]) < room[i] {
				counts[i]++
				left--
			}
		}
	}
	for i, s := range nodes {
		if counts[i] == 0 {
			return nil, fmt.Errorf("has no room for a task of %d CPUs on node %s of the allocation", need.CPUsPerTask, s.Name)
		}
	}
	return counts, nil
}

// group folds neighbours with equal shares and tasks.
func group(nodes []Share, counts []uint32) *apiv1.Placement {
	p := &apiv1.Placement{}
	for i, s := range nodes {
		p.Epochs = append(p.Epochs, s.Epoch)
		if n := len(p.Groups); n > 0 {
			last := p.Groups[n-1]
			if slices.Equal(last.CpuMask, s.CPUMask) && slices.Equal(last.GpuMask, s.GPUMask) &&
				last.MemoryMb == s.MemoryMB && last.Tasks == counts[i] {
				last.Nodes = append(last.Nodes, s.Node)
				continue
			}
		}
		p.Groups = append(p.Groups, &apiv1.NodeGroup{
			Nodes: []uint32{s.Node}, CpuMask: s.CPUMask, GpuMask: s.GPUMask, MemoryMb: s.MemoryMB, Tasks: counts[i],
		})
	}
	return p
}

// Tasks returns the number of tasks of a placement.
func Tasks(p *apiv1.Placement) uint64 {
	var n uint64
	for _, g := range p.GetGroups() {
		n += uint64(len(g.Nodes)) * uint64(g.Tasks)
	}
	return n
}
