package sched

import (
	"cmp"
	"fmt"
	"slices"
)

// amount is resources on one node.
type amount struct {
	tasks, cpus, gpus uint32
	memory            uint64
}

// shape is a request in normal form for one partition: on each of nodesMin to nodesMax nodes a fixed amount, and besides units equal
// units spread over them, at least one on each. A request of 8 tasks is 8 units; one of 16 GPUs in all on 2 nodes is 16 units of a
// GPU each and a fixed task on each node.
type shape struct {
	nodesMin, nodesMax uint32
	fixed              amount
	// units is 0 where every node is the same.
	units uint32
	unit  amount
	// maxUnits bounds the units on a node; 0 means no bound.
	maxUnits  uint32
	memoryAll bool
	whole     bool
	// wholeMemory tells that a whole node's memory is charged where none is asked.
	wholeMemory bool
	// perCPU, perGPU and perNode are memory as asked, for whole nodes.
	perCPU, perGPU, perNode uint64
	gpuType                 string
	// gpuTypes are GPUs of several types on each node, of which fixed has the sum. gres are other devices on each node: for each name first
	// the total, without a type, and then those of a type.
	gpuTypes, gres []Gres
}

// least is what a node must have free to be a candidate at all.
func (s *shape) least() amount {
	a := s.fixed
	if s.units > 0 {
		a.cpus += s.unit.cpus
		a.gpus += s.unit.gpus
		a.memory += s.unit.memory
	}
	return a
}

// shapeOf brings a request into normal form. The sentence says what contradicts itself, empty if nothing does.
func shapeOf(asked *Request, p *Partition) (shape, string) {
	r, gpuTypes, gres := withGres(asked)
	r, sentence := perTaskOnly(r)
	if sentence != "" {
		return shape{}, sentence
	}
	s := shape{
		nodesMin: max(r.NodesMin, 1), nodesMax: max(r.NodesMin, r.NodesMax, 1),
		memoryAll: r.MemoryAll, whole: r.Whole || p.Exclusive, gpuType: r.GPUType, perCPU: r.MemoryPerCPUMB,
		perGPU: r.MemoryPerGPUMB, perNode: r.MemoryPerNodeMB, gpuTypes: gpuTypes, gres: gres,
	}
	if r.GPUsPerNode == 0 && r.GPUsTotal == 0 && r.GPUsPerTask == 0 {
		s.gpuType = "" // A type of no GPUs asks for nothing.
	}
	noMemory := r.MemoryPerNodeMB == 0 && r.MemoryPerCPUMB == 0 && r.MemoryPerGPUMB == 0
	if noMemory {
		s.perCPU = p.DefaultMemoryPerCPUMB
	}
	s.wholeMemory = noMemory && s.perCPU == 0
	if sentence := tooLarge(r); sentence != "" {
		return s, sentence
	}
	tasks, total, sentence := totals(r)
	if sentence != "" {
		return s, sentence
	}
	open := r.NodesMin == 0 // The number of nodes follows from units.
	if r.GPUsPerNode > 0 && total > 0 && r.GPUsPerTask == 0 {
		nodes := total / r.GPUsPerNode
		if nodes*r.GPUsPerNode != total || (r.NodesMin > 0 && (nodes < s.nodesMin || nodes > s.nodesMax)) {
			return s, fmt.Sprintf("asks for %d GPUs in all and %d on each node, which no allowed number of nodes gives", total, r.GPUsPerNode)
		}
		s.nodesMin, s.nodesMax, total, open = nodes, nodes, 0, false
	}
	if tasks == 0 {
		s.uniform(r, total)
	} else if sentence = s.byTask(r, tasks, total); sentence != "" {
		return s, sentence
	}
	s.cpusByGPU(r)
	if n := uint32(len(r.Include)); n > 0 {
		s.nodesMin, s.nodesMax = max(s.nodesMin, n), max(s.nodesMax, n)
	}
	if s.units > 0 {
		sentence = s.boundNodes(r, open)
		if sentence != "" {
			return s, sentence
		}
	}
	s.fixed.memory = uint64(s.fixed.cpus)*s.perCPU + uint64(s.fixed.gpus)*r.MemoryPerGPUMB + r.MemoryPerNodeMB
	s.unit.memory = uint64(s.unit.cpus)*s.perCPU + uint64(s.unit.gpus)*r.MemoryPerGPUMB
	return s, ""
}

