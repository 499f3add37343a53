package replica

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

// View is what this package needs of a published view of the state. *fsm.View is one. Views are immutable.
type View interface {
	// Digest of the whole state.
	Digest() uint64
	// Level is the feature level in force; 0 before the cluster was bootstrapped.
	Level() uint32
	// ClusterID is empty before the cluster was bootstrapped.
	ClusterID() string
	// WriteSnapshot writes the state so that StateMachine.Restore reads it.
	WriteSnapshot(w io.Writer) error
}

// StateMachine is the state that is replicated. Only one goroutine at a time calls it.
type StateMachine[V View] interface {
	// Apply applies one log entry, an encoded logv1.Batch, and has one result for each command. An error means that the entry
	// can't be applied; the member then stops.
	Apply(index, term uint64, entry []byte) ([]*logv1.Result, error)
	// Publish returns an immutable view of the present state, in constant time.
	Publish() V
	// Restore replaces the state by what WriteSnapshot wrote. After an error the state is undefined.
	Restore(r io.Reader) error
}

// Config describes a member.
type Config struct {
	// Dir is the data directory. It is created if it does not exist.
	Dir string
	// Name of the member, for logs.
	Name string
	// RaftListen is the HOST:PORT to listen on for other members; port 0 picks one.
	RaftListen string
	// RaftAdvertise is the HOST:PORT at which the others reach it; empty means the address it listens on.
	RaftAdvertise string
	// TLS has this member's certificate and the cluster's CA in RootCAs. Both sides of a connection must show a certificate
	// from that CA with the organisational unit "muster-controller". nil means no encryption and is for tests only.
	TLS *tls.Config
	// Profile is the timing; the zero value means Production().
	Profile Timing
	// Log takes the log; nil discards it.
	Log *slog.Logger
	// BallastBytes is the space reserved for the time when the disk is full; 0 means 64 MiB, negative none.
	BallastBytes int64
	// LowSpaceBytes: with less free space than this the disk counts as full; 0 means 16 MiB, negative 0.
	LowSpaceBytes int64
	// QueueCommands bounds the commands that wait to be written; 0 means 16,384.
	QueueCommands int
	// QueueBytes bounds their size; 0 means 64 MiB.
	QueueBytes int
	// LevelOf is the feature level that a command needs. Open sets it to fsm.LevelOf.
	LevelOf func(*logv1.Command) uint32
	// Faults plants bugs, for tests that must notice them.
	Faults Faults
}

// Faults are bugs that tests plant to prove that they would be noticed.
type Faults struct {
	// ReadThroughVerifyLeader makes ReadIndex trust hashicorp/raft's VerifyLeader instead of committing a barrier.
	ReadThroughVerifyLeader bool
}

// Timing is how fast a member notices that another one is gone, and when it takes snapshots.
type Timing struct {
	// Heartbeat: a follower that hears nothing for this long (up to twice as long, at random) starts an election.
	Heartbeat time.Duration
	// Election: a candidate starts again after this long.
	Election time.Duration
	// Lease: a leader that does not hear from a quorum for this long steps down. At most Heartbeat.
	Lease time.Duration
	// Commit: followers learn of commits at least this often while nothing else is sent. Launch latency depends on it.
	Commit time.Duration
	// MaxAppendEntries is the number of entries in one message, at most 1,024.
	MaxAppendEntries int
	// SnapshotInterval: this often (up to twice as long, at random) a member looks whether a snapshot is due.
	SnapshotInterval time.Duration
	// SnapshotThreshold: a snapshot is due after this many entries.
	SnapshotThreshold uint64
	// TrailingLogs: this many entries stay in the log after a snapshot, for followers that lag a little.
	TrailingLogs uint64
	// SnapshotBytes: a snapshot is also due after entries of this many bytes, and no more than that stays in the log after it, however few
	// entries that are. 0 means 64 MiB. Members in memory ignore it.
	SnapshotBytes uint64
}

// Development is the profile of local clusters and tests: a dead leader is replaced in about 0.65 s.
func Development() Timing {
	return Timing{Heartbeat: 300 * time.Millisecond, Election: 300 * time.Millisecond, Lease: 150 * time.Millisecond,
		Commit: 5 * time.Millisecond, MaxAppendEntries: 512,
		SnapshotInterval: 30 * time.Second, SnapshotThreshold: 8192, TrailingLogs: 10240, SnapshotBytes: defaultSnapshotBytes}
}

// Production is the calmer profile: a dead leader is replaced in about 1.1 s.
func Production() Timing {
	t := Development()
	t.Heartbeat, t.Election, t.Lease = 500*time.Millisecond, 500*time.Millisecond, 250*time.Millisecond
	t.SnapshotInterval = time.Minute
	return t
}

// Bounds and defaults; docs/limits.md has the reasons.
const (
	maxEntryBytes     = 256 << 10
	maxEntryCommands  = 1024
	entriesInFlight   = 2
	defaultQueue      = 16384
	defaultQueueBytes = 64 << 20
	enqueueTimeout    = 2 * time.Second
	defaultBallast    = 64 << 20

	defaultSnapshotBytes = 64 << 20
	defaultLowSpace      = 16 << 20
	keptDigests          = 64
	keptSnapshots        = 2
	promoteLag           = 1024
	closeTimeout         = 10 * time.Second
	leadPause            = time.Second
	yieldTimeout         = time.Second
	stallElections       = 4
	fullPause            = 10 * time.Second
	fullElections        = 4
)

func (c *Config) fill() {
	if c.Profile == (Timing{}) {
		c.Profile = Production()
	}
	if c.Profile.SnapshotBytes == 0 {
		c.Profile.SnapshotBytes = defaultSnapshotBytes
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.BallastBytes == 0 {
		c.BallastBytes = defaultBallast
	}
	c.BallastBytes = max(c.BallastBytes, 0)
	if c.LowSpaceBytes == 0 {
		c.LowSpaceBytes = defaultLowSpace
	}
	c.LowSpaceBytes = max(c.LowSpaceBytes, 0)
	if c.QueueCommands == 0 {
		c.QueueCommands = defaultQueue
	}
	if c.QueueBytes == 0 {
		c.QueueBytes = defaultQueueBytes
	}
}

func (c *Config) check() error {
	switch {
	case c.Dir == "":
		return errors.New("replica: Config.Dir is empty: name the data directory")
	case c.RaftListen == "":
		return errors.New("replica: Config.RaftListen is empty: name the HOST:PORT for other members")
	case c.LevelOf == nil:
		return errors.New("replica: Config.LevelOf is nil: the level of a command can't be told")
	case c.TLS != nil && c.TLS.RootCAs == nil:
		return errors.New("replica: Config.TLS has no RootCAs: members are known by the cluster's own CA")
	}
	return c.Profile.check()
}

func (t Timing) check() error {
	if t.Lease > t.Heartbeat || t.Election < t.Heartbeat || t.Commit < time.Millisecond || t.MaxAppendEntries < 1 || t.MaxAppendEntries > 1024 {
		return fmt.Errorf("replica: timing %+v: the lease may not exceed the heartbeat, the heartbeat may not exceed the election timeout, "+
			"the commit interval is at least 1 ms, and a message has 1 to 1,024 entries", t)
	}
	return nil
}

// rpcTimeout bounds a message to another member, so that a stopped peer holds a connection only for a while.
func (t Timing) rpcTimeout() time.Duration {
	return min(max(5*t.Heartbeat, time.Second), 10*time.Second)
}
