package replica

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

// Propose writes a command to the log and returns its result when it is on the disks of a quorum and applied here. It fills in proposed_at
// and level. Commands that are proposed at the same time share an entry.
//
// A refusal is a result, not an error; so is a command whose level is above the cluster's (reason LEVEL_NOT_RAISED, or
// NOT_BOOTSTRAPPED). Errors: nothing was written with ErrNotLeader, ErrQuarantined, ErrDiskFull, ErrBusy, ErrTooLarge, ErrClosed and a bare
// error of ctx; with ErrOutcomeUnknown it may have been.
func (m *Member[V]) Propose(ctx context.Context, cmd *logv1.Command) (*logv1.Result, error) {
	if err := m.mayPropose(); err != nil {
		return nil, err
	}
	if cmd.Level = m.cfg.LevelOf(cmd); cmd.Level == 0 {
		return nil, errors.New("propose: the command has no operation; every member would stop at it")
	}
	if refusal := m.checkLevel(cmd); refusal != nil {
		return &logv1.Result{Refusal: refusal}, nil
	}
	cmd.ProposedAt = timestamppb.Now()
	data, err := proto.Marshal(cmd)
	if err != nil {
		return nil, fmt.Errorf("propose: encode the command: %w", err)
	}
	if size := entrySize(len(data)); size > maxEntryBytes {
		return nil, fmt.Errorf("%w: it has %d bytes, an entry has at most %d; large contents are uploaded in pieces", ErrTooLarge, size, maxEntryBytes)
	}
	p := &proposal{data: data, done: make(chan outcome, 1)}
	if err := m.queue.put(p); err != nil {
		return nil, err
	}
	stop := m.stop
	for {
		select {
		case o := <-p.done:
			return o.result, o.err
		case <-stop:
			if p.state.CompareAndSwap(proposalQueued, proposalAbandoned) {
				return nil, ErrClosed
			}
			stop = nil // it is being written: the lane answers
		case <-ctx.Done():
			if p.state.CompareAndSwap(proposalQueued, proposalAbandoned) {
				return nil, fmt.Errorf("propose: gave up before the command was written: %w", ctx.Err())
			}
			return nil, fmt.Errorf("%w: the caller gave up: %w", ErrOutcomeUnknown, ctx.Err())
		}
	}
}

func (m *Member[V]) mayPropose() error {
	if err := m.Serving(); err != nil {
		return err
	}
	if !m.leads() {
		return m.notLeader()
	}
	if m.DiskFull() {
		return fmt.Errorf("%w: make space in %s; until then another member leads", ErrDiskFull, m.cfg.Dir)
	}
	return nil
}

func (m *Member[V]) notLeader() error {
	if l := m.Leader(); l.ID != "" && !l.IsSelf {
		return fmt.Errorf("%w: member %s at %s leads", ErrNotLeader, l.ID, l.Address)
	}
	return fmt.Errorf("%w: at the moment no leader is known", ErrNotLeader)
}

// checkLevel refuses a command that needs more than the cluster's level.
func (m *Member[V]) checkLevel(cmd *logv1.Command) *apiv1.ErrorDetail {
	v := m.View()
	if v.ClusterID() == "" {
		if cmd.GetBootstrap() != nil {
			return nil
		}
		return &apiv1.ErrorDetail{Reason: "NOT_BOOTSTRAPPED", Subject: "cluster",
			Sentence: "this cluster has not begun yet: start one controller with --bootstrap"}
	}
	if cmd.Level > v.Level() {
		return &apiv1.ErrorDetail{Reason: "LEVEL_NOT_RAISED", Subject: fmt.Sprintf("level %d", cmd.Level),
			Sentence: fmt.Sprintf("this needs feature level %d, the cluster is at %d: raise the level when all controllers are upgraded", cmd.Level, v.Level())}
	}
	return nil
}

// entrySize is what a command of n bytes takes in an entry.
func entrySize(n int) int { return protowire.SizeTag(1) + protowire.SizeBytes(n) }

const (
	proposalQueued = iota
	proposalTaken
	proposalAbandoned
)

type outcome struct {
	result *logv1.Result
	err    error
}

type proposal struct {
	data  []byte
	done  chan outcome // capacity 1; written once
	state atomic.Int32
}

// queue holds the commands that wait to be written.
type queue struct {
	maxCommands, maxBytes int
	wake                  chan struct{} // capacity 1: there may be something

	mu    sync.Mutex
	items []*proposal
	bytes int
}

func newQueue(commands, bytes int) *queue {
	return &queue{maxCommands: commands, maxBytes: bytes, wake: make(chan struct{}, 1)}
}

