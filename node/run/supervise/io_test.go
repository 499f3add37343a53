package supervise_test

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/muster-hpc/muster/node/run"
	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
	"golang.org/x/sys/unix"
)

// piped makes the stdin of all tasks a pipe.
func piped(scripts ...string) *supervisorv1.StepPlan {
	plan := shell(scripts...)
	for _, t := range plan.Tasks {
		t.StdinPath = ""
	}
	return plan
}

func TestInputIsWrittenOnceWhateverIsRepeated(t *testing.T) {
	s := launch(t, normal, piped("cat", "cat"))
	s.start()
	for _, piece := range []struct {
		offset uint64
		data   string
		taken  uint64
	}{{0, "hello", 5}, {0, "hello", 5}, {3, "lo wor", 9}, {9, "", 9}} {
		if taken, err := s.Input(bound(t), piece.offset, []byte(piece.data), false); err != nil || taken != piece.taken {
			t.Errorf("%+v: taken %d, error %v", piece, taken, err)
		}
	}
	if _, err := s.Input(bound(t), 10, []byte("x"), false); !refused(err, "GAP") {
		t.Errorf("input beyond the offset: %v", err)
	}
	for range 2 {
		if taken, err := s.Input(bound(t), 9, []byte("ld\n"), true); err != nil || taken != 12 {
			t.Errorf("last piece: taken %d, error %v", taken, err)
		}
	}
	state := s.ended()
	for i := range 2 {
		wantExit(t, state, i, "0:0")
		if got := s.file(run.OutFile(uint32(i))); got != "hello world\n" {
			t.Errorf("task %d got %q", i, got)
		}
	}
	if state.GetInputOffset() != 12 {
		t.Errorf("state %v", state)
	}
}

func TestLargeInputArrivesWhole(t *testing.T) {
	s := launch(t, normal, piped("cat"))
	s.start()
	data := bytes.Repeat([]byte("0123456789abcdef"), 200_000)
	if taken, err := s.Input(bound(t), 0, data, true); err != nil || taken != uint64(len(data)) {
		t.Fatalf("taken %d, error %v", taken, err)
	}
	wantExit(t, s.ended(), 0, "0:0")
	if s.file("out.0") != string(data) {
		t.Error("the task got something else")
	}
}

func TestTaskThatDoesNotReadDelaysInputAndNothingElse(t *testing.T) {
	s := launch(t, normal, piped("echo ready; exec sleep 1000"))
	s.start()
	ctx, cancel := context.WithCancel(bound(t)) // at the latest then every call returns
	s.ready()
	// One piece is being written and three more wait; what exceeds that is refused.
	const pieces, kept = 8, 4
	results := make(chan error, pieces)
	for range pieces {
		go func() {
			_, err := s.Input(ctx, 0, make([]byte, run.MaxInput), false)
			results <- err
		}()
	}
	for range pieces - kept {
		if err := <-results; !refused(err, "BUSY") {
			t.Fatalf("a piece that nobody reads: %v", err)
		}
	}
	if _, err := s.Signal(bound(t), 1, uint32(unix.SIGCONT), true); err != nil {
		t.Errorf("a signal beside the input: %v", err)
	}
	select {
	case err := <-results:
		t.Errorf("a pipe took what nobody read, or too little waits: error %v", err)
	default:
	}
	cancel()
	for range kept {
		<-results
	}
	if _, err := s.Terminate(bound(t), 0, ""); err != nil {
		t.Fatal(err)
	}
	wantExit(t, s.ended(), 0, "0:9")
}

func TestInputThatNobodyReadsIsTaken(t *testing.T) {
	s := launch(t, normal, piped("exec <&-; echo ready; exec sleep 1000", "cat"))
	s.start()
	s.ready()
	data := bytes.Repeat([]byte("x"), 1<<20)
	if taken, err := s.Input(bound(t), 0, data, true); err != nil || taken != 1<<20 {
		t.Errorf("taken %d, error %v", taken, err)
	}
	eventually(t, "the other task got it", func() bool { return len(s.file("out.1")) == 1<<20 })
	_, _ = s.Terminate(bound(t), 0, "")
	s.ended()
}

