package client

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"

	"connectrpc.com/connect/v2"

	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	"github.com/muster-hpc/muster/proto/muster/node/v1/nodev1connect"
	"github.com/muster-hpc/muster/rpc"
)

// Bounds of vouching; rows of docs/limits.md.
const (
	// vouchTimeout is how long the local agent may take.
	vouchTimeout = 5 * time.Second
	// renewBefore is how long before its expiry a token is renewed.
	renewBefore = 5 * time.Minute
)

// userTLS returns the configurations for controllers and for agents.
func userTLS(caPEM []byte) (controllers, nodes *tls.Config, err error) {
	roots, err := rpc.Roots(caPEM)
	if err != nil {
		return nil, nil, err
	}
	return rpc.CheckingTLS(roots, rpc.RoleController, ""), rpc.CheckingTLS(roots, rpc.RoleNode, ""), nil
}

// voucher asks the local agent who we are.
type voucher struct{ socket string }

func (v *voucher) vouch(ctx context.Context) (*nodev1.VouchResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, vouchTimeout)
	defer cancel()
	transport := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", v.socket)
		},
		DisableCompression: true,
		DisableKeepAlives:  true,
	}
	defer transport.CloseIdleConnections()
	service := nodev1connect.NewVouchServiceClient(connect.NewClient(newWire(transport, "http://agent")))
	answer, err := service.Vouch(ctx, &nodev1.VouchRequest{})
	if err != nil {
		if rpc.Detail(err) != nil {
			return nil, rpc.Local(err)
		}
		return nil, rpc.Refuse(connect.CodeUnavailable, "NO_AGENT", v.socket, fmt.Sprintf(
			"cannot ask the agent of this node who you are (%s: %s): is muster-agent running here? For another socket set %s",
			v.socket, rpc.Sentence(err), SocketVariable))
	}
	if len(answer.Controllers) == 0 {
		return nil, rpc.Refuse(connect.CodeUnavailable, "NO_CONTROLLERS", v.socket,
			"the agent of this node knows no controllers: it has not joined the cluster yet; see its log")
	}
	return answer, nil
}

// tokens are what one vouching gives, or one that was given directly.
type tokens struct{ controllers, agents string }

// credentials are the tokens, renewed together in time. A nil voucher means that they cannot be renewed.
type credentials struct {
	voucher *voucher
	now     func() time.Time

	mu      sync.Mutex
	tokens  tokens
	expires time.Time
}

func (c *credentials) take(answer *nodev1.VouchResponse) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.tokens, c.expires = tokens{answer.Token, answer.AgentToken}, answer.Expires.AsTime()
}

// current returns the tokens to choose from; they may be empty. If those at hand are about to expire they are renewed
// first; if that fails they are sent as they are, and the other side decides.
func (c *credentials) current(ctx context.Context) tokens {
	c.mu.Lock()
	at := c.tokens
	due := c.voucher != nil && c.now().After(c.expires.Add(-renewBefore))
	c.mu.Unlock()
	if due && c.renew(ctx, at) == nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.tokens
	}
	return at
}

// renew gets new tokens unless another call did so since old were current.
func (c *credentials) renew(ctx context.Context, old tokens) error {
	if c.voucher == nil {
		return fmt.Errorf("the token cannot be renewed")
	}
	c.mu.Lock()
	changed := c.tokens != old
	c.mu.Unlock()
	if changed {
		return nil
	}
	answer, err := c.voucher.vouch(ctx)
	if err != nil {
		return err
	}
	c.take(answer)
	return nil
}

// interceptor adds the token for agents to calls to them, which are not balanced.
func (c *credentials) interceptor() connect.ClientInterceptor {
	return func(next connect.ClientFunc) connect.ClientFunc {
		return func(ctx context.Context, spec connect.Spec) (connect.ClientStream, error) {
			if info, ok := connect.CallInfoForClientContext(ctx); ok {
				authorize(info, c.current(ctx).agents)
			}
			return next(ctx, spec)
		}
	}
}

func authorize(info *connect.CallInfo, token string) {
	if token != "" {
		info.RequestHeader().Set("Authorization", "Bearer "+token)
	}
}
