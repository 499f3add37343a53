package replica

import (
	"context"
	"errors"
	"sort"
	"time"

	"github.com/hashicorp/raft"
)

// hashicorp/raft counts entries to know when a snapshot is due and what stays in the log after it. Entries have up to 256 KiB, so both are
// bounded by size as well. The records tell sizes: see seam.

// snapshotPause is how long a member waits after a snapshot that failed.
const snapshotPause = 10 * time.Second

// bytesAfter is the size of the entries after index; those that were deleted do not count.
func (s *boltStore) bytesAfter(index uint64) (uint64, error) {
	e, newest := s.ends()
	if index >= e.last {
		return 0, nil
	}
	var l raft.Log
	at, err := s.fetch(max(index, e.first), &l)
	if err != nil {
		return 0, err
	}
	n := newest.bytes - at.bytes
	if index < e.first {
		n += uint64(len(l.Data) + len(l.Extensions))
	}
	return n, nil
}

// trailing is how many of the newest entries may stay if there may be most of them, of that many bytes together.
func (s *boltStore) trailing(most, bytes uint64) (uint64, error) {
	e, _ := s.ends()
	lowest := e.first
	if e.last > most {
		lowest = max(lowest, e.last-most)
	}
	if n, err := s.bytesAfter(lowest); err != nil || n <= bytes {
		return most, err
	}
	var failed error
	n := sort.Search(int(e.last-lowest), func(i int) bool { // too many if more than i stay
		size, err := s.bytesAfter(e.last - uint64(i) - 1)
		failed = errors.Join(failed, err)
		return size > bytes
	})
	return uint64(n), failed
}

// boundTrailing tells hashicorp/raft how many entries may stay in the log after the snapshot that is about to be taken.
func (m *Member[V]) boundTrailing() {
	if m.bolt == nil || !m.started.Load() {
		return
	}
	n, err := m.bolt.trailing(m.cfg.Profile.TrailingLogs, m.cfg.Profile.SnapshotBytes)
	if err != nil {
		m.log.Warn("the size of the log is not known; more of it may stay than should", "err", err)
		return
	}
	c := m.raft.ReloadableConfig()
	if c.TrailingLogs == n {
		return
	}
	c.TrailingLogs = n
	if err := m.raft.ReloadConfig(c); err != nil {
		m.log.Error("the number of entries that stay in the log can't be set", "entries", n, "err", err)
	}
}

// snapshotIfDue begins a snapshot if the entries since the last one are too big. Only keep calls it; Close waits for the snapshot.
func (m *Member[V]) snapshotIfDue() {
	if m.DiskFull() || m.snapshotting.Load() {
		return
	}
	n, err := m.bolt.bytesAfter(m.snaps.newest.Load())
	if err != nil || n < m.cfg.Profile.SnapshotBytes { // an error that matters has quarantined the member
		return
	}
	m.snapshotting.Store(true)
	m.wg.Go(func() {
		defer m.snapshotting.Store(false)
		if err := m.raft.Snapshot().Error(); err != nil && !errors.Is(err, raft.ErrRaftShutdown) {
			m.log.Warn("a snapshot that is due by the size of the log failed", "bytes", n, "again_in", snapshotPause, "err", err)
			m.sleep(context.Background(), snapshotPause)
		}
	})
}
