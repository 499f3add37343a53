package sacct

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/muster-hpc/muster/cmd/internal/slurm/record"
	"github.com/muster-hpc/muster/cmd/internal/slurm/value"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/notation"
)

// line is a row: an allocation, an earlier attempt of it, or a step.
type line struct {
	*record.Row
	attempt   *apiv1.Attempt   // an earlier attempt; nil for the last
	from, to  time.Time        // times are cut to these (--truncate); zero if not
	units     byte             // unit of sizes; 0 chooses the one that fits
	used      *apiv1.StepUsage // what the step, or the steps together, used; nil if nobody counted
	noconvert bool
}

// field is a column.
type field struct {
	name  string
	width int // negative: aligned to the left
	value func(*line) string
}

// jobOnly hides a value in the lines of steps.
func jobOnly(f func(*line) string) func(*line) string {
	return func(l *line) string {
		if l.Step != nil {
			return ""
		}
		return f(l)
	}
}

func number(n uint32) string { return strconv.FormatUint(uint64(n), 10) }

func (l *line) id() string {
	if l.Step != nil {
		return l.ID() + "." + record.StepName(l.Step.GetId())
	}
	return l.ID()
}

func (l *line) title() string {
	if l.Step != nil {
		return record.StepTitle(l.Step)
	}
	return l.Job.GetSpec().GetName()
}

// state is how the line's state is written: who cancelled a job is part of it.
func (l *line) state() string {
	switch {
	case l.Step != nil:
		return stepStates[l.Step.GetState()]
	case l.attempt != nil:
		return attemptStates[l.attempt.GetFailure()]
	}
	switch s := l.Job.GetStatus().GetState(); s {
	case apiv1.JobState_JOB_STATE_CANCELLED:
		return fmt.Sprintf("CANCELLED by %d", l.Job.GetStatus().GetCancelledBy())
	case apiv1.JobState_JOB_STATE_CONFIGURING:
		return "RUNNING"
	default:
		return value.StateOf(&apiv1.JobStatus{State: s}).Word
	}
}

// stepStates: as in Slurm, a step that ended with its job's time is cancelled.
var stepStates = map[apiv1.StepState]string{
	apiv1.StepState_STEP_STATE_PREPARING: "RUNNING", apiv1.StepState_STEP_STATE_RUNNING: "RUNNING",
	apiv1.StepState_STEP_STATE_COMPLETED: "COMPLETED", apiv1.StepState_STEP_STATE_FAILED: "FAILED",
	apiv1.StepState_STEP_STATE_CANCELLED: "CANCELLED", apiv1.StepState_STEP_STATE_TIMEOUT: "CANCELLED",
	apiv1.StepState_STEP_STATE_NODE_FAIL: "NODE_FAIL", apiv1.StepState_STEP_STATE_OUT_OF_MEMORY: "OUT_OF_MEMORY",
}

// attemptStates are the states of attempts after which the job was started again.
var attemptStates = map[apiv1.FailureClass]string{
	apiv1.FailureClass_FAILURE_CLASS_UNSPECIFIED: "REQUEUED", apiv1.FailureClass_FAILURE_CLASS_HARDWARE: "NODE_FAIL",
	apiv1.FailureClass_FAILURE_CLASS_LAUNCH: "BOOT_FAIL", apiv1.FailureClass_FAILURE_CLASS_PREEMPTION: "PREEMPTED",
	apiv1.FailureClass_FAILURE_CLASS_USER_CODE: "FAILED", apiv1.FailureClass_FAILURE_CLASS_OUT_OF_MEMORY: "OUT_OF_MEMORY",
	apiv1.FailureClass_FAILURE_CLASS_TIME_LIMIT: "TIMEOUT", apiv1.FailureClass_FAILURE_CLASS_HANG: "FAILED",
	apiv1.FailureClass_FAILURE_CLASS_CANCELLED: "CANCELLED", apiv1.FailureClass_FAILURE_CLASS_REQUEUED: "REQUEUED",
}

// exit is the line's exit code and signal.
func (l *line) exit() (code, signal uint32) {
	switch {
	case l.attempt != nil:
		return 0, 0
	case l.Step != nil:
		for _, e := range l.Step.GetExits() {
			if c := e.GetCode(); c > code {
				code = c
			}
			if s := e.GetSignal(); s > signal {
				signal = s
			}
		}
		return code, signal
	}
	return l.Job.GetStatus().GetExitCode(), l.Job.GetStatus().GetExitSignal()
}

