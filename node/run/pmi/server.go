package pmi

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strconv"
	"sync"
)

// maxWaiting bounds the requests of one task that wait for others at a time; a task with threads has a few.
const maxWaiting = 16

// Failure is why a step cannot go on.
type Failure struct {
	// Rank is the task that ended the step or is missed; -1 if it is none in particular.
	Rank int
	// Code is the exit code that an aborting task asked for; 0 if the step ends for another reason.
	Code int
	// Sentence says what happened, for the user.
	Sentence string
	// Remote: another node has found it and says it to the user.
	Remote bool
}

// Exchange is how the servers of a step's nodes exchange pairs. Implementations: Alone, *Root, *Leaf.
type Exchange interface {
	// Exchange contributes mine to a fence and returns what all nodes contributed, in the order of nodes. Fences are
	// numbered from 1 and come one after the other. It waits for the other nodes as long as it takes. An error means that
	// ctx or the exchange ended, or that a bound was exceeded.
	Exchange(ctx context.Context, fence uint64, mine []Pair) (all []Pair, err error)
	// Left says that a task of this node has left, so that no further fence can complete.
	Left(rank int)
	// Abort says on the other nodes that the step ends.
	Abort(f Failure)
}

// Alone is the exchange of a step on one node.
type Alone struct{}

// Exchange returns mine.
func (Alone) Exchange(_ context.Context, _ uint64, mine []Pair) ([]Pair, error) { return mine, nil }

// Left does nothing: there is nobody else.
func (Alone) Left(int) {}

// Abort does nothing: there is nobody else.
func (Alone) Abort(Failure) {}

// Config is what a Server is told. All fields are needed unless they say otherwise.
type Config struct {
	// JobID names the step in the answers ("17.0"), without blanks, at most 32 bytes.
	JobID string
	// Size is the number of tasks of the step.
	Size int
	// Universe is the number of tasks that the allocation has room for; 0 means Size.
	Universe int
	// Ranks are those of this node's tasks.
	Ranks []uint32
	// Mapping is the value of PMI_process_mapping; empty if it is not known.
	Mapping string
	// Exchange connects the nodes.
	Exchange Exchange
	// End is called when the step cannot go on, at most once by a Server, from any goroutine; it must not wait for the
	// Server.
	End func(Failure)
	// Log gets structured lines.
	Log *slog.Logger
}

// Server answers the tasks of one node. Its methods are safe for concurrent use.
type Server struct {
	c      Config
	ctx    context.Context
	cancel context.CancelFunc
	wait   sync.WaitGroup

	mu      sync.Mutex
	closed  bool
	clients map[*client]bool
	kvs     *store // what fences have brought
	pending *store // what was put since the last one
	fences  uint64 // completed
	now     *fence // the one that is being entered
	left    map[uint32]departure
	failed  bool

	attributes *store
	awaited    map[string]chan struct{} // closed when the attribute is put
}

// departure is how a task left, and whether the other nodes know.
type departure struct {
	how  string
	told bool
}

// fence is one that not all tasks of the node have passed.
type fence struct {
	entered map[uint32]bool
	done    chan struct{} // closed when it is complete
}

func newFence() *fence { return &fence{entered: make(map[uint32]bool), done: make(chan struct{})} }

// NewServer makes a server. Nothing is started before Serve.
func NewServer(c Config) *Server {
	if c.Universe == 0 {
		c.Universe = c.Size
	}
	s := &Server{
		c: c, clients: make(map[*client]bool), kvs: newStore(maxStore), pending: newStore(maxPart), now: newFence(),
		left: make(map[uint32]departure), attributes: newStore(maxAttributes), awaited: make(map[string]chan struct{}),
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	return s
}

// Environment returns the variables by which a task finds its connection at the descriptor fd.
func (s *Server) Environment(rank uint32, fd int) []string {
	return []string{
		"PMI_FD=" + strconv.Itoa(fd), "PMI_RANK=" + strconv.FormatUint(uint64(rank), 10),
		"PMI_SIZE=" + strconv.Itoa(s.c.Size), "PMI_JOBID=" + s.c.JobID,
	}
}

// Serve takes over the server's end of a task's connection and serves it until it or the server ends.
func (s *Server) Serve(rank uint32, conn net.Conn) {
	c := &client{s: s, rank: rank, conn: conn, r: bufio.NewReaderSize(conn, maxLine)}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		_ = conn.Close() // nobody reads what it would say
		return
	}
	s.clients[c] = true
	s.wait.Go(c.serve)
}

