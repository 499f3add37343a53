package client

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"connectrpc.com/connect/v2"
	"connectrpc.com/connect/v2/connecthttp"
	"connectrpc.com/connect/v2/connectproto"

	"github.com/muster-hpc/muster/rpc"
)

// Bounds of connections; rows of docs/limits.md.
const (
	dialTimeout    = 3 * time.Second
	idleTimeout    = 90 * time.Second
	pingAfter      = 5 * time.Second
	pingTimeout    = 3 * time.Second
	maxIdlePerHost = 64
	// maxConnsPerHost keeps a burst of first calls from making a connection each: with HTTP/2 they share a few.
	maxConnsPerHost = 8
	keepAlivePeriod = 15 * time.Second
)

// newTransport returns the scheme and HTTP transport for a TLS configuration; nil means without encryption. With TLS,
// many calls share one HTTP/2 connection, and a connection whose other end is silent for pingAfter is probed, so that
// streams from a paused controller end.
func newTransport(config *tls.Config) (string, *http.Transport) {
	dialer := &net.Dialer{Timeout: dialTimeout, KeepAlive: keepAlivePeriod}
	transport := &http.Transport{
		DialContext:         dialer.DialContext,
		IdleConnTimeout:     idleTimeout,
		MaxIdleConnsPerHost: maxIdlePerHost,
		DisableCompression:  true,
	}
	if config == nil {
		return "http", transport
	}
	transport.DialTLSContext = newSecureDialer(dialer, config).dial
	transport.ForceAttemptHTTP2 = true
	transport.MaxConnsPerHost = maxConnsPerHost
	transport.HTTP2 = &http.HTTP2Config{SendPingTimeout: pingAfter, PingTimeout: pingTimeout}
	return "https", transport
}

// newWire returns a connect transport to one address. Nothing is compressed: inside a cluster the processor is dearer
// than the network.
func newWire(transport *http.Transport, url string) connect.Transport {
	return connecthttp.NewTransport(&http.Client{Transport: transport}, url,
		connecthttp.WithCodecs(codec{BinaryCodec: connectproto.NewBinaryCodec()}),
		connecthttp.WithCompressors(),
		connecthttp.WithReadMaxBytes(rpc.MaxResponseBytes))
}

// frame is an encoded message: a request that may be sent several times is encoded once, and of several answers only the
// first is decoded.
type frame struct{ data []byte }

// codec is the usual one, and passes frames through as they are.
type codec struct{ *connectproto.BinaryCodec }

func (c codec) MarshalWrite(ctx context.Context, dst io.Writer, msg any) error {
	if f, ok := msg.(*frame); ok {
		_, err := dst.Write(f.data)
		return err
	}
	return c.BinaryCodec.MarshalWrite(ctx, dst, msg)
}

func (c codec) UnmarshalRead(ctx context.Context, src io.Reader, msg any) error {
	f, ok := msg.(*frame)
	if !ok {
		return c.BinaryCodec.UnmarshalRead(ctx, src, msg)
	}
	var buffer bytes.Buffer
	if _, err := buffer.ReadFrom(src); err != nil {
		return fmt.Errorf("read an answer: %w", err)
	}
	f.data = buffer.Bytes()
	return nil
}
