package notation

import (
	"fmt"
	"math/bits"
	"strconv"
	"strings"
)

// FoldCounts writes one number for each node, run-length coded as in SLURM_TASKS_PER_NODE: 2 2 1 gives "2(x2),1".
func FoldCounts(counts []uint32) string {
	var b strings.Builder
	for i := 0; i < len(counts); {
		end := i + 1
		for end < len(counts) && counts[end] == counts[i] {
			end++
		}
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(strconv.FormatUint(uint64(counts[i]), 10))
		if end > i+1 {
			fmt.Fprintf(&b, "(x%d)", end-i)
		}
		i = end
	}
	return b.String()
}

// ExpandCounts is the inverse of FoldCounts. It refuses more than MaxNames numbers.
func ExpandCounts(s string) ([]uint32, error) {
	var counts []uint32
	if s == "" {
		return nil, nil
	}
	for part := range strings.SplitSeq(s, ",") {
		value, times := part, uint64(1)
		if v, rest, ok := strings.Cut(part, "(x"); ok {
			digits, closed := strings.CutSuffix(rest, ")")
			n, err := strconv.ParseUint(digits, 10, 32)
			if err != nil || !closed || n == 0 {
				return nil, fmt.Errorf("invalid counts %q: %q is not of the form N(xTIMES)", s, part)
			}
			value, times = v, n
		}
		n, err := strconv.ParseUint(value, 10, 32)
		if err != nil {
			return nil, fmt.Errorf("invalid counts %q: %q is not a number", s, value)
		}
		if uint64(len(counts))+times > MaxNames {
			return nil, fmt.Errorf("invalid counts %q: more than %d numbers", s, MaxNames)
		}
		for range times {
			counts = append(counts, uint32(n))
		}
	}
	return counts, nil
}

// FoldIndexes writes ascending indexes as "0-7,16".
func FoldIndexes(indexes []int) string {
	var b strings.Builder
	for i := 0; i < len(indexes); {
		end := i + 1
		for end < len(indexes) && indexes[end] == indexes[end-1]+1 {
			end++
		}
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(strconv.Itoa(indexes[i]))
		if end > i+1 {
			b.WriteByte('-')
			b.WriteString(strconv.Itoa(indexes[end-1]))
		}
		i = end
	}
	return b.String()
}

// MaxIndexes bounds the indexes of a list that ExpandIndexes reads: the tasks of the largest step.
const MaxIndexes = 1 << 20

// ExpandIndexes is the inverse of FoldIndexes. It refuses more than MaxIndexes indexes, and indexes that do not ascend.
func ExpandIndexes(s string) ([]int, error) {
	var indexes []int
	if s == "" {
		return nil, nil
	}
	for part := range strings.SplitSeq(s, ",") {
		low, high, ranged := strings.Cut(part, "-")
		first, err := strconv.ParseUint(low, 10, 31)
		last := first
		if err == nil && ranged {
			last, err = strconv.ParseUint(high, 10, 31)
		}
		switch n := len(indexes); {
		case err != nil || last < first || n > 0 && int(first) <= indexes[n-1]:
			return nil, fmt.Errorf("invalid list of indexes %q: %q is not a number or range above those before", s, part)
		case uint64(n)+last-first >= MaxIndexes:
			return nil, fmt.Errorf("invalid list of indexes %q: more than %d numbers", s, MaxIndexes)
		}
		for i := first; i <= last; i++ {
			indexes = append(indexes, int(i))
		}
	}
	return indexes, nil
}

// Mask is a set of devices: bit i of word w is device 64w+i.
type Mask []uint64

// MaskOf returns the mask of the given devices; trailing zero words are never there.
func MaskOf(devices ...int) Mask {
	var m Mask
	for _, d := range devices {
		for d/64 >= len(m) {
			m = append(m, 0)
		}
		m[d/64] |= 1 << (d % 64)
	}
	return m
}

// MaskUpTo returns the mask of devices 0 to n-1.
func MaskUpTo(n int) Mask {
	m := make(Mask, (n+63)/64)
	for i := range m {
		m[i] = ^uint64(0)
	}
	if n%64 != 0 {
		m[len(m)-1] = 1<<(n%64) - 1
	}
	return m
}

// Count returns the number of devices in the mask.
func (m Mask) Count() int {
	n := 0
	for _, w := range m {
		n += bits.OnesCount64(w)
	}
	return n
}

// Devices returns the devices in the mask, ascending.
func (m Mask) Devices() []int {
	var devices []int
	for i, w := range m {
		for ; w != 0; w &= w - 1 {
			devices = append(devices, 64*i+bits.TrailingZeros64(w))
		}
	}
	return devices
}

// Has reports whether the device is in the mask.
func (m Mask) Has(device int) bool {
	return device >= 0 && device/64 < len(m) && m[device/64]&(1<<(device%64)) != 0
}

// String writes the mask as an index list, "0-7,16".
func (m Mask) String() string { return FoldIndexes(m.Devices()) }
