package sched

import (
	"cmp"
	"slices"
)

// soon is how long a claim that should have ended is taken to last still, in milliseconds.
const soon Time = 1000

// reservation promises nodes to a job from a time on.
type reservation struct {
	job       JobID
	partition string
	start     Time
	end       Time
	slots     bitset
	// spare is what is left at start on each of its slots beyond what the job needs.
	spare map[int]amount
}

func (r *reservation) public(x *index) Reservation {
	out := Reservation{Job: r.job, Partition: r.partition, Start: r.start}
	r.slots.each(func(slot int) bool {
		out.Nodes = append(out.Nodes, x.nodes[slot].ID)
		return true
	})
	return out
}

// meets tells whether a job that ends at the given time may still be there when the reservation begins.
func (r *reservation) meets(end Time) bool { return end == Never || end > r.start }

// limit cuts a slot's room to what the reservation leaves.
func (r *reservation) limit(slot int, f *room) {
	if !r.slots.has(slot) {
		return
	}
	a := r.spare[slot]
	f.cpus, f.gpus, f.memory = min(f.cpus, int(a.cpus)), min(f.gpus, int(a.gpus)), min(f.memory, a.memory)
	f.idle, f.memoryWhole = false, false
}

// spend takes a placement that is still there when the reservation begins from the spare.
func (r *reservation) spend(slot int, end Time, a amount) {
	if !r.slots.has(slot) || !r.meets(end) {
		return
	}
	left := r.spare[slot]
	left.cpus -= min(left.cpus, a.cpus)
	left.gpus -= min(left.gpus, a.gpus)
	left.memory -= min(left.memory, a.memory)
	r.spare[slot] = left
}

// reserve finds the earliest time at which a job fits, as running jobs' limits promise. It returns nil if there is none.
func (p *pass) reserve(j *job, s *classShape) *reservation {
	eligible := newBitset(len(p.x.nodes))
	for w := range eligible {
		eligible[w] = s.part.slots[w] & p.x.up[w]
	}
	for _, slot := range s.exclude {
		eligible.clear(slot)
	}
	for _, slot := range s.include {
		if !eligible.has(slot) {
			return nil
		}
	}
	start, picks := p.earliest(s, eligible)
	if picks == nil {
		return nil
	}
	caps := make([]uint32, len(picks))
	for i := range picks {
		caps[i] = picks[i].units
	}
	s.spread(caps)
	r := &reservation{job: j.ID, partition: s.part.Name, start: start, end: Never, slots: newBitset(len(p.x.nodes)), spare: map[int]amount{}}
	if start != Never {
		r.end = endOf(start, j.TimeLimitS)
	}
	for i, c := range picks {
		r.slots.set(c.slot)
		r.spare[c.slot] = p.spare(c.slot, s, caps[i], start)
	}
	return r
}

// spare is what the job leaves of a slot at its start.
func (p *pass) spare(slot int, s *classShape, units uint32, start Time) amount {
	if s.whole {
		return amount{}
	}
	f, need := p.roomAt(slot, 0, start), s.share(units)
	a := amount{cpus: uint32(max(f.cpus-int(need.cpus), 0)), memory: f.memory - min(f.memory, need.memory)}
	if s.memoryAll {
		a.memory = 0
	}
	if len(p.x.nodes[slot].byType) <= 1 { // Which type is left of several is not kept: then none counts as left.
		a.gpus = uint32(max(f.gpus-int(need.gpus), 0))
	}
	return a
}

// roomAt is what a slot has free at a time if every job runs to its limit and nothing else starts.
func (p *pass) roomAt(slot, typ int, at Time) room {
	n := p.x.nodes[slot]
	f := room{cpus: int(p.st.cpus[slot]), gpus: int(p.st.gpus[typ][slot]), memory: p.st.memory[slot]}
	owners, used := int(p.st.owners[slot]), p.st.used[slot]
	for _, list := range [2][]hold{n.holds, p.later[slot]} {
		for i := range list {
			h := &list[i]
			if p.until(h) > at {
				continue
			}
			f.cpus += int(h.owned.cpus) - h.cpus.countIn(n.UnusableCPUs)
			f.memory += h.owned.memory
			used -= min(used, h.owned.memory)
			owners--
			if typ == 0 {
				f.gpus += int(h.owned.gpus) - h.gpus.countIn(n.UnusableGPUs)
			} else {
				f.gpus += h.gpus.without(n.UnusableGPUs).countIn(n.byType[p.x.types[typ]])
			}
		}
	}
	f.cpus, f.memory = min(f.cpus, int(n.CPUs)), min(f.memory, n.MemoryMB)
	f.idle, f.memoryWhole = owners <= 0, used == 0
	return f
}

