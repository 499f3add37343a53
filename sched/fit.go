package sched

import (
	"cmp"
	"math/bits"
	"slices"
)

// classShape is what a class asks of one of its partitions.
type classShape struct {
	shape
	part *partition
	typ  int
	// largest is the most units that an empty node of the partition takes.
	largest uint32
	// include and exclude are slots.
	include []int
	exclude []int
	// never is why it can't start there as the cluster is now configured; code None if it can.
	never Reason
	// extra are the devices that each node must have besides.
	extra []extra
}

// pick is a chosen node and the units it takes.
type pick struct {
	slot  int
	units uint32
}

// fit finds nodes on which a job that ends at the given time can start now, without delaying a reservation. It returns nil if there are
// none. The result is valid until the next call.
func (p *pass) fit(s *classShape, end Time) []pick {
	if len(s.include) > 0 || len(s.exclude) > 0 || len(s.extra) > 0 {
		return p.search(s, end)
	}
	key := needKey{part: s.part, fixed: s.fixed, unit: s.unit, maxUnits: s.maxUnits, typ: s.typ, whole: s.whole, memoryAll: s.memoryAll}
	for _, f := range p.failed[key] {
		if f.nodes <= s.nodesMin && f.units <= s.units && (s.units == 0 || f.most >= s.nodesMax) && f.end <= end {
			return nil
		}
	}
	picks := p.search(s, end)
	if picks == nil && len(p.failed[key]) < failuresKept {
		p.failed[key] = append(p.failed[key], failure{s.nodesMin, s.nodesMax, s.units, end})
	}
	return picks
}

// failuresKept bounds what is remembered of one need.
const failuresKept = 16

// needKey is what a job asks of each node. Nodes only get fuller in a pass: what failed once fails again, and so does more of it.
type needKey struct {
	part             *partition
	fixed, unit      amount
	maxUnits         uint32
	typ              int
	whole, memoryAll bool
}

// failure is a number of nodes and units that did not fit for a job that ends at a time.
type failure struct {
	nodes, most, units uint32
	end                Time
}

// search looks at the nodes.
func (p *pass) search(s *classShape, end Time) []pick {
	blocked := p.blockedFor(end)
	if s.units <= 1 {
		return p.fitEqual(s, blocked, s.units, int(s.nodesMin), int(s.nodesMax))
	}
	// Equal shares on the fewest nodes that could do need no look at every node.
	k := max(s.nodesMin, (s.units+s.largest-1)/s.largest)
	if picks := p.fitEqual(s, blocked, (s.units+k-1)/k, int(k), int(k)); picks != nil {
		return picks
	}
	return p.fitUnits(s, blocked)
}

// blockedFor returns the slots where a reservation begins before the end, or nil if there are none.
func (p *pass) blockedFor(end Time) bitset {
	var b bitset
	for i := range p.res {
		r := &p.res[i]
		if !r.meets(end) {
			continue
		}
		if b == nil {
			b = p.v.work.blocked
			clear(b)
		}
		for w, word := range r.slots {
			b[w] |= word
		}
	}
	return b
}

// candidates fills the set of slots that may have the least amount free, and returns their number; 0 if a node that must be part is not
// among them.
func (p *pass) candidates(s *classShape, least amount) (bitset, int) {
	out := p.v.work.candidates
	levels := p.st.levels[s.typ]
	cpuLevel := bits.Len32(least.cpus) - 1
	if int(least.gpus) >= len(levels) || cpuLevel >= len(p.st.cpuLevels) {
		return nil, 0
	}
	gpus := levels[least.gpus]
	for w := range out {
		out[w] = s.part.slots[w] & p.x.takes[w] & gpus[w]
	}
	if cpuLevel >= 0 {
		for w, word := range p.st.cpuLevels[cpuLevel] {
			out[w] &= word
		}
	}
	if s.whole {
		for w, word := range p.st.idle {
			out[w] &= word
		}
	}
	for _, slot := range s.exclude {
		out.clear(slot)
	}
	for _, slot := range s.include {
		if !out.has(slot) {
			return nil, 0
		}
	}
	p.work += len(out)/8 + 1
	return out, out.count()
}

// roomOf returns what a job may take on a slot now.
func (p *pass) roomOf(slot int, s *classShape, blocked bitset) room {
	p.work++
	f := room{
		cpus: int(p.st.cpus[slot]), gpus: int(p.st.gpus[s.typ][slot]), memory: p.st.memory[slot],
		idle: p.st.owners[slot] == 0, memoryWhole: p.st.used[slot] == 0,
	}
	if blocked != nil && blocked.has(slot) {
		for i := range p.res {
			p.res[i].limit(slot, &f)
		}
	}
	return f
}

// tightest calls f for each candidate, those with the fewest free GPUs first, so that nodes with many stay whole.
// Degraded nodes come after all others.
func (p *pass) tightest(s *classShape, cand bitset, least amount, f func(slot, level int) bool) {
	worse := false
	for w, word := range cand {
		worse = worse || word&p.x.degraded[w] != 0
	}
	if !worse {
		p.tightestIn(s, cand, least, f)
		return
	}
	more := true
	for _, degraded := range []bool{false, true} {
		some := newBitset(len(p.x.nodes))
		for w, word := range cand {
			if degraded {
				some[w] = word & p.x.degraded[w]
			} else {
				some[w] = word &^ p.x.degraded[w]
			}
		}
		if more {
			p.tightestIn(s, some, least, func(slot, level int) bool {
				more = f(slot, level)
				return more
			})
		}
	}
}

