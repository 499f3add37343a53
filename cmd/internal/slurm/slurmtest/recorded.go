package slurmtest

import (
	"fmt"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// Day is the day of the recorded listings.
func Day(clock string) time.Time {
	at, err := time.ParseInLocation("2006-01-02T15:04:05", "2026-11-30T"+clock, time.Local)
	if err != nil {
		panic(err)
	}
	return at
}

func stamp(clock string) *timestamppb.Timestamp {
	if clock == "" {
		return nil
	}
	return timestamppb.New(Day(clock))
}

const unlimited = 4294967295

// Recorded is the cluster of the recorded listings as far as Muster has what was recorded: four nodes of 16 CPUs and 8
// GPUs, and the jobs that are neither arrays nor have dependencies.
func Recorded(t testing.TB) *Cluster {
	t.Helper()
	c := &Cluster{Now: Day("14:10:04"), Attempts: map[uint32][]*apiv1.Attempt{}, Shares: map[uint32][]*apiv1.NodeShare{}}
	c.Partitions = []*apiv1.Partition{{Name: "main", Nodes: "ALL", IsDefault: true, PriorityTier: 1}}
	for i := uint32(1); i <= 4; i++ {
		c.NodeList = append(c.NodeList, node(i))
	}
	c.NodeList[0].CpusAllocated, c.NodeList[0].GpusAllocatedMask = 3, []uint64{3}
	c.NodeList[1].CpusAllocated, c.NodeList[1].GpusAllocatedMask = 1, []uint64{3}
	c.Members = []*apiv1.Member{{Name: "ctl1", Leader: true, Voter: true, ApiAddress: "127.0.0.11:6817"}}
	c.JobList = jobs()
	c.StepList = []*apiv1.Step{{
		JobId: 6, Id: 4294967291, Attempt: 1, State: apiv1.StepState_STEP_STATE_RUNNING, NodeList: "n1", NumTasks: 1,
		StartTime: stamp("14:09:54"), Spec: &apiv1.StepSpec{Name: "batch"},
	}}
	c.Shares[6] = []*apiv1.NodeShare{
		{Node: "n1", Cpus: "8", Gpus: "0-1", Tasks: 1, AgentAddress: "n1:1", GpuType: "h100"},
		{Node: "n2", Cpus: "8", Gpus: "0-1", Tasks: 1, AgentAddress: "n2:1", GpuType: "h100"},
	}
	return c
}

func node(i uint32) *apiv1.Node {
	n := &apiv1.Node{Number: i, State: apiv1.NodeState_NODE_STATE_UP, Epoch: 1, JoinTime: stamp("14:09:42"), LastBusyTime: stamp("14:09:42"), Spec: &apiv1.NodeSpec{
		Name: fmt.Sprintf("n%d", i), AgentAddress: fmt.Sprintf("127.0.1.%d:690%d", i, i), TaskAddress: fmt.Sprintf("127.0.1.%d", i),
		Cpus: 16, MemoryMb: 8000, Sockets: 2, CoresPerSocket: 8, ThreadsPerCore: 1, Architecture: "x86_64",
		OperatingSystem: "Linux 6.18.44-fc-v782 #1 SMP PREEMPT_DYNAMIC @0", AgentVersion: "22.05.8", BootTime: stamp("12:51:49"),
	}}
	for g := range uint32(8) {
		n.Spec.Gpus = append(n.Spec.Gpus, &apiv1.Gpu{Index: g, Type: "h100"})
	}
	return n
}

// plan is a job in short.
type plan struct {
	id       uint32
	name     string
	state    apiv1.JobState
	reason   apiv1.WaitReason
	nodes    uint32
	limit    uint32
	priority uint32
	submit   string
	command  string
	change   func(*apiv1.Job)
}

func jobs() []*apiv1.Job {
	const (
		pending, running    = apiv1.JobState_JOB_STATE_PENDING, apiv1.JobState_JOB_STATE_RUNNING
		completed, failed   = apiv1.JobState_JOB_STATE_COMPLETED, apiv1.JobState_JOB_STATE_FAILED
		resources, priority = apiv1.WaitReason_WAIT_REASON_RESOURCES, apiv1.WaitReason_WAIT_REASON_PRIORITY
		script              = "/home/user/work/sl.sh"
	)
	exclusive := func(j *apiv1.Job) { j.Spec.Resources.Exclusive = true }
	ended := func(j *apiv1.Job) {
		j.Status.StartTime, j.Status.EndTime, j.Status.NodeList, j.Status.NumNodes, j.Status.NumCpus, j.Status.NumTasks = stamp("14:09:48"), stamp("14:09:48"), "n1", 1, 1, 1
	}
	plans := []plan{
		{1, "early-ok", completed, 0, 1, unlimited, 4294901759, "14:09:45", "", ended},
		{2, "early-fail", failed, apiv1.WaitReason_WAIT_REASON_NON_ZERO_EXIT_CODE, 1, unlimited, 4294901758, "14:09:45", "", func(j *apiv1.Job) {
			ended(j)
			j.Status.ExitCode = 3
		}},
		{6, "run1", running, 0, 2, 600, 4294901756, "14:09:51", script + " 300", func(j *apiv1.Job) {
			j.Status.StartTime, j.Status.NodeList, j.Status.NumNodes, j.Status.NumCpus, j.Status.NumGpus, j.Status.NumTasks = stamp("14:09:54"), "n[1-2]", 2, 2, 4, 2
			j.Status.Attempt, j.Spec.Resources.GpusPerNode = 1, 2
		}},
		{7, "big", pending, resources, 4, unlimited, 4294901755, "14:09:51", script + " 300", exclusive},
		{8, "prio", pending, priority, 4, unlimited, 4294901754, "14:09:51", script + " 300", exclusive},
		{9, "held", pending, apiv1.WaitReason_WAIT_REASON_JOB_HELD_USER, 1, unlimited, 0, "14:09:51", script, func(j *apiv1.Job) {
			j.Status.Held, j.Status.EligibleTime = 1, nil
		}},
		{10, "done", pending, priority, 1, unlimited, 4294901753, "14:09:51", "", nil},
		{11, "failed", pending, priority, 1, unlimited, 4294901752, "14:09:51", "", nil},
		{12, "tlim", pending, priority, 1, 60, 4294901751, "14:09:51", script + " 600", nil},
		{13, "begin", pending, apiv1.WaitReason_WAIT_REASON_BEGIN_TIME, 1, unlimited, 4294901750, "14:09:51", script, func(j *apiv1.Job) {
			j.Spec.BeginTime = stamp("15:09:51")
			j.Status.EligibleTime = stamp("15:09:51")
		}},
		{17, "sl.sh", pending, apiv1.WaitReason_WAIT_REASON_PARTITION_NODE_LIMIT, 9, unlimited, 4294901746, "14:09:52", script, nil},
		{19, "sl.sh", pending, priority, 1, unlimited, 4294901744, "14:09:52", script, nil},
		{20, "srunwait", pending, priority, 4, unlimited, 4294901743, "14:09:52", "", func(j *apiv1.Job) {
			j.Spec.Kind, j.Spec.Args, j.Spec.SubmitHost = apiv1.JobKind_JOB_KIND_RUN, []string{"hostname"}, "localhost"
			exclusive(j)
		}},
	}
	var list []*apiv1.Job
	for _, p := range plans {
		job := &apiv1.Job{Id: p.id, Owner: &apiv1.JobOwner{User: "root"}, Spec: &apiv1.JobSpec{
			Name: p.name, Kind: apiv1.JobKind_JOB_KIND_BATCH, Resources: &apiv1.ResourceRequest{}, WorkDir: "/home/user/work",
			StdoutPath: "/dev/null", Requeue: true, CommandLine: p.command, TimeLimitS: p.limit, SubmitHost: "localhost",
		}, Status: &apiv1.JobStatus{
			State: p.state, Reason: p.reason, Priority: p.priority, Partition: "main", TimeLimitS: p.limit,
			SubmitTime: stamp(p.submit), EligibleTime: stamp(p.submit),
		}}
		if p.nodes > 1 {
			job.Spec.Resources.NodesMin, job.Spec.Resources.NodesMax = p.nodes, p.nodes
		}
		if p.change != nil {
			p.change(job)
		}
		list = append(list, job)
	}
	return list
}
