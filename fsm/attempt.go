package fsm

import (
	"fmt"
	"slices"

	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"

	"github.com/muster-hpc/muster/fsm/state"
)

const (
	classHardware   = apiv1.FailureClass_FAILURE_CLASS_HARDWARE
	classLaunch     = apiv1.FailureClass_FAILURE_CLASS_LAUNCH
	classPreemption = apiv1.FailureClass_FAILURE_CLASS_PREEMPTION
	classRequeued   = apiv1.FailureClass_FAILURE_CLASS_REQUEUED
	// nodeLaunchFailures is the number of consecutive launch failures of its own after which a node is drained.
	nodeLaunchFailures = 3
)

// attemptOf returns the attempt whose present placement a fence names, or nil.
func (m *Machine) attemptOf(job uint32, f *apiv1.Fence) *apiv1.Attempt {
	if m.faults.IgnoreFence {
		return m.s.Attempt(job, m.s.Job(job).GetStatus().GetAttempt())
	}
	a := m.s.Attempt(job, f.GetAttempt())
	if a == nil || a.Fence.Incarnation != f.GetIncarnation() || a.Fence.Placement != f.GetPlacement() {
		return nil
	}
	return a
}

func staleFence(job uint32, f *apiv1.Fence) *apiv1.ErrorDetail {
	return refuse("FENCE_STALE", jobSubject(job), "attempt %d, placement %d of job %d is not the present one", f.GetAttempt(), f.GetPlacement(), job)
}

// checkPrepared checks that exactly the nodes of a placement are prepared.
func (m *Machine) checkPrepared(subject string, p *apiv1.Placement, prepared []*apiv1.PreparedNode) *apiv1.ErrorDetail {
	nodes := nodesOf(p)
	ready := make(map[uint32]bool, len(prepared))
	for _, n := range prepared {
		ready[n.Node] = true
	}
	for _, n := range nodes {
		if !ready[n] {
			return refuse("NOT_PREPARED", subject, "node %s has not prepared; nothing starts before every node has", m.s.Node(n).Spec.Name)
		}
	}
	if len(prepared) != len(nodes) {
		return refuse("NOT_PREPARED", subject, "%d nodes are said to be prepared; there are %d", len(prepared), len(nodes))
	}
	return nil
}

// startAttempt starts a prepared attempt with its first step.
func (m *Machine) startAttempt(c *logv1.StartAttempt) *logv1.Result {
	a := m.attemptOf(c.JobId, c.Fence)
	if a == nil {
		return refused(staleFence(c.JobId, c.Fence))
	}
	if a.State != attemptPreparing {
		return refused(refuse("ATTEMPT_NOT_PREPARING", jobSubject(c.JobId), "attempt %d of job %d is not preparing any more", a.Number, c.JobId))
	}
	if before := m.s.Attempt(c.JobId, a.Number-1); before != nil && before.State != attemptEnded && !m.faults.StartUnaccounted {
		return refused(refuse("ATTEMPT_UNACCOUNTED", jobSubject(c.JobId),
			"attempt %d of job %d is not accounted for on every node", before.Number, c.JobId))
	}
	if refusal := m.checkPrepared(jobSubject(c.JobId), a.Placement, c.Prepared); refusal != nil {
		return refused(refusal)
	}
	for _, u := range a.Unprepared {
		if _, index := holding(a, u.Node); index >= 0 {
			return refused(refuse("NOT_PREPARED", jobSubject(c.JobId), "a node could not prepare: %s", u.Sentence))
		}
	}
	next := state.CopyAttempt(a)
	next.State, next.Prepared, next.StartTime, next.Revision = attemptRunning, c.Prepared, m.now(), m.rev
	m.s.PutAttempt(next)
	job := m.changeJob(m.s.Job(c.JobId), func(s *apiv1.JobStatus) {
		s.State, s.StartTime, s.LaunchFailures = jobRunning, m.now(), 0
		s.Reason, s.Sentence = apiv1.WaitReason_WAIT_REASON_UNSPECIFIED, ""
	})
	if id, has := firstStepID(job.Spec.Kind); has {
		if step := m.s.Step(c.JobId, a.Number, id); step != nil && !step.Ending {
			m.runStep(step, stepPrepared(step.Placement, c.Prepared))
		}
	}
	m.forgiveNodes(nodesOf(a.Placement))
	m.touchPlacement(a.Placement)
	return &logv1.Result{Attempt: a.Number}
}

