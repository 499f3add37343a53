package control

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/muster-hpc/muster/fsm"
	"github.com/muster-hpc/muster/fsm/replica"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
	peerv1 "github.com/muster-hpc/muster/proto/muster/peer/v1"
	"github.com/muster-hpc/muster/sched"
)

// ErrNotLeading is returned where this controller does not lead (any more). Ask the leader; nothing was granted or decided.
var ErrNotLeading = errors.New("this controller does not lead")

// ErrBlocked is returned while nothing may be decided because the controllers' digests differ without a majority.
var ErrBlocked = errors.New("the controllers' states differ and no majority agrees: nothing is decided until an operator restores one")

// RefusedError is a decision not to do what was asked; the detail is for the caller.
type RefusedError struct{ Detail *apiv1.ErrorDetail }

// Error is the detail's sentence.
func (e *RefusedError) Error() string { return e.Detail.GetSentence() }

// ErrorDetail returns the detail.
func (e *RefusedError) ErrorDetail() *apiv1.ErrorDetail { return e.Detail }

// Replica is what control needs of this controller's Raft member.
type Replica interface {
	// ID of this member.
	ID() string
	// Propose returns when the command is committed and applied here.
	Propose(context.Context, *logv1.Command) (*logv1.Result, error)
	// View is the newest published state.
	View() *fsm.View
	// Changed is closed at the next publication.
	Changed() <-chan struct{}
	// WaitIndex returns a view at that index or later.
	WaitIndex(context.Context, uint64) (*fsm.View, error)
	// DigestAt returns this member's digest at a marked entry.
	DigestAt(index uint64) (uint64, bool)
	// Quarantine stops this member from serving.
	Quarantine(reason string)
	// Servers are the members of the Raft group.
	Servers() []replica.Server
	// Promote lets a learner vote; replica.ErrNotCaughtUp if it lags.
	Promote(ctx context.Context, id string) error
	// Remove takes a member out of the group.
	Remove(ctx context.Context, id string) error
	// Transfer hands leadership to a voter.
	Transfer(ctx context.Context, id string) error
}

// Peers reaches the other controllers by the ids of their members.
type Peers interface {
	// Digest asks a member for its digest at a marked entry.
	Digest(ctx context.Context, member string, index uint64) (*peerv1.DigestResponse, error)
	// Quarantine tells a member that its state differs from the majority's.
	Quarantine(ctx context.Context, member string, request *peerv1.QuarantineRequest) error
}

// Faults are bugs planted on purpose, to see that tests of the guarantees fail then. No program sets any.
type Faults struct {
	// GrantWithoutCommit acknowledges liveness at once (breaks the lease of section 5 of the design).
	GrantWithoutCommit bool
	// StartUnprepared starts a gang without waiting for its nodes (breaks G5).
	StartUnprepared bool
}

// Config describes a Control.
type Config struct {
	// Replica is this controller's Raft member.
	Replica Replica
	// Peers reaches the others; nil in a group of one.
	Peers Peers
	// Block is called with a sentence when the digests differ without a majority, and with an empty one when that is over. May be nil.
	Block func(sentence string)
	// Log is required.
	Log *slog.Logger
	// Faults are for tests.
	Faults Faults
}

// Control leads when told to. Its methods may be called at any time from any goroutine.
type Control struct {
	cfg    Config
	limits sched.Limits // of a pass; only tests change them
	mu     sync.Mutex
	reign  *reign
	status apiv1.SchedulerStatus // of the last reign; guarded by mu
}

// New returns a Control that does not lead yet. It starts nothing.
func New(cfg Config) *Control { return &Control{cfg: cfg, limits: sched.DefaultLimits()} }

// reign is one term of leadership and all that is remembered in it.
type reign struct {
	c     *Control
	cfg   *Config
	log   *slog.Logger
	term  uint64
	began time.Time
	ctx   context.Context
	scope *scope

	nodes   *liveness
	commits commits
	// suspects tells the planner that the set of silent nodes changed; ready tells the barrier that nodes reported.
	suspects, ready signal

	mu      sync.Mutex
	blocked string
	// blockedAt is the index at which states differ; only the digest duty uses it.
	blockedAt uint64
	alarms    map[string]string
	joining   map[string]chan struct{}
}