func TestInputComesFromAFile(t *testing.T) {
	plan := shell("cat", "cat")
	path := filepath.Join(t.TempDir(), "in")
	if err := os.WriteFile(path, []byte("from a file\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	plan.Tasks[0].StdinPath, plan.Tasks[1].StdinPath = path, path
	s := launch(t, normal, plan)
	s.start()
	s.ended()
	if s.file("out.0") != "from a file\n" || s.file("out.1") != "from a file\n" {
		t.Errorf("%q, %q", s.file("out.0"), s.file("out.1"))
	}
}

func TestHugeOutputIsWholeAndCostsNoMemory(t *testing.T) {
	s := launch(t, normal, shell("head -c 200000000 /dev/zero; echo end >&2"))
	s.start()
	s.ended()
	st, err := os.Stat(filepath.Join(s.dir, "out.0"))
	if err != nil || st.Size() != 200_000_000 {
		t.Errorf("size %v, error %v", st.Size(), err)
	}
	if mib := peakMiB(t, int(s.State().GetPid())); mib > 100 {
		t.Errorf("the supervisor used %d MiB", mib)
	}
}

// peakMiB is the highest resident memory of a process. (The test program is larger than the real supervisor.)
func peakMiB(t *testing.T, pid int) int {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/status")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(b), "VmHWM:")
	kib, err := strconv.Atoi(strings.Fields(rest)[0])
	if err != nil {
		t.Fatal(err)
	}
	return kib / 1024
}

func TestTasksShareAnOutputFileWithoutOverwriting(t *testing.T) {
	plan := shell("for i in 1 2 3 4 5 6 7 8 9; do echo out; echo err >&2; done", "for i in 1 2 3 4 5 6 7 8 9; do echo out; echo err >&2; done")
	path := filepath.Join(t.TempDir(), "both")
	if err := os.WriteFile(path, []byte("old\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, task := range plan.Tasks {
		task.StdoutPath, task.StderrPath = path, path
	}
	s := launch(t, normal, plan)
	s.start()
	s.ended()
	b, err := os.ReadFile(path)
	if err != nil || len(b) != 36*4 || strings.Count(string(b), "err\n") != 18 || strings.Contains(string(b), "old") {
		t.Errorf("%q, error %v", b, err)
	}

	plan.Tasks = plan.Tasks[:1]
	plan.Tasks[0].Append = true
	s = launch(t, normal, plan)
	s.start()
	s.ended()
	if b, err := os.ReadFile(path); err != nil || len(b) != 54*4 {
		t.Errorf("appended to: %q, error %v", b, err)
	}
}

func TestFIFOWithoutReaderDoesNotHoldUpTheSupervisor(t *testing.T) {
	plan := shell("true")
	path := filepath.Join(t.TempDir(), "fifo")
	if err := unix.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	plan.Tasks[0].StdoutPath = path
	s := launch(t, normal, plan)
	if state := s.ended(); state.GetPhase() != supervisorv1.Phase_PHASE_FAILED || !state.GetUsersFault() {
		t.Errorf("state %v", state)
	}
}

func TestFullPipeOfTheUserDoesNotHoldUpTheEnd(t *testing.T) {
	path := filepath.Join(t.TempDir(), "fifo")
	if err := unix.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	reader, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	plan := shell("head -c 10000000 /dev/zero >&2")
	plan.Tasks[0].StderrPath = path
	s := launch(t, normal, plan)
	s.start()
	if _, err := s.Terminate(bound(t), 300*time.Millisecond, "a line that does not fit"); err != nil {
		t.Fatal(err)
	}
	wantExit(t, s.ended(), 0, "0:15")
}
