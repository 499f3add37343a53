package control

import (
	"context"
	"sync"
	"time"
)

// scope owns goroutines: its context ends when the first fails or the parent ends, and wait returns when all have ended.
type scope struct {
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	once   sync.Once
	err    error
}

func newScope(parent context.Context) *scope {
	s := &scope{}
	s.ctx, s.cancel = context.WithCancel(parent)
	return s
}

// start runs f. An error ends the scope. It must be called from a goroutine of the scope, or before wait.
func (s *scope) start(f func() error) {
	s.wg.Go(func() {
		if err := f(); err != nil {
			s.once.Do(func() {
				s.err = err
				s.cancel()
			})
		}
	})
}

// wait returns when every goroutine has ended, with the first error.
func (s *scope) wait() error {
	s.wg.Wait()
	s.cancel()
	return s.err
}

// signal wakes one goroutine; raising it again before that changes nothing.
type signal chan struct{}

func newSignal() signal { return make(signal, 1) }

func (s signal) raise() {
	select {
	case s <- struct{}{}:
	default: // It is raised already.
	}
}

// pause waits for d or the end of ctx; false if ctx ended.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// backoff is the wait before the next of several tries in a row: first·2^(n-1), at most most.
func backoff(n int, first, most time.Duration) time.Duration {
	d := first
	for range n - 1 {
		if d *= 2; d >= most {
			return most
		}
	}
	return min(d, most)
}
