package sacct

import (
	"github.com/muster-hpc/muster/cmd/internal/slurm/document"
	"github.com/muster-hpc/muster/cmd/internal/slurm/record"
	"github.com/muster-hpc/muster/cmd/internal/slurm/session"
	"github.com/muster-hpc/muster/cmd/internal/slurm/value"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/notation"
)

// object shortens the rows below.
type object = document.Object

// writeJSON prints jobs with their steps in the dialect of 24.11.
func writeJSON(s *session.Session, lines []*line, view *record.View) int {
	jobs := []object{}
	for i := 0; i < len(lines); {
		l := lines[i]
		i++
		steps := []object{}
		for ; i < len(lines) && lines[i].Step != nil && lines[i].Job == l.Job; i++ {
			steps = append(steps, stepObject(lines[i]))
		}
		if l.Step != nil { // only steps were asked for
			steps = append([]object{stepObject(l)}, steps...)
			l = &line{Row: &record.Row{Job: l.Job, View: l.View}}
		}
		jobs = append(jobs, jobObject(l, steps))
	}
	return document.Print(s, view.Cluster, object{{Key: "jobs", Value: jobs}})
}

func times(l *line) object {
	return object{
		{Key: "elapsed", Value: l.elapsed()},
		{Key: "end", Value: document.Moment(l.end())},
		{Key: "start", Value: document.Moment(l.start())},
		{Key: "suspended", Value: 0},
	}
}

func exitOf(l *line) object {
	code, signal := l.exit()
	running := l.Step == nil && !value.Ended(l.Job.GetStatus().GetState())
	return document.Exit(code, signal, running)
}

func stepObject(l *line) object {
	hosts := document.List()
	if names, err := notation.Expand(l.Step.GetNodeList()); err == nil {
		hosts = append(hosts, names...)
	}
	return object{
		{Key: "time", Value: times(l)},
		{Key: "exit_code", Value: exitOf(l)},
		{Key: "nodes", Value: object{{Key: "count", Value: l.nodes()}, {Key: "range", Value: l.Step.GetNodeList()}, {Key: "list", Value: hosts}}},
		{Key: "tasks", Value: object{{Key: "count", Value: l.Step.GetNumTasks()}}},
		{Key: "state", Value: document.List(l.state())},
		{Key: "step", Value: object{{Key: "id", Value: l.id()}, {Key: "name", Value: l.title()}}},
	}
}

func jobObject(l *line, steps []object) object {
	spec, status := l.Job.GetSpec(), l.Job.GetStatus()
	ask := spec.GetResources()
	limit := document.Infinite()
	if seconds, ok := l.LimitSeconds(); ok {
		limit = document.Number(seconds / 60)
	}
	state := value.StateOf(&apiv1.JobStatus{State: status.GetState()}).Word
	killer := ""
	if status.GetState() == apiv1.JobState_JOB_STATE_CANCELLED {
		killer = l.View.Names.UserName(status.GetCancelledBy())
	}
	if l.attempt != nil {
		state = l.state()
	}
	time := append(times(l), object{
		{Key: "eligible", Value: document.Moment(record.At(status.GetEligibleTime()))},
		{Key: "submission", Value: document.Moment(record.At(status.GetSubmitTime()))},
		{Key: "limit", Value: limit},
		{Key: "planned", Value: document.Number(l.planned())},
	}...)
	return object{
		{Key: "account", Value: spec.GetAccount()},
		{Key: "comment", Value: object{{Key: "administrator", Value: ""}, {Key: "job", Value: spec.GetComment()}, {Key: "system", Value: ""}}},
		{Key: "allocation_nodes", Value: status.GetNumNodes()},
		{Key: "cluster", Value: l.View.Cluster},
		{Key: "derived_exit_code", Value: document.Exit(status.GetDerivedExitCode(), status.GetDerivedExitSignal(), !value.Ended(status.GetState()))},
		{Key: "time", Value: time},
		{Key: "exit_code", Value: exitOf(l)},
		{Key: "group", Value: l.Group()},
		{Key: "job_id", Value: l.Job.GetId()},
		{Key: "name", Value: spec.GetName()},
		{Key: "nodes", Value: l.hosts()},
		{Key: "partition", Value: l.PartitionName()},
		{Key: "priority", Value: document.Number(l.Priority())},
		{Key: "qos", Value: spec.GetQos()},
		{Key: "required", Value: object{
			{Key: "CPUs", Value: l.CPUs()}, {Key: "memory_per_cpu", Value: document.Counted(ask.GetMemoryPerCpuMb())},
			{Key: "memory_per_node", Value: document.Counted(ask.GetMemoryPerNodeMb())},
		}},
		{Key: "kill_request_user", Value: killer},
		{Key: "restart_cnt", Value: status.GetRestarts()},
		{Key: "state", Value: object{{Key: "current", Value: document.List(state)}, {Key: "reason", Value: l.Reason()}}},
		{Key: "steps", Value: steps},
		{Key: "submit_line", Value: l.Command()},
		{Key: "stdout", Value: l.Stdout()},
		{Key: "stderr", Value: l.Stderr()},
		{Key: "stdin", Value: l.Stdin()},
		{Key: "user", Value: l.User()},
		{Key: "wckey", Value: object{{Key: "wckey", Value: spec.GetWckey()}, {Key: "flags", Value: document.List()}}},
		{Key: "working_directory", Value: spec.GetWorkDir()},
	}
}
