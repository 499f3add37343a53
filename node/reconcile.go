package node

import (
	"cmp"
	"slices"

	"github.com/muster-hpc/muster/node/environ"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
)

// Phase is how far a step is on the node.
type Phase uint8

// The phases of a step.
const (
	// PhasePreparing: its directory is made, its supervisor launched.
	PhasePreparing Phase = iota + 1
	// PhasePrepared: its supervisor waits for the start.
	PhasePrepared
	// PhaseStarting: the start was handed to the supervisor.
	PhaseStarting
	// PhaseRunning: its tasks were executed.
	PhaseRunning
	// PhaseEnded: nothing of it is left, and its result is known.
	PhaseEnded
	// PhaseFailed: it could not be prepared; nothing was executed.
	PhaseFailed
)

// over reports whether nothing of the step can run any more.
func (p Phase) over() bool { return p == PhaseEnded || p == PhaseFailed }

// LocalStep is a step as it is on the node.
type LocalStep struct {
	// ID of the step.
	ID uint32
	// Phase it is in.
	Phase Phase
	// Ending: its end was ordered.
	Ending bool
	// Reported: its end or failure is in the journal, or was.
	Reported bool
	// Repeat: that report was acknowledged long enough ago to be sent once more if the controllers still wait for it.
	Repeat bool
	// SignalsDelivered is the ordinal of the last signal that reached it, or that was ordered before it existed.
	SignalsDelivered uint32
	// LimitS is the attempt's time limit in seconds that its supervisor enforces.
	LimitS uint32
}

// LocalAttempt is an attempt as it is on the node.
type LocalAttempt struct {
	// Job it belongs to.
	Job uint32
	// Fence under which it came here.
	Fence *apiv1.Fence
	// Started: an order to start it was seen.
	Started bool
	// Reaping: what is left of it is being looked for.
	Reaping bool
	// Reaped: nothing is left, and the report is in the journal, or was.
	Reaped bool
	// Repeat: that report was acknowledged long enough ago to be sent once more if the controllers still wait for it.
	Repeat bool
	// Steps of it, in any order.
	Steps []LocalStep
}

// Local is everything that Reconcile needs to know of the node.
type Local struct {
	// Node is the node's number.
	Node uint32
	// Leased: the lease is valid.
	Leased bool
	// Attempts on the node, in any order.
	Attempts []LocalAttempt
}

// ActionKind says what is to be done.
type ActionKind uint8

// The kinds of actions.
const (
	// ActionAdmit: remember an attempt that is new here.
	ActionAdmit ActionKind = iota + 1
	// ActionBegin: remember that the attempt was started.
	ActionBegin
	// ActionPrepare: prepare a step.
	ActionPrepare
	// ActionStart: start a prepared step.
	ActionStart
	// ActionEnd: end a step.
	ActionEnd
	// ActionSignal: deliver a signal to a step.
	ActionSignal
	// ActionLimit: tell a step's supervisor another time limit.
	ActionLimit
	// ActionReap: make sure that nothing of the attempt is left, then report it.
	ActionReap
	// ActionReportReaped: report once more that nothing is left.
	ActionReportReaped
	// ActionReportEnded: report the end of a step once more.
	ActionReportEnded
	// ActionReportMissing: report the end of a step of which the node knows nothing, and which therefore never starts.
	ActionReportMissing
)

// Action is one thing to do.
type Action struct {
	// Kind of the action.
	Kind ActionKind
	// Job and Fence of the attempt.
	Job   uint32
	Fence *apiv1.Fence
	// Step id, for actions on steps.
	Step uint32
	// Order is what the controllers want of the attempt; nil where an attempt ends because a later one takes its place.
	Order *nodev1.DesiredAttempt
	// StepOrder is what they want of the step; nil for actions that end steps with their attempt.
	StepOrder *nodev1.DesiredStep
	// Signal to deliver.
	Signal *apiv1.SignalOrder
	// GraceS is the number of seconds between TERM and KILL.
	GraceS uint32
	// Sentence says why it ends.
	Sentence string
}

