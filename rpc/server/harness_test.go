package server

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/muster-hpc/muster/fsm"
	"github.com/muster-hpc/muster/fsm/replica"
	"github.com/muster-hpc/muster/ops/pki"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	peerv1 "github.com/muster-hpc/muster/proto/muster/peer/v1"
	"github.com/muster-hpc/muster/rpc"
	"github.com/muster-hpc/muster/rpc/client"
)

// cluster is a set of controllers with real servers on real sockets and a fake log: what the leader proposes is applied by
// all real state machines at once, except by those that lag.
type cluster struct {
	t  testing.TB
	ca *pki.CA

	mu      sync.Mutex
	term    uint64
	leader  *fakeReplica
	entries [][]byte
	members []*fakeReplica
	changed chan struct{} // leader or term
}

// fakeReplica is a Raft member without Raft.
type fakeReplica struct {
	cluster *cluster
	name    string
	server  *Server
	address string
	control *fakeControl

	mu          sync.Mutex
	machine     *fsm.Machine
	view        *fsm.View
	applied     uint64
	published   chan struct{}
	lagging     bool
	quarantined string

	moved      string      // its Raft address, if it is not the one that the others have for it
	paused     atomic.Bool // answers nothing
	full       atomic.Bool // its disk
	loseAnswer atomic.Int32
	readIndex  atomic.Int32
	proposals  atomic.Int32
}

var errFakeNotLeading = errors.New("fake control does not lead")

// fakeControl commits an entry for each batch of beats, as the real one does.
type fakeControl struct {
	replica *fakeReplica
	mu      sync.Mutex
	beats   []*peerv1.Beat
	batches int
	refuse  map[uint32]bool
	silent  []*apiv1.SilentNode
	block   chan struct{} // if not nil: wait for it
}

func (c *fakeControl) ReportLiveness(ctx context.Context, beats []*peerv1.Beat) (*peerv1.ReportLivenessResponse, error) {
	if !c.replica.leads() {
		return nil, errFakeNotLeading
	}
	c.mu.Lock()
	block := c.block
	c.beats = append(c.beats, beats...)
	c.batches++
	var refused []uint32
	for _, b := range beats {
		if c.refuse[b.Node] {
			refused = append(refused, b.Node)
		}
	}
	c.mu.Unlock()
	if block != nil {
		select {
		case <-block:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	result, err := c.replica.Propose(ctx, &logv1.Command{Principal: memberPrincipal, Op: &logv1.Command_Tick{Tick: &logv1.Tick{}}})
	if err != nil {
		return nil, err
	}
	return &peerv1.ReportLivenessResponse{Index: result.Revision.Index, Refused: refused, Term: c.replica.Leader().Term}, nil
}

func (c *fakeControl) JoinNode(ctx context.Context, request *peerv1.JoinNodeRequest) (*nodev1.JoinResponse, error) {
	if !c.replica.leads() {
		return nil, errFakeNotLeading
	}
	result, err := c.replica.Propose(ctx, &logv1.Command{Principal: memberPrincipal, Op: &logv1.Command_JoinNode{JoinNode: &logv1.JoinNode{
		Spec: request.Join.Spec, Instance: request.Join.Instance, TakesOver: true}}})
	if err != nil {
		return nil, err
	}
	if result.Refusal != nil {
		return nil, rpc.FromDetail(result.Refusal)
	}
	return &nodev1.JoinResponse{Number: result.NodeNumber, Epoch: result.NodeEpoch, Revision: result.Revision}, nil
}

func (c *fakeControl) Status() *apiv1.SchedulerStatus { return &apiv1.SchedulerStatus{Passes: 7} }

func (c *fakeControl) Silent() []*apiv1.SilentNode {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.silent
}

func (c *fakeControl) seen() (beats []*peerv1.Beat, batches int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]*peerv1.Beat(nil), c.beats...), c.batches
}

var memberPrincipal = &apiv1.Principal{Kind: apiv1.PrincipalKind_PRINCIPAL_KIND_MEMBER, Name: "c1"}

func (r *fakeReplica) ID() string { return "id-" + r.name }

func (r *fakeReplica) leads() bool {
	r.cluster.mu.Lock()
	defer r.cluster.mu.Unlock()
	return r.cluster.leader == r
}

