package pmi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"sync"
	"time"
)

// ErrEnded says that an exchange has ended; why has been said by End, if anybody needs to know.
var ErrEnded = errors.New("the exchange between the nodes has ended")

// Times are the bounds of a star. Each is a row of docs/limits.md.
type Times struct {
	// Handshake bounds the beginning of a connection, dialling included.
	Handshake time.Duration
	// Retry is the first pause before a node connects again, doubled up to RetryMax.
	Retry, RetryMax time.Duration
	// Lost is how long a fence waits for a node whose connection broke, and Absent for one that never had any.
	Lost, Absent time.Duration
}

// DefaultTimes are the bounds in production.
var DefaultTimes = Times{
	Handshake: 10 * time.Second, Retry: 20 * time.Millisecond, RetryMax: 2 * time.Second,
	Lost: time.Minute, Absent: 5 * time.Minute,
}

// keepAlive finds out within about 40 s that the other side's machine is gone.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 10 * time.Second, Interval: 5 * time.Second, Count: 6}

// StarConfig is what both sides of a star are told.
type StarConfig struct {
	// Key is known to the step's nodes only, at least MinKey bytes.
	Key []byte
	// Node is the index of this node among Nodes; the root has 0.
	Node, Nodes int
	// Name returns the name of a node by its index, for sentences.
	Name func(node int) string
	// End is called when the step cannot go on, at most once, from any goroutine; it must not wait for the star.
	End func(Failure)
	// Times are the bounds; DefaultTimes in production.
	Times Times
	// Log gets structured lines.
	Log *slog.Logger
}

func (c StarConfig) check() error {
	switch {
	case len(c.Key) < MinKey:
		return fmt.Errorf("the step's key has %d bytes; it needs %d", len(c.Key), MinKey)
	case c.Nodes < 2 || c.Node < 0 || c.Node >= c.Nodes:
		return fmt.Errorf("node %d of %d nodes cannot be part of a star", c.Node, c.Nodes)
	}
	return nil
}

// Root is the exchange at the first node: it collects what all nodes contribute and sends each the whole.
type Root struct {
	c        StarConfig
	listener net.Listener
	wait     sync.WaitGroup
	quit     chan struct{}

	mu       sync.Mutex
	closed   bool
	failed   bool
	greeting []net.Conn     // connections that have not proved anything, oldest first
	peers    []peer         // by index; the root itself has no link
	done     uint64         // the last fence that is complete
	result   []byte         // what it brought, with its number
	parts    map[int][]byte // contributions to the next one
	size     int            // of them
	waiter   chan []byte    // gets the result for the root's own tasks
	alarm    *time.Timer    // fires when a node may be lost
	refused  int            // connections that proved nothing
}

// peer is a node as the root sees it.
type peer struct {
	link *link
	// had: it was connected before.
	had bool
	// since is when the connection ended, or when a fence began to wait for it.
	since time.Time
	// gone says why it will not take part in any further fence; empty if it may.
	gone string
}

// NewRoot makes the exchange of the first node, which serves the others at the listener once Start is called. It takes
// over the listener, unless there is an error.
func NewRoot(c StarConfig, listener net.Listener) (*Root, error) {
	if err := c.check(); err != nil {
		return nil, err
	}
	r := &Root{
		c: c, listener: listener, quit: make(chan struct{}),
		peers: make([]peer, c.Nodes), parts: make(map[int][]byte), alarm: time.NewTimer(c.Times.Absent),
	}
	return r, nil
}

// Start begins to accept the other nodes.
func (r *Root) Start() {
	r.wait.Go(r.accept)
	r.wait.Go(r.watch)
}

// Close tells the other nodes that this one has ended and waits, at most flushTime, until they are told.
func (r *Root) Close() {
	r.mu.Lock()
	r.closed = true
	links := r.links()
	for _, conn := range r.greeting {
		_ = conn.Close() // wakes its goroutine
	}
	r.mu.Unlock()
	close(r.quit)
	_ = r.listener.Close() // nobody is to come any more
	for _, l := range links {
		l.send(kindBye, nil)
		r.wait.Go(l.finish)
	}
	r.wait.Wait()
}

// links returns the connections there are. r.mu is held.
func (r *Root) links() []*link {
	var all []*link
	for i := range r.peers {
		if l := r.peers[i].link; l != nil {
			all = append(all, l)
		}
	}
	return all
}

