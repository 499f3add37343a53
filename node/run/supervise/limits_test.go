package supervise_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/muster-hpc/muster/node/run"
	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
	"golang.org/x/sys/unix"
)

// stubborn ignores TERM, in all its processes.
const stubborn = "trap '' TERM; (setsid sleep 1000 &); echo ready; while :; do sleep 1000; done"

// selfStopping makes a plan of a step that stops itself.
func selfStopping(t *testing.T, deadline time.Duration, scripts ...string) *supervisorv1.StepPlan {
	plan := shell(scripts...)
	id, err := run.BootID()
	if err != nil {
		t.Fatal(err)
	}
	plan.StopsItself, plan.BootId, plan.DeadlineBootNs = true, id, run.BootNow()+int64(deadline)
	return plan
}

func TestLeaseDeadlineKillsTheTreeAtOnce(t *testing.T) {
	plan := selfStopping(t, 30*time.Second, stubborn)
	plan.KillGraceMs = 600_000
	s := launch(t, normal, plan)
	s.start()
	s.ready()
	// A later deadline counts, also while the step is being ended; an earlier one does not move it back.
	deadline := plan.DeadlineBootNs + int64(time.Second)
	for _, d := range []int64{deadline, 1} {
		if _, err := s.Extend(bound(t), d); err != nil {
			t.Fatal(err)
		}
	}
	if s.State().GetPhase() != supervisorv1.Phase_PHASE_RUNNING {
		t.Fatalf("an earlier deadline ended the step: %v", s.State())
	}
	_ = s.Close()

	plan = selfStopping(t, 700*time.Millisecond, stubborn)
	plan.KillGraceMs = 600_000
	s = launch(t, normal, plan)
	s.start()
	s.ready()
	if _, err := s.Terminate(bound(t), time.Hour, ""); err != nil {
		t.Fatal(err)
	}
	state := s.ended()
	if late := time.Duration(run.BootNow() - plan.DeadlineBootNs); late < 0 || late > 5*time.Second {
		t.Errorf("the end came %v after the deadline", late)
	}
	wantExit(t, state, 0, "0:9")
	if !state.GetDeadline() || state.GetTimeLimit() || !strings.Contains(state.GetSentence(), "lease deadline") {
		t.Errorf("state %v", state)
	}
}

func TestExtendedDeadlineKeepsTheStep(t *testing.T) {
	plan := selfStopping(t, 300*time.Millisecond, "echo ready; exec sleep 1000")
	s := launch(t, normal, plan)
	if _, err := s.Extend(bound(t), run.BootNow()+int64(time.Hour)); err != nil {
		t.Fatal(err)
	}
	s.start()
	// The step lives past its first deadline: a signal that it answers only after it proves that.
	eventually(t, "the first deadline passed", func() bool { return run.BootNow() > plan.DeadlineBootNs+int64(50*time.Millisecond) })
	state, err := s.Signal(bound(t), 1, uint32(unix.SIGCONT), false)
	if err != nil || state.GetPhase() != supervisorv1.Phase_PHASE_RUNNING || state.GetDeadline() {
		t.Errorf("state %v, error %v", state, err)
	}
}