// CompareFences orders fences: by incarnation, attempt, placement.
func CompareFences(a, b *apiv1.Fence) int {
	return cmp.Or(cmp.Compare(a.GetIncarnation(), b.GetIncarnation()),
		cmp.Compare(a.GetAttempt(), b.GetAttempt()),
		cmp.Compare(a.GetPlacement(), b.GetPlacement()))
}

// Reconcile compares what the controllers desire, which is complete, with what is on the node, and returns what is to be
// done now, in this order. It is pure. The caller records each action as begun before it calls again; the result is
// empty when nothing more can be done until something changes.
//
// What is absent from desired is left alone. An end is always explicit: an order that wants ENDED under the same fence,
// or an order to run a later placement or attempt of the same job here.
func Reconcile(desired []*nodev1.DesiredAttempt, local Local) []Action {
	var r reconciler
	r.local = local
	for _, order := range desired {
		if here := r.find(order.GetJob().GetId(), order.GetFence()); here != nil {
			r.known(order, here)
		} else {
			r.unknown(order)
		}
	}
	return r.actions
}

type reconciler struct {
	local   Local
	actions []Action
}

func (r *reconciler) find(job uint32, fence *apiv1.Fence) *LocalAttempt {
	for i := range r.local.Attempts {
		a := &r.local.Attempts[i]
		if a.Job == job && CompareFences(a.Fence, fence) == 0 {
			return a
		}
	}
	return nil
}

func (r *reconciler) do(a Action) { r.actions = append(r.actions, a) }

// unknown handles an order for an attempt that the node does not know.
func (r *reconciler) unknown(order *nodev1.DesiredAttempt) {
	job, fence := order.GetJob().GetId(), order.GetFence()
	switch order.GetWant() {
	case nodev1.WorkState_WORK_STATE_ENDED:
		// Nothing of it is here, which must be said, and remembered. An earlier placement of the attempt may be here, if the node never
		// heard of this one: it ends with it, and is gone before that is said.
		clear := true
		for i := range r.local.Attempts {
			a := &r.local.Attempts[i]
			if a.Job == job && !a.Reaped && a.Fence.GetIncarnation() == fence.GetIncarnation() &&
				a.Fence.GetAttempt() == fence.GetAttempt() && a.Fence.GetPlacement() < fence.GetPlacement() {
				clear = false
				r.end(a, nil, order.GetKillGraceS(), order.GetEndSentence())
			}
		}
		if !clear {
			return
		}
	case nodev1.WorkState_WORK_STATE_PREPARED, nodev1.WorkState_WORK_STATE_RUNNING:
		clear := true
		for i := range r.local.Attempts {
			a := &r.local.Attempts[i]
			if a.Job != job {
				continue
			}
			if CompareFences(a.Fence, fence) > 0 {
				return // a later placement is here already: the order is old
			}
			if !a.Reaped {
				clear = false
				r.end(a, nil, order.GetKillGraceS(), "A later placement of the job takes its place.")
			}
		}
		if !clear {
			return
		}
	case nodev1.WorkState_WORK_STATE_UNSPECIFIED, nodev1.WorkState_WORK_STATE_PREPARING, nodev1.WorkState_WORK_STATE_ENDING:
		return // nothing that may be ordered
	}
	r.do(Action{Kind: ActionAdmit, Job: job, Fence: fence, Order: order})
}

// known handles an order for an attempt that is here.
func (r *reconciler) known(order *nodev1.DesiredAttempt, here *LocalAttempt) {
	switch order.GetWant() {
	case nodev1.WorkState_WORK_STATE_ENDED:
		if here.Reaped {
			if here.Repeat {
				r.do(Action{Kind: ActionReportReaped, Job: here.Job, Fence: here.Fence, Order: order})
			}
			return
		}
		r.end(here, order, order.GetKillGraceS(), order.GetEndSentence())
	case nodev1.WorkState_WORK_STATE_PREPARED, nodev1.WorkState_WORK_STATE_RUNNING:
		if here.Reaped || here.Reaping {
			return // it was ended; an older order does not bring it back
		}
		if order.GetWant() == nodev1.WorkState_WORK_STATE_RUNNING && !here.Started {
			r.do(Action{Kind: ActionBegin, Job: here.Job, Fence: here.Fence, Order: order})
		}
		for _, s := range order.GetSteps() {
			r.step(order, here, s)
		}
	case nodev1.WorkState_WORK_STATE_UNSPECIFIED, nodev1.WorkState_WORK_STATE_PREPARING, nodev1.WorkState_WORK_STATE_ENDING:
	}
}

