package serve

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
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
	"google.golang.org/protobuf/types/known/timestamppb"
)

// stand is a Host whose steps the test writes.
type stand struct {
	mu      sync.Mutex
	changed chan struct{}
	steps   map[uint32]*Step
	input   []byte
	looked  chan struct{} // if set, closed once somebody has looked at a step twice: he has it and waits for its change
	looks   int
	sizes   [][2]uint32
	where   Place // of job 1, if it has an owner
}

func (s *stand) Step(job, attempt, step uint32) (Step, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if st := s.steps[step]; job == 1 && st != nil {
		if s.looks++; s.looks == 2 && s.looked != nil {
			close(s.looked)
		}
		return *st, true
	}
	return Step{}, false
}

func (s *stand) update(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *stand) Changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed
}

func (s *stand) Input(_ context.Context, _, _, step uint32, offset uint64, data []byte, end bool) (uint64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.steps[step].Over {
		return 0, ErrStepOver
	}
	s.input = append(s.input[:offset], data...)
	return uint64(len(s.input)), nil
}

func (s *stand) Place(job, _ uint32) (Place, bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.where, job == 1 && s.where.Owner != nil, nil
}

func (s *stand) Usage(_ uint32, step *uint32) ([]*nodev1.TaskUsage, bool) {
	return []*nodev1.TaskUsage{{StepId: *step, Rank: 1, UserMs: 10}}, true
}

func (s *stand) ResizeTerminal(_ context.Context, _, _, step, rows, columns uint32) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.steps[step].Over:
		return ErrStepOver
	case rows == 66:
		return fmt.Errorf("%w: an old supervisor", ErrNoTerminal)
	}
	s.sizes = append(s.sizes, [2]uint32{rows, columns})
	return nil
}

func (s *stand) Status() *nodev1.StatusResponse { return &nodev1.StatusResponse{Node: "n1"} }
func (s *stand) Settings() *apiv1.Settings      { return &apiv1.Settings{OperatorUids: []uint32{500}} }
func (s *stand) Cluster() (string, []string)    { return "test", []string{"c1:1", "c2:1"} }

// fixture is a stand behind a real TLS listener, with users who have real tokens.
type fixture struct {
	*stand
	t        *testing.T
	dir      string
	identity *pki.Identity
	url      string
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	ca, err := pki.NewCA("test")
	if err != nil {
		t.Fatal(err)
	}
	identity, err := ca.Issue("n1", pki.RoleNode)
	if err != nil {
		t.Fatal(err)
	}
	f := &fixture{stand: &stand{changed: make(chan struct{}), steps: map[uint32]*Step{}}, t: t, dir: t.TempDir(), identity: identity}
	log := slog.New(slog.DiscardHandler)
	guard := &rpc.Guard{Verifier: rpc.NewVerifier(identity.Roots, nodev1.TokenAudience_TOKEN_AUDIENCE_AGENTS, nil), Settings: f.Settings, Log: log}
	server := httptest.NewUnstartedServer(Handler(f, guard, log))
	server.TLS = identity.ServerTLS()
	server.EnableHTTP2 = true
	server.StartTLS()
	t.Cleanup(server.Close)
	f.url = server.URL
	return f
}

// as returns a client with the token of a user; uid 0xffffffff means none.
func (f *fixture) as(uid uint32) nodev1connect.NodeServiceClient {
	f.t.Helper()
	return f.with(nodev1.TokenAudience_TOKEN_AUDIENCE_AGENTS, uid)
}

