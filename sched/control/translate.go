package control

import (
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/muster-hpc/muster/fsm"
	"github.com/muster-hpc/muster/fsm/state"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/sched"
)

// mirror keeps a planner's view equal to the replicated state.
type mirror struct {
	view *sched.View
	at   *apiv1.Revision
	// configured is the revision of the configuration that partitions were taken from; members the number of nodes then.
	configured *apiv1.Revision
	members    map[sched.NodeID]string
	// hardware is what nodes have, made once for each specification.
	hardware map[sched.NodeID]hardware
	// nodesOnly leaves jobs and claims out.
	nodesOnly bool
}

// follow brings the planner's view up to the state, by the changes since the last call if they are still known. It returns true if
// it had to start from scratch: then everything that the caller put into the view is gone.
func (m *mirror) follow(v *fsm.View) (rebuilt bool) {
	changes, ok := v.ChangedSince(m.at)
	if m.view == nil || !ok {
		m.rebuild(v)
		return true
	}
	regroup := fsm.CompareRevisions(v.ConfigurationRevision(), m.configured) != 0
	for c := range changes {
		if m.nodesOnly && c.Kind != state.ChangeNode {
			continue
		}
		switch c.Kind {
		case state.ChangeJob:
			m.job(v, c.Job)
			m.claim(v, c.Job)
		case state.ChangeAttempt:
			m.claim(v, c.Job)
		case state.ChangeNode:
			regroup = m.node(v, c.Node) || regroup
		case state.ChangeStep, state.ChangeCluster: // Steps share their allocation; the configuration is compared above.
		}
	}
	if regroup {
		m.partitions(v)
	}
	m.at = v.Revision()
	return false
}

func (m *mirror) rebuild(v *fsm.View) {
	m.view, m.members, m.hardware = sched.NewView(), map[sched.NodeID]string{}, map[sched.NodeID]hardware{}
	for n := range v.Nodes() {
		m.node(v, n.Number)
	}
	m.partitions(v)
	m.at = v.Revision()
	if m.nodesOnly {
		return
	}
	for j := range v.ActiveJobs() {
		m.job(v, j.Id)
		m.claim(v, j.Id)
	}
}

// node takes in a node; true if the partitions must be looked at again.
func (m *mirror) node(v *fsm.View, number uint32) bool {
	id := sched.NodeID(number)
	n := v.Node(number)
	if n == nil {
		m.view.RemoveNode(id)
		_, known := m.members[id]
		delete(m.members, id)
		delete(m.hardware, id)
		return known
	}
	s := n.Spec
	h := m.hardware[id]
	if h.spec != s {
		h = hardwareOf(s)
		m.hardware[id] = h
	}
	node := sched.Node{
		ID: id, Name: s.Name, Epoch: n.Epoch, Reason: n.Reason, CPUs: s.Cpus, MemoryMB: s.MemoryMb,
		UsedCPUs: n.CpusAllocatedMask, UsedGPUs: n.GpusAllocatedMask, UsedMemoryMB: n.MemoryAllocatedMb, Owners: len(n.Owners),
		UnusableCPUs: n.CpusUnusableMask, UnusableGPUs: n.GpusUnusableMask, UsedGres: shares(n.GresAllocated),
		GPUs: h.gpus, Wiring: h.wiring, NearCPUs: h.near, Gres: h.gres,
	}
	ailments(n, &node)
	switch {
	case n.State != apiv1.NodeState_NODE_STATE_UP:
		node.State = sched.NodeDown
	case n.Drain:
		node.State = sched.NodeDrained
	}
	m.view.SetNode(node)
	old, known := m.members[id]
	m.members[id] = s.Name
	return !known || old != s.Name
}

