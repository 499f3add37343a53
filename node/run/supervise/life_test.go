package supervise_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/muster-hpc/muster/node/run"
	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
)

func TestExitCodesAndSignalsAreTrue(t *testing.T) {
	s := launch(t, normal, shell("exit 0", "exit 7", "kill -9 $$", "kill -SEGV $$"))
	s.phase(supervisorv1.Phase_PHASE_PREPARED)
	s.start()
	state := s.ended()
	for i, want := range []string{"0:0", "7:0", "0:9", "0:11"} {
		wantExit(t, state, i, want)
	}
	if state.GetTimeLimit() || state.GetDeadline() || state.GetStartBootNs() == 0 {
		t.Errorf("state %v", state)
	}
}

func TestNothingRunsBeforeStart(t *testing.T) {
	plan := shell("echo ran")
	s := launch(t, normal, plan)
	s.phase(supervisorv1.Phase_PHASE_PREPARED)
	state, err := s.Terminate(bound(t), 0, "")
	if err != nil || state.GetPhase() != supervisorv1.Phase_PHASE_ENDED {
		t.Fatalf("state %v, error %v", state, err)
	}
	wantExit(t, state, 0, "0:15")
	if _, err := s.Start(bound(t), nil); !refused(err, "STATE") {
		t.Errorf("a start after the end: %v", err)
	}
	if s.file("out.0") != "" {
		t.Error("the task ran")
	}
	if _, err := os.Stat(filepath.Join(s.dir, run.StartedFile)); !os.IsNotExist(err) {
		t.Errorf("started: %v", err)
	}
}

func TestHundredTasksWriteTheirOwnFiles(t *testing.T) {
	var scripts []string
	for i := range 100 {
		scripts = append(scripts, fmt.Sprintf("echo out $RANK; echo err %d >&2; exit %d", i, i))
	}
	plan := shell(scripts...)
	for i, task := range plan.Tasks {
		task.Env = append(task.Env, fmt.Sprintf("RANK=%d", i))
	}
	s := launch(t, normal, plan)
	s.start("RANK=wrong", "MASTER_PORT=1")
	state := s.ended()
	for i := range 100 {
		wantExit(t, state, i, fmt.Sprintf("%d:0", i))
		if got := s.file(run.OutFile(uint32(i))); got != fmt.Sprintf("out %d\n", i) {
			t.Errorf("task %d wrote %q", i, got)
		}
		if got := s.file(run.ErrFile(uint32(i))); got != fmt.Sprintf("err %d\n", i) {
			t.Errorf("task %d wrote %q to stderr", i, got)
		}
	}
}

func TestDaemonsDoNotOutliveTheStep(t *testing.T) {
	s := launch(t, normal, shell("(setsid setsid sleep 1000 >/dev/null 2>&1 &); sleep 0.05; exit 3"))
	s.start()
	state := s.ended()
	wantExit(t, state, 0, "3:0")
	if n, err := run.KillLeftovers(bound(t), s.cookie); n != 0 || err != nil {
		t.Errorf("%d leftovers at the end, error %v", n, err)
	}
	if state.GetTasks()[0].GetExit().GetEndedBySupervisor() {
		t.Error("the task ended by itself")
	}
}

