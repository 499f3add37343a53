package fsm

import (
	"errors"

	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

// dispatch applies a command that passed the gates. An error stops the replica.
func (m *Machine) dispatch(cmd *logv1.Command) (*logv1.Result, error) {
	switch op := cmd.Op.(type) {
	case *logv1.Command_SubmitJobs:
		return m.submitJobs(op.SubmitJobs), nil
	case *logv1.Command_CancelJobs:
		return m.cancelJobs(op.CancelJobs), nil
	case *logv1.Command_UpdateJobs:
		return m.updateJobs(op.UpdateJobs.GetRequest()), nil
	case *logv1.Command_Place:
		return m.place(op.Place), nil
	case *logv1.Command_StartAttempt:
		return m.startAttempt(op.StartAttempt), nil
	case *logv1.Command_EndAttempt:
		return m.endAttempt(op.EndAttempt), nil
	case *logv1.Command_CreateStep:
		return m.createStep(op.CreateStep), nil
	case *logv1.Command_StartStep:
		return m.startStep(op.StartStep), nil
	case *logv1.Command_EndStep:
		return m.endStep(op.EndStep), nil
	case *logv1.Command_ReportTasks:
		return m.reportTasks(op.ReportTasks), nil
	case *logv1.Command_JoinNode:
		return m.joinNode(op.JoinNode), nil
	case *logv1.Command_LoseNode:
		return m.loseNode(op.LoseNode), nil
	case *logv1.Command_FenceNode:
		return m.fenceNode(op.FenceNode), nil
	case *logv1.Command_UpdateNodes:
		return m.updateNodes(op.UpdateNodes.GetRequest()), nil
	case *logv1.Command_Configure:
		return m.configure(op.Configure), nil
	case *logv1.Command_PutBlob:
		return m.putBlob(op.PutBlob.GetPiece()), nil
	case *logv1.Command_AnnounceMember:
		return m.announceMember(op.AnnounceMember), nil
	case *logv1.Command_RaiseLevel:
		return m.raiseLevel(op.RaiseLevel)
	case *logv1.Command_Tick:
		return m.tick(), nil
	case *logv1.Command_ExplainJobs:
		return m.explainJobs(op.ExplainJobs), nil
	case *logv1.Command_Prune:
		return m.prune(op.Prune), nil
	case *logv1.Command_Bootstrap:
		return m.bootstrap(op.Bootstrap), nil
	case *logv1.Command_ReportHealth:
		return m.reportHealth(op.ReportHealth), nil
	default:
		return nil, errors.New("it holds an operation that this program does not apply")
	}
}
