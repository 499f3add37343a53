package virtual

import (
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/muster-hpc/muster/node"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
)

const (
	syncSlack   = 30 * time.Second // silence beyond the hold after which another controller is asked
	joinPause   = 20 * time.Second
	changeWait  = 400 * time.Millisecond // what is new soon after goes along
	syncPause   = 5 * time.Second
	repeatAfter = 2 * time.Minute
	keepSettled = time.Hour
	maxSent     = 64
	maxReports  = 1000
	maxPasses   = 64
)

// machine is a node: its disk, its supervisors, and its agent.
type machine struct {
	s    *sim
	idx  int
	name string
	spec *apiv1.NodeSpec
	// cut: nothing gets to or from it.
	cut     bool
	powered bool
	boots   int

	// On disk.
	attempts  []*attempt
	journal   []*logv1.TaskReport
	journaled uint64

	// In memory, besides the agent: gone when the power fails.
	supervisors []*supervisor

	// The agent; lost when it is killed.
	up   bool
	life int
	agent
}

// agent is what the agent's process knows.
type agent struct {
	instance      *apiv1.Instance
	number, epoch uint32
	joined        bool
	at            int // the controller in use
	fails         int
	seen, holds   *apiv1.Revision
	desired       []*nodev1.DesiredAttempt
	settings      *apiv1.Settings
	sequence      uint64
	out           uint64 // sequence of the Sync whose answer is waited for
	soon          bool
	granted       uint64
	leaseEnd      time.Duration
	deadline      time.Duration
	sent          map[uint64]time.Duration
}

// attempt is an attempt on the node, with its record on disk.
type attempt struct {
	job     uint32
	fence   *apiv1.Fence
	started bool
	reaped  bool
	acked   bool
	steps   []*step

	// In memory.
	reaping bool
	ended   bool
	report  uint64
	settled time.Duration
}

// step is a step on the node; its record and the mark that it was reported are on disk.
type step struct {
	id       uint32
	order    *nodev1.DesiredAttempt
	want     *nodev1.DesiredStep
	sup      *supervisor // nil before it is launched
	result   *result     // on disk when it is over
	reported bool

	// In memory.
	phase     node.Phase
	ending    bool
	signalled uint32
	limitS    uint32
	report    uint64
	settled   time.Duration
}

// result is how a step ended on the node.
type result struct {
	failed, usersFault  bool
	timeLimit, deadline bool
	exit                *apiv1.TaskExit // of all its tasks; nil if none was executed
}

func (m *machine) find(job uint32, fence *apiv1.Fence) *attempt {
	for _, a := range m.attempts {
		if a.job == job && node.CompareFences(a.fence, fence) == 0 {
			return a
		}
	}
	return nil
}

func (a *attempt) step(id uint32) *step {
	for _, s := range a.steps {
		if s.id == id {
			return s
		}
	}
	return nil
}

// boot powers the node up.
func (m *machine) boot() {
	m.powered, m.boots = true, m.boots+1
	m.s.trace("node boots", uint64(m.idx), uint64(m.boots))
	m.startAgent()
}

// powerLoss takes everything but the disk.
func (m *machine) powerLoss() {
	m.s.trace("node loses power", uint64(m.idx))
	m.killAgent()
	m.powered = false
	for _, p := range m.supervisors {
		p.gone()
	}
	m.supervisors = nil
}

func (m *machine) killAgent() {
	if !m.up {
		return
	}
	m.s.trace("agent dies", uint64(m.idx))
	m.up = false
	m.life++
	m.agent = agent{}
}

