package api

import (
	"context"
	"crypto/tls"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect/v2"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/muster-hpc/muster/e2e/cluster"
	"github.com/muster-hpc/muster/ops/pki"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/muster/api/v1/apiv1connect"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	"github.com/muster-hpc/muster/proto/muster/node/v1/nodev1connect"
	peerv1 "github.com/muster-hpc/muster/proto/muster/peer/v1"
	"github.com/muster-hpc/muster/rpc"
	"github.com/muster-hpc/muster/rpc/client"
)

const alice, bob = 424_241, 424_242 // users who are no operators

// caller is somebody who calls, and what the table should take him for.
type caller struct {
	name      string
	principal *apiv1.Principal
	tls       *tls.Config
	token     string
	// stranger: the credentials are for somebody else, so that every call ends before the table is asked.
	stranger bool
}

// callers are everybody who may try one listener.
func (s site) callers(listener pki.Role) []caller {
	mine, other := nodev1.TokenAudience_TOKEN_AUDIENCE_CONTROLLERS, nodev1.TokenAudience_TOKEN_AUDIENCE_AGENTS
	if listener == pki.RoleNode {
		mine, other = other, mine
	}
	plain := s.userTLS(listener)
	user := func(uid uint32, name string) *apiv1.Principal {
		return &apiv1.Principal{Kind: apiv1.PrincipalKind_PRINCIPAL_KIND_USER, Uid: uid, Name: name}
	}
	return []caller{
		{name: "nobody", principal: &apiv1.Principal{}, tls: plain},
		{name: "a user", principal: user(alice, "alice"), tls: plain, token: s.token(mine, alice, "alice")},
		{name: "an operator", principal: user(uint32(os.Getuid()), "me"), tls: plain, token: s.token(mine, uint32(os.Getuid()), "me")},
		{name: "an agent", principal: &apiv1.Principal{Kind: apiv1.PrincipalKind_PRINCIPAL_KIND_NODE, Name: "n1"}, tls: s.identity("n1").ClientTLS(listener, "")},
		{name: "a controller", principal: &apiv1.Principal{Kind: apiv1.PrincipalKind_PRINCIPAL_KIND_MEMBER, Name: "c2"}, tls: s.identity("c2").ClientTLS(listener, "")},
		{name: "an operator with the token for the others", tls: plain, token: s.token(other, uint32(os.Getuid()), "me"), stranger: true},
	}
}

// procedures are those that a listener serves, with the one that stops a controller last.
func procedures(listener pki.Role) (all []protoreflect.MethodDescriptor) {
	add := func(file protoreflect.FileDescriptor, names ...protoreflect.Name) {
		for _, name := range names {
			methods := file.Services().ByName(name).Methods()
			for i := range methods.Len() {
				all = append(all, methods.Get(i))
			}
		}
	}
	if listener == pki.RoleNode {
		add(nodev1.File_muster_node_v1_node_proto, "NodeService")
		return all
	}
	add(apiv1.File_muster_api_v1_job_proto, "JobService")
	add(apiv1.File_muster_api_v1_cluster_proto, "ClusterService")
	add(nodev1.File_muster_node_v1_node_proto, "AgentService")
	add(peerv1.File_muster_peer_v1_peer_proto, "PeerService")
	slices.SortStableFunc(all, func(a, b protoreflect.MethodDescriptor) int {
		return strings.Compare(last(a), last(b))
	})
	return all
}

func last(m protoreflect.MethodDescriptor) string {
	if m.Name() == "Quarantine" {
		return "~"
	}
	return ""
}

func procedureOf(m protoreflect.MethodDescriptor) string {
	return "/" + string(m.Parent().FullName()) + "/" + string(m.Name())
}

// attempt makes an empty call and returns its error; of a stream it waits for the first message.
func attempt(t *testing.T, c *connect.Client, m protoreflect.MethodDescriptor) error {
	t.Helper()
	message := func(d protoreflect.MessageDescriptor) proto.Message {
		kind, err := protoregistry.GlobalTypes.FindMessageByName(d.FullName())
		if err != nil {
			t.Fatal(err)
		}
		return kind.New().Interface()
	}
	spec := connect.Spec{StreamType: connect.StreamTypeUnary, Procedure: procedureOf(m), Schema: m}
	if !m.IsStreamingServer() {
		return c.CallUnary(within(t), spec, message(m.Input()), message(m.Output()))
	}
	spec.StreamType = connect.StreamTypeServer
	ctx, cancel := context.WithCancel(within(t))
	defer cancel()
	stream, err := c.CallServerStream(ctx, spec, message(m.Input()))
	if err != nil {
		return err
	}
	err = stream.Receive(message(m.Output()))
	cancel()
	_ = stream.Close() // it was abandoned
	return err
}

// byTheTable tells whether an error is the table's refusal and not one of the handler, which knows the job or the blob.
func byTheTable(err error) bool {
	said := rpc.Sentence(err)
	return rpc.Reason(err) == rpc.ReasonUnauthenticated ||
		rpc.Reason(err) == rpc.ReasonNotAllowed && (strings.Contains(said, " may not call /") || strings.HasPrefix(said, "only an operator may do this"))
}