// until is when a claim is expected to be gone.
func (p *pass) until(h *hold) Time { return max(h.end, p.now+soon) }

// freeFrom is when the reservations made before leave a slot alone.
func (p *pass) freeFrom(slot int) Time {
	at := p.now
	for i := range p.res {
		if p.res[i].slots.has(slot) {
			at = max(at, p.res[i].end)
		}
	}
	return at
}

// earliest returns the first time at which the shape fits on the eligible slots, and the slots.
func (p *pass) earliest(s *classShape, eligible bitset) (Time, []pick) {
	if s.units <= 1 {
		return p.earliestEqual(s, eligible)
	}
	times := []Time{Never}
	eligible.each(func(slot int) bool {
		for _, list := range [2][]hold{p.x.nodes[slot].holds, p.later[slot]} {
			for i := range list {
				times = append(times, p.until(&list[i]))
			}
		}
		times = append(times, max(p.freeFrom(slot), p.now+soon))
		return true
	})
	slices.Sort(times)
	times = slices.Compact(times)
	i, _ := slices.BinarySearchFunc(times, true, func(at Time, _ bool) int {
		if p.picksAt(s, eligible, at) != nil {
			return 0
		}
		return -1
	})
	if i == len(times) {
		return 0, nil
	}
	return times[i], p.picksAt(s, eligible, times[i])
}

// picksAt returns nodes for a shape of several units at a time, nil if it does not fit then.
func (p *pass) picksAt(s *classShape, eligible bitset, at Time) []pick {
	picks := p.v.work.picks[:0]
	for _, slot := range s.include {
		c := p.capacityAt(slot, s, at)
		if c == 0 || p.freeFrom(slot) > at {
			return nil
		}
		picks = append(picks, pick{slot, c})
	}
	eligible.each(func(slot int) bool {
		if p.freeFrom(slot) <= at && !slices.Contains(s.include, slot) {
			if c := p.capacityAt(slot, s, at); c > 0 {
				picks = append(picks, pick{slot, c})
			}
		}
		return true
	})
	p.v.work.picks = picks
	return chooseUnits(&s.shape, picks, len(s.include), func(slot int) int32 { return p.st.cpus[slot] }, &p.v.work.counts)
}

// earliestEqual does the same where every node is the same: each slot has its own earliest time, and the first of them are taken.
func (p *pass) earliestEqual(s *classShape, eligible bitset) (Time, []pick) {
	type chance struct {
		slot int
		at   Time
		must bool
		free int32
	}
	var all []chance
	for _, slot := range s.include {
		at, ok := p.slotEarliest(s, slot)
		if !ok {
			return 0, nil
		}
		all = append(all, chance{slot: slot, at: at, must: true})
		eligible.clear(slot)
	}
	eligible.each(func(slot int) bool {
		if at, ok := p.slotEarliest(s, slot); ok {
			all = append(all, chance{slot: slot, at: at, free: p.st.cpus[slot]})
		}
		return true
	})
	if len(all) < int(s.nodesMin) {
		return 0, nil
	}
	slices.SortFunc(all, func(a, b chance) int {
		if a.must != b.must {
			return cmp.Compare(boolInt(b.must), boolInt(a.must))
		}
		// Of nodes that nobody promises back, the emptiest: the choice stays while they drain.
		return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(b.free, a.free), cmp.Compare(a.slot, b.slot))
	})
	start := p.now + soon
	var picks []pick
	for _, c := range all[:s.nodesMin] {
		start = max(start, c.at)
		picks = append(picks, pick{c.slot, s.units})
	}
	return start, picks
}

func boolInt(b bool) int {
	if b {
		return 1
	}
	return 0
}

// slotEarliest is when a slot can take its share; false if it can't even when everything there has ended.
func (p *pass) slotEarliest(s *classShape, slot int) (Time, bool) {
	from := p.freeFrom(slot)
	if p.capacityAt(slot, s, from) > 0 {
		return from, true
	}
	holds, last := p.x.nodes[slot].holds, from
	if later := p.later[slot]; len(later) > 0 {
		holds = append(slices.Clone(holds), later...)
		slices.SortFunc(holds, func(a, b hold) int { return cmp.Compare(a.end, b.end) })
	}
	for i := range holds {
		if at := p.until(&holds[i]); at > last {
			last = at
			if p.capacityAt(slot, s, at) > 0 {
				return at, true
			}
		}
	}
	return Never, p.capacityAt(slot, s, Never) > 0
}
