package run

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
	"google.golang.org/protobuf/proto"
)

// ErrClosed means that the connection to the supervisor ended before the answer came: the request may or may not have
// been carried out. All requests can be repeated safely on a new connection.
var ErrClosed = errors.New("the connection to the supervisor ended")

// Refused is the supervisor's "no" to a request. Its text begins with a code: "UNSUPPORTED: …" for a verb that an older
// supervisor does not know, "STATE: …" for one that does not fit the phase, "LEASE: …" for a start without a valid
// deadline of a step that stops itself, "GAP: …" for input beyond the offset, "BUSY: …" for too many requests.
type Refused struct{ Reason string }

// Error returns the reason.
func (r *Refused) Error() string { return "the supervisor refused: " + r.Reason }

// Handle is one connection to one supervisor. Its methods may be called at the same time. Closing it does not touch the
// supervisor or its tasks.
//
// A request returns when the supervisor has answered, with the state after it; ctx bounds the waiting only: after a
// context error the request may still be carried out. Errors: *Refused, ErrClosed, the context's.
type Handle struct {
	conn net.Conn
	// readerDone is closed when the reader has returned; events is closed before.
	readerDone chan struct{}
	events     chan *supervisorv1.StepState

	// write has room for the one who writes. Not a mutex, so that waiting for it ends with a context.
	write chan struct{}

	mu      sync.Mutex
	next    uint64
	waiting map[uint64]chan *supervisorv1.Event
	state   *supervisorv1.StepState
	err     error // set when the reader has returned
}

// newHandle takes over the connection and watches.
func newHandle(conn net.Conn) *Handle {
	h := &Handle{
		conn:       conn,
		readerDone: make(chan struct{}),
		events:     make(chan *supervisorv1.StepState, 1),
		write:      make(chan struct{}, 1),
		waiting:    make(map[uint64]chan *supervisorv1.Event),
	}
	go h.read()
	// The answer to this request, like every state, goes to events. An empty socket takes it at once; if the connection
	// is broken the reader finds out.
	_ = h.send(context.Background(), &supervisorv1.Request{Id: h.number(nil), Verb: &supervisorv1.Request_Watch{Watch: &supervisorv1.Watch{}}})
	return h
}

// Events tells states of the step: first the one at the time of attaching, then changes. A state that was not received
// before the next one came is left out: only the newest matters. The channel is closed when the connection ends; then
// Err says why, and the caller attaches again or concludes. States must not be modified.
func (h *Handle) Events() <-chan *supervisorv1.StepState { return h.events }

// State returns the newest state received; nil before the first.
func (h *Handle) State() *supervisorv1.StepState {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.state
}

// Err says why the connection ended; nil while it lasts.
func (h *Handle) Err() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.err
}

// Close ends the connection and waits for what the handle started.
func (h *Handle) Close() error {
	err := h.conn.Close()
	<-h.readerDone
	if err != nil && !errors.Is(err, net.ErrClosed) {
		return fmt.Errorf("closing the connection to a supervisor: %w", err)
	}
	return nil
}

// Start executes the tasks with additional variables ("K=V"; ignored where the task has the variable already). It is
// done once: repeated, it answers the state. Refused with STATE if the supervisor failed to prepare or the step has
// ended without a start, with LEASE if the step stops itself and has no deadline ahead.
func (h *Handle) Start(ctx context.Context, env []string) (*supervisorv1.StepState, error) {
	return h.StartMPI(ctx, env, "")
}

// StartMPI is Start for a step whose tasks have a process manager: root is where that of the step's first node serves the
// others (host:port), empty if the step has one node.
func (h *Handle) StartMPI(ctx context.Context, env []string, root string) (*supervisorv1.StepState, error) {
	return h.call(ctx, &supervisorv1.Request{Verb: &supervisorv1.Request_Start{Start: &supervisorv1.Start{Env: env, PmiRoot: root}}})
}

