package squeue

import (
	"strconv"

	"github.com/muster-hpc/muster/cmd/internal/slurm/format"
	"github.com/muster-hpc/muster/cmd/internal/slurm/record"
	"github.com/muster-hpc/muster/cmd/internal/slurm/value"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/notation"
)

func fold(names []string) string { return notation.Fold(names) }

// same are fields of -O that show what a letter shows, under a header of their own.
var same = []struct {
	name, header string
	letter       byte
}{
	{"account", "ACCOUNT", 'a'}, {"arrayjobid", "ARRAY_JOB_ID", 'F'}, {"arraytaskid", "ARRAY_TASK_ID", 'K'},
	{"batchhost", "EXEC_HOST", 'B'}, {"command", "COMMAND", 'o'}, {"comment", "COMMENT", 'k'},
	{"contiguous", "CONTIGUOUS", 'O'}, {"corespec", "CORE_SPEC", 'X'}, {"dependency", "DEPENDENCY", 'E'},
	{"endtime", "END_TIME", 'e'}, {"excnodes", "EXC_NODES", 'x'}, {"feature", "FEATURES", 'f'}, {"groupid", "GROUP", 'G'},
	{"groupname", "GROUP", 'g'}, {"jobarrayid", "JOBID", 'i'}, {"jobid", "JOBID", 'A'}, {"licenses", "LICENSES", 'W'},
	{"mincpus", "MIN_CPUS", 'c'}, {"minmemory", "MIN_MEMORY", 'm'}, {"mintmpdisk", "MIN_TMP_DISK", 'd'}, {"name", "NAME", 'j'},
	{"nice", "NICE", 'y'}, {"nodelist", "NODELIST", 'N'}, {"nodes", "NODES", 'N'}, {"numcpus", "CPUS", 'C'},
	{"numnodes", "NODES", 'D'}, {"oversubscribe", "OVER_SUBSCRIBE", 'h'}, {"partition", "PARTITION", 'P'},
	{"priority", "PRIORITY", 'p'}, {"prioritylong", "PRIORITY", 'Q'}, {"qos", "QOS", 'q'}, {"reason", "REASON", 'r'},
	{"reasonlist", "NODELIST(REASON)", 'R'}, {"reqnodes", "REQ_NODES", 'n'}, {"reservation", "RESERVATION", 'v'},
	{"schednodes", "SCHEDNODES", 'Y'}, {"sct", "S:C:T", 'z'}, {"starttime", "START_TIME", 'S'}, {"state", "STATE", 'T'},
	{"statecompact", "ST", 't'}, {"submittime", "SUBMIT_TIME", 'V'}, {"timeleft", "TIME_LEFT", 'L'},
	{"timelimit", "TIME_LIMIT", 'l'}, {"timeused", "TIME", 'M'}, {"tresPerNode", "TRES_PER_NODE", 'b'},
	{"userid", "USER", 'U'}, {"username", "USER", 'u'}, {"wckey", "WCKEY", 'w'}, {"workdir", "WORK_DIR", 'Z'},
	{"cores", "CORES_PER_SOCKET", 'I'}, {"sockets", "SOCKETS_PER_NODE", 'H'}, {"threads", "THREADS_PER_CORE", 'J'},
	{"gres", "TRES_PER_NODE", 'b'}, {"shared", "OVER_SUBSCRIBE", 'h'},
}

