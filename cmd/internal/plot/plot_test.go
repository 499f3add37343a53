package plot

import (
	"math"
	"strings"
	"testing"
	"unicode/utf8"
)

func TestAFallingLineGoesFromTheUpperLeftToTheLowerRight(t *testing.T) {
	got := Curve([]Point{{0, 2}, {10, 0}}, []Mark{{5, "half"}, {99, "outside"}}, Size{Width: 6, Height: 3})
	want := "2.00 ┤⠑⢄\n1.00 ┤  ⠑⢄\n0.00 ┤    ⠑⢄\n"
	lines := strings.SplitAfter(got, "\n")
	if plain := strings.ReplaceAll(strings.Join(lines[:3], ""), "┊", " "); trimmed(plain) != want {
		t.Errorf("got\n%swant\n%s", plain, want)
	}
	if !strings.Contains(got, "▲ half") && !strings.Contains(got, "half ▲") {
		t.Errorf("the mark is missing:\n%s", got)
	}
	if strings.Contains(got, "outside") {
		t.Errorf("a mark outside of the picture is shown:\n%s", got)
	}
}

func trimmed(text string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		b.WriteString(strings.TrimRight(line, " \n") + "\n")
	}
	return b.String()
}

func TestNoInputBreaksThePicture(t *testing.T) {
	for name, points := range map[string][]Point{
		"none":     nil,
		"one":      {{1, 1}},
		"constant": {{1, 1}, {2, 1}, {3, 1}},
		"one x":    {{1, 1}, {1, 2}},
		"holes":    {{1, 1}, {2, math.NaN()}, {3, math.Inf(1)}, {4, 2}},
		"negative": {{-4, -1}, {4, -8}},
	} {
		for line := range strings.Lines(Curve(points, []Mark{{1, "x"}}, Size{Width: 20, Height: 4})) {
			if utf8.RuneCountInString(line) > 40 {
				t.Errorf("%s: a line of %d characters: %q", name, utf8.RuneCountInString(line), line)
			}
		}
	}
}