// startAgent begins a life of the agent: it adopts what is there.
func (m *machine) startAgent() {
	if m.up || !m.powered {
		return
	}
	m.up = true
	m.life++
	m.agent = agent{
		instance: &apiv1.Instance{BootId: fmt.Sprintf("boot-%d-%d", m.idx, m.boots), Nonce: fmt.Sprintf("%d.%d", m.idx, m.boots)},
		at:       m.idx % members, sequence: uint64(m.s.now / time.Microsecond), sent: map[uint64]time.Duration{},
	}
	m.s.trace("agent starts", uint64(m.idx), uint64(len(m.attempts)), uint64(len(m.journal)))
	for _, a := range m.attempts {
		a.reaping, a.ended, a.report, a.settled = false, false, 0, 0
		for _, x := range slices.Clone(a.steps) {
			m.adopt(a, x)
		}
	}
	for _, r := range m.journal {
		if a := m.find(r.JobId, r.Fence); a != nil {
			switch {
			case r.GetStepEnded() != nil:
				a.reportedAs(r.GetStepEnded().StepId, r.JournalId)
			case r.GetPrepareFailed() != nil:
				a.reportedAs(r.GetPrepareFailed().GetStepId(), r.JournalId)
			case r.GetAttemptReaped() != nil:
				a.reaped, a.report = true, r.JournalId
			}
		}
	}
	m.join()
}

func (a *attempt) reportedAs(id uint32, report uint64) {
	if x := a.step(id); x != nil {
		x.reported, x.report = true, report
	}
}

// adopt finds out how far a step of an earlier life is.
func (m *machine) adopt(a *attempt, x *step) {
	x.ending, x.report, x.settled = false, 0, 0
	switch {
	case x.result != nil:
		x.phase = node.PhaseEnded
		if x.result.failed {
			x.phase = node.PhaseFailed
		}
	case x.sup != nil && !x.sup.lost:
		x.phase = node.PhasePrepared
		if x.sup.started {
			x.phase = node.PhaseRunning
		}
	case x.sup != nil && x.sup.started:
		// Its supervisor is gone with its tasks.
		x.result = &result{exit: &apiv1.TaskExit{Signal: 9, EndedBySupervisor: true}}
		x.phase = node.PhaseEnded
	default: // never launched, or never started: it is prepared again if it is still wanted
		a.steps = slices.DeleteFunc(a.steps, func(o *step) bool { return o == x })
		return
	}
	if x.result != nil && !x.reported {
		m.reportEnd(a, x)
	}
}

// later does something on behalf of this life of the agent.
func (m *machine) later(d time.Duration, do func()) {
	life := m.life
	m.s.after(d, func() {
		if m.life == life && m.up {
			do()
		}
	})
}

func (m *machine) join() {
	m.joined, m.holds = false, nil
	m.number, m.epoch = 0, 0
	m.tryJoin()
}

func (m *machine) tryJoin() {
	if m.joined {
		return
	}
	c, life := m.s.controllers[m.at], m.life
	request := &nodev1.JoinRequest{Spec: m.spec, Instance: m.instance, HighestJobId: m.highestJob()}
	m.s.send(m, c, shortDelays, func() {
		c.join(request, func(r *nodev1.JoinResponse) {
			m.s.send(c, m, shortDelays, func() {
				if m.life == life && !m.joined {
					m.admitted(r)
				}
			})
		})
	})
	if m.s.faulty && m.s.chance(1000) {
		// The network delivers it once more when the machine may have been booted anew: nothing waits for its answer.
		m.s.after(m.s.between(m.s.lease(), 3*m.s.lease()), func() {
			if c.up {
				c.join(request, func(*nodev1.JoinResponse) {})
			}
		})
	}
	m.later(m.s.between(joinPause/2, joinPause), func() {
		if !m.joined {
			m.at = (m.at + 1) % members
			m.tryJoin()
		}
	})
}

func (m *machine) highestJob() (highest uint32) {
	for _, a := range m.attempts {
		highest = max(highest, a.job)
	}
	return highest
}

