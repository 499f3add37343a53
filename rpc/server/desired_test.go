package server

import (
	"fmt"
	"iter"
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
)

// fakeView is a state written by hand.
type fakeView struct {
	job      *apiv1.Job
	attempts []*apiv1.Attempt
	steps    []*apiv1.Step
	settings *apiv1.Settings
}

func (v *fakeView) Job(id uint32) *apiv1.Job {
	if v.job.GetId() == id {
		return v.job
	}
	return nil
}

func (v *fakeView) Node(n uint32) *apiv1.Node {
	return &apiv1.Node{Number: n, Spec: &apiv1.NodeSpec{Name: fmt.Sprintf("n%d", n), TaskAddress: fmt.Sprintf("10.0.0.%d", n)}}
}

func (v *fakeView) Attempt(_, n uint32) *apiv1.Attempt {
	for _, a := range v.attempts {
		if a.Number == n {
			return a
		}
	}
	return nil
}

func (v *fakeView) NodeAttempts(number uint32) iter.Seq[*apiv1.Attempt] {
	return func(yield func(*apiv1.Attempt) bool) {
		for _, a := range v.attempts {
			here := slices.Contains(a.Unaccounted, number) ||
				slices.ContainsFunc(a.Leftovers, func(l *apiv1.Leftover) bool { return l.Node == number })
			if here && !yield(a) {
				return
			}
		}
	}
}

func (v *fakeView) AttemptSteps(job, attempt uint32) iter.Seq[*apiv1.Step] {
	return func(yield func(*apiv1.Step) bool) {
		for _, s := range v.steps {
			if s.JobId == job && s.Attempt == attempt && !yield(s) {
				return
			}
		}
	}
}

func (v *fakeView) Settings() *apiv1.Settings { return v.settings }

const (
	prepared = nodev1.WorkState_WORK_STATE_PREPARED
	running  = nodev1.WorkState_WORK_STATE_RUNNING
	ended    = nodev1.WorkState_WORK_STATE_ENDED
)

// gang is job 7 in its second attempt on n1, n2 (2 tasks, 4 CPUs each) and n3 (1 task, 2 CPUs, 2 GPUs).
func gang() *fakeView {
	placement := &apiv1.Placement{Groups: []*apiv1.NodeGroup{
		{Nodes: []uint32{1, 2}, CpuMask: []uint64{0xf}, MemoryMb: 100, Tasks: 2},
		{Nodes: []uint32{3}, CpuMask: []uint64{0x3}, GpuMask: []uint64{0x3}, MemoryMb: 200, Tasks: 1},
	}}
	return &fakeView{
		settings: &apiv1.Settings{KillGraceS: 30},
		job:      &apiv1.Job{Id: 7, Spec: &apiv1.JobSpec{AutomaticRecovery: true}},
		attempts: []*apiv1.Attempt{
			{JobId: 7, Number: 1, State: apiv1.AttemptState_ATTEMPT_STATE_ENDED, EndSentence: "node n9 failed"},
			{JobId: 7, Number: 2, State: apiv1.AttemptState_ATTEMPT_STATE_RUNNING, Fence: &apiv1.Fence{Incarnation: 1, Attempt: 2, Placement: 3},
				Placement: placement, Unaccounted: []uint32{1, 2, 3}, TimeLimitS: 600},
		},
		steps: []*apiv1.Step{{JobId: 7, Id: 0, Attempt: 2, State: apiv1.StepState_STEP_STATE_RUNNING, Placement: placement,
			Unreported: []uint32{1, 2, 3}, Spec: &apiv1.StepSpec{}, NumTasks: 5,
			Prepared: []*apiv1.PreparedNode{{Node: 2, Address: "b", Port: 2}, {Node: 1, Address: "a", Port: 4711}}}},
	}
}

