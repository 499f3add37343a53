package demo

import (
	"context"
	"os"
	"slices"
	"sync"
	"time"
)

// listenPause is the time between two looks at the output; pauses are known to within it.
const listenPause = 10 * time.Millisecond

// listener notes when the job's output grows: how a user who reads it sees the training go on.
type listener struct {
	path string
	mu   sync.Mutex
	grew []time.Time
}

// run looks until ctx ends.
func (l *listener) run(ctx context.Context) {
	size := int64(0)
	ticker := time.NewTicker(listenPause)
	defer ticker.Stop()
	for {
		if info, err := os.Stat(l.path); err == nil && info.Size() != size {
			size = info.Size()
			l.mu.Lock()
			l.grew = append(l.grew, time.Now())
			l.mu.Unlock()
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// gaps returns the pauses that ended after t.
func (l *listener) gaps(t time.Time) []time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	var all []time.Duration
	for i := 1; i < len(l.grew); i++ {
		if l.grew[i].After(t) {
			all = append(all, l.grew[i].Sub(l.grew[i-1]))
		}
	}
	return all
}

// longest is the longest pause that ended after t; 0 if none did.
func (l *listener) longest(t time.Time) time.Duration {
	gaps := l.gaps(t)
	if len(gaps) == 0 {
		return 0
	}
	return slices.Max(gaps)
}

// usual is the median of all pauses.
func (l *listener) usual() time.Duration {
	gaps := l.gaps(time.Time{})
	if len(gaps) == 0 {
		return 0
	}
	slices.Sort(gaps)
	return gaps[len(gaps)/2]
}
