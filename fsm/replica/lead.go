package replica

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// Leader is who leads, as this member knows it.
type Leader struct {
	// ID of the leader; empty if none is known.
	ID string
	// Address of its Raft port.
	Address string
	// Term of this member.
	Term uint64
	// IsSelf: this member leads.
	IsSelf bool
	// LastContact is how long ago this member heard from the leader; 0 if it leads itself, and a very long time if never.
	LastContact time.Duration
}

// epoch is one time of leadership of this member.
type epoch struct {
	term uint64
	over chan struct{} // closed when it ends
}

// leadership is what the watcher knows, and what Lead and Transfer tell each other.
type leadership struct {
	mu      sync.Mutex
	known   Leader
	changed chan struct{} // closed when the leader, the term or the epoch changes, or yielding ends
	epoch   *epoch
	yields  int                // Transfer wants the scope to end
	cancel  context.CancelFunc // of the running scope
	done    chan struct{}      // closed when the running scope has ended; nil if none runs
	busy    bool               // Lead runs
}

func (l *leadership) init() { l.changed = make(chan struct{}) }

// signal wakes all who wait for a change. The caller holds mu.
func (l *leadership) signal() {
	close(l.changed)
	l.changed = make(chan struct{})
}

// Leader tells who leads.
func (m *Member[V]) Leader() Leader {
	addr, id := m.raft.LeaderWithID()
	l := Leader{ID: string(id), Address: string(addr), Term: m.raft.CurrentTerm(), IsSelf: m.leads() && m.Quarantined() == ""}
	if l.IsSelf {
		l.ID, l.Address = m.id, m.address
	} else {
		if l.ID == m.id {
			l.ID, l.Address = "", ""
		}
		l.LastContact = time.Since(m.raft.LastContact())
	}
	return l
}

// LeaderChanged is closed when the leader or the term changes, as far as this member notices. Take the channel first, then ask Leader.
func (m *Member[V]) LeaderChanged() <-chan struct{} {
	m.lead.mu.Lock()
	defer m.lead.mu.Unlock()
	return m.lead.changed
}

// watch follows the leadership as hashicorp/raft reports it. It never waits for anything else: hashicorp/raft waits for it.
func (m *Member[V]) watch() {
	for {
		select {
		case leads := <-m.notify:
			m.endEpoch()
			if leads {
				m.beginEpoch()
			}
		case <-m.observations:
		case <-m.stop:
			m.endEpoch()
			return
		}
		m.refresh()
	}
}

func (m *Member[V]) refresh() {
	now := m.Leader()
	now.LastContact = 0
	m.lead.mu.Lock()
	defer m.lead.mu.Unlock()
	if now != m.lead.known {
		m.lead.known = now
		m.lead.signal()
	}
}

func (m *Member[V]) beginEpoch() {
	m.lead.mu.Lock()
	defer m.lead.mu.Unlock()
	m.lead.epoch = &epoch{term: m.raft.CurrentTerm(), over: make(chan struct{})}
	m.lead.signal()
}

func (m *Member[V]) endEpoch() {
	m.lead.mu.Lock()
	defer m.lead.mu.Unlock()
	if m.lead.epoch != nil {
		close(m.lead.epoch.over)
		m.lead.epoch = nil
		m.lead.signal()
	}
}

// Lead runs f each time this member leads, until ctx ends or the member is closed. Before f runs everything that was committed before is
// applied here. The context of f ends with the term. At most one f runs at a time; Transfer waits for it to return. If f returns
// while this member still leads, leadership is given up. Only one call of Lead at a time. The error is nil or ErrClosed.
func (m *Member[V]) Lead(ctx context.Context, f func(ctx context.Context, term uint64) error) error {
	m.lead.mu.Lock()
	if m.lead.busy {
		m.lead.mu.Unlock()
		return errors.New("replica: Lead is running already")
	}
	m.lead.busy = true
	m.lead.mu.Unlock()
	defer func() {
		m.lead.mu.Lock()
		defer m.lead.mu.Unlock()
		m.lead.busy = false
	}()
	for {
		e, err := m.nextEpoch(ctx)
		if err != nil || e == nil {
			return err
		}
		if _, err := m.ReadIndex(ctx); err != nil { // the barrier
			if ctx.Err() == nil {
				m.log.Info("the barrier of a new leader failed", "term", e.term, "err", err)
				m.pause(ctx, e, m.cfg.Profile.Commit)
			}
			continue
		}
		if err := m.scope(ctx, e, f); err != nil {
			m.log.Error("the duties of the leader ended", "term", e.term, "err", err)
			m.stepDown("its duties ended: " + err.Error())
			m.pause(ctx, e, leadPause)
		}
	}
}

// nextEpoch waits until this member leads. It returns nil when ctx ends.
func (m *Member[V]) nextEpoch(ctx context.Context) (*epoch, error) {
	for {
		m.lead.mu.Lock()
		e, yields, changed := m.lead.epoch, m.lead.yields, m.lead.changed
		m.lead.mu.Unlock()
		if ctx.Err() != nil {
			return nil, nil
		}
		if e != nil && yields == 0 {
			return e, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, nil
		case <-m.stop:
			return nil, ErrClosed
		}
	}
}

// scope runs f once. The error says that f ended by itself.
func (m *Member[V]) scope(ctx context.Context, e *epoch, f func(context.Context, uint64) error) error {
	fctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan struct{})
	m.lead.mu.Lock()
	if m.lead.epoch != e || m.lead.yields > 0 {
		m.lead.mu.Unlock()
		return nil
	}
	m.lead.cancel, m.lead.done = cancel, done
	m.lead.mu.Unlock()
	var watching sync.WaitGroup
	watching.Go(func() {
		select {
		case <-e.over:
			cancel()
		case <-fctx.Done():
		}
	})
	m.log.Info("this member leads", "term", e.term)
	err := f(fctx, e.term)
	asked := fctx.Err() != nil
	cancel()
	watching.Wait()
	m.lead.mu.Lock()
	m.lead.cancel, m.lead.done = nil, nil
	m.lead.mu.Unlock()
	close(done)
	m.log.Info("this member's duties as leader are over", "term", e.term)
	switch {
	case asked:
		return nil
	case err == nil:
		return errors.New("they returned without being asked")
	}
	return err
}

// pause waits, or less if the epoch ends.
func (m *Member[V]) pause(ctx context.Context, e *epoch, d time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	select {
	case <-ctx.Done():
	case <-e.over:
	case <-m.stop:
	}
}

// yield ends the running scope and waits for it; no new one begins before the function it returns is called.
func (m *Member[V]) yield(ctx context.Context) (resume func(), err error) {
	m.lead.mu.Lock()
	m.lead.yields++
	cancel, done := m.lead.cancel, m.lead.done
	m.lead.mu.Unlock()
	resume = func() {
		m.lead.mu.Lock()
		defer m.lead.mu.Unlock()
		m.lead.yields--
		m.lead.signal()
	}
	if done == nil {
		return resume, nil
	}
	cancel()
	t := time.NewTimer(yieldTimeout)
	defer t.Stop()
	select {
	case <-done:
		return resume, nil
	case <-t.C:
		err = fmt.Errorf("the duties of the leader did not end within %v", yieldTimeout)
	case <-ctx.Done():
		err = ctx.Err()
	}
	resume()
	return nil, err
}
