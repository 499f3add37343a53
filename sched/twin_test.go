package sched

import (
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/muster-hpc/muster/proto/wiring"
)

// world is a small cluster for tests: what a View is fed with, kept plainly.
type world struct {
	nodes      map[NodeID]Node
	partitions []Partition
	jobs       map[JobID]Job
	claims     map[JobID]Claim
}

func (w *world) view(r *rand.Rand) *View {
	v := NewView()
	steps := []func(){}
	for _, n := range w.nodes {
		steps = append(steps, func() { v.SetNode(n) })
	}
	for _, j := range w.jobs {
		steps = append(steps, func() { v.SetJob(j) })
	}
	for _, c := range w.claims {
		steps = append(steps, func() { v.SetClaim(c) })
	}
	steps = append(steps, func() { v.SetPartitions(w.partitions) })
	r.Shuffle(len(steps), func(i, k int) { steps[i], steps[k] = steps[k], steps[i] })
	for _, f := range steps {
		f()
	}
	return v
}

// apply makes a placement part of the world, or says what is wrong with it.
func (w *world) apply(p Placement, now Time) error {
	j, ok := w.jobs[p.Job]
	if !ok {
		return fmt.Errorf("job %d does not wait", p.Job)
	}
	part := w.partition(p.Partition)
	if part == nil || !slices.Contains(j.Partitions, p.Partition) {
		return fmt.Errorf("partition %s is not the job's", p.Partition)
	}
	if err := w.constraints(j, part, p); err != nil {
		return err
	}
	rank := 0
	for _, g := range p.Groups {
		for _, id := range g.Nodes {
			n := w.nodes[id]
			if p.Epochs[rank] != n.Epoch {
				return fmt.Errorf("epoch of node %d", id)
			}
			rank++
			n.UsedCPUs, n.UsedGPUs = n.UsedCPUs.with(g.CPUs), n.UsedGPUs.with(g.GPUs)
			n.UsedMemoryMB += g.MemoryMB
			n.UsedGres = plusUnits(n.UsedGres, g.Gres)
			n.Owners++
			w.nodes[id] = n
		}
	}
	if rank != len(p.Epochs) {
		return fmt.Errorf("%d epochs for %d nodes", len(p.Epochs), rank)
	}
	delete(w.jobs, p.Job)
	w.claims[p.Job] = Claim{Job: p.Job, End: endOf(now, j.TimeLimitS), Groups: p.Groups}
	return nil
}

func (w *world) partition(name string) *Partition {
	for i := range w.partitions {
		if w.partitions[i].Name == name {
			return &w.partitions[i]
		}
	}
	return nil
}

// constraints checks a placement against the words of the request, not against its normal form.
func (w *world) constraints(j Job, part *Partition, p Placement) error {
	var seen []string
	var nodes []layout
	for _, g := range p.Groups {
		for _, id := range g.Nodes {
			n := w.nodes[id]
			if slices.Contains(seen, n.Name) {
				return fmt.Errorf("node %s twice", n.Name)
			}
			if len(seen) > 0 && CompareNames(seen[len(seen)-1], n.Name) > 0 {
				return fmt.Errorf("rank order: %s after %s", n.Name, seen[len(seen)-1])
			}
			seen = append(seen, n.Name)
			if g.CPUs.Overlaps(n.UsedCPUs) || g.GPUs.Overlaps(n.UsedGPUs) || g.MemoryMB+n.UsedMemoryMB > n.MemoryMB {
				return fmt.Errorf("node %s oversubscribed", n.Name)
			}
			if g.CPUs.countIn(upTo(int(n.CPUs))) != g.CPUs.Count() || g.GPUs.Count() != g.GPUs.countIn(gpuMask(n, "")) {
				return fmt.Errorf("node %s does not have these devices", n.Name)
			}
			if g.CPUs.Overlaps(n.UnusableCPUs) || g.GPUs.Overlaps(n.UnusableGPUs) {
				return fmt.Errorf("devices of node %s that are not usable", n.Name)
			}
			if err := others(n, g, j.Request); err != nil {
				return err
			}
			nodes = append(nodes, layout{n, int(g.Tasks), g.GPUs.Count(), g.GPUs.countIn(gpuMask(n, oneType(j.Request))), g.CPUs.Count(), g.MemoryMB})
		}
	}
	if why := allowed(j, part, nodes); why != "" {
		return fmt.Errorf("%s", why)
	}
	return nil
}