func (m *machine) admitted(r *nodev1.JoinResponse) {
	m.s.trace("node joined", uint64(m.idx), uint64(r.Number), uint64(r.Epoch))
	m.joined, m.number, m.epoch, m.settings = true, r.Number, r.Epoch, r.Settings
	if compareRevisions(r.Revision, m.seen) > 0 {
		m.seen = r.Revision
	}
	m.sync()
}

// changed is called when something on the node is new for the controllers.
func (m *machine) changed() {
	if m.soon || !m.joined {
		return
	}
	m.soon = true
	m.later(changeWait, func() {
		m.soon = false
		if m.joined {
			m.sync()
		}
	})
}

// sync sends a Sync.
func (m *machine) sync() {
	s := m.s
	m.sequence++
	hold := s.lease() / 3
	request := &nodev1.SyncRequest{
		Node: m.number, Instance: m.instance, Epoch: m.epoch, Sequence: m.sequence, Seen: m.seen, Holds: m.holds, Actual: m.actual(),
		Reports: slices.Clone(m.journal[:min(len(m.journal), maxReports)]), LastGrant: m.granted, HoldMs: uint32(hold / time.Millisecond),
	}
	m.out = m.sequence
	m.sent[m.sequence] = s.now
	delete(m.sent, m.sequence-maxSent)
	c, life, sequence := s.controllers[m.at], m.life, m.sequence
	s.send(m, c, longDelays, func() {
		seen := request.Seen
		c.sync(request, func(r *nodev1.SyncResponse) {
			s.send(c, m, longDelays, func() {
				if r != nil && compareRevisions(r.Revision, seen) < 0 {
					s.fail("a Sync of node %d was answered at revision %v; it had seen %v", m.idx, r.Revision, seen)
				}
				if m.life == life && m.up {
					m.take(request, r)
				}
			})
		})
	})
	m.later(hold+syncSlack, func() {
		if m.out == sequence && m.joined {
			m.failed()
		}
	})
}

// failed turns to the next controller.
func (m *machine) failed() {
	m.at = (m.at + 1) % members
	m.fails++
	if m.fails < members {
		m.sync()
		return
	}
	m.out = 0
	m.later(m.s.between(syncPause/2, syncPause), func() {
		if m.out == 0 && m.joined {
			m.sync()
		}
	})
}

// take takes in an answer, of whatever Sync.
func (m *machine) take(request *nodev1.SyncRequest, r *nodev1.SyncResponse) {
	newest := request.Sequence == m.out
	if r == nil {
		if newest && m.joined {
			m.failed()
		}
		return
	}
	m.acknowledge(request, r.Acknowledged)
	m.grant(r.Grant)
	if r.Rejoin && m.joined && request.Epoch == m.epoch {
		m.s.trace("node must rejoin", uint64(m.idx))
		m.join()
		return
	}
	if !r.Rejoin && compareRevisions(r.Revision, m.seen) >= 0 {
		m.seen = r.Revision
		if !r.Unchanged {
			m.desired, m.holds = r.Desired, r.Revision
		}
		m.reconcile()
	}
	if newest && m.joined {
		m.fails = 0
		if m.out == request.Sequence { // reconcile may have sent one
			m.sync()
		}
	}
}

func (m *machine) acknowledge(request *nodev1.SyncRequest, id uint64) {
	if n := len(request.Reports); n > 0 {
		id = min(id, request.Reports[n-1].JournalId)
	} else {
		id = 0
	}
	for len(m.journal) > 0 && m.journal[0].JournalId <= id {
		r := m.journal[0]
		m.journal = m.journal[1:]
		a := m.find(r.JobId, r.Fence)
		if a == nil {
			continue
		}
		switch {
		case r.GetAttemptReaped() != nil:
			a.acked, a.settled = true, m.s.now
		case r.GetStepEnded() != nil:
			if x := a.step(r.GetStepEnded().StepId); x != nil {
				x.settled = m.s.now
			}
		case r.GetPrepareFailed() != nil:
			if x := a.step(r.GetPrepareFailed().GetStepId()); x != nil {
				x.settled = m.s.now
			}
		}
	}
}