func (m *mirror) partitions(v *fsm.View) {
	var all []sched.Partition
	for _, p := range v.Configuration().GetPartitions() {
		part := sched.Partition{
			Name: p.Name, Tier: p.PriorityTier, Down: p.Down, Exclusive: p.Exclusive, MaxNodes: p.MaxNodes, MaxTimeS: p.MaxTimeS,
			DefaultMemoryPerCPUMB: p.DefaultMemoryPerCpuMb,
		}
		if set := v.PartitionNodes(p.Name); set != nil {
			for number := range set.All() {
				part.Nodes = append(part.Nodes, sched.NodeID(number))
			}
		}
		all = append(all, part)
	}
	m.view.SetPartitions(all)
	m.configured = v.ConfigurationRevision()
}

// job takes in a job if it waits.
func (m *mirror) job(v *fsm.View, id uint32) {
	j := v.Job(id)
	if j == nil || j.Status.State != apiv1.JobState_JOB_STATE_PENDING {
		m.view.RemoveJob(sched.JobID(id))
		return
	}
	m.view.SetJob(waitingJob(j))
}

// waitingJob is a job as it waits for its next attempt.
func waitingJob(j *apiv1.Job) sched.Job {
	s := j.Status
	job := sched.Job{
		ID: sched.JobID(j.Id), Attempt: s.Attempt + 1, Partitions: j.Spec.Partitions, Priority: s.Priority, TimeLimitS: s.TimeLimitS,
		Request: request(j.Spec.Resources), Held: uint8(s.Held), Cleaning: s.Completing,
		BeginAt: millis(j.Spec.BeginTime), RetryAt: millis(s.NotBefore),
		Shown: sched.Reason{Code: codeOf[s.Reason], Sentence: s.Sentence},
	}
	if len(job.Partitions) == 0 {
		job.Partitions = []string{s.Partition}
	}
	return job
}

// groupOf is a group of nodes, only those that are among some, or all if that is nil.
func groupOf(g *apiv1.NodeGroup, some map[uint32]bool) sched.Group {
	group := sched.Group{CPUs: g.CpuMask, GPUs: g.GpuMask, MemoryMB: g.MemoryMb, Tasks: g.Tasks, Gres: shares(g.Gres)}
	for _, n := range g.Nodes {
		if some == nil || some[n] {
			group.Nodes = append(group.Nodes, sched.NodeID(n))
		}
	}
	return group
}

func request(r *apiv1.ResourceRequest) sched.Request {
	asked := sched.Request{
		NodesMin: r.GetNodesMin(), NodesMax: r.GetNodesMax(), Tasks: r.GetNtasks(), TasksPerNode: r.GetNtasksPerNode(),
		CPUsPerTask: r.GetCpusPerTask(), MemoryPerNodeMB: r.GetMemoryPerNodeMb(), MemoryPerCPUMB: r.GetMemoryPerCpuMb(),
		MemoryPerGPUMB: r.GetMemoryPerGpuMb(), MemoryAll: r.GetMemoryAll(), GPUsPerNode: r.GetGpusPerNode(),
		GPUsTotal: r.GetGpusTotal(), GPUsPerTask: r.GetGpusPerTask(), GPUType: r.GetGpuType(), Whole: r.GetExclusive(),
		Include: r.GetNodeList(), Exclude: r.GetExclude(), TasksPerGPU: r.GetNtasksPerGpu(), CPUsPerGPU: r.GetCpusPerGpu(),
		Overcommit: r.GetOvercommit(),
	}
	for _, g := range r.GetGres() {
		asked.Gres = append(asked.Gres, sched.Gres{Name: g.Name, Type: g.Type, Count: g.Count})
	}
	// One task with memory for each of its GPUs has them on one node: so fsm checks and shows it.
	if asked.MemoryPerGPUMB > 0 && asked.GPUsTotal > 0 && asked.GPUsPerTask == 0 && asked.GPUsPerNode == 0 && asked.Tasks == 0 &&
		asked.TasksPerNode == 0 && asked.NodesMin == 0 && asked.NodesMax == 0 && len(asked.Include) <= 1 {
		asked.NodesMax = 1
	}
	return asked
}

