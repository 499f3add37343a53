package node

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"

	"github.com/muster-hpc/muster/node/environ"
	"github.com/muster-hpc/muster/node/run"
)

// supervisorPID is that of a running step's supervisor.
func supervisorPID(t *testing.T, a *Agent, job, step uint32) int {
	t.Helper()
	a.mu.Lock()
	defer a.mu.Unlock()
	return int(a.find(job, 0, step).handle.State().GetPid())
}

func TestAStoppedSupervisorKeepsNothingAlive(t *testing.T) {
	for _, how := range []string{"an order to end", "the deadline"} {
		t.Run(how, func(t *testing.T) {
			f, work := newFake(t), t.TempDir()
			f.leaseMS = 600 // and a window of 2 s
			l := f.begin(filepath.Join(t.TempDir(), "agent"), nil)
			l.a.forceAfter = 100 * time.Millisecond
			f.batch(21, work, "#!/bin/sh\necho $$ > pid\nexec sleep 100\n", func(d *nodev1.DesiredAttempt) { d.StopsItself, d.KillGraceS = true, 0 })
			f.eventually("prepared", func() bool { return f.state(21, environ.BatchStep) == prepared })
			f.want(21, running)
			waitFor(t, func() bool { data, _ := os.ReadFile(filepath.Join(work, "pid")); return len(data) > 0 })
			f.eventually("running", func() bool { return f.state(21, environ.BatchStep) == running })
			if err := syscall.Kill(supervisorPID(t, l.a, 21, environ.BatchStep), syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			if how == "the deadline" {
				f.update(func() { f.noGrants = true })
			} else {
				f.want(21, ended)
			}
			f.eventually("ended", func() bool { return f.ended(21, environ.BatchStep) != nil })
			pid, err := strconv.Atoi(strings.TrimSpace(read(t, filepath.Join(work, "pid"))))
			if err != nil {
				t.Fatal(err)
			}
			if stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)); err == nil && !strings.Contains(string(stat), ") Z ") {
				t.Errorf("the task is still there: %s", stat)
			}
		})
	}
}

