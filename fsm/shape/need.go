package shape

import (
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// Need is what a resource request comes to once its defaults are filled in.
type Need struct {
	// NodesMin and NodesMax bound the number of nodes; both are at least 1 and NodesMax is not below NodesMin.
	NodesMin, NodesMax uint64
	// Tasks is the number of tasks when NodesMin nodes are taken, at least 1.
	Tasks uint64
	// PerNode is set if the request gives the tasks of each node; then a larger number of nodes has more tasks, unless
	// the request gives the total too.
	PerNode uint64
	// CPUsPerTask is at least 1.
	CPUsPerTask uint64
	// GPUsPerNode is what each node must have for itself; 0 if not asked.
	GPUsPerNode uint64
	// GPUsTotal is the number of GPUs over all nodes; 0 if not asked.
	GPUsTotal uint64
	// GPUsPerTask is the number of GPUs of each task; 0 if not asked.
	GPUsPerTask uint64
	// TasksPerGPU is the number of tasks for each GPU; 0 if not asked.
	TasksPerGPU uint64
	// CPUsPerGPU is the number of CPUs for each GPU; 0 if not asked.
	CPUsPerGPU uint64
}

// Of returns what a request comes to. nil is one task on one node.
func Of(r *apiv1.ResourceRequest) Need {
	n := Need{
		NodesMin: uint64(r.GetNodesMin()), PerNode: uint64(r.GetNtasksPerNode()), Tasks: uint64(r.GetNtasks()),
		CPUsPerTask: max(1, uint64(r.GetCpusPerTask())),
		GPUsPerNode: uint64(r.GetGpusPerNode()), GPUsTotal: uint64(r.GetGpusTotal()), GPUsPerTask: uint64(r.GetGpusPerTask()),
	}
	named := uint64(len(r.GetNodeList()))
	n.withGPUs(r)
	if len(r.GetTaskNodes()) > 0 {
		n.Tasks = uint64(len(r.GetTaskNodes()))
		named = max(named, distinct(r.GetTaskNodes()))
	}
	if n.Tasks == 0 && n.GPUsPerTask > 0 && n.GPUsTotal > 0 {
		n.Tasks = max(1, n.GPUsTotal/n.GPUsPerTask)
	}
	if n.NodesMin == 0 {
		n.NodesMin = max(1, named)
		if n.PerNode > 0 && n.Tasks > 0 {
			n.NodesMin = max(n.NodesMin, (n.Tasks+n.PerNode-1)/n.PerNode)
		}
	}
	if n.Tasks == 0 {
		n.Tasks = n.NodesMin * max(1, n.PerNode)
	}
	switch {
	case r.GetNodesMax() > 0:
		n.NodesMax = max(n.NodesMin, uint64(r.GetNodesMax()))
	case r.GetNodesMin() > 0 || n.PerNode > 0:
		n.NodesMax = n.NodesMin
	default:
		n.NodesMax = max(n.NodesMin, n.Tasks)
	}
	if n.GPUsTotal == 0 && n.GPUsPerTask > 0 {
		n.GPUsTotal = n.Tasks * n.GPUsPerTask
	}
	return n
}

// withGPUs fills in what follows from requests by GPU.
func (n *Need) withGPUs(r *apiv1.ResourceRequest) {
	n.TasksPerGPU, n.CPUsPerGPU = uint64(r.GetNtasksPerGpu()), uint64(r.GetCpusPerGpu())
	for _, g := range r.GetGres() {
		if g.Name == gpuName {
			n.GPUsPerNode += uint64(g.Count)
		}
	}
	if n.CPUsPerGPU > 0 && n.GPUsPerTask > 0 {
		n.CPUsPerTask = max(n.CPUsPerTask, n.CPUsPerGPU*n.GPUsPerTask)
	}
	switch {
	case n.TasksPerGPU == 0:
	case n.Tasks == 0 && n.GPUsTotal > 0:
		n.Tasks = n.GPUsTotal * n.TasksPerGPU
	case n.Tasks == 0 && n.PerNode == 0:
		n.PerNode = n.GPUsPerNode * n.TasksPerGPU
	case n.Tasks > 0 && n.GPUsTotal == 0 && n.GPUsPerNode == 0 && n.GPUsPerTask == 0:
		n.GPUsTotal = (n.Tasks + n.TasksPerGPU - 1) / n.TasksPerGPU
	}
}

// distinct counts the different names in a list.
func distinct(names []string) uint64 {
	seen := make(map[string]bool, len(names))
	for _, name := range names {
		seen[name] = true
	}
	return uint64(len(seen))
}

// TasksPerNode returns the number of tasks that every node must hold: what the request gives, else 1.
func (n Need) TasksPerNode() uint64 { return max(1, n.PerNode) }
