// Package record says in Slurm's words what is known of jobs and steps: the values that squeue, scontrol and sacct
// show, whatever the layout.
//
// Invariants: a value that Muster does not have is written as Slurm writes its absence; nothing is invented. Times are
// relative to the state time of the answer, not to the local clock.
//
// It is called by the commands of cmd/internal/slurm. It never asks the cluster.
package record

import (
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/muster-hpc/muster/cmd/internal/slurm/value"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/notation"
)

// BatchStep is the id of the step in which the batch script runs.
const BatchStep = 4294967291

// Names translates ids of users and groups.
type Names interface {
	// UserName returns the name of a user id.
	UserName(uid uint32) string
	// GroupName returns the name of a group id.
	GroupName(gid uint32) string
}

// Row is a job, or a step of it, to be shown.
type Row struct {
	// Job is always set.
	Job *apiv1.Job
	// Step is set for rows about steps.
	Step *apiv1.Step
	// Partition replaces the job's partition in rows for each candidate; empty otherwise.
	Partition string
	// View is what rows of one listing share.
	View *View
}

// View is what rows of one listing share.
type View struct {
	// Names translates ids.
	Names Names
	// Now is the state time of the answer.
	Now time.Time
	// Cluster is the cluster's name.
	Cluster string
	// Raw leaves sizes in MiB (--noconvert).
	Raw bool
}

// At converts a moment; the zero time stands for "not set".
func At(t *timestamppb.Timestamp) time.Time {
	if t == nil {
		return time.Time{}
	}
	return t.AsTime().In(time.Local)
}

// Pending tells whether the job waits.
func (r *Row) Pending() bool { return r.Job.GetStatus().GetState() == apiv1.JobState_JOB_STATE_PENDING }

// State is the job's state.
func (r *Row) State() value.State { return value.StateOf(r.Job.GetStatus()) }

// ID is the job's id.
func (r *Row) ID() string { return strconv.FormatUint(uint64(r.Job.GetId()), 10) }

// StepName is a step's id as Slurm writes it: "batch", or its number.
func StepName(id uint32) string {
	if id == BatchStep {
		return "batch"
	}
	return strconv.FormatUint(uint64(id), 10)
}

// StepTitle is a step's name: that of its program, or "batch".
func StepTitle(step *apiv1.Step) string {
	if step.GetId() == BatchStep {
		return "batch"
	}
	return step.GetSpec().GetName()
}

// PartitionName is where the job runs or would run.
func (r *Row) PartitionName() string {
	if r.Partition != "" {
		return r.Partition
	}
	if r.Pending() && len(r.Job.GetSpec().GetPartitions()) > 1 {
		return strings.Join(r.Job.GetSpec().GetPartitions(), ",")
	}
	return r.Job.GetStatus().GetPartition()
}

// User is the owner's name.
func (r *Row) User() string {
	if name := r.Job.GetOwner().GetUser(); name != "" {
		return name
	}
	return r.View.Names.UserName(r.Job.GetOwner().GetUid())
}

// Group is the owner's group.
func (r *Row) Group() string { return r.View.Names.GroupName(r.Job.GetOwner().GetGid()) }

// Start is when the job started; of a waiting job, when it asked to begin.
func (r *Row) Start() time.Time {
	if r.Pending() {
		return At(r.Job.GetSpec().GetBeginTime())
	}
	return At(r.Job.GetStatus().GetStartTime())
}

// LimitSeconds is the time limit in force; ok is false if there is none.
func (r *Row) LimitSeconds() (seconds int64, ok bool) {
	limit := r.Job.GetStatus().GetTimeLimitS()
	if limit == 0 {
		limit = r.Job.GetSpec().GetTimeLimitS()
	}
	return int64(limit), limit != value.Unlimited && limit != 0
}

// End is when the job ended, or will at the latest; zero if that is not known.
func (r *Row) End() time.Time {
	if value.Ended(r.Job.GetStatus().GetState()) {
		return At(r.Job.GetStatus().GetEndTime())
	}
	start := r.Start()
	limit, ok := r.LimitSeconds()
	if start.IsZero() || !ok {
		return time.Time{}
	}
	return start.Add(time.Duration(limit) * time.Second)
}

// Used is for how long the current or last attempt has run, in seconds.
func (r *Row) Used() int64 {
	status := r.Job.GetStatus()
	start := At(status.GetStartTime())
	if start.IsZero() || r.Pending() || status.GetState() == apiv1.JobState_JOB_STATE_CONFIGURING {
		return 0
	}
	end := r.View.Now
	if value.Ended(status.GetState()) {
		end = At(status.GetEndTime())
	}
	return max(0, int64(end.Sub(start)/time.Second))
}

// TimeLimit writes the limit with the given form of durations.
func (r *Row) TimeLimit(form func(int64) string) string {
	limit, ok := r.LimitSeconds()
	if !ok {
		return "UNLIMITED"
	}
	return form(limit)
}

// TimeLeft is what the limit leaves.
func (r *Row) TimeLeft() string {
	limit, ok := r.LimitSeconds()
	if !ok {
		return "UNLIMITED"
	}
	return value.Elapsed(max(0, limit-r.Used()))
}