// stepPrepared picks the reports of a step's nodes, in the order given.
func stepPrepared(p *apiv1.Placement, prepared []*apiv1.PreparedNode) []*apiv1.PreparedNode {
	nodes := nodesOf(p)
	if len(nodes) == len(prepared) {
		return prepared
	}
	var own []*apiv1.PreparedNode
	for _, n := range prepared {
		if slices.Contains(nodes, n.Node) {
			own = append(own, n)
		}
	}
	return own
}

// endAttempt ends an attempt for a reason that the leader found.
func (m *Machine) endAttempt(c *logv1.EndAttempt) *logv1.Result {
	a := m.attemptOf(c.JobId, c.Fence)
	if a == nil {
		return refused(staleFence(c.JobId, c.Fence))
	}
	if a.State != attemptPreparing && a.State != attemptRunning {
		return refused(refuse("ATTEMPT_ENDED", jobSubject(c.JobId), "attempt %d of job %d has ended already", a.Number, c.JobId))
	}
	if c.Failure == apiv1.FailureClass_FAILURE_CLASS_UNSPECIFIED {
		return refused(refuse("FAILURE_MISSING", jobSubject(c.JobId), "an attempt is ended for a reason; none is given"))
	}
	if c.FaultNode != 0 && m.s.Node(c.FaultNode) == nil {
		return refused(refuse("NODE_UNKNOWN", fmt.Sprintf("node %d", c.FaultNode), "there is no node with the number %d", c.FaultNode))
	}
	m.finishAttempt(a, ending{class: c.Failure, sentence: c.Sentence, fault: c.FaultNode})
	return &logv1.Result{Attempt: a.Number}
}

// ending says how an attempt ends.
type ending struct {
	class    apiv1.FailureClass
	sentence string
	fault    uint32 // node number; 0 if none
	exit     exit
	// usersFault marks a launch failure that another try cannot cure.
	usersFault bool
	// hold holds the job when it is queued again.
	hold bool
	// at is when it ended, if that is known better than by the state time at which that became known.
	at *timestamppb.Timestamp
	// survived says that work went on to its end in spite of lost nodes, as its user wished: it is not repeated.
	survived bool
}

// exit is a code and a signal.
type exit struct{ code, signal uint32 }

// again is the requeue rule: whether a job is queued again after an attempt that ended like this.
func again(spec *apiv1.JobSpec, e ending) bool {
	switch e.class {
	case classHardware, classPreemption:
		return spec.Requeue && !e.survived
	case classRequeued:
		return true
	case classLaunch:
		return !e.usersFault
	default:
		return false
	}
}

