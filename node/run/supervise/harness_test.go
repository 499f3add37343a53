package supervise_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/muster-hpc/muster/node/run"
	"github.com/muster-hpc/muster/node/run/supervise"
	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
	"golang.org/x/sys/unix"
)

// The test program is also the supervisor, by the name it is called with; the names select faults.
const (
	normal   = "supervisor"
	hasty    = "supervisor-hasty"     // short bounds
	resigned = "supervisor-resigned"  // gives up soon what nothing can end
	fullDisk = "supervisor-full-disk" // the first tries to write the result fail
	agent    = "agent"                // launches a supervisor in its argument, then sleeps
	pooling  = "agent-pooling"        // the same, with a pool of two
)

var programs string // directory with links to the test program

func TestMain(m *testing.M) {
	times := supervise.DefaultTimes
	config := supervise.Config{Log: slog.New(slog.NewTextHandler(os.Stderr, nil)), Times: times}
	switch filepath.Base(os.Args[0]) {
	case normal:
	case hasty:
		config.Times.Linger, config.Times.Orphan = 100*time.Millisecond, 200*time.Millisecond
	case resigned:
		config.Times.Stuck, config.Times.Abandon = 50*time.Millisecond, 150*time.Millisecond
	case fullDisk:
		config.Times.WriteAgain = 50 * time.Millisecond
		failures := 3
		config.WriteResult = func(dir string, state *supervisorv1.StepState) error {
			if failures--; failures >= 0 {
				return fmt.Errorf("writing result: %w", unix.ENOSPC)
			}
			return run.WriteResult(dir, state)
		}
	case agent, pooling:
		os.Exit(actAsAgent())
	default:
		os.Exit(runTests(m))
	}
	dir := os.Args[1]
	if supervise.IsIdle(dir) {
		handed, err := supervise.Await(os.Args)
		if handed == nil {
			if err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
			os.Exit(0)
		}
		config.Handed, dir = handed, handed.Dir
	}
	if err := supervise.Run(dir, config); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func runTests(m *testing.M) int {
	self, err := os.Executable()
	if err != nil {
		panic(err)
	}
	if programs, err = os.MkdirTemp("", "muster-run"); err != nil {
		panic(err)
	}
	defer os.RemoveAll(programs)
	for _, name := range []string{normal, hasty, resigned, fullDisk, agent, pooling} {
		if err := os.Symlink(self, filepath.Join(programs, name)); err != nil {
			panic(err)
		}
	}
	return m.Run()
}

// actAsAgent launches the plan that it finds in "next" and starts it, then waits to be killed.
func actAsAgent() int {
	dir, supervisor := os.Args[1], os.Args[2]
	plan, err := run.ReadPlan(filepath.Join(dir, "next"))
	if err != nil {
		panic(err)
	}
	ahead := 0
	if filepath.Base(os.Args[0]) == pooling {
		ahead = 2
	}
	pool := run.NewPool(supervisor, ahead, slog.New(slog.NewTextHandler(os.Stderr, nil)))
	pool.Fill()
	h, err := pool.Launch(context.Background(), dir, plan)
	if err != nil {
		panic(err)
	}
	if _, err := h.Start(context.Background(), nil); err != nil {
		panic(err)
	}
	fmt.Println("started")
	select {}
}

type step struct {
	*run.Handle
	t      *testing.T
	dir    string
	cookie string
}

// shell makes a plan with one task for each script.
func shell(scripts ...string) *supervisorv1.StepPlan {
	plan := &supervisorv1.StepPlan{
		Label: "17.1.0", Uid: uint32(os.Getuid()), Gid: uint32(os.Getgid()), Umask: 0o022, WorkDir: "/", KillGraceMs: 300,
		Cookie: fmt.Sprintf("test-%d-%d", os.Getpid(), time.Now().UnixNano()),
	}
	for i, script := range scripts {
		plan.Tasks = append(plan.Tasks, &supervisorv1.TaskPlan{
			Rank: uint32(i), Args: []string{"sh", "-c", script}, StdinPath: "/dev/null",
			Env: []string{"PATH=/usr/bin:/bin", "SLURMD_NODENAME=n1"},
		})
	}
	return plan
}

func bound(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// newDir makes a step's directory. At the end of the test nothing of the step may be left but its files.
func newDir(t *testing.T) string {
	dir := filepath.Join(t.TempDir(), "17.1.0")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return dir
}

func launch(t *testing.T, supervisor string, plan *supervisorv1.StepPlan) *step {
	t.Helper()
	dir := newDir(t)
	h, err := run.Launch(bound(t), dir, plan, filepath.Join(programs, supervisor))
	if err != nil {
		t.Fatal(err)
	}
	s := &step{Handle: h, t: t, dir: dir, cookie: plan.GetCookie()}
	t.Cleanup(s.clean)
	return s
}

// clean ends the step in whatever state the test left it and checks that nothing remains.
func (s *step) clean() {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	_ = s.Close()
	if h, err := run.Attach(ctx, s.dir); err == nil {
		_, _ = h.Terminate(ctx, 0, "")
		for open := true; open; {
			var state *supervisorv1.StepState
			select {
			case state, open = <-h.Events():
				if final(state) {
					_ = h.Dismiss(ctx)
				}
			case <-ctx.Done():
				open = false
				s.t.Errorf("the step does not end; killing its supervisor: state %v", h.State())
				_ = unix.Kill(int(h.State().GetPid()), unix.SIGKILL)
			}
		}
		_ = h.Close()
	}
	for alive := true; alive && ctx.Err() == nil; time.Sleep(time.Millisecond) {
		alive, _ = run.Alive(s.dir)
	}
	ctx, cancel = context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if n, err := run.KillLeftovers(ctx, s.cookie); n != 0 || err != nil {
		s.t.Errorf("%d processes of the step were left, error %v", n, err)
	}
	if s.t.Failed() {
		log, _ := os.ReadFile(filepath.Join(s.dir, run.LogFile))
		s.t.Logf("log of the supervisor:\n%s", log)
	}
}

func final(s *supervisorv1.StepState) bool {
	return s.GetPhase() == supervisorv1.Phase_PHASE_ENDED || s.GetPhase() == supervisorv1.Phase_PHASE_FAILED
}

// await receives states until one satisfies the condition.
func (s *step) await(what string, good func(*supervisorv1.StepState) bool) *supervisorv1.StepState {
	s.t.Helper()
	if state := s.State(); state != nil && good(state) {
		return state
	}
	timeout := time.After(20 * time.Second)
	for {
		select {
		case state, ok := <-s.Events():
			if !ok {
				s.t.Fatalf("waiting for %s: the connection ended: %v", what, s.Err())
			}
			if good(state) {
				return state
			}
		case <-timeout:
			s.t.Fatalf("waiting for %s: state is still %v", what, s.State())
		}
	}
}

func (s *step) phase(p supervisorv1.Phase) *supervisorv1.StepState {
	s.t.Helper()
	return s.await(p.String(), func(x *supervisorv1.StepState) bool { return x.GetPhase() == p })
}

func (s *step) ended() *supervisorv1.StepState {
	s.t.Helper()
	return s.await("the end", final)
}

func (s *step) start(env ...string) {
	s.t.Helper()
	if _, err := s.Start(bound(s.t), env); err != nil {
		s.t.Fatal(err)
	}
}

func (s *step) file(name string) string {
	s.t.Helper()
	b, err := os.ReadFile(filepath.Join(s.dir, name))
	if err != nil {
		s.t.Fatal(err)
	}
	return string(b)
}

// eventually waits for a condition outside the protocol.
func eventually(t *testing.T, what string, good func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !good(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("it never came true: %s", what)
		}
	}
}

// running reports whether a task wrote "ready" to its output.
func (s *step) ready() {
	s.t.Helper()
	eventually(s.t, "the task is ready", func() bool { return strings.Contains(s.file("out.0"), "ready") })
}

func exitOf(s *supervisorv1.StepState, i int) string {
	e := s.GetTasks()[i].GetExit()
	return fmt.Sprintf("%d:%d", e.GetCode(), e.GetSignal())
}

func wantExit(t *testing.T, s *supervisorv1.StepState, i int, want string) {
	t.Helper()
	if got := exitOf(s, i); got != want {
		t.Errorf("task %d ended with %s, want %s; state %v", i, got, want, s)
	}
}

func refused(err error, code string) bool {
	var r *run.Refused
	return errors.As(err, &r) && strings.HasPrefix(r.Reason, code+": ")
}

// byHand runs a supervisor without an agent and returns its log.
func byHand(dir string) (string, error) {
	var log bytes.Buffer
	cmd := exec.Command(filepath.Join(programs, hasty), dir)
	cmd.Stderr = &log
	err := cmd.Run()
	return log.String(), err
}