// perTaskOnly turns GPUs per node and per task into tasks per node and GPUs per task, which say the same.
func perTaskOnly(r *Request) (*Request, string) {
	if r.GPUsPerNode == 0 || r.GPUsPerTask == 0 {
		return r, ""
	}
	n := r.GPUsPerNode / r.GPUsPerTask
	if n*r.GPUsPerTask != r.GPUsPerNode || r.TasksPerNode > 0 && r.TasksPerNode != n {
		return r, fmt.Sprintf("asks for %d GPUs on each node and %d for each task, which its tasks per node do not give", r.GPUsPerNode, r.GPUsPerTask)
	}
	c := *r
	c.TasksPerNode, c.GPUsPerNode = n, 0
	return &c, ""
}

// withGres takes GPUs that are asked as generic resources in, with the tasks that follow from GPUs, and returns the other devices. One type of
// GPU is GPUs per node; several are a sum with a list.
func withGres(asked *Request) (r *Request, gpuTypes, gres []Gres) {
	if len(asked.Gres) == 0 && asked.TasksPerGPU == 0 {
		return asked, nil, nil
	}
	c := *asked
	totals := map[string]uint32{}
	for _, g := range sortedGres(asked.Gres) {
		switch {
		case g.Name != gpuName:
			if totals[g.Name] == 0 {
				gres = append(gres, Gres{Name: g.Name, Count: gresTotal(asked.Gres, g.Name)})
			}
			if totals[g.Name] += g.Count; g.Type != "" {
				gres = append(gres, g)
			}
		default:
			c.GPUsPerNode += g.Count
			if g.Type != "" {
				gpuTypes = append(gpuTypes, g)
			}
		}
	}
	if len(gpuTypes) == 1 && gpuTypes[0].Count == c.GPUsPerNode {
		c.GPUType, gpuTypes = gpuTypes[0].Type, nil
	}
	switch {
	case c.TasksPerGPU == 0:
	case c.Tasks == 0 && c.GPUsTotal > 0:
		c.Tasks = c.GPUsTotal * c.TasksPerGPU
	case c.Tasks == 0 && c.TasksPerNode == 0:
		c.TasksPerNode = c.GPUsPerNode * c.TasksPerGPU
	case c.Tasks > 0 && c.GPUsTotal == 0 && c.GPUsPerNode == 0 && c.GPUsPerTask == 0:
		c.GPUsTotal = (c.Tasks + c.TasksPerGPU - 1) / c.TasksPerGPU
	}
	return &c, gpuTypes, gres
}

// sortedGres joins what is asked twice, by name and type; nothing of 0.
func sortedGres(asked []Gres) []Gres {
	list := slices.Clone(asked)
	slices.SortFunc(list, func(a, b Gres) int { return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Type, b.Type)) })
	var out []Gres
	for _, g := range list {
		if k := len(out) - 1; k >= 0 && out[k].Name == g.Name && out[k].Type == g.Type {
			out[k].Count += g.Count
		} else if g.Count > 0 {
			out = append(out, g)
		}
	}
	return out
}

func gresTotal(asked []Gres, name string) uint32 {
	n := uint32(0)
	for _, g := range asked {
		if g.Name == name {
			n += g.Count
		}
	}
	return n
}

// cpusByGPU fits the CPUs to a request for CPUs per GPU, or for tasks that need none of their own.
func (s *shape) cpusByGPU(r *Request) {
	each := r.CPUsPerGPU
	switch {
	case r.Overcommit:
		s.fixed.cpus, s.unit.cpus = 1, 0
	case each == 0:
	case s.unit.gpus > 0:
		s.unit.cpus = max(s.unit.cpus, s.unit.gpus*each)
		if s.fixed.gpus == 0 && s.unit.cpus >= s.fixed.cpus {
			s.fixed.cpus = 0 // Each node has a unit, whose CPUs suffice for its tasks.
		}
	case s.fixed.gpus > 0 && s.units > 0: // So many tasks at most as there are CPUs.
		cpus := s.fixed.gpus * each
		most := max(cpus/max(s.unit.cpus, 1), 1)
		if s.maxUnits == 0 || s.maxUnits > most {
			s.maxUnits = most
		}
		s.fixed.cpus, s.unit.cpus = cpus, 0
	default:
		s.fixed.cpus = max(s.fixed.cpus, s.fixed.gpus*each)
	}
}

