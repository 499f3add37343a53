package fsm

import (
	"slices"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

const (
	userKind   = apiv1.PrincipalKind_PRINCIPAL_KIND_USER
	nodeKind   = apiv1.PrincipalKind_PRINCIPAL_KIND_NODE
	memberKind = apiv1.PrincipalKind_PRINCIPAL_KIND_MEMBER
)

// IsOperator reports whether a principal may change what belongs to others: a controller, user 0, or a user named in
// Settings.operator_uids.
func IsOperator(v *View, p *apiv1.Principal) bool {
	switch p.GetKind() {
	case memberKind:
		return true
	case userKind:
		return p.Uid == 0 || slices.Contains(v.Settings().GetOperatorUids(), p.Uid)
	default:
		return false
	}
}

// mayChange reports whether a principal may cancel, change, or add steps to a job.
func mayChange(v *View, p *apiv1.Principal, j *apiv1.Job) bool {
	return IsOperator(v, p) || p.GetKind() == userKind && p.Uid == j.Owner.Uid
}

// authorise refuses operations to principals that may never ask for them. Ownership of single jobs and nodes is checked where
// the operation has them in hand.
func (m *Machine) authorise(cmd *logv1.Command) *apiv1.ErrorDetail {
	p := cmd.GetPrincipal()
	if p.GetKind() == apiv1.PrincipalKind_PRINCIPAL_KIND_UNSPECIFIED {
		return refuse("UNAUTHENTICATED", "principal", "nobody stands behind this command")
	}
	allowed := false
	switch op := cmd.Op.(type) {
	case *logv1.Command_SubmitJobs:
		if p.Kind != userKind {
			return refuse("SUBMITTER_NOT_USER", "principal", "only a user can submit jobs; %s is a machine", p.Name)
		}
		allowed = true
	case *logv1.Command_CancelJobs, *logv1.Command_UpdateJobs, *logv1.Command_CreateStep, *logv1.Command_PutBlob:
		allowed = p.Kind != nodeKind
	case *logv1.Command_Place, *logv1.Command_StartAttempt, *logv1.Command_EndAttempt, *logv1.Command_StartStep,
		*logv1.Command_EndStep, *logv1.Command_LoseNode, *logv1.Command_AnnounceMember, *logv1.Command_Tick,
		*logv1.Command_ExplainJobs, *logv1.Command_Prune, *logv1.Command_Bootstrap:
		allowed = p.Kind == memberKind
	case *logv1.Command_FenceNode, *logv1.Command_UpdateNodes, *logv1.Command_Configure, *logv1.Command_RaiseLevel:
		allowed = IsOperator(&m.s.View, p)
	case *logv1.Command_ReportTasks:
		n := m.s.Node(op.ReportTasks.Node)
		allowed = p.Kind == memberKind || p.Kind == nodeKind && (n == nil || n.Spec.Name == p.Name)
	case *logv1.Command_ReportHealth:
		n := m.s.Node(op.ReportHealth.Node)
		allowed = p.Kind == memberKind || p.Kind == nodeKind && (n == nil || n.Spec.Name == p.Name)
	case *logv1.Command_JoinNode:
		allowed = p.Kind == memberKind || p.Kind == nodeKind && op.JoinNode.Spec.GetName() == p.Name
	}
	if allowed {
		return nil
	}
	if p.Kind == nodeKind {
		return refuse("PERMISSION_DENIED", "node "+p.Name, "node %s may not do this (%s)", p.Name, operation(cmd))
	}
	return refuse("PERMISSION_DENIED", "user "+p.Name, "user %s may not do this (%s); ask an operator", p.Name, operation(cmd))
}
