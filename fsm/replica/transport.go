package replica

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"
)

const (
	memberUnit       = "muster-controller" // organisational unit in the certificates of members
	helloMagic       = "MUSTRAF1"
	helloTimeout     = 5 * time.Second
	maxHandshakes    = 64
	pooledConns      = 3
	pipelinedAppends = 2
	keepAlive        = 15 * time.Second
)

// errWrongMember is what a member answers to a connection that is meant for another id.
var errWrongMember = errors.New("another member answers at that address")

// addressFor puts the id into the address that is dialled; Dial takes it out again.
func addressFor(id raft.ServerID, addr raft.ServerAddress) raft.ServerAddress {
	return raft.ServerAddress(string(id) + "/" + string(addr))
}

// streams is the stream layer of hashicorp/raft's network transport: TCP, or TLS with certificates on both sides, and a
// first message that names the member for whom the connection is meant.
type streams struct {
	id        string
	ln        net.Listener
	advertise memberAddr
	tls       *tls.Config
	ready     chan net.Conn
	slots     chan struct{}
	ctx       context.Context
	cancel    context.CancelFunc
	wg        sync.WaitGroup

	mu    sync.Mutex
	conns map[net.Conn]struct{}
}

// memberAddr is the address that members tell each other.
type memberAddr string

// Network is "tcp".
func (a memberAddr) Network() string { return "tcp" }

// String is HOST:PORT.
func (a memberAddr) String() string { return string(a) }

func listen(id string, c *Config) (*streams, error) {
	ln, err := net.Listen("tcp", c.RaftListen)
	if err != nil {
		return nil, fmt.Errorf("listen for other members on %s: %w", c.RaftListen, err)
	}
	s := &streams{id: id, ln: ln, advertise: memberAddr(c.RaftAdvertise), ready: make(chan net.Conn), slots: make(chan struct{}, maxHandshakes),
		conns: map[net.Conn]struct{}{}}
	if s.advertise == "" {
		if tcp, ok := ln.Addr().(*net.TCPAddr); ok && tcp.IP.IsUnspecified() {
			return nil, errors.Join(fmt.Errorf("listen for other members on %s: they need an address to call; set the one to advertise", c.RaftListen), ln.Close())
		}
		s.advertise = memberAddr(ln.Addr().String())
	}
	if c.TLS != nil {
		s.tls = memberTLS(c.TLS)
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.wg.Go(s.acceptLoop)
	return s, nil
}

// memberTLS asks for a certificate on both sides, from the cluster's CA and for a controller. Host names do not matter: the
// first message names the member.
func memberTLS(base *tls.Config) *tls.Config {
	c := base.Clone()
	c.MinVersion = tls.VersionTLS13
	c.InsecureSkipVerify = true // VerifyConnection verifies the chain, on both sides
	c.ClientAuth = tls.RequireAnyClientCert
	c.VerifyConnection = func(cs tls.ConnectionState) error {
		if len(cs.PeerCertificates) == 0 {
			return errors.New("the other side showed no certificate")
		}
		leaf, between := cs.PeerCertificates[0], x509.NewCertPool()
		for _, cert := range cs.PeerCertificates[1:] {
			between.AddCert(cert)
		}
		_, err := leaf.Verify(x509.VerifyOptions{Roots: base.RootCAs, Intermediates: between, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}})
		if err != nil {
			return fmt.Errorf("the certificate of %q is not from this cluster's CA: %w", leaf.Subject.CommonName, err)
		}
		if !slices.Contains(leaf.Subject.OrganizationalUnit, memberUnit) {
			return fmt.Errorf("the certificate of %q has the unit %v, members need %q", leaf.Subject.CommonName, leaf.Subject.OrganizationalUnit, memberUnit)
		}
		return nil
	}
	return c
}

func (s *streams) acceptLoop() {
	for {
		conn, err := s.ln.Accept()
		if err != nil {
			select {
			case <-s.ctx.Done():
				return
			case <-time.After(10 * time.Millisecond): // out of file descriptors, perhaps
				continue
			}
		}
		select {
		case s.slots <- struct{}{}:
			s.wg.Go(func() {
				defer func() { <-s.slots }()
				s.welcome(conn)
			})
		default:
			conn.Close()
		}
	}
}