// claim takes in what the job's current attempt owns.
func (m *mirror) claim(v *fsm.View, id uint32) {
	j := v.Job(id)
	var a *apiv1.Attempt
	if j != nil && j.Status.Attempt > 0 {
		a = v.Attempt(id, j.Status.Attempt)
	}
	if a == nil || a.State == apiv1.AttemptState_ATTEMPT_STATE_ENDED {
		m.view.RemoveClaim(sched.JobID(id))
		return
	}
	c := sched.Claim{Job: sched.JobID(id), End: endOf(a)}
	left := map[uint32]bool{}
	for _, n := range a.Unaccounted {
		left[n] = true
	}
	for _, g := range a.Placement.GetGroups() {
		if group := groupOf(g, left); len(group.Nodes) > 0 {
			c.Groups = append(c.Groups, group)
		}
	}
	m.view.SetClaim(c)
}

// endOf is the latest time at which an attempt's limit ends it.
func endOf(a *apiv1.Attempt) sched.Time {
	if a.State == apiv1.AttemptState_ATTEMPT_STATE_ENDING {
		return millis(a.EndTime)
	}
	if a.TimeLimitS == fsm.Unlimited || a.TimeLimitS == 0 {
		return sched.Never
	}
	from := a.StartTime
	if from == nil {
		from = a.PlaceTime
	}
	return millis(from) + sched.Time(a.TimeLimitS)*1000
}

// millis is a time for the planner, rounded up: nothing begins before its time. 0 if unset.
func millis(t *timestamppb.Timestamp) sched.Time {
	if t == nil {
		return 0
	}
	return sched.Time(t.AsTime().Add(time.Millisecond - 1).UnixMilli())
}

// reasonOf and codeOf translate the planner's codes.
var reasonOf = map[sched.Code]apiv1.WaitReason{
	sched.None:               apiv1.WaitReason_WAIT_REASON_UNSPECIFIED,
	sched.Resources:          apiv1.WaitReason_WAIT_REASON_RESOURCES,
	sched.Priority:           apiv1.WaitReason_WAIT_REASON_PRIORITY,
	sched.HeldUser:           apiv1.WaitReason_WAIT_REASON_JOB_HELD_USER,
	sched.HeldAdmin:          apiv1.WaitReason_WAIT_REASON_JOB_HELD_ADMIN,
	sched.BeginTime:          apiv1.WaitReason_WAIT_REASON_BEGIN_TIME,
	sched.NodeNotAvail:       apiv1.WaitReason_WAIT_REASON_REQ_NODE_NOT_AVAIL,
	sched.PartitionDown:      apiv1.WaitReason_WAIT_REASON_PARTITION_DOWN,
	sched.PartitionNodeLimit: apiv1.WaitReason_WAIT_REASON_PARTITION_NODE_LIMIT,
	sched.PartitionTimeLimit: apiv1.WaitReason_WAIT_REASON_PARTITION_TIME_LIMIT,
	sched.Backoff:            apiv1.WaitReason_WAIT_REASON_LAUNCH_BACKOFF,
	sched.Cleaning:           apiv1.WaitReason_WAIT_REASON_CLEANING,
	sched.BadConstraints:     apiv1.WaitReason_WAIT_REASON_BAD_CONSTRAINTS,
}

var codeOf = func() map[apiv1.WaitReason]sched.Code {
	m := map[apiv1.WaitReason]sched.Code{}
	for code, reason := range reasonOf {
		m[reason] = code
	}
	return m
}()

// placement translates a decision back.
func placement(p *sched.Placement) *apiv1.Placement {
	out := &apiv1.Placement{Epochs: p.Epochs}
	for _, g := range p.Groups {
		group := &apiv1.NodeGroup{CpuMask: g.CPUs, GpuMask: g.GPUs, MemoryMb: g.MemoryMB, Tasks: g.Tasks}
		for _, s := range g.Gres {
			group.Gres = append(group.Gres, &apiv1.GresShare{Name: s.Name, Mask: s.Units})
		}
		for _, n := range g.Nodes {
			group.Nodes = append(group.Nodes, uint32(n))
		}
		out.Groups = append(out.Groups, group)
	}
	return out
}
