package scontrol

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/muster-hpc/muster/cmd/internal/slurm/document"
	"github.com/muster-hpc/muster/cmd/internal/slurm/fetch"
	"github.com/muster-hpc/muster/cmd/internal/slurm/record"
	"github.com/muster-hpc/muster/cmd/internal/slurm/value"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/notation"
)

func bit(b bool) int {
	if b {
		return 1
	}
	return 0
}

// jobLines writes a job as "show job" does.
func jobLines(r *record.Row, shares []*apiv1.NodeShare, details bool) []string {
	spec, status := r.Job.GetSpec(), r.Job.GetStatus()
	ask := spec.GetResources()
	lines := []string{
		fmt.Sprintf("JobId=%d JobName=%s", r.Job.GetId(), spec.GetName()),
		fmt.Sprintf("   UserId=%s(%d) GroupId=%s(%d) MCS_label=N/A", r.User(), r.Job.GetOwner().GetUid(), r.Group(), r.Job.GetOwner().GetGid()),
		fmt.Sprintf("   Priority=%d Nice=%d Account=%s QOS=%s", r.Priority(), spec.GetNice(), value.Null(spec.GetAccount()), value.Null(spec.GetQos())),
	}
	if spec.GetWckey() != "" {
		lines[2] += " WCKey=" + spec.GetWckey()
	}
	lines = append(lines,
		fmt.Sprintf("   JobState=%s Reason=%s Dependency=(null)", r.State().Word, r.Reason()),
		fmt.Sprintf("   Requeue=%d Restarts=%d BatchFlag=%d Reboot=0 ExitCode=%s", bit(spec.GetRequeue()), status.GetRestarts(),
			bit(spec.GetKind() == apiv1.JobKind_JOB_KIND_BATCH), value.ExitCode(status.GetExitCode(), status.GetExitSignal())),
	)
	if details {
		lines = append(lines, "   DerivedExitCode="+value.ExitCode(status.GetDerivedExitCode(), status.GetDerivedExitSignal()))
	}
	lines = append(lines, timeLines(r)...)
	lines = append(lines, placeLines(r, shares, details)...)
	memory := "MinMemoryNode=" + r.Size(ask.GetMemoryPerNodeMb())
	if ask.GetMemoryPerCpuMb() > 0 {
		memory = "MinMemoryCPU=" + r.Size(ask.GetMemoryPerCpuMb())
	}
	lines = append(lines,
		fmt.Sprintf("   MinCPUsNode=%d %s MinTmpDiskNode=0", r.MinCPUs(), memory),
		"   Features=(null) DelayBoot=00:00:00",
		fmt.Sprintf("   OverSubscribe=%s Contiguous=0 Licenses=(null) Network=(null)", r.OverSubscribe()),
		"   Command="+value.Null(r.Command()),
		"   WorkDir="+spec.GetWorkDir(),
	)
	if spec.GetComment() != "" {
		lines = append(lines, "   Comment="+spec.GetComment()+" ")
	}
	lines = append(lines, "   StdErr="+r.Stderr(), "   StdIn="+r.Stdin(), "   StdOut="+r.Stdout())
	for _, t := range []struct{ name, text string }{
		{"TresPerJob", r.TresPerJob()}, {"TresPerNode", r.TresPerNode()}, {"TresPerTask", taskGPUs(r)},
	} {
		if t.text != "" {
			lines = append(lines, "   "+t.name+"="+t.text)
		}
	}
	if ask.GetMemoryPerGpuMb() > 0 {
		lines = append(lines, fmt.Sprintf("   MemPerTres=gpu:%d", ask.GetMemoryPerGpuMb()))
	}
	return append(lines, "   ")
}

// taskGPUs is what each task asks for, where it asks for GPUs.
func taskGPUs(r *record.Row) string {
	if r.Job.GetSpec().GetResources().GetGpusPerTask() == 0 {
		return ""
	}
	return r.TresPerTask()
}

