package control

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/muster-hpc/muster/fsm"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
	"github.com/muster-hpc/muster/sched"
)

const (
	// replaceSettle is how long the first node that could not prepare waits for others that can't either: they are replaced at once.
	replaceSettle = time.Second
	// placementsMost is the most placements of one attempt: a job that no node can prepare must not go through the cluster.
	placementsMost = 4
	// replaceTries is how often a replacement of the same nodes is proposed; it is refused when somebody else took the free node.
	replaceTries = 3
)

// unprepared are the nodes of an attempt that failed to prepare it, and those that are not ready yet.
func (g *gate) unprepared(v *fsm.View, key workKey, w *waiting, nodes []uint32) (failed []*apiv1.UnpreparedNode, unready []uint32) {
	marks := v.Attempt(key.job, key.attempt).GetUnprepared()
	for _, n := range nodes {
		if i := slices.IndexFunc(marks, func(u *apiv1.UnpreparedNode) bool { return u.Node == n }); i >= 0 {
			failed = append(failed, marks[i])
		} else if g.prepared(key, w, n) == nil {
			unready = append(unready, n)
		}
	}
	return failed, unready
}

// withoutFailed decides about an attempt of which some nodes could not prepare: others take their place, or it ends. nil and when to look
// again while others may fail still.
func (g *gate) withoutFailed(v *fsm.View, key workKey, w *waiting, nodes []uint32, at time.Time, timeout time.Duration) (*logv1.Command, time.Duration) {
	failed, unready := g.unprepared(v, key, w, nodes)
	if w.failedAt.IsZero() {
		w.failedAt = at
	}
	late := at.Sub(w.since) >= timeout
	if wait := w.failedAt.Add(replaceSettle).Sub(at); wait > 0 && len(unready) > 0 && !late {
		return nil, wait
	}
	leave := make([]uint32, 0, len(failed))
	for _, u := range failed {
		leave = append(leave, u.Node)
	}
	place := &logv1.Place{}
	if late && len(unready) > 0 {
		leave = append(leave, unready...)
		place.Unprepared, place.Sentence = unready, g.tardy(v, unready, timeout)
	}
	if cmd := g.replace(v, key, w, len(nodes), leave, place); cmd != nil {
		return cmd, 0
	}
	sentence := failed[0].Sentence
	if more := len(failed) - 1; more > 0 {
		sentence += fmt.Sprintf(" (and %d more nodes could not prepare)", more)
	}
	return ending(key, w, sentence, failed[0].Node), 0
}

// replace fills in a placement of the same attempt without the nodes that leave, nil if there is none or there were too many.
func (g *gate) replace(v *fsm.View, key workKey, w *waiting, nodes int, leave []uint32, place *logv1.Place) *logv1.Command {
	j, a := v.Job(key.job), v.Attempt(key.job, key.attempt)
	if j == nil || a == nil || len(leave) >= nodes || w.fence.Placement >= placementsMost || w.replacing >= replaceTries {
		return nil
	}
	g.spares.follow(v)
	r := &sched.Replacement{Job: waitingJob(j), Partition: j.Status.Partition, Avoid: map[sched.NodeID]bool{}}
	r.Job.Attempt = key.attempt
	for _, group := range a.Placement.Groups {
		r.Groups = append(r.Groups, groupOf(group, nil))
	}
	for _, n := range leave {
		r.Leave = append(r.Leave, sched.NodeID(n))
	}
	for n := range g.r.nodes.suspects() {
		r.Avoid[sched.NodeID(n)] = true
	}
	for _, u := range a.Unprepared {
		r.Avoid[sched.NodeID(u.Node)] = true
	}
	for _, l := range a.Leftovers {
		r.Avoid[sched.NodeID(l.Node)] = true
	}
	for n := range g.taken {
		r.Avoid[n] = true
	}
	p, ok := g.spares.view.Replace(r)
	if !ok {
		return nil
	}
	w.replacing++
	for _, group := range p.Groups {
		for _, n := range group.Nodes {
			g.taken[n] = true
		}
	}
	place.JobId, place.Attempt, place.PlacementNumber = key.job, key.attempt, w.fence.Placement+1
	place.Placement, place.Partition = placement(&p), p.Partition
	return &logv1.Command{Op: &logv1.Command_Place{Place: place}}
}

// tardy says which nodes did not get ready in time.
func (g *gate) tardy(v *fsm.View, late []uint32, timeout time.Duration) string {
	var names []string
	for _, n := range late[:min(namedNodes, len(late))] {
		names = append(names, v.Node(n).GetSpec().GetName())
	}
	who := "node " + names[0]
	if len(late) > 1 {
		who = "nodes " + strings.Join(names, ", ")
		if more := len(late) - len(names); more > 0 {
			who += fmt.Sprintf(" and %d more", more)
		}
	}
	return fmt.Sprintf("%s did not get ready within %v", who, timeout)
}

// ending is the command that ends an attempt which could not be launched.
func ending(key workKey, w *waiting, sentence string, fault uint32) *logv1.Command {
	return &logv1.Command{Op: &logv1.Command_EndAttempt{EndAttempt: &logv1.EndAttempt{
		JobId: key.job, Fence: w.fence, Failure: apiv1.FailureClass_FAILURE_CLASS_LAUNCH, Sentence: sentence, FaultNode: fault}}}
}
