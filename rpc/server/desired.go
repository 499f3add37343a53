package server

import (
	"iter"
	"slices"

	"github.com/muster-hpc/muster/fsm"
	"github.com/muster-hpc/muster/fsm/shape"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	"github.com/muster-hpc/muster/proto/notation"
)

// desiredView is the part of a view that a node's orders are made of.
type desiredView interface {
	Job(id uint32) *apiv1.Job
	Node(number uint32) *apiv1.Node
	Attempt(job, n uint32) *apiv1.Attempt
	NodeAttempts(number uint32) iter.Seq[*apiv1.Attempt]
	AttemptSteps(job, attempt uint32) iter.Seq[*apiv1.Step]
	Settings() *apiv1.Settings
}

// Desired returns everything that a node shall do, as a Sync answers it from a view. It is for simulations, which answer Syncs
// without sockets.
func Desired(view *fsm.View, number uint32) []*nodev1.DesiredAttempt {
	return desired(view, number, nil)
}

// desired returns everything that a node shall do: one order for each attempt that is not accounted for there. It is a
// pure function of the view and the number: known only saves work.
func desired(view desiredView, number uint32, known *gangs) []*nodev1.DesiredAttempt {
	var orders []*nodev1.DesiredAttempt
	for attempt := range view.NodeAttempts(number) {
		job := view.Job(attempt.JobId)
		if job == nil {
			continue // an attempt is never without its job; an order without one would say nothing
		}
		for _, left := range attempt.Leftovers {
			if left.Node == number {
				orders = append(orders, leftover(view, job, attempt, left))
			}
		}
		if spot, ok := find(attempt.Placement, number); ok && slices.Contains(attempt.Unaccounted, number) {
			orders = append(orders, order(view, job, attempt, number, spot, known.of(view, attempt.Placement)))
		}
	}
	return orders
}

// leftover is the order for a node that was taken out of an attempt: end what the old placement left there.
func leftover(view desiredView, job *apiv1.Job, attempt *apiv1.Attempt, left *apiv1.Leftover) *nodev1.DesiredAttempt {
	return &nodev1.DesiredAttempt{
		Job: job,
		Fence: &apiv1.Fence{
			Incarnation: attempt.Fence.GetIncarnation(),
			Attempt:     attempt.Fence.GetAttempt(),
			Placement:   left.Placement,
		},
		Want:        nodev1.WorkState_WORK_STATE_ENDED,
		CpuMask:     left.CpuMask,
		GpuMask:     left.GpuMask,
		MemoryMb:    left.MemoryMb,
		Gres:        left.Gres,
		StopsItself: job.Spec.GetAutomaticRecovery(),
		TimeLimitS:  attempt.TimeLimitS,
		KillGraceS:  grace(view, job),
		EndSentence: "another node took the place of this one in the job",
	}
}

// order is the order for a node of an attempt's placement.
func order(view desiredView, job *apiv1.Job, attempt *apiv1.Attempt, number uint32, spot spot, gang *gangFacts) *nodev1.DesiredAttempt {
	d := &nodev1.DesiredAttempt{
		Job:          job,
		Fence:        attempt.Fence,
		Want:         wantAttempt(attempt.State),
		NodeList:     gang.nodeList,
		NodeIndex:    uint32(spot.index),
		CpuMask:      spot.group.CpuMask,
		GpuMask:      spot.group.GpuMask,
		MemoryMb:     spot.group.MemoryMb,
		Gres:         spot.group.Gres,
		CpusPerNode:  gang.cpusPerNode,
		TasksPerNode: gang.tasksPerNode,
		NumTasks:     gang.tasks,
		Signals:      attempt.Signals,
		StopsItself:  job.Spec.GetAutomaticRecovery(),
		TimeLimitS:   attempt.TimeLimitS,
		KillGraceS:   grace(view, job),
		EndSentence:  attempt.EndSentence,
		NoRendezvousEnvironment: job.Spec.GetTaskOptions().GetNoRendezvousEnvironment() ||
			view.Settings().GetNoRendezvousEnvironment(),
	}
	if attempt.Number > 1 {
		if before := view.Attempt(job.Id, attempt.Number-1); before != nil {
			d.RestartReason = before.EndSentence
		}
	}
	if d.Want == nodev1.WorkState_WORK_STATE_ENDED {
		return d // whatever steps there are end with it
	}
	for step := range view.AttemptSteps(job.Id, attempt.Number) {
		if s := orderStep(view, step, number); s != nil {
			d.Steps = append(d.Steps, s)
		}
	}
	return d
}

func wantAttempt(state apiv1.AttemptState) nodev1.WorkState {
	switch state {
	case apiv1.AttemptState_ATTEMPT_STATE_PREPARING:
		return nodev1.WorkState_WORK_STATE_PREPARED
	case apiv1.AttemptState_ATTEMPT_STATE_RUNNING:
		return nodev1.WorkState_WORK_STATE_RUNNING
	case apiv1.AttemptState_ATTEMPT_STATE_ENDING, apiv1.AttemptState_ATTEMPT_STATE_ENDED:
		return nodev1.WorkState_WORK_STATE_ENDED
	case apiv1.AttemptState_ATTEMPT_STATE_UNSPECIFIED:
	}
	return nodev1.WorkState_WORK_STATE_UNSPECIFIED // never stored
}