func timeLines(r *record.Row) []string {
	status := r.Job.GetStatus()
	eligible := value.Stamp(record.At(status.GetEligibleTime()), "Unknown")
	return []string{
		fmt.Sprintf("   RunTime=%s TimeLimit=%s TimeMin=N/A", value.Padded(r.Used()), r.TimeLimit(value.Padded)),
		fmt.Sprintf("   SubmitTime=%s EligibleTime=%s", value.Stamp(record.At(status.GetSubmitTime()), "Unknown"), eligible),
		"   AccrueTime=" + eligible,
		fmt.Sprintf("   StartTime=%s EndTime=%s Deadline=N/A", value.Stamp(r.Start(), "Unknown"), value.Stamp(r.End(), "Unknown")),
		"   SuspendTime=None SecsPreSuspend=0 LastSchedEval=Unknown Scheduler=Main",
	}
}

func placeLines(r *record.Row, shares []*apiv1.NodeShare, details bool) []string {
	ask := r.Job.GetSpec().GetResources()
	nodes := strconv.Itoa(int(r.Nodes()))
	if r.Pending() && ask.GetNodesMax() > 0 {
		nodes = fmt.Sprintf("%d-%d", r.Nodes(), max(ask.GetNodesMax(), r.Nodes()))
	}
	lines := []string{
		fmt.Sprintf("   Partition=%s AllocNode:Sid=%s:0", r.PartitionName(), r.Job.GetSpec().GetSubmitHost()),
		fmt.Sprintf("   ReqNodeList=%s ExcNodeList=%s", value.Null(notation.Fold(ask.GetNodeList())), value.Null(notation.Fold(ask.GetExclude()))),
		"   NodeList=" + r.NodeList(),
	}
	if host := r.FirstHost(); host != "" {
		lines = append(lines, "   BatchHost="+host)
	}
	lines = append(lines,
		fmt.Sprintf("   NumNodes=%s NumCPUs=%d NumTasks=%d CPUs/Task=%d ReqB:S:C:T=0:0:*:*", nodes, r.CPUs(), r.Tasks(), r.CPUsPerTask()),
		"   ReqTRES="+r.ReqTres(),
		"   AllocTRES="+value.Null(r.AllocTres()),
		fmt.Sprintf("   Socks/Node=* NtasksPerN:B:S:C=%d:0:*:* CoreSpec=*", ask.GetNtasksPerNode()),
	)
	if details {
		lines = append(lines, shareLines(r, shares)...)
	}
	return lines
}

// shareLines writes what the job has on its nodes; nodes with the same share are in one line.
func shareLines(r *record.Row, shares []*apiv1.NodeShare) []string {
	type same struct {
		cpus, gpus, kind, others string
		memory                   uint64
	}
	var order []same
	hosts := map[same][]string{}
	total, kind := 0, ""
	for _, share := range shares {
		key := same{share.GetCpus(), share.GetGpus(), share.GetGpuType(), otherGres(share), share.GetMemoryMb()}
		if hosts[key] == nil {
			order = append(order, key)
		}
		hosts[key] = append(hosts[key], share.GetNode())
		if n := document.Count(share.GetGpus()); n > 0 {
			total, kind = total+n, share.GetGpuType()
		}
	}
	var lines []string
	if total > 0 {
		if kind != "" {
			kind += ":"
		}
		lines = append(lines, fmt.Sprintf("   JOB_GRES=gpu:%s%d", kind, total))
	} else if len(shares) > 0 {
		lines = append(lines, "   JOB_GRES=(null)")
	}
	for _, key := range order {
		gres := document.Gres(&apiv1.NodeShare{Gpus: key.gpus, GpuType: key.kind})
		if key.others != "" {
			gres = strings.TrimPrefix(gres+","+key.others, ",")
		}
		lines = append(lines, fmt.Sprintf("     Nodes=%s CPU_IDs=%s Mem=%d GRES=%s", notation.Fold(hosts[key]), key.cpus, key.memory, gres))
	}
	return lines
}

// otherGres are the devices of a share besides GPUs ("ib:2(IDX:0-1)"), by name.
func otherGres(share *apiv1.NodeShare) string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(share.GetGres())) {
		if list := share.GetGres()[name]; list != "" {
			parts = append(parts, fmt.Sprintf("%s:%d(IDX:%s)", name, document.Count(list), list))
		}
	}
	return strings.Join(parts, ",")
}

