package server

import (
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/muster-hpc/muster/fsm"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

// An agent that is newer than the cluster's level is heard all the same: in the words of that level.
func TestReportsOfNewAgentsFitTheClustersLevel(t *testing.T) {
	reports := []*logv1.TaskReport{
		{JobId: 1, JournalId: 5, Event: &logv1.TaskReport_AttemptReaped{AttemptReaped: &logv1.AttemptReaped{}}},
		{JobId: 1, JournalId: 6, Event: &logv1.TaskReport_StepEnded{StepEnded: &logv1.StepEnded{
			StepId: 3, Exits: []*apiv1.TaskExit{{Count: 1, Code: 4}}, ElapsedMs: 7, ExecTime: timestamppb.Now(), Usage: &apiv1.StepUsage{Tasks: 1}}}},
	}
	before := proto.CloneOf(reports[1])
	level := func(reports []*logv1.TaskReport) uint32 {
		return fsm.LevelOf(&logv1.Command{Op: &logv1.Command_ReportTasks{ReportTasks: &logv1.ReportTasks{Node: 1, Reports: reports}}})
	}
	if got := level(reports); got != 2 {
		t.Fatalf("the reports need level %d: this test tests nothing", got)
	}
	old := atLevel(1, reports)
	if got := level(old); got != 1 {
		t.Errorf("at level 1 they need level %d", got)
	}
	if e := old[1].GetStepEnded(); e.GetExits()[0].GetCode() != 4 || e.GetStepId() != 3 || old[1].GetJournalId() != 6 || len(old) != 2 {
		t.Errorf("of the end is left %v", old[1])
	}
	if !proto.Equal(reports[1], before) || atLevel(2, reports)[1] != reports[1] {
		t.Error("the agent's own reports were changed")
	}
}
