package client

import (
	"context"
	"crypto/tls"
	"log/slog"
	"time"

	"github.com/muster-hpc/muster/proto/muster/api/v1/apiv1connect"
	"github.com/muster-hpc/muster/proto/muster/node/v1/nodev1connect"
)

// Config says whom to ask and how long to wait. The zero value is what a command needs.
type Config struct {
	// Socket of the local agent. Empty: $MUSTER_AGENT_SOCKET, then DefaultSocket.
	Socket string
	// Timeout of each unary call whose context has no deadline. 0: $MUSTER_TIMEOUT (seconds or a Go duration), then
	// DefaultTimeout.
	Timeout time.Duration
	// Log gets a debug line for each retry. Nil: silent.
	Log *slog.Logger
}

// Direct says how to talk to controllers without an agent: agents and controllers use it with their certificate.
type Direct struct {
	// Controllers are API addresses, the presumed leader first.
	Controllers []string
	// TLS of the connections; nil means without encryption (tests).
	TLS *tls.Config
	// NodeTLS of the connections to agents; nil means without encryption (tests).
	NodeTLS *tls.Config
	// Token for the Authorization header; empty if the certificate says it all.
	Token string
	// Timeout as in Config.
	Timeout time.Duration
	// ClusterName and NodeName as the methods return them.
	ClusterName, NodeName string
	// Log as in Config.
	Log *slog.Logger
}

// DefaultSocket is where the agent of an installed node vouches for users.
const DefaultSocket = "/run/muster/agent.sock"

// Client talks to one cluster. It is safe for concurrent use.
type Client struct {
	jobs    apiv1connect.JobServiceClient
	cluster apiv1connect.ClusterServiceClient
}

// Open asks the local agent for a token and for the controllers. The error says what to do if there is no agent.
func Open(ctx context.Context, config Config) (*Client, error) { panic("skeleton") }

// OpenDirect makes a client without an agent. It makes no round trip.
func OpenDirect(direct Direct) *Client { panic("skeleton") }

// Jobs returns the job service; calls go to the leader where it is known.
func (c *Client) Jobs() apiv1connect.JobServiceClient { return c.jobs }

// Cluster returns the cluster service; calls go to the leader where it is known.
func (c *Client) Cluster() apiv1connect.ClusterServiceClient { return c.cluster }

// Agents returns the service for agents at one controller (host:port). Its calls are neither retried nor hedged, because
// Syncs are numbered: the agent decides itself when it turns to another controller.
func (c *Client) Agents(address string) nodev1connect.AgentServiceClient { panic("skeleton") }

// Node returns the service of the agent at address (host:port), with the same token. Its calls are neither retried nor
// hedged.
func (c *Client) Node(address string) nodev1connect.NodeServiceClient { panic("skeleton") }

// ClusterName returns the cluster's name as the agent gave it.
func (c *Client) ClusterName() string { panic("skeleton") }

// NodeName returns the name of the node whose agent vouched.
func (c *Client) NodeName() string { panic("skeleton") }

// Controllers returns the API addresses that are known, the presumed leader first.
func (c *Client) Controllers() []string { panic("skeleton") }

// Close closes idle connections.
func (c *Client) Close() {}
