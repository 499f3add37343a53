package fsm

import (
	"fmt"
	"path"
	"slices"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
	"github.com/muster-hpc/muster/proto/notation"

	"github.com/muster-hpc/muster/fsm/shape"
	"github.com/muster-hpc/muster/fsm/state"
)

const (
	attemptPreparing = apiv1.AttemptState_ATTEMPT_STATE_PREPARING
	attemptRunning   = apiv1.AttemptState_ATTEMPT_STATE_RUNNING
	attemptEnding    = apiv1.AttemptState_ATTEMPT_STATE_ENDING
	attemptEnded     = apiv1.AttemptState_ATTEMPT_STATE_ENDED
	nodeUp           = apiv1.NodeState_NODE_STATE_UP
	nodeDown         = apiv1.NodeState_NODE_STATE_DOWN
)

// place gives a pending job an attempt, or a preparing attempt another placement. It is refused as a whole if one part of what
// the planner knew is stale.
func (m *Machine) place(p *logv1.Place) *logv1.Result {
	job := m.s.Job(p.JobId)
	if job == nil {
		return refused(refuse("JOB_UNKNOWN", jobSubject(p.JobId), "job %d does not exist", p.JobId))
	}
	current := m.s.Attempt(job.Id, job.Status.Attempt)
	replacing := current != nil && p.Attempt == current.Number && current.State == attemptPreparing
	refusal := m.checkPlacing(p, job, current, replacing)
	if refusal == nil {
		refusal = m.checkPartitionOf(p)
	}
	if refusal == nil {
		refusal = m.checkPlacement(p, job, current, replacing)
	}
	if refusal != nil {
		return refused(refusal)
	}
	if replacing {
		for _, node := range p.Unprepared {
			m.markUnprepared(m.s.Attempt(job.Id, p.Attempt), node, p.Sentence)
		}
		m.leaveNodes(m.s.Attempt(job.Id, p.Attempt), p.Placement)
		current = m.s.Attempt(job.Id, p.Attempt)
	} else {
		current = nil
	}
	m.takeNodes(p, job, current)
	return &logv1.Result{Attempt: p.Attempt}
}

// checkPlacing checks the job's side.
func (m *Machine) checkPlacing(p *logv1.Place, job *apiv1.Job, current *apiv1.Attempt, replacing bool) *apiv1.ErrorDetail {
	subject := jobSubject(job.Id)
	if replacing {
		if p.PlacementNumber != current.Fence.Placement+1 {
			return refuse("PLACEMENT_STALE", subject, "attempt %d of job %d has placement %d; %d cannot follow",
				current.Number, job.Id, current.Fence.Placement, p.PlacementNumber)
		}
		return m.checkLeaving(p, current)
	}
	switch {
	case job.Status.State != jobPending && !m.faults.StartUnaccounted:
		return refuse("JOB_NOT_PENDING", subject, "job %d does not wait any more", job.Id)
	case job.Status.Held != 0:
		return refuse("JOB_HELD", subject, "job %d is held", job.Id)
	case p.Attempt != job.Status.Attempt+1 || p.PlacementNumber != 1:
		return refuse("ATTEMPT_STALE", subject, "job %d has had %d attempts; attempt %d, placement %d cannot follow",
			job.Id, job.Status.Attempt, p.Attempt, p.PlacementNumber)
	case current != nil && current.State != attemptEnded && !m.faults.StartUnaccounted:
		return refuse("ATTEMPT_UNACCOUNTED", subject, "attempt %d of job %d is not accounted for on every node", current.Number, job.Id)
	case state.Ended(job.Status.State):
		return refuse("JOB_ENDED", subject, "job %d has ended", job.Id)
	case len(p.Unprepared) > 0:
		return refuse("PLACEMENT_INVALID", subject, "only a new placement of a preparing attempt is without nodes that did not prepare")
	}
	return nil
}

// checkLeaving checks that the nodes said not to have prepared are in the attempt and leave it.
func (m *Machine) checkLeaving(p *logv1.Place, a *apiv1.Attempt) *apiv1.ErrorDetail {
	to := nodesOf(p.Placement)
	for _, node := range p.Unprepared {
		if _, index := holding(a, node); index < 0 || slices.Contains(to, node) {
			return refuse("PLACEMENT_INVALID", jobSubject(p.JobId), "node %d is said not to have prepared, but does not leave the attempt", node)
		}
	}
	return nil
}

