package client

import (
	"context"
	"crypto/tls"
	"log/slog"
	"net/http"
	"os"
	"strconv"
	"time"

	"connectrpc.com/connect/v2"

	"github.com/muster-hpc/muster/proto/muster/api/v1/apiv1connect"
	"github.com/muster-hpc/muster/proto/muster/node/v1/nodev1connect"
	"github.com/muster-hpc/muster/rpc"
)

// Config says whom to ask and how long to wait. The zero value is what a command needs.
type Config struct {
	// Socket of the local agent. Empty: $MUSTER_AGENT_SOCKET, then DefaultSocket.
	Socket string
	// Timeout of each unary call whose context has no deadline. 0: $MUSTER_TIMEOUT (seconds or a Go duration), then
	// DefaultTimeout.
	Timeout time.Duration
	// Patient lets reads go on as long as writes do when no controller can answer now (none runs, or there is no quorum): for programs
	// that do something step by step. Without it such reads end within seconds, because somebody waits for the picture.
	Patient bool
	// Log gets a debug line for each retry. Nil: silent.
	Log *slog.Logger
}

// Direct says how to talk to controllers without an agent: agents and controllers use it with their certificate.
type Direct struct {
	// Controllers are API addresses, the presumed leader first.
	Controllers []string
	// TLS of the connections to controllers; nil means without encryption (tests).
	TLS *tls.Config
	// NodeTLS of the connections to agents; nil means without encryption (tests).
	NodeTLS *tls.Config
	// Token for the Authorization header of calls to controllers; empty if the certificate says it all.
	Token string
	// AgentToken is the one for calls to agents.
	AgentToken string
	// Timeout and Patient as in Config.
	Timeout time.Duration
	Patient bool
	// ClusterName and NodeName as the methods return them.
	ClusterName, NodeName string
	// Log as in Config.
	Log *slog.Logger
}

const (
	// DefaultSocket is where the agent of an installed node vouches for users.
	DefaultSocket = "/run/muster/agent.sock"
	// DefaultTimeout is how long a unary call goes on trying.
	DefaultTimeout = 30 * time.Second
	// HedgeAfter is the silence after which a call is sent to another controller as well.
	HedgeAfter = 750 * time.Millisecond
	// SocketVariable and TimeoutVariable are the environment variables that Config falls back to.
	SocketVariable  = "MUSTER_AGENT_SOCKET"
	TimeoutVariable = "MUSTER_TIMEOUT"
)

// Client talks to one cluster. It is safe for concurrent use.
type Client struct {
	balance     *balancer
	credentials *credentials
	jobs        apiv1connect.JobServiceClient
	cluster     apiv1connect.ClusterServiceClient
	controllers *http.Transport
	nodes       *http.Transport
	nodeScheme  string
	clusterName string
	nodeName    string
}

// Open asks the local agent for tokens and for the controllers: one round trip on a Unix socket. While the agent is being
// restarted or has not joined it goes on asking until ctx ends or, without a deadline of ctx, for config.Timeout. The error
// says what to do if there is no agent.
func Open(ctx context.Context, config Config) (*Client, error) {
	timeout, err := timeoutOf(config.Timeout)
	if err != nil {
		return nil, err
	}
	socket := config.Socket
	if socket == "" {
		socket = os.Getenv(SocketVariable)
	}
	if socket == "" {
		socket = DefaultSocket
	}
	voucher := &voucher{socket: socket, timeout: timeout}
	answer, err := voucher.insist(ctx)
	if err != nil {
		return nil, err
	}
	controllerTLS, nodeTLS, err := userTLS(answer.CaPem)
	if err != nil {
		return nil, rpc.Refuse(connect.CodeInternal, rpc.ReasonInternal, socket,
			"the agent's answer is not usable: "+err.Error())
	}
	c := build(Direct{
		Controllers: answer.Controllers,
		TLS:         controllerTLS,
		NodeTLS:     nodeTLS,
		Timeout:     timeout,
		Patient:     config.Patient,
		ClusterName: answer.ClusterName,
		NodeName:    answer.Node,
		Log:         config.Log,
	})
	c.credentials.voucher = voucher
	c.credentials.take(answer)
	return c, nil
}

