package replica

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"
)

// Member is one member of a cluster whose state machine publishes views of type V. Replica is the one that controllers use. Its
// methods may be called concurrently.
type Member[V View] struct {
	cfg     Config
	id      string
	address string
	log     *slog.Logger
	raft    *raft.Raft
	fsm     *machine[V]
	gate    *gate
	bolt    *boltStore  // nil in memory
	snaps   *snapStore  // nil in memory
	space   *space      // nil in memory
	delay   *delayMeter // nil in memory
	queue   *queue
	reads   *readQueue
	lead    leadership
	quar    quarantine
	handed  atomic.Value // string: id of the member to which this one handed over last because it could not lead

	started      atomic.Bool // raft is set
	snapshotting atomic.Bool // a snapshot that is due by size is being taken
	notify       chan bool
	observations chan raft.Observation
	stop         chan struct{} // closed by Close
	lanes        sync.WaitGroup
	wg           sync.WaitGroup
	awaitMu      sync.Mutex
	closing      bool // guarded by awaitMu: nothing new is awaited
	closeOnce    sync.Once
	closeErr     error
	raftDown     func() error
}

// parts are what differs between a member on disk and one in memory.
type parts struct {
	id      string
	address string
	logs    raft.LogStore
	stable  raft.StableStore
	snaps   raft.SnapshotStore
	gate    *gate
}

// OpenMember opens the member in cfg.Dir, which may be new, checks its files, restores its state and takes part in its cluster. Damaged
// files are refused (ErrDamaged, ErrQuarantined) with a sentence that names the remedy. Controllers use Open.
func OpenMember[V View](cfg Config, sm StateMachine[V]) (*Member[V], error) {
	cfg.fill()
	if err := cfg.check(); err != nil {
		return nil, err
	}
	if err := VerifyDir(cfg.Dir); err != nil {
		return nil, fmt.Errorf("open member: %w", err)
	}
	id, err := prepareDir(cfg.Dir)
	if err != nil {
		return nil, fmt.Errorf("open member: %w", err)
	}
	m := newMember(cfg, id, sm)
	m.space = newSpace(cfg.Dir, cfg.BallastBytes, cfg.LowSpaceBytes, m.log)
	if st, err := os.Stat(m.space.path()); err == nil && st.Size() == cfg.BallastBytes {
		m.space.held = true
	}
	m.space.check()
	m.bolt, err = openBolt(dbPath(cfg.Dir), m.space, m.leads, m.storeFailed)
	if err != nil {
		return nil, fmt.Errorf("open member: %w. %s", err, remedy(cfg.Dir))
	}
	snaps, err := newSnapStore(filepath.Join(cfg.Dir, snapshotDir), m.space, m.storeFailed)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open member: %w", err), m.bolt.Close())
	}
	m.snaps = snaps
	if err := dropCovered(m.bolt, snaps); err != nil {
		return nil, errors.Join(fmt.Errorf("open member: %w", err), m.bolt.Close())
	}
	streams, err := listen(id, &m.cfg)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open member: %w", err), m.bolt.Close())
	}
	g := newGate(newNetworkTransport(streams, cfg.Profile, raftLogger(m.log)), addressFor)
	if err := m.start(parts{id: id, address: streams.advertise.String(), logs: m.bolt, stable: m.bolt, snaps: snaps, gate: g}); err != nil {
		return nil, errors.Join(fmt.Errorf("open member: %w", err), g.Close(), m.bolt.Close())
	}
	if err := m.checkTwin(streams); err != nil {
		return nil, errors.Join(fmt.Errorf("open member: %w", err), m.Close())
	}
	m.delay = newDelayMeter(cfg.Profile.Election, m.log)
	m.wg.Go(func() { m.delay.run(m.stop) })
	return m, nil
}

// dropCovered deletes a log that ends before the newest snapshot: the process ended between taking in a snapshot from the leader and
// deleting the log that it replaces. Entries after the snapshot would not follow it.
func dropCovered(log *boltStore, snaps *snapStore) error {
	all, err := snaps.List()
	if err != nil {
		return err
	}
	if e, _ := log.ends(); len(all) > 0 && e.last < all[0].Index {
		return log.DeleteRange(e.first, e.last)
	}
	return nil
}

func newMember[V View](cfg Config, id string, sm StateMachine[V]) *Member[V] {
	m := &Member[V]{cfg: cfg, id: id, stop: make(chan struct{}),
		log:   cfg.Log.With("member", cfg.Name, "member_id", id),
		queue: newQueue(cfg.QueueCommands, cfg.QueueBytes), reads: newReadQueue(),
		notify: make(chan bool, 16), observations: make(chan raft.Observation, 64)}
	m.quar.init()
	m.lead.init()
	m.fsm = newMachine(sm, func(err error) { m.setAside(err.Error(), false) }, m.maySnapshot)
	return m
}

// maySnapshot prepares for a snapshot, or tells why there is none now.
func (m *Member[V]) maySnapshot() error {
	if m.space != nil && m.space.full.Load() {
		return fmt.Errorf("%w: a snapshot is not taken now", ErrDiskFull)
	}
	m.boundTrailing()
	return nil
}

// storeFailed is called by the stores when they must not be used any more.
func (m *Member[V]) storeFailed(err error) {
	m.setAside(err.Error(), true)
}

