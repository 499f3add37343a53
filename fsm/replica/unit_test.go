package replica

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/raft"
)

func newTestBolt(t *testing.T) *boltStore {
	t.Helper()
	dir := t.TempDir()
	if _, err := prepareDir(dir); err != nil {
		t.Fatal(err)
	}
	return reopenBolt(t, dir)
}

func reopenBolt(t *testing.T, dir string) *boltStore {
	t.Helper()
	s, err := openBolt(dbPath(dir), newSpace(dir, 0, 0, testLog(t)), func() bool { return false }, func(err error) { t.Error(err) })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// TestTheLogIsEqualToASimpleTwin drives the log with random appends and deletions, and reopens it.
func TestTheLogIsEqualToASimpleTwin(t *testing.T) {
	s := newTestBolt(t)
	dir := filepath.Dir(filepath.Dir(s.path))
	twin := &memoryLog{stable: map[string][]byte{}}
	rng := rand.New(rand.NewPCG(3, 4))
	next := uint64(1)
	for range 300 {
		first, last := twin.first(), twin.last()
		switch op := rng.IntN(10); {
		case op < 6:
			var logs []*raft.Log
			for range 1 + rng.IntN(40) {
				logs = append(logs, &raft.Log{Index: next, Term: uint64(rng.IntN(9)), Type: raft.LogType(rng.IntN(3)),
					Data: make([]byte, rng.IntN(200)), AppendedAt: time.Unix(0, rng.Int64())})
				next++
			}
			if err := errors.Join(s.StoreLogs(logs), twin.StoreLogs(logs)); err != nil {
				t.Fatal(err)
			}
		case op < 8 && last > 0: // compaction
			hi := first + uint64(rng.IntN(int(last-first)+1))
			if err := errors.Join(s.DeleteRange(first, hi), twin.DeleteRange(first, hi)); err != nil {
				t.Fatal(err)
			}
		case op < 9 && last > 0: // conflict
			lo := first + uint64(rng.IntN(int(last-first)+1))
			if err := errors.Join(s.DeleteRange(lo, last), twin.DeleteRange(lo, last)); err != nil {
				t.Fatal(err)
			}
			next = lo
		default:
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			if err := checkDir(dir); err != nil && twin.first() <= 1 {
				t.Fatal(err)
			}
			s = reopenBolt(t, dir)
		}
		a, _ := s.FirstIndex()
		b, _ := s.LastIndex()
		if a != twin.first() || b != twin.last() {
			t.Fatalf("the log goes from %d to %d, the twin from %d to %d", a, b, twin.first(), twin.last())
		}
		for i := a; i <= b && i > 0; i++ {
			var x, y raft.Log
			if err := errors.Join(s.GetLog(i, &x), twin.GetLog(i, &y)); err != nil {
				t.Fatal(i, err)
			}
			if !x.AppendedAt.Equal(y.AppendedAt) {
				t.Fatal(x.AppendedAt, y.AppendedAt)
			}
			x.AppendedAt, y.AppendedAt = time.Time{}, time.Time{}
			if len(x.Data) == 0 {
				x.Data, y.Data = nil, nil
			}
			if !reflect.DeepEqual(x, y) {
				t.Fatalf("entry %d: %+v, twin %+v", i, x, y)
			}
		}
	}
	if err := s.StoreLog(&raft.Log{Index: next + 1}); err == nil {
		t.Error("a gap is accepted")
	}
	var l raft.Log
	if err := s.GetLog(next, &l); !errors.Is(err, raft.ErrLogNotFound) {
		t.Errorf("beyond the end: %v", err)
	}
}

// TestTheSizeOfTheLogIsKnown compares it with a sum, over appends, deletions at both ends and a restart.
func TestTheSizeOfTheLogIsKnown(t *testing.T) {
	s := newTestBolt(t)
	dir := filepath.Dir(filepath.Dir(s.path))
	rng := rand.New(rand.NewPCG(9, 9))
	var have []*raft.Log
	for round := range 60 {
		var logs []*raft.Log
		for range 1 + rng.IntN(20) {
			next := uint64(40)
			if all := append(slices.Clone(have), logs...); len(all) > 0 {
				next = all[len(all)-1].Index + 1
			}
			logs = append(logs, &raft.Log{Index: next, Data: make([]byte, rng.IntN(300)), Extensions: make([]byte, rng.IntN(3))})
		}
		if err := s.StoreLogs(logs); err != nil {
			t.Fatal(err)
		}
		have = append(have, logs...)
		if n := rng.IntN(len(have)); round%3 == 1 {
			if err := s.DeleteRange(have[n].Index, have[len(have)-1].Index); err != nil {
				t.Fatal(err)
			}
			have = have[:n]
		} else if round%3 == 2 && n > 0 {
			if err := s.DeleteRange(have[0].Index, have[n-1].Index); err != nil {
				t.Fatal(err)
			}
			have = have[n:]
		}
		if round%20 == 19 {
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			s = reopenBolt(t, dir)
		}
		most, limit := uint64(rng.IntN(60)), uint64(rng.IntN(6000))
		size, trailing := uint64(0), uint64(0)
		for i := len(have) - 1; i >= 0; i-- {
			if got, err := s.bytesAfter(have[i].Index); err != nil || got != size {
				t.Fatalf("after entry %d: %d bytes, want %d, %v", have[i].Index, got, size, err)
			}
			if size += uint64(len(have[i].Data) + len(have[i].Extensions)); size <= limit && trailing < most {
				trailing++
			}
		}
		if got, err := s.bytesAfter(0); err != nil || got != size {
			t.Fatalf("the whole log: %d bytes, want %d, %v", got, size, err)
		}
		got, err := s.trailing(most, limit)
		if err != nil || got > most || min(got, uint64(len(have))) != trailing && got != most {
			t.Fatalf("at most %d entries, %d bytes: %d may stay, want %d, %v", most, limit, got, trailing, err)
		}
		if got == most && most < uint64(len(have)) && trailing != most {
			t.Fatalf("at most %d entries, %d bytes: all may stay, want %d", most, limit, trailing)
		}
	}
}

func TestTheStableStoreKeepsEveryKey(t *testing.T) {
	s := newTestBolt(t)
	dir := filepath.Dir(filepath.Dir(s.path))
	if _, err := s.Get([]byte("none")); err == nil || err.Error() != "not found" {
		t.Errorf("hashicorp/raft wants the error \"not found\": %v", err)
	}
	for i := range 20 {
		if err := errors.Join(s.SetUint64([]byte(fmt.Sprint("n", i)), uint64(i)), s.Set([]byte(fmt.Sprint("b", i)), []byte{byte(i)})); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = reopenBolt(t, dir)
	for i := range 20 {
		n, err := s.GetUint64([]byte(fmt.Sprint("n", i)))
		b, err2 := s.Get([]byte(fmt.Sprint("b", i)))
		if err != nil || err2 != nil || n != uint64(i) || len(b) != 1 || b[0] != byte(i) {
			t.Errorf("key %d: %d %v %v %v", i, n, b, err, err2)
		}
	}
}

func TestAChangedRecordIsNoticed(t *testing.T) {
	entry := &raft.Log{Index: 7, Term: 3, Type: raft.LogCommand, Data: []byte("seven"), Extensions: []byte("more"), AppendedAt: time.Unix(5, 6)}
	sound, at := sealLog(entry, seam{sum: 11, bytes: 13})
	if string(entry.Extensions) != "more" {
		t.Fatal("hashicorp/raft's entry was changed")
	}
	back := *sound
	if got, err := unsealLog(7, &back); err != nil || got != at || got.before != 11 || got.bytes != 13+9 || !reflect.DeepEqual(&back, entry) {
		t.Fatal(err, got, back)
	}
	for what, change := range map[string]func(*raft.Log){
		"index":      func(l *raft.Log) { l.Index++ },
		"term":       func(l *raft.Log) { l.Term++ },
		"type":       func(l *raft.Log) { l.Type = raft.LogNoop },
		"time":       func(l *raft.Log) { l.AppendedAt = l.AppendedAt.Add(1) },
		"no time":    func(l *raft.Log) { l.AppendedAt = time.Time{} },
		"data":       func(l *raft.Log) { l.Data[0] ^= 1 },
		"no data":    func(l *raft.Log) { l.Data = nil },
		"split":      func(l *raft.Log) { l.Data = append(l.Data, l.Extensions[trailerSize]) },
		"nothing":    func(l *raft.Log) { l.Extensions = nil },
		"extensions": func(l *raft.Log) { l.Extensions = l.Extensions[:len(l.Extensions)-1] },
	} {
		l := *sound
		l.Data, l.Extensions = slices.Clone(l.Data), slices.Clone(l.Extensions)
		change(&l)
		for _, index := range []uint64{7, l.Index} {
			if _, err := unsealLog(index, &l); err == nil {
				t.Errorf("%s: not noticed", what)
			}
		}
	}
	for i := range sound.Extensions {
		l := *sound
		l.Extensions = slices.Clone(l.Extensions)
		l.Extensions[i] ^= 1
		if _, err := unsealLog(7, &l); err == nil {
			t.Errorf("byte %d of the trailer: not noticed", i)
		}
	}
	l := *sound
	if _, err := unsealLog(8, &l); err == nil {
		t.Error("entry 7 passes for entry 8")
	}
}

func entries(from, to, term uint64) []*raft.Log {
	var out []*raft.Log
	for i := from; i <= to; i++ {
		out = append(out, &raft.Log{Index: i, Term: term, Data: fmt.Append(nil, "entry ", i, " of ", term)})
	}
	return out
}

// TestAnOlderVersionOfAnEntryIsNoticed: a disk that forgot the write of one page gives back what was there before, with a valid checksum.
func TestAnOlderVersionOfAnEntryIsNoticed(t *testing.T) {
	for _, index := range []uint64{6, 10} { // in the middle, at the end
		s := newTestBolt(t)
		old, _ := sealLog(entries(index, index, 1)[0], seam{})
		if err := errors.Join(s.StoreLogs(entries(1, 10, 1)), s.DeleteRange(5, 10), s.StoreLogs(entries(5, 10, 2))); err != nil {
			t.Fatal(err)
		}
		dir := filepath.Dir(filepath.Dir(s.path))
		if err := errors.Join(s.db.StoreLog(old), s.Close()); err != nil {
			t.Fatal(err)
		}
		err := checkDir(dir)
		if !errors.Is(err, ErrDamaged) {
			t.Errorf("entry %d: %v", index, err)
		}
	}
}

// TestMissingEntriesAreNoticed also where bolt itself is content.
func TestMissingEntriesAreNoticed(t *testing.T) {
	for what, gone := range map[string][2]uint64{"first": {1, 1}, "middle": {5, 6}, "last": {10, 10}, "all": {1, 10}, "ends": {endsIndex, endsIndex}} {
		s := newTestBolt(t)
		if err := s.StoreLogs(entries(1, 10, 1)); err != nil {
			t.Fatal(err)
		}
		dir := filepath.Dir(filepath.Dir(s.path))
		if err := errors.Join(s.db.DeleteRange(gone[0], gone[1]), s.Close()); err != nil {
			t.Fatal(err)
		}
		if err := checkDir(dir); !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), "missing") {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// TestAnInterruptedDeletionIsCompleteAndLeavesNothing: the process ends, or there is no space, after the ends of the log have moved.
func TestAnInterruptedDeletionIsCompleteAndLeavesNothing(t *testing.T) {
	for what, gone := range map[string][2]uint64{"beginning": {1, 6}, "end": {5, 10}, "all": {1, 10}} {
		for _, then := range []string{"restart", "append"} {
			s := newTestBolt(t)
			if err := s.StoreLogs(entries(1, 10, 1)); err != nil {
				t.Fatal(err)
			}
			if _, _, _, err := s.cut(gone[0], gone[1]); err != nil {
				t.Fatal(err)
			}
			want, _ := s.ends()
			if then == "append" { // over part of what was left
				next := max(want.last+1, 5)
				if err := s.StoreLogs(entries(next, next+1, 2)); err != nil {
					t.Fatal(err)
				}
				want, _ = s.ends()
			}
			dir := filepath.Dir(filepath.Dir(s.path))
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			if err := checkDir(dir); err != nil && want.first <= 1 { // else it misses the snapshot
				t.Errorf("%s, %s: %v", what, then, err)
			}
			s = reopenBolt(t, dir)
			if got, _ := s.ends(); got != want {
				t.Errorf("%s, %s: the log goes from %d to %d, want %d to %d", what, then, got.first, got.last, want.first, want.last)
			}
			for i := uint64(1); i <= 12; i++ {
				stored := s.db.GetLog(i, new(raft.Log)) == nil
				if inside := want.first <= i && i <= want.last; stored != inside {
					t.Errorf("%s, %s: entry %d stored: %v", what, then, i, stored)
				}
			}
		}
	}
}

func TestADeletionWithoutSpaceIsMadeUpForByTheNext(t *testing.T) {
	s := newTestBolt(t)
	if err := s.StoreLogs(entries(1, 2000, 1)); err != nil {
		t.Fatal(err)
	}
	s.leading = func() bool { return true }
	n := 0
	f := func() error {
		if n++; n > 2 { // the ends and one chunk are written
			return syscall.ENOSPC
		}
		return nil
	}
	s.inject.Store(&f)
	if err := s.DeleteRange(1, 1500); err != nil {
		t.Fatal(err)
	}
	if first, _ := s.FirstIndex(); first != 1501 {
		t.Errorf("the log begins at %d", first)
	}
	if lowest, err := s.db.FirstIndex(); err != nil || lowest != deleteChunk+1 {
		t.Errorf("the test is wrong: lowest %d, %v", lowest, err)
	}
	s.inject.Store(nil)
	if err := s.DeleteRange(1501, 1501); err != nil {
		t.Fatal(err)
	}
	if lowest, err := s.db.FirstIndex(); err != nil || lowest != 1502 {
		t.Errorf("lowest entry %d, %v", lowest, err)
	}
}

func TestTheBallastIsGivenUpOnceAndMadeAgain(t *testing.T) {
	dir := t.TempDir()
	s := newSpace(dir, 1<<20, 1<<10, testLog(t))
	free := int64(1 << 30)
	s.free = func() (int64, error) { return free, nil }
	s.check()
	if st, err := os.Stat(s.path()); err != nil || st.Size() != 1<<20 || s.full.Load() {
		t.Fatal("no ballast", err)
	}
	if !s.exhausted() || s.exhausted() || !s.full.Load() {
		t.Error("the ballast must be given up exactly once")
	}
	free = 1 << 20 // enough for the ballast, but not for working
	s.check()
	if !s.full.Load() {
		t.Error("full means full until there is space for the ballast and more")
	}
	free = 2 << 20
	s.check()
	if _, err := os.Stat(s.path()); err != nil || s.full.Load() {
		t.Error("it does not recover", err)
	}
	free = 100
	s.check()
	if !s.full.Load() || !s.held {
		t.Error("little space counts as full, and the ballast is kept")
	}
}

func TestDelaysAreMeasured(t *testing.T) {
	d := newDelayMeter(100*time.Millisecond, testLog(t))
	for i := range 10000 {
		late := time.Millisecond
		if i%20 == 0 {
			late = 80 * time.Millisecond
		}
		d.add(late)
	}
	if p := d.p99(); p != 80*time.Millisecond {
		t.Errorf("p99 %v", p)
	}
	for range 10000 {
		d.add(0)
	}
	if p := d.p99(); p != 0 {
		t.Errorf("what was longer ago than a minute still counts: %v", p)
	}
}

func TestOnlyTicksWithTheMarkAskForADigest(t *testing.T) {
	c := tick("x")
	entry := func() []byte { return encodeBatch(t, tick("a"), c, tick("b")) }
	if marksDigest(entry()) {
		t.Error("a tick without mark")
	}
	c.GetTick().MarkDigest = true
	if !marksDigest(entry()) {
		t.Error("a marked tick is not seen")
	}
	if marksDigest([]byte{0xff}) || marksDigest(nil) {
		t.Error("nonsense")
	}
}