func (m *Machine) checkPartitionOf(p *logv1.Place) *apiv1.ErrorDetail {
	partition := m.s.Partition(p.Partition)
	switch {
	case partition == nil:
		return unknownPartition(&m.s.View, p.Partition)
	case partition.Down:
		return refuse("PARTITION_DOWN", "partition "+p.Partition, "partition %s is down", p.Partition)
	default:
		return nil
	}
}

// checkPlacement checks the nodes' side.
func (m *Machine) checkPlacement(p *logv1.Place, job *apiv1.Job, current *apiv1.Attempt, replacing bool) *apiv1.ErrorDetail {
	invalid := func(why string, args ...any) *apiv1.ErrorDetail {
		return refuse("PLACEMENT_INVALID", jobSubject(job.Id), "the placement of job %d %s", job.Id, fmt.Sprintf(why, args...))
	}
	nodes := 0
	for _, g := range p.Placement.GetGroups() {
		nodes += len(g.Nodes)
		if g.Tasks == 0 || g.Tasks > shape.MaxTasks {
			return invalid("has %d tasks on a node", g.Tasks)
		}
	}
	if nodes == 0 || nodes != len(p.Placement.Epochs) {
		return invalid("has %d nodes and %d epochs", nodes, len(p.Placement.GetEpochs()))
	}
	if shape.Tasks(p.Placement) > shape.MaxTasks {
		return invalid("has more than %d tasks", shape.MaxTasks)
	}
	if o := job.Spec.TaskOptions; job.Spec.Kind == apiv1.JobKind_JOB_KIND_RUN && len(o.GetPrograms()) > 0 {
		if refusal := checkPrograms(o, shape.Tasks(p.Placement)); refusal != nil {
			return invalid("does not fit its programs: %s", refusal.Sentence)
		}
	}
	check := placementCheck{
		m: m, members: m.s.PartitionNodes(p.Partition), partition: p.Partition,
		exclusive: job.Spec.Resources.GetExclusive() || m.s.Partition(p.Partition).Exclusive,
		seen:      make(map[uint32]bool, nodes),
	}
	if replacing {
		check.own = current
	}
	i := 0
	for _, g := range p.Placement.Groups {
		for _, number := range g.Nodes {
			if refusal := check.node(number, p.Placement.Epochs[i], g); refusal != nil {
				return refusal
			}
			i++
		}
	}
	return nil
}

// placementCheck checks one node of a placement after the other.
type placementCheck struct {
	m         *Machine
	own       *apiv1.Attempt // the attempt that is given another placement
	members   *NodeSet
	partition string
	exclusive bool
	seen      map[uint32]bool // only looked up, never ranged over
}

func (c *placementCheck) node(number, epoch uint32, g *apiv1.NodeGroup) *apiv1.ErrorDetail {
	n := c.m.s.Node(number)
	if n == nil {
		return refuse("NODE_UNKNOWN", fmt.Sprintf("node %d", number), "there is no node with the number %d", number)
	}
	name, subject := n.Spec.Name, "node "+n.Spec.Name
	stays := false
	if c.own != nil {
		_, index := holding(c.own, number)
		stays = index >= 0
	}
	switch {
	case c.seen[number]:
		return refuse("PLACEMENT_INVALID", subject, "node %s is in the placement twice", name)
	case n.State != nodeUp:
		return refuse("NODE_DOWN", subject, "node %s is down", name)
	case n.Drain && !stays: // What is on a drained node stays there.
		return refuse("NODE_DRAINED", subject, "node %s is drained: %s", name, n.Reason)
	case c.own != nil && isUnprepared(c.own, number):
		return refuse("NODE_UNPREPARED", subject, "node %s could not prepare this attempt before", name)
	case n.Epoch != epoch:
		return refuse("NODE_EPOCH", subject, "node %s is in epoch %d, not %d", name, n.Epoch, epoch)
	case !c.members.Has(number):
		return refuse("NODE_NOT_IN_PARTITION", subject, "node %s is not in partition %s", name, c.partition)
	case shape.Count(g.CpuMask) == 0:
		return refuse("PLACEMENT_INVALID", subject, "the placement takes no CPU of node %s", name)
	case shape.Beyond(g.CpuMask, n.Spec.Cpus), shape.Beyond(g.GpuMask, uint32(len(n.Spec.Gpus))):
		return refuse("PLACEMENT_INVALID", subject, "the placement takes devices that node %s does not have", name)
	}
	c.seen[number] = true
	if refusal := checkGres(n, g); refusal != nil {
		return refusal
	}
	if refusal := c.usable(n, g); refusal != nil {
		return refusal
	}
	return c.free(n, g)
}

