package control

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/muster-hpc/muster/fsm"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

const (
	// lossEvery is how often nodes are looked over; a fiftieth of the default lease.
	lossEvery = 200 * time.Millisecond
	// lossRetry is the pause after which a refused or failed declaration is tried again.
	lossRetry = 2 * time.Second
)

// bounds are the settings of section 5 of the design.
type bounds struct {
	lease, window, lost time.Duration
	limit               int // b: the most nodes that may be overdue while nodes are declared lost
}

func boundsOf(v *fsm.View) bounds {
	s := v.Settings()
	ms := func(n uint32) time.Duration { return time.Duration(n) * time.Millisecond }
	n := uint64(v.NodeCount()) * uint64(s.GetLostLimitPercent())
	return bounds{
		lease: ms(s.GetLeaseMs()), window: ms(s.GetFenceWindowMs()), lost: ms(s.GetLostAfterMs()),
		limit: int(max(1, (n+99)/100)),
	}
}

// overdue is how long a node may be silent before it missed a renewal: renewals are due every third of the lease, and half a renewal is
// given for the way.
func (b bounds) overdue() time.Duration { return b.lease / 2 }

// declared names a declaration: about a node, or about one job there.
type declared struct{ node, job uint32 }

// survey is what one look over the nodes found.
type survey struct {
	bounds
	// overdue counts nodes that missed a renewal or do not echo their grants, however long ago, unless their death is proven.
	overdue int
	silent  map[uint32]bool
	lose    []*apiv1.Node
	fence   []*apiv1.Node
	// expired are nodes that are up and have had no grant for so long that what stops itself there has done so.
	expired map[uint32]bool
	stopped []stopped
}

// stopped is an attempt that has stopped itself on a node that is silent, though not for long enough to be lost: it ended before, or its
// peers broke with it.
type stopped struct {
	node    *apiv1.Node
	attempt *apiv1.Attempt
}

// look over all nodes at a time.
func (l *liveness) look(v *fsm.View, at time.Time) survey {
	s := survey{bounds: boundsOf(v), silent: map[uint32]bool{}, expired: map[uint32]bool{}}
	l.mu.Lock()
	defer l.mu.Unlock()
	for n := range v.Nodes() {
		x := l.of(n)
		if n.State != apiv1.NodeState_NODE_STATE_UP {
			if n.LostOnSilence {
				s.overdue++ // It may be alive, also if it was drained before.
			}
			if at.Sub(x.granted) >= s.lease+s.window && stopsItself(v, n) {
				s.fence = append(s.fence, n)
			}
			continue
		}
		silence := at.Sub(x.heard)
		if silence > s.bounds.overdue() || at.Sub(x.confirmed) > s.lease {
			s.overdue++
		}
		if silence > s.lease {
			s.silent[n.Number] = true
		}
		if at.Sub(x.granted) >= s.lease+s.window {
			s.expired[n.Number] = true
		}
		if silence >= s.lost {
			s.lose = append(s.lose, n)
		}
	}
	for n := range s.expired {
		s.findStopped(v, v.Node(n))
	}
	slices.SortFunc(s.stopped, func(a, b stopped) int {
		return cmp.Or(cmp.Compare(a.attempt.JobId, b.attempt.JobId), cmp.Compare(a.attempt.Number, b.attempt.Number),
			cmp.Compare(a.node.Number, b.node.Number))
	})
	return s
}

// findStopped finds what has stopped itself on a node without a lease and needs no more evidence: attempts that ended or left the node,
// and those whose tasks on all other nodes ended, some with an error.
func (s *survey) findStopped(v *fsm.View, n *apiv1.Node) {
	for a := range v.NodeAttempts(n.Number) {
		if j := v.Job(a.JobId); j == nil || !j.Spec.AutomaticRecovery {
			continue
		}
		if !live(a, n.Number) || s.brokenByPeers(v, a) {
			s.stopped = append(s.stopped, stopped{n, a})
		}
	}
}

// live tells whether an attempt has not ended on a node that is in its present placement.
func live(a *apiv1.Attempt, node uint32) bool {
	if a.State != apiv1.AttemptState_ATTEMPT_STATE_PREPARING && a.State != apiv1.AttemptState_ATTEMPT_STATE_RUNNING {
		return false
	}
	return slices.ContainsFunc(a.Placement.GetGroups(), func(g *apiv1.NodeGroup) bool { return slices.Contains(g.Nodes, node) })
}

// brokenByPeers tells whether a step of a running attempt has ended on every node that has a lease, with an error somewhere.
func (s *survey) brokenByPeers(v *fsm.View, a *apiv1.Attempt) bool {
	if a.State != apiv1.AttemptState_ATTEMPT_STATE_RUNNING {
		return false
	}
	for step := range v.AttemptSteps(a.JobId, a.Number) {
		if step.State != apiv1.StepState_STEP_STATE_RUNNING || len(step.Unreported) == 0 {
			continue
		}
		waits := slices.ContainsFunc(step.Unreported, func(n uint32) bool { return !s.expired[n] })
		failed := slices.ContainsFunc(step.Exits, func(x *apiv1.TaskExit) bool { return x.Code != 0 || x.Signal != 0 })
		if !waits && failed {
			return true
		}
	}
	return false
}

