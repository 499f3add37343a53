package environ

import (
	"slices"
	"strconv"
	"strings"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	"github.com/muster-hpc/muster/proto/notation"

	"github.com/muster-hpc/muster/node/bind"
)

// BatchStep is the id of the step that runs the batch script, Slurm's number for it.
const BatchStep uint32 = 4294967291

// Unlimited is a time limit that does not end.
const Unlimited uint32 = 4294967295

// Request is everything that the environment of a step's tasks on one node is made of.
type Request struct {
	// Node is the name of the node.
	Node string
	// Cluster is the name of the cluster.
	Cluster string
	// AgentSocket is the path of the local agent's socket.
	AgentSocket string
	// Commands is a directory with the cluster's commands, for the end of PATH; empty if there is none.
	Commands string
	// Home and Shell are those of the user's account; empty if unknown.
	Home, Shell string
	// Order is the attempt as the controllers want it here.
	Order *nodev1.DesiredAttempt
	// Step is the step of it.
	Step *nodev1.DesiredStep
	// User is the environment that came with the submission, NAME=value.
	User []string
	// Bindings say which devices each task uses, by its local id; nil, or a short list, for tasks that may use all of the step's.
	Bindings []Binding
	// GPUs are the node's accelerators; those that are missing there are named by their numbers.
	GPUs []*apiv1.Gpu
	// Reachable are the numbers of those that the step's processes can open, if the others are kept from them: libraries then count
	// these from 0. nil means that nothing is kept from them.
	Reachable []int
}

// Binding is which devices a task uses.
type Binding struct {
	// CPU is how the tasks of its part are bound to CPUs; nil if nobody asked.
	CPU *bind.CPUBinding
	// GPUs are the numbers of those that it sees, and Some: they are not simply all that the step has.
	GPUs []int
	Some bool
}

// own lists the variables that describe one job, step or task. Inherited ones belong to another and are dropped.
var own = strings.Fields(`
SLURMD_NODENAME SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_COUNT SLURM_ARRAY_TASK_ID SLURM_ARRAY_TASK_MAX SLURM_ARRAY_TASK_MIN
SLURM_ARRAY_TASK_STEP SLURM_CLUSTER_NAME SLURM_CPUS_ON_NODE SLURM_CPUS_PER_TASK SLURM_DISTRIBUTION SLURM_GPUS
SLURM_GPUS_ON_NODE SLURM_GPUS_PER_NODE SLURM_GPUS_PER_TASK SLURM_GTIDS SLURM_HET_SIZE SLURM_JOBID SLURM_JOB_ACCOUNT
SLURM_JOB_CPUS_PER_NODE SLURM_JOB_END_TIME SLURM_JOB_GID SLURM_JOB_GPUS SLURM_JOB_ID SLURM_JOB_NAME SLURM_JOB_NODELIST
SLURM_JOB_NUM_NODES SLURM_JOB_PARTITION SLURM_JOB_QOS SLURM_JOB_START_TIME SLURM_JOB_UID SLURM_JOB_USER SLURM_LABELIO
SLURM_LAUNCH_NODE_IPADDR SLURM_LOCALID SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_MEM_PER_NODE SLURM_NNODES SLURM_NODEID
SLURM_NODELIST SLURM_NODE_ALIASES SLURM_NPROCS SLURM_NTASKS SLURM_NTASKS_PER_NODE SLURM_PRIO_PROCESS SLURM_PROCID
SLURM_RESTART_COUNT SLURM_SRUN_COMM_HOST SLURM_SRUN_COMM_PORT SLURM_STEPID SLURM_STEP_GPUS SLURM_STEP_ID
SLURM_STEP_LAUNCHER_PORT SLURM_STEP_NODELIST SLURM_STEP_NUM_NODES SLURM_STEP_NUM_TASKS SLURM_STEP_TASKS_PER_NODE
SLURM_SUBMIT_DIR SLURM_SUBMIT_HOST SLURM_TASKS_PER_NODE SLURM_TASK_PID SLURM_TOPOLOGY_ADDR SLURM_TOPOLOGY_ADDR_PATTERN
SLURM_UMASK SLURM_WORKING_CLUSTER CUDA_VISIBLE_DEVICES GPU_DEVICE_ORDINAL MUSTER_JOB_ID MUSTER_ATTEMPT MUSTER_PLACEMENT
ROCR_VISIBLE_DEVICES ZE_AFFINITY_MASK SLURM_DIST_PLANESIZE SLURM_PTY_WIN_COL SLURM_PTY_WIN_ROW MUSTER_INCARNATION MUSTER_FENCE MUSTER_RESTART_REASON MUSTER_AGENT_SOCKET MUSTER_STEP_COOKIE MUSTER_PMI_SECRET
PMI_FD PMI_RANK PMI_SIZE PMI_JOBID PMI_PORT PMI_ID PMI_SPAWNED`)