// numbers has the numbers of a node's units of a name, of one type or of any.
func numbers(n Node, name, kind string) (all []int) {
	next := 0
	for _, g := range n.Gres {
		for range g.Count {
			if g.Name == name {
				if kind == "" || g.Type == kind {
					all = append(all, next)
				}
				next++
			}
		}
	}
	return all
}

// others checks the other devices of a placement, and the types of its GPUs where several are asked.
func others(n Node, g Group, r Request) error {
	asked := map[string]int{}
	for _, want := range r.Gres {
		have := 0
		if want.Name == "gpu" {
			have = g.GPUs.countIn(gpuMask(n, want.Type))
		} else {
			asked[want.Name] += int(want.Count)
			for _, unit := range numbers(n, want.Name, want.Type) {
				if unitsIn(g.Gres, want.Name).Has(unit) {
					have++
				}
			}
		}
		if have < int(want.Count) {
			return fmt.Errorf("node %s gives %d of %+v", n.Name, have, want)
		}
	}
	for _, s := range g.Gres {
		own := 0
		for _, unit := range numbers(n, s.Name, "") {
			if s.Units.Has(unit) {
				own++
			}
		}
		if s.Units.Overlaps(unitsIn(n.UsedGres, s.Name)) || own != s.Units.Count() || own != asked[s.Name] {
			return fmt.Errorf("node %s gives units %v of %s; %d are asked", n.Name, s.Units, s.Name, asked[s.Name])
		}
	}
	return nil
}

// oneType is the type that all GPUs of a request must have; empty if there are several or any will do.
func oneType(r Request) string {
	kind, count := r.GPUType, 0
	for _, g := range r.Gres {
		if g.Name == "gpu" && g.Count > 0 {
			if count++; count > 1 && g.Type != kind {
				return ""
			}
			kind = g.Type
		}
	}
	return kind
}

// gpusPerNode is what a request says of each node.
func gpusPerNode(r Request) int {
	sum := int(r.GPUsPerNode)
	for _, g := range r.Gres {
		if g.Name == "gpu" {
			sum += int(g.Count)
		}
	}
	return sum
}

// hasOthers tells whether enough is free on a node of what a request asks besides CPUs, memory and a number of GPUs.
func hasOthers(n Node, r Request) bool {
	total := map[string]int{}
	for _, want := range r.Gres {
		same := 0 // asked of this type
		for _, o := range r.Gres {
			if o.Name == want.Name && o.Type == want.Type {
				same += int(o.Count)
			}
		}
		free := 0
		if want.Name == "gpu" {
			free = without(gpuMask(n, want.Type), n.UsedGPUs.with(n.UnusableGPUs)).Count()
		} else {
			total[want.Name] += int(want.Count)
			for _, unit := range numbers(n, want.Name, want.Type) {
				if !unitsIn(n.UsedGres, want.Name).Has(unit) {
					free++
				}
			}
		}
		if free < same {
			return false
		}
	}
	for name, count := range total {
		for _, unit := range numbers(n, name, "") {
			if !unitsIn(n.UsedGres, name).Has(unit) {
				count--
			}
		}
		if count > 0 {
			return false
		}
	}
	return true
}

func gpuMask(n Node, typ string) Mask {
	byType, all := gpuTypes(n.GPUs)
	if typ == "" {
		return all
	}
	return byType[typ]
}

// layout is what one node gives to a job.
type layout struct {
	node   Node
	tasks  int
	gpus   int
	typed  int
	cpus   int
	memory uint64
}

