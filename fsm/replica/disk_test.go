package replica

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// tinyDisk mounts a file system of that size; the test is skipped where that is not allowed.
func tinyDisk(t *testing.T, size string) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mounting a small file system needs root; TestNoSpace… injects the fault instead")
	}
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size="+size); err != nil {
		t.Skipf("mount: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// fill takes all the space that is left.
func fill(t *testing.T, dir string) (free func()) {
	t.Helper()
	path := filepath.Join(dir, "someone else's")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for err == nil {
		_, err = f.Write(make([]byte, 4096))
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	return func() {
		if err := os.Remove(path); err != nil {
			t.Error(err)
		}
	}
}

func TestAFullDiskOfTheLeaderIsASentenceAndTheOthersGoOn(t *testing.T) {
	disk := tinyDisk(t, "12m")
	ms := cluster(t, 3, func(c *Config) {
		c.BallastBytes, c.LowSpaceBytes = 2<<20, -1 // only what writes find
		if strings.HasSuffix(c.Dir, "c1") {
			c.Dir = filepath.Join(disk, "c1")
		}
	})
	full := ms[0]
	propose(t, "before", full)
	free := fill(t, disk)
	var refused error
	eventually(t, "the leader refuses", func() bool {
		c := tick("x")
		c.Traceparent = strings.Repeat("x", 100<<10)
		_, err := full.Propose(t.Context(), c)
		refused = err
		return err != nil
	})
	if !errors.Is(refused, ErrDiskFull) && !errors.Is(refused, ErrNotLeader) && !errors.Is(refused, ErrOutcomeUnknown) {
		t.Errorf("the refusal: %v", refused)
	}
	eventually(t, "another one leads", func() bool { return ms[1].Leader().IsSelf || ms[2].Leader().IsSelf })
	if !full.DiskFull() {
		t.Error("the member does not say that its disk is full")
	}
	for i := range 20 { // the full member still follows, in the space of its ballast
		propose(t, fmt.Sprint("during", i), ms[1:]...)
	}
	agree(t, ms...)
	// Even the ballast does not last for ever: then the member waits, and the others go on.
	for i := range 40 {
		c := tick(fmt.Sprint("much", i))
		c.Traceparent = strings.Repeat("y", 120<<10)
		l := leaderOf(t, ms[1:]...)
		if _, err := l.Propose(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
	if full.Applied() == ms[1].Applied() {
		t.Error("the full member has everything: the disk was not full")
	}
	if full.Quarantined() != "" {
		t.Errorf("a full disk is not damage: %s", full.Quarantined())
	}
	free()
	eventually(t, "it takes commands again", func() bool { return !full.DiskFull() })
	agree(t, ms...)
	if st, err := os.Stat(full.space.path()); err != nil || st.Size() != 2<<20 {
		t.Errorf("the ballast was not made again: %v", err)
	}
	if err := full.Close(); err != nil {
		t.Error(err)
	}
	if err := VerifyDir(full.cfg.Dir); err != nil {
		t.Errorf("after all that: %v", err)
	}
}

func TestAMemberOfOneRecoversFromAFullDiskByItself(t *testing.T) {
	disk := tinyDisk(t, "8m")
	cfg := testConfig(t, filepath.Join(disk, "c"))
	m := openTest(t, cfg)
	if err := m.Bootstrap(bootstrapCommand()); err != nil {
		t.Fatal(err)
	}
	free := fill(t, disk)
	eventually(t, "it notices", m.DiskFull)
	_, err := m.Propose(t.Context(), tick("x"))
	if !errors.Is(err, ErrDiskFull) {
		t.Errorf("propose: %v", err)
	}
	mustContain(t, err, cfg.Dir, "make space")
	free()
	propose(t, "after", m)
}

// noSpaceFrom makes every write of a member fail for want of space.
func noSpaceFrom(m *member) (n *atomic.Int64, end func()) {
	n = new(atomic.Int64)
	f := func() error {
		n.Add(1)
		return &os.PathError{Op: "write", Path: m.bolt.path, Err: syscall.ENOSPC}
	}
	m.bolt.inject.Store(&f)
	return n, func() { m.bolt.inject.Store(nil) }
}

func TestNoSpaceForTermOrVoteNeverPanics(t *testing.T) {
	ms := cluster(t, 3, nil)
	l := leaderOf(t, ms...)
	var rest []*member
	for _, m := range ms {
		if m != l {
			rest = append(rest, m)
		}
	}
	tries, end := noSpaceFrom(rest[0])
	// The follower without space can't take entries; the leader steps down, so terms must be written too.
	propose(t, "without it", l, rest[1])
	if err := l.Transfer(t.Context(), rest[1].ID()); err != nil {
		t.Fatal(err)
	}
	propose(t, "still without it", l, rest[1])
	eventually(t, "it has tried several times", func() bool { return tries.Load() > 3 })
	if !rest[0].DiskFull() {
		t.Error("it does not say so")
	}
	end()
	agree(t, ms...)
	eventually(t, "it recovers", func() bool { return !rest[0].DiskFull() })
}

func TestAMemberWithoutSpaceClosesCleanly(t *testing.T) {
	ms := cluster(t, 3, nil)
	l := leaderOf(t, ms...)
	var f, other *member
	for _, m := range ms {
		if m != l {
			f, other = m, f
		}
	}
	tries, _ := noSpaceFrom(f)
	propose(t, "x", l, other)
	eventually(t, "it waits for space", func() bool { return tries.Load() > 2 })
	began := time.Now()
	if err := f.Close(); err != nil {
		t.Error(err)
	}
	if d := time.Since(began); d > 3*time.Second {
		t.Errorf("Close took %v", d)
	}
	back := openTest(t, again(f))
	agree(t, l, other, back)
}

func TestAnyOtherWriteErrorQuarantines(t *testing.T) {
	ms := cluster(t, 3, nil)
	l := leaderOf(t, ms...)
	f := func() error { return &os.PathError{Op: "fdatasync", Path: l.bolt.path, Err: syscall.EIO} }
	l.bolt.inject.Store(&f)
	_, err := l.Propose(t.Context(), tick("x"))
	if !errors.Is(err, ErrOutcomeUnknown) {
		t.Errorf("propose: %v", err)
	}
	eventually(t, "it is quarantined", func() bool { return l.Quarantined() != "" })
	mustContain(t, errors.New(l.Quarantined()), l.bolt.path, "input/output error")
	for _, m := range ms {
		if m != l {
			propose(t, "goes on", m, ms[0], ms[1], ms[2])
			break
		}
	}
}

func TestALeaderWithAStuckDiskFallsSilentSoThatAnotherOneLeads(t *testing.T) {
	ms := cluster(t, 3, nil)
	l := leaderOf(t, ms...)
	var rest []*member
	for _, m := range ms {
		if m != l {
			rest = append(rest, m)
		}
	}
	gate := make(chan struct{})
	stuck := func() error { <-gate; return nil }
	l.bolt.inject.Store(&stuck)
	began := time.Now()
	done := make(chan error, 1)
	go func() {
		_, err := l.Propose(t.Context(), tick("stuck"))
		done <- err
	}()
	propose(t, "goes on", rest...)
	t.Logf("the others go on after %v", time.Since(began))
	if d := time.Since(began); d > 5*time.Second {
		t.Errorf("that took %v", d)
	}
	l.bolt.inject.Store(nil)
	close(gate)
	if err := <-done; err != nil && !errors.Is(err, ErrOutcomeUnknown) && !errors.Is(err, ErrNotLeader) {
		t.Errorf("the stuck proposal: %v", err)
	}
	agree(t, ms...)
	if l.gate.shut.Load() != 0 {
		eventually(t, "it speaks again", func() bool { return l.gate.shut.Load() == 0 })
	}
}
