package replica

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// space watches the file system of the data directory and keeps the ballast: a file that reserves space, given up when the disk
// is full so that the member can still write its term, its vote and what the new leader sends, while it refuses commands.
type space struct {
	dir     string
	ballast int64 // bytes to reserve
	low     int64 // with less free space the disk counts as full
	log     *slog.Logger
	free    func() (int64, error)
	full    atomic.Bool
	wake    chan struct{} // capacity 1: full has become true

	mu   sync.Mutex
	held bool // the ballast exists
}

const spaceInterval = time.Second

func newSpace(dir string, ballast, low int64, log *slog.Logger) *space {
	s := &space{dir: dir, ballast: ballast, low: low, log: log, wake: make(chan struct{}, 1)}
	s.free = func() (int64, error) {
		var st syscall.Statfs_t
		if err := syscall.Statfs(dir, &st); err != nil {
			return 0, fmt.Errorf("ask for the free space of %s: %w", dir, err)
		}
		return int64(st.Bavail) * st.Bsize, nil
	}
	return s
}

func (s *space) path() string { return filepath.Join(s.dir, "ballast") }

// exhausted is called after a write that found no space. It tells whether something was freed, so that the write is worth
// another try at once.
func (s *space) exhausted() bool {
	s.markFull("a write found no space")
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.held {
		return false
	}
	s.held = false
	if err := os.Remove(s.path()); err != nil && !errors.Is(err, os.ErrNotExist) {
		s.log.Error("giving up the ballast failed", "path", s.path(), "err", err)
		return false
	}
	s.log.Warn("gave up the ballast, so that this member can still follow", "path", s.path(), "bytes", s.ballast)
	return true
}

func (s *space) markFull(why string) {
	if s.full.CompareAndSwap(false, true) {
		s.log.Error("the disk is full: this member refuses commands and gives up leadership; make space", "dir", s.dir, "why", why)
		select {
		case s.wake <- struct{}{}:
		default:
		}
	}
}

// check looks at the free space; called once in a while. When there is enough of it again the ballast is made anew and the
// member takes commands again.
func (s *space) check() {
	free, err := s.free()
	if err != nil {
		s.log.Error("the free space is not known", "err", err)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	need := s.low
	if !s.held {
		need += s.ballast
	}
	if s.full.Load() {
		need += s.low / 2 // not back and forth
	}
	if free < need {
		if s.held || s.ballast == 0 || free < s.low {
			s.markFull(fmt.Sprintf("%d bytes are free, fewer than %d", free, need))
		}
		return
	}
	if !s.held && s.ballast > 0 {
		if err := s.reserve(); err != nil {
			s.markFull(err.Error())
			return
		}
		s.held = true
	}
	if s.full.CompareAndSwap(true, false) {
		s.log.Info("there is space again: this member takes commands", "dir", s.dir, "free", free)
	}
}

// reserve makes the ballast.
func (s *space) reserve() (err error) {
	f, err := os.OpenFile(s.path(), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return fmt.Errorf("make the ballast: %w", err)
	}
	defer func() {
		if err = errors.Join(err, f.Close()); err != nil {
			os.Remove(s.path())
		}
	}()
	err = syscall.Fallocate(int(f.Fd()), 0, 0, s.ballast)
	if errors.Is(err, syscall.EOPNOTSUPP) || errors.Is(err, syscall.ENOSYS) {
		err = writeZeros(f, s.ballast)
	}
	if err != nil {
		return fmt.Errorf("reserve %d bytes in %s: %w", s.ballast, s.path(), err)
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("reserve %d bytes in %s: %w", s.ballast, s.path(), err)
	}
	return nil
}

func writeZeros(f *os.File, n int64) error {
	zeros := make([]byte, 1<<20)
	for n > 0 {
		w, err := f.Write(zeros[:min(n, int64(len(zeros)))])
		if err != nil {
			return err
		}
		n -= int64(w)
	}
	return nil
}
