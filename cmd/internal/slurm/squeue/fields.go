package squeue

import (
	"math"
	"strconv"

	"github.com/muster-hpc/muster/cmd/internal/slurm/format"
	"github.com/muster-hpc/muster/cmd/internal/slurm/record"
	"github.com/muster-hpc/muster/cmd/internal/slurm/value"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

type (
	row   = record.Row
	field = format.Field[*row]
)

// Shorthands for fields that Muster's jobs do not have, as Slurm writes their absence.
func constant(text string) func(*row) string { return func(*row) string { return text } }

func num(f func(*row) uint32) func(*row) string {
	return func(r *row) string { return strconv.FormatUint(uint64(f(r)), 10) }
}

func spec(f func(*apiv1.JobSpec) string) func(*row) string {
	return func(r *row) string { return value.Null(f(r.Job.GetSpec())) }
}

func orNA(text string) string {
	if text == "" {
		return "N/A"
	}
	return text
}

func gid(r *row) uint32 { return r.Job.GetOwner().GetGid() }
func uid(r *row) uint32 { return r.Job.GetOwner().GetUid() }

func startTime(r *row) string { return value.Stamp(r.Start(), "N/A") }

// endTime writes NONE where a start is known and an end is not, and N/A where nothing is known.
func endTime(r *row) string {
	if r.Start().IsZero() {
		return "N/A"
	}
	return value.Stamp(r.End(), "NONE")
}

func hosts(names []string) string { return fold(names) }

// letters are the fields of -o for jobs.
var letters = map[byte]field{
	'a': {Header: "ACCOUNT", Value: spec((*apiv1.JobSpec).GetAccount)},
	'A': {Header: "JOBID", Value: (*row).ID},
	'b': {Header: "TRES_PER_NODE", Value: func(r *row) string { return orNA(r.TresPerNode()) }},
	'B': {Header: "EXEC_HOST", Value: (*row).ExecHost},
	'c': {Header: "MIN_CPUS", Value: num((*row).MinCPUs)},
	'C': {Header: "CPUS", Value: num((*row).CPUs)},
	'd': {Header: "MIN_TMP_DISK", Value: constant("0")},
	'D': {Header: "NODES", Value: num((*row).Nodes)},
	'e': {Header: "END_TIME", Value: endTime},
	'E': {Header: "DEPENDENCY", Value: constant("(null)")},
	'f': {Header: "FEATURES", Value: constant("(null)")},
	'F': {Header: "ARRAY_JOB_ID", Value: (*row).ID},
	'g': {Header: "GROUP", Value: (*row).Group},
	'G': {Header: "GROUP", Value: num(gid)},
	'h': {Header: "OVER_SUBSCRIBE", Value: (*row).OverSubscribe},
	'H': {Header: "SOCKETS_PER_NODE", Value: constant("*")},
	'i': {Header: "JOBID", Value: (*row).ID},
	'I': {Header: "CORES_PER_SOCKET", Value: constant("*")},
	'j': {Header: "NAME", Value: func(r *row) string { return r.Job.GetSpec().GetName() }},
	'J': {Header: "THREADS_PER_CORE", Value: constant("*")},
	'k': {Header: "COMMENT", Value: spec((*apiv1.JobSpec).GetComment), Full: true},
	'K': {Header: "ARRAY_TASK_ID", Value: constant("N/A")},
	'l': {Header: "TIME_LIMIT", Value: func(r *row) string { return r.TimeLimit(value.Elapsed) }},
	'L': {Header: "TIME_LEFT", Value: (*row).TimeLeft},
	'm': {Header: "MIN_MEMORY", Value: (*row).MinMemory},
	'M': {Header: "TIME", Value: func(r *row) string { return value.Elapsed(r.Used()) }},
	'n': {Header: "REQ_NODES", Value: func(r *row) string { return hosts(r.Job.GetSpec().GetResources().GetNodeList()) }, Full: true},
	'N': {Header: "NODELIST", Value: (*row).NodeList},
	'o': {Header: "COMMAND", Value: func(r *row) string { return value.Null(r.Command()) }, Full: true},
	'O': {Header: "CONTIGUOUS", Value: constant("0")},
	'p': {Header: "PRIORITY", Value: func(r *row) string {
		return strconv.FormatFloat(float64(r.Priority())/math.MaxUint32, 'f', 14, 64)
	}},
	'P': {Header: "PARTITION", Value: (*row).PartitionName},
	'q': {Header: "QOS", Value: spec((*apiv1.JobSpec).GetQos)},
	'Q': {Header: "PRIORITY", Value: num((*row).Priority)},
	'r': {Header: "REASON", Value: (*row).Reason},
	'R': {Header: "NODELIST(REASON)", Value: (*row).Where},
	's': {Header: "", Value: constant("")},
	'S': {Header: "START_TIME", Value: startTime},
	't': {Header: "ST", Value: func(r *row) string { return r.State().Code }},
	'T': {Header: "STATE", Value: func(r *row) string { return r.State().Word }},
	'u': {Header: "USER", Value: (*row).User},
	'U': {Header: "UID", Value: num(uid)},
	'v': {Header: "RESERVATION", Value: constant("(null)")},
	'V': {Header: "SUBMIT_TIME", Value: func(r *row) string { return value.Stamp(record.At(r.Job.GetStatus().GetSubmitTime()), "N/A") }},
	'w': {Header: "WCKEY", Value: spec((*apiv1.JobSpec).GetWckey)},
	'W': {Header: "LICENSES", Value: constant("(null)")},
	'x': {Header: "EXC_NODES", Value: func(r *row) string { return hosts(r.Job.GetSpec().GetResources().GetExclude()) }, Full: true},
	'X': {Header: "CORE_SPEC", Value: constant("N/A")},
	'y': {Header: "NICE", Value: func(r *row) string { return strconv.Itoa(int(r.Job.GetSpec().GetNice())) }},
	'Y': {Header: "SCHEDNODES", Value: constant("(null)")},
	'z': {Header: "S:C:T", Value: constant("*:*:*")},
	'Z': {Header: "WORK_DIR", Value: spec((*apiv1.JobSpec).GetWorkDir), Full: true},
}

// stepLetters are the fields of -o for steps.
var stepLetters = map[byte]field{
	'A': {Header: "NTASKS", Value: num(func(r *row) uint32 { return r.Step.GetNumTasks() })},
	'b': {Header: "TRES_PER_NODE", Value: func(r *row) string { return orNA(r.TresPerNode()) }},
	'i': {Header: "STEPID", Value: stepID},
	'j': {Header: "NAME", Value: func(r *row) string { return record.StepTitle(r.Step) }},
	'l': {Header: "TIME_LIMIT", Value: stepLimit},
	'M': {Header: "TIME", Value: func(r *row) string { return value.Elapsed(stepUsed(r)) }},
	'N': {Header: "NODELIST", Value: (*row).NodeList},
	'P': {Header: "PARTITION", Value: (*row).PartitionName},
	'S': {Header: "START_TIME", Value: func(r *row) string { return value.Stamp(record.At(r.Step.GetStartTime()), "N/A") }},
	'u': {Header: "USER", Value: (*row).User},
	'U': {Header: "UID", Value: num(uid)},
}

func stepID(r *row) string { return r.ID() + "." + record.StepName(r.Step.GetId()) }

func stepLimit(r *row) string {
	if limit := r.Step.GetSpec().GetTimeLimitS(); limit != 0 && limit != value.Unlimited {
		return value.Elapsed(int64(limit))
	}
	return "UNLIMITED"
}

func stepUsed(r *row) int64 {
	start := record.At(r.Step.GetStartTime())
	if start.IsZero() {
		return 0
	}
	return max(0, int64(r.View.Now.Sub(start).Seconds()))
}