func (f *fixture) with(audience nodev1.TokenAudience, uid uint32) nodev1connect.NodeServiceClient {
	f.t.Helper()
	transport := &http.Transport{TLSClientConfig: rpc.CheckingTLS(f.identity.Roots, rpc.RoleNode, "n1"), ForceAttemptHTTP2: true}
	f.t.Cleanup(transport.CloseIdleConnections)
	var with connect.ClientInterceptor = func(next connect.ClientFunc) connect.ClientFunc { return next }
	if uid != 0xffffffff {
		now := time.Now()
		token, err := rpc.SignToken(&nodev1.UserToken{Uid: uid, Gid: uid, User: "u", Node: "n1", Audience: audience, Issued: timestamppb.New(now),
			Expires: timestamppb.New(now.Add(time.Minute))}, f.identity.Certificate)
		if err != nil {
			f.t.Fatal(err)
		}
		with = func(next connect.ClientFunc) connect.ClientFunc {
			return func(ctx context.Context, spec connect.Spec) (connect.ClientStream, error) {
				ctx, info := connect.NewClientContext(ctx)
				info.RequestHeader().Set("Authorization", "Bearer "+token)
				return next(ctx, spec)
			}
		}
	}
	return nodev1connect.NewNodeServiceClient(connect.NewClient(connecthttp.NewTransport(&http.Client{Transport: transport}, f.url), with))
}

// step adds a step with two tasks of user 1000, whose spools are empty.
func (f *fixture) step(id uint32) {
	step := &Step{Attempt: 1, Owner: &apiv1.JobOwner{Uid: 1000, Gid: 1000, User: "eva"}}
	for rank := range uint32(2) {
		step.Tasks = append(step.Tasks, Task{Rank: rank, Stdout: Stream{f.path("out", rank), true}, Stderr: Stream{f.path("err", rank), true}})
	}
	f.update(func() { f.steps[id] = step })
}

func (f *fixture) path(kind string, rank uint32) string {
	return filepath.Join(f.dir, kind+string(rune('0'+rank)))
}

func (f *fixture) write(kind string, rank uint32, data string) {
	f.t.Helper()
	file, err := os.OpenFile(f.path(kind, rank), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		f.t.Fatal(err)
	}
	if _, err := file.WriteString(data); err != nil {
		f.t.Fatal(err)
	}
	if err := file.Close(); err != nil {
		f.t.Fatal(err)
	}
}

// got is everything that a stream brought.
type got struct {
	data    map[string]string
	ends    int
	exits   []*apiv1.TaskExit
	started bool
	err     error
}

func (f *fixture) read(ctx context.Context, c nodev1connect.NodeServiceClient, req *nodev1.ReadOutputRequest, each func(*nodev1.ReadOutputResponse)) got {
	g := got{data: map[string]string{}}
	stream, err := c.ReadOutput(ctx, req)
	if err != nil {
		g.err = err
		return g
	}
	for {
		res, err := stream.Receive()
		if errors.Is(err, io.EOF) {
			return g
		}
		if err != nil {
			g.err = err
			return g
		}
		if each != nil {
			each(res)
		}
		name := map[nodev1.OutputStream]string{nodev1.OutputStream_OUTPUT_STREAM_STDOUT: "out", nodev1.OutputStream_OUTPUT_STREAM_STDERR: "err"}[res.GetStream()]
		if len(res.GetData()) > 0 {
			g.data[name+string(rune('0'+res.GetRank()))] += string(res.GetData())
		}
		if res.GetEnd() {
			g.ends++
		}
		g.started = g.started || res.GetStarted()
		if res.GetExits() != nil {
			g.exits = res.GetExits()
		}
	}
}

func TestOutputIsFollowedFromItsFirstByteToTheExits(t *testing.T) {
	f := newFixture(t)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	done := make(chan got, 1)
	pieces := make(chan string, 100)
	go func() {
		done <- f.read(ctx, f.as(1000), &nodev1.ReadOutputRequest{JobId: 1, Follow: true, WaitMs: 10_000}, func(r *nodev1.ReadOutputResponse) {
			pieces <- string(r.GetData())
		})
	}()
	f.step(0)
	f.update(func() { f.steps[0].Started = true })
	if p := <-pieces; p != "" {
		t.Errorf("the first message brings %q; it should say that the tasks were started", p)
	}
	f.write("out", 0, "first\n")
	if p := <-pieces; p != "first\n" {
		t.Errorf("the next brings %q", p)
	}
	f.write("err", 1, "trouble\n")
	if p := <-pieces; p != "trouble\n" {
		t.Errorf("the next brings %q", p)
	}
	f.write("out", 1, strings.Repeat("x", 3*maxPiece))
	f.write("out", 0, "last")
	f.update(func() { f.steps[0].Over, f.steps[0].Exits = true, []*apiv1.TaskExit{{Count: 2, Code: 3}} })
	go func() {
		for range pieces {
		}
	}()
	g := <-done
	close(pieces)
	if g.err != nil || !g.started || g.ends != 4 || len(g.exits) != 1 || g.exits[0].GetCode() != 3 {
		t.Fatalf("the stream brought %+v", g.err)
	}
	if g.data["out0"] != "first\nlast" || g.data["err1"] != "trouble\n" || len(g.data["out1"]) != 3*maxPiece {
		t.Errorf("the output is %q, %q, %d bytes", g.data["out0"], g.data["err1"], len(g.data["out1"]))
	}
}