// Nodes is how many nodes the job has, or asks for at least.
func (r *Row) Nodes() uint32 {
	if n := r.Job.GetStatus().GetNumNodes(); n > 0 && !r.Pending() {
		return n
	}
	ask := r.Job.GetSpec().GetResources()
	n := max(ask.GetNodesMin(), 1)
	if per := ask.GetNtasksPerNode(); per > 0 {
		n = max(n, (ask.GetNtasks()+per-1)/per)
	}
	return n
}

// Tasks is how many tasks the job has or asks for.
func (r *Row) Tasks() uint32 {
	if n := r.Job.GetStatus().GetNumTasks(); n > 0 && !r.Pending() {
		return n
	}
	ask := r.Job.GetSpec().GetResources()
	switch {
	case ask.GetNtasks() > 0:
		return ask.GetNtasks()
	case ask.GetNtasksPerNode() > 0:
		return ask.GetNtasksPerNode() * r.Nodes()
	}
	return r.Nodes()
}

// CPUsPerTask is what each task asks for.
func (r *Row) CPUsPerTask() uint32 { return max(1, r.Job.GetSpec().GetResources().GetCpusPerTask()) }

// CPUs is how many CPUs the job has or asks for.
func (r *Row) CPUs() uint32 {
	if n := r.Job.GetStatus().GetNumCpus(); n > 0 && !r.Pending() {
		return n
	}
	return max(r.Tasks()*r.CPUsPerTask(), r.Nodes())
}

// MinCPUs is what it asks for on each node at least.
func (r *Row) MinCPUs() uint32 {
	return r.CPUsPerTask() * max(1, r.Job.GetSpec().GetResources().GetNtasksPerNode())
}

// NodeList is where it runs or ran; empty while it waits.
func (r *Row) NodeList() string {
	if r.Step != nil {
		return r.Step.GetNodeList()
	}
	if r.Pending() {
		return ""
	}
	return r.Job.GetStatus().GetNodeList()
}

// Reason is why it waits or how it ended.
func (r *Row) Reason() string { return value.Reason(r.Job.GetStatus()) }

// Where is the node list of a job that has one and the reason in brackets otherwise; a failed job shows its reason.
func (r *Row) Where() string {
	switch r.Job.GetStatus().GetState() {
	case apiv1.JobState_JOB_STATE_PENDING, apiv1.JobState_JOB_STATE_FAILED, apiv1.JobState_JOB_STATE_TIMEOUT,
		apiv1.JobState_JOB_STATE_NODE_FAIL, apiv1.JobState_JOB_STATE_OUT_OF_MEMORY, apiv1.JobState_JOB_STATE_BOOT_FAIL,
		apiv1.JobState_JOB_STATE_DEADLINE:
		return "(" + r.Reason() + ")"
	}
	return r.NodeList()
}

// FirstHost is the first node of its placement; empty if it has none.
func (r *Row) FirstHost() string {
	list := r.NodeList()
	if !strings.ContainsAny(list, "[,") {
		return list
	}
	if hosts, err := notation.Expand(list); err == nil && len(hosts) > 0 {
		return hosts[0]
	}
	return list
}

// ExecHost is where its script runs, or from where its command was started.
func (r *Row) ExecHost() string {
	if r.Job.GetSpec().GetKind() != apiv1.JobKind_JOB_KIND_BATCH {
		return r.Job.GetSpec().GetSubmitHost()
	}
	if host := r.FirstHost(); host != "" {
		return host
	}
	return "n/a"
}

// Size writes MiB.
func (r *Row) Size(mb uint64) string {
	if r.View.Raw && mb > 0 {
		return strconv.FormatUint(mb, 10) + "M"
	}
	return value.Size(mb)
}

// MinMemory is the memory it asks for on a node, or for a CPU.
func (r *Row) MinMemory() string {
	ask := r.Job.GetSpec().GetResources()
	if ask.GetMemoryPerCpuMb() > 0 {
		return r.Size(ask.GetMemoryPerCpuMb())
	}
	return r.Size(ask.GetMemoryPerNodeMb())
}

// gpu writes a number of GPUs as a trackable resource.
func gpu(kind string, n uint32) string {
	if n == 0 {
		return ""
	}
	if kind != "" {
		kind += ":"
	}
	return "gres/gpu:" + kind + strconv.FormatUint(uint64(n), 10)
}

// TresPerNode is the devices it asks for on each node; empty if none.
func (r *Row) TresPerNode() string {
	ask := r.Job.GetSpec().GetResources()
	text := gpu(ask.GetGpuType(), ask.GetGpusPerNode())
	for _, g := range ask.GetGres() {
		kind := g.GetType()
		if kind != "" {
			kind += ":"
		}
		text += ",gres/" + g.GetName() + ":" + kind + strconv.FormatUint(uint64(g.GetCount()), 10)
	}
	return strings.TrimPrefix(text, ",")
}

// TresPerJob is the GPUs it asks for in all.
func (r *Row) TresPerJob() string {
	ask := r.Job.GetSpec().GetResources()
	return gpu(ask.GetGpuType(), ask.GetGpusTotal())
}

