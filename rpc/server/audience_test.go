package server

import (
	"context"
	"testing"

	"connectrpc.com/connect/v2"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/dynamicpb"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	peerv1 "github.com/muster-hpc/muster/proto/muster/peer/v1"
	"github.com/muster-hpc/muster/rpc"
)

// served lists every procedure that a controller serves.
func served() map[string]protoreflect.MethodDescriptor {
	all := map[string]protoreflect.MethodDescriptor{}
	for _, service := range []protoreflect.ServiceDescriptor{
		apiv1.File_muster_api_v1_job_proto.Services().ByName("JobService"),
		apiv1.File_muster_api_v1_cluster_proto.Services().ByName("ClusterService"),
		nodev1.File_muster_node_v1_node_proto.Services().ByName("AgentService"),
		peerv1.File_muster_peer_v1_peer_proto.Services().ByName("PeerService"),
	} {
		for i := range service.Methods().Len() {
			method := service.Methods().Get(i)
			all["/"+string(service.FullName())+"/"+string(method.Name())] = method
		}
	}
	return all
}

// ask makes a call with an empty request and a token, and returns its error.
func ask(ctx context.Context, client *connect.Client, procedure string, method protoreflect.MethodDescriptor, token string) error {
	ctx, info := connect.NewClientContext(ctx)
	info.RequestHeader().Set("Authorization", "Bearer "+token)
	request, response := newMessage(method.Input()), newMessage(method.Output())
	spec := connect.Spec{Procedure: procedure, Schema: method}
	if !method.IsStreamingServer() {
		return client.CallUnary(ctx, spec, request, response)
	}
	spec.StreamType = connect.StreamTypeServer
	stream, err := client.CallServerStream(ctx, spec, request)
	if err != nil {
		return err
	}
	defer stream.Close()
	return stream.Receive(response)
}

func newMessage(descriptor protoreflect.MessageDescriptor) proto.Message {
	if known, err := protoregistry.GlobalTypes.FindMessageByName(descriptor.FullName()); err == nil {
		return known.New().Interface()
	}
	return dynamicpb.NewMessage(descriptor)
}

// An agent that was taken over has the tokens that users showed it: with them it must not get anything done here.
func TestTokenForAgentsIsRefusedByEveryProcedure(t *testing.T) {
	c := newCluster(t, 1)
	leader := c.members[0]
	peer := c.user(0, "root").Peer(leader.address)
	forAgents := c.tokenFor(nodev1.TokenAudience_TOKEN_AUDIENCE_AGENTS, 0, "root")
	forControllers := c.token(0, "root")
	all := served()
	if len(all) < 25 {
		t.Fatalf("only %d procedures found: the walk over the services is broken", len(all))
	}
	for procedure, method := range all {
		if err := ask(t.Context(), peer, procedure, method, forAgents); connect.CodeOf(err) != connect.CodeUnauthenticated ||
			rpc.Reason(err) != rpc.ReasonUnauthenticated {
			t.Errorf("%s with a token for agents: %v", procedure, err)
		}
		if err := ask(t.Context(), peer, procedure, method, forControllers); err != nil && connect.CodeOf(err) == connect.CodeUnauthenticated {
			t.Errorf("%s with a token for controllers: %v", procedure, err)
		}
	}
}
