package shape

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// gpuName is the generic resource that accelerators are.
const gpuName = "gpu"

// Hold is what another step has for itself on one node of the allocation.
type Hold struct {
	// Step names it for people ("step 7.0").
	Step string
	// CPUMask and GPUMask are the devices.
	CPUMask, GPUMask []uint64
	// MemoryMB is the memory that it asked for, in MiB; 0 if it asked for none.
	MemoryMB uint64
	// Gres are the other devices.
	Gres []*apiv1.GresShare
}

// Part is one part of a step: the step itself, or one of its further parts (srun A : B).
type Part struct {
	// Resources is what it asks for; nil asks for a task on each node.
	Resources *apiv1.ResourceRequest
	// Options say how its ranks are laid out.
	Options *apiv1.TaskOptions
}

// Layout is where the tasks of a step go.
type Layout struct {
	// Placement has the step's own devices, the groups of one part after those of the part before.
	Placement *apiv1.Placement
	// Tasks is their number in all parts.
	Tasks uint32
	// PartRanks are the first ranks of the parts after the first.
	PartRanks []uint32
}

// BusyError means that a step fits into the allocation, but not beside the steps that have devices now.
type BusyError struct{ why, holders string }

// Error is a sentence without a subject.
func (e *BusyError) Error() string { return "has to wait: it " + e.why + "; now " + e.holders }

// Lay lays the parts of a step out on the nodes of an allocation, given in rank order with what other steps hold there, and gives it devices of its
// own, as Slurm 24.11 does:
//   - without "exact" a step takes all CPUs of its nodes, and waits until no other step has any of them; with it, or when it has several
//     parts, it takes what its tasks ask for, the free ones with the lowest numbers, those close to its GPUs first;
//   - it takes the GPUs and other devices that it asks for; a step that asks for none takes all that its nodes have in the allocation, a step
//     of several parts none;
//   - it may use the memory that it asks for; if it asks for none, all of it, without keeping any from others;
//   - with "overlap" it sees everything as free.
//
// Nodes are taken in rank order, as many as asked for, those that have no room passed over. Tasks are counted out one by one (or plane by
// plane) over them. A *BusyError says that the step fits, but not now; another error that it never will. Both are sentences for the user
// without a subject ("asks for …").
func Lay(parts []Part, allocation []Share) (*Layout, error) {
	empty := slices.Clone(allocation)
	busy := false
	for i := range empty {
		busy = busy || len(empty[i].Holds) > 0
		empty[i].Holds = nil
	}
	layout, err := lay(parts, empty)
	if err != nil || !busy {
		return layout, err
	}
	layout, err = lay(parts, allocation)
	if err != nil {
		return nil, &BusyError{err.Error(), holders(allocation)}
	}
	return layout, nil
}

// holders says which steps have what, at most four of them.
func holders(allocation []Share) string {
	type sum struct{ cpus, gpus, memory, gres uint64 }
	sums := make(map[string]*sum)
	var names []string
	for _, s := range allocation {
		for _, h := range s.Holds {
			if sums[h.Step] == nil {
				sums[h.Step] = &sum{}
				names = append(names, h.Step)
			}
			t := sums[h.Step]
			t.cpus, t.gpus, t.memory = t.cpus+Count(h.CPUMask), t.gpus+Count(h.GPUMask), t.memory+h.MemoryMB
			for _, g := range h.Gres {
				t.gres += Count(g.Mask)
			}
		}
	}
	var all []string
	for _, name := range names[:min(len(names), 4)] {
		t := sums[name]
		var parts []string
		for _, p := range []struct {
			n    uint64
			what string
		}{{t.cpus, "CPUs"}, {t.gpus, "GPUs"}, {t.gres, "other devices"}, {t.memory, "MiB of memory"}} {
			if p.n > 0 {
				parts = append(parts, fmt.Sprintf("%d %s", p.n, p.what))
			}
		}
		all = append(all, name+" has "+strings.Join(parts, ", "))
	}
	if len(names) > 4 {
		all = append(all, fmt.Sprintf("%d other steps have more", len(names)-4))
	}
	return strings.Join(all, "; ")
}

