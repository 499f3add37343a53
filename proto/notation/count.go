package notation

import (
	"fmt"
	"strings"
)

// Count returns how many names Expand would return, without making them. Errors are those of Expand.
func Count(list string) (int, error) {
	total := 0
	for rest := list; rest != ""; {
		item, tail, err := cutItem(list, rest)
		if err != nil {
			return 0, err
		}
		rest = tail
		if item = strings.TrimSpace(item); item == "" {
			continue
		}
		n, err := countItem(list, item)
		if err != nil {
			return 0, err
		}
		if total += n; total > MaxNames {
			return 0, &SyntaxError{List: list, Why: fmt.Sprintf("more than %d names", MaxNames)}
		}
	}
	return total, nil
}

// countItem counts the names of one item such as "a[1-2]b[3,5]".
func countItem(list, item string) (int, error) {
	names := 1
	for rest := item; rest != ""; {
		open := strings.IndexByte(rest, '[')
		if open < 0 {
			if rest != item {
				return 0, &SyntaxError{List: list, Why: "text after a bracket", Range: rest}
			}
			return 1, nil
		}
		end := strings.IndexByte(rest, ']')
		numbers := 0
		for part := range strings.SplitSeq(rest[open+1:end], ",") {
			n, err := countRange(list, strings.TrimSpace(part))
			if err != nil {
				return 0, err
			}
			if numbers += n; names*numbers > MaxNames {
				return 0, &SyntaxError{List: list, Range: part, Why: fmt.Sprintf("more than %d names", MaxNames)}
			}
		}
		names, rest = names*numbers, rest[end+1:]
	}
	return names, nil
}

// countRange counts the numbers of a part of a bracket: "7" or "001-003".
func countRange(list, part string) (int, error) {
	low, high, isRange := strings.Cut(part, "-")
	if !isRange {
		high = low
	}
	first, ok1 := number(low)
	last, ok2 := number(high)
	switch {
	case !ok1 || !ok2:
		return 0, &SyntaxError{List: list, Range: part, Why: "not a number or a range"}
	case last < first:
		return 0, &SyntaxError{List: list, Range: part, Why: "a range that runs backwards"}
	case last-first >= MaxNames:
		return 0, &SyntaxError{List: list, Range: part, Why: fmt.Sprintf("more than %d names", MaxNames)}
	}
	return int(last-first) + 1, nil
}
