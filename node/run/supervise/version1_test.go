package supervise_test

import (
	"bytes"
	"context"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/muster-hpc/muster/node/run"
	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
)

// What programs of version 1 of the protocol put on the wire and on disk was recorded with them, of one step of two tasks: the plan, the
// requests of an agent, the events that answered them, and the result. The recordings are never made anew.
func recorded(t *testing.T, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", "version1", name))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestSupervisorServesAnAgentOfVersion1(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: the recorded plan is root's")
	}
	dir := newDir(t)
	if err := os.WriteFile(filepath.Join(dir, run.PlanFile), recorded(t, "plan"), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(filepath.Join(programs, normal), dir)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Wait() })
	var watch *run.Handle
	eventually(t, "the supervisor listens", func() (ok bool) {
		var err error
		watch, err = run.Attach(context.Background(), dir)
		return err == nil
	})
	s := &step{Handle: watch, t: t, dir: dir, cookie: "recorded-cookie-of-version-1"}
	t.Cleanup(s.clean)
	c := dial(t, s)
	requests := bytes.NewReader(recorded(t, "requests"))
	answered := make(map[uint64]string)
	var last *supervisorv1.StepState
	receive := func(until func(*supervisorv1.Event) bool) {
		for {
			e := new(supervisorv1.Event)
			if err := run.ReadFrame(c, e); err != nil {
				t.Fatal(err)
			}
			if e.GetId() != 0 {
				answered[e.GetId()] = e.GetError()
			}
			if last = e.GetState(); until(e) {
				return
			}
		}
	}
	for {
		q := new(supervisorv1.Request)
		if err := run.ReadFrame(requests, q); err == io.EOF {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		if q.GetDismiss() != nil { // it was sent when the end was known
			receive(func(e *supervisorv1.Event) bool { return final(e.GetState()) })
		}
		if err := run.WriteFrame(c, q); err != nil {
			t.Fatal(err)
		}
	}
	receive(func(e *supervisorv1.Event) bool { return e.GetId() == 7 })
	for _, id := range []uint64{1, 3, 4, 5, 6, 7} {
		if problem, ok := answered[id]; !ok || problem != "" {
			t.Errorf("request %d was answered: %v, with %q", id, ok, problem)
		}
	}
	wantExit(t, last, 0, "3:0")
	wantExit(t, last, 1, "0:0")
	if out := s.file("out.0") + s.file("out.1"); out != "one late\ntyped\n" {
		t.Errorf("output %q", out)
	}
	result, err := run.ReadResult(dir)
	if err != nil {
		t.Fatal(err)
	}
	wantExit(t, result, 0, "3:0")
}

func TestAgentUnderstandsASupervisorOfVersion1(t *testing.T) {
	dir := newDir(t)
	socket, err := run.Listen(dir)
	if err != nil {
		t.Fatal(err)
	}
	listener := listenerOf(t, socket)
	served := make(chan error, 1)
	go func() { // the supervisor: each request is answered as it was
		served <- func() error {
			c, err := listener.Accept()
			if err != nil {
				return err
			}
			defer c.Close()
			events := bytes.NewReader(recorded(t, "events"))
			for {
				q := new(supervisorv1.Request)
				if err := run.ReadFrame(c, q); err == io.EOF {
					return nil
				} else if err != nil {
					return err
				}
				for answered := false; !answered || q.GetId() == 6; {
					e := new(supervisorv1.Event)
					if err := run.ReadFrame(events, e); err != nil {
						return err
					}
					if err := run.WriteFrame(c, e); err != nil {
						return err
					}
					answered = answered || e.GetId() == q.GetId()
					if answered && (q.GetId() != 6 || final(e.GetState())) {
						break
					}
				}
			}
		}()
	}()
	h, err := run.Attach(bound(t), dir)
	if err != nil {
		t.Fatal(err)
	}
	s := &step{Handle: h, t: t, dir: dir}
	if state := s.phase(supervisorv1.Phase_PHASE_PREPARED); state.GetVersion() != 1 {
		t.Fatalf("the recording is of version %d", state.GetVersion())
	}
	if err := h.Resize(bound(t), 33, 101); !refused(err, "UNSUPPORTED") {
		t.Errorf("what version 1 does not know: %v", err)
	}
	if _, err := h.SetTiming(bound(t), 2*time.Hour, []*supervisorv1.Warning{{Number: 1, Signal: 10, AfterMs: 5}}); err != nil {
		t.Errorf("another limit: %v", err)
	}
	if _, err := h.Start(bound(t), []string{"ADDED=late"}); err != nil {
		t.Errorf("the start: %v", err)
	}
	if _, err := h.Input(bound(t), 0, []byte("typed\n"), true); err != nil {
		t.Errorf("input: %v", err)
	}
	if _, err := h.Signal(bound(t), 1, 18, true); err != nil {
		t.Errorf("a signal: %v", err)
	}
	state := s.ended()
	wantExit(t, state, 0, "3:0")
	wantExit(t, state, 1, "0:0")
	if err := h.Dismiss(bound(t)); err != nil {
		t.Errorf("the dismissal: %v", err)
	}
	if err := h.Close(); err != nil {
		t.Error(err)
	}
	if err := <-served; err != nil {
		t.Errorf("the recording: %v", err)
	}
	// What it left on disk.
	if err := os.WriteFile(filepath.Join(dir, run.ResultFile), recorded(t, "result"), 0o600); err != nil {
		t.Fatal(err)
	}
	concluded, err := run.Conclude(bound(t), dir)
	if err != nil {
		t.Fatal(err)
	}
	wantExit(t, concluded, 0, "3:0")
}

func listenerOf(t *testing.T, socket *os.File) net.Listener {
	t.Helper()
	listener, err := net.FileListener(socket)
	if err != nil {
		t.Fatal(err)
	}
	_ = socket.Close() // the listener has a copy
	t.Cleanup(func() { _ = listener.Close() })
	return listener
}
