package wiring

import (
	"cmp"
	"slices"
)

// grow returns a good set where there are too many to look at all: it grows one from each of some devices, always by the nearest
// device, keeps the best and improves it by exchanging single devices.
func (t Topology) grow(free []int, n int) []int {
	var best []int
	var score Score
	step := max(1, len(free)/maxSeeds)
	for k := 0; k < len(free); k += step {
		set := t.growFrom(free[k], free, n)
		if s := t.ScoreOf(set, free); best == nil || s.Compare(score) < 0 {
			best, score = set, s
		}
	}
	if len(free) > 2*maxSwaps {
		return best
	}
	for range maxSwaps {
		better, s := t.exchange(best, free, score)
		if better == nil {
			break
		}
		best, score = better, s
	}
	return best
}

// growFrom adds to a device the one that is nearest to all chosen so far, until there are n.
func (t Topology) growFrom(seed int, free []int, n int) []int {
	type distance struct{ hops, links, device int }
	left := make([]distance, 0, len(free))
	for _, d := range free {
		if d != seed {
			left = append(left, distance{device: d})
		}
	}
	set := append(make([]int, 0, n), seed)
	for len(set) < n {
		last := set[len(set)-1]
		nearest := 0
		for k := range left {
			left[k].hops += t.Hops(last, left[k].device)
			left[k].links -= t.links(last, left[k].device)
			if cmp.Or(cmp.Compare(left[k].hops, left[nearest].hops), cmp.Compare(left[k].links, left[nearest].links)) < 0 {
				nearest = k
			}
		}
		set = append(set, left[nearest].device)
		left = slices.Delete(left, nearest, nearest+1)
	}
	slices.Sort(set)
	return set
}

// exchange returns the best set that differs in one device, or nil if none is better.
func (t Topology) exchange(set, free []int, score Score) ([]int, Score) {
	var best []int
	for k := range set {
		for _, d := range free {
			if slices.Contains(set, d) {
				continue
			}
			other := slices.Clone(set)
			other[k] = d
			slices.Sort(other)
			if h := t.hopsOf(other); h > score.Hops {
				continue
			}
			if s := t.ScoreOf(other, free); s.Compare(score) < 0 {
				best, score = other, s
			}
		}
	}
	return best, score
}

func (t Topology) hopsOf(set []int) int {
	hops := 0
	for k, i := range set {
		for _, j := range set[:k] {
			hops += t.Hops(i, j)
		}
	}
	return hops
}