// Extend moves the lease deadline to deadlineBootNS (clock of BootNow); an earlier one than before is ignored.
func (h *Handle) Extend(ctx context.Context, deadlineBootNS int64) (*supervisorv1.StepState, error) {
	return h.call(ctx, &supervisorv1.Request{Verb: &supervisorv1.Request_Extend{Extend: &supervisorv1.Extend{DeadlineBootNs: deadlineBootNS}}})
}

// Signal delivers a signal once: an ordinal at or below the last delivered is ignored. tree: to all processes of the
// step on this node instead of each task's first one.
func (h *Handle) Signal(ctx context.Context, ordinal, signal uint32, tree bool) (*supervisorv1.StepState, error) {
	return h.call(ctx, &supervisorv1.Request{Verb: &supervisorv1.Request_Signal{
		Signal: &supervisorv1.Signal{Ordinal: ordinal, Signal: signal, Tree: tree}}})
}

// Terminate ends the step: TERM, KILL after the grace (rounded up to milliseconds; 0: KILL at once). Repeated with a
// shorter grace it ends sooner, never later. The sentence goes to the first task's standard error as a line, once.
// A step that was not started ends without one.
func (h *Handle) Terminate(ctx context.Context, grace time.Duration, sentence string) (*supervisorv1.StepState, error) {
	ms := uint32((max(grace, 0) + time.Millisecond - 1) / time.Millisecond)
	return h.call(ctx, &supervisorv1.Request{Verb: &supervisorv1.Request_Terminate{
		Terminate: &supervisorv1.Terminate{GraceMs: ms, Sentence: sentence}}})
}

// SetTimeLimit replaces the time limit, measured from the start of the tasks; 0 means none. UNSUPPORTED by supervisors
// older than this verb.
func (h *Handle) SetTimeLimit(ctx context.Context, limit time.Duration) (*supervisorv1.StepState, error) {
	return h.call(ctx, &supervisorv1.Request{Verb: &supervisorv1.Request_Limit{
		Limit: &supervisorv1.Limit{TimeLimitMs: uint64(max(limit, 0) / time.Millisecond)}}})
}

// SetTiming is SetTimeLimit with the signals before the limit that move with it. Supervisors older than version 2 take the limit alone.
func (h *Handle) SetTiming(ctx context.Context, limit time.Duration, warnings []*supervisorv1.Warning) (*supervisorv1.StepState, error) {
	return h.call(ctx, &supervisorv1.Request{Verb: &supervisorv1.Request_Limit{
		Limit: &supervisorv1.Limit{TimeLimitMs: uint64(max(limit, 0) / time.Millisecond), Warnings: warnings}}})
}

// Resize changes the size of the tasks' terminals. UNSUPPORTED by supervisors older than version 2.
func (h *Handle) Resize(ctx context.Context, rows, columns uint32) error {
	_, err := h.call(ctx, &supervisorv1.Request{Verb: &supervisorv1.Request_Resize{
		Resize: &supervisorv1.Resize{Size: &supervisorv1.Terminal{Rows: rows, Columns: columns}}}})
	return err
}

// Ping asks for the state, to know that the supervisor answers.
func (h *Handle) Ping(ctx context.Context) error {
	_, err := h.call(ctx, &supervisorv1.Request{Verb: &supervisorv1.Request_Watch{Watch: &supervisorv1.Watch{}}})
	return err
}

// Input writes to the stdin of every task whose stdin is a pipe. offset is the position of data in the whole stream;
// what was taken before is skipped, so that a piece may be sent again. It returns the number of bytes of the stream
// that were taken, after the pipes of all tasks took the piece (which is the back-pressure: a task that does not read
// delays it as long as it likes) or were closed by their readers. end closes stdin after the piece. data may be of any
// length: it is sent in pieces of MaxInput.
func (h *Handle) Input(ctx context.Context, offset uint64, data []byte, end bool) (uint64, error) {
	for {
		piece := data[:min(len(data), MaxInput)]
		data = data[len(piece):]
		state, err := h.call(ctx, &supervisorv1.Request{Verb: &supervisorv1.Request_Input{
			Input: &supervisorv1.Input{Offset: offset, Data: piece, End: end && len(data) == 0}}})
		if err != nil {
			return 0, err
		}
		offset += uint64(len(piece))
		if len(data) == 0 {
			return state.GetInputOffset(), nil
		}
	}
}