func TestASupervisorThatNeverGetsReadyFailsThePrepare(t *testing.T) {
	f := newFake(t)
	hang := filepath.Join(t.TempDir(), "muster-supervisor")
	if err := os.WriteFile(hang, []byte("#!/bin/sh\nmkfifo $1/fifo\nread x < $1/fifo\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	f.prepareMS = 300
	l := f.begin(filepath.Join(t.TempDir(), "agent"), func(c *Config) { c.Supervisor = hang })
	l.a.forceAfter = 100 * time.Millisecond
	f.batch(22, t.TempDir(), "#!/bin/sh\n", nil)
	f.eventually("prepare failed", func() bool { return f.failed(22) != nil })
	if p := f.failed(22); p.GetUsersFault() || !strings.Contains(p.GetSentence(), "did not become ready in time") {
		t.Errorf("it said %v", p)
	}
	f.want(22, ended)
	f.eventually("reaped", func() bool { return f.reaped(22) })
}

func TestAFullDiskFailsThePrepareAndLosesNoReport(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("a small file system can only be mounted by root")
	}
	f, dir, work := newFake(t), t.TempDir(), t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=512k"); err != nil {
		t.Skipf("no small file system here: %v", err)
	}
	f.t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	f.begin(filepath.Join(dir, "agent"), nil)
	f.batch(23, work, "#!/bin/sh\nwhile [ ! -e go ]; do sleep 0.02; done\nexit 6\n", nil)
	f.eventually("prepared", func() bool { return f.state(23, environ.BatchStep) == prepared })
	f.want(23, running)
	f.eventually("running", func() bool { return f.state(23, environ.BatchStep) == running })
	ballast, err := os.Create(filepath.Join(dir, "ballast"))
	if err != nil {
		t.Fatal(err)
	}
	for err == nil {
		_, err = ballast.Write(make([]byte, 1024))
	}
	if err := ballast.Close(); err != nil {
		t.Fatal(err)
	}
	f.batch(24, work, "#!/bin/sh\n", nil)
	f.eventually("prepare failed", func() bool { return f.failed(24) != nil })
	if p := f.failed(24); p.GetUsersFault() || !strings.Contains(p.GetSentence(), "no space is left on the disk") {
		t.Errorf("it said %v", p)
	}
	if err := os.WriteFile(filepath.Join(work, "go"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	f.eventually("its true end, though the disk is still full", func() bool { e := f.ended(23, environ.BatchStep); return e != nil && e.GetExits()[0].GetCode() == 6 })
}

func TestAPreparedStepWhoseSupervisorDiesEndsAlsoWhenItWasStartedMeanwhile(t *testing.T) {
	f := newFake(t)
	start := time.Now()
	l := f.begin(filepath.Join(t.TempDir(), "agent"), func(c *Config) {
		c.Boot = func() time.Duration { return time.Duration(run.BootNow()) + time.Since(start)*20 } // 5 s pass in 0.25 s
	})
	f.batch(25, t.TempDir(), "#!/bin/sh\ntouch ran\n", nil)
	f.eventually("prepared", func() bool { return f.state(25, environ.BatchStep) == prepared })
	if err := syscall.Kill(supervisorPID(t, l.a, 25, environ.BatchStep), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	f.eventually("prepare failed", func() bool { return f.failed(25) != nil })
	f.want(25, running) // the controllers had started it before they heard
	f.eventually("its end", func() bool {
		e := f.ended(25, environ.BatchStep)
		return e != nil && e.GetExits()[0].GetLaunchError() != "" && e.GetExits()[0].GetCount() == 1
	})
}

func TestFinishedAttemptsAreForgottenOldestFirstAndLiveOnesNever(t *testing.T) {
	f, dir := newFake(t), filepath.Join(t.TempDir(), "agent")
	l := f.begin(dir, nil)
	f.batch(31, t.TempDir(), "#!/bin/sh\nsleep 100\n", nil)
	f.eventually("prepared", func() bool { return f.state(31, environ.BatchStep) == prepared })
	for _, job := range []uint32{32, 33} {
		f.batch(job, t.TempDir(), "#!/bin/sh\n", nil)
		f.eventually("prepared", func() bool { return f.state(job, environ.BatchStep) == prepared })
		f.want(job, running)
		f.finish(job)
	}
	f.update(func() { f.desired = nil })
	f.eventually("settled", func() bool { return len(f.actual) == 1 && len(f.lastSync.GetReports()) == 0 })
	age := func(job uint32, d time.Duration) {
		l.a.mu.Lock()
		defer l.a.mu.Unlock()
		at := l.a.attempts[attemptKey{job, 1, 1, 1}]
		at.record.ReapedTime = timestamppb.New(time.Now().Add(-d))
	}
	age(33, keepFinished/2)
	age(32, 2*keepFinished)
	l.a.mu.Lock()
	l.a.sweepDue = true
	l.a.mu.Unlock()
	l.a.poke(l.a.work)
	waitFor(t, func() bool {
		_, err := os.Stat(filepath.Join(dir, "attempts", "32.1.1.1"))
		return errors.Is(err, os.ErrNotExist)
	})
	if err := l.end(); err != nil {
		t.Fatal(err)
	}
	l = f.begin(dir, nil)
	for job, want := range map[uint32]bool{31: true, 32: false, 33: true} {
		if _, ok := l.a.Step(job, 0, environ.BatchStep); ok != want {
			t.Errorf("job %d is known: %t", job, ok)
		}
	}
	f.eventually("joined", func() bool { return len(f.joins) == 2 })
	if got := f.joins[1].GetHighestJobId(); got != 33 {
		t.Errorf("the highest job id is %d", got)
	}
	f.batch(31, t.TempDir(), "", func(d *nodev1.DesiredAttempt) { d.Want = ended; d.Steps = nil })
	f.eventually("reaped", func() bool { return f.reaped(31) })
}

func TestWorkRunsAsItsOwner(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can run work of others")
	}
	f, work, dir := newFake(t), t.TempDir(), filepath.Join(t.TempDir(), "agent")
	if err := errors.Join(os.Chmod(filepath.Dir(work), 0o755), os.Chmod(filepath.Dir(dir), 0o755), os.Chmod(work, 0o777), os.Mkdir(dir, 0o700)); err != nil {
		t.Fatal(err)
	}
	f.begin(dir, nil)
	f.batch(26, work, "#!/bin/sh\nid -u\nid -g\nls "+dir+"/steps 2>&1 | tail -1\ncat "+dir+"/steps/*/plan "+dir+"/steps/26.1.4294967291/plan 2>/dev/null | wc -c\n", func(d *nodev1.DesiredAttempt) {
		d.Job.Owner = &apiv1.JobOwner{Uid: 65534, Gid: 65534, User: "nobody"}
	})
	f.eventually("prepared", func() bool { return f.state(26, environ.BatchStep) == prepared })
	f.want(26, running)
	f.finish(26)
	out := strings.Split(read(t, filepath.Join(work, "slurm-26.out")), "\n")
	if len(out) < 4 || out[0] != "65534" || out[1] != "65534" || !strings.Contains(out[2], "ermission denied") || strings.TrimSpace(out[3]) != "0" {
		t.Errorf("it ran as and saw %q", out)
	}
	var st syscall.Stat_t
	if err := syscall.Stat(filepath.Join(work, "slurm-26.out"), &st); err != nil || st.Uid != 65534 {
		t.Errorf("the output belongs to user %d (%v)", st.Uid, err)
	}
}
