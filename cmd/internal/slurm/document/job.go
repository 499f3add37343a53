package document

import (
	"time"

	"github.com/muster-hpc/muster/cmd/internal/slurm/record"
	"github.com/muster-hpc/muster/cmd/internal/slurm/session"
	"github.com/muster-hpc/muster/cmd/internal/slurm/value"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/notation"
)

// WriteJobs prints a document of jobs.
func WriteJobs(s *session.Session, rows []*record.Row, view *record.View) int {
	jobs := make([]Object, 0, len(rows))
	for _, r := range rows {
		jobs = append(jobs, Job(r, nil))
	}
	return Print(s, view.Cluster, Object{
		{"jobs", jobs}, {"last_backfill", Moment(time.Time{})}, {"last_update", Moment(view.Now)},
	})
}

// Exit writes how something ended.
func Exit(code, signal uint32, pending bool) Object {
	status, ended := "SUCCESS", Unset()
	name := ""
	switch {
	case pending:
		status = "PENDING"
	case signal != 0:
		status, ended, name = "SIGNALED", Number(signal), value.SignalWord(int(signal))
	case code != 0:
		status = "ERROR"
	}
	returned := Number(code)
	if pending {
		returned = Unset()
	}
	return Object{
		{"status", List(status)},
		{"return_code", returned},
		{"signal", Object{{"id", ended}, {"name", name}}},
	}
}

// States writes a job's state: the base state, and COMPLETING beside it.
func States(status *apiv1.JobStatus) []string {
	if status.GetCompleting() {
		plain := &apiv1.JobStatus{State: status.GetState()}
		return List(value.StateOf(plain).Word, value.Completing.Word)
	}
	return List(value.StateOf(status).Word)
}

// Job writes one job; shares are its parts on nodes if they are known.
func Job(r *record.Row, shares []*apiv1.NodeShare) Object {
	o := append(identity(r), timing(r)...)
	o = append(o, asked(r)...)
	if !r.Pending() {
		o = append(o, Pair{"job_resources", allocation(r, shares)})
	}
	return o
}

func identity(r *record.Row) Object {
	spec, status := r.Job.GetSpec(), r.Job.GetStatus()
	host := ""
	if spec.GetKind() == apiv1.JobKind_JOB_KIND_BATCH && !r.Pending() {
		host = r.FirstHost()
	}
	active := !value.Ended(status.GetState())
	return Object{
		{"account", spec.GetAccount()},
		{"admin_comment", ""},
		{"allocating_node", spec.GetSubmitHost()},
		{"array_job_id", Number(0)},
		{"array_task_id", Unset()},
		{"array_max_tasks", Number(0)},
		{"array_task_string", ""},
		{"association_id", 0},
		{"batch_features", ""},
		{"batch_flag", spec.GetKind() == apiv1.JobKind_JOB_KIND_BATCH},
		{"batch_host", host},
		{"flags", List()},
		{"burst_buffer", ""},
		{"burst_buffer_state", ""},
		{"cluster", r.View.Cluster},
		{"cluster_features", ""},
		{"command", r.Command()},
		{"comment", spec.GetComment()},
		{"container", ""},
		{"container_id", ""},
		{"dependency", ""},
		{"derived_exit_code", Exit(status.GetDerivedExitCode(), status.GetDerivedExitSignal(), active)},
		{"exit_code", Exit(status.GetExitCode(), status.GetExitSignal(), active)},
		{"extra", ""},
		{"failed_node", ""},
		{"group_id", r.Job.GetOwner().GetGid()},
		{"group_name", r.Group()},
		{"het_job_id", Number(0)},
		{"het_job_id_set", ""},
		{"het_job_offset", Number(0)},
		{"job_id", r.Job.GetId()},
		{"job_state", States(status)},
		{"mail_type", List()},
		{"mail_user", r.User()},
		{"name", spec.GetName()},
		{"partition", r.PartitionName()},
		{"qos", spec.GetQos()},
		{"hold", status.GetHeld() != 0},
		{"priority", Number(r.Priority())},
		{"nice", spec.GetNice()},
		{"reboot", false},
		{"requeue", spec.GetRequeue()},
		{"restart_cnt", status.GetRestarts()},
		{"resv_name", ""},
		{"state_description", status.GetSentence()},
		{"state_reason", r.Reason()},
		{"standard_error", r.Stderr()},
		{"standard_input", r.Stdin()},
		{"standard_output", r.Stdout()},
		{"system_comment", ""},
		{"user_id", r.Job.GetOwner().GetUid()},
		{"user_name", r.User()},
		{"wckey", spec.GetWckey()},
		{"current_working_directory", spec.GetWorkDir()},
	}
}