func (l *line) start() time.Time {
	at := time.Time{}
	switch {
	case l.Step != nil:
		at = record.At(l.Step.GetStartTime())
	case l.attempt != nil:
		at = record.At(l.attempt.GetStartTime())
	case !l.Pending():
		at = record.At(l.Job.GetStatus().GetStartTime())
	}
	if !l.from.IsZero() && !at.IsZero() && at.Before(l.from) {
		return l.from
	}
	return at
}

func (l *line) end() time.Time {
	at := time.Time{}
	switch {
	case l.Step != nil:
		at = record.At(l.Step.GetEndTime())
	case l.attempt != nil:
		at = record.At(l.attempt.GetEndTime())
	case value.Ended(l.Job.GetStatus().GetState()):
		at = record.At(l.Job.GetStatus().GetEndTime())
	}
	if !l.to.IsZero() && (at.IsZero() || at.After(l.to)) && !l.start().IsZero() {
		return l.to
	}
	return at
}

// elapsed is for how long it has run, in seconds.
func (l *line) elapsed() int64 {
	start, end := l.start(), l.end()
	if start.IsZero() {
		return 0
	}
	if end.IsZero() {
		end = l.View.Now
	}
	return max(0, int64(end.Sub(start)/time.Second))
}

func (l *line) cpus() uint32 {
	switch {
	case l.Step != nil && l.Step.GetId() == record.BatchStep:
		return max(1, l.Job.GetStatus().GetNumCpus()/max(1, l.Job.GetStatus().GetNumNodes()))
	case l.Step != nil:
		return l.Step.GetNumTasks() * max(1, l.Step.GetSpec().GetResources().GetCpusPerTask())
	case l.Pending():
		return 0
	}
	return l.Job.GetStatus().GetNumCpus()
}

func (l *line) nodes() uint32 {
	if l.Step != nil {
		hosts, err := notation.Expand(l.Step.GetNodeList())
		if err != nil {
			return 1
		}
		return uint32(len(hosts))
	}
	return l.Nodes()
}

func (l *line) hosts() string {
	if list := l.NodeList(); list != "" {
		return list
	}
	return "None assigned"
}

// size writes MiB in the unit that was asked for.
func (l *line) size(mb uint64) string {
	switch {
	case mb == 0:
		return "0"
	case l.noconvert:
		return strconv.FormatUint(mb, 10) + "M"
	case l.units == 0:
		return value.Size(mb)
	}
	amount := float64(mb)
	for _, step := range []struct {
		unit   byte
		factor float64
	}{{'K', 1024}, {'M', 1}, {'G', 1.0 / 1024}, {'T', 1.0 / (1 << 20)}, {'P', 1.0 / (1 << 30)}} {
		if step.unit == l.units {
			amount *= step.factor
		}
	}
	return strings.TrimSuffix(strings.TrimRight(strconv.FormatFloat(amount, 'f', 2, 64), "0"), ".") + string(l.units)
}

func (l *line) reqMem() string {
	ask := l.Job.GetSpec().GetResources()
	if mb := ask.GetMemoryPerCpuMb(); mb > 0 {
		return l.size(mb * uint64(l.CPUs()))
	}
	return l.size(ask.GetMemoryPerNodeMb() * uint64(l.Nodes()))
}

func (l *line) planned() int64 {
	from := record.At(l.Job.GetStatus().GetSubmitTime())
	to := l.start()
	if to.IsZero() {
		to = l.View.Now
	}
	return max(0, int64(to.Sub(from)/time.Second))
}

func empty(*line) string { return "" }

func stamp(f func(*line) time.Time) func(*line) string {
	return func(l *line) string { return value.Stamp(f(l), "Unknown") }
}

func spec(f func(*apiv1.JobSpec) string) func(*line) string {
	return func(l *line) string { return f(l.Job.GetSpec()) }
}

