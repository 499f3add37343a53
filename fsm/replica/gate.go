package replica

import (
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"
)

// raftTransport is what hashicorp/raft's transports offer, pre-vote included.
type raftTransport interface {
	raft.Transport
	raft.WithPreVote
	raft.WithClose
}

// gate is the transport as this member uses it. It puts the peer's id into the address, so that only that member answers; it can be
// shut, so that a leader that must not lead falls silent and loses its lease; and it remembers what peers have answered.
type gate struct {
	raftTransport
	dial   func(raft.ServerID, raft.ServerAddress) raft.ServerAddress
	before func(target raft.ServerID) error // the way to the peer; nil means always open
	after  func(target raft.ServerID) error // the way back
	shut   atomic.Int32                     // number of reasons to be silent
	hold   func() bool                      // asked before an election: leave it to others; nil means never

	mu    sync.Mutex
	peers map[raft.ServerID]peerNews
}

// peerNews is the last that a peer has answered.
type peerNews struct {
	at        time.Time
	lastIndex uint64
}

var (
	errShut = errors.New("this member must not speak now")
	errHeld = errors.New("this member leaves it to others to lead, because its disk is full")
)

func newGate(inner raftTransport, dial func(raft.ServerID, raft.ServerAddress) raft.ServerAddress) *gate {
	return &gate{raftTransport: inner, dial: dial, peers: map[raft.ServerID]peerNews{}}
}

func (g *gate) call(id raft.ServerID, rpc func() error) error {
	if g.shut.Load() > 0 {
		return errShut
	}
	if g.before != nil {
		if err := g.before(id); err != nil {
			return err
		}
	}
	if err := rpc(); err != nil {
		return err
	}
	if g.after != nil {
		if err := g.after(id); err != nil {
			return err
		}
	}
	if g.shut.Load() > 0 {
		return errShut
	}
	return nil
}

func (g *gate) heard(id raft.ServerID, lastIndex uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.peers[id] = peerNews{time.Now(), lastIndex}
}

func (g *gate) news(id raft.ServerID) (peerNews, bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	n, ok := g.peers[id]
	return n, ok
}

// AppendEntries sends entries or a heartbeat.
func (g *gate) AppendEntries(id raft.ServerID, a raft.ServerAddress, q *raft.AppendEntriesRequest, p *raft.AppendEntriesResponse) error {
	err := g.call(id, func() error { return g.raftTransport.AppendEntries(id, g.dial(id, a), q, p) })
	if err == nil {
		g.heard(id, p.LastLog)
	}
	return err
}

// AppendEntriesPipeline begins to send entries without waiting for each answer.
func (g *gate) AppendEntriesPipeline(id raft.ServerID, a raft.ServerAddress) (raft.AppendPipeline, error) {
	if g.before != nil {
		return nil, raft.ErrPipelineReplicationNotSupported // each message goes through the gate by itself
	}
	if g.shut.Load() > 0 {
		return nil, errShut
	}
	p, err := g.raftTransport.AppendEntriesPipeline(id, g.dial(id, a))
	if err != nil {
		return nil, err
	}
	return &gatedPipeline{p, g}, nil
}

type gatedPipeline struct {
	raft.AppendPipeline
	g *gate
}

// AppendEntries sends entries.
func (p *gatedPipeline) AppendEntries(q *raft.AppendEntriesRequest, r *raft.AppendEntriesResponse) (raft.AppendFuture, error) {
	if p.g.shut.Load() > 0 {
		return nil, errShut
	}
	return p.AppendPipeline.AppendEntries(q, r)
}

// RequestVote asks for a vote.
func (g *gate) RequestVote(id raft.ServerID, a raft.ServerAddress, q *raft.RequestVoteRequest, p *raft.RequestVoteResponse) error {
	return g.call(id, func() error { return g.raftTransport.RequestVote(id, g.dial(id, a), q, p) })
}

// RequestPreVote asks whether a vote would be given.
func (g *gate) RequestPreVote(id raft.ServerID, a raft.ServerAddress, q *raft.RequestPreVoteRequest, p *raft.RequestPreVoteResponse) error {
	if g.hold != nil && g.hold() {
		return errHeld
	}
	return g.call(id, func() error { return g.raftTransport.RequestPreVote(id, g.dial(id, a), q, p) })
}

// InstallSnapshot sends a snapshot.
func (g *gate) InstallSnapshot(id raft.ServerID, a raft.ServerAddress, q *raft.InstallSnapshotRequest, p *raft.InstallSnapshotResponse, r io.Reader) error {
	return g.call(id, func() error { return g.raftTransport.InstallSnapshot(id, g.dial(id, a), q, p, r) })
}

// TimeoutNow makes a peer stand for election at once.
func (g *gate) TimeoutNow(id raft.ServerID, a raft.ServerAddress, q *raft.TimeoutNowRequest, p *raft.TimeoutNowResponse) error {
	err := g.call(id, func() error { return g.raftTransport.TimeoutNow(id, g.dial(id, a), q, p) })
	if err != nil {
		return fmt.Errorf("ask member %s to lead: %w", id, err)
	}
	return nil
}
