package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connecthttp"

	"github.com/muster-hpc/muster/ops/pki"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	"github.com/muster-hpc/muster/proto/muster/node/v1/nodev1connect"
	"github.com/muster-hpc/muster/rpc"
	"github.com/muster-hpc/muster/rpc/client"
)

var supervisor string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "muster-agent")
	if err != nil {
		panic(err)
	}
	supervisor = filepath.Join(dir, "muster-supervisor")
	if out, err := exec.Command("go", "build", "-o", supervisor, "../muster-supervisor").CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build the supervisor: %v\n%s", err, out)
		os.Exit(1)
	}
	code := m.Run()
	os.RemoveAll(dir)
	os.Exit(code)
}

// controller is a control plane of one, over real TLS: it gives leases, and each node what the test wants of it.
type controller struct {
	nodev1connect.UnimplementedAgentServiceHandler
	mu      sync.Mutex
	changed chan struct{}
	index   uint64
	desired map[string][]*nodev1.DesiredAttempt
	actual  map[string][]*nodev1.ActualAttempt
	joined  map[string]*nodev1.JoinRequest
	byNode  map[uint32]string
}

func (c *controller) change(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f()
	c.index++
	close(c.changed)
	c.changed = make(chan struct{})
}

func (c *controller) Join(ctx context.Context, req *nodev1.JoinRequest) (*nodev1.JoinResponse, error) {
	name := rpc.PrincipalOf(ctx).GetName()
	if name != req.GetSpec().GetName() {
		return nil, rpc.Refuse(connect.CodePermissionDenied, rpc.ReasonNotYourNode, name, "that is not your node")
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if old := c.joined[name]; old != nil && old.GetInstance().GetNonce() != req.GetInstance().GetNonce() {
		return nil, rpc.Refuse(connect.CodeAlreadyExists, "NODE_NAME_TAKEN", name, "another agent has the name "+name)
	}
	c.joined[name] = req
	number := uint32(len(c.joined))
	c.byNode[number] = name
	return &nodev1.JoinResponse{Number: number, Epoch: 1, ClusterName: "test", Settings: &apiv1.Settings{LeaseMs: 3000, FenceWindowMs: 1000},
		Revision: &apiv1.Revision{Index: c.index}}, nil
}

func (c *controller) Sync(ctx context.Context, req *nodev1.SyncRequest) (*nodev1.SyncResponse, error) {
	hold := time.After(time.Duration(req.GetHoldMs()) * time.Millisecond)
	var acknowledged uint64
	for _, r := range req.GetReports() {
		acknowledged = r.GetJournalId()
	}
	c.mu.Lock()
	name := c.byNode[req.GetNode()]
	c.actual[name] = req.GetActual()
	c.mu.Unlock()
	for {
		c.mu.Lock()
		res := &nodev1.SyncResponse{Revision: &apiv1.Revision{Index: c.index}, Acknowledged: acknowledged,
			Grant: &nodev1.Grant{Sequence: req.GetSequence(), LeaseMs: 3000, FenceWindowMs: 1000}}
		res.Unchanged = req.GetHolds() != nil && req.GetHolds().GetIndex() >= c.index
		if !res.Unchanged {
			res.Desired = c.desired[name]
		}
		changed := c.changed
		c.mu.Unlock()
		if !res.Unchanged || acknowledged > 0 {
			return res, nil
		}
		select {
		case <-changed:
		case <-hold:
			return res, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// site is a controller with a CA and directories for nodes.
type site struct {
	*controller
	t       *testing.T
	ca      *pki.CA
	dir     string
	address string
}

func newSite(t *testing.T) *site {
	t.Helper()
	ca, err := pki.NewCA("test")
	if err != nil {
		t.Fatal(err)
	}
	identity, err := ca.Issue("c1", pki.RoleController)
	if err != nil {
		t.Fatal(err)
	}
	s := &site{t: t, ca: ca, controller: &controller{changed: make(chan struct{}), index: 1, desired: map[string][]*nodev1.DesiredAttempt{},
		actual: map[string][]*nodev1.ActualAttempt{}, joined: map[string]*nodev1.JoinRequest{}, byNode: map[uint32]string{}}}
	if s.dir, err = os.MkdirTemp("", "site"); err != nil { // short: it holds sockets
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(s.dir) })
	guard := &rpc.Guard{Verifier: rpc.NewVerifier(identity.Roots, nodev1.TokenAudience_TOKEN_AUDIENCE_CONTROLLERS, nil), Log: discard()}
	server := connect.NewServer(guard.Interceptor())
	nodev1connect.RegisterAgentServiceHandler(server, s.controller)
	mux := http.NewServeMux()
	connecthttp.Mount(mux, server)
	listener := httptest.NewUnstartedServer(mux)
	listener.TLS, listener.EnableHTTP2 = identity.ServerTLS(), true
	listener.StartTLS()
	t.Cleanup(listener.Close)
	s.address = strings.TrimPrefix(listener.URL, "https://")
	return s
}

func (s *site) node(name string) declared {
	s.t.Helper()
	identity, err := s.ca.Issue(name, pki.RoleNode)
	if err != nil {
		s.t.Fatal(err)
	}
	dir := filepath.Join(s.dir, name)
	if err := identity.Save(filepath.Join(dir, "tls")); err != nil {
		s.t.Fatal(err)
	}
	return declared{Dir: dir, Name: name, Listen: "127.0.0.1:0", Controllers: []string{s.address}, CPUs: 64, Memory: "512G", GPUs: 8, GPUType: "H100", BootID: "boot-1"}
}

// agent runs the program; its stdout lines come through ready.
type agent struct {
	ready  chan string
	code   chan int
	stderr *strings.Builder
	stop   context.CancelFunc
}

func start(t *testing.T, args ...string) *agent {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	r, w := io.Pipe()
	a := &agent{ready: make(chan string, 1000), code: make(chan int, 1), stderr: new(strings.Builder), stop: cancel}
	go func() {
		lines := bufio.NewScanner(r)
		for lines.Scan() {
			a.ready <- lines.Text()
		}
		close(a.ready)
	}()
	go func() {
		code := runAgents(ctx, append(args, "--supervisor", supervisor, "--log-level", "error"), w, a.stderr)
		w.Close()
		a.code <- code
	}()
	t.Cleanup(func() { cancel(); <-a.ready })
	return a
}

func args(d declared) []string {
	return []string{"--dir", d.Dir, "--name", d.Name, "--listen", d.Listen, "--controllers", strings.Join(d.Controllers, ","),
		"--cpus", fmt.Sprint(d.CPUs), "--memory", d.Memory, "--gpus", fmt.Sprint(d.GPUs), "--gpu-type", d.GPUType, "--boot-id", d.BootID}
}

func TestAnAgentJoinsOverTLSAndItsSocketLeadsUsersToTheirOutput(t *testing.T) {
	s := newSite(t)
	d := s.node("n1")
	a := start(t, args(d)...)
	fields := strings.Fields(<-a.ready)
	if len(fields) != 3 || fields[0] != "ready" || fields[1] != "n1" {
		t.Fatalf("the agent said %q", fields)
	}
	spec := s.joined["n1"].GetSpec()
	if spec.GetCpus() != 64 || spec.GetMemoryMb() != 512<<10 || len(spec.GetGpus()) != 8 || spec.GetGpus()[7].GetType() != "h100" || !spec.GetDeclared() ||
		spec.GetAgentAddress() != fields[2] || spec.GetTaskAddress() != "127.0.0.1" {
		t.Errorf("it joined as %v", spec)
	}
	s.run(t, "n1", 5, "echo out; echo err >&2")

	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	user, err := client.Open(ctx, client.Config{Socket: filepath.Join(d.Dir, "agent.sock")})
	if err != nil {
		t.Fatal(err)
	}
	defer user.Close()
	if user.ClusterName() != "test" || user.NodeName() != "n1" {
		t.Errorf("the agent vouches for cluster %q, node %q", user.ClusterName(), user.NodeName())
	}
	stream, err := user.Node(fields[2]).ReadOutput(ctx, &nodev1.ReadOutputRequest{JobId: 5, Follow: true, WaitMs: 10_000})
	if err != nil {
		t.Fatal(err)
	}
	var text string
	var exits []*apiv1.TaskExit
	for {
		res, err := stream.Receive()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		text += string(res.GetData())
		exits = append(exits, res.GetExits()...)
	}
	if !strings.Contains(text, "out\n") || !strings.Contains(text, "err\n") || len(exits) != 1 || exits[0].GetCode() != 0 {
		t.Errorf("the step's output is %q, its exits %v", text, exits)
	}
	a.stop()
	if code := <-a.code; code != 0 {
		t.Errorf("told to leave, it ended with %d: %s", code, a.stderr)
	}
}

// run lets a node prepare and start a command as step 0 of a job.
func (s *site) run(t *testing.T, node string, job uint32, command string) {
	t.Helper()
	d := &nodev1.DesiredAttempt{
		Job: &apiv1.Job{Id: job, Spec: &apiv1.JobSpec{Kind: apiv1.JobKind_JOB_KIND_RUN, WorkDir: "/tmp"}, Status: &apiv1.JobStatus{},
			Owner: &apiv1.JobOwner{Uid: uint32(os.Getuid()), Gid: uint32(os.Getgid()), User: "me"}},
		Fence: &apiv1.Fence{Incarnation: 1, Attempt: 1, Placement: 1}, NodeList: node, Want: nodev1.WorkState_WORK_STATE_PREPARED, NumTasks: 1,
		Steps: []*nodev1.DesiredStep{{Want: nodev1.WorkState_WORK_STATE_PREPARED, Ranks: []uint32{0}, TasksPerNode: []uint32{1},
			Step: &apiv1.Step{JobId: job, NumTasks: 1, NodeList: node, Spec: &apiv1.StepSpec{Args: []string{"/bin/sh", "-c", command}, WorkDir: "/tmp"}}}},
	}
	s.change(func() { s.desired[node] = append(s.desired[node], d) })
	s.await(t, node, nodev1.WorkState_WORK_STATE_PREPARED)
	s.change(func() {
		d.Want, d.Steps[0].Want = nodev1.WorkState_WORK_STATE_RUNNING, nodev1.WorkState_WORK_STATE_RUNNING
	})
}

// await waits until the first step of the node's first attempt is that far.
func (s *site) await(t *testing.T, node string, state nodev1.WorkState) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; {
		s.mu.Lock()
		there := len(s.actual[node]) > 0 && len(s.actual[node][0].GetSteps()) > 0 && s.actual[node][0].GetSteps()[0].GetState() == state
		s.mu.Unlock()
		if there {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("the step on %s never was %s", node, state)
		}
		time.Sleep(5 * time.Millisecond) // what the controller saw has no channel
	}
}

func TestManyNodesLiveInOneProcess(t *testing.T) {
	s := newSite(t)
	const n = 20
	var nodes []declared
	for i := range n {
		nodes = append(nodes, s.node(fmt.Sprintf("n%d", i+1)))
	}
	text, err := json.Marshal(nodes)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(s.dir, "nodes.json")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	a := start(t, "--nodes", file)
	seen := map[string]bool{}
	for range n {
		seen[strings.Fields(<-a.ready)[1]] = true
	}
	if len(seen) != n {
		t.Errorf("%d nodes got ready", len(seen))
	}
	s.run(t, "n7", 1, "true")
	s.await(t, "n7", nodev1.WorkState_WORK_STATE_ENDED)
	a.stop()
	if code := <-a.code; code != 0 {
		t.Errorf("it ended with %d: %s", code, a.stderr)
	}
}

func TestASecondAgentInTheSameDirectoryIsRefused(t *testing.T) {
	s := newSite(t)
	d := s.node("n1")
	first := start(t, args(d)...)
	<-first.ready
	second := start(t, args(d)...)
	if code := <-second.code; code != 1 || !strings.Contains(second.stderr.String(), "another agent uses the directory") {
		t.Errorf("it ended with %d: %s", code, second.stderr)
	}
}

func TestMistakesInTheCommandLineAreSaid(t *testing.T) {
	s := newSite(t)
	d := s.node("n1")
	other := d
	other.Name = "n2"
	wild := d
	wild.Listen = "0.0.0.0:0"
	file := filepath.Join(s.dir, "nodes.json")
	if err := os.WriteFile(file, []byte(`[{"name": "n1", "dirr": "x"}]`), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args []string
		code int
		says string
	}{
		{[]string{"--name", "n1"}, 2, "--dir is needed"},
		{append(args(d), "extra"), 2, `unexpected argument "extra"`},
		{append(args(d), "--memory", "lots"), 2, `"lots" is not a size`},
		{append(args(d), "--listen", "here"), 2, "HOST:PORT"},
		{[]string{"--nodes", file}, 2, "dirr"},
		{[]string{"--nodes", file + ".no"}, 2, "nodes.json.no"},
		{args(other), 1, `certificate in ` + d.Dir},
		{args(wild), 1, "--advertise"},
	} {
		var stderr strings.Builder
		code := runAgents(t.Context(), append([]string{"--supervisor", supervisor, "--log-level", "error"}, c.args...), io.Discard, &stderr)
		if code != c.code || !strings.Contains(stderr.String(), c.says) {
			t.Errorf("%q: ended with %d and said %q", c.args, code, stderr.String())
		}
	}
	var stderr strings.Builder
	if code := runAgents(t.Context(), append(args(d), "--supervisor", "/no/such"), io.Discard, &stderr); code != 2 || !strings.Contains(stderr.String(), "/no/such") {
		t.Errorf("without a supervisor it ended with %d: %s", code, &stderr)
	}
}

func TestSizes(t *testing.T) {
	for text, want := range map[string]uint64{"": 0, "512G": 512 << 10, "1T": 1 << 20, "64000M": 64000, "4096": 4096, "2048k": 2} {
		if got, err := parseMB(text); err != nil || got != want {
			t.Errorf("%q is %d MiB (%v), want %d", text, got, err, want)
		}
	}
	for _, text := range []string{"x", "-1", "0", "1.5G", "G"} {
		if got, err := parseMB(text); err == nil {
			t.Errorf("%q is taken for %d MiB", text, got)
		}
	}
}

func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }
