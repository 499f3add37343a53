package client

import (
	"context"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect/v2"
)

// target is one controller.
type target struct {
	address string
	client  *connect.Client
}

// balancer is a connect.Transport over all controllers: it sends calls to the preferred one (the leader, if it is
// known; otherwise whoever answered last) and turns to others as package documentation says.
type balancer struct {
	scheme      string
	transport   *http.Transport
	credentials *credentials
	timeout     time.Duration
	hedgeAfter  time.Duration
	log         *slog.Logger
	cluster     string
	patient     bool

	mu      sync.Mutex
	targets []*target // preferred first
}

func newBalancer(addresses []string, scheme string, transport *http.Transport, credentials *credentials,
	timeout time.Duration, log *slog.Logger) *balancer {
	b := &balancer{scheme: scheme, transport: transport, credentials: credentials, timeout: timeout,
		hedgeAfter: HedgeAfter, log: log}
	for _, address := range addresses {
		if !slices.ContainsFunc(b.targets, func(t *target) bool { return t.address == address }) {
			b.targets = append(b.targets, b.newTarget(address))
		}
	}
	return b
}

func (b *balancer) newTarget(address string) *target {
	return &target{address: address, client: connect.NewClient(b.direct(address))}
}

// direct returns a transport to one controller, without retries.
func (b *balancer) direct(address string) connect.Transport {
	return newWire(b.transport, b.scheme+"://"+address)
}

// order returns the targets, the preferred one first.
func (b *balancer) order() []*target {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.targets)
}

// addresses returns those of the targets, the preferred one first.
func (b *balancer) addresses() []string {
	order := b.order()
	list := make([]string, len(order))
	for i, t := range order {
		list[i] = t.address
	}
	return list
}

// prefer moves the controller at address to the front. An address that is not known yet is added: members come and go
// while a client lives.
func (b *balancer) prefer(address string) *target {
	b.mu.Lock()
	defer b.mu.Unlock()
	i := slices.IndexFunc(b.targets, func(t *target) bool { return t.address == address })
	if i == 0 {
		return b.targets[0]
	}
	var t *target
	if i > 0 {
		t = b.targets[i]
		b.targets = slices.Delete(b.targets, i, i+1)
	} else {
		t = b.newTarget(address)
	}
	b.targets = slices.Insert(b.targets, 0, t)
	return t
}

// NewClientStream implements connect.Transport.
func (b *balancer) NewClientStream(ctx context.Context, spec connect.Spec) (connect.ClientStream, error) {
	if spec.StreamType == connect.StreamTypeUnary {
		return &unary{balancer: b, ctx: ctx, spec: spec}, nil
	}
	return &serverStream{balancer: b, ctx: ctx, spec: spec}, nil
}
