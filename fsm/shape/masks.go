package shape

import (
	"math/bits"
	"slices"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// Count returns the number of devices in a mask.
func Count(mask []uint64) uint64 {
	n := 0
	for _, w := range mask {
		n += bits.OnesCount64(w)
	}
	return uint64(n)
}

// Overlap reports whether two masks have a device in common.
func Overlap(a, b []uint64) bool {
	for i := range min(len(a), len(b)) {
		if a[i]&b[i] != 0 {
			return true
		}
	}
	return false
}

// Beyond reports whether a mask has a device with a number of n or more.
func Beyond(mask []uint64, n uint32) bool {
	for i, w := range slices.Backward(mask) {
		if w != 0 {
			return uint64(64*i+bits.Len64(w)) > uint64(n)
		}
	}
	return false
}

// Union returns the devices of two masks as a new one, without trailing zero words.
func Union(a, b []uint64) []uint64 {
	sum := make([]uint64, max(len(a), len(b)))
	copy(sum, a)
	for i, w := range b {
		sum[i] |= w
	}
	return Trim(sum)
}

// Without returns the devices of a that are not in b as a new mask, without trailing zero words.
func Without(a, b []uint64) []uint64 {
	rest := slices.Clone(a)
	for i := range min(len(a), len(b)) {
		rest[i] &^= b[i]
	}
	return Trim(rest)
}

// Common returns the devices that are in both masks as a new mask, without trailing zero words.
func Common(a, b []uint64) []uint64 {
	both := make([]uint64, min(len(a), len(b)))
	for i := range both {
		both[i] = a[i] & b[i]
	}
	return Trim(both)
}

// Trim cuts trailing zero words off. It returns nil for a mask without devices.
func Trim(mask []uint64) []uint64 {
	for len(mask) > 0 && mask[len(mask)-1] == 0 {
		mask = mask[:len(mask)-1]
	}
	if len(mask) == 0 {
		return nil
	}
	return mask
}

// has reports whether a device is in a mask.
func has(mask []uint64, device uint32) bool {
	return int(device/64) < len(mask) && mask[device/64]&(1<<(device%64)) != 0
}

// lowest returns the n devices of a mask with the lowest numbers, or all if there are fewer.
func lowest(mask []uint64, n uint64) []uint64 {
	var taken []uint64
	for _, w := range mask {
		var word uint64
		for ; w != 0 && n > 0; w &= w - 1 {
			word |= w & -w
			n--
		}
		taken = append(taken, word)
	}
	return Trim(taken)
}

// GresMask returns the units of a name in a list of shares.
func GresMask(shares []*apiv1.GresShare, name string) []uint64 {
	for _, s := range shares {
		if s.Name == name {
			return s.Mask
		}
	}
	return nil
}

// GresOverlap reports whether two lists have a unit in common.
func GresOverlap(a, b []*apiv1.GresShare) bool {
	return slices.ContainsFunc(a, func(s *apiv1.GresShare) bool { return Overlap(s.Mask, GresMask(b, s.Name)) })
}

// GresUnion returns the units of both lists as a new list in the order of names, without empty shares.
func GresUnion(a, b []*apiv1.GresShare) []*apiv1.GresShare { return combine(a, b, Union) }

// GresWithout returns the units of a that are not in b as a new list in the order of names, without empty shares.
func GresWithout(a, b []*apiv1.GresShare) []*apiv1.GresShare { return combine(a, b, Without) }

func combine(a, b []*apiv1.GresShare, both func(a, b []uint64) []uint64) []*apiv1.GresShare {
	if len(a) == 0 && len(b) == 0 {
		return nil
	}
	var names []string
	for _, s := range slices.Concat(a, b) {
		names = append(names, s.Name)
	}
	slices.Sort(names)
	var result []*apiv1.GresShare
	for _, name := range slices.Compact(names) {
		if mask := both(GresMask(a, name), GresMask(b, name)); mask != nil {
			result = append(result, &apiv1.GresShare{Name: name, Mask: mask})
		}
	}
	return result
}

// GresEqual reports whether two lists in the order of names say the same.
func GresEqual(a, b []*apiv1.GresShare) bool {
	return slices.EqualFunc(a, b, func(x, y *apiv1.GresShare) bool {
		return x.Name == y.Name && slices.Equal(Trim(x.Mask), Trim(y.Mask))
	})
}

// GresUnits returns the units that a node has of a name, of any type or of one. The numbers of an entry's units follow those of entries
// of the same name before it.
func GresUnits(spec *apiv1.NodeSpec, name, kind string) []uint64 {
	var mask []uint64
	first := uint64(0)
	for _, g := range spec.GetGres() {
		if g.Name != name {
			continue
		}
		if kind == "" || g.Type == kind {
			mask = Union(mask, span(first, uint64(g.Count)))
		}
		first += uint64(g.Count)
	}
	return mask
}

// span returns the mask of n devices from the first on.
func span(first, n uint64) []uint64 {
	mask := make([]uint64, (first+n+63)/64)
	for d := first; d < first+n; d++ {
		mask[d/64] |= 1 << (d % 64)
	}
	return Trim(mask)
}

// GPUsOfType returns the accelerators of a node that have a type; an empty one means any.
func GPUsOfType(spec *apiv1.NodeSpec, kind string) []uint64 {
	if kind == "" {
		return span(0, uint64(len(spec.GetGpus())))
	}
	var mask []uint64
	for i, g := range spec.GetGpus() {
		if g.Type == kind {
			mask = Union(mask, span(uint64(i), 1))
		}
	}
	return mask
}
