package replica

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
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

func TestARecordUnderAnotherKeyIsNoticed(t *testing.T) {
	r := encodeLog(&raft.Log{Index: 7, Data: []byte("seven")})
	var l raft.Log
	if err := decodeLog(7, r, &l); err != nil || string(l.Data) != "seven" {
		t.Fatal(err, l)
	}
	if err := decodeLog(8, r, &l); err == nil {
		t.Error("entry 7 passes for entry 8")
	}
	for n := range r {
		if err := decodeLog(7, r[:n], &l); err == nil {
			t.Errorf("%d of %d bytes pass for the whole record", n, len(r))
		}
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