// LaunchVariable is how srun says at which address its host is reached in the cluster. Tasks do not see it, so that what
// they start does not inherit it.
const LaunchVariable = "MUSTER_LAUNCH_ADDRESS"

// Tasks returns the environments of the step's tasks on this node, in the order of Step.ranks. The variables of Late
// are not yet among them.
func Tasks(r Request) [][]string {
	base := newVars(r.User)
	submitDir, submitHost := r.submitted(base)
	launcher := base.get(LaunchVariable)
	for _, name := range append([]string{LaunchVariable}, own...) {
		base.unset(name)
	}
	meeting := planRendezvous(r, base)
	r.account(base)
	r.job(base, submitDir, submitHost)
	r.muster(base)
	if r.batch() {
		r.batchStep(base)
	} else {
		r.step(base)
		base.setIf("SLURM_LAUNCH_NODE_IPADDR", launcher)
		base.setIf("SLURM_SRUN_COMM_HOST", launcher)
	}
	tasks := make([][]string, 0, len(r.Step.GetRanks()))
	for _, p := range Portions(r.Order, r.Step) {
		common := base.clone()
		if !r.batch() {
			p.variables(common)
		}
		for _, rank := range p.Ranks {
			i := len(tasks)
			v := common.clone()
			v.setNumber("SLURM_PROCID", uint64(rank))
			v.setNumber("SLURM_LOCALID", uint64(i))
			r.devices(v, p, i)
			meeting.task(v, rank, i)
			tasks = append(tasks, v.strings())
		}
	}
	return tasks
}

// Late returns the variables that are known only when the step starts: the place of the rendezvous, the job's times,
// the number of restarts. The supervisor gives them to every task whose environment does not have them already.
func Late(order *nodev1.DesiredAttempt, step *nodev1.DesiredStep) []string {
	v := newVars(nil)
	status := order.GetJob().GetStatus()
	if n := status.GetRestarts(); n > 0 {
		v.setNumber("SLURM_RESTART_COUNT", uint64(n))
	}
	if start := status.GetStartTime(); start != nil {
		v.set("SLURM_JOB_START_TIME", strconv.FormatInt(start.GetSeconds(), 10))
		if limit := order.GetTimeLimitS(); limit != Unlimited && limit != 0 {
			v.set("SLURM_JOB_END_TIME", strconv.FormatInt(start.GetSeconds()+int64(limit), 10))
		}
	}
	if wantsRendezvous(order, step) && step.GetMasterAddress() != "" && step.GetMasterPort() != 0 {
		v.set("MASTER_ADDR", step.GetMasterAddress())
		v.setNumber("MASTER_PORT", uint64(step.GetMasterPort()))
	}
	return v.strings()
}

func (r Request) batch() bool { return r.Step.GetStep().GetId() == BatchStep }