func TestEveryCallIsAnsweredToThoseInTheTableOnly(t *testing.T) {
	s := site{cluster.Up(t, "--nodes", "1"), t}
	settings := &apiv1.Settings{OperatorUids: []uint32{uint32(os.Getuid())}}
	var victim string // a follower: one of the calls sets it aside
	for _, name := range []string{"c1", "c3"} {
		if name != s.Leader() {
			victim = name
		}
	}
	calls := 0
	for listener, address := range map[pki.Role]string{pki.RoleController: s.Process(victim).Address, pki.RoleNode: s.Process("n1").Address} {
		callers := s.callers(listener)
		for _, m := range procedures(listener) {
			procedure := procedureOf(m)
			if _, ok := rpc.RuleOf(procedure); !ok {
				t.Errorf("%s has no row", procedure)
			}
			for _, who := range callers {
				calls++
				err := attempt(t, s.dial(address, s.transport(who.tls), who.token), m)
				what := fmt.Sprintf("%s by %s: %v", procedure, who.name, err)
				if who.stranger {
					if connect.CodeOf(err) != connect.CodeUnauthenticated || !says(err, rpc.ReasonUnauthenticated, "the token is not accepted") {
						t.Error(what)
					}
					continue
				}
				want := rpc.Authorize(procedure, who.principal, settings)
				switch {
				case want == nil && err != nil && byTheTable(err):
					t.Errorf("%s; the table allows it", what)
				case want != nil && (connect.CodeOf(err) != connect.CodeOf(want) || rpc.Sentence(err) != rpc.Sentence(want)):
					t.Errorf("%s; the table says %v", what, want)
				}
			}
		}
	}
	if calls < 150 {
		t.Errorf("only %d calls were tried: the walk over the services is broken", calls)
	}
}

// TestWhatIsAnothersStaysAnothers: what the table leaves to those who know the job, the blob or the node.
func TestWhatIsAnothersStaysAnothers(t *testing.T) {
	s := site{cluster.Up(t, "--controllers", "1", "--nodes", "2"), t}
	address := s.Process("c1").Address
	user := func(uid uint32, name string) *connect.Client {
		return s.dial(address, s.transport(s.userTLS(pki.RoleController)), s.token(nodev1.TokenAudience_TOKEN_AUDIENCE_CONTROLLERS, uid, name))
	}
	jobs := apiv1connect.NewJobServiceClient
	request := held("of alice")
	request.Jobs[0].Environment = []byte("SECRET=1\x00")
	answer, err := jobs(user(alice, "alice")).SubmitJobs(within(t), request)
	id := submitted(t, answer, err)
	job, err := jobs(user(bob, "bob")).GetJob(within(t), &apiv1.GetJobRequest{JobId: id})
	if err != nil || job.Job.Owner.Uid != alice || job.Job.Owner.User != "alice" {
		t.Fatalf("the owner comes from the token: %v, %v", job, err)
	}

	stranger := user(bob, "bob")
	cancelled, err := jobs(stranger).CancelJobs(within(t), &apiv1.CancelJobsRequest{RequestId: client.NewRequestID(), Filter: &apiv1.JobFilter{JobIds: []uint32{id}}})
	if err != nil || len(cancelled.JobIds) != 0 || len(cancelled.Refusals) != 1 || cancelled.Refusals[0].Reason != "PERMISSION_DENIED" {
		t.Errorf("bob cancels alice's job: %v, %v", cancelled, err)
	}
	updated, err := jobs(stranger).UpdateJob(within(t), &apiv1.UpdateJobRequest{RequestId: client.NewRequestID(), JobIds: []uint32{id}, Change: &apiv1.UpdateJobRequest_Hold{}})
	if err != nil || len(updated.Refusals) != 1 || updated.Refusals[0].Reason != "PERMISSION_DENIED" {
		t.Errorf("bob releases alice's job: %v, %v", updated, err)
	}
	environment := job.Job.Spec.EnvironmentBlob
	clusters := apiv1connect.NewClusterServiceClient
	if blob, err := clusters(stranger).GetBlob(within(t), &apiv1.GetBlobRequest{Sha256: environment, JobId: id}); connect.CodeOf(err) != connect.CodePermissionDenied {
		t.Errorf("bob reads alice's environment: %v, %v", blob, err)
	}
	if blob, err := clusters(user(alice, "alice")).GetBlob(within(t), &apiv1.GetBlobRequest{Sha256: environment, JobId: id}); err != nil || string(blob.Data) != "SECRET=1\x00" {
		t.Errorf("alice reads her own environment: %v, %v", blob, err)
	}
	agent := s.dial(address, s.transport(s.identity("n1").ClientTLS(pki.RoleController, "")), "")
	if blob, err := clusters(agent).GetBlob(within(t), &apiv1.GetBlobRequest{Sha256: environment, JobId: id}); connect.CodeOf(err) != connect.CodePermissionDenied {
		t.Errorf("an agent reads the environment of a job that it does not run: %v, %v", blob, err)
	}
	join := &nodev1.JoinRequest{Spec: &apiv1.NodeSpec{Name: "n2", AgentAddress: "127.0.0.1:1", Cpus: 1, MemoryMb: 1}, Instance: &apiv1.Instance{BootId: "b", Nonce: "n"}}
	if joined, err := nodev1connect.NewAgentServiceClient(agent).Join(within(t), join); !says(err, rpc.ReasonNotYourNode) {
		t.Errorf("n1 joins as n2: %v, %v", joined, err)
	}
	priority := held("important")
	priority.Jobs[0].Spec.Priority = 4_000_000
	if answer, err := jobs(stranger).SubmitJobs(within(t), priority); err != nil || answer.Results[0].Refusal == nil {
		t.Errorf("bob sets a priority: %v, %v", answer, err)
	}
	cancelled, err = jobs(user(uint32(os.Getuid()), "me")).CancelJobs(within(t), &apiv1.CancelJobsRequest{RequestId: client.NewRequestID(), Filter: &apiv1.JobFilter{JobIds: []uint32{id}}})
	if err != nil || len(cancelled.JobIds) != 1 {
		t.Errorf("an operator cancels alice's job: %v, %v", cancelled, err)
	}
}
