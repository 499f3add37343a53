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

// commits lets callers wait for the commit of an entry that is proposed after they came. Each says how long it can wait for
// another reason to write one: an idle cluster then writes few entries, however many nodes and controllers it has.
type commits struct {
	mu      sync.Mutex
	seq     uint64
	waiters []waiter
	wake    signal
}

type waiter struct {
	seq  uint64
	due  time.Time   // when an entry is written for it if none was till then
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

// wait registers a waiter that can wait until due.
func (c *commits) wait(due time.Time) <-chan uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.seq++
	w := waiter{c.seq, due, make(chan uint64, 1)}
	c.waiters = append(c.waiters, w)
	c.wake.raise()
	return w.done
}

// next returns when the first of the waiters is due; false if there is none.
func (c *commits) next() (due time.Time, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, w := range c.waiters {
		if !ok || w.due.Before(due) {
			due, ok = w.due, true
		}
	}
	return due, ok
}

const (
	// tickRetry is the pause after a Tick that failed.
	tickRetry = 50 * time.Millisecond
	// patienceShare and patienceMost bound how long a batch of liveness waits for an entry that is written anyway: a twentieth of the lease.
	// The lease runs from when the agent sent its Sync, and the answer is held for a third of it: a twentieth delays no renewal.
	patienceShare, patienceMost = 20, 500 * time.Millisecond
)

// patience is how long the acknowledgement of nodes that have a lease may wait.
func (b bounds) patience() time.Duration { return min(b.lease/patienceShare, patienceMost) }

// commit is the duty that commits an entry for waiters if nothing else does until one of them is due: at most one Tick at a time, for all
// of them.
func (r *reign) commit(ctx context.Context) error {
	var failed failures
	timer := time.NewTimer(0)
	defer timer.Stop()
	for ctx.Err() == nil {
		due, ok := r.commits.next()
		wait := time.Until(due)
		if ok && wait <= 0 {
			r.tick(ctx, &failed)
			continue
		}
		timer.Stop()
		if ok {
			timer.Reset(wait)
		}
		select {
		case <-r.commits.wake:
		case <-timer.C:
		case <-ctx.Done():
		}
	}
	return nil
}

// tick commits an entry for those who wait.
func (r *reign) tick(ctx context.Context, failed *failures) {
	_, err := r.decide(ctx, &logv1.Command{Op: &logv1.Command_Tick{Tick: &logv1.Tick{}}})
	if err == nil {
		return
	}
	if ctx.Err() == nil && !errors.Is(err, ErrBlocked) {
		failed.say(r.log, err, time.Now())
	}
	pause(ctx, tickRetry)
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

// committed waits until an entry that was proposed after this call has committed, and returns its index. If nothing else is proposed within
// patience, an entry is written for it.
func (r *reign) committed(ctx context.Context, patience time.Duration) (uint64, error) {
	done := r.commits.wait(time.Now().Add(patience))
	select {
	case index := <-done:
		return index, nil
	case <-r.ctx.Done():
		return 0, ErrNotLeading
	case <-ctx.Done():
		return 0, fmt.Errorf("wait for the commit that acknowledges liveness: %w", ctx.Err())
	}
}
