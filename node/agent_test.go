package node

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"

	"github.com/muster-hpc/muster/node/environ"
	"github.com/muster-hpc/muster/node/run"
)

// finish drives a prepared batch job from its start to its reaping.
func (f *fake) finish(job uint32) {
	f.t.Helper()
	f.eventually("step ended", func() bool { return f.ended(job, environ.BatchStep) != nil })
	f.want(job, ended)
	f.eventually("attempt reaped", func() bool { return f.reaped(job) })
}

func TestABatchJobRunsFromPrepareToReaped(t *testing.T) {
	f, work := newFake(t), t.TempDir()
	l := f.begin(filepath.Join(t.TempDir(), "agent"), nil)
	f.batch(3, work, "#!/bin/sh\necho hello from $SLURM_JOB_ID on $SLURMD_NODENAME\necho $0\nexit 3\n", nil)
	f.eventually("prepared", func() bool { return f.state(3, environ.BatchStep) == prepared })
	if _, err := os.Stat(filepath.Join(l.a.cfg.Dir, "steps", "3.1.4294967291", "started")); err == nil {
		t.Error("the script was started before anybody ordered it")
	}
	f.want(3, running)
	f.finish(3)
	exits := f.ended(3, environ.BatchStep).GetExits()
	if len(exits) != 1 || exits[0].GetCode() != 3 || exits[0].GetCount() != 1 {
		t.Errorf("exits are %v", exits)
	}
	out := read(t, filepath.Join(work, "slurm-3.out"))
	if !strings.HasPrefix(out, "hello from 3 on n1\n") || !strings.Contains(out, "slurm_script") {
		t.Errorf("the output is %q", out)
	}
	f.update(func() { f.desired = nil })
	f.eventually("nothing left to report", func() bool { return len(f.actual) == 0 && len(f.lastSync.GetReports()) == 0 })
}

func TestAnAgentKilledAnywhereLosesNothingAndStartsNothingTwice(t *testing.T) {
	for _, point := range []string{"recorded", "launched", "start", "ended", "journaled", "dismiss", "reaped", "reaped journaled"} {
		t.Run(point, func(t *testing.T) {
			f, work, dir := newFake(t), t.TempDir(), filepath.Join(t.TempDir(), "agent")
			killed := make(chan struct{})
			var first *life
			ready := make(chan struct{})
			hit := false
			first = f.begin(dir, func(c *Config) {
				c.Fault = func(p string) {
					if p == point && !hit {
						<-ready
						hit = true
						first.cancel()
						close(killed)
					}
				}
			})
			close(ready)
			f.batch(4, work, "#!/bin/sh\necho once >> count\nexit 5\n", nil)
			second := false
			revive := func() {
				if !second {
					second = true
					if err := first.end(); err != nil {
						t.Error(err)
					}
					f.begin(dir, nil)
				}
			}
			// Drive the job; at the kill a new agent takes over and the job goes on.
			step := func(what string, condition func() bool) {
				t.Helper()
				done := make(chan struct{})
				go func() {
					defer close(done)
					f.eventually(what, condition)
				}()
				select {
				case <-done:
				case <-killed:
					revive()
					<-done
				}
			}
			step("prepared", func() bool { return f.state(4, environ.BatchStep) == prepared })
			f.want(4, running)
			step("ended", func() bool { return f.ended(4, environ.BatchStep) != nil })
			f.want(4, ended)
			step("reaped", func() bool { return f.reaped(4) })
			<-killed
			revive()
			f.update(func() { f.desired = nil })
			f.eventually("settled", func() bool { return len(f.actual) == 0 && len(f.lastSync.GetReports()) == 0 })
			if got := read(t, filepath.Join(work, "count")); got != "once\n" {
				t.Errorf("the script ran %d times", strings.Count(got, "once"))
			}
			f.mu.Lock()
			defer f.mu.Unlock()
			if exits := f.ended(4, environ.BatchStep).GetExits(); len(exits) != 1 || exits[0].GetCode() != 5 {
				t.Errorf("exits are %v", exits)
			}
		})
	}
}

