package sched

import (
	"cmp"
	"math/bits"
	"slices"
)

// index has nodes by slot, in natural order of their names, and the sets of slots that answer the planner's questions.
type index struct {
	// generation rises whenever the cluster as configured changes: nodes, partitions, states.
	generation int
	nodes      []*node
	kinds      []kind
	// types are the GPU types; the first, empty, stands for any.
	types  []string
	typeOf map[string]int
	// pools are the other devices: by name, and by name and type.
	pools  []pool
	poolOf map[pool]int
	// degraded has nodes to which others are preferred.
	degraded bitset
	// takes has nodes that take new work.
	takes bitset
	// up has nodes that are neither drained nor down, suspect or not.
	up   bitset
	base state
}

// kind is what a node has when nothing runs on it; most clusters have few kinds.
type kind struct {
	cpus   int
	memory uint64
	gpus   []int // by type
	gres   []int // by pool
}

// partition is a partition with its nodes as slots and their number by kind.
type partition struct {
	Partition
	slots    bitset
	all, upN []int
	// head is the first job that did not fit in this pass; 0 if none.
	head JobID
	// behind is the sentence for those who wait behind it, once made.
	behind string
	// closed: nothing more starts here in this pass.
	closed bool
}

// state is what is free on each slot.
type state struct {
	cpus, owners []int32
	memory       []uint64
	used         []uint64 // memory owned
	gpus         [][]int32
	// gres is what is free of each pool.
	gres [][]int32
	// levels[type][k] has slots with at least k free GPUs of the type.
	levels [][]bitset
	// cpuLevels[j] has slots with at least 2^j free CPUs.
	cpuLevels []bitset
	idle      bitset
	// gpuMasks and cpuMasks are what is owned or not usable; units is what is owned of other devices.
	cpuMasks, gpuMasks []Mask
	units              [][]GresShare
}

// rebuild makes the index from scratch.
func (v *View) rebuild() {
	old := v.idx
	x := &index{typeOf: map[string]int{"": 0}, types: []string{""}, poolOf: map[pool]int{}}
	if old != nil {
		x.generation = old.generation + 1
	}
	for _, n := range v.nodes {
		x.nodes = append(x.nodes, n)
	}
	slices.SortFunc(x.nodes, func(a, b *node) int { return cmp.Or(CompareNames(a.Name, b.Name), cmp.Compare(a.ID, b.ID)) })
	maxGPUs, maxCPUs := 0, 0
	for slot, n := range x.nodes {
		n.slot = slot
		for _, t := range n.GPUs {
			if _, known := x.typeOf[t]; !known {
				x.typeOf[t] = len(x.types)
				x.types = append(x.types, t)
			}
		}
		maxGPUs, maxCPUs = max(maxGPUs, len(n.GPUs)), max(maxCPUs, int(n.CPUs))
		x.addPools(n)
	}
	x.takes, x.up, x.degraded = newBitset(len(x.nodes)), newBitset(len(x.nodes)), newBitset(len(x.nodes))
	for _, n := range x.nodes {
		n.units = x.unitsOf(n)
		n.kind, n.usable = x.kindOf(n, nil, nil), x.kindOf(n, n.UnusableCPUs, n.UnusableGPUs)
		x.degraded.put(n.slot, n.Degraded || n.DegradedGPUs.Count() > 0)
	}
	x.base.size(len(x.nodes), len(x.types), len(x.pools), maxGPUs, bits.Len(uint(maxCPUs)))
	for _, p := range v.partitions {
		p.slots = newBitset(len(x.nodes))
		p.all, p.upN = make([]int, len(x.kinds)), make([]int, len(x.kinds))
		for _, id := range p.Nodes {
			if n := v.nodes[id]; n != nil && !p.slots.has(n.slot) {
				p.slots.set(n.slot)
				p.all[n.kind]++
			}
		}
	}
	v.idx, v.stale = x, false
	for _, n := range x.nodes {
		x.refresh(n)
	}
	for _, p := range v.partitions {
		p.countUp(x)
	}
}

func (p *partition) countUp(x *index) {
	clear(p.upN)
	p.slots.each(func(slot int) bool {
		if x.up.has(slot) {
			p.upN[x.nodes[slot].usable]++
		}
		return true
	})
}

// kindOf is the kind of a node without some of its devices.
func (x *index) kindOf(n *node, cpus, gpus Mask) int {
	k := kind{cpus: int(n.CPUs) - upTo(int(n.CPUs)).countIn(cpus), memory: n.MemoryMB, gpus: make([]int, len(x.types)), gres: make([]int, len(x.pools))}
	for t, m := range n.byType {
		k.gpus[x.typeOf[t]] = m.Count() - m.countIn(gpus)
	}
	k.gpus[0] = n.all.Count() - n.all.countIn(gpus)
	for i, m := range n.units {
		k.gres[i] = m.Count()
	}
	for i := range x.kinds {
		if o := &x.kinds[i]; o.cpus == k.cpus && o.memory == k.memory && slices.Equal(o.gpus, k.gpus) && slices.Equal(o.gres, k.gres) {
			return i
		}
	}
	x.kinds = append(x.kinds, k)
	return len(x.kinds) - 1
}

