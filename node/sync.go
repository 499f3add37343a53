package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"math/rand/v2"
	"slices"
	"time"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
)

// control is what the agent knows of the control plane. Guarded by Agent.mu.
type control struct {
	// addresses are the controllers' API addresses; current is the one in use.
	addresses []string
	current   string
	// number and epoch are the node's; 0 before the join.
	number, epoch uint32
	cluster       string
	settings      *apiv1.Settings
	// seen is the highest revision of any answer; holds is that of desired.
	seen, holds *apiv1.Revision
	desired     []*nodev1.DesiredAttempt
	// sequence of the last Sync sent.
	sequence uint64
	// rejoin: a controller said that the node must join again. joins counts the admissions.
	rejoin bool
	joins  int
}

func compareRevisions(a, b *apiv1.Revision) int {
	return cmp.Or(cmp.Compare(a.GetIncarnation(), b.GetIncarnation()),
		cmp.Compare(a.GetIndex(), b.GetIndex()),
		cmp.Compare(a.GetOrdinal(), b.GetOrdinal()))
}

// setMembers takes the controllers' addresses from an answer; those given at the start count while there is none.
func (c *control) setMembers(members []*apiv1.Member) {
	var addresses []string
	for _, m := range members {
		if m.GetApiAddress() != "" && m.GetQuarantine() == "" {
			addresses = append(addresses, m.GetApiAddress())
		}
	}
	if len(addresses) > 0 {
		slices.Sort(addresses)
		c.addresses = slices.Compact(addresses)
	}
}

// pick returns the controller to use: agents spread over controllers by their names.
func (c *control) pick(name string) string {
	if !slices.Contains(c.addresses, c.current) && len(c.addresses) > 0 {
		h := fnv.New32a()
		_, _ = h.Write([]byte(name)) // never fails
		c.current = c.addresses[int(h.Sum32()%uint32(len(c.addresses)))]
	}
	return c.current
}

// turn goes to the next controller.
func (c *control) turn(name string) string {
	c.current = c.after(c.pick(name))
	return c.current
}

// after returns the controller after address in the circle.
func (c *control) after(address string) string {
	if len(c.addresses) == 0 {
		return address
	}
	return c.addresses[(slices.Index(c.addresses, address)+1)%len(c.addresses)]
}

// ErrNotAdmitted is wrapped by the error of Run when no controller will ever admit the agent as it is.
var ErrNotAdmitted = errors.New("the node was not admitted")

// join introduces the agent until it is admitted. A name that another instance has is tried for two leases: that
// instance may be dead, and its lease not over.
func (a *Agent) join(ctx context.Context) error {
	name := a.cfg.Spec.GetName()
	var takenSince time.Duration
	for wait := joinRetryMin; ; wait = min(2*wait, joinRetryMax) {
		a.mu.Lock()
		address := a.control.pick(name)
		req := &nodev1.JoinRequest{Spec: a.cfg.Spec, Instance: a.instance, HighestJobId: a.highestJob()}
		a.mu.Unlock()
		callCtx, cancel := context.WithTimeout(ctx, joinTimeout)
		res, err := a.cfg.Controllers.Join(callCtx, address, req)
		cancel()
		if err == nil {
			a.joined(res)
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		detail := a.cfg.Refusal(err)
		if detail.GetReason() != "NODE_NAME_TAKEN" {
			a.log.Warn("a controller did not admit the node", "controller", address, "retry_in", wait, "err", err)
		}
		switch detail.GetReason() {
		case "NODE_NAME_TAKEN":
			if takenSince == 0 {
				takenSince = a.boot()
				a.nameTaken(detail)
			}
			if a.boot()-takenSince > 2*a.leaseLength() {
				return fmt.Errorf("%w: %s (tried for %s)", ErrNotAdmitted, detail.GetSentence(), (a.boot() - takenSince).Round(time.Second))
			}
		case "NOT_YOUR_NODE":
			return fmt.Errorf("%w: %s", ErrNotAdmitted, detail.GetSentence())
		default: // any other reason may pass: no leader yet, a controller that is leaving, a network that is down
			takenSince = 0
		}
		a.mu.Lock()
		a.control.turn(name)
		a.mu.Unlock()
		if !sleep(ctx, jitter(wait)) {
			return ctx.Err()
		}
	}
}

// nameTaken says once why the agent is not admitted yet.
func (a *Agent) nameTaken(detail *apiv1.ErrorDetail) {
	if a.reborn {
		a.log.Info("this machine was booted anew; the agent waits until the lease of the node's former life is over",
			"at_most", 2*a.leaseLength())
		return
	}
	a.log.Warn("the node's name is taken; the agent waits whether the one who has it is gone when its lease is over",
		"at_most", 2*a.leaseLength(), "said", detail.GetSentence())
}

func jitter(d time.Duration) time.Duration { return d/2 + rand.N(d/2+1) }

func (a *Agent) leaseLength() time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	if ms := a.control.settings.GetLeaseMs(); ms > 0 {
		return time.Duration(ms) * time.Millisecond
	}
	return defaultLease
}

