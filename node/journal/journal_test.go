package journal

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

func reaped(job uint32) *logv1.TaskReport {
	return &logv1.TaskReport{JobId: job, Event: &logv1.TaskReport_AttemptReaped{AttemptReaped: &logv1.AttemptReaped{}}}
}

func jobs(reports []*logv1.TaskReport) []uint32 {
	out := []uint32{}
	for _, r := range reports {
		out = append(out, r.GetJobId())
	}
	return out
}

func mustOpen(t *testing.T, path string) *Journal {
	t.Helper()
	j, damage, err := Open(path)
	if err != nil || damage != nil {
		t.Fatalf("open: %v, %v", damage, err)
	}
	t.Cleanup(func() { j.Close() })
	return j
}

func fill(t *testing.T, j *Journal, from, to uint32) {
	t.Helper()
	for job := from; job <= to; job++ {
		if _, err := j.Append(reaped(job)); err != nil {
			t.Fatal(err)
		}
	}
}

func TestWhatWasAppendedWaitsUntilAcknowledgedAlsoOverReopening(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	j := mustOpen(t, path)
	fill(t, j, 1, 5)
	if dropped, err := j.Acknowledge(2); err != nil || !slices.Equal(jobs(dropped), []uint32{1, 2}) {
		t.Fatalf("acknowledged %v, %v", jobs(dropped), err)
	}
	if got := jobs(j.Waiting(2)); !slices.Equal(got, []uint32{3, 4}) {
		t.Errorf("the first two that wait are %v", got)
	}
	if j.IsWaiting(2) || !j.IsWaiting(3) || !j.IsWaiting(5) || j.IsWaiting(6) || j.IsWaiting(0) {
		t.Error("the wrong ones wait")
	}
	j.Close()
	j = mustOpen(t, path)
	if got := jobs(j.Waiting(100)); !slices.Equal(got[len(got)-3:], []uint32{3, 4, 5}) {
		t.Errorf("after reopening %v wait", got)
	}
	if _, err := j.Acknowledge(5); err != nil {
		t.Fatal(err)
	}
	if id, err := j.Append(reaped(6)); err != nil || id != 6 {
		t.Errorf("the next number is %d (%v)", id, err)
	}
	j.Close()
	j = mustOpen(t, path)
	if got := jobs(j.Waiting(100)); !slices.Equal(got, []uint32{6}) {
		t.Errorf("after everything before was acknowledged %v wait", got)
	}
}

func TestNumbersRiseAlsoWhenNothingWaits(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	j := mustOpen(t, path)
	fill(t, j, 1, 3)
	if _, err := j.Acknowledge(3); err != nil {
		t.Fatal(err)
	}
	j.Close()
	j = mustOpen(t, path)
	if id, err := j.Append(reaped(9)); err != nil || id != 4 {
		t.Errorf("the next number is %d (%v)", id, err)
	}
}

func TestATornTailIsCutOffAndTheRestKept(t *testing.T) {
	dir := t.TempDir()
	j := mustOpen(t, filepath.Join(dir, "whole"))
	fill(t, j, 1, 4)
	whole, err := os.ReadFile(filepath.Join(dir, "whole"))
	if err != nil {
		t.Fatal(err)
	}
	last := 0
	for cut := len(header); cut < len(whole); cut++ {
		path := filepath.Join(dir, fmt.Sprint(cut))
		if err := os.WriteFile(path, whole[:cut], 0o600); err != nil {
			t.Fatal(err)
		}
		torn, damage, err := Open(path)
		if err != nil {
			t.Fatalf("cut at %d: %v", cut, err)
		}
		n := torn.Count()
		if n < last || n > 3 {
			t.Fatalf("cut at %d: %d records", cut, n)
		}
		if n == last && damage == nil && cut > len(header) {
			t.Fatalf("cut at %d: nobody says so", cut)
		}
		last = n
		fill(t, torn, 77, 77)
		torn.Close()
		again := mustOpen(t, path)
		if got := jobs(again.Waiting(10)); len(got) != n+1 || got[n] != 77 {
			t.Fatalf("cut at %d: after another record %v wait", cut, got)
		}
	}
	if last != 3 {
		t.Errorf("at most %d records were kept", last)
	}
}