func TestAReaderWhoComesBeforeTheFilesAreNamedLosesNothing(t *testing.T) {
	for what, ranks := range map[string][]uint32{"everything": nil, "ranks": {0, 1}} {
		f := newFixture(t)
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		f.step(0)
		tasks := f.steps[0].Tasks
		f.update(func() { f.steps[0].Tasks = nil })
		f.looked = make(chan struct{})
		done := make(chan got, 1)
		go func() {
			done <- f.read(ctx, f.as(1000), &nodev1.ReadOutputRequest{JobId: 1, Follow: true, Ranks: ranks}, nil)
		}()
		<-f.looked // the reader has seen a step without files
		f.write("out", 0, "quick")
		f.update(func() {
			f.steps[0].Tasks, f.steps[0].Started, f.steps[0].Over, f.steps[0].Exits = tasks, true, true, []*apiv1.TaskExit{{Count: 2}}
		})
		if g := <-done; g.err != nil || g.data["out0"] != "quick" || g.ends != 4 || len(g.exits) != 1 {
			t.Errorf("reading %s brought %+v", what, g)
		}
	}
}

func TestTheEndOfATaskIsToldWhileOthersRun(t *testing.T) {
	f := newFixture(t)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	f.step(0)
	f.update(func() { f.steps[0].Started = true })
	told := make(chan []*apiv1.TaskExit, 10)
	done := make(chan got, 1)
	go func() {
		done <- f.read(ctx, f.as(1000), &nodev1.ReadOutputRequest{JobId: 1, Follow: true}, func(r *nodev1.ReadOutputResponse) {
			if len(r.GetEnded()) > 0 {
				told <- r.GetEnded()
			}
		})
	}()
	one, two := &apiv1.TaskExit{FirstRank: 1, Count: 1, Code: 3}, &apiv1.TaskExit{FirstRank: 0, Count: 1}
	f.update(func() { f.steps[0].Ended = []*apiv1.TaskExit{one} })
	if ends := <-told; len(ends) != 1 || ends[0].GetFirstRank() != 1 || ends[0].GetCode() != 3 {
		t.Errorf("first %v", ends)
	}
	f.update(func() { f.steps[0].Ended = []*apiv1.TaskExit{two, one} })
	if ends := <-told; len(ends) != 1 || ends[0].GetFirstRank() != 0 {
		t.Errorf("then %v", ends)
	}
	f.update(func() { f.steps[0].Over, f.steps[0].Exits = true, []*apiv1.TaskExit{two, one} })
	if g := <-done; g.err != nil || len(g.exits) != 2 {
		t.Errorf("it brought %+v", g)
	}
}

func TestOutputIsReadFromAnOffsetAndForChosenTasks(t *testing.T) {
	f := newFixture(t)
	f.step(0)
	f.write("out", 0, "0123456789")
	f.write("out", 1, "other")
	f.write("err", 0, "e")
	f.update(func() { f.steps[0].Started = true })
	out := nodev1.OutputStream_OUTPUT_STREAM_STDOUT
	g := f.read(t.Context(), f.as(1000), &nodev1.ReadOutputRequest{JobId: 1, Ranks: []uint32{0}, Stream: out,
		Offsets: []*nodev1.OutputOffset{{Rank: 0, Stream: out, Offset: 6}}}, nil)
	if g.err != nil || g.data["out0"] != "6789" || len(g.data) != 1 || g.ends != 0 {
		t.Errorf("it brought %+v", g)
	}
	g = f.read(t.Context(), f.as(1000), &nodev1.ReadOutputRequest{JobId: 1, Ranks: []uint32{5}}, nil)
	if connect.CodeOf(g.err) != connect.CodeInvalidArgument {
		t.Errorf("a rank that is not here gave %v", g.err)
	}
}

