package replica

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/hashicorp/raft"
)

// InMemoryDisk is what a member in memory has on its disk: its id, log, vote and snapshot. It outlives the member, so that closing the
// member and opening another one with the same disk is a restart.
type InMemoryDisk struct {
	id    string
	log   *memoryLog
	snaps *memorySnapshots
}

// NewInMemoryDisk makes the disk of a new member with that id.
func NewInMemoryDisk(id string) *InMemoryDisk {
	return &InMemoryDisk{id: id, log: &memoryLog{stable: map[string][]byte{}}, snaps: &memorySnapshots{}}
}

// OpenInMemory opens a member without files and sockets, which also runs in virtual time (testing/synctest). Of cfg it uses Name,
// Profile, Log, the queue's bounds, LevelOf and Faults. The member's id is that of the disk; its address is its id.
func OpenInMemory[V View](cfg Config, sm StateMachine[V], disk *InMemoryDisk, net *InMemoryNetwork) (*Member[V], error) {
	cfg.fill()
	cfg.Dir = ""
	if cfg.LevelOf == nil {
		return nil, errors.New("replica: Config.LevelOf is nil: the level of a command can't be told")
	}
	if err := cfg.Profile.check(); err != nil {
		return nil, err
	}
	m := newMember(cfg, disk.id, sm)
	if err := m.start(parts{id: disk.id, address: disk.id, logs: disk.log, stable: disk.log, snaps: disk.snaps, gate: net.join(disk.id, cfg.Profile)}); err != nil {
		net.leave(disk.id)
		return nil, fmt.Errorf("open member in memory: %w", err)
	}
	return m, nil
}

// InMemoryNetwork connects members in memory. By default every message arrives at once. All methods may be called at any time.
type InMemoryNetwork struct {
	mu      sync.Mutex
	members map[string]*memoryTransport
	cut     map[[2]string]bool       // from, to
	held    map[string]chan struct{} // answers to this member wait until the channel is closed
	latency func() time.Duration
}

// NewInMemoryNetwork makes a network without members.
func NewInMemoryNetwork() *InMemoryNetwork {
	return &InMemoryNetwork{members: map[string]*memoryTransport{}, cut: map[[2]string]bool{}, held: map[string]chan struct{}{}}
}

// SetLatency makes each message take a random time between low and high; the same seed gives the same times.
func (n *InMemoryNetwork) SetLatency(low, high time.Duration, seed uint64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	rng := rand.New(rand.NewPCG(seed, seed))
	n.latency = func() time.Duration { return low + time.Duration(rng.Int64N(int64(high-low)+1)) }
}

// Partition lets members speak only within their group; members in no group speak to nobody.
func (n *InMemoryNetwork) Partition(groups ...[]string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	group := map[string]int{}
	for i, g := range groups {
		for _, id := range g {
			group[id] = i + 1
		}
	}
	clear(n.cut)
	for a := range n.members {
		for b := range n.members {
			if a != b && (group[a] != group[b] || group[a] == 0) {
				n.cut[[2]string{a, b}] = true
			}
		}
	}
}

// Cut lets no message through from one member to another; answers count as messages.
func (n *InMemoryNetwork) Cut(from, to string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.cut[[2]string{from, to}] = true
}

// Heal ends all partitions, cuts and holds.
func (n *InMemoryNetwork) Heal() {
	n.mu.Lock()
	defer n.mu.Unlock()
	clear(n.cut)
	for id, c := range n.held {
		close(c)
		delete(n.held, id)
	}
}

// Hold delays all answers to a member, as if it were stopped right before it reads them, until Release.
func (n *InMemoryNetwork) Hold(id string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.held[id] == nil {
		n.held[id] = make(chan struct{})
	}
}

// Release delivers what Hold has delayed.
func (n *InMemoryNetwork) Release(id string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if c := n.held[id]; c != nil {
		close(c)
		delete(n.held, id)
	}
}

// CallElection makes a member stand for election at once, as a transfer of leadership does. It is a fault that does not need the
// leader's help.
func (n *InMemoryNetwork) CallElection(id string) error {
	n.mu.Lock()
	t := n.members[id]
	n.mu.Unlock()
	if t == nil {
		return fmt.Errorf("%w: %s", ErrUnknownMember, id)
	}
	_, caller := raft.NewInmemTransport("")
	caller.Connect(raft.ServerAddress(id), t.InmemTransport)
	defer caller.Close()
	return caller.TimeoutNow("", raft.ServerAddress(id), &raft.TimeoutNowRequest{RPCHeader: raft.RPCHeader{ProtocolVersion: raft.ProtocolVersionMax}}, new(raft.TimeoutNowResponse))
}

type memoryTransport struct {
	*raft.InmemTransport
	leave func()
}

// Close takes the member off the network.
func (t *memoryTransport) Close() error {
	t.leave()
	return t.InmemTransport.Close()
}

func (n *InMemoryNetwork) join(id string, timing Timing) *gate {
	_, inner := raft.NewInmemTransportWithTimeout(raft.ServerAddress(id), timing.rpcTimeout())
	t := &memoryTransport{InmemTransport: inner, leave: func() { n.leave(id) }}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.members[id] = t
	for other, o := range n.members {
		if other != id {
			inner.Connect(raft.ServerAddress(other), o.InmemTransport)
			o.Connect(raft.ServerAddress(id), inner)
		}
	}
	g := newGate(t, func(_ raft.ServerID, a raft.ServerAddress) raft.ServerAddress { return a })
	g.before = func(to raft.ServerID) error { return n.travel(id, string(to), "") }
	g.after = func(from raft.ServerID) error { return n.travel(string(from), id, id) }
	return g
}

func (n *InMemoryNetwork) leave(id string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.members, id)
}

// travel takes a message from one member to another; an answer to a held member waits.
func (n *InMemoryNetwork) travel(from, to, answerTo string) error {
	n.mu.Lock()
	lost := func() error {
		if n.cut[[2]string{from, to}] || n.members[from] == nil || n.members[to] == nil {
			return fmt.Errorf("no message gets from %s to %s", from, to)
		}
		return nil
	}
	err := lost()
	held := n.held[answerTo]
	var wait time.Duration
	if n.latency != nil {
		wait = n.latency()
	}
	n.mu.Unlock()
	if err != nil {
		return err
	}
	if held != nil {
		<-held
	}
	if wait > 0 {
		time.Sleep(wait)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	return lost()
}
