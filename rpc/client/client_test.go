package client

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connecthttp"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/muster-hpc/muster/ops/pki"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/muster/api/v1/apiv1connect"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	"github.com/muster-hpc/muster/proto/muster/node/v1/nodev1connect"
	"github.com/muster-hpc/muster/rpc"
)

func TestSilentControllerIsHedged(t *testing.T) {
	s := newSite(t)
	c := s.client(s.paused(), s.start(&fake{name: "c2"}))
	began := time.Now()
	if _, err := submit(t, c); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took < HedgeAfter/2 || took > HedgeAfter+2*time.Second {
		t.Errorf("the answer took %s; the hedge is due after %s", took, HedgeAfter)
	}
	began = time.Now()
	if _, err := submit(t, c); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took > HedgeAfter/2 {
		t.Errorf("the next call took %s: it should begin with the controller that answered", took)
	}
}

func TestDeadControllerCostsNoWait(t *testing.T) {
	s := newSite(t)
	c := s.client(s.dead(), s.start(&fake{name: "c2"}))
	began := time.Now()
	if _, err := submit(t, c); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took > HedgeAfter/2 {
		t.Errorf("took %s", took)
	}
}

func TestHintOfAFollowerIsFollowed(t *testing.T) {
	s := newSite(t)
	leader := s.start(&fake{name: "leader"})
	hint := func(context.Context, func() *apiv1.SubmitJobsResponse) (*apiv1.SubmitJobsResponse, error) {
		return nil, rpc.WithDetail(connect.CodeFailedPrecondition, &apiv1.ErrorDetail{Reason: rpc.ReasonNotLeader, LeaderAddress: leader})
	}
	c := s.client(s.start(&fake{name: "c1", submit: hint}), s.start(&fake{name: "c2", submit: hint}))
	if _, err := submit(t, c); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(s.arrivals(), " "); got != "c1 leader" {
		t.Errorf("calls went to %s", got)
	}
	if c.Controllers()[0] != leader {
		t.Error("the leader is not preferred afterwards")
	}
}

func TestHintsThatGoInCirclesEnd(t *testing.T) {
	s := newSite(t)
	var a, b string
	hint := func(to *string) func(context.Context, func() *apiv1.SubmitJobsResponse) (*apiv1.SubmitJobsResponse, error) {
		return func(context.Context, func() *apiv1.SubmitJobsResponse) (*apiv1.SubmitJobsResponse, error) {
			return nil, rpc.WithDetail(connect.CodeFailedPrecondition, &apiv1.ErrorDetail{Reason: rpc.ReasonNotLeader, LeaderAddress: *to})
		}
	}
	a, b = s.start(&fake{name: "a", submit: hint(&b)}), s.start(&fake{name: "b", submit: hint(&a)})
	c := s.client(a, b)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if _, err := c.Jobs().SubmitJobs(ctx, &apiv1.SubmitJobsRequest{RequestId: NewRequestID()}); err == nil {
		t.Fatal("nobody leads, and yet there is an answer")
	}
	if n := len(s.arrivals()); n > 60 {
		t.Errorf("%d calls in a second: there is no back-off", n)
	}
}

func TestLostAnswerIsAskedForAgainWithTheSameRequest(t *testing.T) {
	s := newSite(t)
	var lost atomic.Int32
	f := &fake{name: "c1"}
	f.submit = func(_ context.Context, store func() *apiv1.SubmitJobsResponse) (*apiv1.SubmitJobsResponse, error) {
		answer := store()
		if lost.Add(1) <= 2 {
			panic(http.ErrAbortHandler) // stored, and the connection breaks
		}
		return answer, nil
	}
	c := s.client(s.start(f))
	answer, err := submit(t, c)
	if err != nil {
		t.Fatal(err)
	}
	if len(s.accepted) != 1 || answer.Results[0].JobId != 1 || len(s.received) != 3 {
		t.Errorf("%d jobs from %d tries, answer %v", len(s.accepted), len(s.received), answer)
	}
}

