package plot

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Point is one value of the curve.
type Point struct{ X, Y float64 }

// Mark is a place on the x axis with a short label.
type Mark struct {
	X     float64
	Label string
}

// Size is the inner size of the picture in characters.
type Size struct{ Width, Height int }

// braille maps a dot (column 0-1, row 0-3) to its bit in a pattern.
var braille = [2][4]rune{{0x01, 0x02, 0x04, 0x40}, {0x08, 0x10, 0x20, 0x80}}

// Curve draws points in order of x, joined by lines, with a vertical dotted line at each mark and its label below. The y
// axis begins at 0 unless there are negative values. Points that are not finite are left out. It returns lines that end in newlines; fewer than two
// points give a sentence instead.
func Curve(points []Point, marks []Mark, size Size) string {
	var finite []Point
	for _, p := range points {
		if !math.IsNaN(p.X+p.Y) && !math.IsInf(p.X+p.Y, 0) {
			finite = append(finite, p)
		}
	}
	if len(finite) < 2 || size.Width < 2 || size.Height < 2 {
		return fmt.Sprintf("(%d points are too few for a curve)\n", len(finite))
	}
	c := newCanvas(finite, size)
	for i := 1; i < len(finite); i++ {
		c.line(finite[i-1], finite[i])
	}
	for _, m := range marks {
		c.mark(m)
	}
	return c.render(marks)
}

type canvas struct {
	size                   Size
	left, right, low, high float64
	cells                  [][]rune // Braille bits
	dotted                 []bool   // columns with a mark
}

func newCanvas(points []Point, size Size) *canvas {
	c := &canvas{size: size, left: points[0].X, right: points[0].X, high: points[0].Y, dotted: make([]bool, size.Width)}
	for _, p := range points {
		c.left, c.right = min(c.left, p.X), max(c.right, p.X)
		c.low, c.high = min(c.low, p.Y), max(c.high, p.Y)
	}
	if c.right == c.left {
		c.right++
	}
	if c.high == c.low {
		c.high++
	}
	for range size.Height {
		c.cells = append(c.cells, make([]rune, size.Width))
	}
	return c
}

// dot returns the dot's column and row, from the left and from the top.
func (c *canvas) dot(p Point) (x, y int) {
	x = int(math.Round((p.X - c.left) / (c.right - c.left) * float64(2*c.size.Width-1)))
	y = int(math.Round((c.high - p.Y) / (c.high - c.low) * float64(4*c.size.Height-1)))
	return x, y
}

func (c *canvas) line(from, to Point) {
	x0, y0 := c.dot(from)
	x1, y1 := c.dot(to)
	steps := max(abs(x1-x0), abs(y1-y0), 1)
	for i := range steps + 1 {
		x, y := x0+(x1-x0)*i/steps, y0+(y1-y0)*i/steps
		c.cells[y/4][x/2] |= braille[x%2][y%4]
	}
}

func abs(n int) int { return max(n, -n) }

// column is the character column of a mark; ok is false outside of the picture.
func (c *canvas) column(m Mark) (column int, ok bool) {
	if m.X < c.left || m.X > c.right {
		return 0, false
	}
	x, _ := c.dot(Point{X: m.X, Y: c.high})
	return x / 2, true
}

func (c *canvas) mark(m Mark) {
	if column, ok := c.column(m); ok {
		c.dotted[column] = true
	}
}

func (c *canvas) render(marks []Mark) string {
	var b strings.Builder
	labels := make([]string, c.size.Height)
	for _, row := range []int{0, c.size.Height / 2, c.size.Height - 1} {
		value := c.high - (c.high-c.low)*float64(row)/float64(c.size.Height-1)
		labels[row] = strconv.FormatFloat(value, 'f', 2, 64)
	}
	margin := 0
	for _, l := range labels {
		margin = max(margin, len(l))
	}
	for row, cells := range c.cells {
		fmt.Fprintf(&b, "%*s ┤", margin, labels[row])
		var line strings.Builder
		for column, bits := range cells {
			switch {
			case bits != 0:
				line.WriteRune(0x2800 + bits)
			case c.dotted[column]:
				line.WriteRune('┊')
			default:
				line.WriteByte(' ')
			}
		}
		b.WriteString(strings.TrimRight(line.String(), " ") + "\n")
	}
	blank := strings.Repeat(" ", margin+1)
	b.WriteString(blank + "└" + strings.Repeat("─", c.size.Width) + "\n")
	first, last := strconv.FormatFloat(c.left, 'f', -1, 64), strconv.FormatFloat(c.right, 'f', -1, 64)
	gap := max(1, c.size.Width-len(first)-len(last))
	b.WriteString(blank + " " + first + strings.Repeat(" ", gap) + last + "\n")
	for _, m := range marks {
		if column, ok := c.column(m); ok {
			b.WriteString(blank + " " + place(column, m.Label, c.size.Width) + "\n")
		}
	}
	return b.String()
}

// place writes a label with its arrow below a column: to the right of the arrow if it fits, else to its left.
func place(column int, label string, width int) string {
	length := utf8.RuneCountInString(label)
	if column+2+length <= width || column < length+1 {
		return strings.Repeat(" ", column) + "▲ " + label
	}
	return strings.Repeat(" ", column-length-1) + label + " ▲"
}
