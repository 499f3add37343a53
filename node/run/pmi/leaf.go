package pmi

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"
	"time"
)

// Leaf is the exchange at every node but the first. It connects to the root, and again whenever the connection ends.
type Leaf struct {
	c       StarConfig
	address string
	wait    sync.WaitGroup
	ctx     context.Context
	cancel  context.CancelFunc

	mu      sync.Mutex
	closed  bool
	failed  bool
	link    *link
	had     bool
	since   time.Time   // when the connection ended, or the contribution began to wait
	part    []byte      // the contribution that waits for its result, with its number; nil if none
	fence   uint64      // its number
	waiter  chan []byte // gets the result
	left    []int       // ranks that have left
	failure []byte      // what the root must learn
	gone    bool        // the root has ended
}

// NewLeaf makes the exchange of a node that finds the root at the address (host:port). Nothing is started before Start.
func NewLeaf(c StarConfig, address string) (*Leaf, error) {
	if err := c.check(); err != nil {
		return nil, err
	}
	if c.Node == 0 {
		return nil, errors.New("the first node of a step is the root of its star")
	}
	f := &Leaf{c: c, address: address, since: time.Now()}
	f.ctx, f.cancel = context.WithCancel(context.Background())
	return f, nil
}

// Start begins to connect.
func (f *Leaf) Start() { f.wait.Go(f.run) }

// Close tells the root that this node has ended and waits, at most flushTime, until it is told.
func (f *Leaf) Close() {
	f.mu.Lock()
	f.closed = true
	l := f.link
	f.mu.Unlock()
	if l != nil {
		l.send(kindBye, nil)
		l.finish()
	}
	f.cancel()
	f.wait.Wait()
}

// Exchange contributes this node's pairs.
func (f *Leaf) Exchange(ctx context.Context, fence uint64, mine []Pair) ([]Pair, error) {
	pairs := encodePairs(mine)
	if len(pairs) > maxPart {
		return nil, fmt.Errorf("this node's MPI processes put more than %d MiB of addresses between two barriers", maxPart>>20)
	}
	waiter := make(chan []byte, 1)
	f.mu.Lock()
	f.part, f.fence, f.waiter = numbered(fence, pairs), fence, waiter
	if f.link != nil {
		f.link.send(kindPart, f.part)
	} else {
		f.since = time.Now()
	}
	gone := f.gone
	f.mu.Unlock()
	if gone {
		f.fail(Failure{Rank: -1, Sentence: "the tasks on node " + f.c.Name(0) + " have ended while tasks on other nodes wait for them at a barrier"})
	}
	select {
	case result := <-waiter:
		return decodePairs(result)
	case <-f.ctx.Done():
		return nil, ErrEnded
	case <-ctx.Done():
		return nil, fmt.Errorf("waiting for the other nodes at fence %d: %w", fence, ctx.Err())
	}
}

// Left tells the root that a task has left.
func (f *Leaf) Left(rank int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.left = append(f.left, rank)
	if f.link != nil {
		f.link.send(kindLeft, []byte(strconv.Itoa(rank)))
	}
}

// Abort tells the root that the step ends, and through it all nodes.
func (f *Leaf) Abort(failure Failure) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.failed {
		return
	}
	f.failed, f.failure = true, encodeFailure(failure)
	if f.link != nil {
		f.link.send(kindFail, f.failure)
	}
}

// fail ends the step here, once.
func (f *Leaf) fail(failure Failure) {
	f.mu.Lock()
	first := !f.failed && !f.closed
	f.failed = true
	f.mu.Unlock()
	if first {
		f.c.End(failure)
	}
}

// run keeps a connection until the leaf or the root ends.
func (f *Leaf) run() {
	pause := f.c.Times.Retry
	for {
		l, err := f.connect()
		if err == nil {
			pause = f.c.Times.Retry
			f.wait.Go(l.sendAll)
			if f.join(l) {
				err = f.receive(l)
				f.leave(l)
			}
			l.finish()
		}
		if f.ctx.Err() != nil || f.over() {
			return
		}
		f.c.Log.Warn("no connection to the step's first node", "address", f.address, "error", err)
		f.lookLost(err)
		select {
		case <-f.ctx.Done():
			return
		case <-time.After(pause):
		}
		pause = min(2*pause, f.c.Times.RetryMax)
	}
}

func (f *Leaf) over() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.closed || f.gone
}

// connect dials the root and proves who this is.
func (f *Leaf) connect() (*link, error) {
	ctx, cancel := context.WithTimeout(f.ctx, f.c.Times.Handshake)
	defer cancel()
	conn, err := (&net.Dialer{KeepAliveConfig: keepAlive}).DialContext(ctx, "tcp", f.address)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() }) // wakes the handshake
	defer stop()
	l, err := greet(conn, f.c.Key, f.c.Node)
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	if !stop() {
		return nil, errors.Join(ctx.Err(), conn.Close())
	}
	return l, nil
}

// join sends through a new link what the root may not know; it forgets nothing that comes twice. False if the leaf has
// ended.
func (f *Leaf) join(l *link) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return false
	}
	f.link, f.had = l, true
	if f.failure != nil {
		l.send(kindFail, f.failure)
	}
	if f.part != nil {
		l.send(kindPart, f.part)
	}
	if len(f.left) > 0 { // one is enough
		l.send(kindLeft, []byte(strconv.Itoa(f.left[0])))
	}
	return true
}

func (f *Leaf) leave(l *link) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.link == l {
		f.link, f.since = nil, time.Now()
	}
}

// lookLost ends the step if a fence has waited too long for a connection.
func (f *Leaf) lookLost(err error) {
	f.mu.Lock()
	bound := f.c.Times.Lost
	if !f.had {
		bound = f.c.Times.Absent
	}
	lost := f.part != nil && time.Since(f.since) >= bound
	f.mu.Unlock()
	if lost {
		f.fail(Failure{Rank: -1, Sentence: fmt.Sprintf(
			"node %s cannot reach node %s at %s to exchange MPI addresses, for %s now (%v): is a firewall between them, or has that node failed?",
			f.c.Name(f.c.Node), f.c.Name(0), f.address, bound, err)})
	}
}

// receive takes the root's frames.
func (f *Leaf) receive(l *link) error {
	for {
		k, payload, err := l.receive(maxStore + 8)
		if err != nil {
			return err
		}
		switch k {
		case kindResult:
			fence, pairs, err := unnumbered(payload)
			if err != nil {
				return err
			}
			f.deliver(fence, pairs)
		case kindFail:
			failure, err := decodeFailure(payload)
			if err != nil {
				return err
			}
			f.fail(failure)
		case kindBye:
			f.rootEnded()
			return nil
		case kindPart, kindLeft:
			return errors.New("the root sends what only nodes send")
		default:
			return fmt.Errorf("a frame of the unknown kind %d", k)
		}
	}
}

// deliver gives a result to who waits for it; one that came twice to nobody.
func (f *Leaf) deliver(fence uint64, pairs []byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.part == nil || fence != f.fence {
		return
	}
	f.waiter <- pairs // it takes one
	f.part, f.waiter = nil, nil
}

// rootEnded notes that no fence will complete any more.
func (f *Leaf) rootEnded() {
	f.mu.Lock()
	f.gone = true
	waits := f.part != nil
	f.mu.Unlock()
	if waits {
		f.fail(Failure{Rank: -1, Sentence: "the tasks on node " + f.c.Name(0) + " have ended while tasks on other nodes wait for them at a barrier"})
	}
}
