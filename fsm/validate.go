package fsm

import (
	"fmt"
	"slices"
	"strings"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"

	"github.com/muster-hpc/muster/fsm/shape"
	"github.com/muster-hpc/muster/fsm/state"
)

const (
	// maxPathBytes bounds paths and patterns of a specification.
	maxPathBytes = 4096
	// maxArgsBytes bounds all arguments of a specification together.
	maxArgsBytes = 128 << 10
	// maxListed bounds the names in lists of a request.
	maxListed = 20_000
)

// ValidateSpec says what is wrong with a specification whatever is free at the moment, or returns nil; and what its user should
// know although it is accepted. Apply refuses what it refuses, so a server may call it first, with any view. It does not look at
// blobs: their contents may not be there yet.
func ValidateSpec(v *View, spec *apiv1.JobSpec, owner *apiv1.Principal) (*apiv1.ErrorDetail, []string) {
	if refusal := checkFields(spec); refusal != nil {
		return refusal, nil
	}
	if refusal := checkRequest(spec.Resources); refusal != nil {
		return refusal, nil
	}
	if v.Level() >= levelLaunch {
		if refusal := checkJobLaunch(spec, IsOperator(v, owner)); refusal != nil {
			return refusal, nil
		}
	}
	if spec.Priority != 0 && !IsOperator(v, owner) {
		return refuse("PERMISSION_DENIED", "priority", "only an operator can set a priority; submit without one"), nil
	}
	candidates, refusal := candidatePartitions(v, spec)
	if refusal != nil {
		return refusal, nil
	}
	var warnings []string
	if spec.Nice < 0 && !IsOperator(v, owner) {
		warnings = append(warnings, "a negative nice value is for operators; it is ignored")
	}
	if refusal := checkNames(v, spec.Resources); refusal != nil {
		return refusal, nil
	}
	var first *apiv1.ErrorDetail
	possible := false
	for _, p := range candidates {
		why := checkPartition(v, spec, p)
		if why == nil {
			possible = true
		} else if first == nil {
			first = why
		}
		need := shape.Of(spec.Resources)
		if p.MaxNodes != 0 && need.NodesMin > uint64(p.MaxNodes) {
			warnings = append(warnings, fmt.Sprintf("partition %s allows %d nodes for a job and this one asks for %d: it waits until that changes",
				p.Name, p.MaxNodes, need.NodesMin))
		}
		if p.Down {
			warnings = append(warnings, fmt.Sprintf("partition %s is down: the job waits until it is up", p.Name))
		}
	}
	if !possible {
		return first, nil
	}
	return nil, warnings
}

// checkFields checks what can be seen in the specification alone.
func checkFields(spec *apiv1.JobSpec) *apiv1.ErrorDetail {
	if spec == nil {
		return refuse("SPEC_INVALID", "spec", "the job has no specification")
	}
	switch spec.Kind {
	case apiv1.JobKind_JOB_KIND_BATCH:
		if spec.ScriptBlob == "" {
			return refuse("SCRIPT_MISSING", "script", "a batch job needs a script")
		}
	case apiv1.JobKind_JOB_KIND_RUN:
		if len(spec.Args) == 0 {
			return refuse("COMMAND_MISSING", "args", "there is no command to run")
		}
	case apiv1.JobKind_JOB_KIND_ALLOCATION:
	default:
		return refuse("SPEC_INVALID", "kind", "the job has no kind: batch, run or allocation")
	}
	for _, f := range []struct {
		name, value string
		limit       int
	}{
		{"name", spec.Name, maxNameBytes}, {"comment", spec.Comment, maxNameBytes}, {"account", spec.Account, maxNameBytes},
		{"qos", spec.Qos, maxNameBytes}, {"wckey", spec.Wckey, maxNameBytes}, {"submit_host", spec.SubmitHost, maxNameBytes},
		{"work_dir", spec.WorkDir, maxPathBytes}, {"stdin", spec.StdinPath, maxPathBytes}, {"stdout", spec.StdoutPath, maxPathBytes},
		{"stderr", spec.StderrPath, maxPathBytes}, {"command_line", spec.CommandLine, maxPathBytes},
	} {
		if refusal := checkText(f.name, f.value, f.limit); refusal != nil {
			return refusal
		}
	}
	if !strings.HasPrefix(spec.WorkDir, "/") {
		return refuse("WORK_DIR_INVALID", "work_dir", "the working directory %q is not an absolute path", spec.WorkDir)
	}
	if spec.BeginTime != nil && spec.BeginTime.CheckValid() != nil {
		return refuse("SPEC_INVALID", "begin_time", "the begin time is not a time")
	}
	for _, sha := range []string{spec.ScriptBlob, spec.EnvironmentBlob} {
		if sha != "" && !validSHA(sha) {
			return refuse("BLOB_INVALID", "blob "+sha, "%q is not a SHA-256 in lower-case hexadecimal", sha)
		}
	}
	return checkArgs(spec.Args)
}

