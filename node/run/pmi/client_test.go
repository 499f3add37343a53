package pmi

import (
	"bufio"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// patience bounds waits that should be over at once.
const patience = 20 * time.Second

func testLog(t testing.TB) *slog.Logger {
	return slog.New(slog.NewTextHandler(io.Discard, nil))
}

// ends are the two sides of a task's connection, as the supervisor makes them.
func ends(t testing.TB) (server net.Conn, task *os.File) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	mine := os.NewFile(uintptr(fds[0]), "pmi")
	server, err = net.FileConn(mine)
	if err != nil {
		t.Fatal(err)
	}
	_ = mine.Close()
	return server, os.NewFile(uintptr(fds[1]), "pmi task")
}

// node is the process manager of one node of a step.
type node struct {
	server   *Server
	exchange Exchange
	ranks    []uint32
	failures chan Failure
	close    func()
}

func (n *node) failed(t testing.TB) Failure {
	t.Helper()
	select {
	case f := <-n.failures:
		return f
	case <-time.After(patience):
		t.Fatal("the step did not end")
		return Failure{}
	}
}

func (n *node) alive(t testing.TB) {
	t.Helper()
	select {
	case f := <-n.failures:
		t.Fatalf("the step ended: %+v", f)
	default:
	}
}

var testKey = []byte("a key of a step for tests only")

// testTimes are short enough for tests.
var testTimes = Times{
	Handshake: 5 * time.Second, Retry: time.Millisecond, RetryMax: 20 * time.Millisecond, Lost: 300 * time.Millisecond, Absent: 700 * time.Millisecond,
}

// step starts the process managers of several nodes with the given number of tasks each; the ranks are in blocks.
func step(t testing.TB, times Times, perNode ...int) []*node {
	t.Helper()
	var nodeOf []uint32
	for i, n := range perNode {
		for range n {
			nodeOf = append(nodeOf, uint32(i))
		}
	}
	nodes := make([]*node, len(perNode))
	address, next := "", uint32(0)
	for i, tasks := range perNode {
		n := &node{failures: make(chan Failure, 16), exchange: Alone{}, close: func() {}}
		for range tasks {
			n.ranks = append(n.ranks, next)
			next++
		}
		star := StarConfig{
			Key: testKey, Node: i, Nodes: len(perNode), Name: func(i int) string { return fmt.Sprintf("n%d", i+1) },
			End: func(f Failure) { n.failures <- f }, Times: times, Log: testLog(t),
		}
		switch {
		case len(perNode) == 1:
		case i == 0:
			listener, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			address = listener.Addr().String()
			root, err := NewRoot(star, listener)
			if err != nil {
				t.Fatal(err)
			}
			root.Start()
			n.exchange, n.close = root, root.Close
		default:
			leaf, err := NewLeaf(star, address)
			if err != nil {
				t.Fatal(err)
			}
			leaf.Start()
			n.exchange, n.close = leaf, leaf.Close
		}
		n.server = NewServer(Config{
			JobID: "17.0", Size: len(nodeOf), Ranks: n.ranks, Mapping: Mapping(nodeOf), Exchange: n.exchange,
			End: func(f Failure) { n.failures <- f }, Log: testLog(t),
		})
		nodes[i] = n
	}
	t.Cleanup(func() {
		for _, n := range nodes {
			n.stop()
		}
	})
	return nodes
}

// stop ends a node as a supervisor does at the end of its tasks.
func (n *node) stop() {
	n.close()
	n.server.Close()
	n.close = func() {}
}

// task is a task that speaks PMI as it is written, with nothing in common with the server.
type task struct {
	t    testing.TB
	rank uint32
	file *os.File
	r    *bufio.Reader
}

func (n *node) task(t testing.TB, rank uint32) *task {
	t.Helper()
	server, file := ends(t)
	n.server.Serve(rank, server)
	t.Cleanup(func() { _ = file.Close() })
	return &task{t: t, rank: rank, file: file, r: bufio.NewReader(file)}
}

// tasks connects all tasks of the step, by rank.
func tasks(t testing.TB, nodes []*node) []*task {
	t.Helper()
	var all []*task
	for _, n := range nodes {
		for _, rank := range n.ranks {
			all = append(all, n.task(t, rank))
		}
	}
	return all
}

func (c *task) send(text string) {
	if _, err := c.file.WriteString(text); err != nil {
		c.t.Errorf("rank %d cannot send %.60q: %v", c.rank, text, err)
	}
}

func (c *task) line() string {
	line, err := c.r.ReadString('\n')
	if err != nil {
		return "(" + err.Error() + ")"
	}
	return strings.TrimSuffix(line, "\n")
}

// ask sends a line of PMI-1 and returns the answer.
func (c *task) ask(line string) string {
	c.send(line + "\n")
	return c.line()
}

func (c *task) tell(text string) { c.send(fmt.Sprintf("%6d%s", len(text), text)) }

func (c *task) message() string {
	head := make([]byte, 6)
	if _, err := io.ReadFull(c.r, head); err != nil {
		return "(" + err.Error() + ")"
	}
	var n int
	if _, err := fmt.Sscan(string(head), &n); err != nil {
		return "(" + err.Error() + ")"
	}
	body := make([]byte, n)
	if _, err := io.ReadFull(c.r, body); err != nil {
		return "(" + err.Error() + ")"
	}
	return string(body)
}

// ask2 sends a message of PMI-2 and returns the answer.
func (c *task) ask2(text string) string {
	c.tell(text)
	return c.message()
}

func (c *task) expect(got, want string) {
	c.t.Helper()
	if got != want {
		c.t.Errorf("rank %d got %q, want %q", c.rank, got, want)
	}
}

// each runs f for all tasks at the same time.
func each(all []*task, f func(c *task)) {
	var group sync.WaitGroup
	for _, c := range all {
		group.Go(func() { f(c) })
	}
	group.Wait()
}

// within fails the test if f takes too long.
func within(t testing.TB, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	select {
	case <-done:
	case <-time.After(patience):
		t.Fatal("it does not end")
	}
}
