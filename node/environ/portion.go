package environ

import (
	"strconv"
	"strings"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	"github.com/muster-hpc/muster/proto/notation"
)

// Portion is what one part of a step (srun A : B) has on the node. A step of one part has one portion there.
type Portion struct {
	// Part is 0 for the step itself, n for its n-th further part.
	Part int
	// First is the rank at which the part begins.
	First uint32
	// Ranks are those of its tasks here; their local ids follow those of the portions before.
	Ranks []uint32
	// CPUs and GPUs that it has here.
	CPUs, GPUs notation.Mask
	// MemoryMB that it has here in MiB; 0 means that the step may use what the job has.
	MemoryMB uint64
	// Args are the program and its arguments, from the step or, for a job's first step, from the job.
	Args []string
	// Options and Resources that were asked for, with those of the job where the step itself said nothing; never nil.
	Options   *apiv1.TaskOptions
	Resources *apiv1.ResourceRequest
	// nodes and tasks of the whole step.
	nodes, tasks uint64
}

// Portions returns what the parts of a step have on the node, in the order of the parts. Their ranks together are those of the step here.
func Portions(order *nodev1.DesiredAttempt, step *nodev1.DesiredStep) []Portion {
	s, ranks := step.GetStep(), step.GetRanks()
	groups := s.GetPlacement().GetGroups()
	if s.GetId() == BatchStep || !matches(groups, ranks) {
		groups = []*apiv1.NodeGroup{{Tasks: uint32(len(ranks))}} // an older controller does not say
	}
	var all []Portion
	for _, g := range groups {
		p := Portion{Ranks: ranks[:g.GetTasks()], CPUs: g.GetCpuMask(), GPUs: g.GetGpuMask(), MemoryMB: g.GetMemoryMb()}
		ranks = ranks[g.GetTasks():]
		if p.CPUs.Count() == 0 {
			p.CPUs = order.GetCpuMask()
		}
		if len(s.GetPlacement().GetGroups()) == 0 || s.GetId() == BatchStep {
			p.GPUs, p.MemoryMB = order.GetGpuMask(), order.GetMemoryMb()
		}
		p.nodes, p.tasks = countNodes(s.GetNodeList()), uint64(s.GetNumTasks())
		p.source(order, s)
		all = append(all, p)
	}
	return all
}

// matches reports whether groups have exactly the tasks of the ranks.
func matches(groups []*apiv1.NodeGroup, ranks []uint32) bool {
	total := uint64(0)
	for _, g := range groups {
		total += uint64(g.GetTasks())
	}
	return total == uint64(len(ranks))
}

// source fills in what the part asked for.
func (p *Portion) source(order *nodev1.DesiredAttempt, step *apiv1.Step) {
	job, spec := order.GetJob().GetSpec(), step.GetSpec()
	for i, first := range step.GetPartRanks() {
		if len(p.Ranks) > 0 && first <= p.Ranks[0] && i < len(spec.GetParts()) {
			p.Part, p.First = i+1, first
		}
	}
	if p.Part > 0 {
		part := spec.GetParts()[p.Part-1]
		p.Args, p.Options, p.Resources = part.GetArgs(), part.GetTaskOptions(), part.GetResources()
	} else {
		p.Args, p.Options, p.Resources = spec.GetArgs(), spec.GetTaskOptions(), stepResources(order, step)
		if step.GetId() == BatchStep || len(p.Args) == 0 {
			p.Args = job.GetArgs()
			if p.Options == nil || step.GetId() == BatchStep {
				p.Options = job.GetTaskOptions()
			}
		}
	}
	if p.Options == nil {
		p.Options = new(apiv1.TaskOptions)
	}
	if p.Resources == nil {
		p.Resources = new(apiv1.ResourceRequest)
	}
}

// GPUsPerTask is how many accelerators each task was to have; 0 if nobody asked.
func (p *Portion) GPUsPerTask() int {
	if n := p.Resources.GetGpusPerTask(); n > 0 {
		return int(n)
	}
	if p.Options.GetBindGpusPerTask() {
		return max(1, p.GPUs.Count()/max(1, len(p.Ranks)))
	}
	return 0
}

// bindsGPUs reports whether tasks see accelerators of their own.
func (p *Portion) bindsGPUs() bool {
	bind := strings.TrimPrefix(p.Options.GetGpuBind(), "verbose")
	bind = strings.TrimPrefix(bind, ",")
	return bind != "" && bind != "none" || bind == "" && p.GPUsPerTask() > 0
}