// joined takes in the admission. Everything on the node stays as it is; what is desired is asked for anew.
func (a *Agent) joined(res *nodev1.JoinResponse) {
	a.mu.Lock()
	c := &a.control
	again := c.joins > 0 && c.number == res.GetNumber() && c.epoch == res.GetEpoch() && c.cluster == res.GetClusterName()
	c.joins++
	c.number, c.epoch, c.cluster, c.settings = res.GetNumber(), res.GetEpoch(), res.GetClusterName(), res.GetSettings()
	c.setMembers(res.GetMembers())
	if compareRevisions(res.GetRevision(), c.seen) > 0 {
		c.seen = res.GetRevision()
	}
	c.holds, c.rejoin = nil, false
	a.health.Configure(c.settings, c.cluster)
	a.mu.Unlock()
	level := slog.LevelInfo
	if again { // nothing that was not said before
		level = slog.LevelDebug
	}
	a.log.Log(context.Background(), level, "joined", "number", res.GetNumber(), "epoch", res.GetEpoch(), "cluster", res.GetClusterName())
	if a.cfg.Joined != nil {
		a.cfg.Joined(res)
	}
}

// exchange is one Sync on its way.
type exchange struct {
	sequence uint64
	address  string
	sentAt   time.Duration
	hold     time.Duration
	// last is the number of the last report in it; 0 if it had none.
	last uint64
	warm bool
	// joins is the number of admissions before it was sent.
	joins  int
	cancel context.CancelFunc
}

type answer struct {
	x   *exchange
	res *nodev1.SyncResponse
	err error
}

// talk is the state of syncLoop, which alone uses it.
type talk struct {
	a       *Agent
	answers chan answer
	out     []*exchange
	// newest is the Sync that is to be followed by the next; warm ones never are.
	newest *exchange
	// pending: a change waits for room among those that are out.
	pending bool
	fails   int
	warmed  time.Duration
	// slack is syncSlack, and more while all controllers are slow.
	slack time.Duration
}

// syncLoop speaks with the controllers until ctx ends or the node is not admitted again.
//
// Room for later: when every controller has failed, peers are asked to relay; that is one more address to turn to.
func (a *Agent) syncLoop(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	t := &talk{a: a, answers: make(chan answer, maxOutstanding+1), warmed: a.boot(), slack: syncSlack}
	defer func() {
		cancel()
		for len(t.out) > 0 { // each exchange answers once, and soon, because its context has ended
			t.remove((<-t.answers).x)
		}
	}()
	t.send(ctx, false)
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-a.news:
			if !t.space(ctx) {
				return ctx.Err()
			}
			t.send(ctx, false)
		case ans := <-t.answers:
			if err := t.handle(ctx, ans); err != nil {
				return err
			}
		}
	}
}

// space waits until the last Sync is long enough ago that changes which come together travel together.
func (t *talk) space(ctx context.Context) bool {
	if t.newest == nil {
		return true
	}
	if wait := syncSpacing - (t.a.boot() - t.newest.sentAt); wait > 0 {
		return sleep(ctx, wait)
	}
	return true
}

// send begins a Sync with the current controller; a warm one asks the next controller, without holding.
func (t *talk) send(ctx context.Context, warm bool) {
	a := t.a
	if len(t.out) >= maxOutstanding {
		t.out[0].cancel() // its answer, an error, comes soon
		if len(t.out) > maxOutstanding {
			t.pending = true
			return
		}
	}
	a.mu.Lock()
	c := &a.control
	x := &exchange{address: c.pick(a.cfg.Spec.GetName()), hold: a.holdTime(), warm: warm, joins: c.joins, sentAt: a.boot()}
	if warm {
		x.address, x.hold = c.after(x.address), 0
	}
	c.sequence++
	x.sequence = c.sequence
	req := &nodev1.SyncRequest{
		Node: c.number, Instance: a.instance, Epoch: c.epoch, Sequence: x.sequence, Seen: c.seen, Holds: c.holds,
		Actual: a.actual(), Reports: a.journal.Waiting(maxReports), LastGrant: a.lease.granted,
		HoldMs: uint32(x.hold / time.Millisecond),
	}
	req.Conditions, req.ConditionsKnown = a.conditions()
	if n := len(req.Reports); n > 0 {
		x.last = req.Reports[n-1].GetJournalId()
	}
	a.lease.sending(x.sequence, x.sentAt)
	a.mu.Unlock()
	t.out = append(t.out, x)
	if !warm {
		t.newest = x
	}
	callCtx, cancel := context.WithTimeout(ctx, x.hold+t.slack)
	x.cancel = cancel
	a.wg.Go(func() {
		res, err := a.cfg.Controllers.Sync(callCtx, x.address, req)
		cancel()
		t.answers <- answer{x, res, err} // has room: at most maxOutstanding+1 are out
	})
}

