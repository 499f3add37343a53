package fsm

import (
	"fmt"
	"strings"
	"testing"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

func TestImpossibleJobsAreRefusedWithTheSentence(t *testing.T) {
	r := newRig(t)
	r.boot()
	configuration := testConfiguration()
	configuration.Partitions = append(configuration.Partitions,
		&apiv1.Partition{Name: "gpu", Nodes: "g[1-2]", MaxTimeS: 7200, MaxNodes: 1},
		&apiv1.Partition{Name: "later", Nodes: "x[1-4]"})
	r.must(root, &logv1.Configure{Configuration: configuration})
	noNodesYet := batchSpec()
	noNodesYet.Resources = &apiv1.ResourceRequest{NodesMin: 100, GpusPerNode: 9}
	if refusal, _ := ValidateSpec(&r.m.s.View, noNodesYet, alice); refusal != nil {
		t.Errorf("refused before any node joined: %v", refusal)
	}
	r.join("n1", 8, 0)
	r.join("g1", 64, 8)
	r.join("g2", 32, 4)
	for _, c := range []struct {
		change func(*apiv1.JobSpec, *apiv1.ResourceRequest)
		want   string // part of the sentence; "" if it is accepted
	}{
		{func(s *apiv1.JobSpec, _ *apiv1.ResourceRequest) {}, ""},
		{func(s *apiv1.JobSpec, _ *apiv1.ResourceRequest) { s.Partitions = []string{"nosuch"} },
			"partition nosuch does not exist; partitions: main, alone, gpu, later"},
		{func(_ *apiv1.JobSpec, r *apiv1.ResourceRequest) { r.GpusPerNode = 9 }, "asks for 9 GPUs per node; the largest node in partition gpu has 8"},
		{func(_ *apiv1.JobSpec, r *apiv1.ResourceRequest) { r.GpusPerNode = 8 }, ""},
		{func(_ *apiv1.JobSpec, r *apiv1.ResourceRequest) { r.NodesMin, r.GpusPerNode = 2, 8 }, "partition gpu has 1 such nodes"},
		{func(_ *apiv1.JobSpec, r *apiv1.ResourceRequest) { r.GpuType, r.GpusPerNode = "a100", 1 }, "GPUs of type a100 per node; the largest node in partition gpu has 0"},
		{func(_ *apiv1.JobSpec, r *apiv1.ResourceRequest) { r.NodesMin = 3 }, "asks for 3 nodes; partition gpu has 2"},
		{func(_ *apiv1.JobSpec, r *apiv1.ResourceRequest) { r.CpusPerTask = 65 }, "asks for 65 CPUs per task; the largest node in partition gpu has 64"},
		{func(_ *apiv1.JobSpec, r *apiv1.ResourceRequest) { r.NodesMin, r.NtasksPerNode, r.CpusPerTask = 1, 9, 8 }, "asks for 72 CPUs per node"},
		{func(_ *apiv1.JobSpec, r *apiv1.ResourceRequest) { r.MemoryPerNodeMb = 1001 }, "asks for 1001 MiB of memory per node"},
		{func(_ *apiv1.JobSpec, r *apiv1.ResourceRequest) { r.Ntasks = 97 }, "partition gpu has room for 96"},
		{func(_ *apiv1.JobSpec, r *apiv1.ResourceRequest) { r.Ntasks = 96 }, ""},
		{func(_ *apiv1.JobSpec, r *apiv1.ResourceRequest) { r.Ntasks, r.GpusPerTask = 13, 1 }, "partition gpu has room for 12"},
		{func(_ *apiv1.JobSpec, r *apiv1.ResourceRequest) { r.NodesMax, r.NodesMin, r.GpusTotal = 1, 1, 9 }, "asks for 9 GPUs on at most 1 nodes; partition gpu has 8"},
		{func(_ *apiv1.JobSpec, r *apiv1.ResourceRequest) {
			r.Ntasks, r.Exclude, r.CpusPerTask = 1, []string{"g1"}, 33
		}, "the largest node in partition gpu has 32"},
		{func(_ *apiv1.JobSpec, r *apiv1.ResourceRequest) { r.NodeList = []string{"n1"} }, "node n1 is not in partition gpu"},
		{func(_ *apiv1.JobSpec, r *apiv1.ResourceRequest) { r.NodeList = []string{"n77"} }, "node n77 does not exist"},
		{func(_ *apiv1.JobSpec, r *apiv1.ResourceRequest) {
			r.NodeList, r.Exclude = []string{"g1"}, []string{"g1"}
		}, "asks for node g1 and excludes it"},
		{func(_ *apiv1.JobSpec, r *apiv1.ResourceRequest) { r.GpusPerTask = 1 }, "without a number of tasks or of GPUs"},
		{func(_ *apiv1.JobSpec, r *apiv1.ResourceRequest) { r.GpusPerTask, r.GpusTotal = 2, 3 }, "does not divide"},
		{func(_ *apiv1.JobSpec, r *apiv1.ResourceRequest) { r.MemoryPerNodeMb, r.MemoryPerCpuMb = 1, 1 }, "exclude each other"},
		{func(_ *apiv1.JobSpec, r *apiv1.ResourceRequest) { r.MemoryPerCpuMb = 1 << 62; r.CpusPerTask = 60 }, "MiB of memory per node"},
		{func(_ *apiv1.JobSpec, r *apiv1.ResourceRequest) { r.NodesMin, r.NodesMax = 2, 1 }, "at least 2 and at most 1"},
		{func(_ *apiv1.JobSpec, r *apiv1.ResourceRequest) { r.Ntasks = ^uint32(0) }, "at most 1048576 tasks"},
		{func(s *apiv1.JobSpec, _ *apiv1.ResourceRequest) { s.TimeLimitS = 7201 }, "partition gpu allows 2 hours"},
		{func(s *apiv1.JobSpec, _ *apiv1.ResourceRequest) { s.TimeLimitS = Unlimited }, "asks for no time limit"},
		{func(s *apiv1.JobSpec, _ *apiv1.ResourceRequest) { s.Name = strings.Repeat("x", 1025) }, "the name has 1025 bytes"},
		{func(s *apiv1.JobSpec, _ *apiv1.ResourceRequest) { s.Comment = "a\x00b" }, "zero byte"},
		{func(s *apiv1.JobSpec, _ *apiv1.ResourceRequest) { s.WorkDir = "here" }, "not an absolute path"},
		{func(s *apiv1.JobSpec, _ *apiv1.ResourceRequest) { s.Kind = 0 }, "no kind"},
		{func(s *apiv1.JobSpec, _ *apiv1.ResourceRequest) { s.ScriptBlob = "" }, "needs a script"},
		{func(s *apiv1.JobSpec, _ *apiv1.ResourceRequest) { s.ScriptBlob = "XYZ" }, "not a SHA-256"},
		{func(s *apiv1.JobSpec, _ *apiv1.ResourceRequest) { s.Priority = 5 }, "only an operator"},
		{func(s *apiv1.JobSpec, r *apiv1.ResourceRequest) { s.Partitions = []string{"later"}; r.GpusPerNode = 99 }, ""},
		{func(s *apiv1.JobSpec, r *apiv1.ResourceRequest) { s.Partitions = []string{"later"}; r.NodesMin = 5 }, "partition later has 4"},
		{func(s *apiv1.JobSpec, r *apiv1.ResourceRequest) {
			s.Partitions = []string{"main", "gpu"}
			r.GpusPerNode = 8
		}, ""},
	} {
		spec := batchSpec()
		spec.Partitions, spec.Resources = []string{"gpu"}, &apiv1.ResourceRequest{}
		c.change(spec, spec.Resources)
		refusal, _ := ValidateSpec(&r.m.s.View, spec, alice)
		if c.want == "" && refusal != nil || c.want != "" && !strings.Contains(refusal.GetSentence(), c.want) {
			t.Errorf("%s:\n got %q\nwant %q", text(spec), refusal.GetSentence(), c.want)
		}
	}
	wide := batchSpec()
	wide.Partitions, wide.Resources = []string{"gpu"}, &apiv1.ResourceRequest{NodesMin: 2}
	if refusal, warnings := ValidateSpec(&r.m.s.View, wide, alice); refusal != nil || len(warnings) != 1 {
		t.Errorf("more nodes than the partition allows: %v %v", refusal, warnings)
	}
}

func TestClassesOfNodesFollowTheirSpecifications(t *testing.T) {
	r := newRig(t)
	r.boot()
	r.join("n1", 8, 0)
	r.join("n2", 8, 0)
	r.must(agentOf("n2"), &logv1.JoinNode{Spec: nodeSpec("n2", 16, 2), Instance: instance("boot-n2", "1")})
	classes := r.check().PartitionClasses("main")
	if len(classes) != 2 || classes[0].Nodes != 1 || classes[1].GPUs != 2 {
		t.Errorf("classes are %+v", classes)
	}
}

func TestBadConfigurationsAreRefused(t *testing.T) {
	for want, change := range map[string]func(*apiv1.Configuration){
		"is not a name":         func(c *apiv1.Configuration) { c.ClusterName = "a b" },
		"this one has 0":        func(c *apiv1.Configuration) { c.Partitions = nil },
		"is there twice":        func(c *apiv1.Configuration) { c.Partitions[1].Name = "main" },
		"both the default":      func(c *apiv1.Configuration) { c.Partitions[1].IsDefault = true },
		"above its maximum":     func(c *apiv1.Configuration) { c.Partitions[0].DefaultTimeS = 90_000 },
		"invalid host list":     func(c *apiv1.Configuration) { c.Partitions[1].Nodes = "n[1-" },
		"has no nodes":          func(c *apiv1.Configuration) { c.Partitions[1].Nodes = "" },
		"longer than the lease": func(c *apiv1.Configuration) { c.Settings.LostAfterMs = 5000 },
		"100 percent":           func(c *apiv1.Configuration) { c.Settings.LostLimitPercent = 101 },
	} {
		c := testConfiguration()
		change(c)
		if refusal := CheckConfiguration(c); !strings.Contains(refusal.GetSentence(), want) {
			t.Errorf("want %q, got %v", want, refusal)
		}
	}
	r := newRig(t)
	r.boot()
	at := r.check().ConfigurationRevision()
	r.must(root, &logv1.Configure{Configuration: testConfiguration(), Expected: at})
	if got := r.do(root, &logv1.Configure{Configuration: testConfiguration(), Expected: at}).Refusal.GetReason(); got != "CONFIGURATION_CHANGED" {
		t.Errorf("a lost update: %q", got)
	}
}

// Steps of level 1 share the allocation; those of today that overlap do, too.
func TestStepsStayWithinTheAllocation(t *testing.T) {
	for level := range MaxLevel {
		t.Run(fmt.Sprint("level ", level+1), func(t *testing.T) { testStepsStayWithinTheAllocation(t, level+1) })
	}
}

func testStepsStayWithinTheAllocation(t *testing.T, level uint32) {
	r := newRig(t)
	r.bootAt(level)
	for _, n := range []string{"n1", "n2", "n3", "n4"} {
		r.join(n, 8, 4)
	}
	job := r.submit(alice, batchSpec())
	r.start(job, r.placement(0xf, 3, 1, 2, 3, 4))
	for _, c := range []struct {
		request *apiv1.ResourceRequest
		want    string // node list and tasks of each group, or the refusal
	}{
		{nil, "n[1-4] 4"},
		{&apiv1.ResourceRequest{Ntasks: 6}, "n[1-4] 6"},
		{&apiv1.ResourceRequest{NodesMin: 2, Ntasks: 6}, "n[1-2] 6"},
		{&apiv1.ResourceRequest{Ntasks: 2}, "n[1-2] 2"},
		{&apiv1.ResourceRequest{NtasksPerNode: 2}, "n[1-4] 8"},
		{&apiv1.ResourceRequest{NtasksPerNode: 2, Ntasks: 4}, "n[1-2] 4"},
		{&apiv1.ResourceRequest{NodeList: []string{"n3"}}, "n3 1"},
		{&apiv1.ResourceRequest{NodeList: []string{"n3"}, NodesMin: 2}, "n[1,3] 2"},
		{&apiv1.ResourceRequest{Exclude: []string{"n1"}, NodesMin: 3}, "n[2-4] 3"},
		{&apiv1.ResourceRequest{Ntasks: 4, GpusPerTask: 1, NodesMin: 2}, "n[1-2] 4"},
		{&apiv1.ResourceRequest{Ntasks: 17}, "the step asks for 17 tasks of 1 CPUs each; the 4 nodes of the allocation have room for 16"},
		{&apiv1.ResourceRequest{NodesMin: 5}, "the step asks for 5 nodes; the allocation has 4 for it"},
		{&apiv1.ResourceRequest{NodeList: []string{"n9"}}, "the step asks for node n9, which is not in the allocation or is excluded"},
		{&apiv1.ResourceRequest{GpusPerNode: 3}, "the step asks for 3 GPUs per node; the allocation has 2 on node n1"},
	} {
		if c.request == nil {
			c.request = &apiv1.ResourceRequest{}
		}
		c.request.Overlap = level > 1
		result := r.do(alice, &logv1.CreateStep{JobId: job, Spec: &apiv1.StepSpec{Args: []string{"x"}, WorkDir: "/", Resources: c.request}})
		got := result.Refusal.GetSentence()
		if result.Refusal == nil {
			step := r.m.s.Step(job, 1, result.StepId)
			got = step.NodeList + " " + string(rune('0'+step.NumTasks))
		}
		if got != c.want {
			t.Errorf("%v: %q, want %q", c.request, got, c.want)
		}
	}
	r.check()
}
