package server

import (
	"context"
	"fmt"
	"net/http"
	"sync"

	"connectrpc.com/connect/v2"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"

	"github.com/muster-hpc/muster/rpc"
)

// unready says why this controller should not be sent calls, or "".
func (s *Server) unready() string {
	select {
	case <-s.draining:
		return "leaving"
	default:
	}
	switch reason := s.replica.Quarantined(); {
	case reason != "":
		return "quarantined: " + reason
	case s.replica.Leader().ID == "":
		return "no leader is known"
	case s.replica.View().ClusterID() == "":
		return "the state has not arrived yet"
	}
	return ""
}

func (s *Server) healthz(w http.ResponseWriter, _ *http.Request) {
	if reason := s.replica.Quarantined(); reason != "" {
		http.Error(w, "quarantined: "+reason, http.StatusServiceUnavailable)
		return
	}
	fmt.Fprintln(w, "ok")
}

func (s *Server) readyz(w http.ResponseWriter, _ *http.Request) {
	if reason := s.unready(); reason != "" {
		http.Error(w, reason, http.StatusServiceUnavailable)
		return
	}
	fmt.Fprintln(w, "ready")
}

// healthMessages are the messages of grpc.health.v1.Health/Check: a service name, and a status of 1 (serving) or
// 2 (not serving). They are described here because the package that has them brings all of gRPC along.
var healthMessages = sync.OnceValues(func() (request, response protoreflect.MessageDescriptor) {
	file, err := protodesc.NewFile(&descriptorpb.FileDescriptorProto{
		Name: proto.String("grpc/health/v1/health.proto"), Package: proto.String("grpc.health.v1"), Syntax: proto.String("proto3"),
		MessageType: []*descriptorpb.DescriptorProto{
			{Name: proto.String("HealthCheckRequest"), Field: []*descriptorpb.FieldDescriptorProto{{
				Name: proto.String("service"), Number: proto.Int32(1), Type: descriptorpb.FieldDescriptorProto_TYPE_STRING.Enum(),
				Label: descriptorpb.FieldDescriptorProto_LABEL_OPTIONAL.Enum()}}},
			{Name: proto.String("HealthCheckResponse"), Field: []*descriptorpb.FieldDescriptorProto{{
				Name: proto.String("status"), Number: proto.Int32(1), Type: descriptorpb.FieldDescriptorProto_TYPE_ENUM.Enum(),
				TypeName: proto.String(".grpc.health.v1.HealthCheckResponse.ServingStatus"),
				Label:    descriptorpb.FieldDescriptorProto_LABEL_OPTIONAL.Enum()}},
				EnumType: []*descriptorpb.EnumDescriptorProto{{Name: proto.String("ServingStatus"), Value: []*descriptorpb.EnumValueDescriptorProto{
					{Name: proto.String("UNKNOWN"), Number: proto.Int32(0)}, {Name: proto.String("SERVING"), Number: proto.Int32(1)},
					{Name: proto.String("NOT_SERVING"), Number: proto.Int32(2)}, {Name: proto.String("SERVICE_UNKNOWN"), Number: proto.Int32(3)}}}}},
		},
	}, nil)
	if err != nil {
		panic("server: the health messages are described wrongly: " + err.Error())
	}
	return file.Messages().ByName("HealthCheckRequest"), file.Messages().ByName("HealthCheckResponse")
})

const (
	healthServing    = 1
	healthNotServing = 2
)

// healthCheck answers grpc.health.v1.Health/Check for gRPC's load balancers and probes: serving while /readyz says ready.
func (s *Server) healthCheck(_ context.Context, _ connect.Spec, stream connect.ServerStream) error {
	requestType, responseType := healthMessages()
	if err := stream.Receive(dynamicpb.NewMessage(requestType)); err != nil {
		return err
	}
	status := protoreflect.EnumNumber(healthServing)
	if s.unready() != "" {
		status = healthNotServing
	}
	response := dynamicpb.NewMessage(responseType)
	response.Set(responseType.Fields().ByName("status"), protoreflect.ValueOfEnum(status))
	return stream.Send(response)
}

func (s *Server) registerHealth(services *connect.Server) {
	services.Register(connect.Method{
		Spec:    connect.Spec{StreamType: connect.StreamTypeUnary, Procedure: rpc.HealthCheckProcedure},
		Handler: s.healthCheck,
	})
}