// TresPerTask is what it asks for each task.
func (r *Row) TresPerTask() string {
	ask := r.Job.GetSpec().GetResources()
	text := gpu(ask.GetGpuType(), ask.GetGpusPerTask())
	if ask.GetCpusPerTask() > 0 {
		text = strings.TrimSuffix("cpu="+strconv.FormatUint(uint64(ask.GetCpusPerTask()), 10)+","+text, ",")
	}
	return text
}

// tres writes resources in Slurm's order.
func tres(cpus uint32, memoryMB uint64, nodes, gpus uint32, kind string) string {
	text := "cpu=" + strconv.FormatUint(uint64(cpus), 10)
	if memoryMB > 0 {
		text += ",mem=" + value.Size(memoryMB)
	}
	text += ",node=" + strconv.FormatUint(uint64(nodes), 10) + ",billing=" + strconv.FormatUint(uint64(cpus), 10)
	if gpus > 0 {
		text += ",gres/gpu=" + strconv.FormatUint(uint64(gpus), 10)
		if kind != "" {
			text += ",gres/gpu:" + kind + "=" + strconv.FormatUint(uint64(gpus), 10)
		}
	}
	return text
}

// GPUs is how many GPUs it asks for in all.
func (r *Row) GPUs() uint32 {
	ask := r.Job.GetSpec().GetResources()
	return max(ask.GetGpusTotal(), ask.GetGpusPerNode()*r.Nodes(), ask.GetGpusPerTask()*r.Tasks())
}

// ReqTres is what it asks for.
func (r *Row) ReqTres() string {
	ask := r.Job.GetSpec().GetResources()
	mb := ask.GetMemoryPerNodeMb() * uint64(r.Nodes())
	if ask.GetMemoryPerCpuMb() > 0 {
		mb = ask.GetMemoryPerCpuMb() * uint64(r.CPUs())
	}
	return tres(r.CPUs(), mb, r.Nodes(), r.GPUs(), ask.GetGpuType())
}

// AllocTres is what it has or had; empty before its first placement.
func (r *Row) AllocTres() string {
	status := r.Job.GetStatus()
	if r.Pending() || status.GetNumNodes() == 0 {
		return ""
	}
	return tres(status.GetNumCpus(), status.GetMemoryMb(), status.GetNumNodes(), status.GetNumGpus(), r.Job.GetSpec().GetResources().GetGpuType())
}

// OverSubscribe tells whether its nodes may be shared.
func (r *Row) OverSubscribe() string {
	switch ask := r.Job.GetSpec().GetResources(); {
	case ask.GetExclusive():
		return "NO"
	case ask.GetOversubscribe():
		return "YES"
	}
	return "OK"
}

// Priority is by what it is ordered; a held job has none.
func (r *Row) Priority() uint32 {
	if r.Job.GetStatus().GetHeld() != 0 && r.Pending() {
		return 0
	}
	return r.Job.GetStatus().GetPriority()
}

// Command is what runs.
func (r *Row) Command() string {
	spec := r.Job.GetSpec()
	if spec.GetKind() == apiv1.JobKind_JOB_KIND_RUN && spec.GetCommandLine() == "" && len(spec.GetArgs()) > 0 {
		return spec.GetArgs()[0]
	}
	if spec.GetCommandLine() == "(null)" {
		return ""
	}
	return spec.GetCommandLine()
}

// File expands the patterns of a file name that do not depend on the node: %j %A %x %u %a.
func (r *Row) File(pattern string) string {
	if !strings.Contains(pattern, "%") {
		return pattern
	}
	var b strings.Builder
	for i := 0; i < len(pattern); i++ {
		if pattern[i] != '%' || i+1 == len(pattern) {
			b.WriteByte(pattern[i])
			continue
		}
		i++
		switch pattern[i] {
		case 'j', 'A':
			b.WriteString(r.ID())
		case 'x':
			b.WriteString(r.Job.GetSpec().GetName())
		case 'u':
			b.WriteString(r.User())
		case 'a':
			b.WriteString("4294967294")
		default:
			b.WriteByte('%')
			b.WriteByte(pattern[i])
		}
	}
	return b.String()
}

// Stdout is the file of its standard output.
func (r *Row) Stdout() string {
	spec := r.Job.GetSpec()
	switch {
	case spec.GetStdoutPath() != "":
		return r.File(spec.GetStdoutPath())
	case spec.GetKind() == apiv1.JobKind_JOB_KIND_BATCH:
		return strings.TrimSuffix(spec.GetWorkDir(), "/") + "/slurm-" + r.ID() + ".out"
	}
	return ""
}

// Stderr is the file of its standard error.
func (r *Row) Stderr() string {
	if path := r.Job.GetSpec().GetStderrPath(); path != "" {
		return r.File(path)
	}
	return r.Stdout()
}

// Stdin is the file of its standard input.
func (r *Row) Stdin() string {
	if path := r.Job.GetSpec().GetStdinPath(); path != "" {
		return r.File(path)
	}
	return "/dev/null"
}