// Left says that a task's process has ended. What it started may still hold the connection, but is not the task.
func (s *Server) Left(rank uint32) { s.leave(rank, "has ended") }

// Close ends all connections and waits for everything that was started.
func (s *Server) Close() {
	s.mu.Lock()
	s.closed = true
	for c := range s.clients {
		_ = c.conn.Close() // wakes its reader
	}
	s.mu.Unlock()
	s.cancel()
	s.wait.Wait()
}

// fail ends the step on all nodes, once.
func (s *Server) fail(f Failure) {
	s.mu.Lock()
	first := !s.failed && !s.closed
	s.failed = true
	s.mu.Unlock()
	if first {
		s.c.Exchange.Abort(f)
		s.c.End(f)
	}
}

// abort ends the step as a task asked.
func (s *Server) abort(rank uint32, code int, words string) {
	f := Failure{Rank: int(rank), Code: code, Sentence: fmt.Sprintf("task %d aborted the step with exit code %d", rank, code)}
	if words != "" {
		f.Sentence += fmt.Sprintf(": %.200s", words)
	}
	s.fail(f)
}

// leave notes that a task will enter no further fence; how says why.
func (s *Server) leave(rank uint32, how string) {
	s.mu.Lock()
	if _, twice := s.left[rank]; twice || s.closed {
		s.mu.Unlock()
		return
	}
	// One that has entered the present fence is missed only at the next.
	tell := !s.now.entered[rank]
	s.left[rank] = departure{how, tell}
	failure := s.inVain()
	s.mu.Unlock()
	if tell {
		s.c.Exchange.Left(int(rank))
	}
	if failure != nil {
		s.fail(*failure)
	}
}

// inVain returns the failure if tasks of this node wait at a fence that another of this node cannot enter; nil if not.
// s.mu is held.
func (s *Server) inVain() *Failure {
	if len(s.now.entered) == 0 {
		return nil
	}
	for _, rank := range s.c.Ranks {
		if d, left := s.left[rank]; left && !s.now.entered[rank] {
			return &Failure{Rank: int(rank), Sentence: fmt.Sprintf(
				"task %d %s while other tasks wait for it at a barrier", rank, d.how)}
		}
	}
	return nil
}

// enter lets a task enter the present fence. The channel is closed when all tasks of all nodes have.
func (s *Server) enter(rank uint32) (<-chan struct{}, error) {
	s.mu.Lock()
	f := s.now
	if f.entered[rank] {
		s.mu.Unlock()
		return nil, malformedf("it enters a barrier in which it is already")
	}
	f.entered[rank] = true
	failure := s.inVain()
	if failure == nil && len(f.entered) == len(s.c.Ranks) && !s.closed {
		mine, number := s.pending.pairs(), s.fences+1
		s.wait.Go(func() { s.exchange(f, number, mine) })
	}
	s.mu.Unlock()
	if failure != nil {
		s.fail(*failure)
	}
	return f.done, nil
}

// exchange completes a fence that all tasks of this node have entered.
func (s *Server) exchange(f *fence, number uint64, mine []Pair) {
	all, err := s.c.Exchange.Exchange(s.ctx, number, mine)
	if err == nil {
		var gone []uint32
		gone, err = s.complete(f, all)
		for _, rank := range gone {
			s.c.Exchange.Left(int(rank))
		}
	}
	if err != nil && s.ctx.Err() == nil && !errors.Is(err, ErrEnded) {
		s.fail(Failure{Rank: -1, Sentence: "the MPI processes could not exchange their addresses: " + err.Error()})
	}
}

// complete takes what a fence brought and lets the tasks go on. It returns the ranks that have left since they entered.
func (s *Server) complete(f *fence, all []Pair) (gone []uint32, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range all {
		if err := s.kvs.put(p); err != nil {
			return nil, err
		}
	}
	for rank, d := range s.left {
		if !d.told {
			s.left[rank] = departure{d.how, true}
			gone = append(gone, rank)
		}
	}
	s.pending = newStore(maxPart)
	s.fences++
	s.now = newFence()
	close(f.done)
	return gone, nil
}