// lay does it with what is free now.
func lay(parts []Part, allocation []Share) (*Layout, error) {
	nodes := make([]node, len(allocation))
	for i := range allocation {
		nodes[i] = freeOf(&allocation[i])
	}
	layout := &Layout{Placement: &apiv1.Placement{}}
	total := uint64(0)
	for i, p := range parts {
		if i > 0 {
			layout.PartRanks = append(layout.PartRanks, uint32(total))
		}
		w := want{r: p.Resources, need: Of(p.Resources), exact: p.Resources.GetExact() || len(parts) > 1, inherits: len(parts) == 1 && asksNoDevice(p.Resources)}
		var err error
		if w.distribution, err = ParseDistribution(p.Options.GetDistribution()); err != nil {
			return nil, err
		}
		tasks, err := w.lay(layout.Placement, nodes)
		if err != nil {
			return nil, err
		}
		if total += tasks; total > MaxTasks {
			return nil, fmt.Errorf("asks for %d tasks; a step has at most %d", total, MaxTasks)
		}
	}
	layout.Tasks = uint32(total)
	return layout, nil
}

func asksNoDevice(r *apiv1.ResourceRequest) bool {
	return r.GetGpusPerNode() == 0 && r.GetGpusTotal() == 0 && r.GetGpusPerTask() == 0 && r.GetNtasksPerGpu() == 0 && len(r.GetGres()) == 0
}

// want is what one part of a step asks for.
type want struct {
	r            *apiv1.ResourceRequest
	need         Need
	distribution Distribution
	exact        bool
	inherits     bool // takes all GPUs and other devices of its nodes
}

// lay appends the part's groups to a placement and takes its devices.
func (w *want) lay(p *apiv1.Placement, nodes []node) (uint64, error) {
	chosen, tasks, err := w.choose(nodes)
	if err != nil {
		return 0, err
	}
	counts, err := w.deal(chosen, tasks)
	if err != nil {
		return 0, err
	}
	chosen, counts = busyOnes(chosen, counts)
	gpus, err := w.spread(chosen, counts)
	if err != nil {
		return 0, err
	}
	begin := len(p.Groups)
	for i, n := range chosen {
		g, err := w.take(n, counts[i], gpus[i])
		if err != nil {
			return 0, err
		}
		p.Epochs = append(p.Epochs, n.share.Epoch)
		if last := len(p.Groups) - 1; last >= begin && alike(p.Groups[last], g) {
			p.Groups[last].Nodes = append(p.Groups[last].Nodes, n.share.Node)
			continue
		}
		g.Nodes = []uint32{n.share.Node}
		p.Groups = append(p.Groups, g)
	}
	return tasks, nil
}

// busyOnes leaves out the nodes that got no task, as it happens with planes or fewer tasks than nodes.
func busyOnes(nodes []*node, counts []uint64) (with []*node, tasks []uint64) {
	for i, n := range nodes {
		if counts[i] > 0 {
			with, tasks = append(with, n), append(tasks, counts[i])
		}
	}
	return with, tasks
}

func alike(a, b *apiv1.NodeGroup) bool {
	return slices.Equal(a.CpuMask, b.CpuMask) && slices.Equal(a.GpuMask, b.GpuMask) && a.MemoryMb == b.MemoryMb && a.Tasks == b.Tasks &&
		GresEqual(a.Gres, b.Gres)
}

// choose picks the nodes and says how many tasks go there.
func (w *want) choose(nodes []node) ([]*node, uint64, error) {
	candidates, eligible, lacking, err := w.candidates(nodes)
	if err != nil {
		return nil, 0, err
	}
	most, named := uint64(len(candidates)), uint64(len(w.named()))
	least := uint64(eligible)
	tasks := w.need.Tasks
	given := w.r.GetNtasks() > 0 || w.r.GetGpusTotal() > 0 && (w.need.TasksPerGPU > 0 || w.need.GPUsPerTask > 0) || w.distribution.Arbitrary
	switch {
	case w.r.GetNodesMin() > 0 || w.r.GetNodesMax() > 0:
		least = max(w.need.NodesMin, named)
		most = min(max(w.need.NodesMax, least), most)
	case named > 0:
		least, most = named, named
	case w.need.PerNode > 0 && w.r.GetNtasks() > 0:
		least, most = w.need.NodesMin, w.need.NodesMin
	case given:
		least, most = 1, min(most, tasks)
	}
	if w.need.PerNode == 0 && given {
		least, most = min(least, max(tasks, named)), min(most, max(tasks, named)) // more nodes than tasks: some stay out
	}
	if least > uint64(len(candidates)) || least == 0 || most == 0 {
		if lacking != nil {
			return nil, 0, lacking
		}
		return nil, 0, fmt.Errorf("asks for %d nodes; the allocation has %d for it", max(1, least), len(candidates))
	}
	chosen := w.best(candidates, int(most), tasks, given)
	if !given {
		tasks = uint64(len(chosen)) * w.need.TasksPerNode()
	}
	if tasks > MaxTasks {
		return nil, 0, fmt.Errorf("asks for %d tasks; a step has at most %d", tasks, MaxTasks)
	}
	return chosen, tasks, nil
}