// tightestIn does so for some of the candidates.
func (p *pass) tightestIn(s *classShape, cand bitset, least amount, f func(slot, level int) bool) {
	levels := p.st.levels[s.typ]
	for k := int(least.gpus); k < len(levels); k++ {
		more := true
		for w, word := range cand {
			word &= levels[k][w]
			if k+1 < len(levels) {
				word &^= levels[k+1][w]
			}
			for word != 0 && more {
				more = f(w<<6+bits.TrailingZeros64(word), k)
				word &= word - 1
			}
			if !more {
				return
			}
		}
	}
}

// fitEqual finds nodes that can take this number of units each (0: the fixed amount only), at least low and as many as high.
func (p *pass) fitEqual(s *classShape, blocked bitset, units uint32, low, high int) []pick {
	least := s.share(units)
	cand, n := p.candidates(s, least)
	if n < low {
		return nil
	}
	want := max(units, 1)
	picks := p.v.work.picks[:0]
	for _, slot := range s.include {
		if p.capacity(slot, s, blocked) < want {
			return nil
		}
		picks = append(picks, pick{slot, units})
		cand.clear(slot)
	}
	if high == 1 && len(picks) == 0 {
		picks = p.fitOne(s, blocked, cand, least, units)
	} else if len(picks) < high {
		p.tightest(s, cand, least, func(slot, _ int) bool {
			if p.capacity(slot, s, blocked) >= want {
				picks = append(picks, pick{slot, units})
			}
			return len(picks) < high
		})
	}
	p.v.work.picks = picks
	if len(picks) < low {
		return nil
	}
	return picks
}

// fitOne finds the node that a job of one node leaves the least of: fewest free GPUs, then fewest free CPUs, then the first.
func (p *pass) fitOne(s *classShape, blocked, cand bitset, least amount, units uint32) []pick {
	best, level, cpus := -1, 0, int32(0)
	p.tightest(s, cand, least, func(slot, k int) bool {
		if best >= 0 && (k > level || p.x.degraded.has(slot) && !p.x.degraded.has(best)) {
			return false
		}
		if free := p.st.cpus[slot]; (best < 0 || free < cpus) && p.capacity(slot, s, blocked) >= max(units, 1) {
			best, level, cpus = slot, k, free
		}
		return best < 0 || cpus != int32(least.cpus)
	})
	if best < 0 {
		return nil
	}
	return append(p.v.work.picks[:0], pick{best, units})
}

// fitUnits finds the fewest nodes that hold all units together.
func (p *pass) fitUnits(s *classShape, blocked bitset) []pick {
	least := s.least()
	cand, n := p.candidates(s, least)
	if n < int(s.nodesMin) || uint64(n)*uint64(s.largest) < uint64(s.units) {
		return nil
	}
	picks := p.v.work.picks[:0]
	must := len(s.include)
	for _, slot := range s.include {
		c := p.capacity(slot, s, blocked)
		if c == 0 {
			return nil
		}
		picks = append(picks, pick{slot, c})
		cand.clear(slot)
	}
	p.tightest(s, cand, least, func(slot, _ int) bool {
		if c := p.capacity(slot, s, blocked); c > 0 {
			picks = append(picks, pick{slot, c})
		}
		return true
	})
	p.v.work.picks = picks
	return chooseUnits(&s.shape, picks, must, func(slot int) int32 { return p.st.cpus[slot] }, &p.v.work.counts)
}

// chooseUnits chooses of nodes, in order of preference, the first must of them and as few others as hold all units. Where equal shares
// fit it takes the preferred nodes, otherwise the roomiest. It reorders picks and returns a part of it, nil if they do not suffice.
func chooseUnits(s *shape, picks []pick, must int, freeCPUs func(slot int) int32, counts *[]int) []pick {
	k := fewest(s, picks, must, counts)
	if k == 0 {
		return nil
	}
	if k == 1 && must == 0 {
		best := -1
		for i, c := range picks {
			if c.units >= s.units && (best < 0 || freeCPUs(c.slot) < freeCPUs(picks[best].slot)) {
				best = i
			}
		}
		return picks[best : best+1]
	}
	share := (s.units + uint32(k) - 1) / uint32(k)
	chosen := must
	for i := must; i < len(picks) && chosen < k; i++ {
		if picks[i].units >= share {
			picks[chosen], picks[i] = picks[i], picks[chosen]
			chosen++
		}
	}
	if chosen == k && !slices.ContainsFunc(picks[:must], func(c pick) bool { return c.units < share }) {
		return picks[:k]
	}
	// Equal shares do not fit: the roomiest, and among equals the preferred.
	slices.SortStableFunc(picks[must:], func(a, b pick) int { return cmp.Compare(b.units, a.units) })
	return picks[:k]
}

// fewest returns the smallest number of nodes within the bounds that holds all units, 0 if there is none.
func fewest(s *shape, picks []pick, must int, counts *[]int) int {
	most, sum := uint32(0), uint64(0)
	for i, c := range picks {
		if i < must {
			sum += uint64(c.units)
		} else {
			most = max(most, c.units)
		}
	}
	if len(*counts) <= int(most) {
		*counts = make([]int, most+1)
	}
	byUnits := (*counts)[:most+1]
	clear(byUnits)
	for _, c := range picks[must:] {
		byUnits[c.units]++
	}
	k := must
	for c := int(most); c > 0; {
		if k >= int(s.nodesMin) && sum >= uint64(s.units) {
			return k
		}
		if byUnits[c] == 0 {
			c--
			continue
		}
		byUnits[c]--
		if k++; k > int(s.nodesMax) {
			return 0
		}
		sum += uint64(c)
	}
	if k >= int(s.nodesMin) && k <= int(s.nodesMax) && sum >= uint64(s.units) {
		return k
	}
	return 0
}