func TestOnlyOwnerAndOperatorsRead(t *testing.T) {
	f := newFixture(t)
	f.step(0)
	f.write("out", 0, "secret")
	for uid, want := range map[uint32]string{1000: "", 0: "", 500: "", 1001: ReasonNotOwner, 0xffffffff: rpc.ReasonUnauthenticated} {
		g := f.read(t.Context(), f.as(uid), &nodev1.ReadOutputRequest{JobId: 1}, nil)
		if rpc.Reason(g.err) != want || (g.data["out0"] == "secret") != (want == "") {
			t.Errorf("user %d got %q and %v", uid, g.data["out0"], g.err)
		}
		_, err := f.as(uid).WriteInput(t.Context(), &nodev1.WriteInputRequest{JobId: 1, Data: []byte("x")})
		if rpc.Reason(err) != want {
			t.Errorf("user %d may write: %v", uid, err)
		}
	}
}

func TestTokenForControllersIsRefusedByEveryProcedure(t *testing.T) {
	f := newFixture(t)
	f.step(0)
	f.write("out", 0, "secret")
	client := f.with(nodev1.TokenAudience_TOKEN_AUDIENCE_CONTROLLERS, 0)
	g := f.read(t.Context(), client, &nodev1.ReadOutputRequest{JobId: 1}, nil)
	_, write := client.WriteInput(t.Context(), &nodev1.WriteInputRequest{JobId: 1, Data: []byte("x")})
	_, status := client.Status(t.Context(), &nodev1.StatusRequest{})
	_, resize := client.ResizeTerminal(t.Context(), &nodev1.ResizeTerminalRequest{JobId: 1})
	_, put := client.PutFile(t.Context(), &nodev1.PutFileRequest{JobId: 1})
	_, usage := client.GetUsage(t.Context(), &nodev1.GetUsageRequest{JobId: 1})
	errs := map[string]error{
		"ReadOutput": g.err, "WriteInput": write, "Status": status, "ResizeTerminal": resize, "PutFile": put, "GetUsage": usage,
	}
	methods := nodev1.File_muster_node_v1_node_proto.Services().ByName("NodeService").Methods()
	if methods.Len() != len(errs) {
		t.Errorf("NodeService has %d procedures, %d are tested", methods.Len(), len(errs))
	}
	for procedure, err := range errs {
		if rpc.Reason(err) != rpc.ReasonUnauthenticated {
			t.Errorf("%s: %v", procedure, err)
		}
	}
}

func TestAStepThatIsNotThereIsSaidOrWaitedFor(t *testing.T) {
	f := newFixture(t)
	g := f.read(t.Context(), f.as(1000), &nodev1.ReadOutputRequest{JobId: 1, StepId: batchStep}, nil)
	if rpc.Reason(g.err) != ReasonStepUnknown || !strings.Contains(rpc.Sentence(g.err), "step batch of job 1") {
		t.Errorf("it gave %v", g.err)
	}
	g = f.read(t.Context(), f.as(1000), &nodev1.ReadOutputRequest{JobId: 1, WaitMs: 20}, nil)
	if rpc.Reason(g.err) != ReasonStepUnknown {
		t.Errorf("after waiting it gave %v", g.err)
	}
	if _, err := f.as(1000).WriteInput(t.Context(), &nodev1.WriteInputRequest{JobId: 9}); rpc.Reason(err) != ReasonStepUnknown {
		t.Errorf("input for it gave %v", err)
	}
}