// fields are all columns in the order of --helpformat.
var fields = []field{
	{"Account", 10, spec((*apiv1.JobSpec).GetAccount)},
	{"AdminComment", 19, empty},
	{"AllocCPUS", 10, func(l *line) string { return number(l.cpus()) }},
	{"AllocNodes", 10, func(l *line) string {
		if l.Pending() {
			return "0"
		}
		return number(l.nodes())
	}},
	{"AllocTRES", 10, func(l *line) string {
		if l.Step != nil {
			return fmt.Sprintf("cpu=%d,node=%d", l.cpus(), l.nodes())
		}
		return l.AllocTres()
	}},
	{"AssocID", 8, jobOnly(func(*line) string { return "0" })},
	{"AveCPU", 10, (*line).averageCPU}, {"AveCPUFreq", 10, empty}, {"AveDiskRead", 14, empty}, {"AveDiskWrite", 14, empty}, {"AvePages", 10, empty},
	{"AveRSS", 10, (*line).averageRSS}, {"AveVMSize", 10, empty}, {"BlockID", 16, empty},
	{"Cluster", 10, func(l *line) string { return l.View.Cluster }},
	{"Comment", 14, jobOnly(spec((*apiv1.JobSpec).GetComment))},
	{"Constraints", 19, empty}, {"ConsumedEnergy", 14, empty}, {"ConsumedEnergyRaw", 17, empty}, {"Container", 20, empty},
	{"CPUTime", 10, func(l *line) string { return value.Padded(l.elapsed() * int64(l.cpus())) }},
	{"CPUTimeRAW", 10, func(l *line) string { return strconv.FormatInt(l.elapsed()*int64(l.cpus()), 10) }},
	{"DBIndex", 10, jobOnly(func(*line) string { return "0" })},
	{"DerivedExitCode", 15, jobOnly(func(l *line) string {
		return value.AccountedExitCode(l.Job.GetStatus().GetDerivedExitCode(), l.Job.GetStatus().GetDerivedExitSignal())
	})},
	{"Elapsed", 10, func(l *line) string { return value.Padded(l.elapsed()) }},
	{"ElapsedRaw", 10, func(l *line) string { return strconv.FormatInt(l.elapsed(), 10) }},
	{"Eligible", 19, jobOnly(stamp(func(l *line) time.Time { return record.At(l.Job.GetStatus().GetEligibleTime()) }))},
	{"End", 19, stamp((*line).end)},
	{"ExitCode", 8, func(l *line) string { return value.AccountedExitCode(l.exit()) }},
	{"Extra", 20, empty}, {"FailedNode", 20, func(l *line) string {
		if l.attempt != nil {
			return l.attempt.GetFaultNode()
		}
		return ""
	}},
	{"Flags", 20, jobOnly(func(*line) string { return "SchedMain" })},
	{"GID", 6, jobOnly(func(l *line) string { return number(l.Job.GetOwner().GetGid()) })},
	{"Group", 9, jobOnly(func(l *line) string { return l.Group() })},
	{"JobID", -12, (*line).id},
	{"JobIDRaw", -12, (*line).id},
	{"JobName", 10, (*line).title},
	{"Layout", 9, func(l *line) string {
		if l.Step == nil || l.Step.GetId() == record.BatchStep {
			return ""
		}
		if d := l.Step.GetSpec().GetTaskOptions().GetDistribution(); d == "cyclic" {
			return "Cyclic"
		}
		return "Block"
	}},
	{"Licenses", 20, empty}, {"MaxDiskRead", 12, empty}, {"MaxDiskReadNode", 15, empty}, {"MaxDiskReadTask", 15, empty},
	{"MaxDiskWrite", 12, empty}, {"MaxDiskWriteNode", 16, empty}, {"MaxDiskWriteTask", 16, empty}, {"MaxPages", 8, empty},
	{"MaxPagesNode", 12, empty}, {"MaxPagesTask", 14, empty}, {"MaxRSS", 10, (*line).maxRSS}, {"MaxRSSNode", 10, (*line).maxRSSNode}, {"MaxRSSTask", 10, (*line).maxRSSTask},
	{"MaxVMSize", 10, empty}, {"MaxVMSizeNode", 14, empty}, {"MaxVMSizeTask", 14, empty}, {"McsLabel", 10, empty}, {"MinCPU", 10, empty},
	{"MinCPUNode", 10, empty}, {"MinCPUTask", 10, empty},
	{"NCPUS", 10, func(l *line) string { return number(l.cpus()) }},
	{"NNodes", 8, func(l *line) string { return number(l.nodes()) }},
	{"NodeList", 15, (*line).hosts},
	{"NTasks", 8, func(l *line) string {
		if l.Step == nil {
			return ""
		}
		return number(l.Step.GetNumTasks())
	}},
	{"Partition", 10, jobOnly(func(l *line) string { return l.PartitionName() })},
	{"Planned", 10, jobOnly(func(l *line) string { return value.Padded(l.planned()) })},
	{"PlannedCPU", 10, jobOnly(func(l *line) string { return value.Padded(l.planned() * int64(l.CPUs())) })},
	{"PlannedCPURAW", 13, jobOnly(func(l *line) string { return strconv.FormatInt(l.planned()*int64(l.CPUs()), 10) })},
	{"Priority", 10, jobOnly(func(l *line) string { return number(l.Priority()) })},
	{"QOS", 10, jobOnly(spec((*apiv1.JobSpec).GetQos))},
	{"QOSRAW", 10, jobOnly(func(*line) string { return "0" })},
	{"QOSREQ", 10, jobOnly(spec((*apiv1.JobSpec).GetQos))},
	{"Reason", 22, jobOnly(func(l *line) string { return l.Reason() })},
	{"ReqCPUFreq", 10, empty}, {"ReqCPUFreqGov", 13, empty}, {"ReqCPUFreqMax", 13, empty}, {"ReqCPUFreqMin", 13, empty},
	{"ReqCPUS", 8, func(l *line) string {
		if l.Step != nil {
			return number(l.cpus())
		}
		return number(l.CPUs())
	}},
	{"ReqMem", 10, jobOnly((*line).reqMem)},
	{"ReqNodes", 8, jobOnly(func(l *line) string { return number(l.Nodes()) })},
	{"ReqTRES", 10, jobOnly(func(l *line) string { return l.ReqTres() })},
	{"Reservation", 20, empty}, {"ReservationId", 15, empty},
	{"Restarts", 8, jobOnly(func(l *line) string { return number(l.Job.GetStatus().GetRestarts()) })},
	{"SegmentSize", 12, empty}, {"SLUID", 14, empty},
	{"Start", 19, stamp((*line).start)},
	{"State", 10, (*line).state},
	{"StdErr", 20, jobOnly(func(l *line) string { return l.Stderr() })},
	{"StdIn", 20, jobOnly(func(l *line) string { return l.Stdin() })},
	{"StdOut", 20, jobOnly(func(l *line) string { return l.Stdout() })},
	{"Submit", 19, stamp(func(l *line) time.Time {
		if l.Step != nil {
			return record.At(l.Step.GetCreateTime())
		}
		return record.At(l.Job.GetStatus().GetSubmitTime())
	})},
	{"SubmitLine", 20, jobOnly(func(l *line) string { return l.Command() })},
	{"Suspended", 10, func(*line) string { return "00:00:00" }},
	{"SystemComment", 19, empty}, {"SystemCPU", 10, cpuTime((*apiv1.StepUsage).GetSystemMs)},
	{"Timelimit", 10, jobOnly(func(l *line) string { return l.TimeLimit(value.Padded) })},
	{"TimelimitRaw", 12, jobOnly(func(l *line) string {
		return l.TimeLimit(func(s int64) string { return strconv.FormatInt(s/60, 10) })
	})},
	{"TotalCPU", 10, cpuTime(func(u *apiv1.StepUsage) uint64 { return u.GetUserMs() + u.GetSystemMs() })},
	{"TRESUsageInAve", 14, empty}, {"TRESUsageInMax", 14, empty}, {"TRESUsageInMaxNode", 18, empty}, {"TRESUsageInMaxTask", 18, empty},
	{"TRESUsageInMin", 14, empty}, {"TRESUsageInMinNode", 18, empty}, {"TRESUsageInMinTask", 18, empty}, {"TRESUsageInTot", 14, empty},
	{"TRESUsageOutAve", 15, empty}, {"TRESUsageOutMax", 15, empty}, {"TRESUsageOutMaxNode", 19, empty}, {"TRESUsageOutMaxTask", 19, empty},
	{"TRESUsageOutMin", 15, empty}, {"TRESUsageOutMinNode", 19, empty}, {"TRESUsageOutMinTask", 19, empty}, {"TRESUsageOutTot", 15, empty},
	{"UID", 6, jobOnly(func(l *line) string { return number(l.Job.GetOwner().GetUid()) })},
	{"User", 9, jobOnly(func(l *line) string { return l.User() })},
	{"UserCPU", 10, cpuTime((*apiv1.StepUsage).GetUserMs)},
	{"WCKey", 10, jobOnly(spec((*apiv1.JobSpec).GetWckey))},
	{"WCKeyID", 8, jobOnly(func(*line) string { return "0" })},
	{"WorkDir", 20, jobOnly(spec((*apiv1.JobSpec).GetWorkDir))},
}

// find returns a column by its name, in any case, or by a unique beginning of it.
func find(name string) (field, bool) {
	low := strings.ToLower(name)
	i := slices.IndexFunc(fields, func(f field) bool { return strings.ToLower(f.name) == low })
	if i < 0 {
		i = slices.IndexFunc(fields, func(f field) bool { return low != "" && strings.HasPrefix(strings.ToLower(f.name), low) })
	}
	if i < 0 {
		return field{}, false
	}
	return fields[i], true
}
