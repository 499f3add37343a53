package virtual

import (
	"slices"
	"time"

	"github.com/muster-hpc/muster/fsm"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	peerv1 "github.com/muster-hpc/muster/proto/muster/peer/v1"
	"github.com/muster-hpc/muster/rpc/server"
	"github.com/muster-hpc/muster/sched/control"
)

const (
	dutyWait     = 20 * time.Millisecond
	planEvery    = 60 * time.Second
	watchEvery   = 60 * time.Second
	expireEvery  = 10 * time.Minute
	beatWait     = 60 * time.Second // Syncs that carry no readiness wait this long for others
	tickWait     = 60 * time.Second // so long acknowledgements wait for an entry that is written anyway
	forwardLimit = 30 * time.Second
)

// controller is a member of the log with what serves agents and users beside it.
type controller struct {
	s      *sim
	id     int
	offset time.Duration // of its wall clock
	up     bool
	life   int
	disk   disk
	replicaState
	serving

	// As leader; nil before the entries of earlier terms are applied.
	manual *control.Manual
	duty   bool
	// ticking: a timer runs that writes an entry for acknowledgements.
	ticking bool
}

// serving is what a controller remembers of agents; it is lost in a crash.
type serving struct {
	sessions map[uint32]*session
	beats    []*peerv1.Beat // that wait to go to the leader
	flushAt  time.Duration
	// liveness are batches that wait for a commit, on the leader.
	liveness []batch
	// applying waits until an index is applied here.
	applying []indexWaiter
}

func newServing() serving { return serving{sessions: map[uint32]*session{}} }

type batch struct {
	beats   []*peerv1.Beat
	refused []uint32
	mark    uint64
	heard   time.Time
	since   time.Duration
	done    func(index uint64, refused []uint32)
}

type indexWaiter struct {
	index uint64
	do    func()
}

// session is one life of one agent at this controller, as in rpc/server.
type session struct {
	instance           *apiv1.Instance
	epoch              uint32
	sequence           uint64
	granted, delivered uint64
	deliveredAt        time.Duration
	hold               *hold
}

// hold is a Sync that waits for its answer.
type hold struct {
	request *nodev1.SyncRequest
	answer  func(*nodev1.SyncResponse)
}

func (c *controller) wall() time.Time { return c.s.wall().Add(c.offset) }

// reign begins the duties of a leader.
func (c *controller) reign() {
	c.s.trace("lead", uint64(c.id), c.disk.term)
	c.ticking = false
	c.manual = control.NewManual(c.principal().Name, c.disk.term, c.wall(), c.s.bugs.control)
	c.every(planEvery, c.duties)
	c.every(watchEvery, func() { c.decide(c.manual.Watch(c.view, c.wall())) })
	c.every(expireEvery, func() { c.decide(c.manual.Expire(c.view, c.wall())) })
	c.duties()
}

// every does something again and again while this reign lasts.
func (c *controller) every(d time.Duration, do func()) {
	manual := c.manual
	var again func()
	again = func() {
		if c.manual == manual && manual != nil {
			do()
			c.s.after(d, again)
		}
	}
	c.s.after(d, again)
}

// soon arranges that the duties are looked at.
func (c *controller) soon() {
	if c.manual == nil || c.duty {
		return
	}
	c.duty = true
	c.s.after(dutyWait, func() {
		c.duty = false
		c.duties()
	})
}

func (c *controller) duties() {
	if c.manual == nil {
		return
	}
	c.decide(c.manual.Plan(c.view, c.wall()))
	c.decide(c.manual.Start(c.view, c.wall()))
	if c.s.bugs.hasty {
		c.decide(c.hasty())
	}
}

// hasty places jobs again whose last attempt has ended and is not accounted for, on nodes that are free.
func (c *controller) hasty() []*logv1.Command {
	var commands []*logv1.Command
	var free []*apiv1.Node
	for n := range c.view.Nodes() {
		if n.State == apiv1.NodeState_NODE_STATE_UP && !n.Drain && len(n.Owners) == 0 {
			free = append(free, n)
		}
	}
	for a := range c.view.LiveAttempts() {
		if a.State != apiv1.AttemptState_ATTEMPT_STATE_ENDING || a.FinalState != apiv1.JobState_JOB_STATE_PENDING {
			continue
		}
		to := &apiv1.Placement{}
		for _, g := range a.Placement.Groups {
			take := min(len(g.Nodes), len(free))
			group := &apiv1.NodeGroup{CpuMask: g.CpuMask, GpuMask: g.GpuMask, MemoryMb: g.MemoryMb, Tasks: g.Tasks}
			for _, n := range free[:take] {
				group.Nodes = append(group.Nodes, n.Number)
				to.Epochs = append(to.Epochs, n.Epoch)
			}
			free = free[take:]
			if take > 0 {
				to.Groups = append(to.Groups, group)
			}
		}
		if len(to.Groups) == len(a.Placement.Groups) && len(to.Epochs) == len(a.Placement.Epochs) {
			commands = append(commands, &logv1.Command{DecidedInTerm: c.disk.term, Op: &logv1.Command_Place{Place: &logv1.Place{
				JobId: a.JobId, Attempt: a.Number + 1, PlacementNumber: 1, Placement: to, Partition: "main"}}})
		}
	}
	return commands
}

