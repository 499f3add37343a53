package rpc

import (
	"testing"

	"connectrpc.com/connect/v2"
	"google.golang.org/protobuf/reflect/protoreflect"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	peerv1 "github.com/muster-hpc/muster/proto/muster/peer/v1"
)

func procedures() map[string]bool {
	all := map[string]bool{HealthCheckProcedure: true}
	for _, file := range []protoreflect.FileDescriptor{
		apiv1.File_muster_api_v1_job_proto, apiv1.File_muster_api_v1_cluster_proto, apiv1.File_muster_api_v1_common_proto,
		nodev1.File_muster_node_v1_node_proto, peerv1.File_muster_peer_v1_peer_proto,
	} {
		for i := range file.Services().Len() {
			service := file.Services().Get(i)
			for j := range service.Methods().Len() {
				all["/"+string(service.FullName())+"/"+string(service.Methods().Get(j).Name())] = true
			}
		}
	}
	return all
}

func TestEveryProcedureHasExactlyOneRow(t *testing.T) {
	all := procedures()
	if len(all) < 30 {
		t.Fatalf("only %d procedures found: the walk over the services is broken", len(all))
	}
	for procedure := range all {
		rule, ok := RuleOf(procedure)
		if !ok {
			t.Errorf("%s has no row in the authorisation table", procedure)
		} else if len(rule.Kinds) == 0 && !rule.Local && !rule.Public {
			t.Errorf("%s: nobody may call it", procedure)
		}
	}
	for procedure := range table {
		if !all[procedure] {
			t.Errorf("the row %s belongs to no procedure", procedure)
		}
	}
}

var callers = map[string]*apiv1.Principal{
	"nobody":   {},
	"root":     {Kind: user, Uid: 0, Name: "root"},
	"operator": {Kind: user, Uid: 77, Name: "olga"},
	"alice":    {Kind: user, Uid: 1000, Name: "alice"},
	"node":     {Kind: node, Name: "n1"},
	"member":   {Kind: member, Name: "c1"},
}

// The matrix is written out, so that a change of the table is a change of this test.
func TestAuthorisationMatrix(t *testing.T) {
	everybody := []string{"root", "operator", "alice", "node", "member"}
	people := []string{"root", "operator", "alice"}
	operators := []string{"root", "operator"}
	matrix := map[string][]string{
		"/muster.api.v1.JobService/SubmitJobs": people, "/muster.api.v1.JobService/CancelJobs": people,
		"/muster.api.v1.JobService/UpdateJob": people, "/muster.api.v1.JobService/CreateStep": people,
		"/muster.api.v1.JobService/GetJob": everybody, "/muster.api.v1.JobService/ListJobs": everybody,
		"/muster.api.v1.JobService/WatchJobs": everybody, "/muster.api.v1.JobService/GetStep": everybody,
		"/muster.api.v1.ClusterService/ListNodes": everybody, "/muster.api.v1.ClusterService/GetCluster": everybody,
		"/muster.api.v1.ClusterService/UpdateNodes": operators, "/muster.api.v1.ClusterService/Configure": operators,
		"/muster.api.v1.ClusterService/ChangeMember": {"root", "operator", "member"},
		"/muster.api.v1.ClusterService/PutBlob":      people,
		"/muster.api.v1.ClusterService/GetBlob":      {"root", "operator", "alice", "node"},
		"/muster.node.v1.AgentService/Join":          {"node"}, "/muster.node.v1.AgentService/Sync": {"node"},
		HealthCheckProcedure:                     {"nobody", "root", "operator", "alice", "node", "member"},
		"/muster.node.v1.NodeService/ReadOutput": people, "/muster.node.v1.NodeService/WriteInput": people,
		"/muster.node.v1.NodeService/ResizeTerminal": people, "/muster.node.v1.NodeService/PutFile": people,
		"/muster.node.v1.NodeService/GetUsage": people,
		"/muster.node.v1.NodeService/Status":   everybody, "/muster.node.v1.VouchService/Vouch": {},
		"/muster.peer.v1.PeerService/Propose": {"member"}, "/muster.peer.v1.PeerService/ReadIndex": {"member"},
		"/muster.peer.v1.PeerService/ReportLiveness": {"member"}, "/muster.peer.v1.PeerService/JoinNode": {"member"},
		"/muster.peer.v1.PeerService/Digest": {"member"}, "/muster.peer.v1.PeerService/Quarantine": {"member"},
		"/muster.peer.v1.PeerService/ChangeMember": {"member"}, "/muster.peer.v1.PeerService/Status": {"member"},
	}
	settings := &apiv1.Settings{OperatorUids: []uint32{77}}
	for procedure := range procedures() {
		row, ok := matrix[procedure]
		if !ok {
			t.Errorf("%s is not in this matrix", procedure)
			continue
		}
		allowed := map[string]bool{}
		for _, name := range row {
			allowed[name] = true
		}
		for name, principal := range callers {
			err := Authorize(procedure, principal, settings)
			if (err == nil) != allowed[name] {
				t.Errorf("%s by %s: %v; allowed should be %t", procedure, name, err, allowed[name])
			}
			if err != nil && (Detail(err) == nil || Detail(err).Sentence == "") {
				t.Errorf("%s by %s: the refusal %v has no sentence", procedure, name, err)
			}
		}
	}
}

func TestUnknownProcedureIsRefusedToEverybody(t *testing.T) {
	for name, principal := range callers {
		if Authorize("/muster.api.v1.JobService/Nope", principal, nil) == nil {
			t.Errorf("%s may call a procedure without a row", name)
		}
	}
}

func TestOperatorsComeFromSettingsOnly(t *testing.T) {
	err := Authorize("/muster.api.v1.ClusterService/Configure", callers["operator"], &apiv1.Settings{})
	if connect.CodeOf(err) != connect.CodePermissionDenied {
		t.Fatalf("uid 77 without the setting: %v", err)
	}
}