func checkText(name, value string, limit int) *apiv1.ErrorDetail {
	if len(value) > limit {
		return refuse("TOO_LONG", name, "the %s has %d bytes; at most %d are allowed", name, len(value), limit)
	}
	if strings.ContainsRune(value, 0) {
		return refuse("SPEC_INVALID", name, "the %s contains a zero byte", name)
	}
	return nil
}

func checkArgs(args []string) *apiv1.ErrorDetail {
	size := 0
	for _, a := range args {
		size += len(a) + 1
	}
	if size > maxArgsBytes {
		return refuse("TOO_LONG", "args", "the arguments have %d bytes; at most %d are allowed", size, maxArgsBytes)
	}
	return nil
}

// checkRequest checks that a resource request does not contradict itself.
func checkRequest(r *apiv1.ResourceRequest) *apiv1.ErrorDetail {
	bad := func(sentence string, args ...any) *apiv1.ErrorDetail {
		return refuse("REQUEST_INVALID", "resources", sentence, args...)
	}
	if r.GetNodesMax() != 0 && r.GetNodesMin() > r.GetNodesMax() {
		return bad("asks for at least %d and at most %d nodes", r.GetNodesMin(), r.GetNodesMax())
	}
	if refusal := checkByDevice(r); refusal != nil {
		return refusal
	}
	memory := 0
	for _, given := range []bool{
		r.GetMemoryPerNodeMb() > 0, r.GetMemoryPerCpuMb() > 0, r.GetMemoryPerGpuMb() > 0, r.GetMemoryAll(),
	} {
		if given {
			memory++
		}
	}
	if memory > 1 {
		return bad("asks for memory in %d ways at once: per node, per CPU and per GPU exclude each other", memory)
	}
	if r.GetGpusPerTask() > 0 && r.GetNtasks() == 0 && r.GetGpusTotal() == 0 && r.GetNtasksPerNode() == 0 && len(r.GetTaskNodes()) == 0 {
		return bad("asks for %d GPUs per task without a number of tasks or of GPUs; give one of them", r.GetGpusPerTask())
	}
	if r.GetGpusPerTask() > 0 && r.GetGpusTotal()%r.GetGpusPerTask() != 0 {
		return bad("asks for %d GPUs in all and %d per task, which does not divide it", r.GetGpusTotal(), r.GetGpusPerTask())
	}
	if r.GetMemoryPerGpuMb() > 0 && !asksGPUs(r) {
		return bad("asks for %d MiB of memory per GPU and for no GPU; ask for GPUs, or for memory per node or per CPU", r.GetMemoryPerGpuMb())
	}
	need := shape.Of(r)
	if need.Tasks > shape.MaxTasks || need.NodesMin > maxListed {
		return refuse("TOO_MANY", "resources", "asks for %d tasks on %d nodes; at most %d tasks on %d nodes are possible",
			need.Tasks, need.NodesMin, shape.MaxTasks, maxListed)
	}
	if r.GetNodesMax() > 0 && len(r.GetNodeList()) > int(r.GetNodesMax()) {
		return bad("names %d nodes and asks for at most %d", len(r.GetNodeList()), r.GetNodesMax())
	}
	if need.PerNode > 0 && r.GetNodesMax() > 0 && need.Tasks > need.PerNode*need.NodesMax {
		return bad("asks for %d tasks, %d on each of at most %d nodes", need.Tasks, need.PerNode, need.NodesMax)
	}
	if len(r.GetNodeList()) > maxListed || len(r.GetExclude()) > maxListed {
		return refuse("TOO_MANY", "resources", "lists more than %d nodes", maxListed)
	}
	for _, name := range r.GetNodeList() {
		if slices.Contains(r.GetExclude(), name) {
			return bad("asks for node %s and excludes it", name)
		}
	}
	return nil
}

