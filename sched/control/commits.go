package control

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

// commits lets callers wait for the commit of an entry that is proposed after they came.
type commits struct {
	mu      sync.Mutex
	seq     uint64
	waiters []waiter
	wake    signal
}

type waiter struct {
	seq  uint64
	done chan uint64 // gets the index
}

// cut is a mark: waiters that came before it are served by an entry proposed after it.
func (c *commits) cut() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.seq
}

// done serves the waiters that came before the mark with the index of an entry that was proposed after it and has committed.
func (c *commits) done(cut, index uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	kept := c.waiters[:0]
	for _, w := range c.waiters {
		if w.seq <= cut {
			w.done <- index
		} else {
			kept = append(kept, w)
		}
	}
	clear(c.waiters[len(kept):])
	c.waiters = kept
}

// wait registers a waiter.
func (c *commits) wait() <-chan uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.seq++
	w := waiter{c.seq, make(chan uint64, 1)}
	c.waiters = append(c.waiters, w)
	c.wake.raise()
	return w.done
}

func (c *commits) waiting() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.waiters) > 0
}

// tickRetry is the pause after a Tick that failed.
const tickRetry = 50 * time.Millisecond

// commit is the duty that commits an entry for waiters if nothing else does: at most one Tick at a time, for all of them.
func (r *reign) commit(ctx context.Context) error {
	var failed failures
	for {
		select {
		case <-r.commits.wake:
		case <-ctx.Done():
			return nil
		}
		for r.commits.waiting() && ctx.Err() == nil {
			_, err := r.decide(ctx, &logv1.Command{Op: &logv1.Command_Tick{Tick: &logv1.Tick{}}})
			if err != nil {
				if ctx.Err() == nil && !errors.Is(err, ErrBlocked) {
					failed.say(r.log, err, time.Now())
				}
				pause(ctx, tickRetry)
			}
		}
	}
}

// failures logs what fails again and again: when the error changes, and then once a minute with the number of times.
type failures struct {
	last  string
	at    time.Time
	count int
}

const failuresEvery = time.Minute

func (f *failures) say(log *slog.Logger, err error, now time.Time) {
	f.count++
	if f.last == err.Error() && now.Sub(f.at) < failuresEvery {
		return
	}
	log.Warn("liveness can't be acknowledged", "error", err, "times", f.count)
	f.last, f.at, f.count = err.Error(), now, 0
}

// committed waits until an entry that was proposed after this call has committed, and returns its index.
func (r *reign) committed(ctx context.Context) (uint64, error) {
	done := r.commits.wait()
	select {
	case index := <-done:
		return index, nil
	case <-r.ctx.Done():
		return 0, ErrNotLeading
	case <-ctx.Done():
		return 0, fmt.Errorf("wait for the commit that acknowledges liveness: %w", ctx.Err())
	}
}
