package control

import (
	"cmp"
	"log/slog"
	"slices"
	"time"

	"github.com/muster-hpc/muster/fsm"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	peerv1 "github.com/muster-hpc/muster/proto/muster/peer/v1"
	"github.com/muster-hpc/muster/sched"
)

// Manual decides what Lead decides, one duty at a time, when and at whose time its owner says: without goroutines, without a
// clock, and with the same answers for the same calls. It returns commands, with the term they are decided in, instead of
// proposing them. Simulations in virtual time use it; no program does. It belongs to one goroutine, and is for one term.
type Manual struct {
	r       *reign
	plans   *planning
	gate    *gate
	at      time.Time
	waits   map[sched.JobID]bool // placements that were decided and whose outcome is not known
	retry   map[declared]time.Time
	last    *sched.Decisions
	pruning uint32
}

// NewManual begins a term. id is the member that leads, began the time at which every lease counts as granted.
func NewManual(id string, term uint64, began time.Time, faults Faults) *Manual {
	c := New(Config{Log: slog.New(slog.DiscardHandler), Faults: faults})
	m := &Manual{at: began, waits: map[sched.JobID]bool{}, retry: map[declared]time.Time{}}
	m.r = &reign{
		c: c, cfg: &c.cfg, log: c.cfg.Log.With("member", id), term: term, began: began, nodes: newLiveness(began), suspects: newSignal(),
		ready: newSignal(), alarms: map[string]string{}, joining: map[string]chan struct{}{},
	}
	m.plans = &planning{r: m.r, refused: map[sched.JobID]int{}, explained: began.Add(-explainEvery)}
	m.gate = newGate(m.r, func() time.Time { return m.at })
	return m
}

// Plan places jobs and says why others wait. It returns nothing while the outcome of a placement is not known; see Placed.
func (m *Manual) Plan(v *fsm.View, at time.Time) []*logv1.Command {
	if !v.Bootstrapped() || len(m.waits) > 0 {
		return nil
	}
	if s := v.StateTime(); s.After(at) {
		at = s
	}
	p := m.plans
	if p.mirror.follow(v) {
		m.last, p.suspects = nil, nil
	}
	p.suspect()
	view, now := p.mirror.view, sched.Time(at.UnixMilli())
	if m.last == nil || !m.last.Complete || view.Dirty() || view.NextWake() <= now {
		m.last = view.Plan(now, p.r.c.limits)
	}
	var commands []*logv1.Command
	for i := range m.last.Placements {
		w := &m.last.Placements[i]
		m.waits[w.Job] = true
		commands = append(commands, m.decided(placing(w)))
	}
	if len(commands) > 0 {
		m.last = nil
		return commands
	}
	if at.Sub(p.explained) >= explainEvery {
		if reasons, _ := explanation(m.last); reasons != nil {
			p.explained = at
			return []*logv1.Command{m.decided(&logv1.Command{Op: &logv1.Command_ExplainJobs{ExplainJobs: reasons}})}
		}
	}
	return nil
}

// Placed tells the outcome of a placement: refused, not written, or neither. The next Plan must be given a view that includes it.
func (m *Manual) Placed(job uint32, refused, unwritten bool, at time.Time) {
	id, now := sched.JobID(job), sched.Time(at.UnixMilli())
	delete(m.waits, id)
	switch {
	case refused:
		m.plans.refuse(id, now)
	case unwritten:
		m.plans.mirror.view.Defer(id, now+sched.Time(failedWait.Milliseconds()))
	default:
		delete(m.plans.refused, id)
	}
}

// Start starts what is prepared on all its nodes, replaces nodes that can't prepare, and ends what does not get ready.
func (m *Manual) Start(v *fsm.View, at time.Time) []*logv1.Command {
	if !v.Bootstrapped() {
		return nil
	}
	m.at = at
	m.gate.follow(v)
	keys := make([]workKey, 0, len(m.gate.works))
	for key := range m.gate.works {
		keys = append(keys, key)
	}
	slices.SortFunc(keys, func(a, b workKey) int {
		return cmp.Or(cmp.Compare(a.job, b.job), cmp.Compare(a.attempt, b.attempt), cmp.Compare(a.step, b.step))
	})
	var commands []*logv1.Command
	for _, key := range keys {
		w := m.gate.works[key]
		if w.notUntil.After(at) {
			continue
		}
		if cmd, _ := m.gate.due(v, key, w, at); cmd != nil {
			w.tried(at)
			commands = append(commands, m.decided(cmd))
		}
	}
	return commands
}

// Watch declares silent nodes lost, and accounts for attempts there that stop themselves.
func (m *Manual) Watch(v *fsm.View, at time.Time) []*logv1.Command {
	if !v.Bootstrapped() {
		return nil
	}
	s := m.r.nodes.look(v, at)
	m.r.publish(s)
	if s.overdue > s.limit {
		return nil
	}
	var commands []*logv1.Command
	declare := func(n *apiv1.Node, job uint32, cmd *logv1.Command) {
		if key := (declared{n.Number, job}); !at.Before(m.retry[key]) {
			m.retry[key] = at.Add(lossRetry)
			commands = append(commands, m.decided(cmd))
		}
	}
	for _, n := range s.lose {
		declare(n, 0, s.losing(n))
	}
	for _, n := range s.fence {
		declare(n, 0, fencing(n))
	}
	for _, x := range s.stopped {
		declare(x.node, x.attempt.JobId, s.concluding(x))
	}
	return commands
}

// Expire removes old records from the hot state.
func (m *Manual) Expire(v *fsm.View, at time.Time) []*logv1.Command {
	if !v.Bootstrapped() {
		return nil
	}
	prune, next := expired(v, at, m.pruning)
	m.pruning = next
	if prune == nil {
		return nil
	}
	return []*logv1.Command{m.decided(&logv1.Command{Op: &logv1.Command_Prune{Prune: prune}})}
}

// Hear takes in Syncs and returns the nodes that get no grant. The others may be granted leases by Grant when an entry proposed
// after Hear has committed.
func (m *Manual) Hear(v *fsm.View, beats []*peerv1.Beat, at time.Time) (refused []uint32) {
	for _, b := range beats {
		if !m.r.nodes.hear(v, b, at) {
			refused = append(refused, b.Node)
		}
	}
	return refused
}

// Grant notes that leases may begin with these beats, which were heard at that time. It comes before the answer.
func (m *Manual) Grant(beats []*peerv1.Beat, refused []uint32, at time.Time) {
	no := map[uint32]bool{}
	for _, n := range refused {
		no[n] = true
	}
	m.r.nodes.grant(beats, no, at)
}

// Join decides whether an agent may have its name; the detail says why not.
func (m *Manual) Join(v *fsm.View, join *nodev1.JoinRequest, at time.Time) (*logv1.Command, *apiv1.ErrorDetail) {
	takesOver, refusal := m.r.mayTakeOver(v, join.GetSpec().GetName(), join.GetInstance(), at)
	if refusal != nil {
		return nil, refusal
	}
	return m.decided(&logv1.Command{Op: &logv1.Command_JoinNode{JoinNode: &logv1.JoinNode{
		Spec: join.Spec, Instance: join.Instance, TakesOver: takesOver, HighestJobId: join.HighestJobId,
	}}}), nil
}

// Joined notes that an agent has joined.
func (m *Manual) Joined(result *logv1.Result, instance *apiv1.Instance, at time.Time) {
	m.r.nodes.joined(result.NodeNumber, result.NodeEpoch, instance, at)
}

func (m *Manual) decided(cmd *logv1.Command) *logv1.Command {
	cmd.DecidedInTerm = m.r.term
	return cmd
}