func timing(r *record.Row) Object {
	status := r.Job.GetStatus()
	limit := Infinite()
	if seconds, ok := r.LimitSeconds(); ok {
		limit = Number(seconds / 60)
	}
	return Object{
		{"accrue_time", Moment(record.At(status.GetEligibleTime()))},
		{"deadline", Number(0)},
		{"delay_boot", Number(0)},
		{"eligible_time", Moment(record.At(status.GetEligibleTime()))},
		{"end_time", Moment(r.End())},
		{"last_sched_evaluation", Number(0)},
		{"preempt_time", Number(0)},
		{"preemptable_time", Number(0)},
		{"pre_sus_time", Number(0)},
		{"resize_time", Number(0)},
		{"start_time", Moment(r.Start())},
		{"submit_time", Moment(record.At(status.GetSubmitTime()))},
		{"suspend_time", Number(0)},
		{"time_limit", limit},
		{"time_minimum", Number(0)},
	}
}

func asked(r *record.Row) Object {
	ask := r.Job.GetSpec().GetResources()
	memory := Counted(ask.GetMemoryPerNodeMb())
	if ask.GetMemoryAll() {
		memory = Number(0)
	}
	shared := List()
	if ask.GetExclusive() {
		shared = List("none")
	} else if ask.GetOversubscribe() {
		shared = List("oversubscribe")
	}
	return Object{
		{"contiguous", false},
		{"core_spec", 0},
		{"thread_spec", 32766},
		{"cores_per_socket", Unset()},
		{"billable_tres", Counted(r.CPUs())},
		{"cpus_per_task", Counted(ask.GetCpusPerTask())},
		{"cpu_frequency_minimum", Unset()},
		{"cpu_frequency_maximum", Unset()},
		{"cpu_frequency_governor", Unset()},
		{"cpus_per_tres", ""},
		{"cpus", Number(r.CPUs())},
		{"node_count", Number(r.Nodes())},
		{"tasks", Number(r.Tasks())},
		{"excluded_nodes", notation.Fold(ask.GetExclude())},
		{"required_nodes", notation.Fold(ask.GetNodeList())},
		{"features", ""},
		{"prefer", ""},
		{"federation_origin", ""},
		{"federation_siblings_active", ""},
		{"federation_siblings_viable", ""},
		{"gres_detail", List()},
		{"licenses", ""},
		{"max_cpus", Number(0)},
		{"max_nodes", Number(ask.GetNodesMax())},
		{"mcs_label", ""},
		{"memory_per_tres", ""},
		{"memory_per_cpu", Counted(ask.GetMemoryPerCpuMb())},
		{"memory_per_node", memory},
		{"minimum_cpus_per_node", Number(r.MinCPUs())},
		{"minimum_tmp_disk_per_node", Number(0)},
		{"network", ""},
		{"nodes", r.NodeList()},
		{"profile", List("NOT_SET")},
		{"required_switches", 0},
		{"scheduled_nodes", ""},
		{"shared", shared},
		{"sockets_per_board", 0},
		{"sockets_per_node", Unset()},
		{"tasks_per_board", Number(0)},
		{"tasks_per_core", Infinite()},
		{"tasks_per_node", Number(ask.GetNtasksPerNode())},
		{"tasks_per_socket", Infinite()},
		{"tasks_per_tres", Unset()},
		{"threads_per_core", Unset()},
		{"tres_bind", ""},
		{"tres_freq", ""},
		{"tres_per_job", r.TresPerJob()},
		{"tres_per_node", r.TresPerNode()},
		{"tres_per_socket", ""},
		{"tres_per_task", r.TresPerTask()},
		{"tres_req_str", r.ReqTres()},
		{"tres_alloc_str", r.AllocTres()},
		{"maximum_switch_wait_time", 0},
	}
}

func allocation(r *record.Row, shares []*apiv1.NodeShare) Object {
	nodes := []Object{}
	if shares == nil {
		hosts, err := notation.Expand(r.NodeList())
		if err == nil {
			for i, host := range hosts {
				nodes = append(nodes, Object{{"index", i}, {"name", host}})
			}
		}
	}
	for i, share := range shares {
		nodes = append(nodes, Object{
			{"index", i},
			{"name", share.GetNode()},
			{"cpus", Object{{"count", Count(share.GetCpus())}, {"used", 0}}},
			{"memory", Object{{"used", 0}, {"allocated", share.GetMemoryMb()}}},
			{"gres", Gres(share)},
			{"cpu_ids", share.GetCpus()},
		})
	}
	return Object{
		{"select_type", List("CPU", "MEMORY")},
		{"nodes", Object{
			{"count", r.Nodes()}, {"select_type", List("AVAILABLE")}, {"list", r.NodeList()},
			{"whole", r.Job.GetSpec().GetResources().GetExclusive()}, {"allocation", nodes},
		}},
		{"cpus", r.CPUs()},
		{"threads_per_core", Unset()},
	}
}