func (r *fakeReplica) Propose(ctx context.Context, command *logv1.Command) (*logv1.Result, error) {
	if r.paused.Load() {
		<-ctx.Done()
		return nil, fmt.Errorf("paused: %w: %w", replica.ErrOutcomeUnknown, ctx.Err())
	}
	c := r.cluster
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.leader != r {
		return nil, replica.ErrNotLeader
	}
	r.proposals.Add(1)
	command = proto.CloneOf(command)
	command.ProposedAt, command.Level = timestamppb.Now(), fsm.LevelOf(command)
	entry, err := proto.Marshal(&logv1.Batch{Commands: []*logv1.Command{command}})
	if err != nil {
		return nil, err
	}
	if len(entry) > 256<<10 {
		return nil, fmt.Errorf("%w: %d bytes", replica.ErrTooLarge, len(entry))
	}
	c.entries = append(c.entries, entry)
	var result *logv1.Result
	for _, member := range c.members {
		if got := member.catchUp(); member == r {
			result = got
		}
	}
	if r.loseAnswer.Load() > 0 && command.GetTick() == nil {
		r.loseAnswer.Add(-1)
		return nil, replica.ErrOutcomeUnknown
	}
	return result, nil
}

// catchUp applies what is missing and returns the result of the last entry. The caller holds cluster.mu.
func (r *fakeReplica) catchUp() *logv1.Result {
	r.mu.Lock()
	defer r.mu.Unlock()
	var last *logv1.Result
	for !r.lagging && r.applied < uint64(len(r.cluster.entries)) {
		results, err := r.machine.Apply(r.applied+1, r.cluster.term, r.cluster.entries[r.applied])
		if err != nil {
			panic(err)
		}
		last = results[0]
		r.applied++
		r.view = r.machine.Publish()
		close(r.published)
		r.published = make(chan struct{})
	}
	return last
}

func (r *fakeReplica) lag(lagging bool) {
	r.cluster.mu.Lock()
	defer r.cluster.mu.Unlock()
	r.mu.Lock()
	r.lagging = lagging
	r.mu.Unlock()
	r.catchUp()
}

func (r *fakeReplica) View() *fsm.View {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.view
}

func (r *fakeReplica) Changed() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.published
}

func (r *fakeReplica) ReadIndex(ctx context.Context) (uint64, error) {
	if r.paused.Load() {
		<-ctx.Done()
		return 0, ctx.Err()
	}
	if !r.leads() {
		return 0, replica.ErrNotLeader
	}
	r.readIndex.Add(1)
	r.cluster.mu.Lock()
	defer r.cluster.mu.Unlock()
	return uint64(len(r.cluster.entries)), nil
}