func TestInputIsTakenUntilTheStepIsOver(t *testing.T) {
	f := newFixture(t)
	f.step(0)
	res, err := f.as(1000).WriteInput(t.Context(), &nodev1.WriteInputRequest{JobId: 1, Data: []byte("abc")})
	if err != nil || res.GetOffset() != 3 || string(f.input) != "abc" {
		t.Errorf("%d bytes were taken (%v)", res.GetOffset(), err)
	}
	if _, err := f.as(1000).WriteInput(t.Context(), &nodev1.WriteInputRequest{JobId: 1, Data: make([]byte, maxPiece+1)}); rpc.Reason(err) != rpc.ReasonTooLarge {
		t.Errorf("too large a piece gave %v", err)
	}
	f.update(func() { f.steps[0].Over = true })
	if _, err := f.as(1000).WriteInput(t.Context(), &nodev1.WriteInputRequest{JobId: 1, Data: []byte("d")}); rpc.Reason(err) != ReasonStepOver {
		t.Errorf("input after the end gave %v", err)
	}
}

func TestTerminalIsResizedByItsOwnerOnly(t *testing.T) {
	f := newFixture(t)
	f.step(0)
	resize := func(uid, rows, columns uint32) error {
		_, err := f.as(uid).ResizeTerminal(t.Context(), &nodev1.ResizeTerminalRequest{JobId: 1, Rows: rows, Columns: columns})
		return err
	}
	if err := resize(1000, 40, 120); err != nil || len(f.sizes) != 1 || f.sizes[0] != [2]uint32{40, 120} {
		t.Errorf("the sizes are %v (%v)", f.sizes, err)
	}
	for what, c := range map[string]struct {
		uid, rows, columns uint32
		reason             string
	}{
		"another user": {1001, 40, 120, ReasonNotOwner}, "no lines": {1000, 0, 120, ReasonNoTerminal}, "too many": {1000, 40, 70000, ReasonNoTerminal},
		"an old supervisor": {1000, 66, 120, ReasonNoTerminal},
	} {
		if err := resize(c.uid, c.rows, c.columns); rpc.Reason(err) != c.reason {
			t.Errorf("%s: %v", what, err)
		}
	}
	f.update(func() { f.steps[0].Over = true })
	if err := resize(1000, 40, 120); rpc.Reason(err) != ReasonStepOver || len(f.sizes) != 1 {
		t.Errorf("after the end: %v, sizes %v", err, f.sizes)
	}
}

func TestAFileThatTheUserNamedShowsOnlyWhatTheUserMayRead(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only an agent with root could show more")
	}
	f := newFixture(t)
	if err := os.Chmod(f.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for dir := f.dir; dir != "/"; dir = filepath.Dir(dir) { // test folders are closed to others
		if info, err := os.Stat(dir); err == nil && info.Mode().Perm()&0o001 == 0 {
			if err := os.Chmod(dir, info.Mode().Perm()|0o011); err != nil {
				t.Fatal(err)
			}
		}
	}
	secret, own, link := filepath.Join(f.dir, "secret"), filepath.Join(f.dir, "own"), filepath.Join(f.dir, "link")
	if err := errors.Join(os.WriteFile(secret, []byte("root's"), 0o600), os.WriteFile(own, []byte("mine"), 0o600), os.Chown(own, 1000, 1000),
		os.Symlink(secret, link)); err != nil {
		t.Fatal(err)
	}
	f.step(0)
	f.update(func() {
		f.steps[0].Tasks = []Task{{Rank: 0, Stdout: Stream{link, false}, Stderr: Stream{link, false}}}
		f.steps[0].Over = true
	})
	g := f.read(t.Context(), f.as(1000), &nodev1.ReadOutputRequest{JobId: 1}, nil)
	if rpc.Reason(g.err) != "OUTPUT_UNREADABLE" || g.data["out0"] != "" {
		t.Errorf("a link to a file of root showed %q (%v)", g.data["out0"], g.err)
	}
	f.update(func() { f.steps[0].Tasks[0].Stdout.Path, f.steps[0].Tasks[0].Stderr.Path = own, own })
	if g = f.read(t.Context(), f.as(1000), &nodev1.ReadOutputRequest{JobId: 1}, nil); g.data["out0"] != "mine" {
		t.Errorf("the user's own file showed %q (%v)", g.data["out0"], g.err)
	}
	if data, err := os.ReadFile(secret); err != nil || string(data) != "root's" {
		t.Errorf("afterwards the agent itself lacks rights: %v", err)
	}
	f.update(func() {
		f.steps[0].Tasks[0].Stdout.Path, f.steps[0].Tasks[0].Stderr.Path = os.DevNull, os.DevNull
	})
	if g = f.read(t.Context(), f.as(1000), &nodev1.ReadOutputRequest{JobId: 1}, nil); g.err != nil || len(g.data) != 0 {
		t.Errorf("/dev/null showed %+v", g)
	}
	f.update(func() {
		f.steps[0].Tasks[0].Stdout.Path, f.steps[0].Tasks[0].Stderr.Path = "/proc/self/maps", "/proc/self/maps"
	})
	if g = f.read(t.Context(), f.as(1000), &nodev1.ReadOutputRequest{JobId: 1}, nil); g.err != nil || len(g.data) != 0 {
		t.Errorf("/proc/self/maps showed the agent's memory: %v", g.err)
	}
}