// decide proposes decisions.
func (c *controller) decide(commands []*logv1.Command) {
	for _, cmd := range commands {
		cmd.Principal = c.principal()
		manual := c.manual
		c.propose(cmd, func(r *logv1.Result, err error) {
			if c.manual != manual {
				return
			}
			if p := cmd.GetPlace(); p != nil {
				manual.Placed(p.JobId, r.GetRefusal() != nil, err != nil, c.wall())
			}
			c.soon()
		})
	}
}

// published is called when a new view is there.
func (c *controller) published(before *apiv1.Revision, busy bool) {
	if busy {
		c.soon()
	}
	keep := c.applying[:0]
	var due []indexWaiter
	for _, w := range c.applying {
		if w.index <= c.applied {
			due = append(due, w)
		} else {
			keep = append(keep, w)
		}
	}
	c.applying = keep
	for _, w := range due {
		w.do()
	}
	for number := range c.view.NodesTouchedSince(before) {
		c.settle(number)
	}
	c.acknowledge()
}

// acknowledge answers the batches of liveness for which an entry has committed that was proposed after they came.
func (c *controller) acknowledge() {
	if !c.leads || c.manual == nil {
		return
	}
	keep := c.liveness[:0]
	var due []batch
	for _, b := range c.liveness {
		if b.mark <= c.applied {
			due = append(due, b)
		} else {
			keep = append(keep, b)
		}
	}
	c.liveness = keep
	for _, b := range due {
		c.manual.Grant(b.beats, b.refused, b.heard)
		b.done(c.applied, b.refused)
	}
	c.tick()
}

// heard takes in a batch of liveness on the leader.
func (c *controller) heard(beats []*peerv1.Beat, done func(index uint64, refused []uint32)) {
	if c.manual == nil {
		return // no answer: the agents' next Syncs say the same again
	}
	at, before, answer := c.wall(), c.s.canonAt, done
	done = func(index uint64, refused []uint32) {
		if index <= before {
			c.s.fail("a lease was granted for entry %d, and entry %d had committed before it was asked for", index, before)
		}
		answer(index, refused)
	}
	refused := c.manual.Hear(c.view, beats, at)
	for _, b := range beats {
		if len(b.Actual) > 0 {
			c.soon()
		}
	}
	if c.s.bugs.grantUncommitted {
		c.manual.Grant(beats, refused, at)
		done(c.applied, refused)
		return
	}
	c.liveness = append(c.liveness, batch{beats, refused, c.disk.last() + 1, at, c.s.now, done})
	c.tick()
}

// tick writes an entry for acknowledgements that have waited for one long enough. At most one timer runs, or one such entry is on its way.
func (c *controller) tick() {
	if c.ticking || len(c.liveness) == 0 {
		return
	}
	c.ticking = true
	manual := c.manual
	again := func() {
		if c.manual == manual {
			c.ticking = false
			c.tick()
		}
	}
	c.s.after(max(0, c.liveness[0].since+tickWait-c.s.now), func() {
		if c.manual != manual || len(c.liveness) == 0 || c.s.now-c.liveness[0].since < tickWait {
			again()
			return
		}
		c.propose(&logv1.Command{Principal: c.principal(), DecidedInTerm: c.disk.term, Op: &logv1.Command_Tick{Tick: &logv1.Tick{}}},
			func(*logv1.Result, error) { again() })
	})
}