func TestStepSurvivesSIGKILLOfAgentAndItsGroup(t *testing.T) {
	dir := newDir(t)
	plan := shell("echo ready; while [ ! -e " + dir + "/go ]; do sleep 0.01; done; exit 5")
	b, err := proto.Marshal(plan)
	if err != nil {
		t.Fatal(err)
	}
	next := filepath.Join(dir, "next")
	if err := errors.Join(os.Mkdir(next, 0o700), os.WriteFile(filepath.Join(next, run.PlanFile), b, 0o600)); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(filepath.Join(programs, agent), dir, filepath.Join(programs, normal))
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line := make([]byte, 8)
	if n, err := out.Read(line); err != nil || string(line[:n]) != "started\n" {
		t.Fatalf("the agent said %q, error %v", line[:n], err)
	}
	if err := unix.Kill(-cmd.Process.Pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()

	h, err := run.Attach(bound(t), dir)
	if err != nil {
		t.Fatal(err)
	}
	s := &step{Handle: h, t: t, dir: dir, cookie: plan.GetCookie()}
	t.Cleanup(s.clean)
	s.phase(supervisorv1.Phase_PHASE_RUNNING)
	if err := os.WriteFile(filepath.Join(dir, "go"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	wantExit(t, s.ended(), 0, "5:0")
}

func TestAgentReattachesAndTheResultOutlivesTheSupervisor(t *testing.T) {
	s := launch(t, normal, shell("echo ready; exec sleep 1000"))
	s.start()
	s.ready()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	again, err := run.Attach(bound(t), s.dir)
	if err != nil {
		t.Fatal(err)
	}
	s.Handle = again
	s.phase(supervisorv1.Phase_PHASE_RUNNING)
	if err := s.Dismiss(bound(t)); !refused(err, "STATE") {
		t.Errorf("a dismissal of a running step: %v", err)
	}
	if _, err := s.Terminate(bound(t), time.Second, "*** cancelled ***"); err != nil {
		t.Fatal(err)
	}
	state := s.ended()
	wantExit(t, state, 0, "0:15")
	if !state.GetTasks()[0].GetExit().GetEndedBySupervisor() || s.file("err.0") != "*** cancelled ***\n" {
		t.Errorf("state %v, stderr %q", state, s.file("err.0"))
	}
	if stored, err := run.ReadResult(s.dir); err != nil || !proto.Equal(stored, state) {
		t.Errorf("result %v, error %v, want %v", stored, err, state)
	}
	if err := s.Dismiss(bound(t)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the supervisor left", func() bool { alive, err := run.Alive(s.dir); return !alive && err == nil })
	if _, err := run.Attach(bound(t), s.dir); !errors.Is(err, run.ErrGone) {
		t.Errorf("attaching to nobody: %v", err)
	}
	if concluded, err := run.Conclude(bound(t), s.dir); err != nil || !proto.Equal(concluded, state) {
		t.Errorf("concluded %v, error %v", concluded, err)
	}
	if log, err := byHand(s.dir); err != nil {
		t.Errorf("a supervisor with a result: %v, log %s", err, log)
	}
	if stored, err := run.ReadResult(s.dir); err != nil || !proto.Equal(stored, state) {
		t.Errorf("the result changed to %v, error %v", stored, err)
	}
}

func TestLostSupervisorIsAnExplicitFailureAndLeavesNoProcess(t *testing.T) {
	s := launch(t, normal, shell("(setsid sleep 1000 &); echo ready; exec sleep 1000"))
	s.start()
	s.ready()
	if _, err := run.Conclude(bound(t), s.dir); !errors.Is(err, run.ErrAlive) {
		t.Errorf("concluding beside a living supervisor: %v", err)
	}
	pid := int(s.State().GetTasks()[0].GetPid())
	if err := unix.Kill(int(s.State().GetPid()), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the task died with its supervisor", func() bool { return unix.Kill(pid, 0) != nil })
	eventually(t, "the supervisor is gone", func() bool { _, err := run.Attach(bound(t), s.dir); return errors.Is(err, run.ErrGone) })
	state, err := run.Conclude(bound(t), s.dir)
	if err != nil {
		t.Fatal(err)
	}
	wantExit(t, state, 0, "0:9")
	if state.GetPhase() != supervisorv1.Phase_PHASE_ENDED || state.GetSentence() == "" {
		t.Errorf("state %v", state)
	}
	if n, err := run.KillLeftovers(bound(t), s.cookie); n != 0 || err != nil {
		t.Errorf("%d processes left, error %v", n, err)
	}
	if again, err := run.Conclude(bound(t), s.dir); err != nil || !proto.Equal(again, state) {
		t.Errorf("concluded again: %v, error %v", again, err)
	}
}

func TestTasksAreExecutedOnce(t *testing.T) {
	plan := shell("echo ran; exec sleep 1000")
	s := launch(t, normal, plan)
	s.start()
	s.start()
	eventually(t, "the task ran", func() bool { return s.file("out.0") != "" })
	if err := unix.Kill(int(s.State().GetPid()), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the supervisor is gone", func() bool { alive, _ := run.Alive(s.dir); return !alive })
	eventually(t, "the kernel has killed the task", func() bool {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/environ", s.State().GetTasks()[0].GetPid()))
		return len(b) == 0 // gone, or a zombie
	})
	if _, err := run.Launch(bound(t), s.dir, plan, filepath.Join(programs, normal)); !errors.Is(err, run.ErrStarted) {
		t.Errorf("launching again: %v", err)
	}
	if log, err := byHand(s.dir); err == nil || !strings.Contains(log, run.ErrStarted.Error()) {
		t.Errorf("a second supervisor: error %v, log %s", err, log)
	}
	if _, err := run.MarkStarted(s.dir); !errors.Is(err, run.ErrStarted) {
		t.Errorf("a second record: %v", err)
	}
	if started, err := run.ReadStarted(s.dir); err != nil || started.BootNS == 0 || time.Since(started.Time) > time.Minute {
		t.Errorf("started %v, error %v", started, err)
	}
	if got := s.file("out.0"); got != "ran\n" {
		t.Errorf("output %q", got)
	}
}

func TestDirectoryHasOneSupervisor(t *testing.T) {
	plan := shell("true")
	s := launch(t, normal, plan)
	if _, err := run.Launch(bound(t), s.dir, plan, filepath.Join(programs, normal)); !errors.Is(err, run.ErrAlive) {
		t.Errorf("launching beside a supervisor: %v", err)
	}
	if log, err := byHand(s.dir); err == nil || !strings.Contains(log, run.ErrAlive.Error()) {
		t.Errorf("a second supervisor: error %v, log %s", err, log)
	}
	s.start()
	wantExit(t, s.ended(), 0, "0:0")
}

func TestSupervisorThatDiesBeforeTheStartRanNothing(t *testing.T) {
	s := launch(t, normal, shell("echo ran"))
	s.phase(supervisorv1.Phase_PHASE_PREPARED)
	if err := unix.Kill(int(s.State().GetPid()), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the supervisor is gone", func() bool { alive, _ := run.Alive(s.dir); return !alive })
	state, err := run.Conclude(bound(t), s.dir)
	if err != nil || state.GetPhase() != supervisorv1.Phase_PHASE_FAILED || state.GetUsersFault() {
		t.Errorf("state %v, error %v", state, err)
	}
}

func TestSupervisorThatCannotReadItsPlanIsSeen(t *testing.T) {
	plan := shell("true")
	plan.Tasks[0].Args = nil
	s := launch(t, normal, plan)
	for range s.Events() {
		t.Error("a state of a plan without a program")
	}
	eventually(t, "the supervisor left", func() bool { alive, _ := run.Alive(s.dir); return !alive })
	state, err := run.Conclude(bound(t), s.dir)
	if err != nil || state.GetPhase() != supervisorv1.Phase_PHASE_FAILED {
		t.Errorf("state %v, error %v", state, err)
	}
	if log := s.file(run.LogFile); !strings.Contains(log, "task 0 has no program") {
		t.Errorf("log %s", log)
	}
}

func TestUndismissedSupervisorLeavesByItself(t *testing.T) {
	s := launch(t, hasty, shell("exit 4"))
	s.start()
	wantExit(t, s.ended(), 0, "4:0")
	eventually(t, "the supervisor left", func() bool { alive, _ := run.Alive(s.dir); return !alive })
	if state, err := run.Conclude(bound(t), s.dir); err != nil {
		t.Error(err)
	} else {
		wantExit(t, state, 0, "4:0")
	}
	if _, err := os.Stat(filepath.Join(s.dir, run.SocketFile)); !os.IsNotExist(err) {
		t.Errorf("the socket is left: %v", err)
	}
}

func TestStepThatNobodyStartsEnds(t *testing.T) {
	s := launch(t, hasty, shell("echo ran"))
	s.phase(supervisorv1.Phase_PHASE_PREPARED)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the supervisor left", func() bool { alive, _ := run.Alive(s.dir); return !alive })
	state, err := run.ReadResult(s.dir)
	if err != nil || state.GetPhase() != supervisorv1.Phase_PHASE_FAILED || state.GetUsersFault() {
		t.Errorf("state %v, error %v", state, err)
	}
}

func TestFullDiskDelaysTheEndAndSaysSo(t *testing.T) {
	s := launch(t, fullDisk, shell("exit 6"))
	s.start()
	s.await("the sentence about the disk", func(x *supervisorv1.StepState) bool {
		return strings.Contains(x.GetSentence(), "No space left on device") && !final(x)
	})
	state := s.ended()
	wantExit(t, state, 0, "6:0")
	if strings.Contains(state.GetSentence(), "space") {
		t.Errorf("the trouble is over, but the sentence is %q", state.GetSentence())
	}
}

func TestManyStepsLeaveNoProcess(t *testing.T) {
	n := 300
	if testing.Short() {
		n = 30
	}
	plan := shell("exit 0")
	for i := range n {
		dir := newDir(t)
		h, err := run.Launch(bound(t), dir, plan, filepath.Join(programs, normal))
		if err != nil {
			t.Fatal(err)
		}
		s := &step{Handle: h, t: t, dir: dir, cookie: plan.GetCookie()}
		s.start()
		wantExit(t, s.ended(), 0, "0:0")
		pid := int(s.State().GetPid())
		if err := s.Dismiss(bound(t)); err != nil {
			t.Fatal(i, err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the supervisor's process is gone", func() bool { return unix.Kill(pid, 0) != nil })
	}
	if n, err := run.KillLeftovers(bound(t), plan.GetCookie()); n != 0 || err != nil {
		t.Errorf("%d processes left, error %v", n, err)
	}
}

func TestDirectoryMayBeLongerThanSocketAddresses(t *testing.T) {
	dir := filepath.Join(t.TempDir(), strings.Repeat("d", 120), strings.Repeat("e", 120))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	plan := shell("exit 2")
	h, err := run.Launch(bound(t), dir, plan, filepath.Join(programs, normal))
	if err != nil {
		t.Fatal(err)
	}
	s := &step{Handle: h, t: t, dir: dir, cookie: plan.GetCookie()}
	t.Cleanup(s.clean)
	s.start()
	wantExit(t, s.ended(), 0, "2:0")
	again, err := run.Attach(bound(t), dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := again.Close(); err != nil {
		t.Error(err)
	}
}