// grant extends the lease from the sending of the Sync that won it.
func (m *machine) grant(g *nodev1.Grant) {
	if g == nil {
		return
	}
	sent, ok := m.sent[g.Sequence]
	if !ok {
		return
	}
	m.granted = max(m.granted, g.Sequence)
	end := sent + time.Duration(g.LeaseMs)*time.Millisecond
	if end <= m.leaseEnd {
		return
	}
	lapsed := m.deadline != 0 && m.s.now >= m.deadline
	m.leaseEnd = end
	m.deadline = max(m.deadline, end+time.Duration(g.FenceWindowMs)*time.Millisecond)
	for _, a := range m.attempts {
		for _, x := range a.steps {
			switch {
			case x.result != nil || !x.order.StopsItself:
			case x.sup != nil:
				x.sup.extend(m.deadline)
			case lapsed && x.phase == node.PhasePreparing:
				// Nobody may be left who would end it: the attempt may be accounted for.
				x.result, x.phase = &result{failed: true}, node.PhaseFailed
				m.reportEnd(a, x)
			}
		}
	}
}

func (m *machine) leased() bool { return m.s.now < m.leaseEnd }

func (m *machine) waits(report uint64) bool {
	return report != 0 && len(m.journal) > 0 && report >= m.journal[0].JournalId
}

func (m *machine) mayRepeat(report uint64, settled time.Duration) bool {
	return !m.waits(report) && m.s.now-settled >= repeatAfter
}

// reconcile carries out what node.Reconcile says until nothing is left.
func (m *machine) reconcile() {
	m.sweep()
	for range maxPasses {
		actions := node.Reconcile(m.desired, m.local())
		if len(actions) == 0 {
			return
		}
		for _, a := range actions {
			m.carryOut(a)
		}
	}
	m.s.fail("reconciling on node %d does not come to an end", m.idx)
}

func (m *machine) local() node.Local {
	l := node.Local{Node: m.number, Leased: m.leased()}
	for _, a := range m.attempts {
		if !slices.ContainsFunc(m.desired, func(o *nodev1.DesiredAttempt) bool { return o.Job.Id == a.job }) {
			continue
		}
		la := node.LocalAttempt{Job: a.job, Fence: a.fence, Started: a.started, Reaping: a.reaping, Reaped: a.reaped,
			Repeat: m.mayRepeat(a.report, a.settled)}
		for _, x := range a.steps {
			la.Steps = append(la.Steps, node.LocalStep{ID: x.id, Phase: x.phase, Ending: x.ending, Reported: x.reported,
				Repeat: m.mayRepeat(x.report, x.settled), SignalsDelivered: x.signalled, LimitS: x.limitS})
		}
		l.Attempts = append(l.Attempts, la)
	}
	return l
}

// sweep forgets what is over, acknowledged, and not spoken of any more.
func (m *machine) sweep() {
	m.attempts = slices.DeleteFunc(m.attempts, func(a *attempt) bool {
		return a.reaped && a.acked && m.s.now-a.settled > keepSettled &&
			!slices.ContainsFunc(m.desired, func(o *nodev1.DesiredAttempt) bool { return o.Job.Id == a.job })
	})
}

