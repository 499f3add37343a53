package sched

import "math/bits"

// Mask is a set of devices of a node: bit i of word w is device 64w+i. Trailing zero words do not matter.
type Mask []uint64

// Count returns the number of devices in it.
func (m Mask) Count() int {
	n := 0
	for _, w := range m {
		n += bits.OnesCount64(w)
	}
	return n
}

// Has tells whether device i is in it.
func (m Mask) Has(i int) bool { return i>>6 < len(m) && m[i>>6]&(1<<(i&63)) != 0 }

// Equal compares two sets of devices.
func (m Mask) Equal(o Mask) bool {
	for i := range max(len(m), len(o)) {
		if m.word(i) != o.word(i) {
			return false
		}
	}
	return true
}

// Overlaps tells whether the two share a device.
func (m Mask) Overlaps(o Mask) bool {
	for i := range min(len(m), len(o)) {
		if m[i]&o[i] != 0 {
			return true
		}
	}
	return false
}

func (m Mask) word(i int) uint64 {
	if i < len(m) {
		return m[i]
	}
	return 0
}

func (m Mask) trimmed() Mask {
	for len(m) > 0 && m[len(m)-1] == 0 {
		m = m[:len(m)-1]
	}
	return m
}

// with returns a new mask: the union of both.
func (m Mask) with(o Mask) Mask {
	u := make(Mask, max(len(m), len(o)))
	for i := range u {
		u[i] = m.word(i) | o.word(i)
	}
	return u
}

// countIn returns the number of devices that both have.
func (m Mask) countIn(o Mask) int {
	n := 0
	for i := range min(len(m), len(o)) {
		n += bits.OnesCount64(m[i] & o[i])
	}
	return n
}

// without returns a new mask: the devices that are not in o.
func (m Mask) without(o Mask) Mask {
	u := make(Mask, len(m))
	for i := range u {
		u[i] = m[i] &^ o.word(i)
	}
	return u
}

// inBoth returns a new mask: the devices of both.
func (m Mask) inBoth(o Mask) Mask {
	u := make(Mask, len(m))
	for i := range u {
		u[i] = m[i] & o.word(i)
	}
	return u
}

// upTo returns the mask of devices 0 to n-1.
func upTo(n int) Mask {
	m := make(Mask, (n+63)/64)
	for i := range m {
		m[i] = ^uint64(0)
	}
	if n&63 != 0 {
		m[len(m)-1] = 1<<(n&63) - 1
	}
	return m
}

// lowest returns the n lowest devices of all that are not in used. The caller knows that there are so many.
func lowest(n int, all, used Mask) Mask {
	m := make(Mask, len(all))
	for i := range all {
		free := all[i] &^ used.word(i)
		for n > 0 && free != 0 {
			m[i] |= free & -free
			free &= free - 1
			n--
		}
	}
	return m
}

// bitset is a set of node slots.
type bitset []uint64

func newBitset(n int) bitset { return make(bitset, (n+63)/64) }

func (b bitset) set(i int)      { b[i>>6] |= 1 << (i & 63) }
func (b bitset) clear(i int)    { b[i>>6] &^= 1 << (i & 63) }
func (b bitset) has(i int) bool { return b[i>>6]&(1<<(i&63)) != 0 }
func (b bitset) put(i int, set bool) {
	if set {
		b.set(i)
	} else {
		b.clear(i)
	}
}

func (b bitset) count() int {
	n := 0
	for _, w := range b {
		n += bits.OnesCount64(w)
	}
	return n
}