// Exchange contributes the root's own pairs.
func (r *Root) Exchange(ctx context.Context, fence uint64, mine []Pair) ([]Pair, error) {
	waiter := make(chan []byte, 1)
	r.mu.Lock()
	r.waiter = waiter
	failure, err := r.take(0, fence, encodePairs(mine))
	r.mu.Unlock()
	if failure != nil {
		r.fail(*failure)
	}
	if err != nil {
		return nil, err
	}
	select {
	case result := <-waiter:
		return decodePairs(result)
	case <-r.quit:
		return nil, ErrEnded
	case <-ctx.Done():
		return nil, fmt.Errorf("waiting for the other nodes at fence %d: %w", fence, ctx.Err())
	}
}

// Left says that a task of the root has left.
func (r *Root) Left(rank int) {
	r.leave(0, fmt.Sprintf("task %d on node %s has left", rank, r.c.Name(0)))
}

// Abort tells all nodes that the step ends.
func (r *Root) Abort(f Failure) {
	r.mu.Lock()
	r.failed = true
	links := r.links()
	r.mu.Unlock()
	payload := encodeFailure(f)
	for _, l := range links {
		l.send(kindFail, payload)
	}
}

// fail ends the step everywhere, once.
func (r *Root) fail(f Failure) {
	r.mu.Lock()
	first := !r.failed && !r.closed
	r.mu.Unlock()
	if first {
		r.Abort(f)
		r.c.End(f)
	}
}

// leave notes that a node will take part in no further fence.
func (r *Root) leave(node int, why string) {
	r.mu.Lock()
	if r.peers[node].gone == "" {
		r.peers[node].gone = why
	}
	failure := r.look()
	r.mu.Unlock()
	if failure != nil {
		r.fail(*failure)
	}
}

// take notes a contribution. The last one completes the fence. It returns a failure if the fence can't be completed, and
// an error if the contribution is not one. r.mu is held.
func (r *Root) take(node int, fence uint64, pairs []byte) (*Failure, error) {
	if fence == r.done && node != 0 && r.done > 0 { // it did not get the result
		if l := r.peers[node].link; l != nil {
			l.send(kindResult, r.result)
		}
		return nil, nil
	}
	if fence != r.done+1 {
		return nil, fmt.Errorf("node %s contributes to fence %d; the last complete one is %d", r.c.Name(node), fence, r.done)
	}
	if _, again := r.parts[node]; again {
		return nil, nil
	}
	if r.size += len(pairs); r.size > maxStore {
		return &Failure{Rank: -1, Sentence: fmt.Sprintf(
			"the MPI processes put more than %d MiB of addresses between two barriers", maxStore>>20)}, nil
	}
	if len(r.parts) == 0 {
		for i := range r.peers { // from now on their absence matters
			r.peers[i].since = time.Now()
		}
	}
	r.parts[node] = pairs
	if len(r.parts) == r.c.Nodes {
		r.complete()
		return nil, nil
	}
	return r.look(), nil
}

// complete ends a fence to which all have contributed. r.mu is held.
func (r *Root) complete() {
	all := make([]byte, 0, r.size)
	for i := range r.c.Nodes {
		all = append(all, r.parts[i]...)
	}
	r.done++
	r.result = numbered(r.done, all)
	r.parts, r.size = make(map[int][]byte), 0
	if r.waiter != nil {
		r.waiter <- all // it takes one
		r.waiter = nil
	}
	for _, l := range r.links() {
		l.send(kindResult, r.result)
	}
}

// look returns the failure if a fence waits for a node in vain. Otherwise it comes back when that may be. r.mu is held.
func (r *Root) look() *Failure {
	if len(r.parts) == 0 || r.closed || r.failed {
		return nil
	}
	next := time.Duration(-1)
	for i := range r.peers {
		p := &r.peers[i]
		if _, there := r.parts[i]; there {
			continue
		}
		if p.gone != "" {
			return &Failure{Rank: -1, Sentence: p.gone + " while tasks on other nodes wait for it at a barrier"}
		}
		if i == 0 || p.link != nil {
			continue
		}
		bound, how := r.c.Times.Absent, "did not begin to take part in the exchange of MPI addresses"
		if p.had {
			bound, how = r.c.Times.Lost, "is lost: its connection to the exchange of MPI addresses ended"
		}
		left := bound - time.Since(p.since)
		if left <= 0 {
			return &Failure{Rank: -1, Sentence: fmt.Sprintf("node %s %s, and %s were not enough to make another",
				r.c.Name(i), how, bound)}
		}
		if next < 0 || left < next {
			next = left
		}
	}
	if next >= 0 {
		r.alarm.Reset(next)
	}
	return nil
}

