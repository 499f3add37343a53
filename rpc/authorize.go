package rpc

import (
	"fmt"
	"slices"

	"connectrpc.com/connect/v2"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/muster/api/v1/apiv1connect"
	"github.com/muster-hpc/muster/proto/muster/node/v1/nodev1connect"
	"github.com/muster-hpc/muster/proto/muster/peer/v1/peerv1connect"
)

// Rule is one row of the authorisation table: who may make a call at all. What a caller may do with one job or blob is
// checked where the job or blob is known: by Apply, or by the handler named in Finer.
type Rule struct {
	// Kinds may call.
	Kinds []apiv1.PrincipalKind
	// Operator: users must be operators.
	Operator bool
	// Local: answered on the agent's local socket only, where the kernel says who calls; never over the network.
	Local bool
	// Public: answered to anybody, known or not.
	Public bool
	// Finer says which further check follows, if one does.
	Finer string
}

const (
	user   = apiv1.PrincipalKind_PRINCIPAL_KIND_USER
	node   = apiv1.PrincipalKind_PRINCIPAL_KIND_NODE
	member = apiv1.PrincipalKind_PRINCIPAL_KIND_MEMBER
)

var (
	users     = Rule{Kinds: []apiv1.PrincipalKind{user}}
	anybody   = Rule{Kinds: []apiv1.PrincipalKind{user, node, member}}
	operators = Rule{Kinds: []apiv1.PrincipalKind{user}, Operator: true}
	nodes     = Rule{Kinds: []apiv1.PrincipalKind{node}, Finer: "the node must be that of the certificate"}
	members   = Rule{Kinds: []apiv1.PrincipalKind{member}}
)

// HealthCheckProcedure is gRPC's own health check, which probes call without credentials.
const HealthCheckProcedure = "/grpc.health.v1.Health/Check"

// table has a row for every procedure of every service. A call without a row is refused.
var table = map[string]Rule{
	apiv1connect.JobServiceSubmitJobsProcedure: {Kinds: users.Kinds, Finer: "an explicit priority needs an operator: Apply"},
	apiv1connect.JobServiceCancelJobsProcedure: {Kinds: users.Kinds, Finer: "owner or operator of each job: Apply"},
	apiv1connect.JobServiceUpdateJobProcedure:  {Kinds: users.Kinds, Finer: "owner or operator of each job: Apply"},
	apiv1connect.JobServiceGetJobProcedure:     anybody,
	apiv1connect.JobServiceListJobsProcedure:   anybody,
	apiv1connect.JobServiceWatchJobsProcedure:  anybody,
	apiv1connect.JobServiceCreateStepProcedure: {Kinds: users.Kinds, Finer: "owner of the job: Apply"},
	apiv1connect.JobServiceGetStepProcedure:    anybody,

	apiv1connect.ClusterServiceListNodesProcedure:    anybody,
	apiv1connect.ClusterServiceUpdateNodesProcedure:  operators,
	apiv1connect.ClusterServiceGetClusterProcedure:   anybody,
	apiv1connect.ClusterServiceConfigureProcedure:    operators,
	apiv1connect.ClusterServiceChangeMemberProcedure: {Kinds: []apiv1.PrincipalKind{user, member}, Operator: true},
	apiv1connect.ClusterServicePutBlobProcedure:      users,
	apiv1connect.ClusterServiceGetBlobProcedure: {Kinds: []apiv1.PrincipalKind{user, node},
		Finer: "owner of a job that refers to it, operator, or a node that runs such a job: GetBlob"},

	nodev1connect.AgentServiceJoinProcedure: nodes,
	nodev1connect.AgentServiceSyncProcedure: nodes,

	nodev1connect.NodeServiceReadOutputProcedure:     {Kinds: users.Kinds, Finer: "owner of the job or operator: the agent"},
	nodev1connect.NodeServiceWriteInputProcedure:     {Kinds: users.Kinds, Finer: "owner of the job or operator: the agent"},
	nodev1connect.NodeServiceResizeTerminalProcedure: {Kinds: users.Kinds, Finer: "owner of the job or operator: the agent"},
	nodev1connect.NodeServicePutFileProcedure:        {Kinds: users.Kinds, Finer: "owner of the job: the agent"},
	nodev1connect.NodeServiceGetUsageProcedure:       {Kinds: users.Kinds, Finer: "owner of the job or operator: the agent"},
	nodev1connect.NodeServiceStatusProcedure:         anybody,
	nodev1connect.VouchServiceVouchProcedure:         {Local: true},

	peerv1connect.PeerServiceProposeProcedure:        members,
	peerv1connect.PeerServiceReadIndexProcedure:      members,
	peerv1connect.PeerServiceReportLivenessProcedure: members,
	peerv1connect.PeerServiceJoinNodeProcedure:       members,
	peerv1connect.PeerServiceDigestProcedure:         members,
	peerv1connect.PeerServiceQuarantineProcedure:     members,
	peerv1connect.PeerServiceChangeMemberProcedure:   members,
	peerv1connect.PeerServiceStatusProcedure:         members,

	HealthCheckProcedure: {Public: true},
}

// RuleOf returns the row of a procedure ("/muster.api.v1.JobService/GetJob").
func RuleOf(procedure string) (Rule, bool) {
	rule, ok := table[procedure]
	return rule, ok
}

// Authorize returns nil if the principal may make the call, and a refusal otherwise. Settings name the operators; nil
// means that only uid 0 is one.
func Authorize(procedure string, p *apiv1.Principal, settings *apiv1.Settings) error {
	rule, ok := table[procedure]
	if !ok {
		return Refuse(connect.CodePermissionDenied, ReasonNotAllowed, procedure,
			fmt.Sprintf("nobody may call %s: it has no row in the authorisation table", procedure))
	}
	if rule.Public {
		return nil
	}
	if rule.Local {
		return Refuse(connect.CodePermissionDenied, ReasonNotAllowed, procedure,
			fmt.Sprintf("%s is answered on the agent's local socket only", procedure))
	}
	if p.GetKind() == apiv1.PrincipalKind_PRINCIPAL_KIND_UNSPECIFIED {
		return Refuse(connect.CodeUnauthenticated, ReasonUnauthenticated, procedure,
			"who you are is not known: use a Muster command on a node of the cluster, or send a token of its agent")
	}
	if !slices.Contains(rule.Kinds, p.Kind) {
		return Refuse(connect.CodePermissionDenied, ReasonNotAllowed, Caller(p),
			fmt.Sprintf("%s may not call %s", Caller(p), procedure))
	}
	if rule.Operator && !IsOperator(p, settings) {
		return Refuse(connect.CodePermissionDenied, ReasonNotAllowed, Caller(p),
			fmt.Sprintf("only an operator may do this, and %s is none: ask one, or have uid %d added to operator_uids in the cluster's settings",
				Caller(p), p.Uid))
	}
	return nil
}

// Caller names a principal for people: "user alice (uid 1000)", "node n1", "controller c1".
func Caller(p *apiv1.Principal) string {
	switch p.GetKind() {
	case user:
		return fmt.Sprintf("user %s (uid %d)", p.Name, p.Uid)
	case node:
		return "node " + p.Name
	case member:
		return "controller " + p.Name
	case apiv1.PrincipalKind_PRINCIPAL_KIND_UNSPECIFIED:
		return "an unknown caller"
	}
	return fmt.Sprintf("a caller of kind %d", p.Kind)
}
