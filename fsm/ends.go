package fsm

import (
	"cmp"
	"slices"

	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"

	"github.com/muster-hpc/muster/fsm/shape"
	"github.com/muster-hpc/muster/fsm/state"
)

// takeExits takes in how the tasks of a step ended on one node: of exactly the ranks that the node has. What it says of other ranks is refused;
// a rank that it does not speak of, though its end was not ordered, counts as failed. It returns the node's own exits.
func (m *Machine) takeExits(step *apiv1.Step, node uint32, reported []*apiv1.TaskExit) ([]*apiv1.TaskExit, *apiv1.ErrorDetail) {
	ranges := slices.Clone(reported)
	slices.SortStableFunc(ranges, func(a, b *apiv1.TaskExit) int { return cmp.Compare(a.FirstRank, b.FirstRank) })
	ranks := shape.Ranks(step, node)
	var own []*apiv1.TaskExit
	var said, known uint64
	for _, x := range reported {
		said += uint64(x.Count)
	}
	at := 0
	for _, rank := range ranks {
		for at < len(ranges) && uint64(ranges[at].FirstRank)+uint64(ranges[at].Count) <= uint64(rank) {
			at++
		}
		var x *apiv1.TaskExit
		switch {
		case at < len(ranges) && ranges[at].FirstRank <= rank:
			x = ranges[at]
			known++
		case step.Ending:
			continue // its tasks may never have begun
		default:
			x = &apiv1.TaskExit{Code: 1}
		}
		own = append(own, &apiv1.TaskExit{
			FirstRank: rank, Count: 1, Code: x.Code, Signal: x.Signal, LaunchError: x.LaunchError, OutOfMemory: x.OutOfMemory,
			EndedBySupervisor: x.EndedBySupervisor,
		})
	}
	own = mergeExits(nil, own)
	step.Exits = mergeExits(step.Exits, own)
	name, subject := m.s.Node(node).Spec.Name, stepSubject(step.JobId, step.Id)
	switch {
	case said > known:
		return own, refuse("REPORT_MALFORMED", subject, "node %s reports %d exits for the %d tasks of the step that it has; the others are not its own",
			name, said, len(ranks))
	case known < uint64(len(ranks)) && !step.Ending:
		if step.EndSentence == "" {
			step.EndSentence = "node " + name + " did not report how all of its tasks ended"
		}
		return own, refuse("REPORT_MALFORMED", subject, "node %s reports %d exits and has %d tasks of the step", name, known, len(ranks))
	default:
		return own, nil
	}
}

// measure takes in when a step's tasks ran on one node, and what they used.
func (m *Machine) measure(step *apiv1.Step, node uint32, e *logv1.StepEnded) {
	if e.ElapsedMs > 0 || e.ExecTime != nil {
		step.ElapsedMs = max(step.ElapsedMs, e.ElapsedMs)
	} else {
		m.unmeasured(step)
	}
	if t := e.ExecTime; t != nil && t.CheckValid() == nil {
		if step.FirstExecTime == nil || later(step.FirstExecTime, t) {
			step.FirstExecTime = t
		}
		if step.LastExecTime == nil || later(t, step.LastExecTime) {
			step.LastExecTime = t
		}
		first, last := step.FirstExecTime, step.LastExecTime
		step.StartSkewUs = uint64((last.Seconds-first.Seconds)*1e6 + (int64(last.Nanos)-int64(first.Nanos))/1e3)
	}
	if e.Usage != nil {
		step.Usage = addUsage(step.Usage, e.Usage, node, shape.Ranks(step, node))
	}
}

// unmeasured notes that a node's tasks of a started step are over, and nobody knows since when: they count as having run until now.
func (m *Machine) unmeasured(step *apiv1.Step) {
	if m.s.Level() < levelLaunch || step.StartTime == nil {
		return
	}
	if ms := (m.nowNs() - ns(step.StartTime)) / 1e6; ms > 0 {
		step.ElapsedMs = max(step.ElapsedMs, uint64(ms))
	}
}

// endOf returns when a step ended: its start and the longest time that a node measured from exec to the last task's end, so that the time in which
// nobody could hear of the end does not count; never before its start, never after now.
func (m *Machine) endOf(step *apiv1.Step) *timestamppb.Timestamp {
	if m.s.Level() < levelLaunch || step.StartTime == nil {
		return m.now()
	}
	left := m.nowNs() - ns(step.StartTime)
	if left <= 0 || step.ElapsedMs >= uint64(left)/1e6 {
		return m.now()
	}
	end := ns(step.StartTime) + int64(step.ElapsedMs)*1e6
	return &timestamppb.Timestamp{Seconds: end / 1e9, Nanos: int32(end % 1e9)}
}

