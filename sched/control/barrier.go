package control

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/muster-hpc/muster/fsm"
	"github.com/muster-hpc/muster/fsm/state"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	"github.com/muster-hpc/muster/sched"
)

const (
	// barrierIdle is how long the barrier rests when nothing prepares.
	barrierIdle = time.Minute
	// startFirst and startMost bound the back-off of a start or an end that was refused or failed.
	startFirst, startMost = 50 * time.Millisecond, 5 * time.Second
	// namedNodes is how many nodes a sentence names.
	namedNodes = 3
)

// workKey names what prepares: an attempt, or a step of a running one.
type workKey struct {
	job, attempt, step uint32
	isStep             bool
}

// waiting is something that prepares, as watched by this leader.
type waiting struct {
	fence *apiv1.Fence
	since time.Time
	// first is the index of the first node that was not prepared at the last look; those before it stay prepared, mostly.
	first int
	// steps are those that each node must have prepared, besides knowing the attempt; nil before the first look, and for a step.
	steps    map[uint32][]uint32
	tries    int
	notUntil time.Time
	busy     bool
	// failedAt is when it was seen first that a node could not prepare; replacing counts the replacements proposed.
	failedAt  time.Time
	replacing int
}

// gate is the memory of the barrier.
type gate struct {
	r     *reign
	clock func() time.Time
	at    *apiv1.Revision
	mu    sync.Mutex
	// works is guarded by mu, and so are its values.
	works map[workKey]*waiting
	ended signal
	// spares knows which nodes are free; it follows the state only when nodes are to be replaced. taken are those chosen at this revision.
	spares mirror
	taken  map[sched.NodeID]bool
}

func newGate(r *reign, clock func() time.Time) *gate {
	return &gate{r: r, clock: clock, works: map[workKey]*waiting{}, ended: newSignal(), spares: mirror{nodesOnly: true}, taken: map[sched.NodeID]bool{}}
}

// barrier is the duty that starts what is prepared on all its nodes, and ends what does not get ready in time.
func (r *reign) barrier(ctx context.Context) error {
	g := newGate(r, time.Now)
	for ctx.Err() == nil {
		changed := r.cfg.Replica.Changed()
		next := g.round(ctx)
		timer := time.NewTimer(next)
		select {
		case <-changed:
		case <-r.ready:
		case <-g.ended:
		case <-timer.C:
		case <-ctx.Done():
		}
		timer.Stop()
	}
	return nil
}