// stepDevices are the CPUs, GPUs and other devices that a step has of its own.
func stepDevices(step *apiv1.Step) (cpus int, tres string) {
	memory, gpus, others := uint64(0), 0, map[string]int{}
	nodes := map[uint32]bool{}
	for _, g := range step.GetPlacement().GetGroups() {
		n := len(g.GetNodes())
		cpus += n * notation.Mask(g.GetCpuMask()).Count()
		gpus += n * notation.Mask(g.GetGpuMask()).Count()
		memory += uint64(n) * g.GetMemoryMb()
		for _, share := range g.GetGres() {
			others[share.GetName()] += n * notation.Mask(share.GetMask()).Count()
		}
		for _, number := range g.GetNodes() {
			nodes[number] = true
		}
	}
	if cpus == 0 {
		return 0, "(null)"
	}
	tres = fmt.Sprintf("cpu=%d", cpus)
	if memory > 0 {
		tres += ",mem=" + value.Size(memory)
	}
	tres += fmt.Sprintf(",node=%d%s", len(nodes), gpuTres(uint32(gpus)))
	for _, name := range slices.Sorted(maps.Keys(others)) {
		tres += fmt.Sprintf(",gres/%s=%d", name, others[name])
	}
	return cpus, tres
}

// stepLines writes a step as "show step" does.
func stepLines(job *apiv1.Job, step *apiv1.Step) []string {
	limit := "UNLIMITED"
	if s := step.GetSpec().GetTimeLimitS(); s != 0 && s != value.Unlimited {
		limit = value.Padded(int64(s))
	}
	state := "RUNNING"
	if step.GetState() == apiv1.StepState_STEP_STATE_PREPARING {
		state = "PENDING"
	}
	nodes, cpus := 1, 0
	own, tres := stepDevices(step)
	if hosts, err := notation.Expand(step.GetNodeList()); err == nil && len(hosts) > 0 {
		nodes = len(hosts)
	}
	host := "(null)"
	if step.GetId() != record.BatchStep {
		if cpus = int(step.GetNumTasks() * max(1, step.GetSpec().GetResources().GetCpusPerTask())); own > 0 {
			cpus = own
		}
		host = value.Null(step.GetSpec().GetSubmitHost())
	}
	return []string{
		fmt.Sprintf("StepId=%d.%s UserId=%d StartTime=%s TimeLimit=%s", job.GetId(), record.StepName(step.GetId()), job.GetOwner().GetUid(),
			value.Stamp(record.At(step.GetStartTime()), "Unknown"), limit),
		fmt.Sprintf("   State=%s Partition=%s NodeList=%s", state, job.GetStatus().GetPartition(), step.GetNodeList()),
		fmt.Sprintf("   Nodes=%d CPUs=%d Tasks=%d Name=%s Network=(null)", nodes, cpus, step.GetNumTasks(), record.StepTitle(step)),
		"   TRES=" + tres,
		"   ResvPorts=(null)",
		"   CPUFreqReq=Default",
		fmt.Sprintf("   SrunHost:Pid=%s:0", host),
	}
}

func nodeAddress(n *apiv1.Node) (host, port string) {
	host, port, _ = strings.Cut(n.GetSpec().GetAgentAddress(), ":")
	if a := n.GetSpec().GetTaskAddress(); a != "" {
		host = a
	}
	return host, port
}