// forward has a command committed by the leader, whoever that is. done is called at most once, and not at all if an answer is lost.
func (c *controller) forward(cmd *logv1.Command, deadline time.Duration, done func(*logv1.Result)) {
	life := c.life
	again := func() {
		c.s.after(c.s.between(time.Second, 3*time.Second), func() {
			if c.life == life && c.s.now < deadline {
				c.forward(cmd, deadline, done)
			}
		})
	}
	switch {
	case c.leads:
		c.propose(cmd, func(r *logv1.Result, err error) {
			if err == nil {
				done(r)
			} else if c.life == life && c.up {
				again() // with the same request id
			}
		})
	case c.leader < 0 || c.leader == c.id:
		again()
	default:
		l := c.s.controllers[c.leader]
		c.s.send(c, l, longDelays, func() {
			l.propose(cmd, func(r *logv1.Result, err error) {
				c.s.send(l, c, shortDelays, func() {
					if c.life != life {
						return
					}
					if err != nil {
						again()
						return
					}
					c.whenApplied(r.GetRevision().GetIndex(), func() { done(r) })
				})
			})
		})
	}
}

func (c *controller) whenApplied(index uint64, do func()) {
	if c.applied >= index {
		do()
		return
	}
	c.applying = append(c.applying, indexWaiter{index, do})
}

// join lets an agent join.
func (c *controller) join(request *nodev1.JoinRequest, answer func(*nodev1.JoinResponse)) {
	if c.leads {
		c.joinHere(request, answer)
		return
	}
	if c.leader < 0 || c.leader == c.id {
		return
	}
	l, life := c.s.controllers[c.leader], c.life
	c.s.send(c, l, shortDelays, func() {
		l.joinHere(request, func(r *nodev1.JoinResponse) {
			c.s.send(l, c, shortDelays, func() {
				if c.life == life {
					answer(r)
				}
			})
		})
	})
}

func (c *controller) joinHere(request *nodev1.JoinRequest, answer func(*nodev1.JoinResponse)) {
	if c.manual == nil {
		return
	}
	manual := c.manual
	cmd, refusal := manual.Join(c.view, request, c.wall())
	if refusal != nil {
		return // the agent tries again
	}
	cmd.Principal = c.principal()
	c.propose(cmd, func(r *logv1.Result, err error) {
		if err != nil || r.Refusal != nil || c.manual != manual {
			return
		}
		manual.Joined(r, request.Instance, c.wall())
		answer(&nodev1.JoinResponse{Number: r.NodeNumber, Epoch: r.NodeEpoch, Revision: r.Revision, Settings: c.view.Settings()})
	})
}

// sync serves a Sync as rpc/server does.
func (c *controller) sync(request *nodev1.SyncRequest, answer func(*nodev1.SyncResponse)) {
	if fsm.CompareRevisions(c.view.Revision(), request.Seen) < 0 && !c.s.bugs.answerBelowSeen {
		answer(nil) // UNAVAILABLE
		return
	}
	if c.stranger(request) {
		answer(&nodev1.SyncResponse{Revision: c.view.Revision(), Rejoin: true})
		return
	}
	x := c.sessions[request.Node]
	if x == nil || x.epoch != request.Epoch || !sameInstance(x.instance, request.Instance) {
		x = &session{instance: request.Instance, epoch: request.Epoch}
		c.sessions[request.Node] = x
	}
	if request.Sequence <= x.sequence {
		answer(&nodev1.SyncResponse{Revision: c.view.Revision(), Unchanged: true})
		return
	}
	x.sequence = request.Sequence
	if x.hold != nil {
		x.hold.answer(&nodev1.SyncResponse{Revision: c.view.Revision(), Unchanged: true})
	}
	x.hold = &hold{request, answer}
	c.beat(request)
	if len(request.Reports) > 0 {
		c.report(x, x.hold)
		return
	}
	held := x.hold
	c.s.after(time.Duration(request.HoldMs)*time.Millisecond, func() {
		if x.hold == held && c.sessions[request.Node] == x {
			c.answer(x, 0)
		}
	})
	c.settle(request.Node)
}

func sameInstance(a, b *apiv1.Instance) bool {
	return a.GetBootId() == b.GetBootId() && a.GetNonce() == b.GetNonce()
}

func (c *controller) stranger(request *nodev1.SyncRequest) bool {
	node := c.view.Node(request.Node)
	return node == nil || node.State == apiv1.NodeState_NODE_STATE_DOWN || node.Epoch != request.Epoch ||
		!sameInstance(node.Instance, request.Instance)
}

