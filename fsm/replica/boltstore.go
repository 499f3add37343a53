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
	"go.etcd.io/bbolt"
)

// Buckets and keys of raft.db. The tail is written in the same transaction as the log, so that entries which a flipped bit
// in bolt's own page headers hides are missed.
var (
	bucketLog  = []byte("log")
	bucketMeta = []byte("meta")
	keyFormat  = []byte("format") // version (1) ‖ id of the data directory
	keyTail    = []byte("tail")   // first index (8) ‖ last index (8), 0 if empty
	keyStable  = []byte("stable") // all keys of the stable store
)

const (
	dbFormat      = 1
	deleteChunk   = 512 // entries deleted in one transaction, so that compaction does not hold up writes for long
	fullRetry     = 100 * time.Millisecond
	cachedEntries = 1024
	cachedBytes   = 32 << 20
)

var (
	errKeyNotFound  = errors.New("not found") // hashicorp/raft compares this text
	errStoreAborted = errors.New("the store is being closed")
	raftTermKey     = "CurrentTerm"
)

// boltStore is the log and the stable store of a member. Every record is verified when it is read.
//
// hashicorp/raft panics when it can't store its term or read a committed entry. Neither error reaches it: the store waits
// for space, or ends the calling goroutine of hashicorp/raft (its deferred calls run, so it shuts down cleanly) after it has
// reported why.
type boltStore struct {
	path    string
	db      *bbolt.DB
	space   *space
	leading func() bool                  // whether this member leads: a leader does not wait for space, it steps down
	onFail  func(error)                  // called once, when the store must not be used any more
	inject  atomic.Pointer[func() error] // tests: fails the next writes
	aborted chan struct{}                // closed: waiting for space ends
	abort   func()                       // closes aborted
	dead    atomic.Pointer[storeFailure] // set once
	writes  writeClock
	mu      sync.RWMutex
	first   uint64
	last    uint64
	cache   logCache
	logMu   sync.Mutex        // one writer of the log at a time
	termMu  sync.Mutex        // one writer of the stable store at a time
	stable  map[string][]byte // guarded by mu
}

type storeFailure struct{ err error }

func boltOptions(readOnly bool) *bbolt.Options {
	return &bbolt.Options{Timeout: time.Second, ReadOnly: readOnly, NoFreelistSync: true,
		FreelistType: bbolt.FreelistMapType, PreLoadFreelist: true}
}

// createBolt makes an empty store that belongs to the data directory with that id.
func createBolt(path, id string) error {
	db, err := bbolt.Open(path, 0o600, boltOptions(false))
	if err != nil {
		return fmt.Errorf("create %s: %w", path, err)
	}
	err = db.Update(func(tx *bbolt.Tx) error {
		if _, err := tx.CreateBucket(bucketLog); err != nil {
			return err
		}
		b, err := tx.CreateBucket(bucketMeta)
		if err != nil {
			return err
		}
		for key, payload := range map[string][]byte{
			string(keyFormat): append([]byte{dbFormat}, id...),
			string(keyTail):   make([]byte, 16),
			string(keyStable): nil,
		} {
			if err := b.Put([]byte(key), seal([]byte(key), payload)); err != nil {
				return err
			}
		}
		return nil
	})
	return errors.Join(err, db.Close())
}

// openBolt opens a store that the child process has found to be sound.
func openBolt(path string, sp *space, leading func() bool, onFail func(error)) (*boltStore, error) {
	db, err := bbolt.Open(path, 0o600, boltOptions(false))
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	s := &boltStore{path: path, db: db, space: sp, leading: leading, onFail: onFail, aborted: make(chan struct{})}
	s.abort = sync.OnceFunc(func() { close(s.aborted) })
	s.cache.init()
	err = s.guard(func() error {
		return db.View(func(tx *bbolt.Tx) error {
			meta, err := readMeta(tx)
			if err != nil {
				return err
			}
			s.first, s.last, s.stable = meta.first, meta.last, meta.stable
			return nil
		})
	})
	if err != nil {
		return nil, errors.Join(&DamageError{Path: path, What: err.Error()}, db.Close())
	}
	return s, nil
}