// watch looks again when a node may be lost.
func (r *Root) watch() {
	defer r.alarm.Stop()
	for {
		select {
		case <-r.quit:
			return
		case <-r.alarm.C:
		}
		r.mu.Lock()
		failure := r.look()
		r.mu.Unlock()
		if failure != nil {
			r.fail(*failure)
		}
	}
}

// accept takes connections until the listener is closed.
func (r *Root) accept() {
	for {
		conn, err := r.listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // out of descriptors, for example
			r.c.Log.Warn("accepting a node's connection", "error", err)
			select {
			case <-r.quit:
				return
			case <-time.After(r.c.Times.Retry):
			}
			continue
		}
		r.mu.Lock()
		if r.closed {
			_ = conn.Close() // nobody serves it
		} else {
			// Anybody can connect. A node proves itself at once; who does not gives way to newer ones.
			if len(r.greeting) >= r.c.Nodes+maxStrangers {
				_ = r.greeting[0].Close() // wakes its goroutine
				r.greeting = r.greeting[1:]
			}
			r.greeting = append(r.greeting, conn)
			r.wait.Go(func() { r.serve(conn) })
		}
		r.mu.Unlock()
	}
}

// maxStrangers are the connections, beside one of each node, that have not proved anything.
const maxStrangers = 16

// serve speaks with one connection until it ends.
func (r *Root) serve(conn net.Conn) {
	_ = conn.SetDeadline(time.Now().Add(r.c.Times.Handshake)) // one that has ended says so when it is read
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetKeepAliveConfig(keepAlive) // without it, a dead machine is noticed later
	}
	node, l, err := welcome(conn, r.c.Key, r.c.Nodes)
	r.mu.Lock()
	r.greeting = slices.DeleteFunc(r.greeting, func(c net.Conn) bool { return c == conn })
	if err != nil {
		r.refused++
	}
	refused := r.refused
	r.mu.Unlock()
	if err != nil {
		if refused <= maxStrangers { // strangers must not fill the log
			r.c.Log.Warn("a connection was refused", "from", conn.RemoteAddr().String(), "error", err)
		}
		_ = conn.Close() // nothing was told to it
		return
	}
	_ = conn.SetDeadline(time.Time{}) // same
	r.wait.Go(l.sendAll)
	if !r.join(node, l) {
		l.finish()
		return
	}
	err = r.receive(node, l)
	r.part(node, l, err)
	l.finish()
}

// join makes a link the node's, in place of an earlier one; false if the root has ended.
func (r *Root) join(node int, l *link) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return false
	}
	if old := r.peers[node].link; old != nil {
		_ = old.conn.Close() // its goroutine ends
	}
	r.peers[node].link, r.peers[node].had = l, true
	return true
}

// part notes that a link has ended.
func (r *Root) part(node int, l *link, err error) {
	r.mu.Lock()
	var failure *Failure
	if r.peers[node].link == l {
		r.peers[node].link, r.peers[node].since = nil, time.Now()
		if !r.closed && r.peers[node].gone == "" {
			r.c.Log.Warn("the connection of a node ended", "node", r.c.Name(node), "error", err)
		}
		failure = r.look()
	}
	r.mu.Unlock()
	if failure != nil {
		r.fail(*failure)
	}
}

// receive takes a node's frames.
func (r *Root) receive(node int, l *link) error {
	for {
		k, payload, err := l.receive(maxPart + 8)
		if err != nil {
			return err
		}
		switch k {
		case kindPart:
			fence, pairs, err := unnumbered(payload)
			if err != nil {
				return err
			}
			r.mu.Lock()
			failure, err := r.take(node, fence, pairs)
			r.mu.Unlock()
			if failure != nil {
				r.fail(*failure)
			}
			if err != nil {
				return err
			}
		case kindLeft:
			r.leave(node, fmt.Sprintf("task %s on node %s has left", payload[:min(len(payload), 10)], r.c.Name(node)))
		case kindBye:
			r.leave(node, "the tasks on node "+r.c.Name(node)+" have ended")
		case kindFail:
			f, err := decodeFailure(payload)
			if err != nil {
				return err
			}
			r.fail(f)
		case kindResult:
			return errors.New("a node sends a result")
		default:
			return fmt.Errorf("a frame of the unknown kind %d", k)
		}
	}
}
