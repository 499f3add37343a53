package fsm

import (
	"cmp"
	"fmt"
	"slices"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"

	"github.com/muster-hpc/muster/fsm/state"
)

// maxReports bounds the lines of one command, as the protocol says.
const maxReports = 1000

// sameInstance reports whether two instances are the same life of an agent.
func sameInstance(a, b *apiv1.Instance) bool {
	return a.GetBootId() == b.GetBootId() && a.GetNonce() == b.GetNonce()
}

// reportTasks takes in what a node reports. Lines of another instance or fence are history: they are acknowledged and change
// nothing. An earlier epoch of the same instance only says that the node was thought lost meanwhile: what goes on there is protected
// by its fence, and what it reports is true. Lines that make no sense are acknowledged too, with a refusal each, so that a journal cannot get stuck.
func (m *Machine) reportTasks(r *logv1.ReportTasks) *logv1.Result {
	if len(r.Reports) > maxReports {
		return refused(refuse("TOO_MANY", "reports", "%d reports came at once; at most %d may", len(r.Reports), maxReports))
	}
	n := m.s.Node(r.Node)
	if n == nil || (n.Epoch < r.Epoch || !sameInstance(n.Instance, r.Instance)) && !m.faults.IgnoreFence {
		return &logv1.Result{}
	}
	result := &logv1.Result{}
	for _, line := range r.Reports {
		var refusal *apiv1.ErrorDetail
		switch event := line.Event.(type) {
		case *logv1.TaskReport_StepEnded:
			refusal = m.stepEnded(n.Number, line, event.StepEnded)
		case *logv1.TaskReport_AttemptReaped:
			m.attemptReaped(n.Number, line)
		case *logv1.TaskReport_PrepareFailed:
			m.prepareFailed(n.Number, line, event.PrepareFailed)
		default:
			refusal = refuse("REPORT_MALFORMED", jobSubject(line.JobId), "line %d of the journal says nothing", line.JournalId)
		}
		if refusal != nil {
			result.Refusals = append(result.Refusals, refusal)
		}
	}
	return result
}

// attemptReaped accounts for an attempt on a node.
func (m *Machine) attemptReaped(node uint32, line *logv1.TaskReport) {
	a := m.attemptOf(line.JobId, line.Fence)
	if a == nil {
		m.leftoverReaped(node, line)
		return
	}
	if _, index := holding(a, node); index < 0 && !m.faults.IgnoreFence {
		return
	}
	if !slices.Contains(a.Unaccounted, node) {
		return
	}
	if a.State == attemptPreparing || a.State == attemptRunning {
		// Nothing is left of work that should be there: that is a failure of the node.
		a = m.loseFrom(a, m.s.Node(node), fmt.Sprintf("node %s reported that nothing is left of the attempt", m.s.Node(node).Spec.Name))
	}
	m.account(a, node)
}

// leftoverReaped accounts for an earlier placement on a node that left the attempt.
func (m *Machine) leftoverReaped(node uint32, line *logv1.TaskReport) {
	a := m.s.Attempt(line.JobId, line.Fence.GetAttempt())
	if a == nil || a.Fence.Incarnation != line.Fence.GetIncarnation() {
		return
	}
	if h, _ := holding(a, node); h != nil && h.leftover && h.placement == line.Fence.Placement {
		m.account(a, node)
	}
}

// prepareFailed takes in that a node could not prepare. Where the request is at fault the attempt ends. Otherwise the node is marked: whether
// another takes its place or the attempt ends is for the leader to decide, because it knows what is free.
func (m *Machine) prepareFailed(node uint32, line *logv1.TaskReport, f *logv1.PrepareFailed) {
	a := m.attemptOf(line.JobId, line.Fence)
	if a == nil {
		return
	}
	if _, index := holding(a, node); index < 0 {
		return
	}
	sentence := fmt.Sprintf("node %s: %s", m.s.Node(node).Spec.Name, f.Sentence)
	switch {
	case a.State == attemptPreparing && f.UsersFault:
		m.finishAttempt(a, ending{class: classLaunch, sentence: sentence, fault: node, usersFault: true, exit: exit{signal: launchSignal}})
	case a.State == attemptPreparing:
		m.markUnprepared(a, node, sentence)
	case a.State == attemptRunning && f.StepId != nil:
		step := m.s.Step(line.JobId, a.Number, *f.StepId)
		if step != nil && step.State == apiv1.StepState_STEP_STATE_PREPARING && slices.Contains(step.Unreported, node) {
			// The node has nothing of the step; the others end what they prepared. The job goes on.
			if m.s.Level() >= levelLaunch && !f.UsersFault {
				m.blame(node, sentence)
			}
			step = m.orderStepEnd(step, apiv1.StepState_STEP_STATE_FAILED, sentence)
			m.leaveStep(step, node)
		}
	case a.State == attemptRunning || a.State == attemptEnding || a.State == attemptEnded:
		// The attempt went on or ended without it: history.
	}
}

// markUnprepared records that a node could not prepare an attempt, and charges the node. Once for each attempt.
func (m *Machine) markUnprepared(a *apiv1.Attempt, node uint32, sentence string) {
	if isUnprepared(a, node) {
		return
	}
	next := state.CopyAttempt(a)
	next.Revision = m.rev
	next.Unprepared = append(slices.Clone(a.Unprepared), &apiv1.UnpreparedNode{Node: node, Placement: a.Fence.Placement, Sentence: sentence})
	m.s.PutAttempt(next)
	m.blame(node, sentence)
}