// OpenDirect makes a client without an agent. It makes no round trip. A timeout that cannot be read from the
// environment counts as unset.
func OpenDirect(direct Direct) *Client {
	timeout, err := timeoutOf(direct.Timeout)
	if err != nil {
		timeout = DefaultTimeout
	}
	direct.Timeout = timeout
	c := build(direct)
	c.credentials.tokens = tokens{direct.Token, direct.AgentToken}
	return c
}

func build(direct Direct) *Client {
	log := direct.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	scheme, controllers := newTransport(direct.TLS)
	nodeScheme, nodes := newTransport(direct.NodeTLS)
	c := &Client{
		credentials: &credentials{now: time.Now},
		controllers: controllers,
		nodes:       nodes,
		nodeScheme:  nodeScheme,
		clusterName: direct.ClusterName,
		nodeName:    direct.NodeName,
	}
	c.balance = newBalancer(direct.Controllers, scheme, controllers, c.credentials, direct.Timeout, log)
	c.balance.cluster, c.balance.patient = direct.ClusterName, direct.Patient
	balanced := connect.NewClient(c.balance)
	c.jobs = apiv1connect.NewJobServiceClient(balanced)
	c.cluster = apiv1connect.NewClusterServiceClient(balanced)
	return c
}

// Jobs returns the job service; calls go to the leader where it is known.
func (c *Client) Jobs() apiv1connect.JobServiceClient { return c.jobs }

// Cluster returns the cluster service; calls go to the leader where it is known.
func (c *Client) Cluster() apiv1connect.ClusterServiceClient { return c.cluster }

// Agents returns the service for agents at one controller (host:port). Its calls are neither retried nor hedged, because
// Syncs are numbered: the agent decides itself when it turns to another controller.
func (c *Client) Agents(address string) nodev1connect.AgentServiceClient {
	return nodev1connect.NewAgentServiceClient(c.Peer(address))
}

// Peer returns a plain connection to one controller (host:port), without retries: controllers use it among themselves.
func (c *Client) Peer(address string) *connect.Client {
	return connect.NewClient(c.balance.direct(address))
}

// Node returns the service of the agent at address (host:port), with the token for agents. Its calls are neither retried nor
// hedged.
func (c *Client) Node(address string) nodev1connect.NodeServiceClient {
	return nodev1connect.NewNodeServiceClient(connect.NewClient(
		newWire(c.nodes, c.nodeScheme+"://"+address), c.credentials.interceptor()))
}

// ClusterName returns the cluster's name as the agent gave it.
func (c *Client) ClusterName() string { return c.clusterName }

// NodeName returns the name of the node whose agent vouched.
func (c *Client) NodeName() string { return c.nodeName }

// Controllers returns the API addresses that are known, the presumed leader first.
func (c *Client) Controllers() []string { return c.balance.addresses() }

// Close closes idle connections. Calls in flight go on.
func (c *Client) Close() {
	c.controllers.CloseIdleConnections()
	c.nodes.CloseIdleConnections()
}

func timeoutOf(given time.Duration) (time.Duration, error) {
	if given > 0 {
		return given, nil
	}
	text := os.Getenv(TimeoutVariable)
	if text == "" {
		return DefaultTimeout, nil
	}
	if seconds, err := strconv.Atoi(text); err == nil && seconds > 0 {
		return time.Duration(seconds) * time.Second, nil
	}
	d, err := time.ParseDuration(text)
	if err != nil || d <= 0 {
		return 0, rpc.Refuse(connect.CodeInvalidArgument, rpc.ReasonMalformed, TimeoutVariable,
			TimeoutVariable+" is “"+text+"”; it should be a number of seconds or a duration such as 90s or 2m")
	}
	return d, nil
}
