package wiring

import (
	"cmp"
	"math/bits"
)

// Unknown is the number of a NUMA node or board that is not known.
const Unknown = -1

// Distances over PCI, near to far, as in Device.Paths. They equal the numbers of the probe's GpuPath.
const (
	PathUnknown = iota
	PathBoard
	PathSwitch
	PathSwitches
	PathHostBridge
	PathNUMANode
	PathSystem
)

const (
	// maxSets is how many sets of devices Choose looks at before it settles for a good one: 16 free devices never reach it.
	maxSets = 20_000
	// maxSeeds is from how many devices a good set is grown.
	maxSeeds = 32
	// maxSwaps bounds how often a good set is improved by exchanging one device.
	maxSwaps = 64
)

// Device is one device that can be allocated. In a Topology it stands at its number.
type Device struct {
	// NUMA is the NUMA node of its slot, or Unknown.
	NUMA int
	// Board is equal for MIG instances of one GPU and different for whole GPUs, or Unknown.
	Board int
	// Links has the NVLinks to each other device by number; missing entries are 0.
	Links []int
	// Paths has the distance over PCI to each other device by number; missing entries are PathUnknown.
	Paths []int
}

// Topology is a node's devices by number. Numbers that no device has may hold anything: they are never in a free mask.
type Topology []Device

// Hops is the distance between two devices: 1 over NVLink or on one GPU, otherwise 1 more than the distance over PCI. If that
// is not known, it is taken as the longest that the NUMA nodes allow.
func (t Topology) Hops(i, j int) int {
	a, b := t[i], t[j]
	switch {
	case t.links(i, j) > 0, a.Board != Unknown && a.Board == b.Board:
		return 1
	case j < len(a.Paths) && a.Paths[j] != PathUnknown:
		return 1 + a.Paths[j]
	case a.NUMA != Unknown && a.NUMA == b.NUMA:
		return 1 + PathNUMANode
	default:
		return 1 + PathSystem
	}
}

func (t Topology) links(i, j int) int {
	if j < len(t[i].Links) {
		return t[i].Links[j]
	}
	return 0
}

// Score says how good a set of devices is. Of two sets the one with the smaller score is better, field by field in this
// order.
type Score struct {
	// Hops is the sum over all pairs of the set.
	Hops int
	// Links is minus the sum of NVLinks over all pairs.
	Links int
	// NUMANodes is how many NUMA nodes the set touches; devices whose node is not known count as one of their own.
	NUMANodes int
	// Ties is how closely the set is connected with the free devices that stay behind: taking a device from an already
	// broken group is better than breaking another.
	Ties int
}

// Compare is negative if s is better than o.
func (s Score) Compare(o Score) int {
	return cmp.Or(cmp.Compare(s.Hops, o.Hops), cmp.Compare(s.Links, o.Links), cmp.Compare(s.NUMANodes, o.NUMANodes),
		cmp.Compare(s.Ties, o.Ties))
}

// ScoreOf returns the score of a set among the free devices; both are ascending lists of numbers.
func (t Topology) ScoreOf(set, free []int) Score {
	var s Score
	inSet := make([]bool, len(t))
	for k, i := range set {
		inSet[i] = true
		for _, j := range set[:k] {
			s.Hops += t.Hops(i, j)
			s.Links -= t.links(i, j)
		}
		alone := true
		for _, j := range set[:k] {
			alone = alone && !t.sameNUMA(i, j)
		}
		if alone {
			s.NUMANodes++
		}
	}
	for _, j := range free {
		if inSet[j] {
			continue
		}
		for _, i := range set {
			s.Ties += 2 * (PathSystem + 2 - t.Hops(i, j))
			if t.sameNUMA(i, j) {
				s.Ties++
			}
		}
	}
	return s
}

func (t Topology) sameNUMA(i, j int) bool {
	return t[i].NUMA != Unknown && t[i].NUMA == t[j].NUMA
}

// Choose returns n of the free devices as a mask (bit i of word w is device 64w+i) of as many words as free has: those
// with the best Score, and of equally good ones those with the lowest numbers. It reports false if fewer than n devices are free or n is
// negative. Bits beyond the topology count as not free.
func Choose(t Topology, free []uint64, n int) ([]uint64, bool) {
	devices := make([]int, 0, 64)
	for w, word := range free {
		for ; word != 0; word &= word - 1 {
			if d := 64*w + bits.TrailingZeros64(word); d < len(t) {
				devices = append(devices, d)
			}
		}
	}
	if n < 0 || n > len(devices) {
		return nil, false
	}
	mask := make([]uint64, len(free))
	for _, d := range t.choose(devices, n) {
		mask[d/64] |= 1 << (d % 64)
	}
	return mask, true
}

func (t Topology) choose(free []int, n int) []int {
	switch {
	case n == len(free), n == 0:
		return free[:n]
	case setsOf(len(free), n) <= maxSets:
		s := search{t: t, free: free, set: make([]int, 0, n)}
		s.look(0, n, 0, 0)
		return s.best
	default:
		return t.grow(free, n)
	}
}

// setsOf is the number of sets of n out of f, or more than maxSets if there are more than that.
func setsOf(f, n int) int {
	n = min(n, f-n)
	sets := 1
	for k := 1; k <= n; k++ {
		sets = sets * (f - n + k) / k
		if sets > maxSets {
			return sets
		}
	}
	return sets
}

// search looks at every set in the order of numbers, leaving out what cannot win any more.
type search struct {
	t     Topology
	free  []int
	set   []int
	best  []int
	score Score
}

func (s *search) look(from, need, hops, links int) {
	if s.best != nil && hops > s.score.Hops {
		return
	}
	if need == 0 {
		if s.best != nil && hops == s.score.Hops && links > s.score.Links {
			return
		}
		if score := s.t.ScoreOf(s.set, s.free); s.best == nil || score.Compare(s.score) < 0 {
			s.best, s.score = append(s.best[:0], s.set...), score
		}
		return
	}
	for k := from; k <= len(s.free)-need; k++ {
		d := s.free[k]
		h, l := hops, links
		for _, other := range s.set {
			h += s.t.Hops(d, other)
			l -= s.t.links(d, other)
		}
		s.set = append(s.set, d)
		s.look(k+1, need-1, h, l)
		s.set = s.set[:len(s.set)-1]
	}
}