// start starts hashicorp/raft and the member's goroutines.
func (m *Member[V]) start(p parts) (err error) {
	m.gate, m.address = p.gate, p.address
	m.gate.hold = func() bool { return m.started.Load() && m.holdsBack() }
	t := m.cfg.Profile
	c := raft.DefaultConfig()
	c.LocalID = raft.ServerID(p.id)
	c.HeartbeatTimeout, c.ElectionTimeout, c.LeaderLeaseTimeout, c.CommitTimeout = t.Heartbeat, t.Election, t.Lease, t.Commit
	c.MaxAppendEntries, c.SnapshotInterval, c.SnapshotThreshold, c.TrailingLogs = t.MaxAppendEntries, t.SnapshotInterval, t.SnapshotThreshold, t.TrailingLogs
	c.ShutdownOnRemove = false
	c.NoLegacyTelemetry = true
	c.NotifyCh = m.notify
	c.Logger = raftLogger(m.log)
	defer func() { // hashicorp/raft panics where it can't read its log
		if p := recover(); p != nil {
			err = fmt.Errorf("start: %v\n%s", p, debug.Stack())
		}
		if q := m.Quarantined(); err != nil && q != "" {
			err = fmt.Errorf("%s. %s", q, remedy(m.cfg.Dir))
		}
	}()
	m.raft, err = raft.NewRaft(c, m.fsm, p.logs, p.stable, p.snaps, p.gate)
	if err != nil {
		return err
	}
	m.started.Store(true)
	m.raftDown = sync.OnceValue(func() error {
		f := m.raft.Shutdown()
		if m.bolt != nil {
			m.bolt.abort()
		}
		return f.Error()
	})
	m.raft.RegisterObserver(raft.NewObserver(m.observations, false, func(o *raft.Observation) bool {
		switch o.Data.(type) {
		case raft.LeaderObservation, raft.RaftState:
			return true
		}
		return false
	}))
	m.wg.Go(m.watch)
	m.wg.Go(m.keep)
	for range entriesInFlight {
		m.lanes.Go(m.writeEntries)
	}
	m.lanes.Go(m.runBarriers)
	return nil
}

// ID is the random id of the member's data directory.
func (m *Member[V]) ID() string { return m.id }

// Address is the HOST:PORT at which other members reach this one.
func (m *Member[V]) Address() string { return m.address }

// View is the newest published view. It is there also while the member is quarantined, for diagnosis: who serves it must
// ask Serving first.
func (m *Member[V]) View() V { return m.fsm.current.Load().view }

// Applied is the log index of the last command in the newest published view.
func (m *Member[V]) Applied() uint64 { return m.fsm.current.Load().index }

// Changed is closed at the next publication. Take the channel first, then the view.
func (m *Member[V]) Changed() <-chan struct{} { return m.fsm.current.Load().next }

// DigestAt is the digest right after the entry at index, if that entry had a Tick with mark_digest. The last 64 are kept.
func (m *Member[V]) DigestAt(index uint64) (uint64, bool) { return m.fsm.digests.get(index) }

// Serving is nil if this member may serve: it is not quarantined and not closed.
func (m *Member[V]) Serving() error {
	if reason := m.Quarantined(); reason != "" {
		return fmt.Errorf("%w: %s", ErrQuarantined, reason)
	}
	select {
	case <-m.stop:
		return ErrClosed
	default:
		return nil
	}
}

// DiskFull tells whether this member refuses commands because its disk is full.
func (m *Member[V]) DiskFull() bool { return m.space != nil && m.space.full.Load() }

// Close leaves the cluster's traffic and closes the files. A leader that is to hand over calls Transfer first. It waits for all goroutines,
// at most about 10 s: a disk that does not answer can hold one for ever, which the error then says.
func (m *Member[V]) Close() error {
	m.closeOnce.Do(func() { m.closeErr = m.close() })
	return m.closeErr
}

func (m *Member[V]) close() error {
	m.awaitMu.Lock()
	m.closing = true
	m.awaitMu.Unlock()
	close(m.stop)
	// The lanes first: what they wait for is answered as long as hashicorp/raft runs.
	late := !within(closeTimeout, m.lanes.Wait)
	var err error
	if late = !within(closeTimeout, func() { err = m.raftDown() }) || late; late {
		return fmt.Errorf("close member: %s did not answer within %v; a goroutine is left behind", m.cfg.Dir, closeTimeout)
	}
	m.wg.Wait()
	if m.bolt != nil {
		err = errors.Join(err, m.bolt.Close())
	}
	if err != nil {
		return fmt.Errorf("close member: %w", err)
	}
	return nil
}

// within runs f and tells whether it returned in time.
func within(d time.Duration, f func()) bool {
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-done:
		return true
	case <-t.C:
		return false
	}
}

// await runs a call of hashicorp/raft that can't be interrupted. Close waits for it.
func (m *Member[V]) await(ctx context.Context, f func() error) error {
	done := make(chan error, 1)
	m.awaitMu.Lock()
	if m.closing {
		m.awaitMu.Unlock()
		return ErrClosed
	}
	m.wg.Go(func() { done <- f() })
	m.awaitMu.Unlock()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}
