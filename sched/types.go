package sched

import "github.com/muster-hpc/muster/proto/wiring"

// Time is a point in time in milliseconds since 1970 UTC.
type Time int64

// Never is later than every other Time.
const Never Time = 1<<63 - 1

// Unlimited is the time limit, in seconds, of a job that has none.
const Unlimited uint32 = 1<<32 - 1

// JobID is a job's number, from 1. Jobs submitted later have higher ids: the submit order.
type JobID uint32

// NodeID is a node's number, from 1.
type NodeID uint32

// NodeState says whether new work may be placed on a node.
type NodeState uint8

// States of a node for the planner.
const (
	// NodeUp takes new work.
	NodeUp NodeState = iota
	// NodeDrained takes no new work; what runs there goes on.
	NodeDrained
	// NodeDown is lost.
	NodeDown
)

// Node is a machine as the planner sees it.
type Node struct {
	ID    NodeID
	Name  string
	Epoch uint32
	State NodeState
	// Reason is why it is drained or down, as its operator wrote it; for sentences.
	Reason string
	// CPUs are numbered from 0.
	CPUs     uint32
	MemoryMB uint64
	// GPUs has the type of each GPU by its index; an empty string stands for an index that is missing.
	GPUs []string
	// UsedCPUs, UsedGPUs and UsedMemoryMB are owned by attempts, also by ended ones that are not accounted for.
	UsedCPUs     Mask
	UsedGPUs     Mask
	UsedMemoryMB uint64
	// UnusableCPUs and UnusableGPUs get no new work because of what checks found; Faults is the sentence that says what, for sentences.
	UnusableCPUs Mask
	UnusableGPUs Mask
	Faults       string
	// Degraded nodes are usable, but others are preferred; so are DegradedGPUs, and the nodes that have some.
	Degraded     bool
	DegradedGPUs Mask
	// Wiring has the GPUs by index, and NearCPUs the CPUs close to each; nil where that is not known.
	Wiring   wiring.Topology
	NearCPUs []Mask
	// Gres are the other devices; UsedGres is owned of them, by name.
	Gres     []Gres
	UsedGres []GresShare
	// Owners is the number of attempts that own something here; a whole-node job needs 0.
	Owners int
}

// Partition is a named set of nodes with limits.
type Partition struct {
	Name  string
	Nodes []NodeID
	// Tier orders partitions: jobs of a higher tier are considered first.
	Tier uint32
	Down bool
	// Exclusive gives every job whole nodes.
	Exclusive bool
	// MaxNodes bounds the nodes of a job; 0 means no bound.
	MaxNodes uint32
	// MaxTimeS bounds the time limit of a job in seconds; 0 means no bound.
	MaxTimeS uint32
	// DefaultMemoryPerCPUMB is charged where a job asks for no memory; 0 charges none.
	DefaultMemoryPerCPUMB uint64
}

// Request is what a job asks for. Zero means "not asked".
type Request struct {
	// NodesMin and NodesMax bound the number of nodes; NodesMin 0 means as few as the tasks need, NodesMax 0 means NodesMin.
	NodesMin, NodesMax uint32
	// Tasks in all; 0 means one per node, or TasksPerNode on each.
	Tasks uint32
	// TasksPerNode is the number on each node, or the most where Tasks is asked as well.
	TasksPerNode uint32
	// CPUsPerTask; 0 means 1.
	CPUsPerTask uint32
	// Memory in MiB on each node, for each allocated CPU, or for each allocated GPU. They add up where several are asked.
	MemoryPerNodeMB, MemoryPerCPUMB, MemoryPerGPUMB uint64
	// MemoryAll takes all memory of each node.
	MemoryAll bool
	// GPUs on each node, in all, of each task.
	GPUsPerNode, GPUsTotal, GPUsPerTask uint32
	// GPUType in lower case; empty means any.
	GPUType string
	// Gres are other devices on each node, and with the name "gpu" GPUs on each node, which excludes the numbers above.
	Gres []Gres
	// TasksPerGPU gives the tasks from the GPUs or the other way round; CPUsPerGPU gives the CPUs. 0 means not asked.
	TasksPerGPU, CPUsPerGPU uint32
	// Overcommit: tasks need no CPU of their own; each node gives one.
	Overcommit bool
	// Whole nodes, shared with nobody.
	Whole bool
	// Include names nodes that must be part of it, Exclude nodes that must not.
	Include, Exclude []string
}