// absent are fields of -O that no job of Muster has.
var absent = []struct{ name, header, text string }{
	{"admincomment", "ADMIN_COMMENT", "(null)"}, {"arrayjobidraw", "ARRAY_JOB_ID", "0"}, {"associd", "ASSOC_ID", "0"},
	{"boardspernode", "BOARDS_PER_NODE", "N/A"}, {"burstbuffer", "BURST_BUFFER", "N/A"},
	{"burstbufferstate", "BURST_BUFFER_STATE", "N/A"}, {"clusterfeature", "CLUSTER_FEATURES", "(null)"},
	{"container", "CONTAINER", "(null)"}, {"containerid", "CONTAINER_ID", "(null)"}, {"cpufreq", "CPUFREQ", "N/A"},
	{"cpuspertres", "CPUS_PER_TRES", "N/A"}, {"deadline", "DEADLINE", "N/A"}, {"delayboot", "DELAY_BOOT", "00:00:00"},
	{"fednodes", "FED_NODES", "N/A"}, {"hetjobid", "HET_JOB_ID", "0"}, {"hetjobidset", "HET_JOB_ID_SET", "N/A"},
	{"hetjoboffset", "HET_JOB_OFFSET", "N/A"}, {"maxcpus", "MAX_CPUS", "0"}, {"mcslabel", "MCSLABEL", "N/A"}, {"lastschedeval", "LAST_SCHED_EVAL", "N/A"},
	{"mempertres", "MEM_PER_TRES", "N/A"}, {"mintime", "MIN_TIME", "N/A"}, {"network", "NETWORK", "(null)"},
	{"ntperboard", "TASKS_PER_BOARD", "N/A"}, {"ntpercore", "TASKS_PER_CORE", "N/A"},
	{"ntpersocket", "TASKS_PER_SOCKET", "N/A"}, {"origin", "ORIGIN", "N/A"}, {"originraw", "ORIGIN", "0"},
	{"preempttime", "PREEMPT_TIME", "N/A"}, {"prefer", "PREFER", "(null)"}, {"profile", "PROFILE", "0"},
	{"reboot", "REBOOT", "0"}, {"reqswitch", "REQ_SWITCH", "0"}, {"resizetime", "RESIZE_TIME", "N/A"},
	{"resvport", "RESV_PORTS", "0"}, {"siblingsactive", "ACTIVE_SIBLINGS", "N/A"}, {"siblingsactiveraw", "ACTIVE_SIBLINGS", "0"},
	{"siblingsviable", "VIABLE_SIBLINGS", "N/A"}, {"siblingsviableraw", "VIABLE_SIBLINGS", "0"},
	{"sperboard", "SOCKETS_PER_BOARD", "N/A"}, {"stepid", "STEPID", "N/A"}, {"stepname", "STEPNAME", "N/A"},
	{"stepstate", "STEPSTATE", "N/A"}, {"systemcomment", "SYSTEM_COMMENT", "(null)"}, {"tresbind", "TRES_BIND", "N/A"},
	{"tresfreq", "TRES_FREQ", "N/A"}, {"trespersocket", "TRES_PER_SOCKET", "N/A"}, {"tresperstep", "TRES_PER_STEP", "N/A"},
	{"wait4switch", "WAIT4SWITCH", "0"}, {"crondefaultpartition", "CRON", "N/A"},
}

// names returns the fields of -O by their normal names.
func names() map[string]field {
	all := map[string]field{}
	for _, s := range same {
		f := letters[s.letter]
		f.Header = s.header
		all[format.Normal(s.name)] = f
	}
	for _, a := range absent {
		all[a.name] = field{Header: a.header, Value: constant(a.text)}
	}
	for name, f := range own {
		all[name] = f
	}
	return all
}

func stamp(f func(*row) string, header string) field { return field{Header: header, Value: f} }