// refresh takes in a node's usage and whether it takes work.
func (x *index) refresh(n *node) {
	up := n.State == NodeUp
	x.up.put(n.slot, up)
	x.takes.put(n.slot, up && !n.suspect)
	s := &x.base
	s.owners[n.slot] = int32(n.Owners)
	cpus, gpus := n.UsedCPUs, n.UsedGPUs
	if len(n.UnusableCPUs) > 0 || len(n.UnusableGPUs) > 0 {
		cpus, gpus = cpus.with(n.UnusableCPUs).inBoth(upTo(int(n.CPUs))), gpus.with(n.UnusableGPUs)
	}
	s.cpuMasks[n.slot], s.gpuMasks[n.slot], s.units[n.slot] = cpus, gpus, n.UsedGres
	s.cpus[n.slot] = int32(int(n.CPUs) - cpus.Count())
	for i, m := range n.units {
		s.gres[i][n.slot] = int32(m.Count() - m.countIn(unitsIn(n.UsedGres, x.pools[i].name)))
	}
	s.used[n.slot] = n.UsedMemoryMB
	s.memory[n.slot] = n.MemoryMB - min(n.MemoryMB, n.UsedMemoryMB)
	s.gpus[0][n.slot] = int32(n.all.Count() - n.all.countIn(gpus))
	for i, t := range x.types[1:] {
		m := n.byType[t]
		s.gpus[i+1][n.slot] = int32(m.Count() - m.countIn(gpus))
	}
	s.mark(n.slot)
}

// mark puts a slot into the sets that its free resources belong to.
func (s *state) mark(slot int) {
	for t, levels := range s.levels {
		free := int(s.gpus[t][slot])
		for k, level := range levels {
			level.put(slot, free >= k)
		}
	}
	for j, level := range s.cpuLevels {
		level.put(slot, int(s.cpus[slot]) >= 1<<j)
	}
	s.idle.put(slot, s.owners[slot] == 0)
}

func (s *state) size(nodes, types, pools, maxGPUs, cpuLevels int) {
	s.cpus, s.owners = make([]int32, nodes), make([]int32, nodes)
	s.memory, s.used = make([]uint64, nodes), make([]uint64, nodes)
	s.cpuMasks, s.gpuMasks, s.units = make([]Mask, nodes), make([]Mask, nodes), make([][]GresShare, nodes)
	s.gres = make([][]int32, pools)
	for i := range s.gres {
		s.gres[i] = make([]int32, nodes)
	}
	s.idle = newBitset(nodes)
	s.gpus, s.levels = make([][]int32, types), make([][]bitset, types)
	for t := range types {
		s.gpus[t] = make([]int32, nodes)
		s.levels[t] = make([]bitset, maxGPUs+1)
		for k := range s.levels[t] {
			s.levels[t][k] = newBitset(nodes)
		}
	}
	s.cpuLevels = make([]bitset, cpuLevels)
	for j := range s.cpuLevels {
		s.cpuLevels[j] = newBitset(nodes)
	}
}

// copyFrom makes s equal to o, in the memory that s has if the sizes agree.
func (s *state) copyFrom(o *state) {
	if len(s.cpus) != len(o.cpus) || len(s.levels) != len(o.levels) || len(s.cpuLevels) != len(o.cpuLevels) || len(s.gres) != len(o.gres) ||
		len(o.levels) > 0 && len(s.levels[0]) != len(o.levels[0]) {
		s.size(len(o.cpus), len(o.levels), len(o.gres), len(o.levels[0])-1, len(o.cpuLevels))
	}
	copy(s.cpus, o.cpus)
	copy(s.owners, o.owners)
	copy(s.memory, o.memory)
	copy(s.used, o.used)
	copy(s.cpuMasks, o.cpuMasks)
	copy(s.gpuMasks, o.gpuMasks)
	copy(s.units, o.units)
	copy(s.idle, o.idle)
	for i := range o.gres {
		copy(s.gres[i], o.gres[i])
	}
	for t := range o.levels {
		copy(s.gpus[t], o.gpus[t])
		for k := range o.levels[t] {
			copy(s.levels[t][k], o.levels[t][k])
		}
	}
	for j := range o.cpuLevels {
		copy(s.cpuLevels[j], o.cpuLevels[j])
	}
}

// each calls f for each member in ascending order until f returns false.
func (b bitset) each(f func(i int) bool) {
	for w, word := range b {
		for word != 0 {
			if !f(w<<6 + bits.TrailingZeros64(word)) {
				return
			}
			word &= word - 1
		}
	}
}

// CompareNames orders node names as people do: n2 before n10.
func CompareNames(a, b string) int {
	for a != "" && b != "" {
		da, db := digits(a), digits(b)
		if da > 0 && db > 0 {
			x, y := trimZeros(a[:da]), trimZeros(b[:db])
			if c := cmp.Or(cmp.Compare(len(x), len(y)), cmp.Compare(x, y), cmp.Compare(da, db)); c != 0 {
				return c
			}
			a, b = a[da:], b[db:]
			continue
		}
		if c := cmp.Compare(a[0], b[0]); c != 0 {
			return c
		}
		a, b = a[1:], b[1:]
	}
	return cmp.Compare(len(a), len(b))
}

func digits(s string) int {
	n := 0
	for n < len(s) && s[n] >= '0' && s[n] <= '9' {
		n++
	}
	return n
}

func trimZeros(s string) string {
	for len(s) > 1 && s[0] == '0' {
		s = s[1:]
	}
	return s
}