func (r *fakeReplica) WaitIndex(ctx context.Context, index uint64) (*fsm.View, error) {
	for {
		r.mu.Lock()
		view, applied, published := r.view, r.applied, r.published
		r.mu.Unlock()
		if applied >= index {
			return view, nil
		}
		select {
		case <-published:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func (r *fakeReplica) Leader() replica.Leader {
	r.cluster.mu.Lock()
	defer r.cluster.mu.Unlock()
	l := replica.Leader{Term: r.cluster.term}
	if leader := r.cluster.leader; leader != nil {
		l.ID, l.IsSelf = leader.ID(), leader == r
	}
	if !l.IsSelf {
		l.LastContact = 5 * time.Millisecond
	}
	return l
}

func (r *fakeReplica) LeaderChanged() <-chan struct{} {
	r.cluster.mu.Lock()
	defer r.cluster.mu.Unlock()
	return r.cluster.changed
}

func (r *fakeReplica) Servers() []replica.Server {
	var list []replica.Server
	for _, member := range r.cluster.members {
		list = append(list, replica.Server{ID: member.ID(), Address: "raft-" + member.name, Voter: true})
	}
	return list
}

func (r *fakeReplica) AddLearner(context.Context, string, string) error { return nil }
func (r *fakeReplica) Promote(context.Context, string) error            { return nil }
func (r *fakeReplica) Remove(context.Context, string) error             { return nil }

func (r *fakeReplica) Transfer(_ context.Context, id string) error {
	if !r.leads() {
		return replica.ErrNotLeader
	}
	for _, member := range r.cluster.members {
		if member.ID() == id || id == "-" && member != r {
			r.cluster.elect(member)
			return nil
		}
	}
	return replica.ErrUnknownMember
}

func (r *fakeReplica) DiskFull() bool { return r.full.Load() }

func (r *fakeReplica) DigestAt(index uint64) (uint64, bool) { return 42, index == 5 }

func (r *fakeReplica) Quarantine(reason string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.quarantined = reason
}

func (r *fakeReplica) Quarantined() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.quarantined
}

// elect makes a member the leader of a new term; nil means that there is none.
func (c *cluster) elect(member *fakeReplica) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.term++
	c.leader = member
	close(c.changed)
	c.changed = make(chan struct{})
}

// newCluster starts n controllers; the first leads.
func newCluster(t testing.TB, n int, faults ...Faults) *cluster {
	t.Helper()
	ca, err := pki.NewCA("test")
	if err != nil {
		t.Fatal(err)
	}
	c := &cluster{t: t, ca: ca, term: 1, changed: make(chan struct{})}
	for i := range n {
		name := fmt.Sprintf("c%d", i+1)
		machine := fsm.New()
		r := &fakeReplica{cluster: c, name: name, machine: machine, view: machine.Publish(), published: make(chan struct{})}
		c.members = append(c.members, r)
	}
	c.leader = c.members[0]
	for _, r := range c.members {
		c.serve(r, faults...)
	}
	c.apply(memberPrincipal, &logv1.Command{Op: &logv1.Command_Bootstrap{Bootstrap: &logv1.Bootstrap{
		ClusterId: "cluster-1", Incarnation: 1, Configuration: configuration()}}})
	for _, r := range c.members {
		c.apply(&apiv1.Principal{Kind: memberPrincipal.Kind, Name: r.name}, &logv1.Command{Op: &logv1.Command_AnnounceMember{
			AnnounceMember: &logv1.AnnounceMember{Member: r.self()}}})
	}
	return c
}

func configuration() *apiv1.Configuration {
	return &apiv1.Configuration{ClusterName: "test", Settings: &apiv1.Settings{LeaseMs: 3000},
		Partitions: []*apiv1.Partition{{Name: "gpu", Nodes: "ALL", IsDefault: true}}}
}

func (r *fakeReplica) self() *apiv1.Member {
	return &apiv1.Member{Id: r.ID(), Name: r.name, RaftAddress: cmp.Or(r.moved, "raft-"+r.name), ApiAddress: r.address,
		SupportedLevel: fsm.MaxLevel, Version: "test"}
}

func (c *cluster) serve(r *fakeReplica, faults ...Faults) {
	c.t.Helper()
	identity := c.issue(r.name, pki.RoleController)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		c.t.Fatal(err)
	}
	r.address = listener.Addr().String()
	r.control = &fakeControl{replica: r, refuse: map[uint32]bool{}}
	config := Config{Replica: r, Control: r.control, ErrNotLeading: errFakeNotLeading, Self: r.self(),
		Peers:    NewPeers(client.OpenDirect(client.Direct{TLS: identity.ClientTLS(pki.RoleController, "")}), r, nil),
		Verifier: rpc.NewVerifier(identity.Roots, nodev1.TokenAudience_TOKEN_AUDIENCE_CONTROLLERS, nil), Log: slog.New(slog.DiscardHandler)}
	if len(faults) > 0 {
		config.Faults = faults[0]
	}
	r.server = New(config)
	http := httptest.NewUnstartedServer(nil)
	http.Config = NewHTTPServer(r.server.Handler(), slog.New(slog.DiscardHandler))
	http.Listener.Close()
	http.Listener = listener
	http.TLS = identity.ServerTLS()
	http.StartTLS()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.server.Run(ctx) }()
	c.t.Cleanup(func() {
		cancel()
		<-done
		http.CloseClientConnections()
		http.Close()
	})
}

func (c *cluster) issue(name string, role pki.Role) *pki.Identity {
	c.t.Helper()
	identity, err := c.ca.Issue(name, role)
	if err != nil {
		c.t.Fatal(err)
	}
	return identity
}

// apply proposes on the leader and demands success.
func (c *cluster) apply(principal *apiv1.Principal, command *logv1.Command) *logv1.Result {
	c.t.Helper()
	command.Principal = principal
	c.mu.Lock()
	leader := c.leader
	c.mu.Unlock()
	result, err := leader.Propose(c.t.Context(), command)
	if err != nil {
		c.t.Fatal(err)
	}
	if result.Refusal != nil {
		c.t.Fatalf("refused: %v", result.Refusal)
	}
	return result
}

// token returns a token of node n1 for a user, to show to controllers.
func (c *cluster) token(uid uint32, name string) string {
	return c.tokenFor(nodev1.TokenAudience_TOKEN_AUDIENCE_CONTROLLERS, uid, name)
}