func (q *queue) put(p *proposal) error {
	q.mu.Lock()
	if len(q.items) >= q.maxCommands || q.bytes+len(p.data) > q.maxBytes {
		n, b := len(q.items), q.bytes
		q.mu.Unlock()
		return fmt.Errorf("%w: %d with %d bytes; try again later", ErrBusy, n, b)
	}
	q.items = append(q.items, p)
	q.bytes += len(p.data)
	q.mu.Unlock()
	q.signal()
	return nil
}

func (q *queue) signal() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// take returns the commands for the next entry; none if none wait.
func (q *queue) take() []*proposal {
	q.mu.Lock()
	defer q.mu.Unlock()
	var out []*proposal
	size, n := 0, 0
	for _, p := range q.items {
		if s := entrySize(len(p.data)); len(out) == maxEntryCommands || size+s > maxEntryBytes {
			break
		} else if p.state.CompareAndSwap(proposalQueued, proposalTaken) {
			out, size = append(out, p), size+s
		}
		n++
		q.bytes -= len(p.data)
	}
	clear(q.items[:n])
	if q.items = q.items[n:]; len(q.items) == 0 {
		q.items = nil
	} else {
		q.signal()
	}
	return out
}

// writeEntries is a lane: it writes one entry at a time until the member is closed. There are two lanes, so two entries are in flight
// while further commands gather for the next one.
func (m *Member[V]) writeEntries() {
	for {
		if batch := m.queue.take(); len(batch) > 0 {
			m.writeEntry(batch)
			runtime.Gosched() // those who were answered may have more: it goes into the same entry
			continue
		}
		select {
		case <-m.queue.wake:
		case <-m.stop:
			for batch := m.queue.take(); len(batch) > 0; batch = m.queue.take() {
				answer(batch, nil, ErrClosed)
			}
			return
		}
	}
}

func answer(batch []*proposal, results []*logv1.Result, err error) {
	for i, p := range batch {
		if err != nil {
			p.done <- outcome{err: err}
		} else {
			p.done <- outcome{result: results[i]}
		}
	}
}

// writeEntry writes the commands as one entry and answers them.
func (m *Member[V]) writeEntry(batch []*proposal) {
	if err := m.mayPropose(); err != nil {
		answer(batch, nil, err)
		return
	}
	size := 0
	for _, p := range batch {
		size += entrySize(len(p.data))
	}
	entry := make([]byte, 0, size)
	for _, p := range batch {
		entry = protowire.AppendTag(entry, 1, protowire.BytesType)
		entry = protowire.AppendBytes(entry, p.data)
	}
	f := m.raft.Apply(entry, enqueueTimeout)
	if err := f.Error(); err != nil {
		answer(batch, nil, m.outcomeOf(err))
		return
	}
	switch r := f.Response().(type) {
	case []*logv1.Result:
		if len(r) != len(batch) {
			answer(batch, nil, fmt.Errorf("%w: the state machine answered %d commands with %d results", ErrOutcomeUnknown, len(batch), len(r)))
			return
		}
		answer(batch, r, nil)
	case error:
		answer(batch, nil, fmt.Errorf("%w: %w: %w", ErrOutcomeUnknown, ErrQuarantined, r))
	default:
		answer(batch, nil, fmt.Errorf("%w: unexpected answer %T", ErrOutcomeUnknown, r))
	}
}

// outcomeOf tells, from an error of hashicorp/raft, whether anything was written.
func (m *Member[V]) outcomeOf(err error) error {
	switch {
	case errors.Is(err, raft.ErrNotLeader):
		return m.notLeader()
	case errors.Is(err, raft.ErrLeadershipTransferInProgress):
		return fmt.Errorf("%w: leadership is being handed over", ErrNotLeader)
	case errors.Is(err, raft.ErrEnqueueTimeout):
		return fmt.Errorf("%w: the log did not take an entry within %v", ErrBusy, enqueueTimeout)
	case errors.Is(err, ErrDiskFull):
		return err
	case errors.Is(err, raft.ErrLeadershipLost):
		return fmt.Errorf("%w: leadership was lost while the entry was being replicated", ErrOutcomeUnknown)
	}
	return fmt.Errorf("%w: %w", ErrOutcomeUnknown, err)
}

// leads tells whether hashicorp/raft takes this member for the leader.
func (m *Member[V]) leads() bool {
	return m.started.Load() && m.raft.State() == raft.Leader
}

// sleep waits, or less if the member is closed or ctx ends.
func (m *Member[V]) sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-m.stop:
	case <-ctx.Done():
	}
}
