package node

import (
	"time"

	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
)

// lease is the node's right to start work. Guarded by Agent.mu.
//
// Room for later: an agent that reaches no controller asks peers to relay its Sync, and peers whether they have a lease.
// Both end here: a relayed answer carries a grant like any other, and "I go on" moves the deadline without moving the
// end of the lease.
type lease struct {
	// end is when it ends, on the boot-time clock; 0 before the first grant.
	end time.Duration
	// deadline is when attempts that stop themselves do so: the end plus the fence window.
	deadline time.Duration
	// granted is the sequence of the last grant.
	granted uint64
	// sent has the sending time of recent Syncs by sequence.
	sent map[uint64]time.Duration

	// watch fires when the lease is over, to say so; lost says that it did since the last grant.
	watch *time.Timer
	lost  bool
	// grantedAt is when the last Sync that brought a grant was sent; tried are the controllers that failed since.
	grantedAt time.Duration
	tried     []string
}

// sending remembers when a Sync is sent.
func (l *lease) sending(sequence uint64, now time.Duration) {
	l.sent[sequence] = now
	delete(l.sent, sequence-maxSent)
}

// grant extends the lease; false if it changes nothing. A grant for a Sync whose sending is not remembered is too old
// to be worth anything.
func (l *lease) grant(g *nodev1.Grant) bool {
	sent, ok := l.sent[g.GetSequence()]
	if !ok {
		return false
	}
	l.granted = max(l.granted, g.GetSequence())
	end := sent + time.Duration(g.GetLeaseMs())*time.Millisecond
	if end <= l.end {
		return false
	}
	l.end, l.grantedAt, l.tried = end, sent, nil
	l.deadline = max(l.deadline, end+time.Duration(g.GetFenceWindowMs())*time.Millisecond)
	return true
}

// leased reports whether work may be started now. a.mu is held.
func (a *Agent) leased() bool { return a.boot() < a.lease.end }

// watchLease arranges that the end of the lease is told when it comes. a.mu is held.
func (a *Agent) watchLease() {
	if a.lease.watch != nil {
		a.lease.watch.Stop()
	}
	if !a.stopped {
		a.lease.watch = time.AfterFunc(max(time.Millisecond, a.lease.end-a.boot()), a.leaseOver)
	}
}

// leaseOver tells that the lease is lost, once.
func (a *Agent) leaseOver() {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.stopped || a.lease.lost:
	case a.leased(): // the timer's clock is another than the lease's
		a.watchLease()
	default:
		a.lease.lost = true
		a.log.Warn("the lease is lost: no controller renewed it; nothing is started until one does, and work that stops itself "+
			"is ended when its deadline comes", "since_last_grant", (a.boot() - a.lease.grantedAt).Round(time.Millisecond),
			"deadline_in", (a.lease.deadline - a.boot()).Round(time.Millisecond), "tried", a.lease.tried, "asks_now", a.control.current)
	}
}

// takeGrant extends the lease, which the named controller did, and pushes the deadline down to the supervisors of attempts that stop themselves. a.mu is
// held.
func (a *Agent) takeGrant(from string, g *nodev1.Grant) {
	was, before := a.leased(), a.lease.grantedAt
	lapsed := a.lease.deadline != 0 && a.boot() >= a.lease.deadline
	if g == nil || !a.lease.grant(g) {
		return
	}
	if !was {
		a.poke(a.work) // what waited for a lease may start
	}
	if a.lease.lost && a.leased() {
		a.lease.lost = false
		a.log.Info("contact with the control plane is regained, the node has a lease again", "controller", from, "away_for", a.lease.grantedAt-before)
	}
	a.watchLease()
	a.watchDeadline()
	for _, at := range a.attempts {
		for _, s := range at.steps {
			if !s.record.GetOrder().GetStopsItself() || s.phase.over() {
				continue
			}
			if lapsed && s.phase == PhasePreparing && s.end == nil {
				a.lapse(s)
			}
			s.deadline = a.lease.deadline
			a.poke(s.kick)
		}
	}
}

// lapse gives up a step that was being prepared when the deadline passed: its attempt may have been accounted for meanwhile, and then
// nobody would ever order its end. a.mu is held.
func (a *Agent) lapse(s *step) {
	s.failed = &prepareError{sentence: "the node had lost contact with the controllers for too long while the step was being prepared"}
	s.end = &ending{sentence: s.failed.sentence}
	a.armForce(s, a.forceAfter)
	s.cancelPrepare()
}