func TestStoppedSupervisorActsOnItsDeadlineWhenItResumes(t *testing.T) {
	plan := selfStopping(t, 500*time.Millisecond, stubborn)
	s := launch(t, normal, plan)
	s.start()
	s.ready()
	pid := int(s.State().GetPid())
	if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the deadline passed", func() bool { return run.BootNow() > plan.DeadlineBootNs })
	// What is asked meanwhile comes too late.
	answered := make(chan *supervisorv1.StepState, 1)
	go func() {
		state, _ := s.Extend(bound(t), run.BootNow()+int64(time.Hour))
		answered <- state
	}()
	if err := unix.Kill(pid, unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	resumed := time.Now()
	if state := s.ended(); !state.GetDeadline() || time.Since(resumed) > 5*time.Second {
		t.Errorf("%v after it resumed: %v", time.Since(resumed), state)
	}
	<-answered
}

func TestStartOfASelfStoppingStepNeedsADeadlineAhead(t *testing.T) {
	plan := selfStopping(t, time.Hour, "echo ran")
	plan.BootId = "another boot"
	s := launch(t, normal, plan)
	if _, err := s.Start(bound(t), nil); !refused(err, "LEASE") {
		t.Errorf("a start with the deadline of another boot: %v", err)
	}
	if _, err := s.Extend(bound(t), run.BootNow()+int64(time.Hour)); err != nil {
		t.Fatal(err)
	}
	s.start()
	wantExit(t, s.ended(), 0, "0:0")

	s = launch(t, normal, selfStopping(t, -time.Second, "echo ran"))
	if state := s.ended(); !state.GetDeadline() || s.file("out.0") != "" {
		t.Errorf("state %v, output %q", state, s.file("out.0"))
	}
}

func TestTimeLimitGivesGraceThenKills(t *testing.T) {
	plan := shell("trap 'echo term; exit 12' TERM; echo ready; while :; do sleep 0.01; done", stubborn)
	plan.TimeLimitMs, plan.KillGraceMs = 300, 400
	s := launch(t, normal, plan)
	s.start()
	state := s.ended()
	took := time.Duration(run.BootNow() - state.GetStartBootNs())
	if took < 690*time.Millisecond || took > 5*time.Second {
		t.Errorf("it took %v from the start, want 300 ms and 400 ms of grace", took)
	}
	wantExit(t, state, 0, "12:0")
	wantExit(t, state, 1, "0:9")
	if !state.GetTimeLimit() || !state.GetTasks()[1].GetExit().GetEndedBySupervisor() {
		t.Errorf("state %v", state)
	}
	if got := s.file("err.0"); !strings.Contains(got, "*** STEP 17.0 ON n1 CANCELLED AT ") || !strings.Contains(got, " DUE TO TIME LIMIT ***\n") {
		t.Errorf("stderr %q", got)
	}
}

func TestTimeLimitCanBeChanged(t *testing.T) {
	plan := shell("echo ready; exec sleep 1000")
	plan.TimeLimitMs = 3_600_000
	s := launch(t, normal, plan)
	s.start()
	if _, err := s.SetTimeLimit(bound(t), 50*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	state := s.ended()
	wantExit(t, state, 0, "0:15")
	if !state.GetTimeLimit() {
		t.Errorf("state %v", state)
	}
}

func TestSecondTerminateShortensTheGrace(t *testing.T) {
	s := launch(t, normal, shell(stubborn))
	s.start()
	s.ready()
	began := time.Now()
	for _, grace := range []time.Duration{time.Hour, 100 * time.Millisecond, time.Hour} {
		if _, err := s.Terminate(bound(t), grace, "once"); err != nil {
			t.Fatal(err)
		}
	}
	wantExit(t, s.ended(), 0, "0:9")
	if took := time.Since(began); took < 100*time.Millisecond || took > 10*time.Second {
		t.Errorf("it took %v", took)
	}
	if got := s.file("err.0"); got != "once\n" {
		t.Errorf("stderr %q", got)
	}
}

func TestStoppedTaskTakesTERM(t *testing.T) {
	s := launch(t, normal, shell("trap 'exit 9' TERM; echo ready; kill -STOP $$; while :; do sleep 0.01; done"))
	s.start()
	s.ready()
	if _, err := s.Terminate(bound(t), time.Minute, ""); err != nil {
		t.Fatal(err)
	}
	wantExit(t, s.ended(), 0, "9:0")
}

func TestSignalsAreDeliveredOnce(t *testing.T) {
	count := "trap 'n=$((n+1)); echo $n' USR1; trap 'exit $n' USR2; echo ready; while :; do sleep 0.01; done"
	s := launch(t, normal, shell(count))
	s.start()
	s.ready()
	for range 2 { // The second comes when the first was taken, so that they could not merge.
		if _, err := s.Signal(bound(t), 1, uint32(unix.SIGUSR1), false); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the signal was seen", func() bool { return strings.Contains(s.file("out.0"), "1\n") })
	}
	if _, err := s.Signal(bound(t), 2, 65, false); !refused(err, "INVALID") {
		t.Errorf("signal 65: %v", err)
	}
	if _, err := s.Signal(bound(t), 2, uint32(unix.SIGUSR2), false); err != nil {
		t.Fatal(err)
	}
	state := s.ended()
	wantExit(t, state, 0, "1:0")
	if state.GetSignalsDelivered() != 2 {
		t.Errorf("state %v", state)
	}
}

func TestTreeSignalReachesDescendantsAndPlainOneDoesNot(t *testing.T) {
	s := launch(t, normal, shell("trap : USR1; setsid sh -c 'trap \"echo child; exit\" USR1; echo ready; while :; do sleep 0.01; done'; exit 0"))
	s.start()
	s.ready()
	if _, err := s.Signal(bound(t), 1, uint32(unix.SIGUSR1), false); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Signal(bound(t), 2, uint32(unix.SIGUSR1), true); err != nil {
		t.Fatal(err)
	}
	wantExit(t, s.ended(), 0, "0:0")
	if got := s.file("out.0"); got != "ready\nchild\n" {
		t.Errorf("output %q", got)
	}
}

func TestBadExitEndsTheOthersOnlyIfAsked(t *testing.T) {
	scripts := []string{"exit 3", "exec sleep 0.3"}
	s := launch(t, normal, shell(scripts...))
	s.start()
	wantExit(t, s.ended(), 1, "0:0")

	plan := shell("exit 3", "exec sleep 1000")
	plan.KillOnBadExit = true
	s = launch(t, normal, plan)
	s.start()
	state := s.ended()
	wantExit(t, state, 0, "3:0")
	wantExit(t, state, 1, "0:15")
	if state.GetTasks()[0].GetExit().GetEndedBySupervisor() || !state.GetTasks()[1].GetExit().GetEndedBySupervisor() {
		t.Errorf("state %v", state)
	}
}

func TestForkingProcessesDoNotEscapeKILL(t *testing.T) {
	// Processes, in sessions of their own, that go on in a new process all the time.
	hop := filepath.Join(t.TempDir(), "hop")
	if err := os.WriteFile(hop, []byte("#!/bin/sh\necho hop\n\"$0\" &\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	s := launch(t, normal, shell("for i in 1 2 3 4 5 6 7 8; do setsid "+hop+" & done; exec sleep 1000"))
	s.start()
	eventually(t, "all of them go on", func() bool { return strings.Count(s.file("out.0"), "hop") > 50 })
	if _, err := s.Terminate(bound(t), 0, ""); err != nil {
		t.Fatal(err)
	}
	wantExit(t, s.ended(), 0, "0:9")
	if n, err := run.KillLeftovers(bound(t), s.cookie); n != 0 || err != nil {
		t.Errorf("%d processes left, error %v", n, err)
	}
}

func TestTheOrderToEndIsSaidInSlurmsWords(t *testing.T) {
	for sentence, want := range map[string]string{
		"cancelled by root":                       " *** STEP 17.0 ON n1 CANCELLED AT ????-??-??T??:??:?? ***\n",
		"requeued by root":                        " DUE TO JOB REQUEUE ***\n",
		"node n2 was lost: not heard of for 1m0s": " DUE TO NODE FAILURE ***\n",
		"another node took the place of this one": "another node took the place of this one\n",
	} {
		s := launch(t, normal, shell("sleep 60"))
		s.start()
		if _, err := s.Terminate(bound(t), 0, sentence); err != nil {
			t.Fatal(err)
		}
		s.ended()
		got := regexp.MustCompile(`\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d`).ReplaceAllString(s.file("err.0"), "????-??-??T??:??:??")
		if !strings.HasSuffix(got, want) {
			t.Errorf("%q is told as %q", sentence, got)
		}
	}
}