// Job is a job that waits.
type Job struct {
	ID JobID
	// Attempt is the number of the attempt that a placement would begin.
	Attempt uint32
	// Partitions in order of preference.
	Partitions []string
	Priority   uint32
	// TimeLimitS in seconds, or Unlimited.
	TimeLimitS uint32
	Request    Request
	// Held by: 0 nobody, 1 its user, 2 an operator or the cluster itself.
	Held uint8
	// Cleaning: its last attempt is not accounted for everywhere.
	Cleaning bool
	// BeginAt is asked by the user; 0 if not.
	BeginAt Time
	// RetryAt is the end of a back-off after launch failures; 0 if none.
	RetryAt Time
	// Shown is the reason that the cluster shows now: Decisions.Changes leaves it out where it still holds.
	Shown Reason
}

// Claim is what an attempt owns until its end.
type Claim struct {
	Job JobID
	// End is the latest time at which its limit ends it; Never if it has no limit.
	End    Time
	Groups []Group
}

// Group is a run of nodes with the same devices, in rank order.
type Group struct {
	Nodes    []NodeID
	CPUs     Mask
	GPUs     Mask
	MemoryMB uint64
	// Tasks on each node.
	Tasks uint32
	// Gres are other devices on each, in the order of names.
	Gres []GresShare
}

// Gres is a number of generic resources of a name and type on a node. Empty types of requests mean any. The units of a node are numbered by
// name, in the order of its entries.
type Gres struct {
	Name, Type string
	Count      uint32
}

// GresShare is units of one name: bit i of the mask is unit i.
type GresShare struct {
	Name  string
	Units Mask
}

// Placement is the decision to start a job.
type Placement struct {
	Job       JobID
	Attempt   uint32
	Partition string
	Groups    []Group
	// Epochs of the nodes in rank order, as the planner knew them.
	Epochs []uint32
}

// Code is why a job waits.
type Code uint8

// Codes, in the words of Slurm's reasons.
const (
	// None: not considered yet.
	None Code = iota
	// Resources: the first of its partition that does not fit now.
	Resources
	// Priority: jobs in front of it wait for the same nodes.
	Priority
	// HeldUser: held by its user.
	HeldUser
	// HeldAdmin: held by an operator or by the cluster.
	HeldAdmin
	// BeginTime: its begin time has not come.
	BeginTime
	// NodeNotAvail: nodes that it needs are down or drained.
	NodeNotAvail
	// PartitionDown: its partition is down.
	PartitionDown
	// PartitionNodeLimit: it asks for more nodes than its partition allows.
	PartitionNodeLimit
	// PartitionTimeLimit: it asks for more time than its partition allows.
	PartitionTimeLimit
	// Backoff: launches failed; it waits before the next try.
	Backoff
	// Cleaning: an earlier attempt is not accounted for.
	Cleaning
	// BadConstraints: the cluster as configured can never run it.
	BadConstraints
)

// Reason is why a job waits. An empty sentence stands for the code's standard sentence.
type Reason struct {
	Code     Code
	Sentence string
}

// Limits bound one pass. A pass that stops at Tests or Work is gone on with by the next: half of these is for the front of the order then,
// and the rest for where the last pass stopped; each pass considers at least one job, and the first of every partition.
type Limits struct {
	// Placements is the most jobs placed.
	Placements int
	// Tests is the most jobs tried against the nodes; jobs that are refused because an equal one was do not count.
	Tests int
	// Work is the most node visits.
	Work int
	// Reservations is the most blocked jobs that get one; a partition has at most one.
	Reservations int
}

// DefaultLimits are those of the leader; docs/limits.md has the reasons.
func DefaultLimits() Limits {
	return Limits{Placements: 512, Tests: 20_000, Work: 4_000_000, Reservations: 8}
}
