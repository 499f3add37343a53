package replica

import (
	"sync"
	"time"

	"github.com/hashicorp/raft"
)

const (
	cachedEntries = 1024
	cachedBytes   = 32 << 20
)

// logCache keeps the newest entries in memory, so that replication does not read what was just written.
type logCache struct {
	ring  []*raft.Log
	bytes int
	low   uint64 // lowest index that may be in the ring
}

func (c *logCache) init() { c.ring, c.bytes, c.low = make([]*raft.Log, cachedEntries), 0, 0 }

func (c *logCache) get(index uint64) *raft.Log {
	if l := c.ring[index%cachedEntries]; l != nil && l.Index == index {
		return l
	}
	return nil
}

func (c *logCache) put(l *raft.Log) {
	if c.low == 0 {
		c.low = l.Index
	}
	for ; c.low < l.Index && (l.Index-c.low >= cachedEntries || c.bytes > cachedBytes); c.low++ {
		if old := c.get(c.low); old != nil {
			c.bytes -= len(old.Data)
			c.ring[c.low%cachedEntries] = nil
		}
	}
	c.ring[l.Index%cachedEntries] = l
	c.bytes += len(l.Data)
}

// writeClock knows since when the oldest unfinished write runs.
type writeClock struct {
	mu     sync.Mutex
	next   int
	starts map[int]time.Time
}

// begin notes the start of a write; the function it returns notes its end.
func (w *writeClock) begin() func() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.starts == nil {
		w.starts = map[int]time.Time{}
	}
	n := w.next
	w.next++
	w.starts[n] = time.Now()
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.starts, n)
	}
}

// oldest is how long the oldest unfinished write has been running; 0 if there is none.
func (w *writeClock) oldest() time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	var d time.Duration
	for _, t := range w.starts {
		d = max(d, time.Since(t))
	}
	return d
}
