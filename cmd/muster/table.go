package main

import (
	"fmt"
	"io"
	"strings"
	"unicode/utf8"

	"github.com/muster-hpc/muster/cmd/internal/slurm/value"
)

// table prints rows in aligned columns.
type table struct {
	header []string
	right  map[int]bool // columns that are aligned to the right
	rows   [][]string
	paint  map[int]func(string) string // colour of a column's cells, by their text; only on terminals
}

// add adds a row. What users named is in the cells: a terminal must not obey it.
func (t *table) add(cells ...string) {
	row := make([]string, len(cells))
	for i, cell := range cells {
		row[i] = value.Safe(cell)
	}
	t.rows = append(t.rows, row)
}

// write prints the table; the last column is not padded.
func (t *table) write(w io.Writer, colour bool) {
	widths := make([]int, len(t.header))
	for _, row := range append([][]string{t.header}, t.rows...) {
		for i, cell := range row {
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}
	line := func(row []string, head bool) {
		var b strings.Builder
		for i, cell := range row {
			if i > 0 {
				b.WriteString("  ")
			}
			blanks := strings.Repeat(" ", widths[i]-utf8.RuneCountInString(cell))
			shown := cell
			switch {
			case colour && head:
				shown = "\x1b[1m" + cell + "\x1b[0m"
			case colour && t.paint[i] != nil:
				shown = t.paint[i](cell)
			}
			switch {
			case t.right[i]:
				b.WriteString(blanks + shown)
			case i == len(row)-1:
				b.WriteString(shown)
			default:
				b.WriteString(shown + blanks)
			}
		}
		fmt.Fprintln(w, strings.TrimRight(b.String(), " "))
	}
	line(t.header, true)
	for _, row := range t.rows {
		line(row, false)
	}
}

// Colours.
const (
	red    = "31"
	green  = "32"
	yellow = "33"
	blue   = "34"
	grey   = "90"
)

func painted(colour, text string) string {
	if colour == "" {
		return text
	}
	return "\x1b[" + colour + "m" + text + "\x1b[0m"
}

// paintState colours the names of job, step and node states.
func paintState(state string) string {
	word, _, _ := strings.Cut(state, "+")
	return painted(map[string]string{
		"RUNNING": green, "UP": green, "COMPLETED": blue, "PENDING": yellow, "CONFIGURING": yellow, "PREPARING": yellow,
		"COMPLETING": yellow, "ENDING": yellow, "FAILED": red, "NODE_FAIL": red, "TIMEOUT": red, "OUT_OF_MEMORY": red, "DOWN": red,
		"BOOT_FAIL": red, "DEADLINE": red, "CANCELLED": grey, "PREEMPTED": grey, "DRAINED": yellow, "DRAINING": yellow,
	}[word], state)
}

// fields prints names and values of one thing, a line each; empty values are left out.
type fields struct{ rows [][2]string }

func (f *fields) add(name, format string, args ...any) {
	if text := fmt.Sprintf(format, args...); text != "" {
		f.rows = append(f.rows, [2]string{name, value.Safe(text)})
	}
}

func (f *fields) write(w io.Writer) {
	width := 0
	for _, row := range f.rows {
		width = max(width, len(row[0]))
	}
	for _, row := range f.rows {
		fmt.Fprintf(w, "%-*s  %s\n", width, row[0], row[1])
	}
}

// states paints one column as states.
func states(column int) map[int]func(string) string {
	return map[int]func(string) string{column: paintState}
}