// asksGPUs reports whether a request asks for accelerators in any way.
func asksGPUs(r *apiv1.ResourceRequest) bool {
	need := shape.Of(r)
	return need.GPUsPerNode > 0 || need.GPUsTotal > 0 || need.GPUsPerTask > 0
}

// candidatePartitions returns the partitions a job may go to.
func candidatePartitions(v *View, spec *apiv1.JobSpec) ([]*apiv1.Partition, *apiv1.ErrorDetail) {
	if len(spec.Partitions) == 0 {
		if p := v.DefaultPartition(); p != nil {
			return []*apiv1.Partition{p}, nil
		}
		return nil, refuse("PARTITION_MISSING", "partition", "there is no default partition; name one of: %s", partitionNames(v))
	}
	var candidates []*apiv1.Partition
	for _, name := range spec.Partitions {
		p := v.Partition(name)
		if p == nil {
			return nil, unknownPartition(v, name)
		}
		candidates = append(candidates, p)
	}
	return candidates, nil
}

func unknownPartition(v *View, name string) *apiv1.ErrorDetail {
	return refuse("PARTITION_UNKNOWN", "partition "+name, "partition %s does not exist; partitions: %s", name, partitionNames(v))
}

func partitionNames(v *View) string {
	var names []string
	for _, p := range v.Configuration().GetPartitions() {
		names = append(names, p.Name)
	}
	return strings.Join(names, ", ")
}

// checkNames checks that nodes named by a request can exist.
func checkNames(v *View, r *apiv1.ResourceRequest) *apiv1.ErrorDetail {
	for _, name := range slices.Concat(r.GetNodeList(), r.GetExclude()) {
		if v.NodeByName(name) == nil && v.NodeCount() > 0 && !v.NodeConfigured(name) {
			return refuse("NODE_UNKNOWN", "node "+name, "node %s does not exist", name)
		}
	}
	return nil
}

// checkPartition says why a partition could never run the job as it is configured now; nil if it could.
func checkPartition(v *View, spec *apiv1.JobSpec, p *apiv1.Partition) *apiv1.ErrorDetail {
	limit := spec.TimeLimitS
	if p.MaxTimeS != 0 && limit != 0 && limit > p.MaxTimeS {
		return refuse("TIME_LIMIT_INVALID", "partition "+p.Name, "asks for %s; partition %s allows %s", duration(limit), p.Name, duration(p.MaxTimeS))
	}
	if v.NodeCount() == 0 {
		return nil // nothing is known of the machines yet
	}
	r := spec.Resources
	for _, name := range r.GetNodeList() {
		if n := v.NodeByName(name); n != nil && !v.PartitionNodes(p.Name).Has(n.Number) {
			return refuse("NODE_NOT_IN_PARTITION", "node "+name, "node %s is not in partition %s", name, p.Name)
		}
	}
	need := shape.Of(r)
	size := v.PartitionSize(p.Name)
	if size > 0 && excluded(v, r, p) >= size {
		return refuse("RESOURCES_IMPOSSIBLE", "partition "+p.Name, "excludes every node of partition %s", p.Name)
	}
	if need.NodesMin > uint64(size) {
		return refuse("NODES_TOO_MANY", "partition "+p.Name, "asks for %d nodes; partition %s has %d", need.NodesMin, p.Name, size)
	}
	if v.PartitionNodes(p.Name).Len() < size {
		return nil // some machines have never joined: nobody knows what they have
	}
	return checkMachines(v, r, need, p)
}

// excluded counts the nodes of a partition that a request excludes.
func excluded(v *View, r *apiv1.ResourceRequest, p *apiv1.Partition) int {
	names := slices.Clone(r.GetExclude())
	slices.Sort(names)
	n := 0
	for _, name := range slices.Compact(names) {
		if node := v.NodeByName(name); node != nil && v.PartitionNodes(p.Name).Has(node.Number) {
			n++
		}
	}
	return n
}

