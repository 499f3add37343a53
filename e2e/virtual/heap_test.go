package virtual

import (
	"fmt"
	"math/rand/v2"
	"os"
	"time"
)

// event is something that happens at a time.
type event struct {
	at  time.Duration
	seq uint64
	do  func()
}

// clock is the heap of what will happen, and the trace of what has.
type clock struct {
	now    time.Duration
	events []event
	seq    uint64
	count  uint64
	rng    *rand.Rand
	// hash is the hash of the trace; verbose prints it too.
	hash    uint64
	verbose bool
}

func newClock(seed uint64) clock {
	return clock{rng: rand.New(rand.NewPCG(seed, 0x6d7573746572)), hash: 14695981039346656037}
}

// after arranges that something happens d from now; what is arranged first happens first.
func (c *clock) after(d time.Duration, do func()) {
	c.seq++
	c.events = append(c.events, event{c.now + d, c.seq, do})
	i := len(c.events) - 1
	for i > 0 {
		up := (i - 1) / 2
		if !c.less(i, up) {
			break
		}
		c.events[i], c.events[up] = c.events[up], c.events[i]
		i = up
	}
}

func (c *clock) less(i, j int) bool {
	a, b := &c.events[i], &c.events[j]
	return a.at < b.at || a.at == b.at && a.seq < b.seq
}

// step lets the next event happen; false if there is none before the end.
func (c *clock) step(end time.Duration) bool {
	if len(c.events) == 0 || c.events[0].at > end {
		return false
	}
	next := c.events[0]
	last := len(c.events) - 1
	c.events[0] = c.events[last]
	c.events[last] = event{}
	c.events = c.events[:last]
	for i := 0; ; {
		low := 2*i + 1
		if low >= last {
			break
		}
		if low+1 < last && c.less(low+1, low) {
			low++
		}
		if !c.less(low, i) {
			break
		}
		c.events[i], c.events[low] = c.events[low], c.events[i]
		i = low
	}
	c.now = next.at
	c.count++
	next.do()
	return true
}

// trace adds a line to the trace.
func (c *clock) trace(what string, numbers ...uint64) {
	h := c.hash
	mix := func(x uint64) {
		for range 8 {
			h = (h ^ x&0xff) * 1099511628211
			x >>= 8
		}
	}
	mix(uint64(c.now))
	for i := range len(what) {
		h = (h ^ uint64(what[i])) * 1099511628211
	}
	for _, n := range numbers {
		mix(n)
	}
	c.hash = h
	if c.verbose {
		fmt.Fprintf(os.Stdout, "%02d:%02d:%06.3f %s %d\n", int(c.now.Hours()), int(c.now.Minutes())%60, c.now.Seconds()-60*float64(int(c.now.Minutes())), what, numbers)
	}
}

// between draws a time.
func (c *clock) between(low, high time.Duration) time.Duration {
	return low + time.Duration(c.rng.Int64N(int64(high-low)+1))
}

// chance draws whether something of a probability happens, in parts of ten thousand.
func (c *clock) chance(in10000 int) bool { return c.rng.IntN(10000) < in10000 }
