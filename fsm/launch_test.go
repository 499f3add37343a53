package fsm

import (
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

func TestLaunchOptionsAreCheckedWithASentence(t *testing.T) {
	r := newRig(t)
	r.boot()
	spec := nodeSpec("n1", 8, 4)
	spec.Gres = []*apiv1.Gres{{Name: "ib", Type: "hdr", Count: 1}, {Name: "ib", Type: "ndr", Count: 1}}
	spec.Gpus[3].Type = "2g.24gb"
	r.must(agentOf("n1"), &logv1.JoinNode{Spec: spec, Instance: instance("boot-n1", "1")})
	relative := uint32(0)
	gres := func(all ...*apiv1.GresRequest) func(*apiv1.JobSpec) {
		return func(s *apiv1.JobSpec) { s.Resources.Gres = all }
	}
	options := func(o *apiv1.TaskOptions) func(*apiv1.JobSpec) { return func(s *apiv1.JobSpec) { s.TaskOptions = o } }
	for i, c := range []struct {
		change func(*apiv1.JobSpec)
		want   string // part of the sentence; "" if it is accepted
	}{
		{gres(&apiv1.GresRequest{Name: "ib", Count: 2}), ""},
		{gres(&apiv1.GresRequest{Name: "ib", Count: 3}), "asks for 3 ib per node; the largest node in partition main has 2"},
		{gres(&apiv1.GresRequest{Name: "ib", Type: "ndr", Count: 2}), "asks for 2 ib of type ndr per node; the largest node in partition main has 1"},
		{gres(&apiv1.GresRequest{Name: "tape", Count: 1}), "asks for 1 tape per node; the largest node in partition main has 0"},
		{gres(&apiv1.GresRequest{Name: "gpu", Type: "h100", Count: 3}, &apiv1.GresRequest{Name: "gpu", Type: "2g.24gb", Count: 1}), ""},
		{gres(&apiv1.GresRequest{Name: "gpu", Type: "h100", Count: 4}), "asks for 4 GPUs of type h100 per node; the largest node in partition main has 3"},
		{gres(&apiv1.GresRequest{Name: "gpu", Count: 1}, &apiv1.GresRequest{Name: "gpu", Type: "h100", Count: 1}), "with a type and without one"},
		{gres(&apiv1.GresRequest{Name: "ib", Count: 1}, &apiv1.GresRequest{Name: "ib", Count: 1}), "asks for ib twice"},
		{gres(&apiv1.GresRequest{Name: "a b", Count: 1}), "letters, digits"},
		{func(s *apiv1.JobSpec) {
			s.Resources.GpusPerNode = 1
			s.Resources.Gres = []*apiv1.GresRequest{{Name: "gpu", Count: 1}}
		}, "in another way"},
		{func(s *apiv1.JobSpec) { s.Resources.NtasksPerGpu = 2 }, "2 tasks per GPU without a number of tasks or of GPUs"},
		{func(s *apiv1.JobSpec) { s.Resources.NtasksPerGpu, s.Resources.GpusTotal = 2, 4 }, ""},
		{func(s *apiv1.JobSpec) { s.Resources.NtasksPerGpu, s.Resources.GpusTotal = 3, 4 }, "asks for 12 tasks"},
		{func(s *apiv1.JobSpec) {
			s.Resources.NtasksPerGpu, s.Resources.GpusPerTask, s.Resources.Ntasks = 1, 1, 1
		}, "excludes the other"},
		{func(s *apiv1.JobSpec) { s.Resources.CpusPerGpu, s.Resources.GpusPerNode = 2, 4 }, ""},
		{func(s *apiv1.JobSpec) { s.Resources.CpusPerGpu, s.Resources.GpusPerNode = 3, 4 }, "asks for 12 CPUs per task; the largest node in partition main has 8"},
		{func(s *apiv1.JobSpec) {
			s.Resources.CpusPerGpu, s.Resources.CpusPerTask, s.Resources.GpusPerNode = 1, 1, 1
		}, "excludes the other"},
		{func(s *apiv1.JobSpec) { s.Resources.Overcommit, s.Resources.Ntasks = true, 100 }, ""},
		{func(s *apiv1.JobSpec) { s.Resources.Ntasks = 100 }, "has room for 8"},
		{func(s *apiv1.JobSpec) { s.Resources.Relative = &relative }, "only a step"},
		{func(s *apiv1.JobSpec) { s.Resources.TaskNodes = []string{"n1"} }, "only a step"},
		{func(s *apiv1.JobSpec) { s.NoKill, s.AutomaticRecovery = true, true }, "choose one"},
		{func(s *apiv1.JobSpec) { s.WarnSignal = &apiv1.WarnSignal{Signal: 10, LeadS: 60} }, ""},
		{func(s *apiv1.JobSpec) { s.WarnSignal = &apiv1.WarnSignal{LeadS: 60} }, "there is no signal 0"},
		{func(s *apiv1.JobSpec) { s.WarnSignal = &apiv1.WarnSignal{Signal: 10, LeadS: 65_536} }, "at most 65535 s before"},
		{options(&apiv1.TaskOptions{Distribution: "cyclic:block", Mpi: "pmi2", CpuBind: "verbose,cores", GpuBind: "single:2", Nice: 5}), ""},
		{options(&apiv1.TaskOptions{CpuBind: "map_cpu:0,1,2", GpuBind: "verbose,mask_gpu:0x1,0x2", TaskProlog: "/p"}), ""},
		{options(&apiv1.TaskOptions{Distribution: "plane"}), "is not a distribution"},
		{options(&apiv1.TaskOptions{Mpi: "pmix"}), `no process management interface "pmix"`},
		{options(&apiv1.TaskOptions{CpuBind: "boards"}), "binds to no CPUs"},
		{options(&apiv1.TaskOptions{CpuBind: "map_cpu:"}), "binds to no CPUs"},
		{options(&apiv1.TaskOptions{CpuBind: "verbosecores"}), "binds to no CPUs"},
		{options(&apiv1.TaskOptions{GpuBind: "single:0"}), "binds to no GPUs"},
		{options(&apiv1.TaskOptions{Nice: 40}), "-39 to 39 can"},
		{options(&apiv1.TaskOptions{Nice: -1}), "only an operator"},
		{options(&apiv1.TaskOptions{TaskEpilog: "p"}), "not an absolute path"},
		{options(&apiv1.TaskOptions{Rlimits: []*apiv1.ResourceLimit{{Name: "NOFILE", Soft: 1}}}), ""},
		{options(&apiv1.TaskOptions{Rlimits: []*apiv1.ResourceLimit{{Name: "FILES", Soft: 1}}}), `"FILES" is not a limit`},
		{options(&apiv1.TaskOptions{PtyRows: 70_000}), "a terminal has at most"},
	} {
		s := batchSpec()
		s.Resources = &apiv1.ResourceRequest{}
		c.change(s)
		refusal, _ := ValidateSpec(&r.m.s.View, s, alice)
		if c.want == "" && refusal != nil || c.want != "" && !strings.Contains(refusal.GetSentence(), c.want) {
			t.Errorf("case %d, %s:\n got %q\nwant %q", i, text(s), refusal.GetSentence(), c.want)
		}
	}
}

func TestProgramsCoverEveryRankOnce(t *testing.T) {
	r := twoNodes(t)
	for ranks, want := range map[string]string{
		"0-3": "", "0,1,2-3": "", "0-2": "rank 3 has no program", "1-3": "rank 0 has no program", "0-4": "there is a program for rank 4",
		"0-3,2": "rank 2 has two programs", "0-x": "not a list of ranks", "": "not a list of ranks", "3-0": "not a list of ranks",
	} {
		spec := runSpec()
		spec.Resources = &apiv1.ResourceRequest{Ntasks: 4}
		spec.TaskOptions = &apiv1.TaskOptions{Programs: []*apiv1.RankProgram{{Ranks: ranks, Args: []string{"x"}}}}
		if refusal, _ := ValidateSpec(&r.m.s.View, spec, alice); !strings.Contains(refusal.GetSentence(), want) || want == "" && refusal != nil {
			t.Errorf("%q: %v", ranks, refusal)
		}
	}
	open := runSpec()
	open.Resources = &apiv1.ResourceRequest{NodesMin: 1, NodesMax: 2}
	open.TaskOptions = &apiv1.TaskOptions{Programs: []*apiv1.RankProgram{{Ranks: "0", Args: []string{"x"}}}}
	if refusal, _ := ValidateSpec(&r.m.s.View, open, alice); refusal.GetReason() != "PROGRAMS_INVALID" {
		t.Errorf("an open number of tasks: %v", refusal)
	}
	spec := runSpec()
	spec.Resources = &apiv1.ResourceRequest{Ntasks: 2}
	spec.TaskOptions = &apiv1.TaskOptions{Programs: []*apiv1.RankProgram{{Ranks: "0-1", Args: []string{"x"}}}}
	job := r.submit(alice, spec)
	place := &logv1.Place{JobId: job, Attempt: 1, PlacementNumber: 1, Placement: r.placement(1, 0, 1), Partition: "main"}
	if got := r.do(member, place).GetRefusal().GetSentence(); !strings.Contains(got, "there is a program for rank 1") {
		t.Errorf("placed with one task: %q", got)
	}
}

// What is on a device that its node does not list any more still belongs to its attempt, and is free when that is accounted for.
func TestVanishedDevicesKeepTheirOwner(t *testing.T) {
	r := newRig(t)
	r.boot()
	full := nodeSpec("n1", 8, 4)
	full.Gres = []*apiv1.Gres{{Name: "ib", Count: 2}}
	join := func(spec *apiv1.NodeSpec) {
		r.must(agentOf("n1"), &logv1.JoinNode{Spec: proto.Clone(spec).(*apiv1.NodeSpec), Instance: instance("boot", "1")})
	}
	join(full)
	job := r.submit(alice, batchSpec())
	p := r.placement(3, 0xf, 1)
	p.Groups[0].Gres = []*apiv1.GresShare{{Name: "ib", Mask: []uint64{3}}}
	fence := r.start(job, p)
	join(nodeSpec("n1", 4, 1))
	n := r.check().Node(1)
	if !slices.Equal(n.GpusAllocatedMask, []uint64{0xf}) || len(n.GresAllocated) != 1 {
		t.Fatalf("node is %s", text(n))
	}
	other := r.submit(alice, batchSpec())
	if got := r.do(member, &logv1.Place{JobId: other, Attempt: 1, PlacementNumber: 1, Placement: r.placement(4, 2, 1), Partition: "main"}).GetRefusal().GetReason(); got != "PLACEMENT_INVALID" {
		t.Errorf("a vanished GPU was placed: %q", got)
	}
	// A step asks for what is left: the vanished devices are not given to it.
	step := &apiv1.StepSpec{Args: []string{"x"}, WorkDir: "/", Resources: &apiv1.ResourceRequest{Gres: []*apiv1.GresRequest{{Name: "gpu", Count: 2}}}}
	if got := r.do(alice, &logv1.CreateStep{JobId: job, Spec: step}).GetRefusal(); got.GetReason() != "STEP_IMPOSSIBLE" {
		t.Errorf("a step got vanished GPUs: %v", got)
	}
	join(full)
	r.must(member, &logv1.EndAttempt{JobId: job, Fence: fence, Failure: classHardware})
	r.report(1, job, fence, &logv1.AttemptReaped{})
	if n := r.check().Node(1); n.GpusAllocatedMask != nil || n.GresAllocated != nil || len(n.Owners) != 0 {
		t.Errorf("node is %s", text(n))
	}
}

// At level 1 steps shared everything. They go on so when the level rises; new ones have devices of their own.
func TestStepsOfLevelOneShareToTheirEnd(t *testing.T) {
	r := newRig(t)
	r.bootAt(1)
	r.join("n1", 4, 2)
	job := r.submit(alice, batchSpec())
	r.start(job, r.placement(0xf, 3, 1))
	spec := func(exact bool) *logv1.CreateStep {
		return &logv1.CreateStep{JobId: job, Spec: &apiv1.StepSpec{Args: []string{"x"}, WorkDir: "/", Resources: &apiv1.ResourceRequest{Ntasks: 1, Exact: exact}}}
	}
	r.must(alice, spec(false))
	r.must(alice, spec(false))
	r.must(member, &logv1.AnnounceMember{Member: &apiv1.Member{Id: "m", Name: "c1", SupportedLevel: MaxLevel}})
	r.must(member, &logv1.RaiseLevel{Level: 2})
	third := r.must(alice, spec(false)).StepId
	if s := r.check().Step(job, 1, third); !slices.Equal(s.Placement.Groups[0].CpuMask, []uint64{0xf}) {
		t.Errorf("the first step of level 2 has %s", text(s))
	}
	if got := r.do(alice, spec(true)).GetRefusal(); got.GetReason() != "STEP_BUSY" || !strings.Contains(got.Sentence, "step 1.2 has 4 CPUs") {
		t.Errorf("beside it: %v", got)
	}
}

// Conditions of the same node in one report are judged together, whatever their order; more than fit are refused.
func TestConditionsAreBoundedAndOrdered(t *testing.T) {
	r := twoNodes(t)
	n := r.m.s.Node(1)
	report := func(conditions ...*apiv1.Condition) *logv1.Result {
		return r.do(agentOf("n1"), &logv1.ReportHealth{Node: 1, Epoch: n.Epoch, Instance: n.Instance, Conditions: conditions})
	}
	condition := func(code string) *apiv1.Condition {
		return &apiv1.Condition{Owner: "gpu", Code: code, Severity: conditionFailed, GpuMask: []uint64{1}}
	}
	var many []*apiv1.Condition
	for range maxConditions + 1 {
		many = append(many, condition("X"))
	}
	if got := report(many...).GetRefusal().GetReason(); got != "HEALTH_INVALID" {
		t.Errorf("too many: %q", got)
	}
	if got := report(condition("A"), condition("A")).GetRefusal().GetReason(); got != "HEALTH_INVALID" {
		t.Errorf("twice: %q", got)
	}
	report(condition("B"), condition("A"))
	before := r.check().Node(1)
	if len(before.Conditions) != 2 || before.Conditions[0].Code != "A" {
		t.Fatalf("node is %s", text(before))
	}
	report(condition("A"), condition("B"))
	if r.check().Node(1) != before {
		t.Error("the same conditions in another order made a new record")
	}
	past := condition("C")
	past.Expires = &timestamppb.Timestamp{Seconds: r.ms/1000 - 1}
	waived := condition("D")
	waived.Waived = true
	report(past, waived)
	if got := r.check().Node(1); len(got.Conditions) != 1 || got.Conditions[0].Waived {
		t.Errorf("node is %s", text(got))
	}
}