// own are fields of -O that have no letter.
var own = map[string]field{
	"accruetime": stamp(func(r *row) string { return value.Stamp(record.At(r.Job.GetStatus().GetEligibleTime()), "N/A") }, "ACCRUE_TIME"),
	"allocnodes": {Header: "ALLOC_NODES", Value: func(r *row) string { return orNA(r.Job.GetSpec().GetSubmitHost()) }, Full: true},
	"allocsid":   {Header: "ALLOC_SID", Value: constant("0")},
	"batchflag": {Header: "BATCH_FLAG", Value: func(r *row) string {
		if r.Job.GetSpec().GetKind() == apiv1.JobKind_JOB_KIND_BATCH {
			return "1"
		}
		return "0"
	}},
	"cluster":      {Header: "CLUSTER", Value: func(r *row) string { return r.View.Cluster }},
	"cpuspertask":  {Header: "CPUS_PER_TASK", Value: cpusPerTask},
	"derivedec":    {Header: "DERIVED_EC", Value: num(func(r *row) uint32 { return r.Job.GetStatus().GetDerivedExitCode() })},
	"eligibletime": stamp(func(r *row) string { return value.Stamp(record.At(r.Job.GetStatus().GetEligibleTime()), "N/A") }, "ELIGIBLE_TIME"),
	"exitcode":     {Header: "EXIT_CODE", Value: num(func(r *row) uint32 { return r.Job.GetStatus().GetExitCode() })},
	"maxnodes":     {Header: "MAX_NODES", Value: num(func(r *row) uint32 { return r.Job.GetSpec().GetResources().GetNodesMax() })},
	"ntpernode":    {Header: "TASKS_PER_NODE", Value: tasksPerNode},
	"numtasks":     {Header: "TASKS", Value: num((*row).Tasks)},
	"pendingtime": {Header: "PENDING_TIME", Value: func(r *row) string {
		from := record.At(r.Job.GetStatus().GetSubmitTime())
		to := record.At(r.Job.GetStatus().GetStartTime())
		if r.Pending() || to.IsZero() {
			to = r.View.Now
		}
		return strconv.FormatInt(max(0, int64(to.Sub(from).Seconds())), 10)
	}},
	"requeue":     {Header: "REQUEUE", Value: func(r *row) string { return bit(r.Job.GetSpec().GetRequeue()) }},
	"restartcnt":  {Header: "RESTART_COUNT", Value: num(func(r *row) uint32 { return r.Job.GetStatus().GetRestarts() })},
	"stderr":      {Header: "STDERR", Value: (*row).Stderr, Full: true},
	"stdin":       {Header: "STDIN", Value: (*row).Stdin, Full: true},
	"stdout":      {Header: "STDOUT", Value: (*row).Stdout, Full: true},
	"tresalloc":   {Header: "TRES_ALLOC", Value: tresAlloc},
	"tresperjob":  {Header: "TRES_PER_JOB", Value: func(r *row) string { return orNA(r.TresPerJob()) }},
	"trespertask": {Header: "TRES_PER_TASK", Value: func(r *row) string { return orNA(r.TresPerTask()) }},
}

func bit(b bool) string {
	if b {
		return "1"
	}
	return "0"
}

func cpusPerTask(r *row) string {
	if n := r.Job.GetSpec().GetResources().GetCpusPerTask(); n > 0 {
		return strconv.FormatUint(uint64(n), 10)
	}
	return "N/A"
}

func tasksPerNode(r *row) string {
	if n := r.Job.GetSpec().GetResources().GetNtasksPerNode(); n > 0 {
		return strconv.FormatUint(uint64(n), 10)
	}
	return "N/A"
}

// tresAlloc is what a job has; of a waiting one, what it asks for.
func tresAlloc(r *row) string {
	if text := r.AllocTres(); text != "" {
		return text
	}
	return r.ReqTres()
}

// stepNames are the fields of -O for steps.
func stepNames() map[string]field {
	all := names()
	for name, letter := range map[string]byte{
		"stepid": 'i', "stepname": 'j', "timeused": 'M', "timelimit": 'l', "nodes": 'N', "nodelist": 'N', "numtasks": 'A',
		"starttime": 'S', "jobarrayid": 'i', "name": 'j',
	} {
		f := stepLetters[letter]
		all[name] = f
	}
	all["stepstate"] = field{Header: "STEPSTATE", Value: func(r *row) string {
		if r.Step.GetState() == apiv1.StepState_STEP_STATE_PREPARING {
			return "PENDING"
		}
		return "RUNNING"
	}}
	return all
}
