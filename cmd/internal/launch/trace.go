package launch

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// TraceVariable is the environment variable that makes srun print the stages of its launch when it ends. Its value is "1",
// or the Unix time in nanoseconds from which to count: whoever executes srun knows when that was.
const TraceVariable = "MUSTER_TRACE"

// Trace remembers when the stages of a launch were reached. A nil *Trace remembers nothing. It is safe for concurrent use.
type Trace struct {
	mu    sync.Mutex
	begin time.Time
	marks []mark
}

type mark struct {
	name string
	at   time.Time
}

// NewTrace returns a trace that begins now, or when the value of TraceVariable says; nil if the value is empty or "0".
func NewTrace(value string, now time.Time) *Trace {
	if value == "" || value == "0" {
		return nil
	}
	if ns, err := strconv.ParseInt(value, 10, 64); err == nil && ns > 1e15 { // fewer are not this century's nanoseconds
		return &Trace{begin: time.Unix(0, ns), marks: []mark{{"executed", now}}}
	}
	return &Trace{begin: now}
}

// Mark notes that a stage is reached now.
func (t *Trace) Mark(name string) { t.At(name, time.Now()) }

// At notes when a stage was reached; a time that is not known is left out.
func (t *Trace) At(name string, at time.Time) {
	if t == nil || at.Unix() <= 0 {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.marks = append(t.marks, mark{name, at})
}

// Print writes a line for each stage in the order of time: the milliseconds since the beginning and since the stage before.
func (t *Trace) Print(w io.Writer, program string) {
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	slices.SortStableFunc(t.marks, func(x, y mark) int { return x.at.Compare(y.at) })
	var b strings.Builder
	fmt.Fprintf(&b, "%s: trace: began %s\n", program, t.begin.UTC().Format("15:04:05.000000"))
	before := t.begin
	for _, m := range t.marks {
		fmt.Fprintf(&b, "%s: trace: %9.3f ms  +%8.3f  %s\n", program, milliseconds(m.at.Sub(t.begin)), milliseconds(m.at.Sub(before)), m.name)
		before = m.at
	}
	_, _ = io.WriteString(w, b.String()) // whoever closed stderr does not want to see it
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
