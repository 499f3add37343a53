package notation

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// MaxNames bounds what one host list may name; see docs/limits.md.
const MaxNames = 1 << 20

// SyntaxError says what is wrong with a host list.
type SyntaxError struct {
	// List is the whole text.
	List string
	// Range is the offending part of a bracket, if the fault lies there.
	Range string
	// Why is a short phrase.
	Why string
}

// Error returns one line that names the list and the fault.
func (e *SyntaxError) Error() string {
	if e.Range != "" {
		return fmt.Sprintf("invalid host list %q: %s: %q", e.List, e.Why, e.Range)
	}
	return fmt.Sprintf("invalid host list %q: %s", e.List, e.Why)
}

// Expand returns the names of a host list, in the order of writing and with repetitions: "n[1-2,7],m3" gives n1 n2 n7
// m3. Several brackets multiply ("a[1-2]b[3-4]"). As in Slurm nothing but another bracket part may follow a bracket up to the
// next comma. An empty list gives no names. Errors are *SyntaxError.
func Expand(list string) ([]string, error) {
	var names []string
	for rest := list; rest != ""; {
		item, tail, err := cutItem(list, rest)
		if err != nil {
			return nil, err
		}
		rest = tail
		item = strings.TrimSpace(item)
		if item == "" {
			continue
		}
		if names, err = expandItem(names, list, item); err != nil {
			return nil, err
		}
	}
	return names, nil
}

// cutItem cuts the first comma-separated item off, ignoring commas in brackets.
func cutItem(list, rest string) (item, tail string, err error) {
	depth := 0
	for i, r := range rest {
		switch r {
		case '[':
			depth++
			if depth > 1 {
				return "", "", &SyntaxError{List: list, Why: "a bracket within a bracket"}
			}
		case ']':
			depth--
			if depth < 0 {
				return "", "", &SyntaxError{List: list, Why: "a closing bracket without an opening one"}
			}
		case ',':
			if depth == 0 {
				return rest[:i], rest[i+1:], nil
			}
		}
	}
	if depth != 0 {
		return "", "", &SyntaxError{List: list, Why: "a bracket is not closed"}
	}
	return rest, "", nil
}

// expandItem appends the names of one item such as "a[1-2]b[3,5]".
func expandItem(names []string, list, item string) ([]string, error) {
	prefixes := []string{""}
	for rest := item; rest != ""; {
		open := strings.IndexByte(rest, '[')
		if open < 0 {
			if len(prefixes) > 1 || rest != item {
				return nil, &SyntaxError{List: list, Why: "text after a bracket", Range: rest}
			}
			prefixes[0] += rest
			break
		}
		end := strings.IndexByte(rest, ']')
		var grown []string
		for _, prefix := range prefixes {
			for part := range strings.SplitSeq(rest[open+1:end], ",") {
				var err error
				if grown, err = expandRange(grown, list, prefix+rest[:open], strings.TrimSpace(part)); err != nil {
					return nil, err
				}
			}
		}
		prefixes, rest = grown, rest[end+1:]
	}
	if len(names)+len(prefixes) > MaxNames {
		return nil, &SyntaxError{List: list, Why: fmt.Sprintf("more than %d names", MaxNames)}
	}
	return append(names, prefixes...), nil
}

// expandRange appends prefix+number for a part of a bracket: "7" or "001-003".
func expandRange(names []string, list, prefix, part string) ([]string, error) {
	low, high, isRange := strings.Cut(part, "-")
	if !isRange {
		high = low
	}
	first, ok1 := number(low)
	last, ok2 := number(high)
	switch {
	case !ok1 || !ok2:
		return nil, &SyntaxError{List: list, Range: part, Why: "not a number or a range"}
	case last < first:
		return nil, &SyntaxError{List: list, Range: part, Why: "a range that runs backwards"}
	case last-first >= MaxNames || len(names)+int(last-first) >= MaxNames:
		return nil, &SyntaxError{List: list, Range: part, Why: fmt.Sprintf("more than %d names", MaxNames)}
	}
	for n := first; n <= last; n++ {
		names = append(names, fmt.Sprintf("%s%0*d", prefix, len(low), n))
	}
	return names, nil
}

// number reads up to 18 decimal digits and nothing else.
func number(s string) (uint64, bool) {
	if s == "" || len(s) > 18 {
		return 0, false
	}
	for i := range len(s) {
		if s[i] < '0' || s[i] > '9' {
			return 0, false
		}
	}
	n, err := strconv.ParseUint(s, 10, 64)
	return n, err == nil
}

// host is a name split at its trailing number.
type host struct {
	prefix, digits string
	n              uint64
}

func split(name string) host {
	i := len(name)
	for i > 0 && name[i-1] >= '0' && name[i-1] <= '9' && len(name)-i < 18 {
		i--
	}
	h := host{prefix: name[:i], digits: name[i:]}
	h.n, _ = number(h.digits)
	return h
}

// Fold writes names as a host list, in their order: n9 n10 n11 gives "n[9-11]"; n03 n01 n02 gives "n[03,01-02]". Only
// neighbours are folded, so that Expand gives the same names in the same order.
func Fold(names []string) string {
	var b strings.Builder
	for i := 0; i < len(names); {
		first := split(names[i])
		end := i + 1
		if first.digits != "" {
			for end < len(names) {
				if h := split(names[end]); h.prefix != first.prefix || h.digits == "" {
					break
				}
				end++
			}
		}
		if i > 0 {
			b.WriteByte(',')
		}
		if end == i+1 {
			b.WriteString(names[i])
		} else {
			b.WriteString(first.prefix)
			b.WriteByte('[')
			foldNumbers(&b, names[i:end])
			b.WriteByte(']')
		}
		i = end
	}
	return b.String()
}

// foldNumbers writes the numbers of names that share a prefix.
func foldNumbers(b *strings.Builder, names []string) {
	for i := 0; i < len(names); {
		first := split(names[i])
		last, end := first, i+1
		for end < len(names) {
			next := split(names[end])
			// Within one range every number has at least the width of the first one.
			if next.n != last.n+1 || next.digits != fmt.Sprintf("%0*d", len(first.digits), next.n) {
				break
			}
			last, end = next, end+1
		}
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(first.digits)
		if end > i+1 {
			b.WriteByte('-')
			b.WriteString(last.digits)
		}
		i = end
	}
}

// Compare orders names naturally: by prefix, then by the width of the trailing number, then by its value, so that n9 comes before n10
// and n3 before n01.
func Compare(a, b string) int {
	x, y := split(a), split(b)
	return cmp.Or(cmp.Compare(x.prefix, y.prefix), cmp.Compare(len(x.digits), len(y.digits)), cmp.Compare(x.n, y.n))
}

// Sort sorts names naturally, in place.
func Sort(names []string) { slices.SortStableFunc(names, Compare) }