// Dismiss lets the supervisor of an ended or failed step leave. Call it when the result is in the journal. Refused with
// STATE before the end. A supervisor that nobody dismisses leaves by itself 60 seconds after its end.
func (h *Handle) Dismiss(ctx context.Context) error {
	_, err := h.call(ctx, &supervisorv1.Request{Verb: &supervisorv1.Request_Dismiss{Dismiss: &supervisorv1.Dismiss{}}})
	return err
}

// number gives the next request its number and remembers who waits for its answer.
func (h *Handle) number(answer chan *supervisorv1.Event) uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.next++
	if answer != nil {
		h.waiting[h.next] = answer
	}
	return h.next
}

// send writes a message. If the context ends in the middle of it the connection is of no use any more and is closed.
func (h *Handle) send(ctx context.Context, r *supervisorv1.Request) error {
	select {
	case h.write <- struct{}{}:
		defer func() { <-h.write }()
	case <-ctx.Done():
		return ctx.Err()
	}
	cut := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		_ = h.conn.SetWriteDeadline(time.Unix(1, 0))
		close(cut)
	})
	err := WriteFrame(h.conn, r)
	if !stop() {
		<-cut
		if err != nil {
			_ = h.conn.Close()
			return ctx.Err()
		}
		_ = h.conn.SetWriteDeadline(time.Time{})
	}
	return err
}

func (h *Handle) call(ctx context.Context, r *supervisorv1.Request) (*supervisorv1.StepState, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	answer := make(chan *supervisorv1.Event, 1)
	r.Id = h.number(answer)
	defer func() {
		h.mu.Lock()
		delete(h.waiting, r.Id)
		h.mu.Unlock()
	}()
	if err := h.send(ctx, r); err != nil {
		if errors.Is(err, ErrFrame) || ctx.Err() != nil {
			return nil, err
		}
		return nil, fmt.Errorf("%w: %w", ErrClosed, err)
	}
	select {
	case e := <-answer:
		if e.GetError() != "" {
			return e.GetState(), &Refused{Reason: e.GetError()}
		}
		return e.GetState(), nil
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-h.readerDone:
	}
	select { // The answer may have been the last thing that came.
	case e := <-answer:
		if e.GetError() != "" {
			return e.GetState(), &Refused{Reason: e.GetError()}
		}
		return e.GetState(), nil
	default:
		return nil, fmt.Errorf("%w: %w", ErrClosed, h.Err())
	}
}

// read receives until the connection ends.
func (h *Handle) read() {
	defer close(h.readerDone)
	defer close(h.events)
	for {
		e := new(supervisorv1.Event)
		if err := ReadFrame(h.conn, e); err != nil {
			h.mu.Lock()
			h.err = fmt.Errorf("reading from the supervisor: %w", err)
			h.mu.Unlock()
			_ = h.conn.Close()
			return
		}
		h.mu.Lock()
		answer := h.waiting[e.GetId()]
		delete(h.waiting, e.GetId())
		fresh := e.GetState() != nil && !proto.Equal(h.state, e.GetState())
		if fresh {
			h.state = e.GetState()
		}
		h.mu.Unlock()
		if fresh {
			h.publish(e.GetState())
		}
		if answer != nil {
			answer <- e
		}
	}
}

// publish replaces a state that was not received yet.
func (h *Handle) publish(state *supervisorv1.StepState) {
	select {
	case <-h.events:
	default:
	}
	h.events <- state // Only this goroutine sends, so there is room.
}