// allowed is the meaning of a request: it says what a set of nodes with tasks and devices does wrong, nothing if it is right.
func allowed(j Job, part *Partition, nodes []layout) string {
	r := j.Request
	whole := r.Whole || part.Exclusive
	k, tasks, gpus, typed := len(nodes), 0, 0, 0
	for _, l := range nodes {
		n := l.node
		if n.State != NodeUp || !slices.Contains(part.Nodes, n.ID) || slices.Contains(r.Exclude, n.Name) {
			return "node " + n.Name + " is not eligible"
		}
		if whole && (n.Owners > 0 || l.cpus != without(upTo(int(n.CPUs)), n.UnusableCPUs).Count() || l.gpus != without(gpuMask(n, ""), n.UnusableGPUs).Count()) {
			return "not the whole node"
		}
		if !whole && l.typed != l.gpus {
			return "GPUs of another type"
		}
		tasks += l.tasks
		gpus += l.gpus
		typed += l.typed
		if l.tasks < 1 {
			return "a node without a task"
		}
		if why := allowedNode(r, part, whole, l); why != "" {
			return why
		}
	}
	for _, name := range r.Include {
		if !slices.ContainsFunc(nodes, func(l layout) bool { return l.node.Name == name }) {
			return "a required node is missing"
		}
	}
	least := max(int(r.NodesMin), 1)
	if r.Tasks > 0 {
		least = min(least, int(r.Tasks)) // No node without a task.
	}
	most := max(int(r.NodesMax), int(r.NodesMin))
	if most > 0 && k > max(most, len(r.Include)) || k < least || part.MaxNodes > 0 && k > int(part.MaxNodes) {
		return "number of nodes"
	}
	if r.Tasks == 0 && r.NodesMin == 0 && r.GPUsTotal == 0 && k > max(1, int(r.NodesMax), len(r.Include)) {
		return "more nodes than asked"
	}
	if r.Tasks > 0 && tasks != int(r.Tasks) {
		return "number of tasks"
	}
	if r.Tasks > 0 && r.TasksPerNode > 0 && r.NodesMin == 0 && r.NodesMax == 0 && r.Tasks%r.TasksPerNode == 0 && k != max(len(r.Include), int(r.Tasks/r.TasksPerNode)) {
		return "tasks per node divide the tasks"
	}
	if r.GPUsTotal > 0 && whole && typed < int(r.GPUsTotal) || r.GPUsTotal > 0 && !whole && gpus != int(r.GPUsTotal) {
		return "number of GPUs"
	}
	return ""
}

func allowedNode(r Request, part *Partition, whole bool, l layout) string {
	perTask := max(int(r.CPUsPerTask), 1)
	cpus := l.tasks * perTask
	wantTasks := max(int(r.TasksPerNode), 1)
	switch {
	case r.Tasks == 0 && r.GPUsTotal > 0 && r.GPUsPerTask > 0: // Tasks follow from the GPUs.
	case r.Tasks == 0 && l.tasks != wantTasks:
		return "tasks on a node"
	case r.Tasks > 0 && r.TasksPerNode > 0 && l.tasks > int(r.TasksPerNode):
		return "too many tasks on a node"
	}
	gpus := 0
	switch {
	case gpusPerNode(r) > 0:
		gpus = gpusPerNode(r)
	case r.GPUsPerTask > 0:
		gpus = l.tasks * int(r.GPUsPerTask)
	case r.GPUsTotal > 0:
		gpus = l.typed
		if gpus < 1 {
			return "a node without a GPU"
		}
		if r.Tasks > 0 && l.tasks*int(r.GPUsTotal) != gpus*int(r.Tasks) && !whole {
			return "tasks and GPUs in another proportion"
		}
	}
	if whole && (l.cpus < cpus || l.typed < gpus) || !whole && (l.cpus != cpus || l.gpus != gpus) {
		return "devices on a node"
	}
	perCPU := r.MemoryPerCPUMB
	none := r.MemoryPerCPUMB == 0 && r.MemoryPerNodeMB == 0 && r.MemoryPerGPUMB == 0
	if none {
		perCPU = part.DefaultMemoryPerCPUMB
	}
	memory := r.MemoryPerNodeMB + uint64(cpus)*perCPU + uint64(gpus)*r.MemoryPerGPUMB
	if whole {
		memory = min(memory, l.node.MemoryMB)
	}
	switch {
	case r.MemoryAll && (l.memory != l.node.MemoryMB || l.node.UsedMemoryMB > 0):
		return "not all memory"
	case r.MemoryAll:
	case !whole && l.memory != memory, whole && l.memory < memory && !none:
		return "memory"
	}
	return ""
}