// duration writes seconds for people.
func duration(s uint32) string {
	switch {
	case s == Unlimited:
		return "no time limit"
	case s%3600 == 0:
		return fmt.Sprintf("%d hours", s/3600)
	case s%60 == 0:
		return fmt.Sprintf("%d minutes", s/60)
	default:
		return fmt.Sprintf("%d seconds", s)
	}
}

// perNode is what each node must have at least.
type perNode struct{ cpus, gpus, memory uint64 }

func needOfNode(r *apiv1.ResourceRequest, need shape.Need) perNode {
	n := perNode{cpus: need.TasksPerNode() * need.CPUsPerTask, gpus: max(need.GPUsPerNode, need.TasksPerNode()*need.GPUsPerTask)}
	if need.Tasks == 1 && need.NodesMin == 1 && (r.GetNtasks() == 1 || r.GetMemoryPerGpuMb() > 0 && r.GetNtasks() == 0 && r.GetNodesMax() <= 1) {
		n.gpus = max(n.gpus, need.GPUsTotal) // One task has all its GPUs on its node.
	}
	if r.GetOvercommit() {
		n.cpus = 1
	} else if need.CPUsPerGPU > 0 {
		n.cpus = max(n.cpus, saturate(need.CPUsPerGPU, n.gpus))
	}
	switch {
	case r.GetMemoryPerNodeMb() > 0:
		n.memory = r.GetMemoryPerNodeMb()
	case r.GetMemoryPerCpuMb() > 0:
		n.memory = saturate(r.GetMemoryPerCpuMb(), n.cpus)
	case r.GetMemoryPerGpuMb() > 0:
		n.memory = saturate(r.GetMemoryPerGpuMb(), max(1, n.gpus))
	}
	return n
}

// saturate multiplies without overflow.
func saturate(a, b uint64) uint64 {
	if b != 0 && a > ^uint64(0)/b {
		return ^uint64(0)
	}
	return a * b
}

func gpusOf(c state.Class, kind string) uint64 {
	if kind == "" {
		return c.GPUs
	}
	return c.Types[kind]
}

// devicesOf returns how many devices of a request's entry each node of a class has.
func devicesOf(c state.Class, g *apiv1.GresRequest) uint64 {
	switch {
	case g.Name == gpuName:
		return gpusOf(c, g.Type)
	case g.Type != "":
		return c.Gres[g.Name+":"+g.Type]
	default:
		return c.Gres[g.Name]
	}
}

// hasDevices reports whether each node of a class has the devices that a request lists.
func hasDevices(c state.Class, r *apiv1.ResourceRequest) bool {
	return !slices.ContainsFunc(r.GetGres(), func(g *apiv1.GresRequest) bool { return devicesOf(c, g) < uint64(g.Count) })
}

// lackingDevices says which devices no node of the classes has enough of.
func lackingDevices(classes []state.Class, r *apiv1.ResourceRequest, p *apiv1.Partition) string {
	for _, g := range r.GetGres() {
		most := uint64(0)
		for _, c := range classes {
			most = max(most, devicesOf(c, g))
		}
		if uint64(g.Count) > most {
			what := g.Name
			if g.Name == gpuName {
				what = "GPUs"
			}
			if g.Type != "" {
				what += " of type " + g.Type
			}
			return fmt.Sprintf("asks for %d %s per node; the largest node in partition %s has %d", g.Count, what, p.Name, most)
		}
	}
	return ""
}

