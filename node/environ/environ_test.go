package environ

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
)

// different are the variables of the samples (Slurm 22.05) that are not given, and why.
var different = map[string]string{
	"SLURM_CONF":                           "there is no such file; set only if the user set it",
	"SLURM_NODE_ALIASES":                   "gone by 24.11",
	"SLURM_TASK_PID":                       "the supervisor sets it",
	"SLURM_WORKING_CLUSTER":                "address of a Slurm controller",
	"SLURM_LAUNCH_NODE_IPADDR":             "srun says it, and this test has none",
	"SLURM_SRUN_COMM_HOST":                 "srun says it, and this test has none",
	"SLURM_SRUN_COMM_PORT":                 "address of a running srun",
	"SLURM_STEP_LAUNCHER_PORT":             "address of a running srun",
	"SLURM_JOB_CPUS_PER_NODE_PACK_GROUP_0": "the old name of heterogeneous jobs",
}

// job returns the order for a job of two nodes like the one that the samples were taken from.
func job(node int) *nodev1.DesiredAttempt {
	return &nodev1.DesiredAttempt{
		Job: &apiv1.Job{
			Id: 1, Owner: &apiv1.JobOwner{Uid: 0, Gid: 0, User: "root"}, Status: &apiv1.JobStatus{Partition: "main"},
			Spec: &apiv1.JobSpec{Name: "envjob", Kind: apiv1.JobKind_JOB_KIND_BATCH, WorkDir: "/home/user/work", SubmitHost: "vm",
				Resources: &apiv1.ResourceRequest{NodesMin: 2, Ntasks: 2, CpusPerTask: 2, GpusPerNode: 2, GpusOption: "gres"}},
		},
		Fence: &apiv1.Fence{Incarnation: 1, Attempt: 1, Placement: 1}, NodeList: "n[1-2]", NodeIndex: uint32(node),
		CpuMask: []uint64{3}, GpuMask: []uint64{3}, CpusPerNode: "2(x2)", TasksPerNode: "1(x2)", NumTasks: 2, TimeLimitS: 60,
	}
}

func batchStep() *nodev1.DesiredStep {
	return &nodev1.DesiredStep{Step: &apiv1.Step{JobId: 1, Id: BatchStep, NodeList: "n1", NumTasks: 1}, Ranks: []uint32{0}, TasksPerNode: []uint32{1}}
}

func parallelStep(node int, perNode uint32) *nodev1.DesiredStep {
	s := &nodev1.DesiredStep{
		Step:      &apiv1.Step{JobId: 1, Id: 0, NodeList: "n[1-2]", NumTasks: 2 * perNode, Spec: &apiv1.StepSpec{Umask: 0o22}},
		NodeIndex: uint32(node), TasksPerNode: []uint32{perNode, perNode}, MasterAddress: "10.0.0.1", MasterPort: 23456,
	}
	for i := range perNode {
		s.Ranks = append(s.Ranks, uint32(node)*perNode+i)
	}
	return s
}

func environment(list []string) map[string]string {
	m := map[string]string{}
	for _, s := range list {
		name, value, _ := strings.Cut(s, "=")
		m[name] = value
	}
	return m
}

func sample(t *testing.T, name string) map[string]string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return environment(strings.Split(strings.TrimSpace(string(data)), "\n"))
}

// compare checks that everything of a sample is there with the same value, but for the differences that are listed.
func compare(t *testing.T, want map[string]string, got map[string]string) {
	t.Helper()
	for name, value := range want {
		if _, ok := different[name]; ok {
			if has, ok := got[name]; ok {
				t.Errorf("%s=%s is given although it is listed as different", name, has)
			}
			continue
		}
		if has, ok := got[name]; !ok || has != value {
			t.Errorf("%s is %q (given: %t); Slurm has %q", name, has, ok, value)
		}
	}
}

