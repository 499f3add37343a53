package server

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"testing"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connecthttp"

	"github.com/muster-hpc/muster/ops/pki"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/muster/api/v1/apiv1connect"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	peerv1 "github.com/muster-hpc/muster/proto/muster/peer/v1"
	"github.com/muster-hpc/muster/proto/muster/peer/v1/peerv1connect"
	"github.com/muster-hpc/muster/rpc"
	"github.com/muster-hpc/muster/rpc/client"
)

func TestConnectGRPCAndWebOnOnePort(t *testing.T) {
	c := newCluster(t, 1)
	roots, err := rpc.Roots(c.ca.PEM())
	if err != nil {
		t.Fatal(err)
	}
	transport := &http.Transport{TLSClientConfig: rpc.CheckingTLS(roots, rpc.RoleController, ""), ForceAttemptHTTP2: true}
	defer transport.CloseIdleConnections()
	token := c.token(1000, "alice")
	for name, options := range map[string][]connecthttp.Option{
		"connect": nil, "grpc": {connecthttp.WithGRPC()}, "grpc-web": {connecthttp.WithGRPCWeb()}, "json": {connecthttp.WithProtoJSON()},
	} {
		wire := connecthttp.NewTransport(&http.Client{Transport: transport}, "https://"+c.members[0].address, options...)
		service := apiv1connect.NewJobServiceClient(connect.NewClient(wire))
		ctx, info := connect.NewClientContext(t.Context())
		info.RequestHeader().Set("Authorization", "Bearer "+token)
		if _, err := service.ListJobs(ctx, &apiv1.ListJobsRequest{}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		ctx, info = connect.NewClientContext(t.Context())
		info.RequestHeader().Set("Authorization", "Bearer "+token)
		_, err := service.GetJob(ctx, &apiv1.GetJobRequest{JobId: 99})
		if rpc.Reason(err) != "JOB_UNKNOWN" || connect.CodeOf(err) != connect.CodeNotFound {
			t.Errorf("%s: an unknown job: %v", name, err)
		}
	}
}

func TestPlainJSONOverHTTP1(t *testing.T) {
	c := newCluster(t, 1)
	roots, err := rpc.Roots(c.ca.PEM())
	if err != nil {
		t.Fatal(err)
	}
	transport := &http.Transport{TLSClientConfig: rpc.CheckingTLS(roots, rpc.RoleController, ""), TLSNextProto: map[string]func(string, *tls.Conn) http.RoundTripper{}}
	defer transport.CloseIdleConnections()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost,
		"https://"+c.members[0].address+"/muster.api.v1.ClusterService/GetCluster", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Authorization", "Bearer "+c.token(1000, "alice"))
	response, err := transport.RoundTrip(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	var answer struct{ Configuration struct{ ClusterName string } }
	if err := json.Unmarshal(body, &answer); err != nil || answer.Configuration.ClusterName != "test" || response.ProtoMajor != 1 {
		t.Errorf("%s %s: %v", response.Proto, body, err)
	}
	if response.Header.Get(rpc.LeaderHeader) != c.members[0].address {
		t.Error("the leader is not named")
	}
}

func TestHealthAndReadiness(t *testing.T) {
	c := newCluster(t, 1)
	roots, err := rpc.Roots(c.ca.PEM())
	if err != nil {
		t.Fatal(err)
	}
	web := &http.Client{Transport: &http.Transport{TLSClientConfig: rpc.CheckingTLS(roots, rpc.RoleController, "")}}
	defer web.CloseIdleConnections()
	grpcHealth := func() string {
		t.Helper()
		response, err := web.Post("https://"+c.members[0].address+rpc.HealthCheckProcedure, "application/json", strings.NewReader(`{"service":""}`))
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		var answer struct{ Status string }
		if err := json.NewDecoder(response.Body).Decode(&answer); err != nil {
			t.Fatal(err)
		}
		return answer.Status
	}
	status := func(path string) int {
		response, err := web.Get("https://" + c.members[0].address + path)
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
		return response.StatusCode
	}
	if h, r := status("/healthz"), status("/readyz"); h != 200 || r != 200 {
		t.Errorf("serving: %d, %d", h, r)
	}
	if got := grpcHealth(); got != "SERVING" {
		t.Errorf("gRPC's health check says %q while serving", got)
	}
	c.elect(nil)
	if h, r := status("/healthz"), status("/readyz"); h != 200 || r != 503 {
		t.Errorf("without a leader: %d, %d", h, r)
	}
	c.members[0].Quarantine("damaged")
	if h, r := status("/healthz"), status("/readyz"); h != 503 || r != 503 {
		t.Errorf("quarantined: %d, %d", h, r)
	}
	if got := grpcHealth(); got != "NOT_SERVING" {
		t.Errorf("gRPC's health check says %q in quarantine", got)
	}
}

func TestIdentityIsNeverWhatTheRequestClaims(t *testing.T) {
	c := newCluster(t, 1)
	number, epoch := c.join("n1")
	leader := c.members[0]
	roots, err := rpc.Roots(c.ca.PEM())
	if err != nil {
		t.Fatal(err)
	}
	nobody := c.direct(rpc.CheckingTLS(roots, rpc.RoleController, ""), "")
	_, err = nobody.Jobs().ListJobs(t.Context(), &apiv1.ListJobsRequest{})
	if connect.CodeOf(err) != connect.CodeUnauthenticated {
		t.Errorf("nobody: %v", err)
	}
	alice := c.user(1000, "alice")
	if _, err := alice.Agents(leader.address).Sync(t.Context(), &nodev1.SyncRequest{Node: number}); connect.CodeOf(err) == 0 || err == nil {
		t.Errorf("a user syncs: %v", err)
	}
	peer := peerv1connect.NewPeerServiceClient(c.agentOf("n1").Peer(leader.address))
	if _, err := peer.ReadIndex(t.Context(), &peerv1.ReadIndexRequest{}); rpc.Reason(err) != rpc.ReasonNotAllowed {
		t.Errorf("a node as a controller: %v", err)
	}
	n2 := c.agentOf("n2").Agents(leader.address)
	if _, err := n2.Sync(t.Context(), &nodev1.SyncRequest{Node: number, Epoch: epoch, Instance: instance("n1"), Sequence: 1}); rpc.Reason(err) != rpc.ReasonNotYourNode {
		t.Errorf("n2 syncs for n1: %v", err)
	}
	if _, err := n2.Join(t.Context(), &nodev1.JoinRequest{Spec: nodeSpec("n1"), Instance: instance("x")}); rpc.Reason(err) != rpc.ReasonNotYourNode {
		t.Errorf("n2 joins as n1: %v", err)
	}
	if _, err := c.agentOf("n1").Jobs().SubmitJobs(t.Context(), &apiv1.SubmitJobsRequest{RequestId: client.NewRequestID()}); rpc.Reason(err) != rpc.ReasonNotAllowed {
		t.Errorf("a node submits: %v", err)
	}
	other, err := pki.NewCA("other")
	if err != nil {
		t.Fatal(err)
	}
	foreign, err := other.Issue("c1", pki.RoleController)
	if err != nil {
		t.Fatal(err)
	}
	config := foreign.ClientTLS(pki.RoleController, "")
	config.VerifyConnection = nil // it does not mind whom it talks to
	intruder := peerv1connect.NewPeerServiceClient(c.direct(config, "").Peer(leader.address))
	if _, err := intruder.ReadIndex(t.Context(), &peerv1.ReadIndexRequest{}); err == nil {
		t.Error("a controller of another CA was answered")
	}
}

func TestFollowerMayPassOnOnlyWhatItsCallersMayAsk(t *testing.T) {
	sender := &apiv1.Principal{Kind: apiv1.PrincipalKind_PRINCIPAL_KIND_MEMBER, Name: "c2"}
	alice := &apiv1.Principal{Kind: apiv1.PrincipalKind_PRINCIPAL_KIND_USER, Uid: 1000, Name: "alice"}
	node := &apiv1.Principal{Kind: apiv1.PrincipalKind_PRINCIPAL_KIND_NODE, Name: "n1"}
	for name, c := range map[string]struct {
		command *logv1.Command
		ok      bool
	}{
		"a user's submission":        {&logv1.Command{Principal: alice, Op: &logv1.Command_SubmitJobs{}}, true},
		"a submission by nobody":     {&logv1.Command{Op: &logv1.Command_SubmitJobs{}}, false},
		"a submission by a node":     {&logv1.Command{Principal: node, Op: &logv1.Command_SubmitJobs{}}, false},
		"a node's reports":           {&logv1.Command{Principal: node, Op: &logv1.Command_ReportTasks{}}, true},
		"reports by a user":          {&logv1.Command{Principal: alice, Op: &logv1.Command_ReportTasks{}}, false},
		"a decision":                 {&logv1.Command{Principal: sender, Op: &logv1.Command_Place{}}, false},
		"a submission as a decision": {&logv1.Command{Principal: alice, DecidedInTerm: 1, Op: &logv1.Command_SubmitJobs{}}, false},
		"nothing":                    {&logv1.Command{Principal: alice}, false},
		"its own announcement": {&logv1.Command{Principal: sender, Op: &logv1.Command_AnnounceMember{
			AnnounceMember: &logv1.AnnounceMember{Member: &apiv1.Member{Name: "c2"}}}}, true},
		"another's announcement": {&logv1.Command{Principal: sender, Op: &logv1.Command_AnnounceMember{
			AnnounceMember: &logv1.AnnounceMember{Member: &apiv1.Member{Name: "c3"}}}}, false},
	} {
		if err := forwardable(sender, c.command); (err == nil) != c.ok {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestPanicInAHandlerEndsOnlyTheCall(t *testing.T) {
	var log bytes.Buffer
	guard := &rpc.Guard{Log: slog.New(slog.NewTextHandler(&log, nil))}
	handler := guard.Interceptor()(func(context.Context, connect.Spec, connect.ServerStream) error { panic("a bug") })
	guard.Refuse = func(string) error { panic("an early bug") }
	err := handler(t.Context(), connect.Spec{Procedure: apiv1connect.JobServiceGetJobProcedure}, nil)
	if connect.CodeOf(err) != connect.CodeInternal || rpc.Reason(err) != rpc.ReasonInternal || strings.Contains(rpc.Sentence(err), "bug\"") {
		t.Errorf("got %v", err)
	}
	if !strings.Contains(log.String(), "an early bug") {
		t.Errorf("the log says: %s", log.String())
	}
}

func TestUnknownFieldsNeverReachTheLog(t *testing.T) {
	c := newCluster(t, 1)
	spec := batch("x").Spec
	spec.ProtoReflect().SetUnknown([]byte{0xfa, 0x7f, 1, 7}) // field 2047
	before := c.members[0].proposals.Load()
	_, err := c.user(1000, "alice").Jobs().SubmitJobs(t.Context(), &apiv1.SubmitJobsRequest{RequestId: client.NewRequestID(),
		Jobs: []*apiv1.JobSubmission{{Spec: spec, Script: []byte("#!/bin/sh\n")}}})
	if rpc.Reason(err) != "UNKNOWN_FIELD" || c.members[0].proposals.Load() != before {
		t.Errorf("got %v", err)
	}
}

func TestQuarantinedControllerAnswersOnlyItsPeersQuestions(t *testing.T) {
	c := newCluster(t, 2)
	sick := c.members[1]
	controller := c.direct(c.issue("c1", pki.RoleController).ClientTLS(pki.RoleController, ""), "")
	peer := peerv1connect.NewPeerServiceClient(controller.Peer(sick.address))
	if _, err := peer.Quarantine(t.Context(), &peerv1.QuarantineRequest{Index: 5, Digest: 42, Sentence: "differs"}); rpc.Reason(err) != "DIGEST_EQUAL" {
		t.Errorf("a mistaken leader was obeyed: %v", err)
	}
	if _, err := peer.Quarantine(t.Context(), &peerv1.QuarantineRequest{Index: 5, Digest: 43, Sentence: "its digest differs"}); err != nil {
		t.Fatal(err)
	}
	status, err := peer.Status(t.Context(), &peerv1.StatusRequest{})
	if err != nil || status.Member.Quarantine != "its digest differs" {
		t.Errorf("status %v, %v", status, err)
	}
	if _, err := peer.ReadIndex(t.Context(), &peerv1.ReadIndexRequest{}); rpc.Reason(err) != rpc.ReasonQuarantined {
		t.Errorf("a read: %v", err)
	}
	// Users are served by the others without noticing.
	if _, err := c.user(1000, "alice", sick, c.members[0]).Jobs().ListJobs(t.Context(), &apiv1.ListJobsRequest{}); err != nil {
		t.Error(err)
	}
}
