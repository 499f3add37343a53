package replica

import (
	"log/slog"
	"slices"
	"sync"
	"time"
)

// delayMeter measures how late this process gets to run: a timer fires, and it is noted by how much it was late. On a starved machine
// short election timeouts cause needless elections.
type delayMeter struct {
	election time.Duration
	log      *slog.Logger

	mu      sync.Mutex
	samples []time.Duration // a ring
	next    int
}

const (
	delayWindow = time.Minute // samples kept, and pause between warnings
	delayShare  = 4           // a warning if the delay's 99th percentile exceeds the election timeout divided by this
)

func newDelayMeter(election time.Duration, log *slog.Logger) *delayMeter {
	return &delayMeter{election: election, log: log}
}

func (d *delayMeter) interval() time.Duration { return d.election / 10 }

func (d *delayMeter) run(stop <-chan struct{}) {
	warned := time.Now()
	for {
		due := time.Now().Add(d.interval())
		t := time.NewTimer(d.interval())
		select {
		case <-stop:
			t.Stop()
			return
		case <-t.C:
		}
		d.add(time.Since(due))
		if time.Since(warned) >= delayWindow {
			warned = time.Now()
			d.warn()
		}
	}
}

func (d *delayMeter) warn() {
	if p := d.p99(); p > d.election/delayShare {
		d.log.Warn("this machine is too busy for the election timeout: elections may happen for no other reason. "+
			"Give the controller more CPU (a higher weight, its own cores), or choose the production profile",
			"delay_p99", p, "election_timeout", d.election)
	}
}

func (d *delayMeter) add(late time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.samples) < int(delayWindow/d.interval()) {
		d.samples = append(d.samples, max(late, 0))
		return
	}
	d.samples[d.next] = max(late, 0)
	d.next = (d.next + 1) % len(d.samples)
}

func (d *delayMeter) p99() time.Duration {
	d.mu.Lock()
	s := slices.Clone(d.samples)
	d.mu.Unlock()
	if len(s) == 0 {
		return 0
	}
	slices.Sort(s)
	return s[len(s)*99/100]
}

// SchedulingDelay is the 99th percentile of how late this process got to run, over the last minute; 0 in memory.
func (m *Member[V]) SchedulingDelay() time.Duration {
	if m.delay == nil {
		return 0
	}
	return m.delay.p99()
}

// WriteAge is how long the oldest unfinished write to the log has been running; 0 if none is, and in memory.
func (m *Member[V]) WriteAge() time.Duration {
	if m.bolt == nil {
		return 0
	}
	return m.bolt.writes.oldest()
}
