package sched

import (
	"container/heap"
	"maps"
	"slices"
)

// Decisions are what a pass decided.
type Decisions struct {
	// Placements in the order in which they were decided: each holds only if those before it do.
	Placements []Placement
	// Considered is the number of jobs tried against the nodes.
	Considered int
	// Complete is false if the pass stopped at one of its Limits and not every job has had its turn since the view changed last: the next
	// Plan goes on with those behind the limit. It tells of all passes since that change, not only of this one.
	Complete bool
	// NextWake is when a job that waits for its time may be considered; Never if there is none.
	NextWake Time
	// Reservations tells when and where the first blocked jobs are promised to start.
	Reservations []Reservation

	view   *View
	placed map[JobID]bool
}

// Reservation is the promise to a job that did not fit: its nodes by the time that running jobs' limits give them back.
type Reservation struct {
	Job       JobID
	Partition string
	// Start is Never if a job without a time limit stands in the way.
	Start Time
	Nodes []NodeID
}

// pass is one run of the planner.
type pass struct {
	v      *View
	x      *index
	st     *state
	now    Time
	limits Limits
	work   int
	res    []reservation
	// later has claims decided in this pass, by slot.
	later  map[int][]hold
	failed map[needKey][]failure
	dec    *Decisions
	sweep  sweep
}

// scratch is memory that passes use again.
type scratch struct {
	st                  state
	candidates, blocked bitset
	picks               []pick
	counts              []int
}

// Plan decides which waiting jobs start now. It takes the view as it is, changes nothing that a caller can see but Dirty, and stops at the
// limits. A job that was placed stays in the view until the caller takes it out or plans it again.
func (v *View) Plan(now Time, limits Limits) *Decisions {
	v.wakeUp(now)
	if v.stale {
		v.rebuild()
	}
	p := &pass{v: v, x: v.idx, st: &v.work.st, now: now, limits: limits, later: map[int][]hold{}, failed: map[needKey][]failure{},
		dec: &Decisions{view: v, placed: map[JobID]bool{}}}
	v.begin()
	p.st.copyFrom(&v.idx.base)
	if words := len(newBitset(len(p.x.nodes))); len(v.work.candidates) != words {
		v.work.candidates, v.work.blocked = make(bitset, words), make(bitset, words)
	}
	for _, part := range v.partitions {
		part.head, part.behind, part.closed = 0, "", false
	}
	p.run(v.order())
	for _, r := range p.res {
		p.dec.Reservations = append(p.dec.Reservations, r.public(p.x))
	}
	p.dec.NextWake = v.NextWake()
	v.dirty, v.reuse = false, len(p.dec.Placements) == 0
	return p.dec
}

// order returns the classes that have a job to consider, by the order of their first jobs.
func (v *View) order() []*class {
	queue := make([]*class, 0, len(v.classes))
	for _, c := range v.classes {
		c.cursor = 0
		if !v.reuse {
			c.verdict = verdict{first: Reason{Code: Priority}, rest: Reason{Code: Priority}}
		}
		if len(c.queue) > 0 {
			c.headPriority, c.headID = c.queue[0].Priority, c.queue[0].ID
			queue = append(queue, c)
		}
	}
	// Compact keys sort several times faster than pointers.
	type key struct {
		position
		at int32
	}
	keys := make([]key, len(queue))
	for i, c := range queue {
		keys[i] = key{c.position(), int32(i)}
	}
	slices.SortFunc(keys, func(a, b key) int { return a.compare(b.position) })
	sorted := make([]*class, len(queue))
	for i, k := range keys {
		sorted[i] = queue[k.at]
	}
	return sorted
}

// run considers jobs in order until all had their turn or a limit is reached. Most classes are done with their first job; those of which
// one was placed wait for their next turn in a heap beside.
func (p *pass) run(queue []*class) {
	var again classQueue
	p.beginSweep()
	for len(queue) > 0 || len(again) > 0 {
		later := len(again) > 0 && (len(queue) == 0 || headBefore(again[0], queue[0]))
		var c *class
		if later {
			c = again[0]
		} else {
			c = queue[0]
		}
		turn := p.turn(c)
		if turn == turnEnds {
			return
		}
		if later {
			heap.Pop(&again)
		} else {
			queue = queue[1:]
		}
		if turn == turnSkips || !p.consider(c) {
			continue
		}
		if c.cursor++; c.cursor < len(c.queue) {
			c.headPriority, c.headID = c.queue[c.cursor].Priority, c.queue[c.cursor].ID
			heap.Push(&again, c)
		}
	}
	p.endSweep()
}

// consider tries the next job of a class in its partitions. It returns false if it does not fit: then nothing of its class does.
func (p *pass) consider(c *class) bool {
	j := c.queue[c.cursor]
	p.dec.Considered++
	c.verdict.known = true
	shapes := p.v.shapesOf(c)
	end := endOf(p.now, j.TimeLimitS)
	possible := false
	for i := range shapes {
		s := &shapes[i]
		if s.never.Code != None || s.part.closed {
			possible = possible || s.never.Code == None
			continue
		}
		possible = true
		if picks := p.fit(s, end); picks != nil {
			p.place(j, s, picks, end)
			return true
		}
	}
	if !possible {
		r := worst(shapes)
		c.verdict = verdict{known: true, first: r, rest: r}
		return false
	}
	p.block(c, j, shapes)
	return false
}

