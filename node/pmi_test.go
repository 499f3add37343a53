package node

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
)

func mpiOrder(node uint32, counts []uint32, ranks ...uint32) *nodev1.DesiredAttempt {
	size := uint32(0)
	for _, n := range counts {
		size += n
	}
	return &nodev1.DesiredAttempt{
		Job: &apiv1.Job{Id: 7}, Fence: &apiv1.Fence{Incarnation: 1, Attempt: 2, Placement: 3}, NumTasks: 8,
		Steps: []*nodev1.DesiredStep{{
			Step:  &apiv1.Step{JobId: 7, Id: 4, NodeList: "n[1-2]", NumTasks: size, Spec: &apiv1.StepSpec{}},
			Ranks: ranks, NodeIndex: node, TasksPerNode: counts,
		}},
	}
}

func TestNodesOfAStepAgreeOnAKeyThatIsNoOtherSteps(t *testing.T) {
	a := &Agent{cfg: Config{Spec: &apiv1.NodeSpec{TaskAddress: "10.0.0.7"}}}
	src := source{options: &apiv1.TaskOptions{Mpi: "pmi2"}}
	secret := []string{"A=b", secretVariable + "=0123456789abcdef"}
	plan := func(order *nodev1.DesiredAttempt, user []string) *supervisorv1.ProcessManager {
		t.Helper()
		p := new(supervisorv1.StepPlan)
		if err := a.manage(p, src, order, user); err != nil {
			t.Fatal(err)
		}
		return p.GetProcessManager()
	}
	first, second := plan(mpiOrder(0, []uint32{2, 2}, 0, 1), secret), plan(mpiOrder(1, []uint32{2, 2}, 2, 3), secret)
	if len(first.GetKey()) < 32 || !bytes.Equal(first.GetKey(), second.GetKey()) {
		t.Errorf("the keys of two nodes are %x and %x", first.GetKey(), second.GetKey())
	}
	if first.GetSize() != 4 || first.GetUniverseSize() != 8 || first.GetNodes() != 2 || second.GetNode() != 1 || first.GetListen() != "10.0.0.7" ||
		first.GetMapping() != "(vector,(0,2,2))" || first.GetMapping() != second.GetMapping() {
		t.Errorf("%v, %v", first, second)
	}
	for what, change := range map[string]func(*nodev1.DesiredAttempt){
		"job":         func(o *nodev1.DesiredAttempt) { o.Job.Id++ },
		"attempt":     func(o *nodev1.DesiredAttempt) { o.Fence.Attempt++ },
		"placement":   func(o *nodev1.DesiredAttempt) { o.Fence.Placement++ },
		"incarnation": func(o *nodev1.DesiredAttempt) { o.Fence.Incarnation++ },
		"step":        func(o *nodev1.DesiredAttempt) { o.Steps[0].Step.Id++ },
	} {
		order := mpiOrder(0, []uint32{2, 2}, 0, 1)
		change(order)
		if bytes.Equal(plan(order, secret).GetKey(), first.GetKey()) {
			t.Errorf("another %s has the same key", what)
		}
	}
	if alone := plan(mpiOrder(0, []uint32{2}, 0, 1), nil); len(alone.GetKey()) != 0 || alone.GetNodes() != 1 {
		t.Errorf("a step of one node: %v", alone)
	}
}

func TestMPIStepsThatCannotBeAreRefusedWithASentence(t *testing.T) {
	a := &Agent{cfg: Config{Spec: &apiv1.NodeSpec{TaskAddress: "n1"}}}
	for _, c := range []struct {
		kind string
		user []string
		want string
	}{
		{"pmix", []string{secretVariable + "=0123456789abcdef"}, `"pmix"; there is pmi2`},
		{"pmi2", nil, "need MUSTER_PMI_SECRET"},
		{"pmi2", []string{secretVariable + "=short"}, "need MUSTER_PMI_SECRET"},
	} {
		err := a.manage(new(supervisorv1.StepPlan), source{options: &apiv1.TaskOptions{Mpi: c.kind}}, mpiOrder(0, []uint32{1, 1}, 0), c.user)
		var refusal *prepareError
		if !errors.As(err, &refusal) || !refusal.usersFault || !strings.Contains(refusal.sentence, c.want) {
			t.Errorf("%s with %q: %v", c.kind, c.user, err)
		}
	}
	for _, src := range []source{{}, {options: &apiv1.TaskOptions{Mpi: "none"}}, {batch: true, options: &apiv1.TaskOptions{Mpi: "pmi2"}}} {
		plan := new(supervisorv1.StepPlan)
		if err := a.manage(plan, src, mpiOrder(0, []uint32{1, 1}, 0), nil); err != nil || plan.GetProcessManager() != nil {
			t.Errorf("%+v: %v, %v", src, err, plan.GetProcessManager())
		}
	}
}

func TestWhereRanksAreIsSaidOnlyIfItIsKnown(t *testing.T) {
	for _, c := range []struct {
		distribution string
		counts       []uint32
		node         uint32
		ranks        []uint32
		want         string
	}{
		{"", []uint32{2, 1}, 1, []uint32{2}, "(vector,(0,1,2),(1,1,1))"},
		{"block:cyclic", []uint32{2, 2}, 0, []uint32{0, 1}, "(vector,(0,2,2))"},
		{"cyclic", []uint32{2, 1}, 0, []uint32{0, 2}, "(vector,(0,2,1),(0,1,1))"},
		{"cyclic", []uint32{2, 1}, 1, []uint32{1}, "(vector,(0,2,1),(0,1,1))"},
		{"block", []uint32{2, 2}, 0, []uint32{0, 2}, ""}, // the controllers see it otherwise
		{"block", []uint32{2, 2}, 0, []uint32{9}, ""},
		{"plane=2", []uint32{2, 2}, 0, []uint32{0, 1}, ""},
		{"arbitrary", []uint32{2, 2}, 0, []uint32{0, 1}, ""},
	} {
		step := mpiOrder(c.node, c.counts, c.ranks...).GetSteps()[0]
		if got := mapping(source{options: &apiv1.TaskOptions{Distribution: c.distribution}}, step); got != c.want {
			t.Errorf("%s of %v, ranks %v: %q, want %q", c.distribution, c.counts, c.ranks, got, c.want)
		}
	}
	step := mpiOrder(0, []uint32{1, 1}, 0).GetSteps()[0]
	if step.MasterAddress, step.PmiPort = "fd00::1", 4000; managerAddress(step) != "[fd00::1]:4000" {
		t.Error(managerAddress(step))
	}
	if step.PmiPort = 0; managerAddress(step) != "" {
		t.Error(managerAddress(step))
	}
}