// orderStep returns the order for one step, or nil if there is nothing to do for it on this node: it is not part of it,
// or has reported its end.
func orderStep(view desiredView, step *apiv1.Step, number uint32) *nodev1.DesiredStep {
	spot, ok := find(step.Placement, number)
	if !ok {
		return nil
	}
	awaited := slices.Contains(step.Unreported, number)
	want := nodev1.WorkState_WORK_STATE_UNSPECIFIED
	switch {
	case fsm.StepEnded(step.State) || step.Ending:
		if !awaited {
			return nil
		}
		want = nodev1.WorkState_WORK_STATE_ENDED
	case step.State == apiv1.StepState_STEP_STATE_PREPARING:
		want = nodev1.WorkState_WORK_STATE_PREPARED
	case step.State == apiv1.StepState_STEP_STATE_RUNNING:
		if !awaited {
			return nil
		}
		want = nodev1.WorkState_WORK_STATE_RUNNING
	}
	index, tasks := stepNodes(step, spot, number)
	d := &nodev1.DesiredStep{
		Step:         slim(step, number, awaited),
		Want:         want,
		NodeIndex:    index,
		Ranks:        shape.Ranks(step, number),
		TasksPerNode: tasks,
	}
	d.MasterAddress, d.MasterPort, d.PmiPort = master(view, step)
	return d
}

// stepNodes returns a node's index among those of a step, and the tasks of each of them. Of a step of several parts (srun A : B) a node has the
// tasks of all parts.
func stepNodes(step *apiv1.Step, spot spot, number uint32) (uint32, []uint32) {
	if len(step.PartRanks) == 0 {
		_, tasks, _ := counts(step.Placement)
		return uint32(spot.index), tasks
	}
	nodes := shape.Nodes(step.Placement)
	index := make(map[uint32]int, len(nodes))
	for i, n := range nodes {
		index[n] = i
	}
	tasks := make([]uint32, len(nodes))
	for _, group := range step.Placement.Groups {
		for _, n := range group.Nodes {
			tasks[index[n]] += group.Tasks
		}
	}
	return uint32(index[number]), tasks
}

// slim leaves out of a step what a node does not need of the others: a gang of 10,000 nodes would send each of them the
// addresses of all. Its placement has the node's own groups alone: one, or one for each part of the step that has tasks there, in the order
// of the parts; their tasks follow one another in the node's ranks.
func slim(step *apiv1.Step, number uint32, awaited bool) *apiv1.Step {
	s := &apiv1.Step{
		JobId:       step.JobId,
		Id:          step.Id,
		Attempt:     step.Attempt,
		Revision:    step.Revision,
		Spec:        step.Spec,
		State:       step.State,
		CreateTime:  step.CreateTime,
		StartTime:   step.StartTime,
		EndTime:     step.EndTime,
		NodeList:    step.NodeList,
		NumTasks:    step.NumTasks,
		Ending:      step.Ending,
		EndSentence: step.EndSentence,
		FinalState:  step.FinalState,
		PartRanks:   step.PartRanks,
		Placement:   &apiv1.Placement{},
	}
	for _, p := range shape.Portions(step, number) {
		s.Placement.Groups = append(s.Placement.Groups, &apiv1.NodeGroup{
			Nodes: []uint32{number}, CpuMask: p.Group.CpuMask, GpuMask: p.Group.GpuMask, MemoryMb: p.Group.MemoryMb, Tasks: p.Group.Tasks, Gres: p.Group.Gres,
		})
	}
	if awaited {
		s.Unreported = []uint32{number}
	}
	return s
}

// master returns where the tasks meet: what the node of rank 0 reported when it was prepared, or its address as it
// joined. The ports, of the rendezvous and of the process manager, are known only then.
func master(view desiredView, step *apiv1.Step) (address string, port, pmiPort uint32) {
	if len(step.Placement.GetGroups()) == 0 || len(step.Placement.Groups[0].Nodes) == 0 {
		return "", 0, 0
	}
	first := step.Placement.Groups[0].Nodes[0]
	for _, prepared := range step.Prepared {
		if prepared.Node == first && prepared.Address != "" {
			return prepared.Address, prepared.Port, prepared.PmiPort
		}
	}
	if node := view.Node(first); node != nil {
		return node.Spec.GetTaskAddress(), 0, 0
	}
	return "", 0, 0
}

// spot is a node's place in a placement.
type spot struct {
	index int // among all nodes, in rank order
	group *apiv1.NodeGroup
}

func find(placement *apiv1.Placement, number uint32) (spot, bool) {
	before := 0
	for _, group := range placement.GetGroups() {
		if j := slices.Index(group.Nodes, number); j >= 0 {
			return spot{index: before + j, group: group}, true
		}
		before += len(group.Nodes)
	}
	return spot{}, false
}

// counts returns the CPUs and tasks of each node in rank order, and the number of tasks in all.
func counts(placement *apiv1.Placement) (cpus, tasks []uint32, total uint32) {
	for _, group := range placement.GetGroups() {
		n := uint32(notation.Mask(group.CpuMask).Count())
		for range group.Nodes {
			cpus = append(cpus, n)
			tasks = append(tasks, group.Tasks)
			total += group.Tasks
		}
	}
	return cpus, tasks, total
}

func names(view desiredView, placement *apiv1.Placement) []string {
	var list []string
	for _, group := range placement.GetGroups() {
		for _, number := range group.Nodes {
			if node := view.Node(number); node != nil {
				list = append(list, node.Spec.GetName())
			}
		}
	}
	return list
}

func grace(view desiredView, job *apiv1.Job) uint32 {
	if s := job.Spec.GetKillGraceS(); s != 0 {
		return s
	}
	return view.Settings().GetKillGraceS()
}
