package client

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
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
	// firstVouchPause is the pause before the agent is asked again, doubled up to maxVouchPause.
	firstVouchPause = 25 * time.Millisecond
	maxVouchPause   = 500 * time.Millisecond
	// noSocketPatience is how long a missing socket is waited for outside of jobs: there the path is likely wrong.
	noSocketPatience = 2 * time.Second
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
type voucher struct {
	socket string
	// timeout is how long insist goes on if its context has no deadline.
	timeout time.Duration
}

// insist asks until there is an answer or ctx ends: an agent that is being restarted comes back, and one that was just
// started joins. The error is that of the last try. Outside of jobs a socket that never appears is not waited for long.
func (v *voucher) insist(ctx context.Context) (*nodev1.VouchResponse, error) {
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, v.timeout)
		defer cancel()
	}
	began := time.Now()
	_, inJob := os.LookupEnv("SLURM_JOB_ID")
	missing := !inJob // until now
	for pause := firstVouchPause; ; pause = min(2*pause, maxVouchPause) {
		answer, later, err := v.ask(ctx)
		missing = missing && v.missing()
		if err == nil || !later || missing && time.Since(began) >= noSocketPatience {
			return answer, err
		}
		timer := time.NewTimer(pause/2 + rand.N(pause/2+1))
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil, err
		case <-timer.C:
		}
	}
}

// missing reports whether there is no file at the socket's path.
func (v *voucher) missing() bool {
	_, err := os.Lstat(v.socket)
	return errors.Is(err, fs.ErrNotExist)
}

// vouch asks once.
func (v *voucher) vouch(ctx context.Context) (*nodev1.VouchResponse, error) {
	answer, _, err := v.ask(ctx)
	return answer, err
}

// ask asks once. If there is no answer, later says whether the agent may give one later: it is away, leaving, or has not
// joined.
func (v *voucher) ask(ctx context.Context) (_ *nodev1.VouchResponse, later bool, _ error) {
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
		later = judge(err) == again && !errors.Is(err, fs.ErrPermission)
		if rpc.Detail(err) != nil {
			return nil, later, rpc.Local(err)
		}
		return nil, later, rpc.Refuse(connect.CodeUnavailable, "NO_AGENT", v.socket, fmt.Sprintf(
			"cannot ask the agent of this node who you are (%s: %s): is muster-agent running here? For another socket set %s",
			v.socket, rpc.Sentence(err), SocketVariable))
	}
	if len(answer.Controllers) == 0 {
		return nil, true, rpc.Refuse(connect.CodeUnavailable, "NO_CONTROLLERS", v.socket,
			"the agent of this node knows no controllers: it has not joined the cluster yet; see its log")
	}
	return answer, false, nil
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
// first; if that fails at once they are sent as they are, and the other side decides.
func (c *credentials) current(ctx context.Context) tokens {
	c.mu.Lock()
	at := c.tokens
	due := c.voucher != nil && c.now().After(c.expires.Add(-renewBefore))
	c.mu.Unlock()
	if due && c.renew(ctx, at, (*voucher).vouch) == nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.tokens
	}
	return at
}

// renew gets new tokens, asked for in the given way, unless another call did so since old were current.
func (c *credentials) renew(ctx context.Context, old tokens, ask func(*voucher, context.Context) (*nodev1.VouchResponse, error)) error {
	if c.voucher == nil {
		return fmt.Errorf("the token cannot be renewed")
	}
	c.mu.Lock()
	changed := c.tokens != old
	c.mu.Unlock()
	if changed {
		return nil
	}
	answer, err := ask(c.voucher, ctx)
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