func TestAnExitWhileNoAgentRunsIsReportedByTheNextOne(t *testing.T) {
	f, work, dir := newFake(t), t.TempDir(), filepath.Join(t.TempDir(), "agent")
	l := f.begin(dir, nil)
	f.batch(5, work, "#!/bin/sh\nwhile [ ! -e go ]; do sleep 0.02; done\nexit 9\n", nil)
	f.eventually("prepared", func() bool { return f.state(5, environ.BatchStep) == prepared })
	f.want(5, running)
	f.eventually("running", func() bool { return f.state(5, environ.BatchStep) == running })
	if err := l.end(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(work, "go"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	waitFor(t, func() bool {
		_, err := run.ReadResult(filepath.Join(dir, "steps", "5.1.4294967291"))
		return err == nil
	})
	f.begin(dir, nil)
	f.finish(5)
	if exits := f.ended(5, environ.BatchStep).GetExits(); exits[0].GetCode() != 9 {
		t.Errorf("exits are %v", exits)
	}
}

func waitFor(t *testing.T, condition func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !condition(); {
		if time.Now().After(end) {
			t.Fatal("it never came true")
		}
		time.Sleep(5 * time.Millisecond) // files have no channel to wait on
	}
}

func TestNothingStartsWithoutALease(t *testing.T) {
	f, work := newFake(t), t.TempDir()
	f.noGrants = true
	l := f.begin(filepath.Join(t.TempDir(), "agent"), nil)
	f.batch(6, work, "#!/bin/sh\ntouch ran\n", nil)
	f.eventually("prepared", func() bool { return f.state(6, environ.BatchStep) == prepared })
	f.want(6, running)
	f.eventually("the order arrived", func() bool {
		return f.lastSync.GetHolds().GetIndex() == f.revision && f.state(6, environ.BatchStep) == prepared
	})
	l.a.mu.Lock()
	for _, action := range Reconcile(l.a.control.desired, l.a.local()) {
		if action.Kind == ActionStart {
			t.Errorf("without a lease the agent would start step %d", action.Step)
		}
	}
	l.a.mu.Unlock()
	if _, err := os.Stat(filepath.Join(work, "ran")); err == nil {
		t.Fatal("it was started without a lease")
	}
	f.update(func() { f.noGrants = false })
	f.finish(6)
	if _, err := os.Stat(filepath.Join(work, "ran")); err != nil {
		t.Error(err)
	}
}

func TestALeaseRunsFromTheSendingOfItsSync(t *testing.T) {
	l := lease{sent: map[uint64]time.Duration{}}
	l.sending(1, 10*time.Second)
	l.sending(2, 13*time.Second)
	if !l.grant(&nodev1.Grant{Sequence: 1, LeaseMs: 10_000, FenceWindowMs: 5000}) || l.end != 20*time.Second || l.deadline != 25*time.Second {
		t.Errorf("the lease is %+v", l)
	}
	if !l.grant(&nodev1.Grant{Sequence: 2, LeaseMs: 10_000, FenceWindowMs: 5000}) || l.end != 23*time.Second {
		t.Errorf("the lease is %+v", l)
	}
	if l.grant(&nodev1.Grant{Sequence: 1, LeaseMs: 10_000}) || l.grant(&nodev1.Grant{Sequence: 99, LeaseMs: 10_000}) || l.end != 23*time.Second {
		t.Errorf("an old or unknown grant changed the lease: %+v", l)
	}
	for i := uint64(3); i < 3+2*maxSent; i++ {
		l.sending(i, time.Duration(i)*time.Second)
	}
	if len(l.sent) > maxSent {
		t.Errorf("%d sending times are remembered", len(l.sent))
	}
}

func TestWorkThatStopsItselfGetsTheDeadlineOfTheLease(t *testing.T) {
	f, work, dir := newFake(t), t.TempDir(), filepath.Join(t.TempDir(), "agent")
	f.leaseMS = 1500 // and a window of 2 s
	f.begin(dir, nil)
	f.batch(8, work, "#!/bin/sh\nexec sleep 60\n", func(d *nodev1.DesiredAttempt) { d.StopsItself = true })
	f.eventually("prepared", func() bool { return f.state(8, environ.BatchStep) == prepared })
	f.want(8, running)
	f.eventually("running", func() bool { return f.state(8, environ.BatchStep) == running })
	begin := time.Now()
	f.update(func() { f.noGrants = true })
	f.eventually("ended by the deadline", func() bool { return f.ended(8, environ.BatchStep).GetDeadline() })
	if d := time.Since(begin); d > 6*time.Second {
		t.Errorf("it stopped itself after %s; lease and window are 3.5 s", d)
	}
}

func TestSyncTurnsToAnotherControllerWhenOneIsDeafOrDown(t *testing.T) {
	for _, how := range []string{"deaf", "down"} {
		t.Run(how, func(t *testing.T) {
			f := newFake(t)
			f.leaseMS = 900 // held 300 ms
			f.begin(filepath.Join(t.TempDir(), "agent"), nil)
			f.eventually("a Sync", func() bool { return len(f.syncs) > 0 })
			f.mu.Lock()
			bad := f.syncs[0]
			f.mu.Unlock()
			f.update(func() {
				if how == "deaf" {
					f.deaf[bad] = true
				} else {
					f.down[bad] = true
				}
			})
			f.eventually("Syncs with the other one", func() bool {
				n := len(f.syncs)
				return n > 3 && f.syncs[n-1] != bad && f.syncs[n-2] != bad
			})
		})
	}
}

func TestAnAgentThatMustRejoinKeepsEverything(t *testing.T) {
	f, work := newFake(t), t.TempDir()
	f.begin(filepath.Join(t.TempDir(), "agent"), nil)
	f.batch(9, work, "#!/bin/sh\nwhile [ ! -e go ]; do sleep 0.02; done\n", nil)
	f.eventually("prepared", func() bool { return f.state(9, environ.BatchStep) == prepared })
	f.want(9, running)
	f.eventually("running", func() bool { return f.state(9, environ.BatchStep) == running })
	f.update(func() { f.rejoin, f.epoch = true, 2 })
	f.eventually("joined again, with everything", func() bool {
		return len(f.joins) == 2 && f.lastSync.GetEpoch() == 2 && f.state(9, environ.BatchStep) == running
	})
	if a, b := f.joins[0].GetInstance(), f.joins[1].GetInstance(); a.GetNonce() != b.GetNonce() || a.GetBootId() != b.GetBootId() {
		t.Errorf("it joined as %v and then as %v", a, b)
	}
	if err := os.WriteFile(filepath.Join(work, "go"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	f.finish(9)
}

func TestTwoAgentsNeverShareADirectory(t *testing.T) {
	f, dir := newFake(t), filepath.Join(t.TempDir(), "agent")
	l := f.begin(dir, nil)
	if _, err := Open(l.a.cfg); !errors.Is(err, ErrDirInUse) {
		t.Fatalf("the second agent got %v", err)
	}
	f.eventually("the first one goes on", func() bool { return len(f.syncs) > 0 })
}

func TestATakenNameIsTriedForTwoLeasesThenSaidClearly(t *testing.T) {
	f := newFake(t)
	f.joinError = refusal{&apiv1.ErrorDetail{Reason: "NODE_NAME_TAKEN", Sentence: "node n1 is alive elsewhere"}}
	start := time.Now()
	// A clock a hundred times as fast: two leases of 10 s pass in 0.2 s.
	l := f.begin(filepath.Join(t.TempDir(), "agent"), func(c *Config) {
		c.Boot = func() time.Duration { return time.Since(start) * 100 }
	})
	err := <-l.done
	l.done <- nil
	if !errors.Is(err, ErrNotAdmitted) || !strings.Contains(err.Error(), "node n1 is alive elsewhere") {
		t.Fatalf("the agent ended with %v", err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.joins) < 2 {
		t.Errorf("it tried %d times", len(f.joins))
	}
}

func TestAnInstanceLastsABoot(t *testing.T) {
	path := filepath.Join(t.TempDir(), "instance")
	a, reborn, err := loadInstance(path, "boot-1")
	if err != nil || reborn {
		t.Fatal(reborn, err)
	}
	b, reborn, err := loadInstance(path, "boot-1")
	if reborn || err != nil || b.GetNonce() != a.GetNonce() {
		t.Errorf("the same boot gave %v after %v (%v)", b, a, err)
	}
	c, reborn, err := loadInstance(path, "boot-2")
	if err != nil || !reborn || c.GetNonce() == a.GetNonce() || c.GetBootId() != "boot-2" {
		t.Errorf("another boot gave %v after %v (%v)", c, a, err)
	}
}

func TestAnEndedJobIsTerminatedWithGraceAndReaped(t *testing.T) {
	f, work := newFake(t), t.TempDir()
	f.begin(filepath.Join(t.TempDir(), "agent"), nil)
	f.batch(10, work, "#!/bin/sh\ntrap 'echo got TERM; exit 0' TERM\necho up\nwhile :; do sleep 0.05; done\n", nil)
	f.eventually("prepared", func() bool { return f.state(10, environ.BatchStep) == prepared })
	f.want(10, running)
	waitFor(t, func() bool { data, _ := os.ReadFile(filepath.Join(work, "slurm-10.out")); return len(data) > 0 })
	f.want(10, ended)
	f.eventually("reaped", func() bool { return f.reaped(10) })
	f.mu.Lock()
	defer f.mu.Unlock()
	if e := f.ended(10, environ.BatchStep); e == nil || !e.GetExits()[0].GetEndedBySupervisor() {
		t.Errorf("its end was reported as %v", e)
	}
	if out := read(t, filepath.Join(work, "slurm-10.out")); !strings.Contains(out, "got TERM") {
		t.Errorf("the output is %q", out)
	}
}

func TestWhatIsAbsentGoesOn(t *testing.T) {
	f, work := newFake(t), t.TempDir()
	f.begin(filepath.Join(t.TempDir(), "agent"), nil)
	f.batch(11, work, "#!/bin/sh\nwhile [ ! -e go ]; do sleep 0.02; done\nexit 4\n", nil)
	f.eventually("prepared", func() bool { return f.state(11, environ.BatchStep) == prepared })
	f.want(11, running)
	f.eventually("running", func() bool { return f.state(11, environ.BatchStep) == running })
	f.update(func() { f.desired = nil })
	f.eventually("still reported", func() bool {
		return f.lastSync.GetHolds().GetIndex() == f.revision && f.state(11, environ.BatchStep) == running
	})
	if err := os.WriteFile(filepath.Join(work, "go"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	f.eventually("its true end", func() bool {
		e := f.ended(11, environ.BatchStep)
		return e != nil && e.GetExits()[0].GetCode() == 4
	})
}

func TestALaterPlacementTakesThePlaceOfAnEarlierOne(t *testing.T) {
	f, work := newFake(t), t.TempDir()
	f.begin(filepath.Join(t.TempDir(), "agent"), nil)
	f.batch(12, work, "#!/bin/sh\necho placement $MUSTER_PLACEMENT\n", nil)
	f.eventually("prepared", func() bool { return f.state(12, environ.BatchStep) == prepared })
	f.update(func() { f.desired[0].Fence.Placement = 2 })
	f.eventually("prepared again", func() bool {
		for _, a := range f.actual {
			if a.GetFence().GetPlacement() == 2 && a.GetState() == prepared {
				return f.reaped(12) // the earlier one, under its own fence
			}
		}
		return false
	})
	f.update(func() { f.reports, f.seen = nil, map[string]bool{} })
	f.want(12, running)
	f.finish(12)
	if out := read(t, filepath.Join(work, "slurm-12.out")); out != "placement 2\n" {
		t.Errorf("the output is %q", out)
	}
}

func TestAnEndOfWhatTheNodeNeverSawIsReportedAsReaped(t *testing.T) {
	f := newFake(t)
	f.begin(filepath.Join(t.TempDir(), "agent"), nil)
	f.batch(13, t.TempDir(), "#!/bin/sh\n", func(d *nodev1.DesiredAttempt) { d.Want = ended; d.Steps = nil })
	f.eventually("reaped", func() bool { return f.reaped(13) })
}

func TestAStepThatRanBeforeTheDirectoryWasLostIsNotStarted(t *testing.T) {
	f, work := newFake(t), t.TempDir()
	f.begin(filepath.Join(t.TempDir(), "agent"), nil)
	f.batch(14, work, "#!/bin/sh\ntouch ran\n", func(d *nodev1.DesiredAttempt) { d.Want = running; d.Steps[0].Want = running })
	f.eventually("its loss is reported", func() bool {
		e := f.ended(14, environ.BatchStep)
		return e != nil && e.GetExits()[0].GetLaunchError() != ""
	})
	if _, err := os.Stat(filepath.Join(work, "ran")); err == nil {
		t.Error("it was started")
	}
}

func TestSignalsAreDeliveredOnceAlsoOverARestart(t *testing.T) {
	f, work, dir := newFake(t), t.TempDir(), filepath.Join(t.TempDir(), "agent")
	l := f.begin(dir, nil)
	f.batch(15, work, "#!/bin/sh\ntrap 'echo usr1 >> signals' USR1\ntouch up\nwhile [ ! -e go ]; do sleep 0.02; done\n", nil)
	f.eventually("prepared", func() bool { return f.state(15, environ.BatchStep) == prepared })
	f.want(15, running)
	waitFor(t, func() bool { _, err := os.Stat(filepath.Join(work, "up")); return err == nil })
	f.update(func() {
		f.desired[0].Signals = []*apiv1.SignalOrder{
			{Ordinal: 1, Signal: uint32(syscall.SIGUSR1)},                  // not for the batch shell
			{Ordinal: 2, Signal: uint32(syscall.SIGUSR1), BatchOnly: true}, // for it
		}
	})
	waitFor(t, func() bool { _, err := os.Stat(filepath.Join(work, "signals")); return err == nil })
	if err := l.end(); err != nil {
		t.Fatal(err)
	}
	f.begin(dir, nil)
	f.eventually("adopted", func() bool { return f.state(15, environ.BatchStep) == running })
	f.update(func() {
		f.desired[0].Signals = append(f.desired[0].Signals, &apiv1.SignalOrder{Ordinal: 3, Signal: uint32(syscall.SIGUSR1), Full: true})
	})
	waitFor(t, func() bool {
		data, _ := os.ReadFile(filepath.Join(work, "signals"))
		return strings.Count(string(data), "usr1") >= 2
	})
	if err := os.WriteFile(filepath.Join(work, "go"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	f.finish(15)
	if got := read(t, filepath.Join(work, "signals")); got != "usr1\nusr1\n" {
		t.Errorf("the signals that arrived are %q", got)
	}
}

func TestAPrepareThatCannotSucceedSaysWhoseFaultItIs(t *testing.T) {
	t.Run("missing output folder", func(t *testing.T) {
		f := newFake(t)
		f.begin(filepath.Join(t.TempDir(), "agent"), nil)
		f.batch(16, t.TempDir(), "#!/bin/sh\n", func(d *nodev1.DesiredAttempt) {
			d.Job.Spec.StdoutPath, d.Job.Status.Restarts = "no/such/folder-%r/x.out", 2
		})
		f.eventually("prepare failed", func() bool { return f.failed(16) != nil })
		if p := f.failed(16); !p.GetUsersFault() || !strings.Contains(p.GetSentence(), "no/such/folder-2/x.out") {
			t.Errorf("it said %v", p)
		}
	})
	t.Run("unknown blob", func(t *testing.T) {
		f := newFake(t)
		f.begin(filepath.Join(t.TempDir(), "agent"), nil)
		f.batch(17, t.TempDir(), "#!/bin/sh\n", func(d *nodev1.DesiredAttempt) { d.Job.Spec.ScriptBlob = strings.Repeat("0", 64) })
		f.eventually("prepare failed", func() bool { return f.failed(17) != nil })
		if p := f.failed(17); p.GetUsersFault() || !strings.Contains(p.GetSentence(), "no such blob") {
			t.Errorf("it said %v", p)
		}
		f.want(17, ended)
		f.eventually("reaped", func() bool { return f.reaped(17) })
	})
}

func TestAReportThatTheControllersIgnoredIsSentAgain(t *testing.T) {
	f := newFake(t)
	start := time.Now()
	f.begin(filepath.Join(t.TempDir(), "agent"), func(c *Config) {
		c.Boot = func() time.Duration { return time.Duration(run.BootNow()) + time.Since(start)*20 } // 5 s pass in 0.25 s
	})
	f.batch(18, t.TempDir(), "#!/bin/sh\n", func(d *nodev1.DesiredAttempt) { d.Want = ended; d.Steps = nil })
	f.eventually("reaped", func() bool { return f.reaped(18) })
	f.update(func() { f.reports, f.seen = nil, map[string]bool{} })
	f.eventually("reaped once more", func() bool { return f.reaped(18) })
}

func TestRendezvousAndOutputOfAParallelStep(t *testing.T) {
	f, work := newFake(t), t.TempDir()
	l := f.begin(filepath.Join(t.TempDir(), "agent"), nil)
	f.batch(19, work, "", func(d *nodev1.DesiredAttempt) {
		d.Job.Spec.Kind, d.Job.Spec.ScriptBlob, d.NumTasks = apiv1.JobKind_JOB_KIND_RUN, "", 2
		s := d.Steps[0]
		s.Step.Id, s.Step.NumTasks, s.Ranks, s.TasksPerNode = 0, 2, []uint32{0, 1}, []uint32{2}
		s.Step.Spec = &apiv1.StepSpec{Args: []string{"sh", "-c", "echo $RANK/$WORLD_SIZE $MASTER_ADDR $MASTER_PORT"},
			WorkDir: work, EnvironmentBlob: d.Job.Spec.EnvironmentBlob}
	})
	f.eventually("prepared", func() bool { return f.state(19, 0) == prepared })
	f.mu.Lock()
	port := f.actual[0].GetSteps()[0].GetPort()
	f.mu.Unlock()
	if port < portMin || port > portMax {
		t.Fatalf("the port is %d", port)
	}
	f.update(func() { f.desired[0].Steps[0].MasterAddress, f.desired[0].Steps[0].MasterPort = "127.0.0.1", port })
	f.want(19, running)
	f.eventually("ended", func() bool { return f.ended(19, 0) != nil })
	view, ok := l.a.Step(19, 0, 0)
	if !ok || !view.Over || len(view.Tasks) != 2 || len(view.Exits) != 1 || view.Exits[0].GetCount() != 2 {
		t.Fatalf("the step is seen as %+v", view)
	}
	for i, task := range view.Tasks {
		want := []string{"0/2", "1/2"}[i] + " 127.0.0.1 "
		if got := read(t, task.Stdout.Path); !strings.HasPrefix(got, want) {
			t.Errorf("rank %d wrote %q", i, got)
		}
	}
}

func TestInputReachesTheTask(t *testing.T) {
	f, work := newFake(t), t.TempDir()
	l := f.begin(filepath.Join(t.TempDir(), "agent"), nil)
	f.batch(20, work, "", func(d *nodev1.DesiredAttempt) {
		d.Job.Spec.Kind, d.Job.Spec.ScriptBlob = apiv1.JobKind_JOB_KIND_RUN, ""
		d.Steps[0].Step.Id = 0
		d.Steps[0].Step.Spec = &apiv1.StepSpec{Args: []string{"cat"}, WorkDir: work, EnvironmentBlob: d.Job.Spec.EnvironmentBlob}
	})
	f.eventually("prepared", func() bool { return f.state(20, 0) == prepared })
	f.want(20, running)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if n, err := l.a.Input(ctx, 20, 0, 0, 0, []byte("some input"), true); err != nil || n != 10 {
		t.Fatalf("%d bytes were taken (%v)", n, err)
	}
	f.eventually("ended", func() bool { return f.ended(20, 0) != nil })
	view, _ := l.a.Step(20, 0, 0)
	if got := read(t, view.Tasks[0].Stdout.Path); got != "some input" {
		t.Errorf("cat wrote %q", got)
	}
	if _, err := l.a.Input(ctx, 20, 0, 0, 10, []byte("more"), false); !errors.Is(err, ErrStepOver) {
		t.Errorf("input after the end gave %v", err)
	}
}
