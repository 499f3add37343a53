package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connecthttp"

	"github.com/muster-hpc/muster/fsm"
	"github.com/muster-hpc/muster/fsm/replica"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/muster/api/v1/apiv1connect"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	"github.com/muster-hpc/muster/proto/muster/node/v1/nodev1connect"
	peerv1 "github.com/muster-hpc/muster/proto/muster/peer/v1"
	"github.com/muster-hpc/muster/proto/muster/peer/v1/peerv1connect"
	"github.com/muster-hpc/muster/rpc"
	"github.com/muster-hpc/muster/rpc/client"
)

// Replica is the part of a Raft member that handlers need. *replica.Replica is one; its documentation says what the
// methods do.
type Replica interface {
	ID() string
	Propose(context.Context, *logv1.Command) (*logv1.Result, error)
	View() *fsm.View
	Changed() <-chan struct{}
	ReadIndex(context.Context) (uint64, error)
	WaitIndex(context.Context, uint64) (*fsm.View, error)
	Leader() replica.Leader
	LeaderChanged() <-chan struct{}
	Servers() []replica.Server
	AddLearner(ctx context.Context, id, address string) error
	Promote(ctx context.Context, id string) error
	Remove(ctx context.Context, id string) error
	Transfer(ctx context.Context, id string) error
	DigestAt(index uint64) (uint64, bool)
	Quarantine(reason string)
	Quarantined() string
	DiskFull() bool
}

// Control is the part of the leader's hands that handlers need. On a follower its methods return Config.ErrNotLeading.
type Control interface {
	ReportLiveness(context.Context, []*peerv1.Beat) (*peerv1.ReportLivenessResponse, error)
	JoinNode(context.Context, *peerv1.JoinNodeRequest) (*nodev1.JoinResponse, error)
	Status() *apiv1.SchedulerStatus
	Silent() []*apiv1.SilentNode
}

// Faults are bugs that tests plant to prove that they would be noticed.
type Faults struct {
	// AnswerBelowSeen answers a Sync from a state below what the agent has seen.
	AnswerBelowSeen bool
	// GrantUncommitted passes a grant on before the leader's entry is applied here.
	GrantUncommitted bool
}

// Config describes a server.
type Config struct {
	// Replica is this controller's Raft member.
	Replica Replica
	// Control is this controller's scheduler.
	Control Control
	// ErrNotLeading is what Control returns on a follower.
	ErrNotLeading error
	// Self has this controller's name, raft_address, api_address, supported_level and version.
	Self *apiv1.Member
	// Peers connects to the other controllers.
	Peers *Peers
	// Verifier checks users' tokens.
	Verifier *rpc.Verifier
	// Log takes the log.
	Log *slog.Logger
	// Faults plants bugs.
	Faults Faults
}

// Server answers the calls of one controller.
type Server struct {
	replica       Replica
	control       Control
	errNotLeading error
	self          *apiv1.Member
	peers         *Peers
	log           *slog.Logger
	faults        Faults

	guard    *rpc.Guard
	handler  http.Handler
	reads    *readBatcher
	liveness *livenessBatcher
	hub      *hub
	sessions *sessions
	gangs    *gangs
	hooks    chan struct{} // one token for each submission program that may run

	caughtUp atomic.Bool // a read has been linearizable since the start
	blocked  atomic.Pointer[string]
	noQuorum atomic.Pointer[string] // why there is no leader, if too few controllers are there

	// background owns what calls leave behind; Run waits for it.
	background sync.WaitGroup
	lifetime   context.Context
	end        context.CancelFunc
	draining   chan struct{}
	drainOnce  sync.Once
}

// New makes a server. Nothing runs until Run.
func New(config Config) *Server {
	log := config.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	s := &Server{
		replica:       config.Replica,
		control:       config.Control,
		errNotLeading: config.ErrNotLeading,
		self:          config.Self,
		peers:         config.Peers,
		log:           log,
		faults:        config.Faults,
		hub:           newHub(config.Replica),
		sessions:      newSessions(),
		gangs:         newGangs(),
		hooks:         make(chan struct{}, maxHooks),
		draining:      make(chan struct{}),
	}
	s.lifetime, s.end = context.WithCancel(context.Background())
	s.reads = &readBatcher{server: s}
	s.liveness = &livenessBatcher{server: s}
	s.guard = &rpc.Guard{
		Verifier: config.Verifier,
		Settings: func() *apiv1.Settings { return s.replica.View().Settings() },
		Refuse:   s.refuse,
		Log:      log,
	}
	s.handler = s.routes()
	return s
}

// Handler serves Connect, gRPC, gRPC-Web and JSON for all services, and /healthz and /readyz.
func (s *Server) Handler() http.Handler { return s.handler }

