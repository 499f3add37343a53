package supervise

import (
	"bufio"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"github.com/muster-hpc/muster/node/run"
	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
	"golang.org/x/sys/unix"
)

const (
	// maxConns bounds the connections; a new one displaces the oldest.
	maxConns = 8
	// maxUnanswered bounds the requests of one connection that wait for their answers; then it is not read from.
	maxUnanswered = 32
	// flushTimeout bounds the wait for clients to take their last answers.
	flushTimeout = time.Second
)

// request is a request and where its answer goes.
type request struct {
	*supervisorv1.Request
	from *conn
}

// server accepts connections and passes their requests to the loop.
type server struct {
	listener net.Listener
	log      *slog.Logger
	requests chan request
	// quit is closed when the loop takes no more requests.
	quit chan struct{}
	wait sync.WaitGroup

	mu     sync.Mutex
	conns  []*conn // oldest first
	closed bool
}

// serve starts to accept at the listening socket.
func serve(socket *os.File, log *slog.Logger) (*server, error) {
	listener, err := net.FileListener(socket)
	if err = errors.Join(err, socket.Close()); err != nil {
		return nil, fmt.Errorf("taking over the listening socket: %w", err)
	}
	s := &server{listener: listener, log: log, requests: make(chan request), quit: make(chan struct{})}
	s.wait.Go(s.accept)
	return s, nil
}

func (s *server) accept() {
	for {
		nc, err := s.listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // Out of descriptors, for example: the clients that there are go on.
			s.log.Warn("accepting a connection", "error", err)
			select {
			case <-s.quit:
				return
			case <-time.After(100 * time.Millisecond):
			}
			continue
		}
		if err := trusted(nc); err != nil {
			s.log.Warn("refusing a connection", "error", err)
			_ = nc.Close()
			continue
		}
		s.add(nc)
	}
}

// trusted checks that the peer is root or the supervisor's own user.
func trusted(nc net.Conn) error {
	raw, err := nc.(*net.UnixConn).SyscallConn()
	if err != nil {
		return err
	}
	var peer *unix.Ucred
	var peerErr error
	if err := raw.Control(func(fd uintptr) {
		peer, peerErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil || peerErr != nil {
		return errors.Join(err, peerErr)
	}
	if peer.Uid != 0 && int(peer.Uid) != os.Geteuid() {
		return fmt.Errorf("user id %d may not speak with this supervisor", peer.Uid)
	}
	return nil
}

func (s *server) add(nc net.Conn) {
	c := &conn{
		nc:     nc,
		tokens: make(chan struct{}, maxUnanswered),
		wake:   make(chan struct{}, 1),
		gone:   make(chan struct{}),
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		_ = nc.Close()
		return
	}
	if len(s.conns) >= maxConns {
		_ = s.conns[0].nc.Close() // Its goroutines find out.
		s.conns = s.conns[1:]
	}
	s.conns = append(s.conns, c)
	s.wait.Go(func() {
		c.read(s)
		c.close()
		s.remove(c)
	})
	s.wait.Go(c.write)
}

func (s *server) remove(c *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range s.conns {
		if s.conns[i] == c {
			s.conns = append(s.conns[:i], s.conns[i+1:]...)
			return
		}
	}
}

// tell gives the newest state to everybody who watches.
func (s *server) tell(state *supervisorv1.StepState) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.conns {
		c.tell(state)
	}
}

// connected reports whether anybody is.
func (s *server) connected() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.conns) > 0
}

// close lets clients take their last answers for a bounded time and ends all connections.
func (s *server) close() {
	_ = s.listener.Close()
	close(s.quit)
	s.mu.Lock()
	s.closed = true
	for _, c := range s.conns {
		c.finish()
	}
	s.mu.Unlock()
	s.wait.Wait()
}

// conn is one client.
type conn struct {
	nc net.Conn
	// tokens holds one for each unanswered request.
	tokens chan struct{}
	wake   chan struct{}
	gone   chan struct{}
	once   sync.Once

	mu        sync.Mutex
	answers   []*supervisorv1.Event
	watching  bool
	news      *supervisorv1.StepState // not told yet; a newer one replaces it
	finishing bool
}

// read passes requests to the loop until the client closes, sends nonsense, or the supervisor leaves.
func (c *conn) read(s *server) {
	r := bufio.NewReader(c.nc)
	for {
		q := new(supervisorv1.Request)
		if err := run.ReadFrame(r, q); err != nil {
			if errors.Is(err, run.ErrFrame) {
				s.log.Warn("closing a connection", "error", err)
			}
			return
		}
		select {
		case c.tokens <- struct{}{}:
		case <-c.gone:
			return
		}
		select {
		case s.requests <- request{q, c}:
		case <-s.quit:
			<-c.gone // The writer still has the last answers.
			return
		}
	}
}

// write sends answers and news until the connection is closed.
func (c *conn) write() {
	defer c.close()
	for {
		c.mu.Lock()
		answers, news, finishing := c.answers, c.news, c.finishing
		c.answers, c.news = nil, nil
		c.mu.Unlock()
		for _, e := range answers {
			if err := run.WriteFrame(c.nc, e); err != nil {
				return
			}
			<-c.tokens
		}
		if news != nil {
			if err := run.WriteFrame(c.nc, &supervisorv1.Event{State: news}); err != nil {
				return
			}
		}
		if finishing {
			return
		}
		select {
		case <-c.wake:
		case <-c.gone:
			return
		}
	}
}

func (c *conn) close() {
	c.once.Do(func() {
		_ = c.nc.Close()
		close(c.gone)
	})
}

func (c *conn) update(f func()) {
	c.mu.Lock()
	f()
	c.mu.Unlock()
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// answer queues the answer to a request. There is room: requests hold tokens.
func (c *conn) answer(e *supervisorv1.Event) {
	c.update(func() { c.answers = append(c.answers, e) })
}

func (c *conn) watch() { c.update(func() { c.watching = true }) }

func (c *conn) tell(state *supervisorv1.StepState) {
	c.update(func() {
		if c.watching {
			c.news = state
		}
	})
}

// finish ends the connection when everything queued is sent, or after a bounded time.
func (c *conn) finish() {
	_ = c.nc.SetDeadline(time.Now().Add(flushTimeout))
	c.update(func() { c.finishing = true })
}