// concluding is the command that ends such an attempt, or accounts for it on the node if it has ended there.
func (s survey) concluding(x stopped) *logv1.Command {
	if live(x.attempt, x.node.Number) {
		return &logv1.Command{Op: &logv1.Command_EndAttempt{EndAttempt: &logv1.EndAttempt{
			JobId: x.attempt.JobId, Fence: x.attempt.Fence, Failure: apiv1.FailureClass_FAILURE_CLASS_HARDWARE, FaultNode: x.node.Number,
			Sentence: fmt.Sprintf("node %s was not heard of for %v, and the tasks on the other nodes failed", x.node.Spec.Name, s.lease+s.window),
		}}}
	}
	return &logv1.Command{Op: &logv1.Command_FenceNode{FenceNode: &logv1.FenceNode{
		Node: x.node.Number, Epoch: x.node.Epoch, JobId: x.attempt.JobId, Attempt: x.attempt.Number}}}
}

// losing is the command that declares a node lost.
func (s survey) losing(n *apiv1.Node) *logv1.Command {
	return &logv1.Command{Op: &logv1.Command_LoseNode{LoseNode: &logv1.LoseNode{
		Node: n.Number, Epoch: n.Epoch, Sentence: fmt.Sprintf("not heard of for %v", s.lost),
	}}}
}

// fencing is the command that accounts for the attempts of a lost node that stop themselves.
func fencing(n *apiv1.Node) *logv1.Command {
	return &logv1.Command{Op: &logv1.Command_FenceNode{FenceNode: &logv1.FenceNode{Node: n.Number, Epoch: n.Epoch - 1}}}
}

// stopsItself tells whether an ended attempt of a lost node waits to be accounted for, and stopped itself.
func stopsItself(v *fsm.View, n *apiv1.Node) bool {
	for a := range v.NodeAttempts(n.Number) {
		if a.State != apiv1.AttemptState_ATTEMPT_STATE_ENDING {
			continue
		}
		if j := v.Job(a.JobId); j != nil && j.Spec.AutomaticRecovery {
			return true
		}
	}
	return false
}

// loss is the duty that declares silent nodes lost, and accounts for attempts there that stop themselves.
func (r *reign) loss(ctx context.Context) error {
	later := map[declared]time.Time{} // declarations that did not succeed
	for pause(ctx, lossEvery) {
		v := r.cfg.Replica.View()
		if !v.Bootstrapped() {
			continue
		}
		at := time.Now()
		s := r.nodes.look(v, at)
		r.publish(s)
		r.alarm("health", withheld(v))
		if s.overdue > s.limit {
			r.alarm("overdue", fmt.Sprintf(
				"%d of %d nodes are overdue or do not echo their leases, more than the %d that may be: no node is declared lost until they "+
					"return, or an operator declares them down (scontrol update nodename=… state=down)", s.overdue, v.NodeCount(), s.limit))
			continue
		}
		r.alarm("overdue", "")
		var wg sync.WaitGroup
		var mu sync.Mutex
		declare := func(n *apiv1.Node, job uint32, what string, cmd *logv1.Command) {
			key := declared{n.Number, job}
			mu.Lock()
			wait := at.Before(later[key])
			mu.Unlock()
			if wait {
				return
			}
			wg.Go(func() {
				result, err := r.decide(ctx, cmd)
				switch {
				case err != nil && ctx.Err() != nil:
				case err != nil:
					r.log.Warn("a node could not be declared "+what, "node", n.Spec.Name, "error", err)
				case result.GetRefusal() != nil:
					r.log.Info("a declaration was refused", "node", n.Spec.Name, "what", what, "sentence", result.Refusal.Sentence)
				default:
					r.log.Warn("node declared "+what, "node", n.Spec.Name, "epoch", n.Epoch)
					return
				}
				mu.Lock()
				later[key] = time.Now().Add(lossRetry)
				mu.Unlock()
			})
		}
		for _, n := range s.lose {
			declare(n, 0, "lost", s.losing(n))
		}
		for _, n := range s.fence {
			declare(n, 0, "fenced", fencing(n))
		}
		for _, x := range s.stopped {
			declare(x.node, x.attempt.JobId, fmt.Sprintf("without job %d", x.attempt.JobId), s.concluding(x))
		}
		wg.Wait()
		for key, until := range later {
			if at.After(until) {
				delete(later, key)
			}
		}
	}
	return nil
}

// publish tells the planner and the status what a survey found.
func (r *reign) publish(s survey) {
	r.nodes.mu.Lock()
	changed := len(s.silent) != len(r.nodes.silent)
	for number := range s.silent {
		changed = changed || !r.nodes.silent[number]
	}
	r.nodes.silent = s.silent
	r.nodes.mu.Unlock()
	if changed {
		r.suspects.raise()
	}
	r.c.note(func(status *apiv1.SchedulerStatus) { status.OverdueNodes = uint32(s.overdue) })
}
