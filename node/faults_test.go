package node

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"

	"github.com/muster-hpc/muster/node/environ"
	"github.com/muster-hpc/muster/node/run"
	"github.com/muster-hpc/muster/node/run/supervise"
)

// faultySupervisor begins the name under which the test program is a supervisor that a signal hits at a point: "POINT-SIGNAL-TIMES".
const faultySupervisor = "faulty-"

// superviseWithFault is the life of such a supervisor.
func superviseWithFault(word string) {
	parts := strings.Split(word, "-")
	signal, times := unix.SignalNum("SIG"+parts[1]), 1
	if parts[2] == "always" {
		times = 1000
	}
	config := supervise.Config{Log: slog.New(slog.NewTextHandler(os.Stderr, nil)), Times: supervise.DefaultTimes, Fault: func(point string) {
		if point != parts[0] {
			return
		}
		f, err := os.OpenFile("faulted", os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil && times == 1 {
			return // it was hit before
		}
		if err == nil {
			_ = f.Close()
		}
		for range times {
			_ = unix.Kill(os.Getpid(), signal)
		}
	}}
	if err := supervise.Run(os.Args[1], config); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// faulty makes the program of such a supervisor.
func faulty(t *testing.T, point, signal, times string) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), faultySupervisor+point+"-"+signal+"-"+times)
	if err := os.Symlink(self, path); err != nil {
		t.Fatal(err)
	}
	return path
}

// supervisorPoints are the points of a supervisor's life, in their order.
var supervisorPoints = []string{"loaded", "prepared", "marked", "executed", "exited", "sealed", "written"}

func TestASupervisorKilledOrStoppedAnywhereLeavesTheTruthOrAFailure(t *testing.T) {
	for _, signal := range []string{"KILL", "STOP"} {
		for _, point := range supervisorPoints {
			t.Run(signal+" "+point, func(t *testing.T) {
				t.Parallel()
				f, work, dir := newFake(t), t.TempDir(), filepath.Join(t.TempDir(), "agent")
				l := f.begin(dir, func(c *Config) { c.Supervisor = faulty(t, point, signal, "once") })
				l.a.pulse = pulse{300 * time.Millisecond, 500 * time.Millisecond, 20 * time.Second}
				f.batch(4, work, "#!/bin/sh\necho once >> count\nexit 5\n", nil)
				f.patiently("prepared, or said why not", func() bool { return f.state(4, environ.BatchStep) == prepared || f.failed(4) != nil })
				f.want(4, running)
				f.patiently("ended, or never begun", func() bool { return f.ended(4, environ.BatchStep) != nil || f.failed(4) != nil })
				f.want(4, ended)
				f.patiently("reaped", func() bool { return f.reaped(4) })
				count, _ := os.ReadFile(filepath.Join(work, "count"))
				f.mu.Lock()
				end, failed := f.ended(4, environ.BatchStep), f.failed(4)
				f.mu.Unlock()
				judgeEnd(t, point, signal, string(count), end, failed)
				if cookie := l.a.cookieOf(4); len(run.Marked(cookie)) > 0 {
					t.Errorf("processes are left: %v", run.Marked(cookie))
				}
			})
		}
	}
}

// judgeEnd checks that what was reported is the true end, or says that it is not known.
func judgeEnd(t *testing.T, point, signal, count string, end *logv1.StepEnded, failed *logv1.PrepareFailed) {
	t.Helper()
	begun := strings.HasPrefix(point, "loaded") || point == "prepared"
	switch {
	case signal == "STOP" || point == "written": // it goes on when it is continued; the result was on disk
		if end == nil || len(end.GetExits()) != 1 || end.GetExits()[0].GetCode() != 5 || end.GetExits()[0].GetEndedBySupervisor() || count != "once\n" {
			t.Errorf("reported %v %v, and it ran %q", end, failed, count)
		}
	case begun:
		sentence, explicit := failed.GetSentence(), failed != nil && !failed.GetUsersFault()
		if end != nil {
			sentence, explicit = end.GetSentence(), end.GetExits()[0].GetEndedBySupervisor()
		}
		if !explicit || sentence == "" || count != "" {
			t.Errorf("reported %v %v, and it ran %q", end, failed, count)
		}
	default:
		if end == nil || end.GetExits()[0].GetSignal() != 9 || !end.GetExits()[0].GetEndedBySupervisor() || end.GetSentence() == "" || strings.Count(count, "once") > 1 {
			t.Errorf("reported %v %v, and it ran %q", end, failed, count)
		}
	}
}

// patiently is eventually, for machines on which many supervisors are continued at the same time.
func (f *fake) patiently(what string, condition func() bool) {
	f.t.Helper()
	deadline := time.After(60 * time.Second)
	for {
		f.mu.Lock()
		ok, changed := condition(), f.changed
		f.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-changed:
		case <-deadline:
			f.mu.Lock()
			defer f.mu.Unlock()
			f.t.Fatalf("never: %s\nactual: %v\nreports: %v", what, f.actual, f.reports)
		}
	}
}

// cookieOf is the mark of the processes of a job's step, of one that has one.
func (a *Agent) cookieOf(job uint32) string {
	a.mu.Lock()
	defer a.mu.Unlock()
	for key, at := range a.attempts {
		for _, s := range at.steps {
			if key.job == job {
				return s.record.GetCookie()
			}
		}
	}
	return ""
}

func TestASupervisorThatAnswersNeverAgainIsKilledWithItsStep(t *testing.T) {
	f, work, dir := newFake(t), t.TempDir(), filepath.Join(t.TempDir(), "agent")
	l := f.begin(dir, nil)
	l.a.pulse = pulse{200 * time.Millisecond, 200 * time.Millisecond, 400 * time.Millisecond}
	f.batch(4, work, "#!/bin/sh\ntouch up\nexec sleep 1000\n", nil)
	f.eventually("prepared", func() bool { return f.state(4, environ.BatchStep) == prepared })
	f.want(4, running)
	waitFor(t, func() bool { _, err := os.Stat(filepath.Join(work, "up")); return err == nil })
	// As if it were in a debugger: whenever somebody continues it, it is stopped again.
	l.a.mu.Lock()
	pid := int(l.a.find(4, 0, environ.BatchStep).handle.State().GetPid())
	l.a.mu.Unlock()
	done := make(chan struct{})
	go func() {
		defer close(done)
		for unix.Kill(pid, unix.SIGSTOP) == nil && !isZombie(pid) {
			time.Sleep(time.Millisecond) // nothing tells when somebody is continued
		}
	}()
	f.patiently("its end", func() bool { return f.ended(4, environ.BatchStep) != nil })
	<-done
	f.mu.Lock()
	end := f.ended(4, environ.BatchStep)
	f.mu.Unlock()
	if e := end.GetExits()[0]; e.GetSignal() != 9 || !e.GetEndedBySupervisor() || !strings.Contains(end.GetSentence(), "did not answer") {
		t.Errorf("its end is %v", end)
	}
	if left := run.Marked(l.a.cookieOf(4)); len(left) > 0 {
		t.Errorf("processes are left: %v", left)
	}
}

func isZombie(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return true
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	return strings.HasPrefix(rest, "Z")
}
