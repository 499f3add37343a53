package client

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connecthttp"

	"github.com/muster-hpc/muster/ops/pki"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/muster/api/v1/apiv1connect"
	"github.com/muster-hpc/muster/rpc"
)

// site is a CA with fake controllers that share one memory of requests.
type site struct {
	t  *testing.T
	ca *pki.CA

	mu       sync.Mutex
	accepted map[string]uint32 // job id by request id
	calls    []string          // controller names in order of arrival
	tokens   []string
	received []string // request ids in order of arrival
}

func newSite(t *testing.T) *site {
	ca, err := pki.NewCA("test")
	if err != nil {
		t.Fatal(err)
	}
	return &site{t: t, ca: ca, accepted: map[string]uint32{}}
}

func (s *site) issue(name string, role pki.Role) *pki.Identity {
	s.t.Helper()
	identity, err := s.ca.Issue(name, role)
	if err != nil {
		s.t.Fatal(err)
	}
	return identity
}

func (s *site) arrivals() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.calls)
}

// fake is one controller. A nil function means the usual answer.
type fake struct {
	apiv1connect.UnimplementedJobServiceHandler
	site   *site
	name   string
	submit func(ctx context.Context, store func() *apiv1.SubmitJobsResponse) (*apiv1.SubmitJobsResponse, error)
	get    func(context.Context, *apiv1.GetStepRequest) (*apiv1.GetStepResponse, error)
	watch  func(context.Context, apiv1connect.JobServiceWatchJobsServerStream) error
	leader string
}

func (f *fake) note(ctx context.Context) {
	f.site.mu.Lock()
	defer f.site.mu.Unlock()
	f.site.calls = append(f.site.calls, f.name)
	if info, ok := connect.CallInfoForServerContext(ctx); ok {
		f.site.tokens = append(f.site.tokens, info.RequestHeader().Get("Authorization"))
		if f.leader != "" {
			info.ResponseHeader().Set(rpc.LeaderHeader, f.leader)
		}
	}
}

func (f *fake) SubmitJobs(ctx context.Context, request *apiv1.SubmitJobsRequest) (*apiv1.SubmitJobsResponse, error) {
	f.note(ctx)
	store := func() *apiv1.SubmitJobsResponse {
		f.site.mu.Lock()
		defer f.site.mu.Unlock()
		f.site.received = append(f.site.received, request.RequestId)
		id, ok := f.site.accepted[request.RequestId]
		if !ok {
			id = uint32(len(f.site.accepted) + 1)
			f.site.accepted[request.RequestId] = id
		}
		return &apiv1.SubmitJobsResponse{Results: []*apiv1.SubmitResult{{JobId: id}}}
	}
	if f.submit != nil {
		return f.submit(ctx, store)
	}
	return store(), nil
}

func (f *fake) GetStep(ctx context.Context, request *apiv1.GetStepRequest) (*apiv1.GetStepResponse, error) {
	f.note(ctx)
	return f.get(ctx, request)
}

func (f *fake) WatchJobs(ctx context.Context, _ *apiv1.WatchJobsRequest, stream apiv1connect.JobServiceWatchJobsServerStream) error {
	f.note(ctx)
	return f.watch(ctx, stream)
}

// start serves the fake and returns its address.
func (s *site) start(f *fake) string { return s.startAt(f, "127.0.0.1:0") }

// startAt is start at a given address.
func (s *site) startAt(f *fake, address string) string {
	s.t.Helper()
	f.site = s
	services := connect.NewServer()
	apiv1connect.RegisterJobServiceHandler(services, f)
	mux := http.NewServeMux()
	connecthttp.Mount(mux, services, connecthttp.WithReadMaxBytes(rpc.MaxRequestBytes))
	listener, err := net.Listen("tcp", address)
	if err != nil {
		s.t.Fatal(err)
	}
	server := httptest.NewUnstartedServer(mux)
	if err := server.Listener.Close(); err != nil {
		s.t.Fatal(err)
	}
	server.Listener = listener
	server.TLS = s.issue(f.name, pki.RoleController).ServerTLS()
	server.EnableHTTP2 = true
	server.StartTLS()
	s.t.Cleanup(server.Close)
	return server.Listener.Addr().String()
}

// paused returns the address of a controller that is stopped: the kernel still accepts connections for it.
func (s *site) paused() string {
	s.t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { listener.Close() })
	return listener.Addr().String()
}

// dead returns an address at which nobody listens.
func (s *site) dead() string {
	s.t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		s.t.Fatal(err)
	}
	address := listener.Addr().String()
	listener.Close()
	return address
}

func (s *site) client(addresses ...string) *Client {
	s.t.Helper()
	return s.clientWith(Direct{Controllers: addresses, Timeout: 10 * time.Second})
}

func (s *site) clientWith(direct Direct) *Client {
	s.t.Helper()
	roots, err := rpc.Roots(s.ca.PEM())
	if err != nil {
		s.t.Fatal(err)
	}
	direct.TLS, direct.Token, direct.ClusterName = rpc.CheckingTLS(roots, rpc.RoleController, ""), "t0", "test"
	c := OpenDirect(direct)
	s.t.Cleanup(c.Close)
	return c
}

func submit(t *testing.T, c *Client) (*apiv1.SubmitJobsResponse, error) {
	t.Helper()
	return c.Jobs().SubmitJobs(t.Context(), &apiv1.SubmitJobsRequest{RequestId: NewRequestID(), Jobs: []*apiv1.JobSubmission{{}}})
}
