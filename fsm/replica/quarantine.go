package replica

import (
	"context"
	"fmt"
	"path/filepath"
	"sync"
	"time"
)

// quarantine is why the member must not serve.
type quarantine struct {
	mu     sync.Mutex
	reason string
	set    chan struct{} // closed when there is a reason
}

func (q *quarantine) init() { q.set = make(chan struct{}) }

// Quarantine makes this member stop serving and leave the cluster's traffic because its state must not be trusted: reads and
// proposals are refused with ErrQuarantined, leadership is handed over, it votes no more. The reason is a sentence. It is kept in the data
// directory, so that a restart is refused until the member rejoins.
func (m *Member[V]) Quarantine(reason string) { m.setAside(reason, true) }

// Quarantined is why the member does not serve; empty if it does.
func (m *Member[V]) Quarantined() string {
	m.quar.mu.Lock()
	defer m.quar.mu.Unlock()
	return m.quar.reason
}

// setAside quarantines the member. What is found wrong with an entry, not with a file, is not kept: a newer program may know the entry.
// It is called from goroutines of hashicorp/raft and does not wait.
func (m *Member[V]) setAside(reason string, keep bool) {
	m.quar.mu.Lock()
	defer m.quar.mu.Unlock()
	if m.quar.reason != "" {
		return
	}
	if reason == "" {
		reason = "no reason was given"
	}
	m.quar.reason = reason
	close(m.quar.set)
	m.log.Error("this member must not serve any more", "reason", reason)
	if keep && m.cfg.Dir != "" {
		if err := writeDurably(filepath.Join(m.cfg.Dir, quarantineFile), reason+"\n"); err != nil {
			m.log.Error("the quarantine could not be written down; it is forgotten at the next start", "dir", m.cfg.Dir, "err", err)
		}
	}
}

// keep looks after the member: it reacts to quarantine, a full disk, a stuck disk and a big log, until Close.
func (m *Member[V]) keep() {
	stall := time.Duration(stallElections) * m.cfg.Profile.Election
	var spaceWake <-chan struct{}
	var stallTick, spaceTick <-chan time.Time
	if m.bolt != nil {
		st, sp := time.NewTicker(m.cfg.Profile.Election/4), time.NewTicker(spaceInterval)
		defer st.Stop()
		defer sp.Stop()
		spaceWake, stallTick, spaceTick = m.space.wake, st.C, sp.C
	}
	stuck := false
	var full fullTry
	for {
		changed := m.LeaderChanged() // before the look, so that no beginning of leadership is missed
		m.yieldIfFull(&full)
		select {
		case <-m.stop:
			return
		case <-m.quar.set:
			m.leaveTraffic()
			return
		case <-spaceTick:
			m.space.check()
			m.snapshotIfDue()
		case <-spaceWake:
			full = fullTry{}
		case <-changed:
		case <-stallTick:
			age := m.bolt.writes.oldest()
			if now := age > stall && m.leads() || stuck && age > stall; now != stuck {
				stuck = now
				m.silence(stuck, age)
			}
		}
	}
}

// fullTry is the last attempt to give up leadership because the disk is full.
type fullTry struct {
	term uint64
	at   time.Time
	said uint64 // term in which it was logged that nobody can take over
}

// yieldIfFull gives up leadership if this member leads with a full disk: at once in a new term, and then every fullPause. Until another
// voter has answered, which takes a moment in a new term, it looks again at every call. A member to which it was handed last is the last
// choice: it may be full too.
func (m *Member[V]) yieldIfFull(f *fullTry) {
	if !m.DiskFull() || !m.leads() {
		return
	}
	term := m.raft.CurrentTerm()
	if term == f.term && time.Since(f.at) <= fullPause {
		return
	}
	if m.voters() > 1 {
		if _, err := m.successor(); err != nil {
			if f.said != term {
				f.said = term
				m.log.Warn("the disk of this leader is full, but nobody can take over yet", "err", err)
			}
			return
		}
	}
	f.term, f.at = term, time.Now()
	m.stepDown("its disk is full")
}

// holdsBack tells whether this member leaves it to others to stand for election: its disk is full. It does not for ever, because all
// members may be full, and then reads still need a leader.
func (m *Member[V]) holdsBack() bool {
	return m.DiskFull() && time.Since(m.raft.LastContact()) < fullElections*m.cfg.Profile.Election
}

// silence keeps a leader quiet while its disk does not answer: its heartbeats come from other goroutines and would keep others from
// leading.
func (m *Member[V]) silence(on bool, age time.Duration) {
	if on {
		m.gate.shut.Add(1)
		m.log.Error("the disk has not answered a write for too long: this member falls silent so that another one leads", "for", age)
		return
	}
	m.gate.shut.Add(-1)
	m.log.Info("the disk answers again")
}

// leaveTraffic ends this member's part in the cluster.
func (m *Member[V]) leaveTraffic() {
	m.endEpoch()
	if m.bolt == nil || m.bolt.failure() == nil {
		m.stepDown("it is quarantined")
	}
	m.gate.shut.Add(1)
	if !within(closeTimeout, func() { _ = m.raftDown() }) {
		m.log.Error("hashicorp/raft does not end; it is cut off from the others")
	}
}

// stepDown gives up leadership, if this member leads: it hands over, or, if nobody takes it, falls silent until its lease is over and
// the others had time to elect.
func (m *Member[V]) stepDown(why string) {
	if !m.leads() {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*m.cfg.Profile.Election)
	defer cancel()
	if m.voters() < 2 {
		m.log.Warn("this member should give up leadership, but no other one votes", "why", why)
		return
	}
	m.log.Warn("this member gives up leadership", "why", why)
	target, err := m.successor()
	if err != nil {
		m.log.Warn("nobody can take over", "err", err)
		return
	}
	m.handed.Store(target.ID)
	if err = m.handOver(ctx, target); err == nil || !m.leads() {
		return
	}
	m.log.Warn("nobody took over; this member falls silent for a while", "err", err)
	m.gate.shut.Add(1)
	defer m.gate.shut.Add(-1)
	m.sleep(context.Background(), m.cfg.Profile.Lease+4*m.cfg.Profile.Heartbeat)
}

// errNoSuccessor says that no other voter answers.
func errNoSuccessor(n int) error {
	return fmt.Errorf("none of the other %d voters has answered lately", n)
}
