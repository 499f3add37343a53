package salloc

import (
	"slices"
	"strconv"
	"strings"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/notation"
)

// others are variables of a job, step or task in which salloc was called: they are not those of the new job.
var others = strings.Fields(`
SLURMD_NODENAME SLURM_CPUS_ON_NODE SLURM_CPUS_PER_TASK SLURM_DISTRIBUTION SLURM_GPUS SLURM_GPUS_ON_NODE SLURM_GPUS_PER_NODE SLURM_GPUS_PER_TASK
SLURM_GTIDS SLURM_LAUNCH_NODE_IPADDR SLURM_LOCALID SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_MEM_PER_NODE SLURM_NNODES SLURM_NODEID SLURM_NODELIST
SLURM_NPROCS SLURM_NTASKS SLURM_NTASKS_PER_NODE SLURM_PRIO_PROCESS SLURM_PROCID SLURM_RESTART_COUNT SLURM_SRUN_COMM_HOST SLURM_SRUN_COMM_PORT
SLURM_STEPID SLURM_TASKS_PER_NODE SLURM_TASK_PID SLURM_TOPOLOGY_ADDR SLURM_TOPOLOGY_ADDR_PATTERN SLURM_UMASK SLURM_LABELIO
MUSTER_ATTEMPT MUSTER_PLACEMENT MUSTER_INCARNATION MUSTER_FENCE MUSTER_RESTART_REASON MUSTER_STEP_COOKIE`)

func foreign(name string) bool {
	return slices.Contains(others, name) || strings.HasPrefix(name, "SLURM_JOB_") || strings.HasPrefix(name, "SLURM_STEP_") || strings.HasPrefix(name, "SLURM_ARRAY_")
}

// environment is salloc's own with the variables of the job: those of a batch script, less what only a process on a node has.
func environment(r *run, answer *apiv1.GetJobResponse, cluster string) []string {
	job, shares := answer.GetJob(), answer.GetShares()
	spec, status, ask := job.GetSpec(), job.GetStatus(), job.GetSpec().GetResources()
	set := map[string]string{}
	number := func(name string, n uint64) { set[name] = strconv.FormatUint(n, 10) }
	given := func(name, text string) {
		if text != "" {
			set[name] = text
		}
	}
	number("SLURM_JOB_ID", uint64(job.GetId()))
	number("SLURM_JOBID", uint64(job.GetId()))
	number("MUSTER_JOB_ID", uint64(job.GetId()))
	number("MUSTER_ATTEMPT", uint64(status.GetAttempt()))
	set["SLURM_CLUSTER_NAME"], set["SLURM_JOB_NAME"], set["SLURM_JOB_PARTITION"] = cluster, spec.GetName(), status.GetPartition()
	set["SLURM_JOB_NODELIST"], set["SLURM_NODELIST"] = status.GetNodeList(), status.GetNodeList()
	number("SLURM_JOB_NUM_NODES", uint64(status.GetNumNodes()))
	number("SLURM_NNODES", uint64(status.GetNumNodes()))
	number("SLURM_JOB_UID", uint64(job.GetOwner().GetUid()))
	number("SLURM_JOB_GID", uint64(job.GetOwner().GetGid()))
	given("SLURM_JOB_USER", job.GetOwner().GetUser())
	given("SLURM_JOB_ACCOUNT", spec.GetAccount())
	if set["SLURM_JOB_QOS"] = spec.GetQos(); spec.GetQos() == "" {
		set["SLURM_JOB_QOS"] = "normal"
	}
	set["SLURM_SUBMIT_DIR"], set["SLURM_SUBMIT_HOST"] = r.s.Dir, r.s.Host
	var cpus, tasks []uint32
	for _, share := range shares {
		n, err := notation.ExpandIndexes(share.GetCpus())
		if err != nil {
			continue // the controllers write lists that can be read
		}
		cpus, tasks = append(cpus, uint32(len(n))), append(tasks, share.GetTasks())
	}
	given("SLURM_JOB_CPUS_PER_NODE", notation.FoldCounts(cpus))
	given("SLURM_TASKS_PER_NODE", notation.FoldCounts(tasks))
	if start := status.GetStartTime(); start != nil {
		number("SLURM_JOB_START_TIME", uint64(start.GetSeconds()))
		if limit := status.GetTimeLimitS(); limit != 0 && limit != unlimited {
			number("SLURM_JOB_END_TIME", uint64(start.GetSeconds())+uint64(limit))
		}
	}
	for name, n := range map[string]uint64{
		"SLURM_CPUS_PER_TASK": uint64(ask.GetCpusPerTask()), "SLURM_NTASKS_PER_NODE": uint64(ask.GetNtasksPerNode()),
		"SLURM_MEM_PER_CPU": ask.GetMemoryPerCpuMb(), "SLURM_MEM_PER_NODE": ask.GetMemoryPerNodeMb(), "SLURM_MEM_PER_GPU": ask.GetMemoryPerGpuMb(),
	} {
		if n > 0 {
			number(name, n)
		}
	}
	if ask.GetNtasks() > 0 || ask.GetNtasksPerNode() > 0 {
		number("SLURM_NTASKS", uint64(status.GetNumTasks()))
		number("SLURM_NPROCS", uint64(status.GetNumTasks()))
	}
	// Options that are defaults of the steps, as they were written.
	for name, option := range map[string]string{
		"SLURM_GPUS": "gpus", "SLURM_GPUS_PER_NODE": "gpus-per-node", "SLURM_GPUS_PER_TASK": "gpus-per-task", "SLURM_CPUS_PER_GPU": "cpus-per-gpu",
		"SLURM_NTASKS_PER_GPU": "ntasks-per-gpu", "SLURM_GPU_BIND": "gpu-bind", "SLURM_DISTRIBUTION": "distribution",
	} {
		given(name, r.options.Text(option))
	}
	if ask.GetOvercommit() {
		set["SLURM_OVERCOMMIT"] = "1"
	}
	var env []string
	for _, pair := range r.s.Environ {
		name, _, _ := strings.Cut(pair, "=")
		if _, replaced := set[name]; !replaced && !foreign(name) {
			env = append(env, pair)
		}
	}
	for name, text := range set {
		env = append(env, name+"="+text)
	}
	slices.Sort(env[len(env)-len(set):])
	return env
}

// unlimited is a time limit that does not end.
const unlimited = 4294967295