// free checks that what the placement takes is nobody else's.
func (c *placementCheck) free(n *apiv1.Node, g *apiv1.NodeGroup) *apiv1.ErrorDetail {
	name, subject := n.Spec.Name, "node "+n.Spec.Name
	cpus, gpus, memory, others := n.CpusAllocatedMask, n.GpusAllocatedMask, n.MemoryAllocatedMb, n.Owners
	gres := n.GresAllocated
	if c.own != nil {
		key := state.PackAttempt(c.own.JobId, c.own.Number)
		if held, _ := holding(c.own, n.Number); held != nil {
			if held.leftover {
				return refuse("NODE_UNACCOUNTED", subject, "node %s has not accounted for an earlier placement of this attempt", name)
			}
			cpus, gpus, memory = shape.Without(cpus, held.cpus), shape.Without(gpus, held.gpus), memory-held.memory
			gres = shape.GresWithout(gres, held.gres)
			others = slices.DeleteFunc(slices.Clone(others), func(o uint64) bool { return o == key })
		}
	}
	switch {
	case shape.Overlap(cpus, g.CpuMask):
		return refuse("CPUS_TAKEN", subject, "CPUs of node %s that the placement takes belong to another job", name)
	case shape.Overlap(gpus, g.GpuMask):
		return refuse("GPUS_TAKEN", subject, "GPUs of node %s that the placement takes belong to another job", name)
	case shape.GresOverlap(gres, g.Gres):
		return refuse("GRES_TAKEN", subject, "devices of node %s that the placement takes belong to another job", name)
	case memory+g.MemoryMb > n.Spec.MemoryMb || memory+g.MemoryMb < memory:
		return refuse("MEMORY_TAKEN", subject, "node %s has %d MiB of memory, %d are taken, %d more are asked for",
			name, n.Spec.MemoryMb, memory, g.MemoryMb)
	case c.exclusive && len(others) > 0:
		return refuse("NODE_SHARED", subject, "the job wants node %s for itself, and another job is there", name)
	}
	for _, o := range others {
		id, _ := state.UnpackAttempt(o)
		if other := c.m.s.Job(id); c.m.isExclusive(other) {
			return refuse("NODE_EXCLUSIVE", subject, "job %d has node %s for itself", id, name)
		}
	}
	return nil
}

// isExclusive reports whether a placed job has its nodes for itself.
func (m *Machine) isExclusive(job *apiv1.Job) bool {
	if job == nil {
		return false
	}
	return job.Spec.Resources.GetExclusive() || m.s.Partition(job.Status.Partition).GetExclusive()
}

// leaveNodes gives up the nodes that a new placement of a preparing attempt does not have. They keep their devices until they
// have accounted for the attempt; those that stay give theirs back for a moment, to take what the new placement says.
func (m *Machine) leaveNodes(a *apiv1.Attempt, to *apiv1.Placement) {
	stays := make(map[uint32]bool)
	for _, g := range to.Groups {
		for _, n := range g.Nodes {
			stays[n] = true
		}
	}
	next := state.CopyAttempt(a)
	next.Revision = m.rev
	next.Leftovers = slices.Clone(a.Leftovers)
	i := 0
	for _, g := range a.Placement.Groups {
		for _, n := range g.Nodes {
			if stays[n] {
				m.freeDevices(a, n)
			} else {
				next.Leftovers = append(next.Leftovers, &apiv1.Leftover{
					Node: n, Placement: a.Fence.Placement, Epoch: a.Placement.Epochs[i],
					CpuMask: g.CpuMask, GpuMask: g.GpuMask, MemoryMb: g.MemoryMb, Gres: g.Gres,
				})
				m.s.Touch(n)
			}
			i++
		}
	}
	m.s.PutAttempt(next)
}