// named returns the names of nodes that must be part.
func (w *want) named() []string {
	if len(w.r.GetTaskNodes()) > 0 {
		names := slices.Clone(w.r.TaskNodes)
		slices.Sort(names)
		return slices.Compact(names)
	}
	return w.r.GetNodeList()
}

// candidates returns the nodes that have room for a task, how many there are with those that have none, and why the first of them has none. A node
// that must be part and has none is an error.
func (w *want) candidates(nodes []node) (found []*node, eligible int, lacking, err error) {
	must := make(map[string]bool)
	for _, name := range w.named() {
		must[name] = true
	}
	first := int(w.r.GetRelative())
	if first >= len(nodes) {
		return nil, 0, nil, fmt.Errorf("begins at node %d of the allocation, counted from 0; it has %d", first, len(nodes))
	}
	for i := range nodes[first:] {
		n := &nodes[first+i]
		named := must[n.share.Name]
		if slices.Contains(w.r.GetExclude(), n.share.Name) || w.distribution.Arbitrary && !named {
			continue
		}
		eligible++
		if err := w.lacks(n); err != nil {
			if named {
				return nil, 0, nil, err
			}
			lacking = cmp.Or(lacking, err)
			continue
		}
		delete(must, n.share.Name)
		n.named = named
		found = append(found, n)
	}
	for _, name := range w.named() {
		if must[name] {
			return nil, 0, nil, fmt.Errorf("asks for node %s, which is not in the allocation or is excluded", name)
		}
	}
	return found, eligible, lacking, nil
}

// best takes so many of the candidates: those that must be part, and the first others in rank order; if the tasks have no room there, those
// with the most room. The result is in rank order.
func (w *want) best(candidates []*node, many int, tasks uint64, given bool) []*node {
	pick := func(order []*node) (chosen []*node, room uint64) {
		others := many
		for _, n := range candidates {
			if n.named {
				others--
			}
		}
		in := make(map[*node]bool, many)
		for _, n := range order {
			if !n.named {
				if others <= 0 {
					continue
				}
				others--
			}
			in[n] = true
		}
		for _, n := range candidates {
			if in[n] {
				chosen = append(chosen, n)
				room += w.room(n)
			}
		}
		return chosen, room
	}
	chosen, room := pick(candidates)
	if many >= len(candidates) || !given || room >= tasks {
		return chosen
	}
	roomiest := slices.Clone(candidates)
	slices.SortStableFunc(roomiest, func(a, b *node) int { return cmp.Compare(w.room(b), w.room(a)) })
	chosen, _ = pick(roomiest)
	return chosen
}

// deal counts the tasks out over the nodes.
func (w *want) deal(nodes []*node, tasks uint64) ([]uint64, error) {
	counts, room, total := make([]uint64, len(nodes)), make([]uint64, len(nodes)), uint64(0)
	for i, n := range nodes {
		room[i] = w.room(n)
		total += room[i]
	}
	if w.distribution.Arbitrary {
		for i, n := range nodes {
			for _, name := range w.r.TaskNodes {
				if name == n.share.Name {
					counts[i]++
				}
			}
			if counts[i] > room[i] {
				return nil, fmt.Errorf("puts %d tasks of %d CPUs each on node %s; it has room for %d", counts[i], w.need.CPUsPerTask, n.share.Name, room[i])
			}
		}
		return counts, nil
	}
	if total < tasks {
		return nil, fmt.Errorf("asks for %d tasks of %d CPUs each; the %d nodes of the allocation have room for %d",
			tasks, w.need.CPUsPerTask, len(nodes), total)
	}
	turn := max(1, uint64(w.distribution.Plane))
	if _, perGPU, follows := w.byTask(); follows {
		turn = max(turn, perGPU) // the tasks of a GPU stay together
	}
	for left := tasks; left > 0; {
		for i := range nodes {
			n := min(turn, left, room[i]-counts[i])
			counts[i] += n
			left -= n
		}
	}
	return counts, nil
}
