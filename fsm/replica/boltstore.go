package replica

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hashicorp/raft"
	raftboltdb "github.com/hashicorp/raft-boltdb/v2"
	"go.etcd.io/bbolt"
)

// Keys of raft-boltdb's bucket conf.
var (
	keyFormat = []byte("format") // version (1) ‖ id of the data directory
	keyStable = []byte("stable") // all keys of the stable store
)

const (
	dbFormat    = 2
	deleteChunk = 512 // entries deleted in one transaction, so that compaction does not hold up writes for long
	fullRetry   = 100 * time.Millisecond
)

var (
	errKeyNotFound  = errors.New("not found") // hashicorp/raft compares this text
	errStoreAborted = errors.New("the store is being closed")
	raftTermKey     = "CurrentTerm"
)

// boltStore is the log and the stable store of a member: raft-boltdb, with a checksum around everything that is stored. Every
// record is verified when it is read.
//
// hashicorp/raft panics when it can't store its term or read a committed entry. Neither error reaches it: the store waits
// for space, or ends the calling goroutine of hashicorp/raft (its deferred calls run, so it shuts down cleanly) after it has
// reported why.
type boltStore struct {
	path    string
	db      *raftboltdb.BoltStore
	space   *space
	leading func() bool                  // whether this member leads: a leader does not wait for space, it steps down
	onFail  func(error)                  // called once, when the store must not be used any more
	inject  atomic.Pointer[func() error] // tests: fails the next writes
	aborted chan struct{}                // closed: waiting for space ends
	abort   func()                       // closes aborted
	dead    atomic.Pointer[storeFailure] // set once
	writes  writeClock
	logMu   sync.Mutex // one writer of the log's ends at a time
	termMu  sync.Mutex // one writer of the stable store at a time

	mu sync.RWMutex // guards what follows
	logEnds
	newest seam // of the last entry
	cache  logCache
	stable map[string][]byte
}

type storeFailure struct{ err error }

func boltOptions(readOnly bool) *bbolt.Options {
	return &bbolt.Options{Timeout: time.Second, ReadOnly: readOnly, NoFreelistSync: true,
		FreelistType: bbolt.FreelistMapType, PreLoadFreelist: true}
}

func openDB(path string, readOnly bool) (*raftboltdb.BoltStore, error) {
	return raftboltdb.New(raftboltdb.Options{Path: path, BoltOptions: boltOptions(readOnly), MsgpackUseNewTimeFormat: true})
}

// createBolt makes an empty store that belongs to the data directory with that id.
func createBolt(path, id string) error {
	db, err := openDB(path, false)
	if err != nil {
		return fmt.Errorf("create %s: %w", path, err)
	}
	err = db.StoreLog(sealEnds(logEnds{}))
	for _, r := range []struct{ key, payload []byte }{{keyFormat, append([]byte{dbFormat}, id...)}, {keyStable, nil}} {
		err = errors.Join(err, db.Set(r.key, seal(r.key, r.payload)))
	}
	return errors.Join(err, db.Close())
}