// report has reports committed before the Sync is answered.
func (c *controller) report(x *session, h *hold) {
	request := h.request
	name := c.view.Node(request.Node).Spec.Name
	cmd := &logv1.Command{
		Principal: &apiv1.Principal{Kind: apiv1.PrincipalKind_PRINCIPAL_KIND_NODE, Name: name},
		Op: &logv1.Command_ReportTasks{ReportTasks: &logv1.ReportTasks{
			Node: request.Node, Epoch: request.Epoch, Instance: request.Instance, Reports: request.Reports}},
	}
	c.forward(cmd, c.s.now+forwardLimit, func(r *logv1.Result) {
		if x.hold == h && r.Refusal == nil {
			c.answer(x, request.Reports[len(request.Reports)-1].JournalId)
		}
	})
	c.s.after(forwardLimit, func() {
		if x.hold == h && c.sessions[request.Node] == x {
			c.answer(x, 0)
		}
	})
}

// settle answers a held Sync if it is time.
func (c *controller) settle(number uint32) {
	x := c.sessions[number]
	if x == nil || x.hold == nil || len(x.hold.request.Reports) > 0 {
		return
	}
	third := c.s.lease() / 3
	if c.news(x.hold.request) || x.granted > x.delivered && (c.s.now-x.deliveredAt >= third || x.hold.request.LastGrant == 0) {
		c.answer(x, 0)
	}
}

func (c *controller) news(request *nodev1.SyncRequest) bool {
	return c.stranger(request) || request.Holds == nil || fsm.CompareRevisions(c.view.NodeTouched(request.Node), request.Holds) > 0
}

func (c *controller) answer(x *session, acknowledged uint64) {
	h := x.hold
	x.hold = nil
	response := &nodev1.SyncResponse{Revision: c.view.Revision(), Acknowledged: acknowledged}
	if c.stranger(h.request) {
		response.Rejoin = true
		h.answer(response)
		return
	}
	if c.news(h.request) {
		response.Desired = server.Desired(c.view, h.request.Node)
	} else {
		response.Unchanged = true
	}
	if x.granted > x.delivered {
		x.delivered, x.deliveredAt = x.granted, c.s.now
		settings := c.view.Settings()
		response.Grant = &nodev1.Grant{Sequence: x.granted, LeaseMs: settings.LeaseMs, FenceWindowMs: settings.FenceWindowMs}
	}
	h.answer(response)
}

// beat queues the liveness of a Sync for the leader.
func (c *controller) beat(request *nodev1.SyncRequest) {
	b := &peerv1.Beat{Node: request.Node, Epoch: request.Epoch, Instance: request.Instance, Sequence: request.Sequence, LastGrant: request.LastGrant}
	wait := beatWait
	for _, a := range request.Actual {
		relevant := a.State == nodev1.WorkState_WORK_STATE_PREPARING || a.State == nodev1.WorkState_WORK_STATE_PREPARED
		for _, step := range a.Steps {
			relevant = relevant || step.State == nodev1.WorkState_WORK_STATE_PREPARING || step.State == nodev1.WorkState_WORK_STATE_PREPARED
		}
		if relevant {
			b.Actual = append(b.Actual, a)
			wait = 10 * time.Millisecond
		}
	}
	if i := slices.IndexFunc(c.beats, func(o *peerv1.Beat) bool { return o.Node == b.Node }); i >= 0 {
		c.beats[i] = b
	} else {
		c.beats = append(c.beats, b)
	}
	at := c.s.now + wait
	if len(c.beats) > 1 && c.flushAt > c.s.now && c.flushAt <= at {
		return
	}
	c.flushAt = at
	life := c.life
	c.s.after(wait, func() {
		if c.life == life && c.flushAt == at {
			c.passBeats()
		}
	})
}

// passBeats sends the beats that wait.
func (c *controller) passBeats() {
	beats := c.beats
	c.beats = nil
	if len(beats) == 0 {
		return
	}
	life := c.life
	done := func(index uint64, refused []uint32) {
		if c.life != life {
			return
		}
		c.whenApplied(index, func() {
			for _, b := range beats {
				x := c.sessions[b.Node]
				if slices.Contains(refused, b.Node) || x == nil || x.epoch != b.Epoch || !sameInstance(x.instance, b.Instance) {
					continue
				}
				x.granted = max(x.granted, b.Sequence)
				c.settle(b.Node)
			}
		})
	}
	switch {
	case c.leads:
		c.heard(beats, done)
	case c.leader >= 0 && c.leader != c.id:
		l := c.s.controllers[c.leader]
		c.s.send(c, l, longDelays, func() {
			l.heard(beats, func(index uint64, refused []uint32) {
				c.s.send(l, c, longDelays, func() { done(index, refused) })
			})
		})
	}
}