// submitted returns directory and host of the submission. A step created from within its own job inherits the job's.
func (r Request) submitted(user *vars) (dir, host string) {
	spec := r.Order.GetJob().GetSpec()
	if !r.batch() && user.get("SLURM_JOB_ID") == strconv.FormatUint(uint64(r.Order.GetJob().GetId()), 10) && user.has("SLURM_SUBMIT_DIR") {
		return user.get("SLURM_SUBMIT_DIR"), user.get("SLURM_SUBMIT_HOST")
	}
	dir = user.get("PWD")
	if !strings.HasPrefix(dir, "/") {
		dir = spec.GetWorkDir()
	}
	return dir, spec.GetSubmitHost()
}

// account sets what a login would, where the submission brought nothing (--export=NONE).
func (r Request) account(v *vars) {
	user := r.Order.GetJob().GetOwner().GetUser()
	v.setDefault("HOME", r.Home)
	v.setDefault("SHELL", r.Shell)
	v.setDefault("USER", user)
	v.setDefault("LOGNAME", user)
	v.setDefault("PATH", "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin")
	v.setDefault("TMPDIR", "/tmp")
	if path := v.get("PATH"); r.Commands != "" && !slices.Contains(strings.Split(path, ":"), r.Commands) {
		v.set("PATH", path+":"+r.Commands)
	}
}

// job sets what is the same in every step of the job.
func (r Request) job(v *vars, submitDir, submitHost string) {
	job, order := r.Order.GetJob(), r.Order
	spec, owner := job.GetSpec(), job.GetOwner()
	id := uint64(job.GetId())
	v.setIf("SLURM_CLUSTER_NAME", r.Cluster)
	v.setNumber("SLURM_JOB_ID", id)
	v.setNumber("SLURM_JOBID", id)
	v.set("SLURM_JOB_NAME", spec.GetName())
	v.setNumber("SLURM_JOB_UID", uint64(owner.GetUid()))
	v.setNumber("SLURM_JOB_GID", uint64(owner.GetGid()))
	v.set("SLURM_JOB_USER", owner.GetUser())
	v.setIf("SLURM_JOB_ACCOUNT", spec.GetAccount())
	v.set("SLURM_JOB_PARTITION", job.GetStatus().GetPartition())
	qos := spec.GetQos()
	if qos == "" {
		qos = "normal"
	}
	v.set("SLURM_JOB_QOS", qos)
	v.set("SLURM_JOB_NODELIST", order.GetNodeList())
	v.setNumber("SLURM_JOB_NUM_NODES", countNodes(order.GetNodeList()))
	v.set("SLURM_JOB_CPUS_PER_NODE", order.GetCpusPerNode())
	v.setIf("SLURM_SUBMIT_DIR", submitDir)
	v.setIf("SLURM_SUBMIT_HOST", submitHost)
	v.set("SLURMD_NODENAME", r.Node)
	v.set("SLURM_TOPOLOGY_ADDR", r.Node)
	v.set("SLURM_TOPOLOGY_ADDR_PATTERN", "node")
	v.set("SLURM_PRIO_PROCESS", "0")
	res := spec.GetResources()
	switch memory(v, res); {
	case res.GetMemoryAll() && order.GetMemoryMb() > 0:
		v.setNumber("SLURM_MEM_PER_NODE", order.GetMemoryMb())
	}
}

// batchStep sets what the batch script sees: the allocation as a whole.
func (r Request) batchStep(v *vars) {
	res := r.Order.GetJob().GetSpec().GetResources()
	v.set("SLURM_NODELIST", r.Order.GetNodeList())
	v.setNumber("SLURM_NNODES", countNodes(r.Order.GetNodeList()))
	v.setIf("SLURM_TASKS_PER_NODE", r.Order.GetTasksPerNode())
	v.set("SLURM_NODEID", "0")
	v.set("SLURM_GTIDS", "0")
	if res.GetNtasks() > 0 || res.GetNtasksPerNode() > 0 {
		v.setNumber("SLURM_NTASKS", uint64(r.Order.GetNumTasks()))
		v.setNumber("SLURM_NPROCS", uint64(r.Order.GetNumTasks()))
	}
	if text := r.Order.GetJob().GetSpec().GetTaskOptions().GetDistribution(); text != "" { // for its steps
		v.set("SLURM_DISTRIBUTION", distributionWord(v, text))
	}
	asked(v, res)
}

