package submit

import "github.com/muster-hpc/muster/cmd/internal/slurm/option"

// Reasons that several options share.
const (
	laterArrays    = "job arrays come with a later release; submit the tasks one by one"
	laterDepend    = "dependencies between jobs come with a later release"
	laterFeatures  = "nodes are chosen by resources, --nodelist and --exclude only"
	laterTopology  = "the planner does not know the network yet"
	laterBinding   = "tasks get the CPUs of their allocation and are not bound within it"
	laterLicenses  = "Muster does not count licenses"
	laterBurst     = "Muster has no burst buffers"
	laterContainer = "containers come with a later release"
	laterMail      = "Muster sends no mail; ask with squeue or sacct, or use --wait"
	laterProfile   = "Muster gathers no profiles"
	laterPower     = "Muster does not manage power"
	never          = "Muster has nothing that this could change"
	samePlace      = "there is one cluster here"
)

// either is a variable of the command, and the one that all commands share.
func either(env, name string) string {
	if env == "SLURM_" {
		return "SLURM_" + name
	}
	return env + name + ",SLURM_" + name
}

// common are the options that sbatch and srun share. env is the prefix of their variables.
func common(env string) []option.Option {
	const none, required, optional = option.None, option.Required, option.Optional
	return []option.Option{
		{Long: "account", Short: 'A', Arity: required, Meta: "NAME", Help: "account to charge", Env: env + "ACCOUNT"},
		{Long: "acctg-freq", Arity: required, Refused: laterProfile, Env: env + "ACCTG_FREQ"},
		{Long: "bb", Arity: required, Refused: laterBurst},
		{Long: "bbf", Arity: required, Refused: laterBurst},
		{Long: "begin", Short: 'b', Arity: required, Meta: "TIME", Help: "do not start before this time (16:00, now+1hour, 2026-12-01T08:00)"},
		{Long: "cluster-constraint", Arity: required, Refused: samePlace},
		{Long: "clusters", Short: 'M', Arity: required, Meta: "NAME", Help: "must name this cluster, or all", Env: either(env, "CLUSTERS")},
		{Long: "comment", Arity: required, Meta: "TEXT", Help: "text kept with the job"},
		{Long: "constraint", Short: 'C', Arity: required, Refused: laterFeatures, Env: env + "CONSTRAINT"},
		{Long: "container", Arity: required, Refused: laterContainer, Env: env + "CONTAINER"},
		{Long: "container-id", Arity: required, Refused: laterContainer, Env: env + "CONTAINER_ID"},
		{Long: "contiguous", Arity: none, Refused: laterTopology},
		{Long: "core-spec", Short: 'S', Arity: required, Refused: laterBinding, Env: env + "CORE_SPEC"},
		{Long: "cores-per-socket", Arity: required, Refused: laterBinding},
		{Long: "cpu-freq", Arity: required, Refused: laterPower, Env: env + "CPU_FREQ_REQ"},
		{Long: "cpus-per-gpu", Arity: required, Meta: "N", Help: "CPUs for each GPU", Env: env + "CPUS_PER_GPU"},
		{Long: "deadline", Arity: required, Refused: "jobs are not removed by a deadline yet"},
		{Long: "delay-boot", Arity: required, Refused: laterPower, Env: env + "DELAY_BOOT"},
		{Long: "dependency", Short: 'd', Arity: required, Refused: laterDepend, Env: env + "DEPENDENCY"},
		{Long: "distribution", Short: 'm', Arity: required, Meta: "block|cyclic|plane=N|arbitrary", Help: "how ranks are laid out over nodes, and after a colon over sockets and cores", Env: env + "DISTRIBUTION"},
		{Long: "exclude", Short: 'x', Arity: required, Meta: "HOSTS", Help: "nodes that must not be used"},
		{Long: "exclusive", Arity: optional, Help: "whole nodes, shared with nobody", Env: env + "EXCLUSIVE"},
		{Long: "extra", Arity: required, Refused: laterFeatures, Env: env + "EXTRA"},
		{Long: "extra-node-info", Short: 'B', Arity: required, Refused: laterBinding},
		{Long: "gid", Arity: required, Refused: "a job runs with the groups of its user"},
		{Long: "gpu-bind", Arity: required, Meta: "none|closest|single:N|per_task:N|map:LIST|mask:LIST", Help: "which GPUs of its node each task sees", Env: env + "GPU_BIND"},
		{Long: "gpu-freq", Arity: required, Refused: laterPower, Env: env + "GPU_FREQ"},
		{Long: "gpus", Short: 'G', Arity: required, Meta: "[TYPE:]N", Help: "GPUs of the job in all", Env: env + "GPUS"},
		{Long: "gpus-per-node", Arity: required, Meta: "[TYPE:]N", Help: "GPUs on each node", Env: env + "GPUS_PER_NODE"},
		{Long: "gpus-per-socket", Arity: required, Refused: laterBinding, Env: env + "GPUS_PER_SOCKET"},
		{Long: "gpus-per-task", Arity: required, Meta: "[TYPE:]N", Help: "GPUs of each task, seen by it alone", Env: env + "GPUS_PER_TASK"},
		{Long: "gres", Arity: required, Meta: "NAME[:TYPE][:N],...", Help: "generic resources on each node, of GPUs also several types; none for none", Env: env + "GRES"},
		{Long: "gres-flags", Arity: required, Refused: laterBinding, Env: env + "GRES_FLAGS"},
		{Long: "hint", Arity: required, Refused: laterBinding, Env: either(env, "HINT")},
		{Long: "hold", Short: 'H', Arity: none, Help: "submit held; scontrol release lets it go"},
		{Long: "job-name", Short: 'J', Arity: required, Meta: "NAME", Help: "name of the job", Env: env + "JOB_NAME"},
		{Long: "licenses", Short: 'L', Arity: required, Refused: laterLicenses},
		{Long: "mail-type", Arity: required, Meta: "NONE", Help: "only NONE: no mail is sent"},
		{Long: "mail-user", Arity: required, Meta: "ADDRESS", Help: "address for mail", Harmless: "without --mail-type no mail is due"},
		{Long: "mcs-label", Arity: required, Refused: never},
		{Long: "mem", Arity: required, Meta: "SIZE", Help: "memory on each node (512M, 16G); 0 is all of it", Env: env + "MEM_PER_NODE"},
		{Long: "mem-bind", Arity: required, Only: []string{"none", "no", "q", "quiet", "quiet,none", "q,none", "local", "quiet,local", "q,local"}, Refused: "memory comes from the NUMA node of the CPU that first touches it (--mem-bind=local), wherever there is room", Env: env + "MEM_BIND"},
		{Long: "mem-per-cpu", Arity: required, Meta: "SIZE", Help: "memory for each allocated CPU", Env: env + "MEM_PER_CPU"},
		{Long: "mem-per-gpu", Arity: required, Meta: "SIZE", Help: "memory for each allocated GPU", Env: env + "MEM_PER_GPU"},
		{Long: "mincpus", Arity: required, Refused: "ask with --cpus-per-task and --ntasks-per-node"},
		{Long: "network", Arity: required, Refused: laterTopology, Env: env + "NETWORK"},
		{Long: "nice", Arity: optional, Meta: "N", Value: "100", Help: "lower the priority by N (100)"},
		{Long: "no-kill", Short: 'k', Arity: optional, Meta: "off", Help: "losing nodes does not end the job: the tasks on the others go on", Env: env + "NO_KILL"},
		{Long: "nodefile", Short: 'F', Arity: required, Meta: "FILE", Help: "like --nodelist, with the names in a file"},
		{Long: "nodelist", Short: 'w', Arity: required, Meta: "HOSTS", Help: "nodes that must be part of the allocation"},
		{Long: "nodes", Short: 'N', Arity: required, Meta: "MIN[-MAX]", Help: "number of nodes"},
		{Long: "ntasks", Short: 'n', Arity: required, Meta: "N", Help: "number of tasks"},
		{Long: "ntasks-per-core", Arity: required, Refused: laterBinding, Env: env + "NTASKS_PER_CORE"},
		{Long: "ntasks-per-gpu", Arity: required, Meta: "N", Help: "tasks for each GPU", Env: env + "NTASKS_PER_GPU"},
		{Long: "ntasks-per-node", Arity: required, Meta: "N", Help: "tasks on each node"},
		{Long: "ntasks-per-socket", Arity: required, Refused: laterBinding},
		{Long: "oom-kill-step", Arity: optional, Refused: "a task that is killed for memory ends by itself"},
		{Long: "open-mode", Arity: required, Meta: "append|truncate", Help: "append to output files, or truncate them", Env: env + "OPEN_MODE"},
		{Long: "overcommit", Short: 'O', Arity: none, Help: "more tasks than CPUs may be put on a node", Env: env + "OVERCOMMIT"},
		{Long: "oversubscribe", Short: 's', Arity: none, Help: "agree to share resources, kept and shown: no partition here oversubscribes"},
		{Long: "partition", Short: 'p', Arity: required, Meta: "NAMES", Help: "partitions in order of preference", Env: env + "PARTITION"},
		{Long: "power", Arity: required, Refused: laterPower, Env: env + "POWER"},
		{Long: "prefer", Arity: required, Refused: laterFeatures, Env: env + "PREFER"},
		{Long: "priority", Arity: required, Meta: "N", Help: "priority (operators)"},
		{Long: "profile", Arity: required, Only: []string{"none"}, Refused: laterProfile, Env: env + "PROFILE"},
		{Long: "propagate", Arity: optional, Meta: "ALL|NONE|LIMITS", Help: "soft limits of this process for the tasks (NOFILE, STACK, ...)", Env: env + "PROPAGATE"},
		{Long: "qos", Short: 'q', Arity: required, Meta: "NAME", Help: "quality of service, kept and shown", Env: env + "QOS"},
		{Long: "quiet", Short: 'Q', Arity: none, Help: "no messages besides errors"},
		{Long: "reboot", Arity: none, Refused: laterPower},
		{Long: "reservation", Arity: required, Refused: "reservations come with a later release", Env: env + "RESERVATION"},
		{Long: "segment", Arity: required, Refused: laterTopology, Env: env + "SEGMENT_SIZE"},
		{Long: "signal", Arity: required, Meta: "[B:]SIGNAL[@SECONDS]", Help: "send a signal that long before the time limit (60): to the steps, with B: to the batch shell alone", Env: env + "SIGNAL"},
		{Long: "sockets-per-node", Arity: required, Refused: laterBinding},
		{Long: "spread-job", Arity: none, Refused: laterTopology, Env: env + "SPREAD_JOB"},
		{Long: "stepmgr", Arity: none, Refused: never},
		{Long: "switches", Arity: required, Refused: laterTopology, Env: env + "REQ_SWITCH"},
		{Long: "tasks-per-node", Arity: required, Same: "ntasks-per-node", Meta: "N"},
		{Long: "thread-spec", Arity: required, Refused: laterBinding, Env: env + "THREAD_SPEC"},
		{Long: "threads-per-core", Arity: required, Refused: laterBinding, Env: env + "THREADS_PER_CORE"},
		{Long: "time", Short: 't', Arity: required, Meta: "TIME", Help: "time limit (minutes, H:M:S, D-H:M:S)", Env: env + "TIMELIMIT"},
		{Long: "time-min", Arity: required, Refused: "a time limit is not shortened by the planner", Env: env + "TIME_MIN"},
		{Long: "tmp", Arity: required, Refused: "Muster does not count local disk"},
		{Long: "tres-bind", Arity: required, Refused: laterBinding, Env: env + "TRES_BIND"},
		{Long: "tres-per-task", Arity: required, Refused: "ask with --cpus-per-task and --gpus-per-task", Env: env + "TRES_PER_TASK"},
		{Long: "uid", Arity: required, Meta: "USER", Help: "must name the caller"},
		{Long: "usage", Arity: none, Help: "a short list of options"},
		{Long: "use-min-nodes", Arity: none, Refused: "the planner takes as few nodes as fit", Env: env + "USE_MIN_NODES"},
		{Long: "verbose", Short: 'v', Arity: none, Help: "say more", Env: env + "DEBUG"},
		{Long: "version", Short: 'V', Arity: none, Help: "the release of Slurm whose dialect is spoken"},
		{Long: "wckey", Arity: required, Meta: "KEY", Help: "the user's own key, kept and shown", Env: env + "WCKEY"},
		{Long: "help", Short: 'h', Arity: none, Help: "this text"},
	}
}