// totals returns the number of tasks and of GPUs in all, 0 where they follow from the number of nodes.
func totals(r *Request) (tasks, gpus uint32, sentence string) {
	tasks, gpus = r.Tasks, r.GPUsTotal
	switch {
	case r.GPUsPerTask == 0:
	case tasks == 0 && gpus > 0:
		if gpus%r.GPUsPerTask != 0 {
			return 0, 0, fmt.Sprintf("asks for %d GPUs in all and %d for each task, which no number of tasks gives", gpus, r.GPUsPerTask)
		}
		tasks = gpus / r.GPUsPerTask
	case tasks > 0 && gpus > 0 && tasks*r.GPUsPerTask != gpus:
		return 0, 0, fmt.Sprintf("asks for %d GPUs in all, but its %d tasks with %d each need %d", gpus, tasks, r.GPUsPerTask, tasks*r.GPUsPerTask)
	case tasks > 0:
		gpus = tasks * r.GPUsPerTask
	}
	return tasks, gpus, ""
}

// uniform shapes a request whose tasks follow from its nodes.
func (s *shape) uniform(r *Request, totalGPUs uint32) {
	n := max(r.TasksPerNode, 1)
	s.fixed = amount{tasks: n, cpus: n * max(r.CPUsPerTask, 1), gpus: r.GPUsPerNode + n*r.GPUsPerTask}
	if totalGPUs > 0 {
		s.units, s.unit = totalGPUs, amount{gpus: 1}
	}
}

// byTask shapes a request for a number of tasks.
func (s *shape) byTask(r *Request, tasks, totalGPUs uint32) string {
	cpus := max(r.CPUsPerTask, 1)
	s.nodesMin = min(s.nodesMin, tasks) // No node without a task.
	s.units, s.unit, s.maxUnits = tasks, amount{tasks: 1, cpus: cpus, gpus: r.GPUsPerTask}, r.TasksPerNode
	s.fixed = amount{gpus: r.GPUsPerNode}
	if totalGPUs > 0 && r.GPUsPerTask == 0 {
		s.units = gcd(tasks, totalGPUs)
		each := tasks / s.units
		if each > maxPerNode {
			return fmt.Sprintf("its %d tasks share %d GPUs only in bundles of %d tasks, more than a node can have", tasks, totalGPUs, each)
		}
		s.unit = amount{tasks: each, cpus: each * cpus, gpus: totalGPUs / s.units}
		if s.maxUnits > 0 {
			if s.maxUnits /= each; s.maxUnits == 0 {
				return fmt.Sprintf("its %d tasks share %d GPUs only in bundles of %d tasks, more than the %d tasks per node that it allows",
					tasks, totalGPUs, each, r.TasksPerNode)
			}
		}
	}
	return ""
}

// boundNodes fits the bounds of the number of nodes to the units. Open tells that the request left the number open.
func (s *shape) boundNodes(r *Request, open bool) string {
	if open {
		s.nodesMax = max(s.nodesMin, s.units)
		if r.NodesMax > 0 {
			s.nodesMax = max(s.nodesMin, r.NodesMax)
		}
	}
	if s.maxUnits > 0 {
		least := (s.units + s.maxUnits - 1) / s.maxUnits
		if least > s.nodesMax {
			return fmt.Sprintf("asks for %s, more than %d nodes with at most %d tasks on each hold", unitsOf(s), s.nodesMax, r.TasksPerNode)
		}
		s.nodesMin = max(s.nodesMin, least)
		if open && r.NodesMax == 0 && s.units%s.maxUnits == 0 {
			s.nodesMax = s.nodesMin // Tasks per node divide the tasks: so many on each, as everybody expects.
		}
	}
	s.nodesMax = min(s.nodesMax, s.units)
	if s.nodesMin > s.units {
		return fmt.Sprintf("its %s can't be spread evenly over %d nodes; ask for GPUs per node or per task", unitsOf(s), s.nodesMin)
	}
	return ""
}