func TestVariablesAreThoseOfSlurm(t *testing.T) {
	user := []string{"PWD=/home/user/work"}
	t.Run("batch", func(t *testing.T) {
		got := environment(Tasks(Request{Node: "n1", Cluster: "base", Order: job(0), Step: batchStep(), User: user})[0])
		compare(t, sample(t, "batch.txt"), got)
		for name := range got {
			if strings.HasPrefix(name, "SLURM_STEP") {
				t.Errorf("the batch script has %s", name)
			}
		}
	})
	for node, name := range []string{"task-0.txt", "task-1.txt"} {
		t.Run(name, func(t *testing.T) {
			r := Request{Node: []string{"n1", "n2"}[node], Cluster: "base", Order: job(node), Step: parallelStep(node, 1), User: user}
			compare(t, sample(t, name), environment(Tasks(r)[0]))
		})
	}
	// The same with options: -N2 --ntasks-per-node=2 -c1 --mem=300 --gpus-per-node=1, srun -l.
	order := job(0)
	order.Job.Id, order.NodeList, order.GpuMask, order.CpuMask, order.TasksPerNode, order.NumTasks = 282, "gpu-[001-002]", nil, []uint64{3}, "2(x2)", 4
	order.Job.Spec.Name, order.Job.Spec.Account, order.Job.Spec.Qos = "envj", "root", "normal"
	order.Job.Spec.Resources = &apiv1.ResourceRequest{NodesMin: 2, NtasksPerNode: 2, CpusPerTask: 1, MemoryPerNodeMb: 300, GpusPerNode: 1, GpusOption: "gpus-per-node"}
	t.Run("accounted batch", func(t *testing.T) {
		want := sample(t, "accounted-batch.txt")
		delete(want, "SLURM_GPUS_ON_NODE") // these GPUs had no device files, so that no index was allocated
		compare(t, want, environment(Tasks(Request{Node: "gpu-001", Cluster: "oracle", Order: order, Step: batchStep(), User: user})[0]))
	})
	t.Run("accounted task", func(t *testing.T) {
		want := sample(t, "accounted-task-3.txt")
		delete(want, "SLURM_GPUS_ON_NODE")
		want["SLURM_PRIO_PROCESS"] = "0" // it ran under nice
		step := parallelStep(1, 2)
		step.Step.NodeList = order.NodeList
		step.Step.Spec.TaskOptions = &apiv1.TaskOptions{Label: true}
		compare(t, want, environment(Tasks(Request{Node: "gpu-002", Cluster: "oracle", Order: order, Step: step, User: user})[1]))
	})
}

func TestAcceleratorsGoByTheirRealIndexes(t *testing.T) {
	order := job(0)
	order.GpuMask = []uint64{0xf0}
	got := environment(Tasks(Request{Node: "n1", Order: order, Step: parallelStep(0, 2)})[1])
	for name, want := range map[string]string{"CUDA_VISIBLE_DEVICES": "4,5,6,7", "GPU_DEVICE_ORDINAL": "4,5,6,7", "SLURM_JOB_GPUS": "4,5,6,7",
		"SLURM_STEP_GPUS": "4,5,6,7", "SLURM_GPUS_ON_NODE": "4"} {
		if got[name] != want {
			t.Errorf("%s is %q, want %q", name, got[name], want)
		}
	}
	bound := []Binding{{GPUs: []int{4, 5}, Some: true}, {GPUs: []int{6, 7}, Some: true}}
	tasks := Tasks(Request{Node: "n1", Order: order, Step: parallelStep(0, 2), Bindings: bound})
	if a, b := environment(tasks[0])["CUDA_VISIBLE_DEVICES"], environment(tasks[1])["CUDA_VISIBLE_DEVICES"]; a != "4,5" || b != "6,7" {
		t.Errorf("bound per task they are %q and %q", a, b)
	}
	order.GpuMask = nil
	order.Job.Spec.Resources.GpusPerTask = 0
	got = environment(Tasks(Request{Node: "n1", Order: order, Step: batchStep(), User: []string{"CUDA_VISIBLE_DEVICES=3"}})[0])
	if v, ok := got["CUDA_VISIBLE_DEVICES"]; ok {
		t.Errorf("a job without accelerators inherits CUDA_VISIBLE_DEVICES=%s", v)
	}
}