// distributionWord is how SLURM_DISTRIBUTION says a distribution; the size of a plane has a variable of its own.
func distributionWord(v *vars, distribution string) string {
	first, _, _ := strings.Cut(distribution, ":")
	if plane, ok := strings.CutPrefix(first, "plane="); ok {
		v.setIf("SLURM_DIST_PLANESIZE", plane)
		return "plane"
	}
	return distribution
}

// variables sets what depends on what the part asked for.
func (p *Portion) variables(v *vars) {
	distribution := distributionWord(v, p.Options.GetDistribution())
	if distribution == "" || distribution == "*" {
		distribution = "block"
		if p.tasks <= p.nodes {
			distribution = "cyclic"
		}
	}
	v.set("SLURM_DISTRIBUTION", distribution)
	if p.Options.GetLabel() {
		v.set("SLURM_LABELIO", "1")
	}
	if p.Resources.GetMemoryPerCpuMb()+p.Resources.GetMemoryPerGpuMb()+p.Resources.GetMemoryPerNodeMb() > 0 {
		for _, name := range []string{"SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU", "SLURM_MEM_PER_NODE"} {
			v.unset(name)
		}
		memory(v, p.Resources)
	}
	asked(v, p.Resources)
}

// memory sets the variable of the memory that was asked for.
func memory(v *vars, res *apiv1.ResourceRequest) {
	switch {
	case res.GetMemoryPerCpuMb() > 0:
		v.setNumber("SLURM_MEM_PER_CPU", res.GetMemoryPerCpuMb())
	case res.GetMemoryPerGpuMb() > 0:
		v.setNumber("SLURM_MEM_PER_GPU", res.GetMemoryPerGpuMb())
	case res.GetMemoryPerNodeMb() > 0:
		v.setNumber("SLURM_MEM_PER_NODE", res.GetMemoryPerNodeMb())
	}
}

// stepResources is what the step asked for, with what the job asked for where the step said nothing. Memory is the step's own.
func stepResources(order *nodev1.DesiredAttempt, step *apiv1.Step) *apiv1.ResourceRequest {
	job, own := order.GetJob().GetSpec().GetResources(), step.GetSpec().GetResources()
	return &apiv1.ResourceRequest{
		NtasksPerNode:   first(own.GetNtasksPerNode(), job.GetNtasksPerNode()),
		CpusPerTask:     first(own.GetCpusPerTask(), job.GetCpusPerTask()),
		GpusPerNode:     first(own.GetGpusPerNode(), job.GetGpusPerNode()),
		GpusTotal:       first(own.GetGpusTotal(), job.GetGpusTotal()),
		GpusPerTask:     first(own.GetGpusPerTask(), job.GetGpusPerTask()),
		GpuType:         first(own.GetGpuType(), job.GetGpuType()),
		GpusOption:      first(own.GetGpusOption(), job.GetGpusOption()),
		MemoryPerCpuMb:  own.GetMemoryPerCpuMb(),
		MemoryPerGpuMb:  own.GetMemoryPerGpuMb(),
		MemoryPerNodeMb: own.GetMemoryPerNodeMb(),
	}
}

func first[T comparable](values ...T) T {
	var zero T
	for _, v := range values {
		if v != zero {
			return v
		}
	}
	return zero
}

// Program returns the program and arguments of a rank: those of the part, or of the rank's own entry of a step of several programs, in
// which "%t" is the rank and "%o" its offset among the ranks of the entry. false if the step has programs, and none for this rank.
func (p *Portion) Program(rank uint32) ([]string, bool) {
	if len(p.Options.GetPrograms()) == 0 {
		return p.Args, true
	}
	for _, program := range p.Options.GetPrograms() {
		offset, ok := offsetIn(program.GetRanks(), rank-p.First)
		if !ok {
			continue
		}
		replacer := strings.NewReplacer("%t", strconv.FormatUint(uint64(rank), 10), "%o", strconv.FormatUint(offset, 10))
		var args []string
		for _, arg := range program.GetArgs() {
			args = append(args, replacer.Replace(arg))
		}
		return args, true
	}
	return nil, false
}

// offsetIn returns how many ranks of a folded list come before a rank, and whether it is in the list.
func offsetIn(list string, rank uint32) (uint64, bool) {
	before := uint64(0)
	for item := range strings.SplitSeq(list, ",") {
		low, high, ranged := strings.Cut(item, "-")
		first, err := strconv.ParseUint(low, 10, 32)
		if err != nil {
			return 0, false
		}
		last := first
		if ranged {
			if last, err = strconv.ParseUint(high, 10, 32); err != nil || last < first {
				return 0, false
			}
		}
		if uint64(rank) >= first && uint64(rank) <= last {
			return before + uint64(rank) - first, true
		}
		before += last - first + 1
	}
	return 0, false
}