func TestRefusalIsFinal(t *testing.T) {
	s := newSite(t)
	refuse := func(context.Context, func() *apiv1.SubmitJobsResponse) (*apiv1.SubmitJobsResponse, error) {
		return nil, rpc.Refuse(connect.CodePermissionDenied, rpc.ReasonNotAllowed, "", "no")
	}
	c := s.client(s.start(&fake{name: "c1", submit: refuse}), s.start(&fake{name: "c2"}))
	_, err := submit(t, c)
	if rpc.Reason(err) != rpc.ReasonNotAllowed || connect.CodeOf(err) != connect.CodePermissionDenied || rpc.Sentence(err) != "no" {
		t.Errorf("got %v", err)
	}
	if n := len(s.arrivals()); n != 1 {
		t.Errorf("%d calls", n)
	}
}

func TestElectionIsWaitedOut(t *testing.T) {
	s := newSite(t)
	var calls atomic.Int32
	election := func(_ context.Context, store func() *apiv1.SubmitJobsResponse) (*apiv1.SubmitJobsResponse, error) {
		if calls.Add(1) <= 5 {
			return nil, rpc.Refuse(connect.CodeUnavailable, rpc.ReasonNoLeader, "", "no leader")
		}
		return store(), nil
	}
	c := s.client(s.start(&fake{name: "c1", submit: election}), s.start(&fake{name: "c2", submit: election}))
	if _, err := submit(t, c); err != nil {
		t.Fatal(err)
	}
}

func TestDeadlineNamesEverybodyAndWhatTheySaid(t *testing.T) {
	s := newSite(t)
	dead, paused := s.dead(), s.paused()
	busy := s.start(&fake{name: "c3", submit: func(context.Context, func() *apiv1.SubmitJobsResponse) (*apiv1.SubmitJobsResponse, error) {
		return nil, rpc.Refuse(connect.CodeUnavailable, rpc.ReasonNoLeader, "", "there is no leader here")
	}})
	c := s.client(dead, paused, busy)
	ctx, cancel := context.WithTimeout(t.Context(), 1200*time.Millisecond)
	defer cancel()
	began := time.Now()
	_, err := c.Jobs().SubmitJobs(ctx, &apiv1.SubmitJobsRequest{RequestId: NewRequestID()})
	if took := time.Since(began); took > 3*time.Second {
		t.Errorf("gave up after %s", took)
	}
	if connect.CodeOf(err) != connect.CodeUnavailable {
		t.Fatalf("got %v", err)
	}
	for _, part := range []string{"cluster test", dead, "refused", paused, "silence", busy, "there is no leader here"} {
		if !strings.Contains(rpc.Sentence(err), part) {
			t.Errorf("%q is missing in: %s", part, rpc.Sentence(err))
		}
	}
}

func TestCancelledCallEndsAtOnce(t *testing.T) {
	s := newSite(t)
	c := s.client(s.paused())
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(50*time.Millisecond, cancel)
	began := time.Now()
	if _, err := c.Jobs().GetJob(ctx, &apiv1.GetJobRequest{}); connect.CodeOf(err) != connect.CodeCanceled {
		t.Errorf("got %v", err)
	}
	if took := time.Since(began); took > time.Second {
		t.Errorf("took %s", took)
	}
}

func TestImpostorIsNamedAtOnce(t *testing.T) {
	s := newSite(t)
	other := newSite(t)
	c := s.client(other.start(&fake{name: "c1"}))
	began := time.Now()
	_, err := submit(t, c)
	if rpc.Reason(err) != "WRONG_PEER" {
		t.Errorf("got %v", err)
	}
	if took := time.Since(began); took > 2*time.Second {
		t.Errorf("took %s", took)
	}
	if len(other.arrivals()) != 0 {
		t.Error("the impostor got the request, and the token with it")
	}
}