func TestRendezvous(t *testing.T) {
	const place, ranks = "MASTER_ADDR MASTER_PORT", "RANK WORLD_SIZE LOCAL_RANK"
	cases := []struct {
		name   string
		change func(*nodev1.DesiredAttempt, *nodev1.DesiredStep)
		per    uint32
		user   []string
		want   string
	}{
		{"several tasks per node", nil, 2, nil, place + " " + ranks},
		{"one task per node with several GPUs", nil, 1, nil, place},
		{"one task per node with one GPU", func(d *nodev1.DesiredAttempt, _ *nodev1.DesiredStep) { d.GpuMask = []uint64{1} }, 1, nil, place + " " + ranks},
		{"one task per node without GPUs", func(d *nodev1.DesiredAttempt, _ *nodev1.DesiredStep) { d.GpuMask = nil }, 1, nil, place + " " + ranks},
		{"GPUs bound per task", func(d *nodev1.DesiredAttempt, s *nodev1.DesiredStep) {
			s.Step.Spec.TaskOptions = &apiv1.TaskOptions{BindGpusPerTask: true}
		}, 2, nil, place},
		{"off in the cluster or the job", func(d *nodev1.DesiredAttempt, _ *nodev1.DesiredStep) { d.NoRendezvousEnvironment = true }, 2, nil, ""},
		{"off in the step", func(_ *nodev1.DesiredAttempt, s *nodev1.DesiredStep) {
			s.Step.Spec.TaskOptions = &apiv1.TaskOptions{NoRendezvousEnvironment: true}
		}, 2, nil, ""},
		{"a single task", func(_ *nodev1.DesiredAttempt, s *nodev1.DesiredStep) { s.Step.NumTasks = 1 }, 1, nil, ""},
		{"the user's own stay", nil, 2, []string{"RANK=mine", "MASTER_PORT=1"}, place + " " + ranks},
		{"inherited from an outer step", nil, 2, []string{"RANK=9", "MASTER_PORT=1", inheritedMark + "=RANK MASTER_PORT"}, place + " " + ranks},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			order, step := job(1), parallelStep(1, c.per)
			if c.change != nil {
				c.change(order, step)
			}
			got := environment(Tasks(Request{Node: "n2", Order: order, Step: step, User: c.user})[c.per-1])
			for name, value := range environment(Late(order, step)) { // as the supervisor adds them
				if _, ok := got[name]; !ok {
					got[name] = value
				}
			}
			wanted := strings.Fields(c.want)
			for _, name := range strings.Fields(place + " " + ranks) {
				if _, ok := got[name]; ok != slices.Contains(wanted, name) {
					t.Errorf("%s is given: %t", name, ok)
				}
			}
			rank, port := []string{"1", "3"}[c.per-1], "23456"
			if c.name == "the user's own stay" {
				rank, port = "mine", "1"
			}
			if slices.Contains(wanted, "RANK") && got["RANK"] != rank || slices.Contains(wanted, "MASTER_PORT") && got["MASTER_PORT"] != port {
				t.Errorf("RANK is %q, MASTER_PORT %q", got["RANK"], got["MASTER_PORT"])
			}
			if slices.Contains(wanted, "WORLD_SIZE") && (got["WORLD_SIZE"] != []string{"2", "4"}[c.per-1] || got["LOCAL_RANK"] != []string{"0", "1"}[c.per-1]) {
				t.Errorf("WORLD_SIZE is %q, LOCAL_RANK %q", got["WORLD_SIZE"], got["LOCAL_RANK"])
			}
			if WantsPort(order, step) {
				t.Error("a node that is not the first looks for a port")
			}
			step.NodeIndex = 0
			if WantsPort(order, step) != (c.want != "") {
				t.Error("the first node looks for a port at the wrong time")
			}
		})
	}
	if WantsPort(job(0), batchStep()) {
		t.Error("a batch script has a rendezvous")
	}
}

func TestNothingOfAnotherJobLeaksIn(t *testing.T) {
	user := []string{"SLURM_JOB_ID=99", "SLURM_PROCID=7", "SLURM_STEP_ID=3", "SLURM_RESTART_COUNT=2", "SLURM_SUBMIT_DIR=/elsewhere", "PWD=/here",
		"SLURM_CONF=/their/slurm.conf", "SLURM_EXPORT_ENV=ALL", "MUSTER_RESTART_REASON=old"}
	got := environment(Tasks(Request{Node: "n1", Order: job(0), Step: batchStep(), User: user})[0])
	for name, want := range map[string]string{"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_SUBMIT_DIR": "/here",
		"SLURM_CONF": "/their/slurm.conf", "SLURM_EXPORT_ENV": "ALL"} {
		if got[name] != want {
			t.Errorf("%s is %q, want %q", name, got[name], want)
		}
	}
	for _, name := range []string{"SLURM_STEP_ID", "SLURM_RESTART_COUNT", "MUSTER_RESTART_REASON"} {
		if v, ok := got[name]; ok {
			t.Errorf("%s=%s came in from another job", name, v)
		}
	}
	// A step made from within the job keeps where the job was submitted.
	inner := []string{"SLURM_JOB_ID=1", "SLURM_SUBMIT_DIR=/first", "SLURM_SUBMIT_HOST=login", "PWD=/now"}
	got = environment(Tasks(Request{Node: "n1", Order: job(0), Step: parallelStep(0, 1), User: inner})[0])
	if got["SLURM_SUBMIT_DIR"] != "/first" || got["SLURM_SUBMIT_HOST"] != "login" {
		t.Errorf("the step was submitted from %s at %s", got["SLURM_SUBMIT_DIR"], got["SLURM_SUBMIT_HOST"])
	}
}

func TestTheClustersCommandsAreAtTheEndOfThePath(t *testing.T) {
	for _, c := range []struct{ user, commands, want string }{
		{"PATH=/a:/b", "/opt/muster/slurm", "/a:/b:/opt/muster/slurm"},
		{"PATH=/opt/muster/slurm:/b", "/opt/muster/slurm", "/opt/muster/slurm:/b"},
		{"PATH=/a", "", "/a"},
		{"X=1", "/s", "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin:/s"}, // --export=NONE
	} {
		got := environment(Tasks(Request{Node: "n1", Order: job(0), Step: batchStep(), User: []string{c.user}, Commands: c.commands})[0])
		if got["PATH"] != c.want {
			t.Errorf("of %s and %q became %q", c.user, c.commands, got["PATH"])
		}
	}
}

