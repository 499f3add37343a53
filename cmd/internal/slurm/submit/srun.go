package submit

import "github.com/muster-hpc/muster/cmd/internal/slurm/option"

// Srun is the table of srun.
func Srun() *option.Table {
	const none, required, optional = option.None, option.Required, option.Optional
	rows := common("SLURM_")
	for i := range rows {
		switch rows[i].Long {
		case "nodes":
			rows[i].Env = "SLURM_NNODES"
		case "ntasks":
			rows[i].Env = "SLURM_NTASKS"
		case "ntasks-per-node":
			rows[i].Env = "SLURM_NTASKS_PER_NODE"
		}
	}
	rows = append(rows, []option.Option{
		{Long: "accel-bind", Arity: required, Refused: laterBinding, Env: "SLURM_ACCEL_BIND"},
		{Long: "bcast", Arity: optional, Refused: "send the program to the nodes with sbcast before", Env: "SLURM_BCAST"},
		{Long: "bcast-exclude", Arity: required, Refused: "there is no --bcast", Env: "SLURM_BCAST_EXCLUDE"},
		{Long: "chdir", Short: 'D', Arity: required, Meta: "DIR", Help: "working directory of the tasks", Env: "SLURM_WORKING_DIR"},
		{Long: "compress", Arity: optional, Refused: "there is no --bcast"},
		{Long: "cpu-bind", Arity: required, Meta: "[verbose,]TYPE", Help: "bind tasks to CPUs: none, threads, cores, sockets, rank, map_cpu:LIST, mask_cpu:LIST", Env: "SLURM_CPU_BIND"},
		{Long: "cpus-per-task", Short: 'c', Arity: required, Meta: "N", Help: "CPUs of each task", Env: "SLURM_CPUS_PER_TASK"},
		{Long: "disable-status", Short: 'X', Arity: none, Help: "the first Ctrl-C goes to the tasks", Env: "SLURM_DISABLE_STATUS"},
		{Long: "epilog", Arity: required, Meta: "none|PROGRAM", Help: "program to run on this host after the step, with the command as its arguments", Env: "SLURM_EPILOG"},
		{Long: "error", Short: 'e', Arity: required, Meta: "all|none|RANK|FILE", Help: "where stderr goes", Env: "SLURM_STDERRMODE"},
		{Long: "exact", Arity: none, Help: "take only the CPUs that the tasks ask for, so that other steps can run beside", Env: "SLURM_EXACT"},
		{Long: "export", Arity: required, Meta: "ALL|NONE|NAMES", Help: "variables for the tasks", Env: "SLURM_EXPORT_ENV"},
		{Long: "external-launcher", Arity: none, Refused: "start the launcher as an ordinary step"},
		{Long: "het-group", Arity: required, Refused: "heterogeneous jobs come with a later release", Env: "SLURM_HET_GROUP"},
		{Long: "immediate", Short: 'I', Arity: optional, Meta: "SECONDS", Value: "1", Help: "give up if resources are not free within that time (1)", Env: "SLURM_IMMEDIATE"},
		{Long: "input", Short: 'i', Arity: required, Meta: "all|none|RANK|FILE", Help: "who gets stdin", Env: "SLURM_STDINMODE"},
		{Long: "interactive", Arity: none, Refused: "it belongs to salloc, which comes with a later release"},
		{Long: "jobid", Arity: required, Meta: "ID", Help: "run within this job"},
		{Long: "kill-on-bad-exit", Short: 'K', Arity: optional, Meta: "0|1", Value: "1", Help: "end the step when a task ends with an error", Env: "SLURM_KILL_BAD_EXIT"},
		{Long: "label", Short: 'l', Arity: none, Help: "put the rank in front of every line", Env: "SLURM_LABELIO"},
		{Long: "mpi", Arity: required, Meta: "none|pmi2|list", Help: "process management interface of MPI tasks", Env: "SLURM_MPI_TYPE"},
		{Long: "msg-timeout", Arity: required, Meta: "SECONDS", Help: "how long to wait for an answer of a node", Harmless: "srun asks again until it is answered"},
		{Long: "multi-prog", Arity: none, Help: "PROGRAM is a file that says what each rank runs", Env: "SLURM_MULTI_PROG"},
		{Long: "no-allocate", Short: 'Z', Arity: none, Refused: "work runs only within an allocation"},
		{Long: "output", Short: 'o', Arity: required, Meta: "all|none|RANK|FILE", Help: "where stdout goes", Env: "SLURM_STDOUTMODE"},
		{Long: "overlap", Arity: none, Help: "share CPUs, GPUs and memory with the other steps of the job", Env: "SLURM_OVERLAP"},
		{Long: "preserve-env", Short: 'E', Arity: none, Refused: "each step gets its own SLURM_NNODES and SLURM_NTASKS", Env: "SLURM_PRESERVE_ENV"},
		{Long: "prolog", Arity: required, Meta: "none|PROGRAM", Help: "program to run on this host before the step, with the command as its arguments", Env: "SLURM_PROLOG"},
		{Long: "pty", Arity: optional, Meta: "FD", Help: "give task 0 a terminal, and show it on this one"},
		{Long: "quit-on-interrupt", Arity: none, Help: "the first Ctrl-C ends the step"},
		{Long: "relative", Short: 'r', Arity: required, Meta: "N", Help: "begin at node N of the allocation, counted from 0"},
		{Long: "resv-ports", Arity: optional, Refused: "each step gets MASTER_PORT", Env: "SLURM_RESV_PORTS"},
		{Long: "send-libs", Arity: optional, Refused: "there is no --bcast", Env: "SLURM_SEND_LIBS"},
		{Long: "slurmd-debug", Arity: required, Refused: "read the agent's log", Env: "SLURM_SLURMD_DEBUG"},
		{Long: "task-epilog", Arity: required, Meta: "none|PROGRAM", Help: "program to run after each task", Env: "SLURM_TASK_EPILOG"},
		{Long: "task-prolog", Arity: required, Meta: "none|PROGRAM", Help: "program to run before each task; it can set variables for it", Env: "SLURM_TASK_PROLOG"},
		{Long: "test-only", Arity: none, Help: "check the options and run nothing", Env: "SLURM_TEST_ONLY"},
		{Long: "threads", Short: 'T', Arity: required, Help: "threads of srun itself", Meta: "N", Harmless: "srun reads all nodes at once", Env: "SLURM_THREADS"},
		{Long: "treewidth", Arity: required, Help: "width of message trees", Meta: "N", Harmless: "srun talks to each node itself", Env: "SLURM_TREE_WIDTH"},
		{Long: "unbuffered", Short: 'u', Arity: none, Help: "do not keep output back", Harmless: "output is never kept back", Env: "SLURM_UNBUFFEREDIO"},
		{Long: "wait", Short: 'W', Arity: required, Meta: "SECONDS", Help: "end the step this long after its first task has ended (0: never)", Env: "SLURM_WAIT"},
		{Long: "wait-for-children", Arity: none, Refused: "a task ends with its first process"},
		{Long: "x11", Arity: optional, Refused: "X11 is not forwarded"},
	}...)
	return &option.Table{Options: rows, StopAtOperand: true}
}
