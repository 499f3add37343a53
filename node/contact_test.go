package node

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"

	"github.com/muster-hpc/muster/node/environ"
)

// journalist keeps what an agent logs at level INFO and above.
type journalist struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (j *journalist) Write(p []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.Write(p)
}

// lines returns the lines that contain a text.
func (j *journalist) lines(part string) (lines []string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for line := range strings.Lines(j.text.String()) {
		if strings.Contains(line, part) {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	return lines
}

func (j *journalist) log(c *Config) { c.Log = slog.New(slog.NewTextHandler(j, nil)) }

func TestTheLogSaysWhenContactIsLostAndRegainedAndWhatWasStopped(t *testing.T) {
	f, work, j := newFake(t), t.TempDir(), new(journalist)
	f.leaseMS = 600 // and a window of 2 s
	f.begin(filepath.Join(t.TempDir(), "agent"), j.log)
	f.batch(31, work, "#!/bin/sh\nexec sleep 100\n", func(d *nodev1.DesiredAttempt) { d.StopsItself, d.KillGraceS = true, 0 })
	f.eventually("prepared", func() bool { return f.state(31, environ.BatchStep) == prepared })
	f.want(31, running)
	f.eventually("running", func() bool { return f.state(31, environ.BatchStep) == running })
	f.update(func() { f.down["c1"], f.down["c2"] = true, true })
	waitFor(t, func() bool { return len(j.lines("a step was stopped because the lease")) > 0 })
	lost := j.lines("the lease is lost")
	if len(lost) != 1 || !strings.Contains(lost[0], "c1") || !strings.Contains(lost[0], "c2") || !strings.Contains(lost[0], "since_last_grant=") {
		t.Errorf("the loss was told so: %q", lost)
	}
	f.update(func() { clear(f.down) })
	f.eventually("ended", func() bool { return f.ended(31, environ.BatchStep) != nil })
	waitFor(t, func() bool { return len(j.lines("contact with the control plane is regained")) > 0 })
	for _, once := range []string{"the lease is lost", "is regained", "a step was stopped because", "msg=joined"} {
		if lines := j.lines(once); len(lines) != 1 {
			t.Errorf("told %d times: %q", len(lines), lines)
		}
	}
	if alarm := j.lines("level=ERROR"); len(alarm) > 0 {
		t.Errorf("the supervisor ended its step by itself, and yet: %q", alarm)
	}
}

func TestARejoinSaidByManySyncsIsOneJoin(t *testing.T) {
	f, j := newFake(t), new(journalist)
	l := f.begin(filepath.Join(t.TempDir(), "agent"), j.log)
	f.eventually("joined", func() bool { return len(f.syncs) > 0 })
	l.a.mu.Lock()
	before := l.a.control.joins
	l.a.mu.Unlock()
	l.a.joined(&nodev1.JoinResponse{Number: 7, Epoch: 2, ClusterName: "test"})
	l.a.take(&exchange{joins: before}, &nodev1.SyncResponse{Rejoin: true}) // sent before that admission
	l.a.mu.Lock()
	defer l.a.mu.Unlock()
	if l.a.control.rejoin {
		t.Error("an order to join that is older than the last admission would be obeyed")
	}
	if lines := j.lines("msg=joined"); len(lines) != 2 {
		t.Errorf("two admissions that differ were told as %q", lines)
	}
}

func TestANodeThatWasBootedAnewSaysOnceThatItWaits(t *testing.T) {
	for _, c := range []struct{ reborn, says, not string }{
		{"boot-1", "booted anew", "name is taken"}, {"", "name is taken", "booted anew"},
	} {
		f, j, dir := newFake(t), new(journalist), filepath.Join(t.TempDir(), "agent")
		if err := os.Mkdir(dir, 0o711); err != nil {
			t.Fatal(err)
		}
		if c.reborn != "" {
			if _, _, err := loadInstance(filepath.Join(dir, "instance"), c.reborn); err != nil {
				t.Fatal(err)
			}
		}
		f.joinError = refusal{&apiv1.ErrorDetail{Reason: "NODE_NAME_TAKEN", Sentence: "another agent joined as node n1"}}
		f.begin(dir, func(cfg *Config) { j.log(cfg); cfg.BootID = "boot-2" })
		f.eventually("it tried a few times", func() bool { return len(f.joins) > 3 })
		f.update(func() { f.joinError = nil })
		f.eventually("it joined", func() bool { return len(f.syncs) > 0 })
		if says, not := j.lines(c.says), j.lines(c.not); len(says) != 1 || len(not) > 0 || len(j.lines("did not admit")) > 0 {
			t.Errorf("after %q it said %q and %q", c.reborn, says, not)
		}
	}
}

func TestAStepWhoseEndIsHeldUpIsToldOnceAMinute(t *testing.T) {
	j, clock := new(journalist), time.Hour
	a := &Agent{log: slog.New(slog.NewTextHandler(j, nil)), boot: func() time.Duration { return clock }}
	s := &step{id: 1, key: attemptKey{job: 5, attempt: 1}}
	running := &supervisorv1.StepState{Phase: supervisorv1.Phase_PHASE_RUNNING, Sentence: "The working directory cannot be entered."}
	a.tell(s, running)
	a.tell(s, &supervisorv1.StepState{Phase: supervisorv1.Phase_PHASE_ENDING, Sentence: running.Sentence})
	if said := j.lines("not over"); len(said) > 0 {
		t.Errorf("what is for the user was told: %q", said)
	}
	full := &supervisorv1.StepState{Phase: supervisorv1.Phase_PHASE_ENDING, Sentence: "The result cannot be written (no space)."}
	for range 121 {
		a.tell(s, full)
		clock += time.Second
	}
	if said := j.lines("The result cannot be written"); len(said) != 3 {
		t.Errorf("in two minutes it was told %d times: %q", len(said), said)
	}
}

// TestASupervisorHoldsNoThreadOfTheAgent: nodes run hundreds of jobs.
func TestASupervisorHoldsNoThreadOfTheAgent(t *testing.T) {
	f, work := newFake(t), t.TempDir()
	f.begin(filepath.Join(t.TempDir(), "agent"), func(c *Config) { c.Log = slog.New(slog.DiscardHandler) })
	threads := func() int {
		entries, err := os.ReadDir("/proc/self/task")
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	before := threads()
	const n = 24
	for id := uint32(100); id < 100+n; id++ { // one after the other: only what stays is counted
		f.batch(id, work, "#!/bin/sh\n", nil)
		f.eventually("prepared", func() bool { return f.state(id, environ.BatchStep) == prepared })
	}
	if grown := threads() - before; grown > n/2 {
		t.Errorf("%d supervisors cost %d threads", n, grown)
	}
	for id := uint32(100); id < 100+n; id++ {
		f.want(id, ended)
	}
	f.eventually("all reaped", func() bool {
		for id := uint32(100); id < 100+n; id++ {
			if !f.reaped(id) {
				return false
			}
		}
		return true
	})
	waitFor(t, func() bool { // none stays a zombie
		var ended unix.Siginfo // of a child that has ended and was not waited for; supervisors of other tests may live
		err := unix.Waitid(unix.P_ALL, 0, &ended, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
		return errors.Is(err, unix.ECHILD) || err == nil && ended.Signo == 0
	})
}

// Found by the campaign of virtual days (seed 99): a preparation that outlasts the deadline may belong to an attempt that was accounted
// for meanwhile. Nobody speaks of it any more, and its supervisor waited for ever.
func TestAStepThatWasBeingPreparedWhenItsDeadlinePassedIsGivenUp(t *testing.T) {
	f, recorded, release := newFake(t), make(chan struct{}), make(chan struct{})
	f.leaseMS = 500 // and a window of 2 s
	l := f.begin(filepath.Join(t.TempDir(), "agent"), func(c *Config) {
		c.Fault = func(point string) {
			if point == "recorded" {
				close(recorded)
				<-release
			}
		}
	})
	f.batch(31, t.TempDir(), "#!/bin/sh\n", func(d *nodev1.DesiredAttempt) { d.StopsItself = true })
	<-recorded
	f.update(func() { f.noGrants, f.desired = true, nil }) // the attempt is accounted for on silence
	waitFor(t, func() bool {
		l.a.mu.Lock()
		defer l.a.mu.Unlock()
		return l.a.lease.deadline != 0 && l.a.boot() >= l.a.lease.deadline
	})
	f.update(func() { f.noGrants = false })
	waitFor(t, func() bool {
		l.a.mu.Lock()
		defer l.a.mu.Unlock()
		return l.a.leased()
	})
	close(release)
	f.eventually("prepare failed", func() bool { return f.failed(31) != nil })
	if p := f.failed(31); p.GetUsersFault() || !strings.Contains(p.GetSentence(), "lost contact with the controllers") {
		t.Errorf("it said %v", p)
	}
}