func (s *Server) routes() http.Handler {
	services := connect.NewServer(s.guard.Interceptor(), s.nameLeader)
	apiv1connect.RegisterJobServiceHandler(services, jobService{s})
	apiv1connect.RegisterClusterServiceHandler(services, clusterService{s})
	nodev1connect.RegisterAgentServiceHandler(services, agentService{s})
	peerv1connect.RegisterPeerServiceHandler(services, peerService{s})
	s.registerHealth(services)
	mux := http.NewServeMux()
	connecthttp.Mount(mux, services,
		connecthttp.WithReadMaxBytes(rpc.MaxRequestBytes),
		connecthttp.WithCompressMinBytes(compressMinBytes))
	mux.HandleFunc("GET /healthz", s.healthz)
	mux.HandleFunc("GET /readyz", s.readyz)
	return mux
}

// Run does what goes on besides calls: it wakes long polls, and announces this controller once it belongs to a cluster.
// It returns when ctx ends and everything that calls have started has ended.
func (s *Server) Run(ctx context.Context) error {
	var group sync.WaitGroup
	group.Go(func() { s.hub.run(ctx) })
	group.Go(func() { s.announce(ctx) })
	group.Go(func() { s.watchQuorum(ctx) })
	<-ctx.Done()
	s.Drain()
	s.end()
	group.Wait()
	s.background.Wait()
	return nil
}

// Drain ends long polls and streams, so that their callers turn to other controllers. Other calls go on being answered.
// It is called before the controller leaves.
func (s *Server) Drain() { s.drainOnce.Do(func() { close(s.draining) }) }

// Block makes this controller, while it leads, propose nothing that others ask for; an empty sentence ends that. The
// scheduler calls it when the controllers' states differ and no majority agrees.
func (s *Server) Block(sentence string) {
	if sentence == "" {
		s.blocked.Store(nil)
		return
	}
	s.blocked.Store(&sentence)
}

// apply proposes on this controller's member.
func (s *Server) apply(ctx context.Context, command *logv1.Command) (*logv1.Result, error) {
	if why := s.blocked.Load(); why != nil && s.replica.Leader().IsSelf {
		return nil, rpc.Refuse(connect.CodeFailedPrecondition, "STATES_DIFFER", "controller "+s.self.GetName(),
			"nothing is stored until an operator has looked at the controllers: "+*why)
	}
	return s.replica.Propose(ctx, command)
}

// refuse keeps a quarantined controller from answering anybody; its peers may ask how it is, and tell it.
func (s *Server) refuse(procedure string) error {
	reason := s.replica.Quarantined()
	if reason == "" {
		return nil
	}
	switch procedure {
	case peerv1connect.PeerServiceStatusProcedure, peerv1connect.PeerServiceDigestProcedure,
		peerv1connect.PeerServiceQuarantineProcedure, rpc.HealthCheckProcedure:
		return nil
	}
	return rpc.Refuse(connect.CodeUnavailable, rpc.ReasonQuarantined, "controller "+s.self.GetName(),
		fmt.Sprintf("controller %s does not serve: %s", s.self.GetName(), reason))
}

// nameLeader lets clients begin with the leader next time.
func (s *Server) nameLeader(next connect.ServerFunc) connect.ServerFunc {
	return func(ctx context.Context, spec connect.Spec, stream connect.ServerStream) error {
		if rpc.PrincipalOf(ctx).Kind != apiv1.PrincipalKind_PRINCIPAL_KIND_MEMBER {
			if info, ok := connect.CallInfoForServerContext(ctx); ok {
				if address := s.leaderAddress(); address != "" {
					info.ResponseHeader().Set(rpc.LeaderHeader, address)
				}
			}
		}
		return next(ctx, spec, stream)
	}
}

// leaderAddress returns the API address of the leader as far as the state here tells it, or "".
func (s *Server) leaderAddress() string {
	leader := s.replica.Leader()
	if leader.IsSelf {
		return s.self.GetApiAddress()
	}
	return s.peers.announced(leader.ID)
}

// NewHTTPServer returns the server for the one port: HTTP/1.1 and HTTP/2, without TLS too if there is none. The caller
// sets TLSConfig, serves and shuts down.
func NewHTTPServer(handler http.Handler, log *slog.Logger) *http.Server {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	protocols.SetUnencryptedHTTP2(true)
	return &http.Server{
		Handler:           handler,
		Protocols:         protocols,
		ReadHeaderTimeout: readHeaderTimeout,
		IdleTimeout:       idleTimeout,
		HTTP2:             &http.HTTP2Config{MaxConcurrentStreams: maxConcurrentStreams},
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
}

// deadline gives a call that has none the default.
func deadline(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, client.DefaultTimeout)
}

// pause waits for a moment, or until a channel is closed, or the call ends.
func pause(ctx context.Context, d time.Duration, early <-chan struct{}) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-early:
	case <-ctx.Done():
		return ctx.Err()
	}
	return nil
}

func isContext(err error) bool {
	return errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}