// end ends all steps of an attempt; when they are over and reported it reaps what is left.
func (r *reconciler) end(here *LocalAttempt, order *nodev1.DesiredAttempt, graceS uint32, sentence string) {
	if here.Reaping {
		return
	}
	over := true
	for _, s := range here.Steps {
		if !s.Phase.over() {
			over = false
			if !s.Ending {
				r.do(Action{Kind: ActionEnd, Job: here.Job, Fence: here.Fence, Step: s.ID, Order: order, GraceS: graceS, Sentence: sentence})
			}
		} else if !s.Reported {
			over = false
		}
	}
	if over {
		r.do(Action{Kind: ActionReap, Job: here.Job, Fence: here.Fence, Order: order})
	}
}

// step handles an order for one step of a live attempt.
func (r *reconciler) step(order *nodev1.DesiredAttempt, here *LocalAttempt, want *nodev1.DesiredStep) {
	id := want.GetStep().GetId()
	action := Action{Job: here.Job, Fence: here.Fence, Step: id, Order: order, StepOrder: want}
	i := slices.IndexFunc(here.Steps, func(s LocalStep) bool { return s.ID == id })
	if i < 0 {
		switch want.GetWant() {
		case nodev1.WorkState_WORK_STATE_PREPARED:
			action.Kind = ActionPrepare
			r.do(action)
		case nodev1.WorkState_WORK_STATE_RUNNING, nodev1.WorkState_WORK_STATE_ENDED:
			// It was started, or was to be ended, and this node knows nothing of it: its tasks may have run.
			action.Kind = ActionReportMissing
			r.do(action)
		case nodev1.WorkState_WORK_STATE_UNSPECIFIED, nodev1.WorkState_WORK_STATE_PREPARING, nodev1.WorkState_WORK_STATE_ENDING:
		}
		return
	}
	s := here.Steps[i]
	if s.Phase.over() {
		awaited := slices.Contains(want.GetStep().GetUnreported(), r.local.Node)
		if s.Reported && s.Repeat && awaited {
			action.Kind = ActionReportEnded
			r.do(action)
		}
		return
	}
	switch want.GetWant() {
	case nodev1.WorkState_WORK_STATE_ENDED:
		if !s.Ending {
			action.Kind, action.GraceS, action.Sentence = ActionEnd, order.GetKillGraceS(), want.GetStep().GetEndSentence()
			r.do(action)
		}
	case nodev1.WorkState_WORK_STATE_RUNNING:
		if s.Phase == PhasePrepared && !s.Ending && r.local.Leased {
			action.Kind = ActionStart
			r.do(action)
		}
		if s.Phase == PhaseRunning {
			r.running(order, s, action)
		}
	case nodev1.WorkState_WORK_STATE_UNSPECIFIED, nodev1.WorkState_WORK_STATE_PREPARING,
		nodev1.WorkState_WORK_STATE_PREPARED, nodev1.WorkState_WORK_STATE_ENDING:
	}
}

// running delivers signals and changed limits to a running step.
func (r *reconciler) running(order *nodev1.DesiredAttempt, s LocalStep, action Action) {
	if limit := order.GetTimeLimitS(); limit != 0 && limit != s.LimitS {
		action.Kind = ActionLimit
		r.do(action)
	}
	for _, signal := range order.GetSignals() {
		if signal.GetOrdinal() > s.SignalsDelivered && meant(signal, s.ID) {
			action.Kind, action.Signal = ActionSignal, signal
			r.do(action)
		}
	}
}

// meant reports whether a signal is for a step: the named one, only the batch shell, everything, or by default all steps
// but the batch shell.
func meant(signal *apiv1.SignalOrder, step uint32) bool {
	switch {
	case signal.Step != nil:
		return signal.GetStep() == step
	case signal.GetBatchOnly():
		return step == environ.BatchStep
	case signal.GetFull():
		return true
	}
	return step != environ.BatchStep
}