// welcome takes an incoming connection and hands it to Accept.
func (s *streams) welcome(raw net.Conn) {
	if s.tls != nil {
		raw = tls.Server(raw, s.tls)
	}
	conn := s.track(raw)
	if err := s.answerHello(conn); err != nil {
		conn.Close()
		return
	}
	select {
	case s.ready <- conn:
	case <-s.ctx.Done():
		conn.Close()
	}
}

// The first message is helloMagic ‖ length (1) ‖ id of the member meant. The answer is one byte: 1 if it is this one.
func (s *streams) answerHello(conn net.Conn) error {
	if err := conn.SetDeadline(time.Now().Add(helloTimeout)); err != nil {
		return err
	}
	head := make([]byte, len(helloMagic)+1)
	if _, err := io.ReadFull(conn, head); err != nil {
		return err
	}
	if string(head[:len(helloMagic)]) != helloMagic {
		return errors.New("not a member")
	}
	id := make([]byte, head[len(helloMagic)])
	if _, err := io.ReadFull(conn, id); err != nil {
		return err
	}
	if string(id) != s.id {
		_, err := conn.Write([]byte{0})
		return errors.Join(errWrongMember, err)
	}
	if _, err := conn.Write([]byte{1}); err != nil {
		return err
	}
	return conn.SetDeadline(time.Time{})
}

// Dial connects to ID/HOST:PORT.
func (s *streams) Dial(address raft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	id, hostport, ok := strings.Cut(string(address), "/")
	if !ok || len(id) > 255 {
		return nil, fmt.Errorf("connect to member %s: the address has no member id", address)
	}
	ctx, cancel := context.WithTimeout(s.ctx, timeout)
	defer cancel()
	raw, err := (&net.Dialer{KeepAlive: keepAlive}).DialContext(ctx, "tcp", hostport)
	if err != nil {
		return nil, fmt.Errorf("connect to member %s: %w", id, err)
	}
	if s.tls != nil {
		raw = tls.Client(raw, s.tls)
	}
	conn := s.track(raw)
	if err := sayHello(conn, id, timeout); err != nil {
		return nil, errors.Join(fmt.Errorf("connect to member %s at %s: %w", id, hostport, err), conn.Close())
	}
	return conn, nil
}

func sayHello(conn net.Conn, id string, timeout time.Duration) error {
	if err := conn.SetDeadline(time.Now().Add(timeout)); err != nil {
		return err
	}
	if _, err := conn.Write(append(append([]byte(helloMagic), byte(len(id))), id...)); err != nil {
		return err
	}
	answer := make([]byte, 1)
	if _, err := io.ReadFull(conn, answer); err != nil {
		return err
	}
	if answer[0] != 1 {
		return errWrongMember
	}
	return conn.SetDeadline(time.Time{})
}

// trackedConn is a connection that is closed with the stream layer: hashicorp/raft leaves incoming ones open.
type trackedConn struct {
	net.Conn
	forget func()
}

// Close closes the connection.
func (c *trackedConn) Close() error {
	c.forget()
	return c.Conn.Close()
}

func (s *streams) track(conn net.Conn) net.Conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.conns[conn] = struct{}{}
	return &trackedConn{conn, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.conns, conn)
	}}
}

// Accept returns the next connection whose first message was right.
func (s *streams) Accept() (net.Conn, error) {
	select {
	case conn := <-s.ready:
		return conn, nil
	case <-s.ctx.Done():
		return nil, net.ErrClosed
	}
}

// Addr is the address that others use.
func (s *streams) Addr() net.Addr { return s.advertise }

// Close closes the listener and all connections, and waits for its goroutines.
func (s *streams) Close() error {
	s.cancel()
	err := s.ln.Close()
	s.mu.Lock()
	open := s.conns
	s.conns = map[net.Conn]struct{}{}
	s.mu.Unlock()
	for conn := range open {
		conn.Close() // it may be closed already; nothing is lost by that
	}
	s.wg.Wait()
	return err
}

func newNetworkTransport(s *streams, t Timing, log hclog.Logger) *raft.NetworkTransport {
	return raft.NewNetworkTransportWithConfig(&raft.NetworkTransportConfig{
		Stream: s, MaxPool: pooledConns, MaxRPCsInFlight: pipelinedAppends, Timeout: t.rpcTimeout(), Logger: log})
}