// openBolt opens a store that the child process has found to be sound.
func openBolt(path string, sp *space, leading func() bool, onFail func(error)) (*boltStore, error) {
	s := &boltStore{path: path, space: sp, leading: leading, onFail: onFail, aborted: make(chan struct{})}
	s.abort = sync.OnceFunc(func() { close(s.aborted) })
	s.cache.init()
	err := guard(func() (err error) {
		s.db, err = openDB(path, false)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	if err := s.load(); err != nil {
		return nil, errors.Join(&DamageError{Path: path, What: err.Error()}, s.Close())
	}
	if err := guard(s.sweep); err != nil && !noSpace(err) {
		return nil, errors.Join(fmt.Errorf("remove what is left of a deletion from %s: %w", path, err), s.Close())
	}
	return s, nil
}

// load reads the ends of the log and the stable store.
func (s *boltStore) load() error {
	return guard(func() error {
		meta, err := readMeta(s.db)
		if err != nil {
			return err
		}
		s.logEnds, s.stable = meta.logEnds, meta.stable
		if s.last == 0 {
			return nil
		}
		var l raft.Log
		s.newest, err = readEntry(s.db, s.last, &l)
		return err
	})
}

// sweep removes entries outside the ends of the log, which an interrupted deletion has left behind.
func (s *boltStore) sweep() error {
	lowest, err := s.db.FirstIndex()
	if err != nil {
		return err
	}
	if s.last == 0 {
		if lowest == endsIndex {
			return nil
		}
		return s.db.DeleteRange(1, endsIndex-1)
	}
	if lowest < s.first {
		if err := s.db.DeleteRange(1, s.first-1); err != nil {
			return err
		}
	}
	if err := s.db.GetLog(s.last+1, new(raft.Log)); errors.Is(err, raft.ErrLogNotFound) {
		return nil
	}
	return s.db.DeleteRange(s.last+1, endsIndex-1)
}

type boltMeta struct {
	logEnds
	id     string
	stable map[string][]byte
}

// readMeta verifies and reads everything but the entries.
func readMeta(db *raftboltdb.BoltStore) (boltMeta, error) {
	var m boltMeta
	read := func(key []byte) ([]byte, error) {
		record, err := db.Get(key)
		if errors.Is(err, raftboltdb.ErrKeyNotFound) {
			return nil, fmt.Errorf("record %q is missing", key)
		}
		if err != nil {
			return nil, fmt.Errorf("record %q: %w", key, err)
		}
		p, err := unseal(key, record)
		if err != nil {
			return nil, fmt.Errorf("record %q: %w", key, err)
		}
		return p, nil
	}
	p, err := read(keyFormat)
	if err != nil {
		return m, err
	}
	if len(p) < 1 || p[0] != dbFormat {
		return m, fmt.Errorf("format %x is unknown to this program", p)
	}
	m.id = string(p[1:])
	if p, err = read(keyStable); err != nil {
		return m, err
	}
	if m.stable, err = decodeStable(p); err != nil {
		return m, fmt.Errorf("record %q: %w", keyStable, err)
	}
	var l raft.Log
	if _, err = readEntry(db, endsIndex, &l); err != nil {
		return m, fmt.Errorf("the record of the log's ends: %w", err)
	}
	if m.logEnds, err = decodeEnds(l.Data); err != nil {
		return m, fmt.Errorf("the record of the log's ends: %w", err)
	}
	return m, nil
}

// readEntry reads and verifies one entry.
func readEntry(db *raftboltdb.BoltStore, index uint64, l *raft.Log) (seam, error) {
	var r raft.Log
	err := db.GetLog(index, &r)
	if errors.Is(err, raft.ErrLogNotFound) {
		return seam{}, errors.New("the entry is missing")
	}
	if err != nil {
		return seam{}, fmt.Errorf("the entry can't be decoded: %w", err)
	}
	at, err := unsealLog(index, &r)
	if err != nil {
		return seam{}, err
	}
	*l = r
	return at, nil
}

// guard turns faults of the mapped file (it was truncated) and panics of bolt (a page is nonsense) into errors.
func guard(f func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("the database can't be read: %v", p)
		}
	}()
	return f()
}

// fail records that the store must not be used any more, and returns why.
func (s *boltStore) fail(err error) error {
	if s.dead.CompareAndSwap(nil, &storeFailure{err}) {
		s.abort()
		s.onFail(err)
	}
	return s.dead.Load().err
}

func (s *boltStore) failure() error {
	if f := s.dead.Load(); f != nil {
		return f.err
	}
	return nil
}

func noSpace(err error) bool {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return true
	}
	// bolt makes a text of this one.
	return err != nil && strings.Contains(err.Error(), "file resize error: ") && strings.HasSuffix(err.Error(), syscall.ENOSPC.Error())
}