type boltMeta struct {
	id          string
	first, last uint64
	stable      map[string][]byte
}

// readMeta verifies and reads the records of the meta bucket.
func readMeta(tx *bbolt.Tx) (boltMeta, error) {
	var m boltMeta
	b := tx.Bucket(bucketMeta)
	if b == nil || tx.Bucket(bucketLog) == nil {
		return m, errors.New("a bucket is missing")
	}
	read := func(key []byte) ([]byte, error) {
		record := b.Get(key)
		if record == nil {
			return nil, fmt.Errorf("record %q is missing", key)
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
	if p, err = read(keyTail); err != nil {
		return m, err
	}
	if len(p) != 16 {
		return m, errRecordShape
	}
	m.first, m.last = binary.BigEndian.Uint64(p), binary.BigEndian.Uint64(p[8:])
	if p, err = read(keyStable); err != nil {
		return m, err
	}
	m.stable, err = decodeStable(p)
	return m, err
}

// guard turns faults of the mapped file (it was truncated) and panics of bolt (a page is nonsense) into errors.
func (s *boltStore) guard(f func() error) (err error) {
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
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

// write runs a transaction. Without space it gives up the ballast and tries again; then a leader gets ErrDiskFull and steps
// down, anyone else waits until there is space or the store is closed. Any other error ends the store: after a failed fsync
// nobody knows what is on the disk.
func (s *boltStore) write(what string, f func(*bbolt.Tx) error) error {
	defer s.writes.begin()()
	for {
		if err := s.failure(); err != nil {
			return err
		}
		err := s.guard(func() error {
			if p := s.inject.Load(); p != nil {
				if err := (*p)(); err != nil {
					return err
				}
			}
			return s.db.Update(f)
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
		if err = s.readLog(index, l); err == nil {
			return nil
		}
		if now, _ := s.FirstIndex(); index < now {
			err = raft.ErrLogNotFound // compacted meanwhile
		} else {
			err = s.fail(&DamageError{Path: s.path, Index: index, What: err.Error()})
		}
	}
	// hashicorp/raft v1.7.3 panics on an error where it applies committed entries and where it bootstraps. Its replication
	// goroutines take errors, and must not be ended: they have started others.
	if calledFrom("raft.(*Raft).processLogs", "raft.(*Raft).liveBootstrap") {
		runtime.Goexit()
	}
	return err
}

func (s *boltStore) readLog(index uint64, l *raft.Log) error {
	return s.guard(func() error {
		return s.db.View(func(tx *bbolt.Tx) error {
			record := tx.Bucket(bucketLog).Get(indexKey(index))
			if record == nil {
				return errors.New("the entry is missing")
			}
			return decodeLog(index, record, l)
		})
	})
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

// StoreLogs appends entries, durably.
func (s *boltStore) StoreLogs(logs []*raft.Log) error {
	if len(logs) == 0 {
		return nil
	}
	s.logMu.Lock()
	defer s.logMu.Unlock()
	first, last := s.ends()
	if last == 0 {
		first = logs[0].Index
	} else if logs[0].Index != last+1 {
		return fmt.Errorf("%s: entry %d does not follow entry %d", s.path, logs[0].Index, last)
	}
	last = logs[len(logs)-1].Index
	records := make([][]byte, len(logs))
	for i, l := range logs {
		records[i] = encodeLog(l)
	}
	err := s.write("log entries", func(tx *bbolt.Tx) error {
		b := tx.Bucket(bucketLog)
		b.FillPercent = 0.9 // entries are only ever appended
		for i, l := range logs {
			if err := b.Put(indexKey(l.Index), records[i]); err != nil {
				return err
			}
		}
		return putTail(tx, first, last)
	})
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.first, s.last = first, last
	for _, l := range logs {
		s.cache.put(l)
	}
	return nil
}

func putTail(tx *bbolt.Tx, first, last uint64) error {
	return tx.Bucket(bucketMeta).Put(keyTail, seal(keyTail, append(indexKey(first), indexKey(last)...)))
}

// DeleteRange deletes entries from lo to hi inclusive, at the beginning or at the end of the log. The beginning is deleted in
// several transactions.
func (s *boltStore) DeleteRange(lo, hi uint64) error {
	for {
		again, err := s.deleteChunk(lo, hi)
		if err != nil || !again {
			return err
		}
	}
}

// deleteChunk deletes the end of the log, or some entries of its beginning; it tells whether there is more to delete.
func (s *boltStore) deleteChunk(lo, hi uint64) (again bool, err error) {
	s.logMu.Lock()
	defer s.logMu.Unlock()
	first, last := s.ends()
	lo, hi = max(lo, first), min(hi, last)
	if last == 0 || lo > hi {
		return false, nil
	}
	newFirst, newLast := first, lo-1
	if lo == first {
		again = hi-lo >= deleteChunk
		hi = min(hi, lo+deleteChunk-1)
		newFirst, newLast = hi+1, last
	} else if hi < last {
		return false, fmt.Errorf("%s: entries %d to %d are in the middle of the log", s.path, lo, hi)
	}
	if newFirst > newLast {
		newFirst, newLast = 0, 0
	}
	s.setEnds(newFirst, newLast) // before the transaction, so that nobody looks for entries that are being deleted
	err = s.write("the end of a deletion", func(tx *bbolt.Tx) error {
		b := tx.Bucket(bucketLog)
		for i := lo; i <= hi; i++ {
			if err := b.Delete(indexKey(i)); err != nil {
				return err
			}
		}
		return putTail(tx, newFirst, newLast)
	})
	if err != nil {
		s.setEnds(first, last)
	}
	return again, err
}

func (s *boltStore) ends() (first, last uint64) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.first, s.last
}

func (s *boltStore) setEnds(first, last uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.first, s.last = first, last
	s.cache.init()
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
	err := s.write(string(key), func(tx *bbolt.Tx) error {
		return tx.Bucket(bucketMeta).Put(keyStable, seal(keyStable, payload))
	})
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
	return s.guard(s.db.Close)
}

// logCache keeps the newest entries in memory, so that replication does not read what was just written.
type logCache struct {
	ring  []*raft.Log
	bytes int
	low   uint64 // lowest index that may be in the ring
}

func (c *logCache) init() { c.ring, c.bytes, c.low = make([]*raft.Log, cachedEntries), 0, 0 }

func (c *logCache) get(index uint64) *raft.Log {
	if l := c.ring[index%cachedEntries]; l != nil && l.Index == index {
		return l
	}
	return nil
}

func (c *logCache) put(l *raft.Log) {
	if c.low == 0 {
		c.low = l.Index
	}
	for ; c.low < l.Index && (l.Index-c.low >= cachedEntries || c.bytes > cachedBytes); c.low++ {
		if old := c.get(c.low); old != nil {
			c.bytes -= len(old.Data)
			c.ring[c.low%cachedEntries] = nil
		}
	}
	c.ring[l.Index%cachedEntries] = l
	c.bytes += len(l.Data)
}

// writeClock knows since when the oldest unfinished write runs.
type writeClock struct {
	mu     sync.Mutex
	next   int
	starts map[int]time.Time
}

// begin notes the start of a write; the function it returns notes its end.
func (w *writeClock) begin() func() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.starts == nil {
		w.starts = map[int]time.Time{}
	}
	n := w.next
	w.next++
	w.starts[n] = time.Now()
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.starts, n)
	}
}

// oldest is how long the oldest unfinished write has been running; 0 if there is none.
func (w *writeClock) oldest() time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	var d time.Duration
	for _, t := range w.starts {
		d = max(d, time.Since(t))
	}
	return d
}