// holdTime is how long a controller may hold a Sync: a third of the lease. a.mu is held.
func (a *Agent) holdTime() time.Duration {
	if ms := a.control.settings.GetLeaseMs(); ms > 0 {
		return time.Duration(ms) * time.Millisecond / 3
	}
	return defaultLease / 3
}

func (t *talk) remove(x *exchange) {
	t.out = slices.DeleteFunc(t.out, func(o *exchange) bool { return o == x })
}

// handle takes in an answer and sends what comes next.
func (t *talk) handle(ctx context.Context, ans answer) error {
	a, x := t.a, ans.x
	t.remove(x)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	newest := x == t.newest
	if t.pending {
		t.pending, newest = false, true
	}
	if ans.err != nil {
		if !newest {
			return nil // given up, or overtaken
		}
		return t.failed(ctx, x, ans.err)
	}
	idle := a.take(x, ans.res)
	a.mu.Lock()
	rejoin := a.control.rejoin
	a.mu.Unlock()
	if rejoin {
		if err := a.join(ctx); err != nil {
			return err
		}
		t.send(ctx, false)
		return nil
	}
	if !newest {
		return nil
	}
	t.fails, t.slack = 0, max(t.slack/2, syncSlack)
	if idle && x.hold > idleSpacing && a.boot()-x.sentAt < idleSpacing/2 && !sleep(ctx, idleSpacing) {
		return ctx.Err()
	}
	if a.boot()-t.warmed > warmEvery {
		t.warmed = a.boot()
		t.send(ctx, true)
	}
	t.send(ctx, false)
	return nil
}

// failed turns to the next controller, at once unless all of them have failed in turn.
func (t *talk) failed(ctx context.Context, x *exchange, err error) error {
	a := t.a
	a.mu.Lock()
	next := a.control.turn(a.cfg.Spec.GetName())
	round := max(1, len(a.control.addresses))
	if !slices.Contains(a.lease.tried, x.address) {
		a.lease.tried = append(a.lease.tried, x.address)
	}
	a.mu.Unlock()
	t.fails++
	level := a.log.Debug
	if t.fails <= round {
		level = a.log.Warn
	}
	level("a controller did not answer a Sync; the next one is asked", "controller", x.address, "next", next,
		"after", a.boot()-x.sentAt, "err", err)
	if t.fails%round == 0 {
		t.slack = min(2*t.slack, syncSlackMost)
	}
	if t.fails >= round {
		shift := min(t.fails/round-1, 10)
		if !sleep(ctx, jitter(min(syncRetryMin<<shift, syncRetryMax))) {
			return ctx.Err()
		}
	}
	t.send(ctx, false)
	return nil
}

// take takes in an answer, of whatever Sync: acknowledgements count for the reports that were in it, grants for its
// sending, and what is desired if it is not older than what is known. It reports whether nothing was new.
func (a *Agent) take(x *exchange, res *nodev1.SyncResponse) (idle bool) {
	idle = !a.acknowledge(min(res.GetAcknowledged(), x.last))
	a.mu.Lock()
	defer a.mu.Unlock()
	c := &a.control
	a.takeGrant(x.address, res.GetGrant())
	if res.GetRejoin() {
		// Several Syncs may be out: what one says that was sent before the last admission is answered by that.
		c.rejoin = c.rejoin || x.joins == c.joins
		return false
	}
	if res.GetSettings() != nil {
		c.settings = res.GetSettings()
		a.health.Configure(c.settings, c.cluster)
	}
	if t := res.GetControllerTime(); t != nil {
		a.ailments.told(t.AsTime(), time.Now())
	}
	c.setMembers(res.GetMembers())
	revision := res.GetRevision()
	if revision == nil || compareRevisions(revision, c.seen) < 0 {
		return idle
	}
	c.seen = revision
	// An answer to a Sync that was overtaken has neither.
	if res.GetControllerTime() != nil && a.drained(res.GetDrainedByOperator()) {
		a.poke(a.resumed)
	}
	if !res.GetUnchanged() {
		c.desired, c.holds = res.GetDesired(), revision
		idle = false
	}
	a.poke(a.work) // also when unchanged: a report may be due once more
	return idle
}

