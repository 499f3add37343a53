package bench

import (
	"fmt"
	"io"
	"slices"
)

// Report is what `muster bench --json` prints.
type Report struct {
	// Machine is what this machine does without Muster.
	Machine Machine `json:"machine"`
	// Figures are what was measured.
	Figures []Figure `json:"figures"`
}

// Figure is one measured quantity.
type Figure struct {
	// Benchmark it belongs to: "submit", "throughput", "launch", "list", "failover", "steady", "wide", "agents" or "output".
	Benchmark string `json:"benchmark"`
	// Name of the quantity, for example "single_job_calls".
	Name string `json:"name"`
	// Unit: "1/s", "ms", "s", "MB", "MB/s", "CPU s", "CPU ms" or "" for a number.
	Unit string `json:"unit"`
	// Median of Values.
	Median float64 `json:"median"`
	// Values of the single runs in order.
	Values []float64 `json:"values"`
	// Target that Muster promises on a machine like the one of the documentation.
	Target float64 `json:"target"`
	// Higher: more is better; otherwise less.
	Higher bool `json:"higher_is_better"`
	// Met: the median reaches the target, or there is none.
	Met bool `json:"met"`
	// Untargeted: nothing is promised; the figure explains others.
	Untargeted bool `json:"no_target,omitempty"`
}

// figure makes a Figure of the values of several runs.
func figure(benchmark, name, unit string, target float64, higher bool, values []float64) Figure {
	f := Figure{Benchmark: benchmark, Name: name, Unit: unit, Values: values, Target: target, Higher: higher, Median: median(values)}
	f.Met = f.Median <= target
	if higher {
		f.Met = f.Median >= target
	}
	return f
}

func median(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	middle := len(sorted) / 2
	if len(sorted)%2 == 1 {
		return sorted[middle]
	}
	return (sorted[middle-1] + sorted[middle]) / 2
}

// Print writes the report for people.
func (r *Report) Print(out io.Writer) error {
	m := r.Machine
	if _, err := fmt.Fprintf(out, "machine     %d CPUs, fsync %.2f ms, start of `true` %.2f ms, HTTP echo %.0f/s\n",
		m.CPUs, m.FsyncMs, m.ForkExecMs, m.HTTPEchoPerSecond); err != nil {
		return err
	}
	for _, f := range r.Figures {
		if f.Untargeted {
			if _, err := fmt.Fprintf(out, "%-11s %-28s %10.1f %-6s (runs %.1f)\n", f.Benchmark, f.Name, f.Median, f.Unit, f.Values); err != nil {
				return err
			}
			continue
		}
		relation, verdict := "≤", "met"
		if f.Higher {
			relation = "≥"
		}
		if !f.Met {
			verdict = "MISSED"
		}
		if _, err := fmt.Fprintf(out, "%-11s %-28s %10.1f %-6s (target %s %.0f, %s; runs %.1f)\n",
			f.Benchmark, f.Name, f.Median, f.Unit, relation, f.Target, verdict, f.Values); err != nil {
			return err
		}
	}
	return nil
}