func TestAFlippedBitLosesOnlyWhatFollows(t *testing.T) {
	dir := t.TempDir()
	j := mustOpen(t, filepath.Join(dir, "whole"))
	fill(t, j, 1, 20)
	whole, err := os.ReadFile(filepath.Join(dir, "whole"))
	if err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		bad := bytes.Clone(whole)
		at := rng.IntN(len(bad))
		bad[at] ^= 1 << rng.IntN(8)
		path := filepath.Join(dir, "bad")
		if err := os.WriteFile(path, bad, 0o600); err != nil {
			t.Fatal(err)
		}
		j, damage, err := Open(path)
		if err != nil || damage == nil {
			t.Fatalf("bit at %d: %v, %v", at, damage, err)
		}
		for i, job := range jobs(j.Waiting(100)) {
			if job != uint32(i+1) {
				t.Fatalf("bit at %d: record %d speaks of job %d", at, i, job)
			}
		}
		j.Close()
	}
}

func TestTheFileIsMadeSmallerWhenMostIsAcknowledged(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	j := mustOpen(t, path)
	big := func(job uint32) *logv1.TaskReport {
		return &logv1.TaskReport{JobId: job, Event: &logv1.TaskReport_PrepareFailed{PrepareFailed: &logv1.PrepareFailed{Sentence: string(make([]byte, 20000))}}}
	}
	for job := range uint32(60) {
		if _, err := j.Append(big(job)); err != nil {
			t.Fatal(err)
		}
		if job > 2 {
			if _, err := j.Acknowledge(uint64(job) - 2); err != nil {
				t.Fatal(err)
			}
		}
	}
	if info, err := os.Stat(path); err != nil || info.Size() > 2*compactAbove {
		t.Errorf("the file has %d bytes (%v)", info.Size(), err)
	}
	j.Close()
	j = mustOpen(t, path)
	got := jobs(j.Waiting(100))
	if len(got) < 3 || got[len(got)-1] != 59 {
		t.Errorf("after making it smaller %v wait", got)
	}
	if id, _ := j.Append(reaped(1)); id != 61 {
		t.Errorf("the next number is %d", id)
	}
}

// full is a file on a disk that fills up: a write that goes beyond room stops in the middle.
type full struct {
	*os.File
	room     *int64
	failSync *bool
}

func (f full) WriteAt(p []byte, off int64) (int, error) {
	if over := off + int64(len(p)) - *f.room; over > 0 {
		n, _ := f.File.WriteAt(p[:max(0, int64(len(p))-over)], off)
		return n, unix.ENOSPC
	}
	return f.File.WriteAt(p, off)
}

func (f full) Sync() error {
	if *f.failSync {
		return unix.EIO
	}
	return f.File.Sync()
}

func TestAFullDiskIsSaidAndLosesNothing(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	room, failSync := int64(1<<20), false
	j, _, err := openWith(path, func(path string, flags int) (File, error) {
		f, err := os.OpenFile(path, flags, 0o600)
		return full{f, &room, &failSync}, err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	fill(t, j, 1, 3)
	room = j.size + 5 // the next record is torn
	for range 3 {
		if _, err := j.Append(reaped(4)); !errors.Is(err, ErrNoSpace) {
			t.Fatalf("on a full disk: %v", err)
		}
	}
	if got := jobs(j.Waiting(10)); !slices.Equal(got, []uint32{1, 2, 3}) {
		t.Errorf("%v wait", got)
	}
	room = 1 << 20
	failSync = true
	if _, err := j.Append(reaped(4)); err == nil {
		t.Fatal("a record that may not be on disk was accepted")
	}
	failSync = false
	if id, err := j.Append(reaped(5)); err != nil || id != 4 {
		t.Fatalf("when there is room again: number %d, %v", id, err)
	}
	other := mustOpen(t, path)
	if got := jobs(other.Waiting(10)); !slices.Equal(got, []uint32{1, 2, 3, 5}) {
		t.Errorf("the file has %v", got)
	}
}

func TestReservedSpaceDoesNotChangeTheFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "journal")
	j := mustOpen(t, path)
	fill(t, j, 1, 1)
	before, _ := os.ReadFile(path)
	if err := j.Reserve(64 << 10); err != nil {
		t.Fatal(err)
	}
	after, _ := os.ReadFile(path)
	if !bytes.Equal(before, after) {
		t.Error("the file has changed")
	}
	fill(t, j, 2, 2)
	j.Close()
	if got := jobs(mustOpen(t, path).Waiting(10)); !slices.Equal(got, []uint32{1, 2}) {
		t.Errorf("%v wait", got)
	}
}

func FuzzAnyFileCanBeOpened(f *testing.F) {
	f.Add([]byte(header))
	f.Add([]byte("nonsense"))
	f.Fuzz(func(t *testing.T, data []byte) {
		path := filepath.Join(t.TempDir(), "journal")
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		j, _, err := Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer j.Close()
		if _, err := j.Append(reaped(1)); err != nil {
			t.Fatal(err)
		}
	})
}