// round looks at everything that prepares, and returns when to look again if nothing happens.
func (g *gate) round(ctx context.Context) time.Duration {
	v := g.r.cfg.Replica.View()
	if !v.Bootstrapped() {
		return barrierIdle
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.follow(v)
	at := g.clock()
	next := barrierIdle
	for key, w := range g.works {
		if w.busy {
			continue
		}
		if wait := w.notUntil.Sub(at); wait > 0 {
			next = min(next, wait)
			continue
		}
		if cmd, wait := g.due(v, key, w, at); cmd != nil {
			g.propose(ctx, key, w, cmd)
		} else {
			next = min(next, wait)
		}
	}
	return next
}

// due returns the command that starts something, replaces nodes of it or gives it up, or nil and when to look again.
func (g *gate) due(v *fsm.View, key workKey, w *waiting, at time.Time) (*logv1.Command, time.Duration) {
	timeout := time.Duration(v.Settings().GetPrepareTimeoutMs()) * time.Millisecond
	nodes := g.nodes(v, key)
	if w.steps == nil && !key.isStep {
		w.steps = expected(v, key)
	}
	if !key.isStep && slices.ContainsFunc(v.Attempt(key.job, key.attempt).GetUnprepared(), func(u *apiv1.UnpreparedNode) bool {
		return slices.Contains(nodes, u.Node)
	}) {
		return g.withoutFailed(v, key, w, nodes, at, timeout)
	}
	switch missing := g.missing(key, w, nodes); {
	case missing == 0 || g.r.cfg.Faults.StartUnprepared:
		return g.start(key, w, nodes), 0
	case at.Sub(w.since) >= timeout:
		return g.giveUp(v, key, w, nodes, timeout), 0
	default:
		return nil, w.since.Add(timeout).Sub(at)
	}
}

// tried notes that a command about it was proposed: until the back-off is over it is not proposed again.
func (w *waiting) tried(at time.Time) {
	w.tries++
	w.notUntil = at.Add(backoff(w.tries, startFirst, startMost))
}

// follow keeps works equal to what prepares in the state.
func (g *gate) follow(v *fsm.View) {
	changes, ok := v.ChangedSince(g.at)
	if !ok {
		seen := map[workKey]bool{}
		for a := range v.LiveAttempts() {
			g.attempt(v, a.JobId, a.Number, seen)
			for s := range v.AttemptSteps(a.JobId, a.Number) {
				g.step(v, s.JobId, s.Attempt, s.Id, seen)
			}
		}
		for key := range g.works {
			if !seen[key] {
				delete(g.works, key)
			}
		}
	} else {
		for c := range changes {
			switch c.Kind {
			case state.ChangeAttempt:
				g.attempt(v, c.Job, c.Attempt, nil)
				for s := range v.AttemptSteps(c.Job, c.Attempt) {
					g.step(v, s.JobId, s.Attempt, s.Id, nil)
				}
			case state.ChangeStep:
				g.step(v, c.Job, c.Attempt, c.Step, nil)
			case state.ChangeJob:
				if c.Removed {
					for key := range g.works {
						if key.job == c.Job {
							delete(g.works, key)
						}
					}
				}
			case state.ChangeNode, state.ChangeCluster:
			}
		}
	}
	if fsm.CompareRevisions(g.at, v.Revision()) != 0 {
		clear(g.taken)
	}
	g.at = v.Revision()
}

func (g *gate) attempt(v *fsm.View, job, number uint32, seen map[workKey]bool) {
	a := v.Attempt(job, number)
	prepares := a != nil && a.State == apiv1.AttemptState_ATTEMPT_STATE_PREPARING
	g.watch(workKey{job: job, attempt: number}, prepares, a.GetFence(), seen)
}

func (g *gate) step(v *fsm.View, job, attempt, id uint32, seen map[workKey]bool) {
	s, a := v.Step(job, attempt, id), v.Attempt(job, attempt)
	prepares := s != nil && s.State == apiv1.StepState_STEP_STATE_PREPARING && !s.Ending &&
		a.GetState() == apiv1.AttemptState_ATTEMPT_STATE_RUNNING
	g.watch(workKey{job: job, attempt: attempt, step: id, isStep: true}, prepares, a.GetFence(), seen)
}

// watch begins or ends watching something; a new fence begins anew.
func (g *gate) watch(key workKey, prepares bool, fence *apiv1.Fence, seen map[workKey]bool) {
	if !prepares {
		delete(g.works, key)
		return
	}
	if seen != nil {
		seen[key] = true
	}
	if w := g.works[key]; w == nil || w.fence.Placement != fence.Placement || w.fence.Incarnation != fence.Incarnation {
		g.works[key] = &waiting{fence: fence, since: g.clock()}
	}
}

// nodes returns the node numbers in rank order.
func (g *gate) nodes(v *fsm.View, key workKey) []uint32 {
	placement := v.Attempt(key.job, key.attempt).GetPlacement()
	if key.isStep {
		placement = v.Step(key.job, key.attempt, key.step).GetPlacement()
	}
	var nodes []uint32
	for _, group := range placement.GetGroups() {
		nodes = append(nodes, group.Nodes...)
	}
	return nodes
}

// expected returns the steps of an attempt that each node must prepare. That a node knows the attempt is not enough: an agent that was
// killed while it prepared has forgotten the step when it comes back.
func expected(v *fsm.View, key workKey) map[uint32][]uint32 {
	steps := map[uint32][]uint32{}
	for s := range v.AttemptSteps(key.job, key.attempt) {
		for _, group := range s.Placement.GetGroups() {
			for _, n := range group.Nodes {
				steps[n] = append(steps[n], s.Id)
			}
		}
	}
	return steps
}

// missing returns how many nodes are not known to be prepared: 0 if all are, else at least 1.
func (g *gate) missing(key workKey, w *waiting, nodes []uint32) int {
	for round := range 2 { // From the first that was missing; then all again, because an agent may have lost what it had.
		from := w.first
		if round == 1 {
			from = 0
		}
		for i := from; i < len(nodes); i++ {
			if g.prepared(key, w, nodes[i]) == nil {
				w.first = i
				return len(nodes) - i
			}
		}
	}
	return 0
}

// prepared returns what a node found out, nil if it is not prepared.
func (g *gate) prepared(key workKey, w *waiting, node uint32) *apiv1.PreparedNode {
	a := g.r.nodes.reported(node, key.job, w.fence)
	if a == nil {
		return nil
	}
	out := &apiv1.PreparedNode{Node: node, Address: a.Address}
	if !key.isStep && a.State != nodev1.WorkState_WORK_STATE_PREPARED {
		return nil
	}
	found := !key.isStep
	for _, id := range w.steps[node] {
		if !slices.ContainsFunc(a.Steps, func(s *nodev1.ActualStep) bool { return s.StepId == id }) {
			return nil
		}
	}
	for _, s := range a.Steps {
		if key.isStep && s.StepId != key.step {
			continue
		}
		if s.State != nodev1.WorkState_WORK_STATE_PREPARED {
			return nil
		}
		found = true
		out.Port, out.PmiPort = max(out.Port, s.Port), max(out.PmiPort, s.PmiPort)
	}
	if !found {
		return nil
	}
	return out
}

// start is the command that starts something on all its nodes.
func (g *gate) start(key workKey, w *waiting, nodes []uint32) *logv1.Command {
	var prepared []*apiv1.PreparedNode
	for _, n := range nodes {
		p := g.prepared(key, w, n)
		if p == nil { // Only with Faults.StartUnprepared.
			p = &apiv1.PreparedNode{Node: n}
		}
		prepared = append(prepared, p)
	}
	if key.isStep {
		return &logv1.Command{Op: &logv1.Command_StartStep{StartStep: &logv1.StartStep{
			JobId: key.job, StepId: key.step, Fence: w.fence, Prepared: prepared}}}
	}
	return &logv1.Command{Op: &logv1.Command_StartAttempt{StartAttempt: &logv1.StartAttempt{JobId: key.job, Fence: w.fence, Prepared: prepared}}}
}

// giveUp is the command for something that did not get ready in time: other nodes take the place of the late ones, or it ends.
func (g *gate) giveUp(v *fsm.View, key workKey, w *waiting, nodes []uint32, timeout time.Duration) *logv1.Command {
	var late []uint32
	for _, n := range nodes {
		if g.prepared(key, w, n) == nil {
			late = append(late, n)
		}
	}
	sentence := g.tardy(v, late, timeout)
	if key.isStep {
		return &logv1.Command{Op: &logv1.Command_EndStep{EndStep: &logv1.EndStep{
			JobId: key.job, StepId: key.step, Fence: w.fence, State: apiv1.StepState_STEP_STATE_FAILED, Sentence: sentence}}}
	}
	if cmd := g.replace(v, key, w, len(nodes), late, &logv1.Place{Unprepared: late, Sentence: sentence}); cmd != nil {
		return cmd
	}
	return ending(key, w, sentence, late[0])
}

// propose proposes side by side with others; when it did not succeed, it is tried again later. The caller holds mu.
func (g *gate) propose(ctx context.Context, key workKey, w *waiting, cmd *logv1.Command) {
	w.busy = true
	g.r.scope.start(func() error {
		result, err := g.r.decide(ctx, cmd)
		g.mu.Lock()
		w.busy = false
		w.tried(g.clock()) // After a success the next view no longer has it; until then it is not proposed again.
		g.mu.Unlock()
		switch {
		case ctx.Err() != nil:
		case err != nil:
			g.r.log.Warn("a start, replacement or end was not written", "job", key.job, "attempt", key.attempt, "error", err)
		case result.GetRefusal() != nil:
			g.r.log.Info("a start, replacement or end was refused", "job", key.job, "attempt", key.attempt, "sentence", result.Refusal.Sentence)
		}
		g.ended.raise()
		return nil
	})
}
