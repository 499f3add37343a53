package control

import (
	"context"
	"sync"
	"time"

	"github.com/muster-hpc/muster/fsm"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	peerv1 "github.com/muster-hpc/muster/proto/muster/peer/v1"
)

// recentBeats is how many beats of a node are remembered to recognise the grant that it echoes.
const recentBeats = 8

// liveness is what the leader knows of nodes being alive, from Syncs of this term only.
type liveness struct {
	began  time.Time
	mu     sync.Mutex
	lives  map[uint32]*life
	silent map[uint32]bool // replaced, never changed
}

// life is one node as heard of in this term. Times are when beats were received: the lease began before, when they were sent.
type life struct {
	epoch    uint32
	instance *apiv1.Instance
	sequence uint64
	heard    time.Time
	// granted is the newest beat that was acknowledged: no lease of the node began later.
	granted time.Time
	// confirmed is the newest beat whose grant the node echoed: it has had that lease for certain.
	confirmed time.Time
	recent    [recentBeats]beatTime
	next      int
	// actual has what the node reports of its attempts, by job.
	actual map[uint32]*nodev1.ActualAttempt
}

type beatTime struct {
	sequence uint64
	at       time.Time
}

func newLiveness(began time.Time) *liveness {
	return &liveness{began: began, lives: map[uint32]*life{}, silent: map[uint32]bool{}}
}

// of returns a node's life. A node not heard of has a lease that was granted when the term began. The caller holds mu.
func (l *liveness) of(n *apiv1.Node) *life {
	x := l.lives[n.Number]
	if x == nil {
		x = &life{epoch: n.Epoch, instance: n.Instance, heard: l.began, granted: l.began, confirmed: l.began}
		l.lives[n.Number] = x
	}
	return x
}

// joined begins a life: a join is as good as a beat with a confirmed grant.
func (l *liveness) joined(number, epoch uint32, instance *apiv1.Instance, at time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	granted := l.began
	if old := l.lives[number]; old != nil {
		granted = old.granted
		if sameInstance(old.instance, instance) {
			// An agent that was started again may count its Syncs anew.
			old.epoch, old.heard, old.confirmed, old.sequence, old.recent = epoch, at, at, 0, [recentBeats]beatTime{}
			return
		}
	}
	l.lives[number] = &life{epoch: epoch, instance: instance, heard: at, granted: granted, confirmed: at}
}

// pressing tells whether a beat's sender is not to be kept waiting for its lease: it has none yet, or none that was renewed in time; or
// something is being prepared there, which reports the next thing only when it was heard.
func (l *liveness) pressing(b *peerv1.Beat, at time.Time, renewal time.Duration) bool {
	if b.LastGrant == 0 || len(b.Actual) > 0 {
		return true
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	x := l.lives[b.Node]
	return x == nil || at.Sub(x.granted) > renewal
}

// hear takes in a beat; false if its sender is not the node's present life.
func (l *liveness) hear(v *fsm.View, b *peerv1.Beat, at time.Time) bool {
	n := v.Node(b.Node)
	if n == nil || n.State != apiv1.NodeState_NODE_STATE_UP || n.Epoch != b.Epoch || !sameInstance(n.Instance, b.Instance) {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	x := l.of(n)
	if x.epoch != b.Epoch || !sameInstance(x.instance, b.Instance) {
		x = &life{epoch: b.Epoch, instance: b.Instance, heard: at, granted: x.granted, confirmed: at}
		l.lives[b.Node] = x
	}
	if b.Sequence <= x.sequence {
		return true // An older one that came late says nothing new.
	}
	x.sequence, x.heard = b.Sequence, at
	for _, r := range x.recent {
		if r.sequence == b.LastGrant && r.sequence != 0 && r.at.After(x.confirmed) {
			x.confirmed = r.at
		}
	}
	x.recent[x.next] = beatTime{b.Sequence, at}
	x.next = (x.next + 1) % recentBeats
	x.actual = make(map[uint32]*nodev1.ActualAttempt, len(b.Actual))
	for _, a := range b.Actual {
		// Of two attempts of a job only the newer can prepare.
		if old := x.actual[a.JobId]; old == nil || old.Fence.GetAttempt() < a.Fence.GetAttempt() ||
			old.Fence.GetAttempt() == a.Fence.GetAttempt() && old.Fence.GetPlacement() < a.Fence.GetPlacement() {
			x.actual[a.JobId] = a
		}
	}
	return true
}

// grant notes that leases may begin with beats received at that time. It is called before the answer is given.
func (l *liveness) grant(beats []*peerv1.Beat, refused map[uint32]bool, at time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, b := range beats {
		if x := l.lives[b.Node]; x != nil && !refused[b.Node] && at.After(x.granted) {
			x.granted = at
		}
	}
}

// suspects are the nodes on which nothing new is placed. The map must not be changed.
func (l *liveness) suspects() map[uint32]bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.silent
}

// reported returns what a node says of a job's attempt under a fence, nil if nothing. The result must not be changed.
func (l *liveness) reported(node, job uint32, fence *apiv1.Fence) *nodev1.ActualAttempt {
	l.mu.Lock()
	defer l.mu.Unlock()
	x := l.lives[node]
	if x == nil {
		return nil
	}
	a := x.actual[job]
	if a == nil || a.Fence.GetIncarnation() != fence.Incarnation || a.Fence.GetAttempt() != fence.Attempt || a.Fence.GetPlacement() != fence.Placement {
		return nil
	}
	return a
}

func sameInstance(a, b *apiv1.Instance) bool {
	return a.GetBootId() == b.GetBootId() && a.GetNonce() == b.GetNonce()
}

// ReportLiveness takes in Syncs that controllers pass on. It answers when an entry proposed after it was called has committed: within a
// twentieth of the lease and a commit, and at once if one of the nodes has no lease or prepares something. Only then may leases be granted
// for these beats, by a controller that has applied the index in the answer. Beats of a node's former lives are listed as refused. Errors: ErrNotLeading; a bare error of ctx.
func (c *Control) ReportLiveness(ctx context.Context, beats []*peerv1.Beat) (*peerv1.ReportLivenessResponse, error) {
	r, err := c.current()
	if err != nil {
		return nil, err
	}
	at := time.Now()
	v := c.cfg.Replica.View()
	response := &peerv1.ReportLivenessResponse{Term: r.term}
	limits := boundsOf(v)
	refused, ready, patience := map[uint32]bool{}, false, limits.patience()
	for _, b := range beats {
		if !r.nodes.hear(v, b, at) {
			refused[b.Node] = true
			response.Refused = append(response.Refused, b.Node)
			continue
		}
		ready = ready || len(b.Actual) > 0
		if patience > 0 && r.nodes.pressing(b, at, limits.overdue()) {
			patience = 0
		}
	}
	if ready {
		r.ready.raise()
	}
	if c.cfg.Faults.GrantWithoutCommit {
		response.Index = v.Revision().GetIndex()
	} else if response.Index, err = r.committed(ctx, patience); err != nil {
		return nil, err
	}
	r.nodes.grant(beats, refused, at)
	return response, nil
}
