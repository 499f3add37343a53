package wiring

import (
	"fmt"
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"
)

// machine returns a topology of n devices on a board each, with the given NUMA nodes and connections of pairs.
func machine(n int, numa func(i int) int, pair func(i, j int) (links, path int)) Topology {
	t := make(Topology, n)
	for i := range t {
		t[i] = Device{NUMA: numa(i), Board: i, Links: make([]int, n), Paths: make([]int, n)}
		for j := range n {
			if i != j {
				t[i].Links[j], t[i].Paths[j] = pair(min(i, j), max(i, j))
			}
		}
	}
	return t
}

func halves(n int) func(int) int { return func(i int) int { return i / (n / 2) } }

// nvswitch is a machine like a DGX H100: every pair has 18 links, two NUMA nodes.
func nvswitch() Topology {
	return machine(8, halves(8), func(i, j int) (int, int) {
		if i/4 == j/4 {
			return 18, PathNUMANode
		}
		return 18, PathSystem
	})
}

// cubeMesh is a machine like a DGX-1: each GPU has links to four others, two of them double.
func cubeMesh() Topology {
	links := map[[2]int]int{
		{0, 1}: 1, {0, 2}: 1, {0, 3}: 2, {0, 4}: 2, {1, 2}: 2, {1, 3}: 1, {1, 5}: 2, {2, 3}: 2, {2, 6}: 1, {3, 7}: 1,
		{4, 5}: 1, {4, 6}: 1, {4, 7}: 2, {5, 6}: 2, {5, 7}: 1, {6, 7}: 2,
	}
	return machine(8, halves(8), func(i, j int) (int, int) {
		if i/4 == j/4 {
			return links[[2]int{i, j}], PathHostBridge
		}
		return links[[2]int{i, j}], PathSystem
	})
}

// pcie is a machine without NVLink: two devices on a switch, four on a NUMA node.
func pcie() Topology {
	return machine(8, halves(8), func(i, j int) (int, int) {
		switch {
		case i/2 == j/2:
			return 0, PathSwitch
		case i/4 == j/4:
			return 0, PathHostBridge
		default:
			return 0, PathSystem
		}
	})
}

func mask(devices ...int) uint64 {
	m := uint64(0)
	for _, d := range devices {
		m |= 1 << d
	}
	return m
}

func TestDevicesThatBelongTogetherAreChosen(t *testing.T) {
	all := mask(0, 1, 2, 3, 4, 5, 6, 7)
	for _, c := range []struct {
		what string
		t    Topology
		free uint64
		n    int
		want uint64
	}{
		{"a NUMA node of an NVSwitch machine", nvswitch(), all, 4, mask(0, 1, 2, 3)},
		{"the NUMA node that is whole", nvswitch(), all &^ mask(1), 4, mask(4, 5, 6, 7)},
		{"one device from the broken half", nvswitch(), mask(0, 4, 5, 6, 7), 1, mask(0)},
		{"two devices from the broken half", nvswitch(), mask(0, 1, 4, 5, 6), 2, mask(0, 1)},
		{"a pair with two links", cubeMesh(), all, 2, mask(0, 3)},
		{"a fully connected four", cubeMesh(), all, 4, mask(0, 1, 2, 3)},
		{"links before NUMA nodes", cubeMesh(), mask(0, 1, 4), 2, mask(0, 4)},
		{"two on one PCI switch", pcie(), mask(0, 2, 3, 5), 2, mask(2, 3)},
		{"four on one NUMA node", pcie(), all &^ mask(0), 4, mask(4, 5, 6, 7)},
		{"one from the broken switch", pcie(), mask(0, 1, 2), 1, mask(2)},
		{"all", pcie(), all, 8, all},
		{"none", pcie(), all, 0, 0},
	} {
		got, ok := Choose(c.t, []uint64{c.free}, c.n)
		if !ok || got[0] != c.want {
			t.Errorf("%s: %d of %08b gives %08b, %v; want %08b", c.what, c.n, c.free, got, ok, c.want)
		}
	}
}

func TestMIGInstancesOfOneGPUAreChosenTogether(t *testing.T) {
	topology := Topology{{NUMA: 0, Board: 0}, {NUMA: 0, Board: 1}, {NUMA: 0, Board: 0}, {NUMA: 0, Board: 1}, {NUMA: 0, Board: 1}}
	if got, _ := Choose(topology, []uint64{mask(0, 1, 2, 3, 4)}, 2); got[0] != mask(0, 2) {
		t.Errorf("two of five instances are %05b; want the two of the GPU that has only two", got[0])
	}
}