func TestDesiredOfAGang(t *testing.T) {
	got := desired(gang(), 3, nil)
	if len(got) != 1 || len(got[0].Steps) != 1 {
		t.Fatalf("got %v", got)
	}
	step := got[0].Steps[0]
	got[0].Steps = nil
	want := &nodev1.DesiredAttempt{Job: gang().job, Fence: &apiv1.Fence{Incarnation: 1, Attempt: 2, Placement: 3}, Want: running,
		NodeList: "n[1-3]", NodeIndex: 2, CpuMask: []uint64{3}, GpuMask: []uint64{3}, MemoryMb: 200, CpusPerNode: "4(x2),2",
		TasksPerNode: "2(x2),1", NumTasks: 5, StopsItself: true, TimeLimitS: 600, KillGraceS: 30, RestartReason: "node n9 failed"}
	if !proto.Equal(got[0], want) {
		t.Errorf("attempt\n got %v\nwant %v", got[0], want)
	}
	wantStep := &nodev1.DesiredStep{Step: &apiv1.Step{JobId: 7, Attempt: 2, State: apiv1.StepState_STEP_STATE_RUNNING, Spec: &apiv1.StepSpec{},
		NumTasks: 5, Unreported: []uint32{3}, Placement: &apiv1.Placement{Groups: []*apiv1.NodeGroup{
			{Nodes: []uint32{3}, CpuMask: []uint64{3}, GpuMask: []uint64{3}, MemoryMb: 200, Tasks: 1}}}}, Want: running, NodeIndex: 2, Ranks: []uint32{4}, TasksPerNode: []uint32{2, 2, 1},
		MasterAddress: "a", MasterPort: 4711}
	if !proto.Equal(step, wantStep) {
		t.Errorf("step\n got %v\nwant %v", step, wantStep)
	}
}

func TestDesiredByState(t *testing.T) {
	for name, c := range map[string]struct {
		change  func(*fakeView)
		attempt nodev1.WorkState
		step    nodev1.WorkState // unspecified: not listed
	}{
		"running": {func(*fakeView) {}, running, running},
		"preparing": {func(v *fakeView) {
			v.attempts[1].State, v.steps[0].State = apiv1.AttemptState_ATTEMPT_STATE_PREPARING, apiv1.StepState_STEP_STATE_PREPARING
		}, prepared, prepared},
		"a new step prepares":         {func(v *fakeView) { v.steps[0].State = apiv1.StepState_STEP_STATE_PREPARING }, running, prepared},
		"attempt ending":              {func(v *fakeView) { v.attempts[1].State = apiv1.AttemptState_ATTEMPT_STATE_ENDING }, ended, 0},
		"step ending":                 {func(v *fakeView) { v.steps[0].Ending = true }, running, ended},
		"step ending, reported here":  {func(v *fakeView) { v.steps[0].Ending, v.steps[0].Unreported = true, []uint32{1} }, running, 0},
		"step running, reported here": {func(v *fakeView) { v.steps[0].Unreported = []uint32{1} }, running, 0},
		"step over":                   {func(v *fakeView) { v.steps[0].State, v.steps[0].Unreported = apiv1.StepState_STEP_STATE_COMPLETED, nil }, running, 0},
		"step elsewhere": {func(v *fakeView) {
			v.steps[0].Placement = &apiv1.Placement{Groups: []*apiv1.NodeGroup{{Nodes: []uint32{1}, Tasks: 1}}}
		}, running, 0},
	} {
		v := gang()
		c.change(v)
		got := desired(v, 3, nil)
		if len(got) != 1 || got[0].Want != c.attempt {
			t.Errorf("%s: %v", name, got)
			continue
		}
		var step nodev1.WorkState
		if len(got[0].Steps) > 0 {
			step = got[0].Steps[0].Want
		}
		if step != c.step {
			t.Errorf("%s: step is to be %s, should be %s", name, step, c.step)
		}
	}
}

func TestDesiredOfANodeThatWasReplaced(t *testing.T) {
	v := gang()
	v.attempts[1].Leftovers = []*apiv1.Leftover{{Node: 9, Placement: 2, CpuMask: []uint64{1}, MemoryMb: 5}}
	got := desired(v, 9, nil)
	if len(got) != 1 || got[0].Want != ended || got[0].Fence.Placement != 2 || got[0].Fence.Attempt != 2 || got[0].EndSentence == "" || len(got[0].Steps) != 0 {
		t.Errorf("got %v", got)
	}
	if v.attempts[1].Fence.Placement != 3 {
		t.Error("the state's own record was changed")
	}
}

func TestDesiredOfANodeThatHasReportedIsEmpty(t *testing.T) {
	v := gang()
	v.attempts[1].Unaccounted = []uint32{1, 2}
	if got := desired(v, 3, nil); len(got) != 0 {
		t.Errorf("got %v", got)
	}
}

func TestSettingsAndSpecificationDecideGraceAndRendezvous(t *testing.T) {
	v := gang()
	v.job.Spec.KillGraceS = 5
	v.settings.NoRendezvousEnvironment = true
	if got := desired(v, 1, nil)[0]; got.KillGraceS != 5 || !got.NoRendezvousEnvironment {
		t.Errorf("got %v", got)
	}
	v = gang()
	v.job.Spec.TaskOptions = &apiv1.TaskOptions{NoRendezvousEnvironment: true}
	if !desired(v, 1, nil)[0].NoRendezvousEnvironment {
		t.Error("the job's own switch is ignored")
	}
}