// isUnprepared reports whether a node could not prepare an attempt.
func isUnprepared(a *apiv1.Attempt, node uint32) bool {
	return slices.ContainsFunc(a.Unprepared, func(u *apiv1.UnpreparedNode) bool { return u.Node == node })
}

// stepEnded merges the exits of a step's tasks on one node.
func (m *Machine) stepEnded(node uint32, line *logv1.TaskReport, e *logv1.StepEnded) *apiv1.ErrorDetail {
	a := m.attemptOf(line.JobId, line.Fence)
	if a == nil {
		return nil
	}
	step := m.s.Step(line.JobId, a.Number, e.StepId)
	if step == nil || state.StepEnded(step.State) || !slices.Contains(step.Unreported, node) {
		return nil
	}
	if step.State == apiv1.StepState_STEP_STATE_PREPARING && !step.Ending {
		return refuse("REPORT_MALFORMED", stepSubject(line.JobId, e.StepId), "node %s reports the end of %s, which has not been started",
			m.s.Node(node).Spec.Name, stepSubject(line.JobId, e.StepId))
	}
	next := state.CopyStep(step)
	next.Revision = m.rev
	var refusal *apiv1.ErrorDetail
	exits := e.Exits
	if m.s.Level() < levelLaunch {
		refusal = m.checkExits(step, node, e)
		next.Exits = mergeExits(step.Exits, e.Exits)
	} else {
		exits, refusal = m.takeExits(next, node, e.Exits)
		m.measure(next, node, e)
	}
	if next.EndSentence == "" {
		next.EndSentence = e.Sentence
	}
	if next.FinalState == apiv1.StepState_STEP_STATE_UNSPECIFIED {
		switch {
		case e.TimeLimit:
			next.FinalState = apiv1.StepState_STEP_STATE_TIMEOUT
		case e.Deadline:
			next.FinalState = apiv1.StepState_STEP_STATE_NODE_FAIL
		}
	}
	m.s.PutStep(next)
	if !next.Ending && len(next.Unreported) > 1 && endsPeers(next, exits, e.Deadline) {
		next = m.orderStepEnd(next, next.FinalState, next.EndSentence)
	}
	m.leaveStep(next, node)
	return refusal
}

// endsPeers reports whether the end of tasks on one node ends the step on the others: a program that could not be
// executed, a supervisor that stopped itself, or an error where the user asked for that.
func endsPeers(step *apiv1.Step, exits []*apiv1.TaskExit, deadline bool) bool {
	if deadline {
		return true
	}
	for _, x := range exits {
		bad := x.Code != 0 || x.Signal != 0 || x.OutOfMemory
		if x.LaunchError != "" || bad && step.Spec.TaskOptions.GetKillOnBadExit() {
			return true
		}
	}
	return false
}

// checkExits compares the exits with the tasks that the node has. What is wrong is said and the rest is taken.
func (m *Machine) checkExits(step *apiv1.Step, node uint32, e *logv1.StepEnded) *apiv1.ErrorDetail {
	var reported uint64
	for _, x := range e.Exits {
		reported += uint64(x.Count)
		if uint64(x.FirstRank)+uint64(x.Count) > uint64(step.NumTasks) {
			return refuse("REPORT_MALFORMED", stepSubject(step.JobId, step.Id), "node %s reports rank %d; the step has %d tasks",
				m.s.Node(node).Spec.Name, uint64(x.FirstRank)+uint64(x.Count)-1, step.NumTasks)
		}
	}
	for _, g := range step.Placement.Groups {
		if slices.Contains(g.Nodes, node) && reported != uint64(g.Tasks) && !step.Ending {
			return refuse("REPORT_MALFORMED", stepSubject(step.JobId, step.Id), "node %s reports %d exits and has %d tasks of the step",
				m.s.Node(node).Spec.Name, reported, g.Tasks)
		}
	}
	return nil
}

// mergeExits adds ranges of exits and folds neighbours that ended in the same way.
func mergeExits(known, more []*apiv1.TaskExit) []*apiv1.TaskExit {
	all := append(slices.Clone(known), more...)
	slices.SortStableFunc(all, func(a, b *apiv1.TaskExit) int { return cmp.Compare(a.FirstRank, b.FirstRank) })
	var merged []*apiv1.TaskExit
	for _, x := range all {
		if n := len(merged); n > 0 && follows(merged[n-1], x) {
			last := merged[n-1]
			merged[n-1] = &apiv1.TaskExit{
				FirstRank: last.FirstRank, Count: last.Count + x.Count, Code: x.Code, Signal: x.Signal,
				LaunchError: x.LaunchError, OutOfMemory: x.OutOfMemory, EndedBySupervisor: x.EndedBySupervisor,
			}
			continue
		}
		merged = append(merged, x)
	}
	return merged
}

func follows(a, b *apiv1.TaskExit) bool {
	return a.FirstRank+a.Count == b.FirstRank && a.Code == b.Code && a.Signal == b.Signal && a.LaunchError == b.LaunchError &&
		a.OutOfMemory == b.OutOfMemory && a.EndedBySupervisor == b.EndedBySupervisor
}
