package client

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
)

// mostHandshakes bounds the connections of a transport that are being made at a time. A step over a thousand nodes is read from a thousand
// agents: all their handshakes at once would take longer than dialTimeout allows each of them, and be begun again.
const mostHandshakes = 64

// secureDialer makes TLS connections, a bounded number at a time.
type secureDialer struct {
	plain  *net.Dialer
	config *tls.Config
	slots  chan struct{}
}

func newSecureDialer(plain *net.Dialer, config *tls.Config) *secureDialer {
	config = config.Clone()
	config.NextProtos = []string{"h2", "http/1.1"}
	return &secureDialer{plain: plain, config: config, slots: make(chan struct{}, mostHandshakes)}
}

// dial connects and shakes hands; dialTimeout counts from when there is room.
func (d *secureDialer) dial(ctx context.Context, network, address string) (net.Conn, error) {
	select {
	case d.slots <- struct{}{}:
		defer func() { <-d.slots }()
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for other connections to be made: %w", context.Cause(ctx))
	}
	ctx, cancel := context.WithTimeoutCause(ctx, dialTimeout, fmt.Errorf("no connection to %s within %v", address, dialTimeout))
	defer cancel()
	conn, err := d.plain.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	secure := tls.Client(conn, d.config) // no server name: rpc.CheckingTLS looks at chain and role
	if err := secure.HandshakeContext(ctx); err != nil {
		conn.Close()
		return nil, err
	}
	return secure, nil
}
