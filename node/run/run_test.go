package run_test

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/muster-hpc/muster/node/run"
	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
	"google.golang.org/protobuf/proto"
)

// marked starts a process with a cookie and the command that waits for it.
func marked(t *testing.T, cookie string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("sleep", "1000")
	cmd.Env = []string{run.CookieVariable + "=" + cookie}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	return cmd
}

func TestKillLeftoversKillsOnlyWhatCarriesTheCookie(t *testing.T) {
	mine, longer := marked(t, t.Name()), marked(t, t.Name()+"2")
	gone := make(chan error, 1)
	go func() { gone <- mine.Wait() }()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if n, err := run.KillLeftovers(ctx, t.Name()); n != 1 || err != nil {
		t.Errorf("killed %d, error %v", n, err)
	}
	<-gone
	if n, err := run.KillLeftovers(ctx, t.Name()); n != 0 || err != nil {
		t.Errorf("killed %d again, error %v", n, err)
	}
	if err := longer.Process.Kill(); err != nil { // It still exists.
		t.Error(err)
	}
	_ = longer.Wait()
	if _, err := run.KillLeftovers(ctx, ""); err == nil {
		t.Error("without a cookie every process would be a leftover")
	}
}

func TestTornFilesAreErrorsAndNotAbsent(t *testing.T) {
	dir := t.TempDir()
	if _, err := run.ReadResult(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no result: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, run.ResultFile), []byte{0xff, 0xff}, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := run.ReadResult(dir); err == nil || errors.Is(err, fs.ErrNotExist) {
		t.Errorf("torn result: %v", err)
	}
	if _, err := run.Conclude(t.Context(), dir); err == nil {
		t.Error("a torn result was concluded from")
	}
}

func TestStartedWithoutPlanIsConcludedOnlyWhenLeftoversCanBeFound(t *testing.T) {
	dir := t.TempDir()
	if _, err := run.MarkStarted(dir); err != nil {
		t.Fatal(err)
	}
	if state, err := run.Conclude(t.Context(), dir); err == nil {
		t.Errorf("concluded %v without knowing the cookie", state)
	}
}

func TestResultReplacesAnOlderOneWhole(t *testing.T) {
	dir := t.TempDir()
	for _, want := range []*supervisorv1.StepState{
		{Phase: supervisorv1.Phase_PHASE_ENDED, Sentence: "a long sentence"}, {Phase: supervisorv1.Phase_PHASE_FAILED}} {
		if err := run.WriteResult(dir, want); err != nil {
			t.Fatal(err)
		}
		if got, err := run.ReadResult(dir); err != nil || !proto.Equal(got, want) {
			t.Errorf("%v, error %v", got, err)
		}
	}
	names, err := os.ReadDir(dir)
	if err != nil || len(names) != 1 {
		t.Errorf("files %v, error %v", names, err)
	}
}

func TestSilentSupervisorHoldsUpNoCaller(t *testing.T) {
	dir := t.TempDir()
	socket, err := run.Listen(dir) // Connections wait in its queue and are never read from.
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	listener, err := net.FileListener(socket)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	h, err := run.Attach(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 3)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	for range 3 {
		go func() { _, err := h.Input(ctx, 0, make([]byte, 8<<20), true); done <- err }()
	}
	for range 3 {
		select {
		case err := <-done:
			if !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, run.ErrClosed) {
				t.Error(err)
			}
		case <-time.After(20 * time.Second):
			t.Fatal("a request outlived its context")
		}
	}
	if err := h.Close(); err != nil {
		t.Error(err)
	}
	if _, err := h.Extend(t.Context(), 1); !errors.Is(err, run.ErrClosed) {
		t.Errorf("a request on a closed handle: %v", err)
	}
}