// Bounds that keep products of a request's numbers within 32 bits.
const (
	maxInAll   = 1 << 22
	maxPerNode = 1 << 13
)

func tooLarge(r *Request) string {
	if n := max(r.NodesMin, r.NodesMax, r.Tasks, r.GPUsTotal); n > maxInAll {
		return fmt.Sprintf("asks for %d nodes, tasks or GPUs in all; the planner knows at most %d", n, maxInAll)
	}
	if n := max(r.TasksPerNode, r.CPUsPerTask, r.GPUsPerNode, r.GPUsPerTask, r.CPUsPerGPU, r.TasksPerGPU); n > maxPerNode {
		return fmt.Sprintf("asks for %d CPUs, tasks or GPUs on a node or for a task; the planner knows at most %d", n, maxPerNode)
	}
	return ""
}

func unitsOf(s *shape) string {
	if s.unit.tasks == 0 {
		return fmt.Sprintf("%d GPUs", s.units)
	}
	return fmt.Sprintf("%d tasks", s.units*s.unit.tasks)
}

func gcd(a, b uint32) uint32 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// room is what a node has free, or would have at another time.
type room struct {
	cpus, gpus int
	memory     uint64
	idle       bool
	// memoryWhole tells that nobody was given memory there.
	memoryWhole bool
}

// capacity returns how many units a node with this room can take (1 where every node is the same), 0 if it can't be part at all.
// gpus of room counts only those of the asked type.
func (s *shape) capacity(f room) uint32 {
	if s.whole && !f.idle || s.memoryAll && !f.memoryWhole {
		return 0
	}
	cpus, gpus := f.cpus-int(s.fixed.cpus), f.gpus-int(s.fixed.gpus)
	if cpus < 0 || gpus < 0 || (!s.memoryAll && f.memory < s.fixed.memory) {
		return 0
	}
	if s.units == 0 {
		return 1
	}
	n := int(s.units)
	if s.maxUnits > 0 {
		n = min(n, int(s.maxUnits))
	}
	if s.unit.cpus > 0 {
		n = min(n, cpus/int(s.unit.cpus))
	}
	if s.unit.gpus > 0 {
		n = min(n, gpus/int(s.unit.gpus))
	}
	if s.unit.memory > 0 && !s.memoryAll {
		n = min(n, int((f.memory-s.fixed.memory)/s.unit.memory))
	}
	return uint32(n)
}

// share returns what a node gets that takes n units.
func (s *shape) share(n uint32) amount {
	a := s.fixed
	if s.units > 0 {
		a.tasks += n * s.unit.tasks
		a.cpus += n * s.unit.cpus
		a.gpus += n * s.unit.gpus
		a.memory += uint64(n) * s.unit.memory
	}
	return a
}

// spread deals units to nodes of these capacities, evenly, more to the first. It changes caps into the numbers of units. The caller
// knows that the capacities suffice.
func (s *shape) spread(caps []uint32) {
	if s.units == 0 {
		return
	}
	low, high := uint32(1), s.units
	for low < high { // The lowest level at which the capacities, cut at it, hold all units.
		mid := low + (high-low)/2
		if sumCut(caps, mid) >= uint64(s.units) {
			high = mid
		} else {
			low = mid + 1
		}
	}
	excess := sumCut(caps, low) - uint64(s.units)
	for i := len(caps) - 1; i >= 0; i-- {
		if caps[i] >= low {
			caps[i] = low
			if excess > 0 && low > 1 {
				caps[i]--
				excess--
			}
		}
	}
}

func sumCut(caps []uint32, level uint32) uint64 {
	n := uint64(0)
	for _, c := range caps {
		n += uint64(min(c, level))
	}
	return n
}