func TestLongPollIsNotHedgedEarly(t *testing.T) {
	s := newSite(t)
	slow := func(ctx context.Context, _ *apiv1.GetStepRequest) (*apiv1.GetStepResponse, error) {
		select {
		case <-time.After(HedgeAfter + 300*time.Millisecond):
			return &apiv1.GetStepResponse{}, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	c := s.client(s.start(&fake{name: "c1", get: slow}), s.start(&fake{name: "c2", get: slow}))
	if _, err := c.Jobs().GetStep(t.Context(), &apiv1.GetStepRequest{WaitEndMs: 2000}); err != nil {
		t.Fatal(err)
	}
	if n := len(s.arrivals()); n != 1 {
		t.Errorf("%d controllers were asked", n)
	}
}

func TestLeaderHeaderMakesLaterCallsBeginThere(t *testing.T) {
	s := newSite(t)
	leader := s.start(&fake{name: "leader"})
	c := s.client(s.start(&fake{name: "c1", leader: leader}), leader)
	for range 2 {
		if _, err := submit(t, c); err != nil {
			t.Fatal(err)
		}
	}
	if got := strings.Join(s.arrivals(), " "); got != "c1 leader" {
		t.Errorf("calls went to %s", got)
	}
}

func TestStreamBeginsElsewhereIfAControllerIsSilent(t *testing.T) {
	s := newSite(t)
	c := s.client(s.paused(), s.start(&fake{name: "c2", watch: func(_ context.Context, stream apiv1connect.JobServiceWatchJobsServerStream) error {
		for i := range 3 {
			if err := stream.Send(&apiv1.WatchJobsResponse{Removed: []uint32{uint32(i)}}); err != nil {
				return err
			}
		}
		return rpc.Refuse(connect.CodeUnavailable, rpc.ReasonShuttingDown, "", "leaving")
	}}))
	stream, err := c.Jobs().WatchJobs(t.Context(), &apiv1.WatchJobsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	for i := range 3 {
		message, err := stream.Receive()
		if err != nil || message.Removed[0] != uint32(i) {
			t.Fatalf("message %d: %v, %v", i, message, err)
		}
	}
	if _, err := stream.Receive(); rpc.Reason(err) != rpc.ReasonShuttingDown {
		t.Errorf("the end of the stream: %v", err)
	}
}

func TestRefusedStreamIsFinal(t *testing.T) {
	s := newSite(t)
	c := s.client(s.start(&fake{name: "c1", watch: func(context.Context, apiv1connect.JobServiceWatchJobsServerStream) error {
		return rpc.Refuse(connect.CodeInvalidArgument, rpc.ReasonMalformed, "", "no")
	}}), s.start(&fake{name: "c2"}))
	stream, err := c.Jobs().WatchJobs(t.Context(), &apiv1.WatchJobsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	if _, err := stream.Receive(); rpc.Reason(err) != rpc.ReasonMalformed {
		t.Errorf("got %v", err)
	}
}

// agent vouches on a socket.
type agent struct {
	nodev1connect.UnimplementedVouchServiceHandler
	answer func(n int) (*nodev1.VouchResponse, error)
	asked  atomic.Int32
}

func (a *agent) Vouch(context.Context, *nodev1.VouchRequest) (*nodev1.VouchResponse, error) {
	return a.answer(int(a.asked.Add(1)))
}

func (s *site) agent(a *agent) string {
	s.t.Helper()
	path := filepath.Join(s.t.TempDir(), "agent.sock")
	s.agentAt(path, a)
	return path
}

// agentAt serves an agent on a socket.
func (s *site) agentAt(path string, a *agent) {
	s.t.Helper()
	services := connect.NewServer()
	nodev1connect.RegisterVouchServiceHandler(services, a)
	mux := http.NewServeMux()
	connecthttp.Mount(mux, services)
	listener, err := net.Listen("unix", path)
	if err != nil {
		s.t.Fatal(err)
	}
	server := &http.Server{Handler: mux}
	done := make(chan struct{})
	go func() { defer close(done); _ = server.Serve(listener) }()
	s.t.Cleanup(func() { server.Close(); <-done })
}

func TestExpiredTokenIsRenewedOnce(t *testing.T) {
	s := newSite(t)
	var tries atomic.Int32
	address := s.start(&fake{name: "c1", submit: func(_ context.Context, store func() *apiv1.SubmitJobsResponse) (*apiv1.SubmitJobsResponse, error) {
		if tries.Add(1) == 1 {
			return nil, rpc.Refuse(connect.CodeUnauthenticated, rpc.ReasonTokenExpired, "", "expired")
		}
		return store(), nil
	}})
	a := &agent{answer: func(n int) (*nodev1.VouchResponse, error) {
		return &nodev1.VouchResponse{Token: "token" + string(rune('0'+n)), Expires: timestamppb.New(time.Now().Add(time.Hour)),
			Controllers: []string{address}, CaPem: s.ca.PEM(), ClusterName: "test", Node: "n1"}, nil
	}}
	c, err := Open(t.Context(), Config{Socket: s.agent(a)})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if c.ClusterName() != "test" || c.NodeName() != "n1" {
		t.Errorf("cluster %q, node %q", c.ClusterName(), c.NodeName())
	}
	if _, err := submit(t, c); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(s.tokens, ", "); got != "Bearer token1, Bearer token2" {
		t.Errorf("tokens sent: %s", got)
	}
}

func TestTokenIsRenewedBeforeItExpires(t *testing.T) {
	s := newSite(t)
	address := s.start(&fake{name: "c1"})
	a := &agent{answer: func(n int) (*nodev1.VouchResponse, error) {
		left := time.Minute
		if n > 1 {
			left = time.Hour
		}
		return &nodev1.VouchResponse{Token: "token" + string(rune('0'+n)), Expires: timestamppb.New(time.Now().Add(left)),
			Controllers: []string{address}, CaPem: s.ca.PEM()}, nil
	}}
	c, err := Open(t.Context(), Config{Socket: s.agent(a)})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for range 2 {
		if _, err := submit(t, c); err != nil {
			t.Fatal(err)
		}
	}
	if got := strings.Join(s.tokens, ", "); got != "Bearer token2, Bearer token2" {
		t.Errorf("tokens sent: %s", got)
	}
}

// notedAgent notes the tokens that are shown to an agent.
type notedAgent struct {
	nodev1connect.UnimplementedNodeServiceHandler
	tokens []string
}

func (n *notedAgent) Status(ctx context.Context, _ *nodev1.StatusRequest) (*nodev1.StatusResponse, error) {
	if info, ok := connect.CallInfoForServerContext(ctx); ok {
		n.tokens = append(n.tokens, info.RequestHeader().Get("Authorization"))
	}
	return &nodev1.StatusResponse{}, nil
}

func TestEachSideSeesItsOwnTokenAlsoAfterRenewal(t *testing.T) {
	s := newSite(t)
	address := s.start(&fake{name: "c1"})
	noted := &notedAgent{}
	services := connect.NewServer()
	nodev1connect.RegisterNodeServiceHandler(services, noted)
	mux := http.NewServeMux()
	connecthttp.Mount(mux, services)
	node := httptest.NewUnstartedServer(mux)
	node.TLS = s.issue("n1", pki.RoleNode).ServerTLS()
	node.StartTLS()
	t.Cleanup(node.Close)
	a := &agent{answer: func(n int) (*nodev1.VouchResponse, error) {
		number, left := string(rune('0'+n)), time.Duration(n*n)*time.Hour
		return &nodev1.VouchResponse{Token: "token" + number, AgentToken: "agents" + number, Expires: timestamppb.New(time.Now().Add(left)),
			Controllers: []string{address}, CaPem: s.ca.PEM()}, nil
	}}
	c, err := Open(t.Context(), Config{Socket: s.agent(a)})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	call := func() {
		t.Helper()
		if _, err := c.Node(node.Listener.Addr().String()).Status(t.Context(), &nodev1.StatusRequest{}); err != nil {
			t.Fatal(err)
		}
		if _, err := submit(t, c); err != nil {
			t.Fatal(err)
		}
	}
	call()
	c.credentials.now = func() time.Time { return time.Now().Add(time.Hour) } // the first pair has just expired
	call()
	if got := strings.Join(s.tokens, ", "); got != "Bearer token1, Bearer token2" {
		t.Errorf("controllers saw %s", got)
	}
	if got := strings.Join(noted.tokens, ", "); got != "Bearer agents1, Bearer agents2" {
		t.Errorf("the agent saw %s", got)
	}
}

// TestAgentThatIsRestartedOrJoinsIsWaitedFor: first nobody listens, then the agent leaves, then it has not joined.
func TestAgentThatIsRestartedOrJoinsIsWaitedFor(t *testing.T) {
	for what, leave := range map[string]func(t *testing.T, path string){
		"a socket that is gone": func(t *testing.T, path string) {},
		"a socket that a killed agent left": func(t *testing.T, path string) {
			l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
			if err != nil {
				t.Fatal(err)
			}
			l.SetUnlinkOnClose(false)
			l.Close()
		},
	} {
		t.Run(what, func(t *testing.T) {
			s := newSite(t)
			s.t = t
			a := &agent{answer: func(n int) (*nodev1.VouchResponse, error) {
				switch n {
				case 1:
					return nil, rpc.Refuse(connect.CodeUnavailable, rpc.ReasonShuttingDown, "", "the agent is leaving")
				case 2:
					return &nodev1.VouchResponse{}, nil
				}
				return &nodev1.VouchResponse{Controllers: []string{"c1:1"}, CaPem: s.ca.PEM(), Expires: timestamppb.New(time.Now().Add(time.Hour))}, nil
			}}
			path := filepath.Join(t.TempDir(), "agent.sock")
			leave(t, path)
			began := time.Now()
			opened := make(chan error, 1)
			go func() {
				_, err := Open(t.Context(), Config{Socket: path, Timeout: 20 * time.Second})
				opened <- err
			}()
			select {
			case err := <-opened:
				t.Fatalf("gave up after %v: %v", time.Since(began), err)
			case <-time.After(200 * time.Millisecond): // it asks in vain
			}
			if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
				t.Fatal(err)
			}
			s.agentAt(path, a)
			if err := <-opened; err != nil {
				t.Errorf("after %v: %v", time.Since(began), err)
			}
			if asked := a.asked.Load(); asked != 3 {
				t.Errorf("asked %d times", asked)
			}
		})
	}
}

func TestAgentThatStaysAwayIsGivenUpInTime(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "none.sock")
	for _, c := range []struct {
		job     string
		timeout time.Duration
		least   time.Duration
		most    time.Duration
	}{
		{"", 20 * time.Second, noSocketPatience, noSocketPatience + 5*time.Second},
		{"7", 3 * time.Second, 2900 * time.Millisecond, 8 * time.Second}, // in a job the agent was there
	} {
		t.Setenv("SLURM_JOB_ID", c.job)
		if c.job == "" {
			os.Unsetenv("SLURM_JOB_ID")
		}
		began := time.Now()
		_, err := Open(t.Context(), Config{Socket: socket, Timeout: c.timeout})
		if took := time.Since(began); rpc.Reason(err) != "NO_AGENT" || took < c.least || took > c.most {
			t.Errorf("in job %q: %v after %v", c.job, err, took)
		}
	}
}

func TestMissingAgentIsExplained(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "none.sock")
	_, err := Open(t.Context(), Config{Socket: socket})
	for _, part := range []string{socket, "muster-agent", SocketVariable} {
		if !strings.Contains(rpc.Sentence(err), part) {
			t.Errorf("%q is missing in: %v", part, err)
		}
	}
}

func TestTimeoutFromTheEnvironment(t *testing.T) {
	for text, want := range map[string]time.Duration{"": DefaultTimeout, "7": 7 * time.Second, "1500ms": 1500 * time.Millisecond} {
		t.Setenv(TimeoutVariable, text)
		if got, err := timeoutOf(0); err != nil || got != want {
			t.Errorf("%q: %s, %v", text, got, err)
		}
	}
	t.Setenv(TimeoutVariable, "soon")
	if _, err := timeoutOf(0); err == nil || !strings.Contains(rpc.Sentence(err), "soon") {
		t.Errorf("nonsense: %v", err)
	}
}

func TestRequestIDsAreSortedByTimeAndDiffer(t *testing.T) {
	seen := map[string]bool{}
	before := time.Now().UnixMilli()
	for range 1000 {
		id := NewRequestID()
		if len(id) != 36 || id[14] != '7' || !strings.ContainsRune("89ab", rune(id[19])) || seen[id] {
			t.Fatalf("id %q", id)
		}
		seen[id] = true
	}
	var ms int64
	for _, c := range strings.ReplaceAll(NewRequestID(), "-", "")[:12] {
		ms = ms<<4 | int64(strings.IndexRune("0123456789abcdef", c))
	}
	if ms < before || ms > time.Now().UnixMilli() {
		t.Errorf("the time in the id is %d; it is %d", ms, before)
	}
}