// step sets what the tasks of a parallel step see: the step's part of the allocation.
func (r Request) step(v *vars) {
	step := r.Step.GetStep()
	spec := step.GetSpec()
	nodes := countNodes(step.GetNodeList())
	tasks := uint64(step.GetNumTasks())
	v.setNumber("SLURM_STEP_ID", uint64(step.GetId()))
	v.setNumber("SLURM_STEPID", uint64(step.GetId()))
	v.set("SLURM_STEP_NODELIST", step.GetNodeList())
	v.setNumber("SLURM_STEP_NUM_NODES", nodes)
	v.setNumber("SLURM_STEP_NUM_TASKS", tasks)
	perNode := notation.FoldCounts(r.Step.GetTasksPerNode())
	v.set("SLURM_STEP_TASKS_PER_NODE", perNode)
	v.set("SLURM_TASKS_PER_NODE", perNode)
	v.set("SLURM_NODELIST", step.GetNodeList())
	v.setNumber("SLURM_NNODES", nodes)
	v.setNumber("SLURM_NTASKS", tasks)
	v.setNumber("SLURM_NPROCS", tasks)
	v.setNumber("SLURM_NODEID", uint64(r.Step.GetNodeIndex()))
	v.set("SLURM_GTIDS", joinNumbers(r.Step.GetRanks()))
	v.set("SLURM_UMASK", "0"+leftPad(strconv.FormatUint(uint64(spec.GetUmask()), 8), 3))
}

// asked sets variables that exist only where the option was given.
func asked(v *vars, res *apiv1.ResourceRequest) {
	number := func(name string, n uint32) {
		if n > 0 {
			v.setNumber(name, uint64(n))
		}
	}
	gpus := func(name string, n uint32) {
		if n == 0 {
			return
		}
		count := strconv.FormatUint(uint64(n), 10)
		if res.GetGpuType() != "" {
			count = res.GetGpuType() + ":" + count
		}
		v.set(name, count)
	}
	number("SLURM_CPUS_PER_TASK", res.GetCpusPerTask())
	number("SLURM_NTASKS_PER_NODE", res.GetNtasksPerNode())
	if res.GetGpusOption() == "gpus-per-node" {
		gpus("SLURM_GPUS_PER_NODE", res.GetGpusPerNode())
	}
	gpus("SLURM_GPUS", res.GetGpusTotal())
	gpus("SLURM_GPUS_PER_TASK", res.GetGpusPerTask())
}

// muster sets Muster's own variables.
func (r Request) muster(v *vars) {
	fence := r.Order.GetFence()
	incarnation := strconv.FormatUint(fence.GetIncarnation(), 10)
	attempt := strconv.FormatUint(uint64(fence.GetAttempt()), 10)
	placement := strconv.FormatUint(uint64(fence.GetPlacement()), 10)
	v.setNumber("MUSTER_JOB_ID", uint64(r.Order.GetJob().GetId()))
	v.set("MUSTER_ATTEMPT", attempt)
	v.set("MUSTER_PLACEMENT", placement)
	v.set("MUSTER_INCARNATION", incarnation)
	v.set("MUSTER_FENCE", incarnation+"."+attempt+"."+placement)
	v.setIf("MUSTER_RESTART_REASON", r.Order.GetRestartReason())
	v.setIf("MUSTER_AGENT_SOCKET", r.AgentSocket)
}

// countNodes returns the number of names in a host list; one that can't be read counts as one node.
func countNodes(list string) uint64 {
	n, err := notation.Count(list)
	if err != nil || n == 0 {
		return 1
	}
	return uint64(n)
}

func joinNumbers[T int | uint32](numbers []T) string {
	var b strings.Builder
	for i, n := range numbers {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(strconv.FormatInt(int64(n), 10))
	}
	return b.String()
}

func leftPad(s string, width int) string {
	return strings.Repeat("0", max(0, width-len(s))) + s
}