func (m *machine) carryOut(action node.Action) {
	m.s.trace("action", uint64(action.Kind), uint64(action.Job), uint64(action.Fence.Attempt), uint64(action.Fence.Placement), uint64(action.Step), uint64(m.idx))
	a := m.find(action.Job, action.Fence)
	var x *step
	if a != nil {
		x = a.step(action.Step)
	}
	switch action.Kind {
	case node.ActionAdmit:
		m.attempts = append(m.attempts, &attempt{job: action.Job, fence: action.Fence})
		m.s.admitted(m, action)
		m.changed()
	case node.ActionBegin:
		a.started = true
		m.changed()
	case node.ActionPrepare:
		m.prepare(a, action)
	case node.ActionStart:
		x.phase = node.PhaseStarting
		m.later(m.s.between(time.Millisecond, 50*time.Millisecond), func() { m.start(a, x) })
	case node.ActionEnd:
		m.end(a, x, time.Duration(action.GraceS)*time.Second)
		a.ended = a.ended || action.StepOrder == nil
		m.changed()
	case node.ActionSignal:
		x.signalled = action.Signal.Ordinal
	case node.ActionLimit:
		x.limitS = action.Order.TimeLimitS
		x.sup.setLimit(x.limitS)
	case node.ActionReap:
		a.reaping, a.ended = true, true
		m.later(m.s.between(10*time.Millisecond, 2*time.Second), func() { m.reaped(a) })
	case node.ActionReportReaped:
		a.settled = m.s.now
		m.reaped(a)
	case node.ActionReportEnded:
		x.settled = m.s.now
		m.reportEnd(a, x)
	case node.ActionReportMissing:
		m.missing(a, action)
	default:
		m.s.fail("action %d is not known", action.Kind)
	}
}

// prepare makes a step ready and launches its supervisor. One in a hundred fails, one in two hundred is very slow.
func (m *machine) prepare(a *attempt, action node.Action) {
	order := proto.CloneOf(action.Order)
	order.Steps = nil
	x := &step{id: action.Step, order: order, want: action.StepOrder, phase: node.PhasePreparing, limitS: action.Order.TimeLimitS}
	for _, signal := range action.Order.Signals {
		x.signalled = max(x.signalled, signal.Ordinal)
	}
	a.steps = append(a.steps, x)
	m.changed()
	wait := m.s.between(200*time.Millisecond, 20*time.Second)
	failing := m.s.faulty && m.s.chance(100)
	if m.s.faulty && m.s.chance(50) {
		wait = 30 * time.Minute
	}
	m.later(wait, func() {
		if x.phase != node.PhasePreparing {
			return
		}
		if failing {
			x.result = &result{failed: true, usersFault: m.s.chance(2000)}
			x.phase = node.PhaseFailed
			m.reportEnd(a, x)
			return
		}
		x.sup = &supervisor{m: m, job: a.job, fence: a.fence, step: x, deadline: m.deadline, limitS: x.limitS}
		m.supervisors = append(m.supervisors, x.sup)
		x.phase = node.PhasePrepared
		m.s.prepared(x.sup)
		x.sup.watch()
		m.changed()
		m.reconcile()
	})
}

// start tells the supervisor to execute the tasks.
func (m *machine) start(a *attempt, x *step) {
	if x.phase != node.PhaseStarting || x.ending {
		return
	}
	if !m.leased() || x.sup.lost || !x.sup.start() {
		x.phase = node.PhasePrepared // the next grant or Sync tries again
		return
	}
	if x.phase == node.PhaseStarting { // it may have ended at once
		x.phase = node.PhaseRunning
	}
	m.changed()
}

// end ends a step.
func (m *machine) end(a *attempt, x *step, grace time.Duration) {
	x.ending = true
	if x.sup == nil { // it was being prepared
		x.result = &result{}
		x.phase = node.PhaseEnded
		m.later(time.Millisecond, func() { m.reportEnd(a, x) })
		return
	}
	x.sup.terminate(grace)
}

// over is called when a step's supervisor has ended.
func (m *machine) over(p *supervisor) {
	a, x := m.find(p.job, p.fence), p.step
	if a == nil || a.step(x.id) != x {
		return
	}
	x.phase = node.PhaseEnded
	m.reportEnd(a, x)
}

func (m *machine) append(r *logv1.TaskReport) uint64 {
	m.journaled++
	r.JournalId = m.journaled
	m.journal = append(m.journal, r)
	return r.JournalId
}

