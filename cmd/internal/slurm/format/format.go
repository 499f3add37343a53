// Package format lays out rows by the format strings of Slurm's commands: "%.18i %j" (-o), "JobID:.18,Name:10" (-O) and
// "JobID,State%20" (sacct).
//
// Invariants: a field never runs into the next: what is wider than its field is cut; unknown letters print nothing;
// text between fields is kept as it is; control characters in values are
// escaped. Widths count characters, and no character is ever cut in two.
//
// It is called by squeue, sinfo and sacct. It knows nothing of jobs and nodes.
package format

import (
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/muster-hpc/muster/cmd/internal/slurm/value"
)

// Field is a column that can be shown.
type Field[T any] struct {
	// Header is printed in the first line.
	Header string
	// Value is the text of a row.
	Value func(T) string
	// Full tells that the value needs what brief listings leave out.
	Full bool
}

// Column is a field in a layout.
type Column[T any] struct {
	// Field is what is shown; its Value is nil for text alone.
	Field Field[T]
	// Width is the number of characters; 0 means as many as needed.
	Width int
	// Right aligns to the right.
	Right bool
	// Grow makes the column as wide as its longest value, at least Width.
	Grow bool
	// Suffix is printed after the field.
	Suffix string
}

// Layout is a parsed format.
type Layout[T any] struct {
	// Prefix is printed before the first column.
	Prefix string
	// Columns in order.
	Columns []Column[T]
}

// NeedsFull tells whether any column needs what brief listings leave out.
func (l *Layout[T]) NeedsFull() bool {
	for _, c := range l.Columns {
		if c.Field.Full {
			return true
		}
	}
	return false
}

// Letters parses "-o": "%[.][WIDTH]LETTER" with text around it. Letters that are not in fields print nothing.
func Letters[T any](text string, fields map[byte]Field[T]) Layout[T] {
	var l Layout[T]
	prefix, rest, found := strings.Cut(text, "%")
	l.Prefix = prefix
	for found {
		var column Column[T]
		if strings.HasPrefix(rest, ".") {
			column.Right, rest = true, rest[1:]
		}
		digits := len(rest) - len(strings.TrimLeft(rest, "0123456789"))
		column.Width, _ = strconv.Atoi(rest[:digits]) // too many digits: as if there were none
		rest = rest[digits:]
		if rest == "" {
			break
		}
		field, known := fields[rest[0]]
		if !known {
			field = Field[T]{}
			column.Width = 0
		}
		column.Field = field
		column.Suffix, rest, found = strings.Cut(rest[1:], "%")
		l.Columns = append(l.Columns, column)
	}
	return l
}

// defaultWidth is the width of a field of -O that names none.
const defaultWidth = 20

// Normal is how names of fields are compared: in lower case, without "-" and "_".
func Normal(name string) string {
	return strings.Map(func(c rune) rune {
		if c == '-' || c == '_' {
			return -1
		}
		return c
	}, strings.ToLower(name))
}

// Names parses "-O": "NAME[:[.][WIDTH][SUFFIX]],…". A name without a colon is 20 wide; with a colon and no width, as
// wide as its text. Names that are not in fields are left out of the layout and returned.
func Names[T any](text string, fields map[string]Field[T]) (l Layout[T], unknown []string) {
	for item := range strings.SplitSeq(text, ",") {
		name, rest, colon := strings.Cut(item, ":")
		field, ok := fields[Normal(strings.TrimSpace(name))]
		if !ok {
			unknown = append(unknown, strings.TrimSpace(name))
			continue
		}
		column := Column[T]{Field: field, Width: defaultWidth}
		if colon {
			if strings.HasPrefix(rest, ".") {
				column.Right, rest = true, rest[1:]
			}
			digits := len(rest) - len(strings.TrimLeft(rest, "0123456789"))
			column.Width, _ = strconv.Atoi(rest[:digits])
			column.Suffix = rest[digits:]
		}
		l.Columns = append(l.Columns, column)
	}
	return l, unknown
}

// AppendHeader appends the line of headers.
func (l *Layout[T]) AppendHeader(to []byte) []byte {
	to = append(to, l.Prefix...)
	for i := range l.Columns {
		c := &l.Columns[i]
		to = Pad(to, c.Field.Header, c.Width, c.Right)
		to = append(to, c.Suffix...)
	}
	return append(to, '\n')
}

// AppendRow appends the line of a row.
func (l *Layout[T]) AppendRow(to []byte, row T) []byte {
	to = append(to, l.Prefix...)
	for i := range l.Columns {
		c := &l.Columns[i]
		if c.Field.Value != nil {
			to = Pad(to, value.Safe(c.Field.Value(row)), c.Width, c.Right)
		}
		to = append(to, c.Suffix...)
	}
	return append(to, '\n')
}

// Grown widens the columns that grow to their longest value.
func (l *Layout[T]) Grown(rows []T) {
	for i := range l.Columns {
		c := &l.Columns[i]
		if !c.Grow {
			continue
		}
		for _, row := range rows {
			c.Width = max(c.Width, utf8.RuneCountInString(value.Safe(c.Field.Value(row))))
		}
	}
}

// Pad appends text in a field of the given width; 0 means as it is.
func Pad(to []byte, text string, width int, right bool) []byte {
	if width <= 0 {
		return append(to, text...)
	}
	n := utf8.RuneCountInString(text)
	if n > width {
		return append(to, cut(text, width)...)
	}
	if right {
		to = blanks(to, width-n)
		return append(to, text...)
	}
	to = append(to, text...)
	return blanks(to, width-n)
}

// cut keeps the first n characters.
func cut(text string, n int) string {
	for i := range text {
		if n == 0 {
			return text[:i]
		}
		n--
	}
	return text
}

const spaces = "                                                                "

func blanks(to []byte, n int) []byte {
	for n > len(spaces) {
		to = append(to, spaces...)
		n -= len(spaces)
	}
	return append(to, spaces[:n]...)
}

// SortKey is an element of a sort list.
type SortKey struct {
	// Letter names the field.
	Letter byte
	// Down sorts the largest first.
	Down bool
}

// SortKeys parses "P,t,-p", also with "+" and "#" in front of letters. known tells which letters there are; what is none of
// them, and a word of several, is an error.
func SortKeys(text string, known func(letter byte) bool) ([]SortKey, error) {
	var keys []SortKey
	for word := range strings.SplitSeq(text, ",") {
		word = strings.TrimSpace(word)
		letter := strings.TrimLeft(word, "+-#")
		switch {
		case word == "": // "P,,t", or nothing at all
		case len(letter) != 1 || !known(letter[0]):
			return nil, fmt.Errorf("Invalid sort specification: %s", word)
		default:
			keys = append(keys, SortKey{letter[0], strings.Contains(word[:len(word)-1], "-")})
		}
	}
	return keys, nil
}