// write runs f, which is one transaction. Without space it gives up the ballast and tries again; then a leader gets ErrDiskFull and steps
// down, anyone else waits until there is space or the store is closed. Any other error ends the store: after a failed fsync
// nobody knows what is on the disk.
func (s *boltStore) write(what string, f func() error) error {
	defer s.writes.begin()()
	for {
		if err := s.failure(); err != nil {
			return err
		}
		err := guard(func() error {
			if p := s.inject.Load(); p != nil {
				if err := (*p)(); err != nil {
					return err
				}
			}
			return f()
		})
		switch {
		case err == nil:
			return nil
		case !noSpace(err):
			return s.fail(fmt.Errorf("%s: write %s: %w", s.path, what, err))
		case s.space.exhausted():
			continue
		case s.leading():
			return fmt.Errorf("%w: write %s to %s: %w", ErrDiskFull, what, s.path, err)
		}
		select {
		case <-s.aborted:
			return errStoreAborted
		case <-time.After(fullRetry):
		}
	}
}

// IsMonotonic tells hashicorp/raft that the log must not have gaps.
func (s *boltStore) IsMonotonic() bool { return true }

// FirstIndex of the log; 0 if it is empty.
func (s *boltStore) FirstIndex() (uint64, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.first, nil
}

// LastIndex of the log; 0 if it is empty.
func (s *boltStore) LastIndex() (uint64, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.last, nil
}

// GetLog reads and verifies one entry.
func (s *boltStore) GetLog(index uint64, l *raft.Log) error {
	s.mu.RLock()
	first, last := s.first, s.last
	cached := s.cache.get(index)
	s.mu.RUnlock()
	err := s.failure()
	switch {
	case err != nil:
	case index < first || index > last || last == 0:
		err = raft.ErrLogNotFound
	case cached != nil:
		*l = *cached
		return nil
	default:
		if _, err = s.fetch(index, l); err == nil {
			return nil
		}
	}
	// hashicorp/raft v1.7.3 panics on an error where it applies committed entries and where it bootstraps. Its replication
	// goroutines take errors, and must not be ended: they have started others.
	if calledFrom("raft.(*Raft).processLogs", "raft.(*Raft).liveBootstrap") {
		runtime.Goexit()
	}
	return err
}

// fetch reads and verifies an entry on the disk. One that can't be read ends the store, unless it was deleted meanwhile. It may also have
// been deleted and stored anew between the look at the file and that at the ends: then the second look finds it.
func (s *boltStore) fetch(index uint64, l *raft.Log) (seam, error) {
	var err error
	for range 2 {
		var at seam
		if at, err = s.readLog(index, l); err == nil {
			return at, nil
		}
		if e, _ := s.ends(); index < e.first || index > e.last || e.last == 0 {
			return seam{}, raft.ErrLogNotFound
		}
	}
	return seam{}, s.fail(&DamageError{Path: s.path, Index: index, What: err.Error()})
}

func (s *boltStore) readLog(index uint64, l *raft.Log) (at seam, err error) {
	err = guard(func() error {
		at, err = readEntry(s.db, index, l)
		return err
	})
	return at, err
}

// calledFrom tells whether one of the functions is among the callers. It is asked only when something went wrong.
func calledFrom(functions ...string) bool {
	var pcs [24]uintptr
	frames := runtime.CallersFrames(pcs[:runtime.Callers(3, pcs[:])])
	for {
		f, more := frames.Next()
		for _, name := range functions {
			if strings.HasSuffix(f.Function, name) {
				return true
			}
		}
		if !more {
			return false
		}
	}
}

// StoreLog appends one entry.
func (s *boltStore) StoreLog(l *raft.Log) error { return s.StoreLogs([]*raft.Log{l}) }

// StoreLogs appends entries, durably. The new ends of the log are in the same transaction.
func (s *boltStore) StoreLogs(logs []*raft.Log) error {
	if len(logs) == 0 {
		return nil
	}
	s.logMu.Lock()
	defer s.logMu.Unlock()
	next, newest := s.ends()
	if next.last == 0 {
		next.first, next.last = logs[0].Index, logs[0].Index-1
	}
	records := make([]*raft.Log, 0, len(logs)+1)
	for _, l := range logs {
		if l.Index != next.last+1 || l.Index >= endsIndex {
			return fmt.Errorf("%s: entry %d does not follow entry %d", s.path, l.Index, next.last)
		}
		var r *raft.Log
		r, newest = sealLog(l, newest)
		next.last, next.sum = l.Index, newest.sum
		records = append(records, r)
	}
	records = append(records, sealEnds(next))
	if err := s.write("log entries", func() error { return s.db.StoreLogs(records) }); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.logEnds, s.newest = next, newest
	for _, l := range logs {
		s.cache.put(l)
	}
	return nil
}