// block records that a job did not fit, and gives it a reservation if it is the first in one of its partitions.
func (p *pass) block(c *class, j *job, shapes []classShape) {
	var best *reservation
	first := false
	for i := range shapes {
		s := &shapes[i]
		if s.never.Code != None || s.part.head != 0 || s.part.closed {
			continue
		}
		first = true
		if len(p.res) >= p.limits.Reservations {
			continue
		}
		if r := p.reserve(j, s); r != nil && (best == nil || r.start < best.start) {
			best = r
		}
	}
	if !first {
		c.verdict.first.Sentence = p.behind(shapes)
		return
	}
	for i := range shapes {
		s := &shapes[i]
		if s.never.Code == None && s.part.head == 0 {
			s.part.head = j.ID
			// Without a promise to the first, nothing may pass it.
			s.part.closed = best == nil
		}
	}
	c.verdict.first = Reason{Code: Resources, Sentence: p.missing(shapes)}
	if best != nil {
		p.res = append(p.res, *best)
	}
}

// endOf returns when a job that starts now reaches its limit.
func endOf(now Time, limitS uint32) Time {
	if limitS == Unlimited || limitS == 0 {
		return Never
	}
	return now + Time(limitS)*1000
}

// place commits a decision to the pass.
func (p *pass) place(j *job, s *classShape, picks []pick, end Time) {
	slices.SortFunc(picks, func(a, b pick) int { return a.slot - b.slot })
	caps := make([]uint32, len(picks))
	for i := range picks {
		caps[i] = picks[i].units
	}
	s.spread(caps)
	d := Placement{Job: j.ID, Attempt: j.Attempt, Partition: s.part.Name}
	for i := range picks {
		n := p.x.nodes[picks[i].slot]
		g := give(p.x, n, s, caps[i], p.st)
		p.take(n, &g, j.ID, end)
		d.Epochs = append(d.Epochs, n.Epoch)
		if k := len(d.Groups); k > 0 && sameShare(&d.Groups[k-1], &g) {
			d.Groups[k-1].Nodes = append(d.Groups[k-1].Nodes, n.ID)
		} else {
			d.Groups = append(d.Groups, g)
		}
	}
	p.dec.Placements = append(p.dec.Placements, d)
	p.dec.placed[j.ID] = true
}

func sameShare(a, b *Group) bool {
	return a.MemoryMB == b.MemoryMB && a.Tasks == b.Tasks && a.CPUs.Equal(b.CPUs) && a.GPUs.Equal(b.GPUs) && sameShares(a.Gres, b.Gres)
}

// give chooses the devices of one node for n units.
func give(x *index, n *node, s *classShape, units uint32, st *state) Group {
	a := s.share(units)
	if !s.whole {
		g := s.devices(x, n, a, st)
		if s.memoryAll {
			g.MemoryMB = n.MemoryMB
		}
		return g
	}
	g := Group{Nodes: []NodeID{n.ID}, Tasks: a.tasks, MemoryMB: a.memory, Gres: s.chooseGres(x, n, st)}
	if s.memoryAll {
		g.MemoryMB = n.MemoryMB
	}
	g.CPUs, g.GPUs = upTo(int(n.CPUs)).without(n.UnusableCPUs), n.all.without(n.UnusableGPUs)
	switch {
	case s.memoryAll:
	case s.wholeMemory:
		g.MemoryMB = n.MemoryMB
	default:
		g.MemoryMB = min(n.MemoryMB, s.perNode+s.perCPU*uint64(g.CPUs.Count())+s.perGPU*uint64(g.GPUs.Count()))
	}
	return g
}

// take marks what a decision owns as used for the rest of the pass.
func (p *pass) take(n *node, g *Group, id JobID, end Time) {
	st, slot := p.st, n.slot
	st.cpuMasks[slot], st.gpuMasks[slot] = st.cpuMasks[slot].with(g.CPUs), st.gpuMasks[slot].with(g.GPUs)
	st.cpus[slot] -= int32(g.CPUs.Count())
	st.gpus[0][slot] -= int32(g.GPUs.Count())
	for i, t := range p.x.types[1:] {
		if m := n.byType[t]; m != nil {
			st.gpus[i+1][slot] -= int32(g.GPUs.countIn(m))
		}
	}
	if len(g.Gres) > 0 {
		st.units[slot] = plusUnits(st.units[slot], g.Gres)
		for i, units := range n.units {
			st.gres[i][slot] -= int32(unitsIn(g.Gres, p.x.pools[i].name).countIn(units))
		}
	}
	st.memory[slot] -= g.MemoryMB
	st.used[slot] += g.MemoryMB
	st.owners[slot]++
	st.mark(slot)
	h := holdOf(&Claim{Job: id, End: end}, g)
	p.later[slot] = append(p.later[slot], h)
	for i := range p.res {
		p.res[i].spend(slot, end, h.owned)
	}
}

// Reason returns why a job waits as this pass sees it; None for a job that was placed or is not known. It holds until the view changes.
func (d *Decisions) Reason(id JobID) Reason {
	j := d.view.jobs[id]
	if j == nil || d.placed[id] {
		return Reason{}
	}
	return d.reason(j)
}

// Waiting returns the ids of the jobs that wait, ascending.
func (v *View) Waiting() []JobID { return slices.Sorted(maps.Keys(v.jobs)) }
