package srun

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/muster-hpc/muster/cmd/internal/slurm/option"
	"github.com/muster-hpc/muster/cmd/internal/slurm/session"
	"github.com/muster-hpc/muster/cmd/internal/slurm/submit"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/notation"
)

// Names of options of which a step has its own or the job's, not both.
var (
	gpuNames = []string{"gpus", "gpus-per-node", "gpus-per-task", "gres", "ntasks-per-gpu"}
	cpuNames = []string{"cpus-per-task", "cpus-per-gpu"}
)

// within adjusts options to a step of the enclosing job, and what the job's variables say of its shape to what the command line says of
// the step's: a step that names its nodes or tasks does not get the job's other numbers on top.
func (r *run) within(line, env *option.Set) error {
	env.Drop("job-name") // of the job, not of the step
	// A step that does not ask for memory may use all that its job has, beside other steps.
	env.Drop("mem")
	if r.s.Get("SLURM_STEP_ID") != "" { // srun is called by a task: these are about the step of that
		for _, name := range []string{"cpu-bind", "gpu-bind", "distribution", "label"} {
			env.Drop(name)
		}
	}
	for _, o := range []*option.Set{line, env} {
		v, ok := o.Get("exclusive")
		if !ok {
			continue
		}
		if v.Given && v.Text != "" {
			return refused("--exclusive=%s is for jobs; a step is alone on its CPUs with --exact", v.Text)
		}
		o.Drop("exclusive")
		if err := o.Add(r.table, "exact", ""); err != nil {
			return err
		}
	}
	for _, group := range [][]string{gpuNames, cpuNames} {
		for _, name := range group {
			if !line.Has(name) {
				continue
			}
			for _, other := range group {
				env.Drop(other)
			}
			break
		}
	}
	r.bindsGPUs = r.bindsGPUs || count(r.s.Get("SLURM_GPUS_ON_NODE")) > 0
	return r.inherit(line, env)
}

// inherit takes the shape of the job where the command line says nothing else.
func (r *run) inherit(line, env *option.Set) error {
	if err := inheritCPUs(r.s, r.table, line, env); err != nil {
		return err
	}
	named := line.Has("nodelist") || line.Has("nodefile")
	if listed := strings.HasPrefix(line.Text("distribution"), "arbitrary"); listed || !named && !line.Has("distribution") && r.s.Get("SLURM_HOSTFILE") != "" {
		for _, name := range []string{"nodes", "ntasks", "ntasks-per-node"} {
			env.Drop(name) // the list says all of it
		}
		if !listed {
			env.Drop("distribution") // that of the job
		}
		return nil
	}
	placed := line.Has("nodes") || named || line.Has("relative") || line.Has("exclude")
	nodes, tasks := count(env.Text("nodes")), count(env.Text("ntasks"))
	switch {
	case line.Has("ntasks"):
		env.Drop("ntasks-per-node")
	case line.Has("ntasks-per-node"), line.Has("ntasks-per-gpu"):
		env.Drop("ntasks")
	case placed && (env.Has("ntasks-per-node") || tasks == nodes):
		env.Drop("ntasks") // as many on each node as the job has
	}
	switch {
	case line.Has("nodes"):
	case named:
		env.Drop("nodes") // exactly the nodes that are named
	case nodes > 0:
		most := r.nodesLeft(nodes, line)
		if n := count(line.Text("ntasks")); n > 0 {
			most = min(most, n) // no more nodes than tasks
		}
		if most != nodes {
			env.Drop("nodes")
			return env.Add(r.table, "nodes", strconv.Itoa(most))
		}
	}
	return nil
}

// nodesLeft is how many of the job's nodes --relative and --exclude leave, at least 1.
func (r *run) nodesLeft(nodes int, line *option.Set) int {
	left := nodes - count(line.Text("relative"))
	if out, err := notation.Expand(line.Text("exclude")); err == nil && line.Has("exclude") {
		list, err := notation.Expand(r.s.Get("SLURM_JOB_NODELIST"))
		if err == nil {
			gone := map[string]bool{}
			for _, name := range out {
				gone[name] = true
			}
			for _, name := range list {
				if gone[name] {
					left--
				}
			}
		}
	}
	return max(1, left)
}

// inheritCPUs takes CPUs of each task from SRUN_CPUS_PER_TASK and SLURM_CPUS_PER_TASK, which may both be set if they agree. The command
// line was looked at before.
func inheritCPUs(s *session.Session, table *option.Table, line, env *option.Set) error {
	own, ok := s.Lookup("SRUN_CPUS_PER_TASK")
	if !ok || line.Has("cpus-per-task") || line.Has("cpus-per-gpu") {
		return nil
	}
	if v, ok := env.Get("cpus-per-task"); ok && v.Text != own {
		return &submit.Error{Fatal: true, Code: submit.CodeRefused, Text: fmt.Sprintf(
			"SRUN_CPUS_PER_TASK=%s and SLURM_CPUS_PER_TASK=%s differ: unset one, or give --cpus-per-task", own, v.Text)}
	}
	env.Drop("cpus-per-task")
	return env.Add(table, "cpus-per-task", own)
}

// count is a number of an option or a variable; 0 if it is not one.
func count(text string) int {
	n, err := strconv.Atoi(text)
	if err != nil {
		return 0
	}
	return n
}

// fillFromJob asks for the job's shape where neither the command line nor variables say how many nodes a part of the step has: srun
// was called with --jobid from outside.
func (r *run) fillFromJob(ctx context.Context, cluster session.Cluster) error {
	var job *apiv1.Job
	asks := []*apiv1.ResourceRequest{r.spec.GetResources()}
	for _, part := range r.parts {
		asks = append(asks, part.GetResources())
	}
	for _, ask := range asks {
		if ask.GetNodesMin() == 0 && job == nil {
			answer, err := cluster.Jobs().GetJob(ctx, &apiv1.GetJobRequest{JobId: r.job})
			if err != nil {
				return err
			}
			job = answer.GetJob()
			r.bindsGPUs = r.bindsGPUs || job.GetStatus().GetNumGpus() > 0
		}
		if ask.GetNodesMin() == 0 {
			nodes := max(1, job.GetStatus().GetNumNodes())
			if n := ask.GetRelative(); n < nodes {
				nodes -= n
			}
			if n := ask.GetNtasks(); n > 0 {
				nodes = min(nodes, n)
			}
			ask.NodesMin, ask.NodesMax = nodes, nodes
		}
		if ask.GetNtasks() == 0 && ask.GetNtasksPerGpu() == 0 {
			ask.Ntasks = ask.GetNodesMin() * max(1, ask.GetNtasksPerNode())
		}
	}
	return nil
}