func TestARestartSaysSo(t *testing.T) {
	order := job(0)
	order.Fence = &apiv1.Fence{Incarnation: 2, Attempt: 3, Placement: 4}
	order.RestartReason = "node n9 was lost"
	order.Job.Status.Restarts = 2
	order.Job.Status.StartTime = &timestamppb.Timestamp{Seconds: 1000}
	got := environment(append(Tasks(Request{Node: "n1", AgentSocket: "/run/a.sock", Order: order, Step: batchStep()})[0], Late(order, batchStep())...))
	for name, want := range map[string]string{"SLURM_RESTART_COUNT": "2", "MUSTER_JOB_ID": "1", "MUSTER_ATTEMPT": "3", "MUSTER_PLACEMENT": "4",
		"MUSTER_INCARNATION": "2", "MUSTER_FENCE": "2.3.4", "MUSTER_RESTART_REASON": "node n9 was lost", "MUSTER_AGENT_SOCKET": "/run/a.sock",
		"SLURM_JOB_START_TIME": "1000", "SLURM_JOB_END_TIME": "1060"} {
		if got[name] != want {
			t.Errorf("%s is %q, want %q", name, got[name], want)
		}
	}
	first := proto.Clone(job(0)).(*nodev1.DesiredAttempt)
	if late := environment(Late(first, batchStep())); late["SLURM_RESTART_COUNT"] != "" {
		t.Errorf("a first attempt says SLURM_RESTART_COUNT=%s", late["SLURM_RESTART_COUNT"])
	}
}

func TestFilenamePatterns(t *testing.T) {
	n := Names{JobID: 128, StepID: 0, JobName: "train", User: "eva", Node: "n3", NodeIndex: 2, Rank: 11}
	batch, again := n, n
	batch.StepID, again.Restarts = BatchStep, 2
	for _, c := range []struct {
		names   Names
		pattern string
		want    string
	}{
		{n, "job%J.out", "job128.0.out"}, {n, "job%4j.out", "job0128.out"}, {n, "job%j-%2t.out", "job128-11.out"},
		{n, "%x_%A_%a.%u@%N", "train_128_4294967294.eva@n3"}, {n, "%n.%s.%t", "2.0.11"}, {n, "100%%", "100%"}, {n, "%5t", "00011"},
		{n, "%99j", "0000000128"}, {n, "%q%", "%q%"}, {n, `a\%j`, "a%j"}, {n, "%3", "%3"}, {n, "", ""}, {n, "%4x", "train"},
		{n, "x-%r", "x-0"}, {again, "x-%r-%3r", "x-2-002"}, {batch, "%s %J", "batch 128.batch"}, {batch, "slurm-%j.out", "slurm-128.out"},
	} {
		if got := c.names.Expand(c.pattern); got != c.want {
			t.Errorf("%q gave %q, want %q", c.pattern, got, c.want)
		}
	}
	for pattern, want := range map[string]string{"": "", "a/../b": "/w/b", "/abs/%j": "/abs/128", "~/x": "/w/~/x", "$HOME/x": "/w/$HOME/x"} {
		if got := n.Path(pattern, "/w"); got != want {
			t.Errorf("the path of %q is %q, want %q", pattern, got, want)
		}
	}
}

func FuzzPatternsNeverFailAndNeverGrowWithoutBound(f *testing.F) {
	f.Add("%5j%%%x\\%")
	f.Fuzz(func(t *testing.T, pattern string) {
		got := Names{JobID: 4294967295, StepID: 1, JobName: "x", User: "u", Node: "n"}.Expand(pattern)
		if len(got) > 32*(len(pattern)+1) {
			t.Errorf("%q grew to %d bytes", pattern, len(got))
		}
	})
}

func TestAnEnvironmentBlobIsSplitAtZeroBytes(t *testing.T) {
	if got := Split([]byte("A=1\x00B=two\nlines\x00C=\x00")); !slices.Equal(got, []string{"A=1", "B=two\nlines", "C="}) {
		t.Errorf("it was split into %q", got)
	}
	if got := Split(nil); got != nil {
		t.Errorf("nothing was split into %q", got)
	}
	got := environment(Tasks(Request{Node: "n1", Order: job(0), Step: batchStep(), User: []string{"A=1", "noequals", "=x", "A=2"}})[0])
	if _, bad := got["noequals"]; bad || got["A"] != "2" {
		t.Errorf("A is %q", got["A"])
	}
}