// put takes a pair; other nodes see it after the next fence, tasks of this node at once.
func (s *Server) put(p Pair) error {
	if err := p.check(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pending.put(p)
}

func (s *Server) get(key string) (string, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if value, ok := s.pending.get(key); ok {
		return value, true
	}
	return s.kvs.get(key)
}

// at returns the i-th pair that fences have brought.
func (s *Server) at(i int) (Pair, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if i < 0 || i >= len(s.kvs.order) {
		return Pair{}, false
	}
	key := s.kvs.order[i]
	return Pair{key, s.kvs.values[key]}, true
}

// putAttribute sets an attribute of the node and wakes those who wait for it.
func (s *Server) putAttribute(p Pair) error {
	if err := p.check(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.attributes.put(p); err != nil {
		return err
	}
	if c, ok := s.awaited[p.Key]; ok {
		close(c)
		delete(s.awaited, p.Key)
	}
	return nil
}

// attribute returns an attribute of the node.
func (s *Server) attribute(key string) (value string, found bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.attributes.get(key)
}

// await returns a channel that is closed when the node has the attribute.
func (s *Server) await(key string) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, found := s.attributes.get(key); found {
		c := make(chan struct{})
		close(c)
		return c
	}
	c, ok := s.awaited[key]
	if !ok {
		c = make(chan struct{})
		s.awaited[key] = c
	}
	return c
}

// jobAttribute returns what is known of the step.
func (s *Server) jobAttribute(key string) (string, bool) {
	switch key {
	case "PMI_process_mapping":
		return s.c.Mapping, s.c.Mapping != ""
	case "universeSize":
		return strconv.Itoa(s.c.Universe), true
	case "hasNameServ":
		return "FALSE", true
	}
	return "", false
}

// client is a task's connection. Its reader owns version; the rest is guarded.
type client struct {
	s    *Server
	rank uint32
	conn net.Conn
	r    *bufio.Reader
	// version is 1 until the task asks for 2.
	version int

	mu      sync.Mutex // guards waiting, and orders what is written
	waiting int
}

// serve reads commands until the connection ends or says something senseless.
func (c *client) serve() {
	c.version = 1
	err := c.read()
	_ = c.conn.Close() // nothing more is said there
	c.s.mu.Lock()
	delete(c.s.clients, c)
	c.s.mu.Unlock()
	how := "has closed its connection to the process manager"
	if bad := (*malformed)(nil); errors.As(err, &bad) {
		c.s.c.Log.Warn("a task does not speak PMI", "rank", c.rank, "error", err)
		how = "said something to the process manager that is not PMI (" + bad.text + ")"
	} else if !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
		c.s.c.Log.Info("a task's connection broke", "rank", c.rank, "error", err)
	}
	c.s.leave(c.rank, how)
}

// read carries out commands; it returns why there are no more, never nil.
func (c *client) read() error {
	for {
		var asked command
		var err error
		if c.version == 2 {
			asked, err = readMessage(c.r)
		} else {
			asked, err = readLine(c.r)
		}
		if err != nil {
			return err
		}
		if c.version == 2 {
			err = c.handle2(asked)
		} else {
			err = c.handle1(asked)
		}
		if err != nil {
			return err
		}
	}
}

// write sends an answer. A task that does not read holds up only what it asked for itself.
func (c *client) write(answer []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, err := c.conn.Write(answer)
	return err
}

// later answers when done is closed, beside the reader: the task may have threads, and its end must be noticed.
func (c *client) later(done <-chan struct{}, answer func() []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.waiting >= maxWaiting {
		return malformedf("more than %d of its requests wait", maxWaiting)
	}
	c.waiting++
	c.s.wait.Go(func() {
		select {
		case <-done:
			if err := c.write(answer()); err != nil {
				c.s.c.Log.Debug("a task did not take its answer", "rank", c.rank, "error", err) // its reader finds out
			}
		case <-c.s.ctx.Done():
		}
		c.mu.Lock()
		c.waiting--
		c.mu.Unlock()
	})
	return nil
}

// fence enters a fence and answers when it is complete.
func (c *client) fence(answer []byte) error {
	done, err := c.s.enter(c.rank)
	if err != nil {
		return err
	}
	return c.later(done, func() []byte { return answer })
}