// nodeLines writes a node as "show node" does.
func nodeLines(n *apiv1.Node, list *fetch.Nodes, details bool) []string {
	spec := n.GetSpec()
	state := list.State(n)
	host, port := nodeAddress(n)
	features := value.Null(strings.Join(spec.GetFeatures(), ","))
	var partitions []string
	for _, p := range list.Partitions {
		if len(record.Members(p, []*apiv1.Node{n})) > 0 {
			partitions = append(partitions, p.GetName())
		}
	}
	lines := []string{
		fmt.Sprintf("NodeName=%s Arch=%s CoresPerSocket=%d ", spec.GetName(), spec.GetArchitecture(), spec.GetCoresPerSocket()),
		fmt.Sprintf("   CPUAlloc=%d CPUEfctv=%d CPUTot=%d CPULoad=N/A", n.GetCpusAllocated(), spec.GetCpus(), spec.GetCpus()),
		"   AvailableFeatures=" + features,
		"   ActiveFeatures=" + features,
		"   Gres=" + value.Null(record.Gres(n)),
	}
	if details {
		lines = append(lines, "   GresDrain=N/A", "   GresUsed="+value.Null(record.GresUsed(n)))
	}
	lines = append(lines,
		fmt.Sprintf("   NodeAddr=%s NodeHostName=%s Port=%s Version=%s", host, spec.GetName(), port, spec.GetAgentVersion()),
		"   OS="+spec.GetOperatingSystem()+" ",
		fmt.Sprintf("   RealMemory=%d AllocMem=%d FreeMem=N/A Sockets=%d Boards=1", spec.GetMemoryMb(), n.GetMemoryAllocatedMb(), spec.GetSockets()),
		fmt.Sprintf("   State=%s ThreadsPerCore=%d TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A", strings.Join(state.Words(), "+"), spec.GetThreadsPerCore()),
		"   Partitions="+strings.Join(partitions, ",")+" ",
		fmt.Sprintf("   BootTime=%s SlurmdStartTime=%s", value.Stamp(record.At(spec.GetBootTime()), "None"), value.Stamp(record.At(n.GetJoinTime()), "None")),
		fmt.Sprintf("   LastBusyTime=%s ResumeAfterTime=None", value.Stamp(record.At(n.GetLastBusyTime()), "Unknown")),
		fmt.Sprintf("   CfgTRES=cpu=%d,mem=%dM,billing=%d%s", spec.GetCpus(), spec.GetMemoryMb(), spec.GetCpus(), gpuTres(uint32(len(spec.GetGpus())))),
		"   AllocTRES="+allocTres(n),
		"   CurrentWatts=0 AveWatts=0",
	)
	if n.GetReason() != "" {
		lines = append(lines, fmt.Sprintf("   Reason=%s [%s@%s]", n.GetReason(), value.Null(n.GetReasonBy()), value.Stamp(record.At(n.GetReasonTime()), "Unknown")))
	}
	return append(lines, conditionLines(n)...)
}

// conditionLines writes what the node's checks find and what would clear it, a line for each; a drain that a check ordered has its
// reason already.
func conditionLines(n *apiv1.Node) []string {
	var lines []string
	for _, c := range n.GetConditions() {
		text := c.GetOwner() + ": " + c.GetReason()
		if c.GetSeverity() == apiv1.ConditionSeverity_CONDITION_SEVERITY_INFO || text == n.GetReason() {
			continue
		}
		line := "   Reason=" + text
		if clears := c.GetClears(); clears != "" {
			line += " (cleared by: " + clears + ")"
		}
		lines = append(lines, fmt.Sprintf("%s [%s@%s]", line, c.GetOwner(), value.Stamp(record.At(c.GetSince()), "Unknown")))
	}
	return lines
}

func gpuTres(n uint32) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprintf(",gres/gpu=%d", n)
}

func allocTres(n *apiv1.Node) string {
	if n.GetCpusAllocated() == 0 {
		return ""
	}
	text := fmt.Sprintf("cpu=%d", n.GetCpusAllocated())
	if mb := n.GetMemoryAllocatedMb(); mb > 0 {
		text += ",mem=" + value.Size(mb)
	}
	return text + gpuTres(uint32(notation.Mask(n.GetGpusAllocatedMask()).Count()))
}