// takeNodes stores a checked placement. old is the attempt when it replaces one, else nil.
func (m *Machine) takeNodes(p *logv1.Place, job *apiv1.Job, old *apiv1.Attempt) {
	a := &apiv1.Attempt{
		JobId: job.Id, Number: p.Attempt, Revision: m.rev, State: attemptPreparing, Placement: p.Placement,
		Fence:     &apiv1.Fence{Incarnation: m.s.Incarnation(), Attempt: p.Attempt, Placement: p.PlacementNumber},
		PlaceTime: m.now(), TimeLimitS: job.Status.TimeLimitS,
	}
	if old != nil {
		a.PlaceTime, a.Leftovers, a.Signals, a.Unprepared = old.PlaceTime, old.Leftovers, old.Signals, old.Unprepared
	}
	var names []string
	totals := apiv1.JobStatus{NumTasks: uint32(shape.Tasks(p.Placement))}
	for _, g := range p.Placement.Groups {
		count := uint32(len(g.Nodes))
		totals.NumNodes += count
		totals.NumCpus += count * uint32(shape.Count(g.CpuMask))
		totals.NumGpus += count * uint32(shape.Count(g.GpuMask))
		totals.MemoryMb += uint64(count) * g.MemoryMb
		for _, n := range g.Nodes {
			a.Unaccounted = append(a.Unaccounted, n)
			names = append(names, m.s.Node(n).Spec.Name)
			m.takeDevices(n, state.PackAttempt(job.Id, p.Attempt), g)
			m.s.Touch(n)
		}
	}
	for _, l := range a.Leftovers {
		a.Unaccounted = append(a.Unaccounted, l.Node)
	}
	m.s.PutAttempt(a)
	m.changeJob(job, func(s *apiv1.JobStatus) {
		s.State, s.Attempt, s.Partition = jobConfiguring, p.Attempt, p.Partition
		s.Reason, s.Sentence, s.NotBefore, s.EndTime = apiv1.WaitReason_WAIT_REASON_UNSPECIFIED, "", nil, nil
		s.ExitCode, s.ExitSignal, s.DerivedExitCode, s.DerivedExitSignal = 0, 0, 0, 0
		s.NodeList, s.NumNodes, s.NumCpus, s.NumGpus = notation.Fold(names), totals.NumNodes, totals.NumCpus, totals.NumGpus
		s.MemoryMb, s.NumTasks = totals.MemoryMb, totals.NumTasks
	})
	m.putFirstStep(m.s.Job(job.Id), a)
}

// firstStepID returns the step that starts with the attempt and whose end ends it.
func firstStepID(kind apiv1.JobKind) (uint32, bool) {
	switch kind {
	case apiv1.JobKind_JOB_KIND_BATCH:
		return BatchStep, true
	case apiv1.JobKind_JOB_KIND_RUN:
		return 0, true
	default:
		return 0, false
	}
}

// putFirstStep creates the batch step on the first node, or step 0 over all nodes; a new placement lays it out anew.
func (m *Machine) putFirstStep(job *apiv1.Job, a *apiv1.Attempt) {
	id, has := firstStepID(job.Spec.Kind)
	if !has {
		return
	}
	spec := job.Spec
	step := &apiv1.Step{
		JobId: job.Id, Id: id, Attempt: a.Number, Revision: m.rev, State: apiv1.StepState_STEP_STATE_PREPARING,
		Placement: a.Placement, CreateTime: m.now(), NodeList: job.Status.NodeList, NumTasks: job.Status.NumTasks,
		Spec: &apiv1.StepSpec{
			Args: spec.Args, EnvironmentBlob: spec.EnvironmentBlob, WorkDir: spec.WorkDir,
			StdinPath: spec.StdinPath, StdoutPath: spec.StdoutPath, StderrPath: spec.StderrPath, OpenAppend: spec.OpenAppend,
			Umask: spec.Umask, Resources: spec.Resources, TaskOptions: spec.TaskOptions, SubmitHost: spec.SubmitHost,
			WarnSignal: spec.WarnSignal, NoKill: spec.NoKill,
		},
	}
	switch spec.Kind {
	case apiv1.JobKind_JOB_KIND_BATCH:
		g := a.Placement.Groups[0]
		step.Spec.Name, step.NumTasks = "batch", 1
		step.NodeList = m.s.Node(g.Nodes[0]).Spec.Name
		step.Placement = &apiv1.Placement{Epochs: a.Placement.Epochs[:1], Groups: []*apiv1.NodeGroup{
			{Nodes: g.Nodes[:1], CpuMask: g.CpuMask, GpuMask: g.GpuMask, MemoryMb: g.MemoryMb, Tasks: 1, Gres: g.Gres},
		}}
	default:
		step.Spec.Name = path.Base(spec.Args[0])
	}
	step.Unreported = nodesOf(step.Placement)
	if m.s.Step(job.Id, a.Number, id) == nil {
		m.holdBlobs(step.Spec.EnvironmentBlob)
	}
	m.s.PutStep(step)
}