// Sbatch is the table of sbatch.
func Sbatch() *option.Table {
	const none, required, optional = option.None, option.Required, option.Optional
	rows := append(common("SBATCH_"), []option.Option{
		{Long: "array", Short: 'a', Arity: required, Refused: laterArrays, Env: "SBATCH_ARRAY_INX"},
		{Long: "batch", Arity: required, Refused: laterFeatures, Env: "SBATCH_BATCH"},
		{Long: "chdir", Short: 'D', Arity: required, Meta: "DIR", Help: "working directory of the job"},
		{Long: "cpus-per-task", Short: 'c', Arity: required, Meta: "N", Help: "CPUs of each task"},
		{Long: "error", Short: 'e', Arity: required, Meta: "FILE", Help: "file for stderr (patterns as in --output)", Env: "SBATCH_ERROR"},
		{Long: "export", Arity: required, Meta: "ALL|NONE|NAMES", Help: "variables for the job", Env: "SBATCH_EXPORT"},
		{Long: "export-file", Arity: required, Refused: "give the variables with --export"},
		{Long: "get-user-env", Arity: optional, Refused: "a job gets the environment it is submitted with", Env: "SBATCH_GET_USER_ENV"},
		{Long: "ignore-pbs", Arity: none, Help: "do not read #PBS lines", Env: "SBATCH_IGNORE_PBS"},
		{Long: "input", Short: 'i', Arity: required, Meta: "FILE", Help: "file for stdin of the script", Env: "SBATCH_INPUT"},
		{Long: "kill-on-invalid-dep", Arity: required, Meta: "yes|no", Help: "for jobs with dependencies", Harmless: "no job has dependencies yet", Env: "SBATCH_KILL_INVALID_DEP"},
		{Long: "output", Short: 'o', Arity: required, Meta: "FILE", Help: "file for stdout (%j job, %x name, %u user, %N node)", Env: "SBATCH_OUTPUT"},
		{Long: "parsable", Arity: none, Help: "print the job id alone"},
		{Long: "requeue", Arity: none, Value: "yes", Help: "start again after failures that are not the job's own", Env: "SBATCH_REQUEUE"},
		{Long: "no-requeue", Same: "requeue", Arity: none, Value: "no", Help: "never start again", Env: "SBATCH_NO_REQUEUE"},
		{Long: "test-only", Arity: none, Help: "check the options and submit nothing"},
		{Long: "wait", Short: 'W', Arity: none, Help: "return when the job has ended, with its exit code", Env: "SBATCH_WAIT"},
		{Long: "wait-all-nodes", Arity: required, Meta: "0|1", Help: "start when all nodes are ready", Harmless: "no process ever starts before every node is ready", Env: "SBATCH_WAIT_ALL_NODES"},
		{Long: "wrap", Arity: required, Meta: "COMMAND", Help: "run this shell command instead of a script"},
	}...)
	return &option.Table{Options: rows, StopAtOperand: true}
}
