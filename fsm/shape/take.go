package shape

import (
	"fmt"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// node is a node of an allocation with what no step has for itself.
type node struct {
	share  *Share
	cpus   []uint64
	gpus   []uint64
	memory uint64
	gres   []*apiv1.GresShare
	named  bool // must be part of the step
}

func freeOf(s *Share) node {
	n := node{share: s, cpus: s.CPUMask, gpus: s.GPUMask, memory: s.MemoryMB, gres: s.Gres}
	for _, h := range s.Holds {
		n.cpus, n.gpus = Without(n.cpus, h.CPUMask), Without(n.gpus, h.GPUMask)
		n.gres = GresWithout(n.gres, h.Gres)
		n.memory -= min(n.memory, h.MemoryMB)
	}
	return n
}

// there says what is there of something: all of the allocation, or what other steps have left.
func (n *node) there(has uint64) string {
	if len(n.share.Holds) > 0 {
		return fmt.Sprintf("%d are free", has)
	}
	return fmt.Sprintf("the allocation has %d", has)
}

// see returns the node as the part sees it: with "overlap" everything is free.
func (w *want) see(n *node) node {
	if w.r.GetOverlap() {
		return node{share: n.share, cpus: n.share.CPUMask, gpus: n.share.GPUMask, memory: n.share.MemoryMB, gres: n.share.Gres}
	}
	return *n
}

// gpuRequest is a number of GPUs of a type on a node.
type gpuRequest struct {
	kind  string
	count uint64
}

// gpusOfNode returns what the part asks for on each node, whatever its tasks are.
func (w *want) gpusOfNode() []gpuRequest {
	if w.r.GetGpusPerNode() > 0 {
		return []gpuRequest{{w.r.GetGpuType(), uint64(w.r.GetGpusPerNode())}}
	}
	var all []gpuRequest
	for _, g := range w.r.GetGres() {
		if g.Name == gpuName && g.Count > 0 {
			all = append(all, gpuRequest{g.Type, uint64(g.Count)})
		}
	}
	return all
}

// byTask reports whether the GPUs of a node follow from its tasks, and how many of them a task and how many tasks a GPU has.
func (w *want) byTask() (perTask, perGPU uint64, follows bool) {
	switch {
	case len(w.gpusOfNode()) > 0:
		return 0, 0, false
	case w.need.GPUsPerTask > 0:
		return w.need.GPUsPerTask, 1, true
	case w.need.TasksPerGPU > 0:
		return 1, w.need.TasksPerGPU, true
	default:
		return 0, 0, false
	}
}

// lacks says why a node has no room for a task of the part; nil if it has.
func (w *want) lacks(n *node) error {
	free, name := w.see(n), n.share.Name
	for _, g := range w.gpusOfNode() {
		if has := Count(Common(free.gpus, GPUsOfType(n.share.Spec, g.kind))); has < g.count {
			return fmt.Errorf("asks for %d GPUs%s per node; %s on node %s", g.count, ofType(g.kind), n.there(has), name)
		}
	}
	for _, g := range w.r.GetGres() {
		if has := Count(Common(GresMask(free.gres, g.Name), GresUnits(n.share.Spec, g.Name, g.Type))); g.Name != gpuName && has < uint64(g.Count) {
			return fmt.Errorf("asks for %d %s%s per node; %s on node %s", g.Count, g.Name, ofType(g.Type), n.there(has), name)
		}
	}
	if m := w.r.GetMemoryPerNodeMb(); m > free.memory && n.share.MemoryMB > 0 {
		return fmt.Errorf("asks for %d MiB of memory per node; %s on node %s", m, n.there(free.memory), name)
	}
	if !w.exact && Count(free.cpus) < Count(n.share.CPUMask) {
		return fmt.Errorf("asks for all CPUs of its nodes; %d of %d on node %s are free", Count(free.cpus), Count(n.share.CPUMask), name)
	}
	if w.inherits && (Count(free.gpus) < Count(n.share.GPUMask) || !GresEqual(GresUnion(free.gres, nil), GresUnion(n.share.Gres, nil))) {
		return fmt.Errorf("takes all GPUs and other devices of its nodes, because it asks for none, and some of node %s are not free", name)
	}
	if w.room(n) == 0 {
		return fmt.Errorf("has no room for a task of %d CPUs%s on node %s of the allocation", w.need.CPUsPerTask, w.andGPUs(), name)
	}
	return nil
}

func (w *want) andGPUs() string {
	if w.need.GPUsPerTask > 0 {
		return fmt.Sprintf(" and %d GPUs", w.need.GPUsPerTask)
	}
	return ""
}

func ofType(kind string) string {
	if kind == "" {
		return ""
	}
	return " of type " + kind
}

// room returns how many tasks of the part have room on a node.
func (w *want) room(n *node) uint64 {
	free := w.see(n)
	tasks := Count(free.cpus) / w.need.CPUsPerTask
	if w.r.GetOvercommit() && Count(free.cpus) > 0 {
		tasks = MaxTasks
	}
	fixed := uint64(0)
	for _, g := range w.gpusOfNode() {
		fixed += g.count
	}
	gpus := Count(Common(free.gpus, GPUsOfType(n.share.Spec, w.r.GetGpuType())))
	if perTask, perGPU, follows := w.byTask(); follows {
		tasks = min(tasks, gpus/perTask*perGPU)
	} else if w.need.TasksPerGPU > 0 {
		tasks = min(tasks, fixed*w.need.TasksPerGPU)
	} else if w.need.GPUsTotal > 0 && gpus == 0 {
		tasks = 0
	}
	if n := w.need.CPUsPerGPU; n > 0 && w.need.GPUsPerTask == 0 && !w.r.GetOvercommit() && max(1, fixed)*n > Count(free.cpus) {
		tasks = 0
	}
	if per := saturate(w.r.GetMemoryPerCpuMb(), w.need.CPUsPerTask); per > 0 && n.share.MemoryMB > 0 {
		tasks = min(tasks, free.memory/per)
	}
	if per := saturate(w.r.GetMemoryPerGpuMb(), w.need.GPUsPerTask); per > 0 && n.share.MemoryMB > 0 {
		tasks = min(tasks, free.memory/per)
	}
	if w.need.PerNode > 0 {
		tasks = min(tasks, w.need.PerNode)
	}
	return tasks
}

// saturate multiplies without overflow.
func saturate(a, b uint64) uint64 {
	if b != 0 && a > ^uint64(0)/b {
		return ^uint64(0)
	}
	return a * b
}

// spread says how many GPUs each node gives, where that does not follow from what is asked per node: those of its tasks; or of a total one, and
// the rest from the first nodes on.
func (w *want) spread(nodes []*node, counts []uint64) ([]uint64, error) {
	gpus := make([]uint64, len(nodes))
	perTask, perGPU, follows := w.byTask()
	if follows {
		for i := range nodes {
			gpus[i] = (counts[i]*perTask + perGPU - 1) / perGPU
		}
		return gpus, nil
	}
	if len(w.gpusOfNode()) > 0 || w.need.GPUsTotal == 0 {
		return gpus, nil
	}
	left := w.need.GPUsTotal
	if left < uint64(len(nodes)) {
		return nil, fmt.Errorf("asks for %d GPUs on %d nodes; each node of a step with GPUs has at least one", left, len(nodes))
	}
	left -= uint64(len(nodes))
	for i, n := range nodes {
		free := w.see(n)
		more := min(left, Count(Common(free.gpus, GPUsOfType(n.share.Spec, w.r.GetGpuType())))-1)
		gpus[i] = 1 + more
		left -= more
	}
	if left > 0 {
		return nil, fmt.Errorf("asks for %d GPUs; its %d nodes have %d in the allocation", w.need.GPUsTotal, len(nodes), w.need.GPUsTotal-left)
	}
	return gpus, nil
}

// take gives the part its devices on one node. They are not free any more then, unless it overlaps.
func (w *want) take(n *node, tasks, gpus uint64) (*apiv1.NodeGroup, error) {
	free := w.see(n)
	g := &apiv1.NodeGroup{Tasks: uint32(tasks)}
	switch requests := w.gpusOfNode(); {
	case w.inherits:
		g.GpuMask, g.Gres = n.share.GPUMask, n.share.Gres
	case gpus > 0:
		g.GpuMask = lowest(Common(free.gpus, GPUsOfType(n.share.Spec, w.r.GetGpuType())), gpus)
	default:
		for _, r := range requests { // typed before untyped, which validation never mixes
			g.GpuMask = Union(g.GpuMask, lowest(Common(Without(free.gpus, g.GpuMask), GPUsOfType(n.share.Spec, r.kind)), r.count))
		}
	}
	for _, r := range w.r.GetGres() {
		if r.Name != gpuName && r.Count > 0 {
			units := Common(Without(GresMask(free.gres, r.Name), GresMask(g.Gres, r.Name)), GresUnits(n.share.Spec, r.Name, r.Type))
			g.Gres = GresUnion(g.Gres, []*apiv1.GresShare{{Name: r.Name, Mask: lowest(units, uint64(r.Count))}})
		}
	}
	g.CpuMask = n.share.CPUMask
	if w.exact {
		need := max(saturate(tasks, w.need.CPUsPerTask), w.need.CPUsPerGPU*Count(g.GpuMask))
		if has := Count(free.cpus); need > has && w.r.GetOvercommit() {
			need = has
		} else if need > has {
			return nil, fmt.Errorf("asks for %d CPUs on one node; %s on node %s", need, n.there(has), n.share.Name)
		}
		g.CpuMask = nearest(n.share.Spec, n.cpus, g.GpuMask, need)
		if has := Count(g.CpuMask); has < need { // it overlaps: the rest are those of others
			g.CpuMask = Union(g.CpuMask, nearest(n.share.Spec, Without(free.cpus, g.CpuMask), g.GpuMask, need-has))
		}
	}
	asked := w.memory(tasks, Count(g.GpuMask))
	if asked > free.memory && n.share.MemoryMB > 0 {
		return nil, fmt.Errorf("asks for %d MiB of memory on one node; %s on node %s", asked, n.there(free.memory), n.share.Name)
	}
	g.MemoryMb = n.share.MemoryMB
	if asked > 0 && n.share.MemoryMB > 0 {
		g.MemoryMb = asked
	}
	if !w.r.GetOverlap() {
		n.cpus, n.gpus, n.gres = Without(n.cpus, g.CpuMask), Without(n.gpus, g.GpuMask), GresWithout(n.gres, g.Gres)
		n.memory -= min(n.memory, asked)
	}
	return g, nil
}

// memory returns what the part asks for on a node in MiB; 0 if it asks for none, or for all, which keeps none from others.
func (w *want) memory(tasks, gpus uint64) uint64 {
	switch {
	case w.r.GetMemoryPerNodeMb() > 0:
		return w.r.GetMemoryPerNodeMb()
	case w.r.GetMemoryPerCpuMb() > 0:
		return saturate(w.r.GetMemoryPerCpuMb(), saturate(tasks, w.need.CPUsPerTask))
	case w.r.GetMemoryPerGpuMb() > 0:
		return saturate(w.r.GetMemoryPerGpuMb(), gpus)
	default:
		return 0
	}
}

// AsksMemory reports whether a request names an amount of memory: then a step has it for itself.
func AsksMemory(r *apiv1.ResourceRequest) bool {
	return r.GetMemoryPerNodeMb() > 0 || r.GetMemoryPerCpuMb() > 0 || r.GetMemoryPerGpuMb() > 0
}

// nearest picks CPUs: first those close to the GPUs, then the others, each with the lowest numbers first.
func nearest(spec *apiv1.NodeSpec, free, gpus []uint64, n uint64) []uint64 {
	var close []uint64
	for i, g := range spec.GetGpus() {
		if has(gpus, uint32(i)) {
			close = Union(close, g.CpuMask)
		}
	}
	picked := lowest(Common(free, close), n)
	return Union(picked, lowest(Without(free, picked), n-Count(picked)))
}