// DeleteRange deletes entries from lo to hi inclusive, at the beginning or at the end of the log. They are gone, durably, when the
// ends of the log have moved; then they are removed in several transactions. What an error or the end of the process leaves of
// them lies outside the ends and is never read; the next deletion at the beginning, or the next start, removes it.
func (s *boltStore) DeleteRange(lo, hi uint64) error {
	lo, hi, beginning, err := s.cut(lo, hi)
	if err != nil {
		return err
	}
	for at := lo; at <= hi; at += deleteChunk {
		from, to := at, min(hi, at+deleteChunk-1)
		if beginning && at == lo {
			from = 1 // with what an earlier deletion has left
		}
		err := s.write("a deletion", func() error { return s.db.DeleteRange(from, to) })
		if errors.Is(err, ErrDiskFull) || errors.Is(err, errStoreAborted) {
			return nil
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// cut moves the ends of the log so that the entries from lo to hi are outside. It returns those that there are (lo > hi if none) and
// whether they were the beginning of the log.
func (s *boltStore) cut(lo, hi uint64) (_, _ uint64, beginning bool, err error) {
	s.logMu.Lock()
	defer s.logMu.Unlock()
	now, newest := s.ends()
	lo, hi = max(lo, now.first), min(hi, now.last)
	if now.last == 0 || lo > hi {
		return 1, 0, false, nil
	}
	next := now
	switch {
	case lo == now.first && hi == now.last:
		next, newest = logEnds{}, seam{}
	case lo == now.first:
		next.first = hi + 1
	case hi == now.last:
		if newest, err = s.fetch(lo-1, new(raft.Log)); err != nil {
			return 1, 0, false, err
		}
		next.last, next.sum = lo-1, newest.sum
	default:
		return 1, 0, false, fmt.Errorf("%s: entries %d to %d are in the middle of the log", s.path, lo, hi)
	}
	if err := s.write("the end of a deletion", func() error { return s.db.StoreLog(sealEnds(next)) }); err != nil {
		return 1, 0, false, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.logEnds, s.newest = next, newest
	s.cache.init()
	return lo, hi, lo == now.first, nil
}

func (s *boltStore) ends() (logEnds, seam) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.logEnds, s.newest
}

// Set stores one key of the stable store, durably.
func (s *boltStore) Set(key, value []byte) error {
	s.termMu.Lock()
	defer s.termMu.Unlock()
	s.mu.RLock()
	next := maps.Clone(s.stable)
	s.mu.RUnlock()
	next[string(key)] = slices.Clone(value)
	payload := encodeStable(slices.Sorted(maps.Keys(next)), next)
	record := seal(keyStable, payload)
	err := s.write(string(key), func() error { return s.db.Set(keyStable, record) })
	if err != nil {
		if string(key) == raftTermKey && !calledFrom("raft.NewRaft") {
			runtime.Goexit() // hashicorp/raft would panic; in NewRaft the panic is caught
		}
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stable = next
	return nil
}

// Get reads one key of the stable store.
func (s *boltStore) Get(key []byte) ([]byte, error) {
	if err := s.failure(); err != nil {
		return nil, err
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	v, ok := s.stable[string(key)]
	if !ok {
		return nil, errKeyNotFound
	}
	return slices.Clone(v), nil
}

// SetUint64 is Set for numbers.
func (s *boltStore) SetUint64(key []byte, v uint64) error { return s.Set(key, indexKey(v)) }

// GetUint64 is Get for numbers.
func (s *boltStore) GetUint64(key []byte) (uint64, error) {
	v, err := s.Get(key)
	if err != nil {
		return 0, err
	}
	if len(v) != 8 {
		return 0, fmt.Errorf("%s: %s has %d bytes", s.path, key, len(v))
	}
	return binary.BigEndian.Uint64(v), nil
}

// Close closes the file. A store that failed in the middle of a transaction is left to the end of the process.
func (s *boltStore) Close() error {
	s.abort()
	return guard(s.db.Close)
}