// acknowledge settles the journal's lines up to id; false if none waited.
func (a *Agent) acknowledge(id uint64) bool {
	if id == 0 {
		return false
	}
	dropped, err := a.journal.Acknowledge(id)
	if err != nil {
		a.log.Warn("the journal could not be made smaller", "err", err)
	}
	if len(dropped) == 0 {
		return false
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	now := a.boot()
	for _, report := range dropped {
		at := a.attempts[keyOf(report.GetJobId(), report.GetFence())]
		if at == nil {
			continue
		}
		switch {
		case report.GetAttemptReaped() != nil:
			at.settled, at.record.Acknowledged = now, true
			a.save(at)
		case report.GetStepEnded() != nil:
			at.settle(report.GetStepEnded().GetStepId(), now)
		case report.GetPrepareFailed() != nil:
			at.settle(report.GetPrepareFailed().GetStepId(), now)
		}
	}
	return true
}

func (at *attempt) settle(id uint32, now time.Duration) {
	if s := at.steps[id]; s != nil {
		s.settled = now
	}
}

// highestJob is the highest job id that the agent knows. a.mu is held.
func (a *Agent) highestJob() uint32 {
	for key := range a.attempts {
		a.highest = max(a.highest, key.job)
	}
	return a.highest
}

// actual describes everything on the node that is not settled. a.mu is held.
func (a *Agent) actual() []*nodev1.ActualAttempt {
	var all []*nodev1.ActualAttempt
	orders := make(map[attemptKey]*nodev1.DesiredAttempt, len(a.control.desired))
	for _, order := range a.control.desired {
		orders[keyOf(order.GetJob().GetId(), order.GetFence())] = order
	}
	for key, at := range a.attempts {
		if at.record.GetReaped() && at.record.GetAcknowledged() {
			continue
		}
		actual := &nodev1.ActualAttempt{
			JobId: key.job, Fence: at.record.GetFence(), State: at.state(orders[key]), Address: a.cfg.Spec.GetTaskAddress(),
		}
		for _, s := range at.steps {
			actual.Steps = append(actual.Steps, &nodev1.ActualStep{StepId: s.id, State: s.state(), Port: s.record.GetPort(), PmiPort: s.pmiPort})
		}
		slices.SortFunc(actual.Steps, func(x, y *nodev1.ActualStep) int { return cmp.Compare(x.StepId, y.StepId) })
		all = append(all, actual)
	}
	slices.SortFunc(all, func(x, y *nodev1.ActualAttempt) int {
		return cmp.Or(cmp.Compare(x.JobId, y.JobId), CompareFences(x.Fence, y.Fence))
	})
	return all
}

// state is how far the attempt is under its order, nil if none is known: prepared when all steps that the order names are
// here and are, which is at once if it names none. Without an order nobody knows what is missing: an agent that was killed
// may have forgotten steps.
func (at *attempt) state(order *nodev1.DesiredAttempt) nodev1.WorkState {
	switch {
	case at.record.GetReaped():
		return nodev1.WorkState_WORK_STATE_ENDED
	case at.reaping || at.ended:
		return nodev1.WorkState_WORK_STATE_ENDING
	case at.record.GetStartBootNs() != 0:
		return nodev1.WorkState_WORK_STATE_RUNNING
	}
	for _, s := range at.steps {
		if s.phase != PhasePrepared {
			return nodev1.WorkState_WORK_STATE_PREPARING
		}
	}
	for _, want := range order.GetSteps() {
		if at.steps[want.GetStep().GetId()] == nil {
			return nodev1.WorkState_WORK_STATE_PREPARING
		}
	}
	if order == nil {
		return nodev1.WorkState_WORK_STATE_PREPARING
	}
	return nodev1.WorkState_WORK_STATE_PREPARED
}

func (s *step) state() nodev1.WorkState {
	switch {
	case s.phase.over():
		return nodev1.WorkState_WORK_STATE_ENDED
	case s.end != nil:
		return nodev1.WorkState_WORK_STATE_ENDING
	case s.phase == PhasePrepared, s.phase == PhaseStarting:
		return nodev1.WorkState_WORK_STATE_PREPARED
	case s.phase == PhaseRunning:
		return nodev1.WorkState_WORK_STATE_RUNNING
	}
	return nodev1.WorkState_WORK_STATE_PREPARING
}
