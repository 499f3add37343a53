package level

import (
	"testing"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

// A field is found however deep it is, also in a message that contains itself.
func TestFieldsAreFoundAtAnyDepth(t *testing.T) {
	step := func(spec *apiv1.StepSpec) *logv1.Command {
		return &logv1.Command{Op: &logv1.Command_CreateStep{CreateStep: &logv1.CreateStep{Spec: spec}}}
	}
	relative := uint32(0)
	for i, c := range []struct {
		cmd  *logv1.Command
		want uint32
	}{
		{&logv1.Command{}, 0},
		{step(&apiv1.StepSpec{Args: []string{"x"}, Resources: &apiv1.ResourceRequest{Ntasks: 4}}), 1},
		{step(&apiv1.StepSpec{Resources: &apiv1.ResourceRequest{Relative: &relative}}), 2},
		{step(&apiv1.StepSpec{Parts: []*apiv1.StepSpec{{}}}), 2},
		{&logv1.Command{Op: &logv1.Command_SubmitJobs{SubmitJobs: &logv1.SubmitJobs{Specs: []*apiv1.JobSpec{{}, {TaskOptions: &apiv1.TaskOptions{Pty: true}}}}}}, 2},
		{&logv1.Command{Op: &logv1.Command_JoinNode{JoinNode: &logv1.JoinNode{Spec: &apiv1.NodeSpec{Gpus: []*apiv1.Gpu{{Type: "a"}, {Numa: -1}}}}}}, 2},
		{&logv1.Command{Op: &logv1.Command_JoinNode{JoinNode: &logv1.JoinNode{Spec: &apiv1.NodeSpec{Gpus: []*apiv1.Gpu{{Type: "a"}}}}}}, 1},
		{&logv1.Command{Op: &logv1.Command_ReportHealth{ReportHealth: &logv1.ReportHealth{}}}, 2},
	} {
		if got := Current().Of(c.cmd); got != c.want {
			t.Errorf("case %d needs level %d, want %d", i, got, c.want)
		}
	}
}