// possible tries every layout of a job on the nodes of a partition: slow, and plain.
func (w *world) possible(j Job, part *Partition) bool {
	var nodes []Node
	for _, id := range part.Nodes {
		nodes = append(nodes, w.nodes[id])
	}
	slices.SortFunc(nodes, func(a, b Node) int { return int(a.ID) - int(b.ID) })
	most := int(max(j.Request.Tasks, j.Request.TasksPerNode, 1))
	if j.Request.GPUsTotal > 0 && j.Request.GPUsPerTask > 0 {
		most = max(most, int(j.Request.GPUsTotal/j.Request.GPUsPerTask))
	}
	var try func(i int, chosen []layout) bool
	try = func(i int, chosen []layout) bool {
		if i == len(nodes) {
			return len(chosen) > 0 && allowed(j, part, chosen) == ""
		}
		if try(i+1, chosen) {
			return true
		}
		for _, l := range w.layouts(j, part, nodes[i], most) {
			if try(i+1, append(slices.Clone(chosen), l)) {
				return true
			}
		}
		return false
	}
	return try(0, nil)
}

// layouts are all ways in which a node could take part.
func (w *world) layouts(j Job, part *Partition, n Node, most int) []layout {
	usableCPUs, usableGPUs := without(upTo(int(n.CPUs)), n.UnusableCPUs), without(gpuMask(n, ""), n.UnusableGPUs)
	freeCPUs := without(usableCPUs, n.UsedCPUs).Count()
	freeGPUs := without(gpuMask(n, oneType(j.Request)), n.UsedGPUs.with(n.UnusableGPUs)).Count()
	if !hasOthers(n, j.Request) {
		return nil
	}
	freeMemory := n.MemoryMB - n.UsedMemoryMB
	r := j.Request
	whole := r.Whole || part.Exclusive
	var out []layout
	for tasks := range most + 1 {
		for gpus := range freeGPUs + 1 {
			l := layout{node: n, tasks: tasks, gpus: gpus, typed: gpus, cpus: tasks * max(int(r.CPUsPerTask), 1)}
			if r.Tasks > 0 && r.GPUsTotal > 0 && r.GPUsPerTask == 0 && tasks*int(r.GPUsTotal) != gpus*int(r.Tasks) {
				continue
			}
			perCPU := r.MemoryPerCPUMB
			if r.MemoryPerCPUMB == 0 && r.MemoryPerNodeMB == 0 && r.MemoryPerGPUMB == 0 {
				perCPU = part.DefaultMemoryPerCPUMB
			}
			l.memory = r.MemoryPerNodeMB + uint64(l.cpus)*perCPU + uint64(gpus)*r.MemoryPerGPUMB
			if r.MemoryAll {
				l.memory = n.MemoryMB
			}
			if whole {
				if l.cpus > usableCPUs.Count() || l.memory > n.MemoryMB {
					continue
				}
				l.cpus, l.gpus = usableCPUs.Count(), usableGPUs.Count()
			}
			if l.cpus <= freeCPUs && l.memory <= freeMemory && allowedNode(r, part, whole, l) == "" {
				out = append(out, l)
			}
		}
	}
	return out
}

// randomWorld makes a small cluster with things running and jobs waiting.
func randomWorld(r *rand.Rand) *world {
	w := &world{nodes: map[NodeID]Node{}, jobs: map[JobID]Job{}, claims: map[JobID]Claim{}}
	var all []NodeID
	n := 1 + r.IntN(4)
	for i := range n {
		id := NodeID(i + 1)
		node := Node{ID: id, Name: fmt.Sprintf("n%d", 8+i), Epoch: r.Uint32N(3) + 1, CPUs: 1 + r.Uint32N(4), MemoryMB: 10 * (1 + r.Uint64N(4))}
		for range r.IntN(4) {
			node.GPUs = append(node.GPUs, []string{"a", "a", "b"}[r.IntN(3)])
		}
		if r.IntN(8) == 0 {
			node.State = []NodeState{NodeDrained, NodeDown}[r.IntN(2)]
		}
		ail(r, &node)
		w.nodes[id] = node
		all = append(all, id)
	}
	w.partitions = []Partition{{Name: "p", Nodes: all, DefaultMemoryPerCPUMB: uint64(r.IntN(2)) * 3, Exclusive: r.IntN(12) == 0}}
	if r.IntN(8) == 0 {
		w.partitions[0].MaxNodes = 1 + r.Uint32N(3)
	}
	for i := range 1 + r.IntN(6) {
		w.jobs[JobID(i+10)] = randomJob(r, JobID(i+10), n)
	}
	return w
}