// outcome returns the final state and reason of a job that is not queued again.
func outcome(e ending) (apiv1.JobState, apiv1.WaitReason) {
	switch e.class {
	case apiv1.FailureClass_FAILURE_CLASS_UNSPECIFIED:
		return apiv1.JobState_JOB_STATE_COMPLETED, apiv1.WaitReason_WAIT_REASON_UNSPECIFIED
	case classHardware:
		return apiv1.JobState_JOB_STATE_NODE_FAIL, apiv1.WaitReason_WAIT_REASON_NODE_DOWN
	case classLaunch:
		return apiv1.JobState_JOB_STATE_FAILED, apiv1.WaitReason_WAIT_REASON_JOB_LAUNCH_FAILURE
	case classPreemption:
		return apiv1.JobState_JOB_STATE_PREEMPTED, apiv1.WaitReason_WAIT_REASON_UNSPECIFIED
	case apiv1.FailureClass_FAILURE_CLASS_USER_CODE:
		if e.exit.code == 0 && e.exit.signal != 0 {
			return apiv1.JobState_JOB_STATE_FAILED, apiv1.WaitReason_WAIT_REASON_RAISED_SIGNAL
		}
		return apiv1.JobState_JOB_STATE_FAILED, apiv1.WaitReason_WAIT_REASON_NON_ZERO_EXIT_CODE
	case apiv1.FailureClass_FAILURE_CLASS_OUT_OF_MEMORY:
		return apiv1.JobState_JOB_STATE_OUT_OF_MEMORY, apiv1.WaitReason_WAIT_REASON_OUT_OF_MEMORY
	case apiv1.FailureClass_FAILURE_CLASS_TIME_LIMIT:
		return apiv1.JobState_JOB_STATE_TIMEOUT, apiv1.WaitReason_WAIT_REASON_TIME_LIMIT
	case apiv1.FailureClass_FAILURE_CLASS_HANG:
		return apiv1.JobState_JOB_STATE_FAILED, apiv1.WaitReason_WAIT_REASON_UNSPECIFIED
	case apiv1.FailureClass_FAILURE_CLASS_CANCELLED:
		return jobCancelled, apiv1.WaitReason_WAIT_REASON_UNSPECIFIED
	default:
		// Requeued jobs do not get here, and clean lets no other class into the log.
		panic("fsm: failure class " + e.class.String() + " has no outcome")
	}
}

// finishAttempt ends a live attempt: every way an attempt can end goes through here. It is not accounted for by that.
func (m *Machine) finishAttempt(a *apiv1.Attempt, e ending) {
	job := m.s.Job(a.JobId)
	next := state.CopyAttempt(a)
	if e.at == nil {
		e.at = m.now()
	}
	next.State, next.EndTime, next.Failure, next.EndSentence, next.Revision = attemptEnding, e.at, e.class, e.sentence, m.rev
	if n := m.s.Node(e.fault); n != nil {
		next.FaultNode = n.Spec.Name
	}
	var reason apiv1.WaitReason
	if again(job.Spec, e) {
		next.FinalState = jobPending
	} else {
		next.FinalState, reason = outcome(e)
	}
	m.s.PutAttempt(next)
	for _, step := range slices.Collect(m.s.LiveSteps(a.JobId, a.Number)) {
		if !step.Ending {
			m.orderStepEnd(step, stepStateFor(e.class), e.sentence)
		}
	}
	m.changeJob(job, func(s *apiv1.JobStatus) {
		s.Completing, s.Sentence = true, e.sentence
		s.ExitCode, s.ExitSignal = e.exit.code, e.exit.signal
		if next.FinalState == jobPending {
			m.planAgain(s, e)
			return
		}
		s.Reason, s.EndTime = reason, e.at
		if next.FinalState == jobCancelled {
			s.CancelledBy = m.cmd.Principal.Uid
		}
	})
	if e.class == classLaunch && !e.usersFault && e.fault != 0 && !isUnprepared(a, e.fault) {
		m.blame(e.fault, e.sentence)
	}
	m.touchAttempt(next)
}

// planAgain sets when and whether a job that is queued again may be placed.
func (m *Machine) planAgain(s *apiv1.JobStatus, e ending) {
	s.Reason = apiv1.WaitReason_WAIT_REASON_CLEANING
	if e.hold {
		s.Held = heldByUser
	}
	if e.class != classLaunch {
		return
	}
	s.LaunchFailures++
	if tries := m.s.Settings().LaunchTries; s.LaunchFailures >= tries {
		s.Held, s.NotBefore = heldByOperator, nil
		s.Sentence = fmt.Sprintf("held after %d failed launches, the last one: %s; release it when the cause is gone", s.LaunchFailures, e.sentence)
		return
	}
	// 2^(n-1) seconds after the n-th failure; launch_tries is at most 100, but nobody waits longer than an hour.
	delay := int64(1) << min(s.LaunchFailures-1, 12)
	s.NotBefore = &timestamppb.Timestamp{Seconds: m.now().Seconds + min(delay, 3600), Nanos: m.now().Nanos}
}