// partitionLines writes a partition as "show partition" does.
func partitionLines(p *apiv1.Partition, members []*apiv1.Node) []string {
	cpus, memory, gpus := uint32(0), uint64(0), 0
	for _, n := range members {
		cpus, memory, gpus = cpus+n.GetSpec().GetCpus(), memory+n.GetSpec().GetMemoryMb(), gpus+len(n.GetSpec().GetGpus())
	}
	yes := map[bool]string{true: "YES", false: "NO"}
	limit := func(seconds uint32, none string) string {
		if seconds == 0 || seconds == value.Unlimited {
			return none
		}
		return value.Padded(int64(seconds))
	}
	most, share, state := "UNLIMITED", "NO", "UP"
	if p.GetMaxNodes() > 0 {
		most = strconv.Itoa(int(p.GetMaxNodes()))
	}
	if p.GetExclusive() {
		share = "EXCLUSIVE"
	}
	if p.GetDown() {
		state = "DOWN"
	}
	memoryDefault := "DefMemPerNode=UNLIMITED"
	if mb := p.GetDefaultMemoryPerCpuMb(); mb > 0 {
		memoryDefault = fmt.Sprintf("DefMemPerCPU=%d", mb)
	}
	return []string{
		"PartitionName=" + p.GetName(),
		"   AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL",
		"   AllocNodes=ALL Default=" + yes[p.GetIsDefault()] + " QoS=N/A",
		"   DefaultTime=" + limit(p.GetDefaultTimeS(), "NONE") + " DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO",
		"   MaxNodes=" + most + " MaxTime=" + limit(p.GetMaxTimeS(), "UNLIMITED") + " MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED",
		"   Nodes=" + record.NodeNames(members),
		fmt.Sprintf("   PriorityJobFactor=1 PriorityTier=%d RootOnly=NO ReqResv=NO OverSubscribe=%s", record.PriorityTier(p), share),
		"   OverTimeLimit=NONE PreemptMode=OFF",
		fmt.Sprintf("   State=%s TotalCPUs=%d TotalNodes=%d SelectTypeParameters=NONE", state, cpus, len(members)),
		"   JobDefaults=(null)",
		"   " + memoryDefault + " MaxMemPerNode=UNLIMITED",
		fmt.Sprintf("   TRES=cpu=%d,mem=%dM,node=%d,billing=%d%s", cpus, memory, len(members), cpus, gpuTres(uint32(gpus))),
	}
}

// nodeObject writes a node in the dialect of 24.11.
func nodeObject(n *apiv1.Node, list *fetch.Nodes) document.Object {
	spec := n.GetSpec()
	host, port := nodeAddress(n)
	number, err := strconv.Atoi(port)
	if err != nil {
		number = 0
	}
	var partitions []string
	for _, p := range list.Partitions {
		if len(record.Members(p, []*apiv1.Node{n})) > 0 {
			partitions = append(partitions, p.GetName())
		}
	}
	features := document.List(spec.GetFeatures()...)
	pair := func(key string, v any) document.Pair { return document.Pair{Key: key, Value: v} }
	return document.Object{
		pair("architecture", spec.GetArchitecture()), pair("address", host), pair("hostname", spec.GetName()), pair("name", spec.GetName()),
		pair("boards", 1), pair("boot_time", document.Moment(record.At(spec.GetBootTime()))), pair("cluster_name", ""),
		pair("cores", spec.GetCoresPerSocket()), pair("sockets", spec.GetSockets()), pair("threads", spec.GetThreadsPerCore()),
		pair("cpus", spec.GetCpus()), pair("effective_cpus", spec.GetCpus()), pair("alloc_cpus", n.GetCpusAllocated()),
		pair("alloc_idle_cpus", record.CPUShares(n).Idle), pair("cpu_load", 0), pair("free_mem", document.Unset()),
		pair("features", features), pair("active_features", features), pair("gres", record.Gres(n)), pair("gres_drained", "N/A"),
		pair("gres_used", record.GresUsed(n)), pair("last_busy", document.Moment(record.At(n.GetLastBusyTime()))),
		pair("operating_system", spec.GetOperatingSystem()), pair("partitions", document.List(partitions...)), pair("port", number),
		pair("real_memory", spec.GetMemoryMb()), pair("alloc_memory", n.GetMemoryAllocatedMb()), pair("reason", n.GetReason()),
		pair("reason_changed_at", document.Moment(record.At(n.GetReasonTime()))), pair("reason_set_by_user", n.GetReasonBy()),
		pair("slurmd_start_time", document.Moment(record.At(n.GetJoinTime()))),
		pair("state", list.State(n).Words()), pair("temporary_disk", 0), pair("weight", 1),
		pair("tres", fmt.Sprintf("cpu=%d,mem=%dM,billing=%d%s", spec.GetCpus(), spec.GetMemoryMb(), spec.GetCpus(), gpuTres(uint32(len(spec.GetGpus()))))),
		pair("tres_used", allocTres(n)), pair("version", spec.GetAgentVersion()),
	}
}