// ail gives a node other devices, wiring, and things that are wrong with it.
func ail(r *rand.Rand, n *Node) {
	if r.IntN(2) == 0 {
		n.Gres = []Gres{{"ib", "x", r.Uint32N(3)}, {"licence", "", r.Uint32N(3)}, {"ib", "y", r.Uint32N(2)}}
	}
	if r.IntN(4) == 0 && len(n.GPUs) > 0 {
		n.UnusableGPUs = Mask{1 << r.IntN(len(n.GPUs))}
	}
	if r.IntN(8) == 0 {
		n.UnusableCPUs = Mask{1 << r.IntN(4)} // perhaps one that it does not have
	}
	n.Degraded = r.IntN(6) == 0
	if r.IntN(2) == 0 {
		for i := range n.GPUs {
			n.Wiring = append(n.Wiring, wiring.Device{NUMA: i % 2, Board: wiring.Unknown})
			n.NearCPUs = append(n.NearCPUs, Mask{1 << (i % 4)})
		}
	}
}

func randomJob(r *rand.Rand, id JobID, nodes int) Job {
	nodes = max(nodes, 1)
	some := func(n uint32) uint32 { return r.Uint32N(n + 1) }
	maybe := func(n uint32) uint32 {
		if r.IntN(3) > 0 {
			return 0
		}
		return some(n)
	}
	q := Request{NodesMin: maybe(3), Tasks: maybe(5), TasksPerNode: maybe(3), CPUsPerTask: maybe(2), Whole: r.IntN(8) == 0}
	if q.NodesMin > 0 {
		q.NodesMax = q.NodesMin + maybe(2)
	}
	if r.IntN(4) == 0 {
		q.Gres = append(q.Gres, Gres{"ib", []string{"", "x", "y"}[r.IntN(3)], some(2)})
	}
	if r.IntN(8) == 0 {
		q.Gres = append(q.Gres, Gres{"licence", "", some(2)}, Gres{"ib", "", some(1)})
	}
	switch r.IntN(6) {
	case 5:
		q.Gres = append(q.Gres, Gres{"gpu", "a", some(1)}, Gres{"gpu", []string{"b", ""}[r.IntN(2)], 1 + some(1)})
	case 0:
		q.GPUsPerNode = some(3)
	case 1:
		q.GPUsTotal = some(6)
	case 2:
		q.GPUsPerTask = some(2)
	}
	if r.IntN(4) == 0 && gpusPerNode(Request{Gres: q.Gres}) == 0 {
		q.GPUType = "a"
	}
	switch r.IntN(8) {
	case 0:
		q.MemoryPerNodeMB = 10 * uint64(some(3))
	case 1:
		q.MemoryPerCPUMB = 5 * uint64(some(3))
	case 2:
		q.MemoryPerGPUMB = 10 * uint64(some(2))
	case 3:
		q.MemoryAll = true
	}
	if r.IntN(6) == 0 {
		q.Include = []string{fmt.Sprintf("n%d", 8+r.IntN(nodes))}
	}
	if r.IntN(6) == 0 {
		q.Exclude = []string{fmt.Sprintf("n%d", 8+r.IntN(nodes))}
	}
	limit := uint32(10 * (1 + r.IntN(5)))
	if r.IntN(10) == 0 {
		limit = Unlimited
	}
	return Job{ID: id, Attempt: 1, Partitions: []string{"p"}, Priority: r.Uint32N(3), TimeLimitS: limit, Request: q}
}
