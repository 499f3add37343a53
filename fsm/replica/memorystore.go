package replica

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"slices"
	"sync"

	"github.com/hashicorp/raft"
)

// memoryLog is a log and stable store in memory. (The one of hashicorp/raft loses count when its whole log is deleted.)
type memoryLog struct {
	mu      sync.Mutex
	entries []raft.Log // without gaps
	stable  map[string][]byte
}

// IsMonotonic tells hashicorp/raft that the log must not have gaps.
func (s *memoryLog) IsMonotonic() bool { return true }

// FirstIndex of the log; 0 if it is empty.
func (s *memoryLog) FirstIndex() (uint64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.first(), nil
}

func (s *memoryLog) first() uint64 {
	if len(s.entries) == 0 {
		return 0
	}
	return s.entries[0].Index
}

// LastIndex of the log; 0 if it is empty.
func (s *memoryLog) LastIndex() (uint64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.last(), nil
}

func (s *memoryLog) last() uint64 {
	if len(s.entries) == 0 {
		return 0
	}
	return s.entries[len(s.entries)-1].Index
}

// GetLog reads one entry.
func (s *memoryLog) GetLog(index uint64, l *raft.Log) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.entries) == 0 || index < s.first() || index > s.last() {
		return raft.ErrLogNotFound
	}
	*l = s.entries[index-s.first()]
	return nil
}

// StoreLog appends one entry.
func (s *memoryLog) StoreLog(l *raft.Log) error { return s.StoreLogs([]*raft.Log{l}) }

// StoreLogs appends entries.
func (s *memoryLog) StoreLogs(logs []*raft.Log) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range logs {
		if len(s.entries) > 0 && l.Index != s.last()+1 {
			return fmt.Errorf("entry %d does not follow entry %d", l.Index, s.last())
		}
		s.entries = append(s.entries, *l)
	}
	return nil
}

// DeleteRange deletes entries at the beginning or at the end.
func (s *memoryLog) DeleteRange(lo, hi uint64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	first, last := s.first(), s.last()
	lo, hi = max(lo, first), min(hi, last)
	switch {
	case last == 0 || lo > hi:
	case lo == first:
		s.entries = slices.Clone(s.entries[hi+1-first:])
	case hi == last:
		s.entries = slices.Clone(s.entries[:lo-first])
	default:
		return fmt.Errorf("entries %d to %d are in the middle of the log", lo, hi)
	}
	return nil
}

// Set stores one key.
func (s *memoryLog) Set(key, value []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stable[string(key)] = slices.Clone(value)
	return nil
}

// Get reads one key.
func (s *memoryLog) Get(key []byte) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	v, ok := s.stable[string(key)]
	if !ok {
		return nil, errKeyNotFound
	}
	return slices.Clone(v), nil
}

// SetUint64 is Set for numbers.
func (s *memoryLog) SetUint64(key []byte, v uint64) error { return s.Set(key, indexKey(v)) }

// GetUint64 is Get for numbers.
func (s *memoryLog) GetUint64(key []byte) (uint64, error) {
	v, err := s.Get(key)
	if err != nil {
		return 0, err
	}
	return binary.BigEndian.Uint64(v), nil
}

// memorySnapshots keeps the newest finished snapshot.
type memorySnapshots struct {
	mu     sync.Mutex
	newest *memorySink
}

type memorySink struct {
	store *memorySnapshots
	meta  raft.SnapshotMeta
	bytes.Buffer
	done bool
}

// Create begins a snapshot.
func (s *memorySnapshots) Create(v raft.SnapshotVersion, index, term uint64, c raft.Configuration, ci uint64, _ raft.Transport) (raft.SnapshotSink, error) {
	return &memorySink{store: s, meta: raft.SnapshotMeta{Version: v, ID: fmt.Sprintf("%d-%d", term, index), Index: index, Term: term,
		Configuration: c, ConfigurationIndex: ci}}, nil
}

// List describes the snapshot, if there is one.
func (s *memorySnapshots) List() ([]*raft.SnapshotMeta, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.newest == nil {
		return nil, nil
	}
	meta := s.newest.meta
	return []*raft.SnapshotMeta{&meta}, nil
}

// Open reads the snapshot.
func (s *memorySnapshots) Open(id string) (*raft.SnapshotMeta, io.ReadCloser, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.newest == nil || s.newest.meta.ID != id {
		return nil, nil, fmt.Errorf("there is no snapshot %s", id)
	}
	meta := s.newest.meta
	return &meta, io.NopCloser(bytes.NewReader(s.newest.Bytes())), nil
}

// ID of the snapshot.
func (k *memorySink) ID() string { return k.meta.ID }

// Cancel forgets what was written.
func (k *memorySink) Cancel() error {
	k.done = true
	return nil
}

// Close makes this snapshot the newest.
func (k *memorySink) Close() error {
	if k.done {
		return nil
	}
	k.done = true
	k.meta.Size = int64(k.Len())
	k.store.mu.Lock()
	defer k.store.mu.Unlock()
	k.store.newest = k
	return nil
}