func TestMoreThanIsFreeIsRefused(t *testing.T) {
	for _, n := range []int{-1, 3} {
		if got, ok := Choose(pcie(), []uint64{mask(1, 2)}, n); ok {
			t.Errorf("%d of 2 gives %b", n, got)
		}
	}
	if got, ok := Choose(pcie(), []uint64{mask(1, 63), 1}, 2); ok {
		t.Errorf("devices that do not exist are given out: %b", got)
	}
}

func random(r *rand.Rand, n int) Topology {
	numa := make([]int, n)
	for i := range numa {
		numa[i] = r.IntN(3) - 1
	}
	linked := r.IntN(4)
	return machine(n, func(i int) int { return numa[i] }, func(i, j int) (int, int) {
		return max(0, r.IntN(4)-linked), r.IntN(PathSystem + 1)
	})
}

// symmetric makes what random drew for (i, j) and (j, i) equal.
func symmetric(t Topology) Topology {
	for i := range t {
		for j := range i {
			t[i].Links[j], t[i].Paths[j] = t[j].Links[i], t[j].Paths[i]
		}
	}
	return t
}

// twin looks at every subset of the free devices, by the definition.
func twin(t Topology, free uint64, n int) (uint64, bool) {
	list := func(m uint64) (l []int) {
		for ; m != 0; m &= m - 1 {
			l = append(l, bits.TrailingZeros64(m))
		}
		return l
	}
	best, found := uint64(0), false
	for m := uint64(0); m < 1<<len(t); m++ {
		if m&^free != 0 || bits.OnesCount64(m) != n {
			continue
		}
		c := t.ScoreOf(list(m), list(free)).Compare(t.ScoreOf(list(best), list(free)))
		if !found || c < 0 || c == 0 && slices.Compare(list(m), list(best)) < 0 {
			best, found = m, true
		}
	}
	return best, found
}

func TestTheChoiceIsTheBestOfAll(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 1))
		topology := symmetric(random(r, 1+r.IntN(8)))
		free := r.Uint64() & (1<<len(topology) - 1)
		n := r.IntN(len(topology) + 1)
		got, ok := Choose(topology, []uint64{free}, n)
		want, possible := twin(topology, free, n)
		if ok != possible || ok && got[0] != want {
			t.Fatalf("seed %d: %d of %08b gives %08b, %v; the best is %08b, %v\n%v", seed, n, free, got, ok, want, possible, topology)
		}
	}
}

func TestALargeChoiceIsValidAndCloseToTheBest(t *testing.T) {
	for seed := range uint64(10) {
		r := rand.New(rand.NewPCG(seed, 2))
		topology := symmetric(random(r, 12))
		free := make([]int, 12)
		for i := range free {
			free[i] = i
		}
		grown := topology.grow(free, 6)
		if len(grown) != 6 || !slices.IsSorted(grown) || len(slices.Compact(slices.Clone(grown))) != 6 {
			t.Fatalf("seed %d: grown to %v", seed, grown)
		}
		best := topology.choose(free, 6)
		if g, b := topology.hopsOf(grown), topology.hopsOf(best); g*100 > b*115 {
			t.Errorf("seed %d: grown set has %d hops, the best %d", seed, g, b)
		}
	}
}

func TestManyDevicesAreChosenWithinBounds(t *testing.T) {
	topology := make(Topology, 1024)
	for i := range topology {
		topology[i] = Device{NUMA: i / 512, Board: i / 8}
	}
	free := make([]uint64, 16)
	for w := range free {
		free[w] = ^uint64(0)
	}
	got, ok := Choose(topology, free, 16)
	set, boards := 0, map[int]bool{}
	for w, word := range got {
		set += bits.OnesCount64(word)
		for ; word != 0; word &= word - 1 {
			boards[(64*w+bits.TrailingZeros64(word))/8] = true
		}
	}
	if !ok || set != 16 || len(boards) != 2 {
		t.Errorf("16 of 1,024 devices are %d on %d boards; want two whole boards", set, len(boards))
	}
}

func BenchmarkChoose(b *testing.B) {
	for _, n := range []int{1, 4} {
		b.Run(fmt.Sprintf("%d of 8", n), func(b *testing.B) {
			topology, free := nvswitch(), []uint64{0xff}
			for b.Loop() {
				Choose(topology, free, n)
			}
		})
	}
	b.Run("8 of 16", func(b *testing.B) {
		topology := symmetric(random(rand.New(rand.NewPCG(1, 1)), 16))
		for b.Loop() {
			Choose(topology, []uint64{0xffff}, 8)
		}
	})
}
