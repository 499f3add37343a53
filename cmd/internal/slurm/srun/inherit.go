package srun

import (
	"context"
	"fmt"
	"strconv"

	"github.com/muster-hpc/muster/cmd/internal/slurm/option"
	"github.com/muster-hpc/muster/cmd/internal/slurm/session"
	"github.com/muster-hpc/muster/cmd/internal/slurm/submit"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// inherit adjusts what the job's variables say of its shape to what the command line says of the step's: a step that
// names its nodes or tasks does not get the job's other numbers on top.
func inherit(s *session.Session, table *option.Table, line, env *option.Set) error {
	if err := inheritCPUs(s, table, env); err != nil {
		return err
	}
	placed := line.Has("nodes") || line.Has("nodelist")
	nodes, tasks := count(env, "nodes"), count(env, "ntasks")
	switch {
	case line.Has("ntasks"):
		env.Drop("ntasks-per-node")
		if !placed && nodes > 0 {
			// No more nodes than tasks.
			if n := count(line, "ntasks"); n > 0 && n < nodes {
				env.Drop("nodes")
				if err := env.Add(table, "nodes", strconv.Itoa(n)); err != nil {
					return err
				}
			}
		}
	case line.Has("ntasks-per-node"):
		env.Drop("ntasks")
	case placed && (env.Has("ntasks-per-node") || tasks == nodes):
		env.Drop("ntasks") // as many on each node as the job has
	}
	if line.Has("nodelist") && !line.Has("nodes") {
		env.Drop("nodes") // exactly the nodes that are named
	}
	return nil
}

// inheritCPUs takes CPUs of each task from SRUN_CPUS_PER_TASK and SLURM_CPUS_PER_TASK, which may both be set if they agree.
func inheritCPUs(s *session.Session, table *option.Table, env *option.Set) error {
	own, ok := s.Lookup("SRUN_CPUS_PER_TASK")
	if !ok {
		return nil
	}
	if v, ok := env.Get("cpus-per-task"); ok && v.Text != own {
		return &submit.Error{Fatal: true, Code: submit.CodeRefused, Text: fmt.Sprintf(
			"SRUN_CPUS_PER_TASK=%s and SLURM_CPUS_PER_TASK=%s differ: unset one, or give --cpus-per-task", own, v.Text)}
	}
	env.Drop("cpus-per-task")
	return env.Add(table, "cpus-per-task", own)
}

// count is a number of an option; 0 if it is not one.
func count(o *option.Set, name string) int {
	n, err := strconv.Atoi(o.Text(name))
	if err != nil {
		return 0
	}
	return n
}

// fillFromJob asks for the job's shape where neither the command line nor variables say how many nodes the step has: srun
// was called with --jobid from outside.
func (r *run) fillFromJob(ctx context.Context, cluster session.Cluster) error {
	ask := r.spec.GetResources()
	if ask.GetNodesMin() == 0 {
		answer, err := cluster.Jobs().GetJob(ctx, &apiv1.GetJobRequest{JobId: r.job})
		if err != nil {
			return err
		}
		nodes := max(1, answer.GetJob().GetStatus().GetNumNodes())
		if n := ask.GetNtasks(); n > 0 {
			nodes = min(nodes, n)
		}
		ask.NodesMin, ask.NodesMax = nodes, nodes
	}
	if ask.GetNtasks() == 0 {
		ask.Ntasks = ask.GetNodesMin() * max(1, ask.GetNtasksPerNode())
	}
	return nil
}