// Lead does the leader's duties in a term until ctx ends; it returns when all of them have ended. It is given to replica.Lead.
func (c *Control) Lead(ctx context.Context, term uint64) error {
	s := newScope(ctx)
	r := &reign{
		c: c, cfg: &c.cfg, log: c.cfg.Log.With("term", term), term: term, began: time.Now(), ctx: s.ctx, scope: s,
		suspects: newSignal(), ready: newSignal(), alarms: map[string]string{}, joining: map[string]chan struct{}{},
	}
	r.nodes = newLiveness(r.began)
	r.commits.wake = newSignal()
	c.mu.Lock()
	c.reign, c.status = r, apiv1.SchedulerStatus{}
	c.mu.Unlock()
	for _, duty := range []struct {
		name string
		do   func(context.Context) error
	}{
		{"plan", r.plan},
		{"barrier", r.barrier},
		{"commit", r.commit},
		{"loss", r.loss},
		{"expiry", r.expire},
		{"limits", r.limits},
		{"digests", r.digests},
		{"members", r.members},
	} {
		s.start(func() error {
			if err := duty.do(s.ctx); err != nil && s.ctx.Err() == nil {
				return fmt.Errorf("duty %s of term %d: %w", duty.name, term, err)
			}
			return nil
		})
	}
	err := s.wait()
	c.mu.Lock()
	if c.reign == r {
		c.reign = nil
	}
	c.mu.Unlock()
	return err
}

// current returns the reign, or ErrNotLeading.
func (c *Control) current() (*reign, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.reign == nil || c.reign.ctx.Err() != nil {
		return nil, ErrNotLeading
	}
	return c.reign, nil
}

// Status returns counters of the last pass and what keeps the leader from deciding; zero on a controller that never led.
func (c *Control) Status() *apiv1.SchedulerStatus {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := &apiv1.SchedulerStatus{
		Passes: c.status.Passes, LastPassUs: c.status.LastPassUs, LastConsidered: c.status.LastConsidered,
		Placed: c.status.Placed, LastPassTime: c.status.LastPassTime, OverdueNodes: c.status.OverdueNodes,
	}
	if c.reign != nil {
		s.Alarms = c.reign.alarmList()
	}
	return s
}

func (c *Control) note(change func(*apiv1.SchedulerStatus)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	change(&c.status)
}

// alarm raises an alarm under a key, or ends it with an empty sentence. It is logged when it changes.
func (r *reign) alarm(key, sentence string) {
	r.mu.Lock()
	old := r.alarms[key]
	if sentence == "" {
		delete(r.alarms, key)
	} else {
		r.alarms[key] = sentence
	}
	r.mu.Unlock()
	switch {
	case sentence != "" && old == "":
		r.log.Error("alarm", "alarm", key, "sentence", sentence)
	case sentence == "" && old != "":
		r.log.Info("alarm is over", "alarm", key)
	}
}

func (r *reign) alarmList() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var list []string
	for _, sentence := range r.alarms {
		list = append(list, sentence)
	}
	slices.Sort(list)
	return list
}

// block stops all decisions with a sentence, or allows them again with an empty one.
func (r *reign) block(sentence string) {
	r.mu.Lock()
	changed := r.blocked != sentence
	r.blocked = sentence
	r.mu.Unlock()
	r.alarm("digests", sentence)
	if changed && r.cfg.Block != nil {
		r.cfg.Block(sentence)
	}
}

func (r *reign) isBlocked() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.blocked != ""
}

// decide proposes a decision of this term. Every entry that commits also acknowledges the liveness that came in before it was proposed.
func (r *reign) decide(ctx context.Context, cmd *logv1.Command) (*logv1.Result, error) {
	if r.isBlocked() {
		return nil, ErrBlocked
	}
	cmd.DecidedInTerm = r.term
	cmd.Principal = &apiv1.Principal{Kind: apiv1.PrincipalKind_PRINCIPAL_KIND_MEMBER, Name: r.cfg.Replica.ID()}
	before := r.commits.cut()
	result, err := r.cfg.Replica.Propose(ctx, cmd)
	if err != nil {
		return nil, err
	}
	if index := result.GetRevision().GetIndex(); index > 0 {
		r.commits.done(before, index)
	}
	return result, nil
}

// now is the time for decisions: the leader's clock, never behind the state's.
func now(v *fsm.View) time.Time {
	t := time.Now()
	if s := v.StateTime(); s.After(t) {
		return s
	}
	return t
}

// stamp is a time as a message.
func stamp(t time.Time) *timestamppb.Timestamp { return timestamppb.New(t) }