// checkMachines compares a request with the machines of a partition, drained and lost ones too: those come back.
func checkMachines(v *View, r *apiv1.ResourceRequest, need shape.Need, p *apiv1.Partition) *apiv1.ErrorDetail {
	classes := v.PartitionClasses(p.Name)
	for _, name := range r.GetExclude() {
		if n := v.NodeByName(name); n != nil && v.PartitionNodes(p.Name).Has(n.Number) {
			classes = state.Count(classes, state.ClassOf(n.Spec), -1)
		}
	}
	impossible := func(sentence string, args ...any) *apiv1.ErrorDetail {
		return refuse("RESOURCES_IMPOSSIBLE", "partition "+p.Name, sentence, args...)
	}
	one := needOfNode(r, need)
	var most perNode
	var fitting []state.Class
	nodes := uint64(0)
	for _, c := range classes {
		gpus := gpusOf(c, r.GetGpuType())
		most = perNode{max(most.cpus, c.CPUs), max(most.gpus, gpus), max(most.memory, c.MemoryMB)}
		if c.CPUs >= one.cpus && gpus >= one.gpus && c.MemoryMB >= one.memory && hasDevices(c, r) {
			fitting = append(fitting, c)
			nodes += c.Nodes
		}
	}
	if lacking := lackingDevices(classes, r, p); lacking != "" {
		return impossible("%s", lacking)
	}
	kind := ""
	if r.GetGpuType() != "" {
		kind = " of type " + r.GetGpuType()
	}
	switch {
	case one.cpus > most.cpus && need.PerNode > 0:
		return impossible("asks for %d CPUs per node; the largest node in partition %s has %d", one.cpus, p.Name, most.cpus)
	case one.cpus > most.cpus:
		return impossible("asks for %d CPUs per task; the largest node in partition %s has %d", one.cpus, p.Name, most.cpus)
	case one.gpus > most.gpus:
		return impossible("asks for %d GPUs%s per node; the largest node in partition %s has %d", one.gpus, kind, p.Name, most.gpus)
	case one.memory > most.memory:
		return impossible("asks for %d MiB of memory per node; the largest node in partition %s has %d", one.memory, p.Name, most.memory)
	case need.NodesMin > nodes && len(r.GetGres()) > 0:
		return impossible("asks for %d nodes with %d CPUs, %d MiB of memory and all the devices it lists each; partition %s has %d such nodes",
			need.NodesMin, one.cpus, one.memory, p.Name, nodes)
	case need.NodesMin > nodes:
		return impossible("asks for %d nodes with %d CPUs, %d GPUs%s and %d MiB of memory each; partition %s has %d such nodes",
			need.NodesMin, one.cpus, one.gpus, kind, one.memory, p.Name, nodes)
	}
	return checkTotals(r, need, fitting, p, impossible)
}

// checkTotals compares what a request asks for in all with the most that as many nodes as it allows could give.
func checkTotals(r *apiv1.ResourceRequest, need shape.Need, fitting []state.Class, p *apiv1.Partition,
	impossible func(string, ...any) *apiv1.ErrorDetail) *apiv1.ErrorDetail {
	room := func(c state.Class) uint64 {
		n := c.CPUs / need.CPUsPerTask
		if r.GetOvercommit() {
			n = shape.MaxTasks
		}
		if need.TasksPerGPU > 0 {
			n = min(n, saturate(gpusOf(c, r.GetGpuType()), need.TasksPerGPU))
		}
		if need.GPUsPerTask > 0 {
			n = min(n, gpusOf(c, r.GetGpuType())/need.GPUsPerTask)
		}
		if per := saturate(r.GetMemoryPerCpuMb(), need.CPUsPerTask); per > 0 {
			n = min(n, c.MemoryMB/per)
		}
		if need.PerNode > 0 {
			n = min(n, need.PerNode)
		}
		return n
	}
	if most := best(fitting, need.NodesMax, room); need.Tasks > most {
		return impossible("asks for %d tasks of %d CPUs each on at most %d nodes; partition %s has room for %d",
			need.Tasks, need.CPUsPerTask, need.NodesMax, p.Name, most)
	}
	gpus := func(c state.Class) uint64 { return gpusOf(c, r.GetGpuType()) }
	if most := best(fitting, need.NodesMax, gpus); need.GPUsTotal > most {
		return impossible("asks for %d GPUs on at most %d nodes; partition %s has %d", need.GPUsTotal, need.NodesMax, p.Name, most)
	}
	return nil
}

// best adds up a quantity over the nodes that have most of it.
func best(classes []state.Class, nodes uint64, of func(state.Class) uint64) uint64 {
	sorted := slices.SortedFunc(slices.Values(classes), func(a, b state.Class) int {
		switch x, y := of(a), of(b); {
		case x > y:
			return -1
		case x < y:
			return 1
		default:
			return 0
		}
	})
	var sum uint64
	for _, c := range sorted {
		n := min(nodes, c.Nodes)
		sum += n * of(c)
		nodes -= n
	}
	return sum
}