// blame charges a launch failure to a node, and drains it when it was one too many in a row.
func (m *Machine) blame(number uint32, sentence string) {
	m.changeNode(m.s.Node(number), func(n *apiv1.Node) {
		n.LaunchFailures++
		if n.LaunchFailures >= nodeLaunchFailures && !n.Drain {
			n.Drain, n.ReasonBy, n.ReasonTime = true, "muster", m.now()
			n.Reason = fmt.Sprintf("%d launches failed here in a row, the last one: %s", n.LaunchFailures, sentence)
		}
	})
}

// forgiveNodes ends the row of launch failures of nodes that prepared something in time.
func (m *Machine) forgiveNodes(numbers []uint32) {
	for _, number := range numbers {
		if n := m.s.Node(number); n.LaunchFailures > 0 {
			m.changeNode(n, func(n *apiv1.Node) { n.LaunchFailures = 0 })
		}
	}
}

// account records that nothing of an attempt is left on a node: its devices are free. The attempt has ended, or the node has
// left it; the last node concludes an ended attempt.
func (m *Machine) account(a *apiv1.Attempt, node uint32) {
	if !slices.Contains(a.Unaccounted, node) {
		return
	}
	m.freeDevices(a, node)
	next := state.CopyAttempt(a)
	next.Revision = m.rev
	next.Unaccounted = slices.DeleteFunc(slices.Clone(a.Unaccounted), func(n uint32) bool { return n == node })
	next.Leftovers = slices.DeleteFunc(slices.Clone(a.Leftovers), func(l *apiv1.Leftover) bool { return l.Node == node })
	m.s.PutAccounted(next, node)
	m.s.Touch(node)
	m.abandonSteps(next, node)
	if len(next.Unaccounted) == 0 {
		m.conclude(next)
	}
}

// conclude ends an attempt that every node has accounted for; the job takes the state decided at the attempt's end.
func (m *Machine) conclude(a *apiv1.Attempt) {
	next := state.CopyAttempt(a)
	next.State, next.Revision = attemptEnded, m.rev
	m.s.PutAttempt(next)
	job := m.s.Job(a.JobId)
	if job.Status.Attempt != a.Number {
		return // only with a planted bug
	}
	m.changeJob(job, func(s *apiv1.JobStatus) {
		s.State, s.Completing = a.FinalState, false
		if a.FinalState != jobPending {
			return
		}
		if a.StartTime != nil {
			s.Restarts++
		}
		m.waitAgain(s)
	})
}

// waitAgain sets what a job shows that waits once more.
func (m *Machine) waitAgain(s *apiv1.JobStatus) {
	s.Completing, s.EligibleTime = false, m.now()
	switch {
	case s.Held == heldByOperator:
		s.Reason, s.EligibleTime = apiv1.WaitReason_WAIT_REASON_JOB_HELD_ADMIN, nil
	case s.Held == heldByUser:
		s.Reason, s.EligibleTime = apiv1.WaitReason_WAIT_REASON_JOB_HELD_USER, nil
	case later(s.NotBefore, m.now()):
		s.Reason, s.EligibleTime = apiv1.WaitReason_WAIT_REASON_LAUNCH_BACKOFF, s.NotBefore
	default:
		s.Reason = apiv1.WaitReason_WAIT_REASON_UNSPECIFIED
	}
}

// queueAgain takes an ended job up again.
func (m *Machine) queueAgain(s *apiv1.JobStatus, sentence string, hold bool) {
	s.State, s.EndTime, s.CancelledBy, s.Sentence, s.NotBefore = jobPending, nil, 0, sentence, nil
	s.LaunchFailures = 0
	if s.Attempt > 0 {
		s.Restarts++
	}
	if hold {
		s.Held = heldByUser
	}
	m.waitAgain(s)
}