func (c *cluster) tokenFor(audience nodev1.TokenAudience, uid uint32, name string) string {
	c.t.Helper()
	now := time.Now()
	token, err := rpc.SignToken(&nodev1.UserToken{Uid: uid, Gid: 100, User: name, Node: "n1", Audience: audience, Issued: timestamppb.New(now),
		Expires: timestamppb.New(now.Add(time.Hour))}, c.issue("n1", pki.RoleNode).Certificate)
	if err != nil {
		c.t.Fatal(err)
	}
	return token
}

// user returns a client for a user at some of the controllers.
func (c *cluster) user(uid uint32, name string, at ...*fakeReplica) *client.Client {
	c.t.Helper()
	roots, err := rpc.Roots(c.ca.PEM())
	if err != nil {
		c.t.Fatal(err)
	}
	return c.direct(rpc.CheckingTLS(roots, rpc.RoleController, ""), c.token(uid, name), at...)
}

// agentOf returns a client with a node's certificate.
func (c *cluster) agentOf(name string, at ...*fakeReplica) *client.Client {
	c.t.Helper()
	return c.direct(c.issue(name, pki.RoleNode).ClientTLS(pki.RoleController, ""), "", at...)
}

func (c *cluster) direct(config *tls.Config, token string, at ...*fakeReplica) *client.Client {
	direct := client.Direct{TLS: config, Token: token, Timeout: 10 * time.Second}
	if len(at) == 0 {
		at = c.members
	}
	for _, r := range at {
		direct.Controllers = append(direct.Controllers, r.address)
	}
	d := client.OpenDirect(direct)
	c.t.Cleanup(d.Close)
	return d
}

// batch is a submission that is accepted.
func batch(name string) *apiv1.JobSubmission {
	return &apiv1.JobSubmission{Script: []byte("#!/bin/sh\necho " + name + "\n"), Spec: &apiv1.JobSpec{Name: name,
		Kind: apiv1.JobKind_JOB_KIND_BATCH, WorkDir: "/tmp", Resources: &apiv1.ResourceRequest{NodesMin: 1, Ntasks: 1, CpusPerTask: 1}}}
}

func submitOne(t testing.TB, c *client.Client, name string) uint32 {
	t.Helper()
	answer, err := c.Jobs().SubmitJobs(t.Context(), &apiv1.SubmitJobsRequest{RequestId: client.NewRequestID(),
		Jobs: []*apiv1.JobSubmission{batch(name)}})
	if err != nil {
		t.Fatalf("submit %s: %v", name, rpc.Sentence(err))
	}
	if refusal := answer.Results[0].Refusal; refusal != nil {
		t.Fatalf("submit %s: refused: %v", name, refusal)
	}
	return answer.Results[0].JobId
}

// join lets a node with 4 CPUs and 2 GPUs join and returns its number and epoch.
func (c *cluster) join(name string) (number, epoch uint32) {
	c.t.Helper()
	result := c.apply(memberPrincipal, &logv1.Command{Op: &logv1.Command_JoinNode{JoinNode: &logv1.JoinNode{
		Spec: nodeSpec(name), Instance: instance(name), TakesOver: true}}})
	return result.NodeNumber, result.NodeEpoch
}

func nodeSpec(name string) *apiv1.NodeSpec {
	return &apiv1.NodeSpec{Name: name, AgentAddress: name + ":7", TaskAddress: "10.0.0." + strings.TrimPrefix(name, "n"), Cpus: 4,
		MemoryMb: 4096, Gpus: []*apiv1.Gpu{{Index: 0, Type: "h100"}, {Index: 1, Type: "h100"}}, Sockets: 1, CoresPerSocket: 4, ThreadsPerCore: 1}
}

func instance(name string) *apiv1.Instance {
	return &apiv1.Instance{BootId: "boot-" + name, Nonce: "nonce-" + name}
}

// place gives a job one CPU of each node and returns the fence.
func (c *cluster) place(job uint32, nodes ...uint32) *apiv1.Fence {
	c.t.Helper()
	view := c.members[0].View()
	placement := &apiv1.Placement{Groups: []*apiv1.NodeGroup{{Nodes: nodes, CpuMask: []uint64{1}, MemoryMb: 16, Tasks: 1}}}
	for _, n := range nodes {
		placement.Epochs = append(placement.Epochs, view.Node(n).Epoch)
	}
	c.apply(memberPrincipal, &logv1.Command{DecidedInTerm: c.term, Op: &logv1.Command_Place{Place: &logv1.Place{JobId: job, Attempt: 1,
		PlacementNumber: 1, Placement: placement, Partition: "gpu"}}})
	return c.members[0].View().Attempt(job, 1).Fence
}