func TestAUserIsWhomTheKernelSays(t *testing.T) {
	f := newFixture(t)
	path := filepath.Join(f.dir, "agent.sock")
	for range 2 { // the second takes the place of the first
		l, err := ListenLocal(path)
		if err != nil {
			t.Fatal(err)
		}
		protocols := new(http.Protocols)
		protocols.SetHTTP1(true)
		protocols.SetUnencryptedHTTP2(true)
		server := &http.Server{Handler: LocalHandler(f, "n1", f.identity.Certificate, f.identity.CAPEM, slog.New(slog.DiscardHandler)),
			ConnContext: KeepCredentials, Protocols: protocols}
		served := make(chan error, 1)
		go func() { served <- server.Serve(l) }()
		transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		}}
		client := nodev1connect.NewVouchServiceClient(connect.NewClient(connecthttp.NewTransport(&http.Client{Transport: transport}, "http://agent")))
		res, err := client.Vouch(t.Context(), &nodev1.VouchRequest{})
		if err != nil {
			t.Fatal(err)
		}
		for audience, text := range map[nodev1.TokenAudience]string{
			nodev1.TokenAudience_TOKEN_AUDIENCE_CONTROLLERS: res.GetToken(),
			nodev1.TokenAudience_TOKEN_AUDIENCE_AGENTS:      res.GetAgentToken(),
		} {
			token, err := rpc.VerifyToken(text, f.identity.Roots, audience, time.Now())
			if err != nil || token.GetUid() != uint32(os.Geteuid()) || token.GetNode() != "n1" {
				t.Errorf("the token for %v says %v (%v)", audience, token, err)
			}
		}
		if res.GetClusterName() != "test" || len(res.GetControllers()) != 2 || len(res.GetCaPem()) == 0 {
			t.Errorf("the answer is %v", res)
		}
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o666 {
			t.Errorf("the socket has mode %v (%v)", info.Mode(), err)
		}
		transport.CloseIdleConnections()
		if err := server.Close(); err != nil {
			t.Error(err)
		}
		<-served
	}
	if _, err := ListenLocal(filepath.Join(f.dir, strings.Repeat("x", 120))); err == nil || !strings.Contains(err.Error(), "--dir") {
		t.Errorf("too long a path gave %v", err)
	}
}

func TestWithoutTheKernelsWordNobodyIsVouchedFor(t *testing.T) {
	f := newFixture(t)
	server := httptest.NewServer(LocalHandler(f, "n1", f.identity.Certificate, nil, slog.New(slog.DiscardHandler))) // over TCP
	defer server.Close()
	client := nodev1connect.NewVouchServiceClient(connect.NewClient(connecthttp.NewTransport(http.DefaultClient, server.URL)))
	if _, err := client.Vouch(t.Context(), &nodev1.VouchRequest{}); rpc.Reason(err) != rpc.ReasonUnauthenticated {
		t.Errorf("it gave %v", err)
	}
}