// reportEnd puts the end of a step into the journal.
func (m *machine) reportEnd(a *attempt, x *step) {
	r := &logv1.TaskReport{JobId: a.job, Fence: a.fence}
	if x.result.failed {
		r.Event = &logv1.TaskReport_PrepareFailed{PrepareFailed: &logv1.PrepareFailed{
			StepId: proto.Uint32(x.id), Sentence: "node " + m.name + " could not prepare the step", UsersFault: x.result.usersFault}}
	} else {
		exit := x.result.exit
		if exit == nil {
			exit = &apiv1.TaskExit{Signal: 15, EndedBySupervisor: true}
		}
		e := &logv1.StepEnded{StepId: x.id, TimeLimit: x.result.timeLimit, Deadline: x.result.deadline}
		for _, rank := range x.want.Ranks {
			one := proto.CloneOf(exit)
			one.FirstRank, one.Count = rank, 1
			e.Exits = append(e.Exits, one)
		}
		r.Event = &logv1.TaskReport_StepEnded{StepEnded: e}
	}
	x.report, x.reported = m.append(r), true
	m.changed()
	if m.joined {
		m.later(time.Millisecond, m.reconcile)
	}
}

// reaped reports that nothing is left of an attempt.
func (m *machine) reaped(a *attempt) {
	m.s.checkReaped(m, a)
	a.report = m.append(&logv1.TaskReport{JobId: a.job, Fence: a.fence, Event: &logv1.TaskReport_AttemptReaped{AttemptReaped: &logv1.AttemptReaped{}}})
	a.reaping, a.ended, a.reaped, a.acked = false, true, true, false
	m.changed()
	m.reconcile()
}

// missing reports the end of a step of which nothing is known here.
func (m *machine) missing(a *attempt, action node.Action) {
	x := &step{id: action.Step, order: action.Order, want: action.StepOrder, phase: node.PhaseEnded, result: &result{}}
	if action.StepOrder.Want == nodev1.WorkState_WORK_STATE_RUNNING {
		x.result.exit = &apiv1.TaskExit{Signal: 9, EndedBySupervisor: true, LaunchError: "node " + m.name + " knows nothing of the step"}
	}
	a.steps = append(a.steps, x)
	m.reportEnd(a, x)
}

// actual describes what is on the node and not settled.
func (m *machine) actual() []*nodev1.ActualAttempt {
	var all []*nodev1.ActualAttempt
	for _, a := range m.attempts {
		if a.reaped && a.acked {
			continue
		}
		actual := &nodev1.ActualAttempt{JobId: a.job, Fence: a.fence, State: a.state(), Address: m.name}
		for _, x := range a.steps {
			actual.Steps = append(actual.Steps, &nodev1.ActualStep{StepId: x.id, State: x.state()})
		}
		all = append(all, actual)
	}
	return all
}

func (a *attempt) state() nodev1.WorkState {
	switch {
	case a.reaped:
		return nodev1.WorkState_WORK_STATE_ENDED
	case a.reaping || a.ended:
		return nodev1.WorkState_WORK_STATE_ENDING
	case a.started:
		return nodev1.WorkState_WORK_STATE_RUNNING
	}
	for _, x := range a.steps {
		if x.phase != node.PhasePrepared {
			return nodev1.WorkState_WORK_STATE_PREPARING
		}
	}
	return nodev1.WorkState_WORK_STATE_PREPARED
}

func (x *step) state() nodev1.WorkState {
	switch {
	case x.result != nil:
		return nodev1.WorkState_WORK_STATE_ENDED
	case x.ending:
		return nodev1.WorkState_WORK_STATE_ENDING
	case x.phase == node.PhasePrepared, x.phase == node.PhaseStarting:
		return nodev1.WorkState_WORK_STATE_PREPARED
	case x.phase == node.PhaseRunning:
		return nodev1.WorkState_WORK_STATE_RUNNING
	}
	return nodev1.WorkState_WORK_STATE_PREPARING
}
