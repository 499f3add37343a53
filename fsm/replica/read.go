package replica

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/hashicorp/raft"
)

// ReadIndex returns an index that includes everything that was acknowledged, by any leader, before the call. Wait for it with WaitIndex,
// here or on another member. Only the leader answers; concurrent calls share a barrier. Errors: ErrNotLeader, ErrQuarantined, ErrClosed.
func (m *Member[V]) ReadIndex(ctx context.Context) (uint64, error) {
	if err := m.Serving(); err != nil {
		return 0, err
	}
	if !m.leads() {
		return 0, m.notLeader()
	}
	done := m.reads.put()
	select {
	case r := <-done:
		return r.index, r.err
	case <-m.stop:
		return 0, ErrClosed
	case <-ctx.Done():
		return 0, fmt.Errorf("read index: %w", ctx.Err())
	}
}

// WaitIndex waits until the entry at index is applied here and returns a view that includes it. Errors: ErrQuarantined, ErrClosed, ctx's.
func (m *Member[V]) WaitIndex(ctx context.Context, index uint64) (V, error) {
	var none V
	for {
		if err := m.Serving(); err != nil {
			return none, err
		}
		p := m.fsm.current.Load()
		if p.index >= index {
			return p.view, nil
		}
		select {
		case <-p.next:
		case <-m.quar.set:
		case <-m.stop:
		case <-ctx.Done():
			return none, fmt.Errorf("wait for index %d, applied is %d: %w", index, p.index, ctx.Err())
		}
	}
}

type readResult struct {
	index uint64
	err   error
}

// readQueue holds those who wait for the next barrier.
type readQueue struct {
	wake    chan struct{}
	mu      sync.Mutex
	waiting []chan readResult
}

func newReadQueue() *readQueue { return &readQueue{wake: make(chan struct{}, 1)} }

func (q *readQueue) put() <-chan readResult {
	done := make(chan readResult, 1)
	q.mu.Lock()
	q.waiting = append(q.waiting, done)
	q.mu.Unlock()
	select {
	case q.wake <- struct{}{}:
	default:
	}
	return done
}

func (q *readQueue) take() []chan readResult {
	q.mu.Lock()
	defer q.mu.Unlock()
	out := q.waiting
	q.waiting = nil
	return out
}

// runBarriers commits one barrier at a time for all who wait for one.
func (m *Member[V]) runBarriers() {
	for closed := false; !closed; {
		select {
		case <-m.reads.wake:
		case <-m.stop:
			closed = true
		}
		waiting := m.reads.take()
		if len(waiting) == 0 {
			continue
		}
		var r readResult
		if r.err = m.Serving(); r.err == nil {
			r.index, r.err = m.confirm()
		}
		for _, done := range waiting {
			done <- r
		}
	}
}

// confirm makes sure that this member leads, and that all that was committed before is applied here.
func (m *Member[V]) confirm() (uint64, error) {
	var err error
	if m.cfg.Faults.ReadThroughVerifyLeader {
		err = m.raft.VerifyLeader().Error()
	} else {
		err = m.raft.Barrier(enqueueTimeout).Error()
	}
	if err != nil {
		if errors.Is(err, raft.ErrLeadershipLost) {
			return 0, m.notLeader() // a read has no outcome
		}
		if err = m.outcomeOf(err); errors.Is(err, ErrOutcomeUnknown) {
			err = fmt.Errorf("%w: %w", ErrNotLeader, err)
		}
		return 0, err
	}
	if err := m.Serving(); err != nil {
		return 0, err
	}
	return m.Applied(), nil
}