// ns returns a time in nanoseconds since 1970. State times are within the range in which that fits.
func ns(t *timestamppb.Timestamp) int64 { return t.GetSeconds()*1e9 + int64(t.GetNanos()) }

// addUsage adds what tasks of one node used: times and memory are sums over tasks, the highest memory is that of the task with most (of several,
// the first that was reported). Who had it is the reporting node, whatever it says.
func addUsage(sum, u *apiv1.StepUsage, node uint32, ranks []uint32) *apiv1.StepUsage {
	total := &apiv1.StepUsage{
		Tasks: uint32(min(uint64(sum.GetTasks())+uint64(min(u.Tasks, uint32(len(ranks)))), shape.MaxTasks)), UserMs: add(sum.GetUserMs(), u.UserMs),
		SystemMs: add(sum.GetSystemMs(), u.SystemMs), TotalRssKb: add(sum.GetTotalRssKb(), u.TotalRssKb),
		MaxRssKb: sum.GetMaxRssKb(), MaxRssRank: sum.GetMaxRssRank(), MaxRssNode: sum.GetMaxRssNode(),
	}
	if u.MaxRssKb > total.MaxRssKb && len(ranks) > 0 {
		total.MaxRssKb, total.MaxRssNode, total.MaxRssRank = u.MaxRssKb, node, ranks[0]
		if _, own := slices.BinarySearch(ranks, u.MaxRssRank); own {
			total.MaxRssRank = u.MaxRssRank
		}
	}
	return total
}

// add adds without overflow.
func add(a, b uint64) uint64 {
	if a > ^uint64(0)-b {
		return ^uint64(0)
	}
	return a + b
}

// loseFrom takes in that nothing is left of a live attempt on a node. That ends the attempt, unless its job goes on without lost nodes: then only
// the tasks there have ended, with the state NODE_FAIL for the steps that had them. The caller accounts for the node.
func (m *Machine) loseFrom(a *apiv1.Attempt, n *apiv1.Node, sentence string) *apiv1.Attempt {
	if !m.goesOnWithout(a, n.Number) {
		m.finishAttempt(a, ending{class: classHardware, sentence: sentence, fault: n.Number})
		return m.s.Attempt(a.JobId, a.Number)
	}
	for _, step := range slices.Collect(m.s.LiveSteps(a.JobId, a.Number)) {
		if !slices.Contains(step.Unreported, n.Number) {
			continue
		}
		next := state.CopyStep(step)
		next.Revision = m.rev
		var lost []*apiv1.TaskExit
		for _, rank := range shape.Ranks(step, n.Number) {
			lost = append(lost, &apiv1.TaskExit{FirstRank: rank, Count: 1, Signal: sigkill, EndedBySupervisor: true})
		}
		if step.StartTime != nil {
			next.Exits = mergeExits(step.Exits, lost)
		}
		if next.FinalState == apiv1.StepState_STEP_STATE_UNSPECIFIED {
			next.FinalState = apiv1.StepState_STEP_STATE_NODE_FAIL
		}
		if next.EndSentence == "" {
			next.EndSentence = sentence
		}
		m.s.PutStep(next)
		if !next.Ending && (!step.Spec.NoKill || step.State == apiv1.StepState_STEP_STATE_PREPARING) {
			m.orderStepEnd(next, apiv1.StepState_STEP_STATE_NODE_FAIL, sentence)
		}
	}
	return m.s.Attempt(a.JobId, a.Number)
}

// goesOnWithout reports whether an attempt goes on when it loses a node: its user asked for that, it runs, its script runs elsewhere, and another node
// is left.
func (m *Machine) goesOnWithout(a *apiv1.Attempt, node uint32) bool {
	job := m.s.Job(a.JobId)
	if !job.Spec.NoKill || a.State != attemptRunning {
		return false
	}
	if job.Spec.Kind == apiv1.JobKind_JOB_KIND_BATCH && a.Placement.Groups[0].Nodes[0] == node {
		return false
	}
	left := setOf(a.Unaccounted)
	return slices.ContainsFunc(nodesOf(a.Placement), func(n uint32) bool { return n != node && left[n] })
}
