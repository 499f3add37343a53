package demo

import (
	"fmt"
	"os"
	"regexp"
	"strconv"

	"github.com/muster-hpc/muster/cmd/internal/plot"
)

var (
	stepLine     = regexp.MustCompile(`(?m)^step (\d+) loss (\S+)$`)
	accuracyLine = regexp.MustCompile(`(?m)^accuracy (\S+) on (\d+) images`)
)

// output is what the job has written so far.
type output struct {
	points   []plot.Point // step and loss, in order of writing
	accuracy float64      // on held-out data; -1 until it is known
}

// readOutput reads the job's output file; one that is not there yet is empty.
func readOutput(path string) (output, error) {
	o := output{accuracy: -1}
	text, err := os.ReadFile(path)
	if os.IsNotExist(err) {
		return o, nil
	} else if err != nil {
		return o, fmt.Errorf("read the job's output: %w", err)
	}
	for _, match := range stepLine.FindAllSubmatch(text, -1) {
		step, err1 := strconv.ParseFloat(string(match[1]), 64)
		loss, err2 := strconv.ParseFloat(string(match[2]), 64)
		if err1 != nil || err2 != nil {
			return o, fmt.Errorf("the job's output has the line %q", match[0])
		}
		o.points = append(o.points, plot.Point{X: step, Y: loss})
	}
	if match := accuracyLine.FindSubmatch(text); match != nil {
		if o.accuracy, err = strconv.ParseFloat(string(match[1]), 64); err != nil {
			return o, fmt.Errorf("the job's output has the line %q", match[0])
		}
	}
	return o, nil
}

// step is the last step that was reported; 0 before the first.
func (o output) step() int {
	if len(o.points) == 0 {
		return 0
	}
	return int(o.points[len(o.points)-1].X)
}

// disorder says where the steps do not rise: a repeated step means that the training began again somewhere.
func (o output) disorder() string {
	for i := 1; i < len(o.points); i++ {
		if o.points[i].X <= o.points[i-1].X {
			return fmt.Sprintf("step %.0f follows step %.0f", o.points[i].X, o.points[i-1].X)
		}
	}
	return ""
}
