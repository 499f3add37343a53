package supervise_test

import (
	"fmt"
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

// script makes a program of a shell script, for everybody.
func script(t *testing.T, text string) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "muster-around")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	path := filepath.Join(dir, "program")
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+text), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestProgramsAroundTasksChangeTheirEnvironment(t *testing.T) {
	first := script(t, `echo "export ADDED=first word"; echo export ADDED2=$SLURMD_NODENAME; echo unset GONE; echo unset MUSTER_STEP_COOKIE; echo print hello $SLURM_PROCID
echo nonsense; echo export =x; echo complaint >&2; read line && echo print input $line; exit 0`)
	second := script(t, `echo "export ADDED2=$ADDED2+$ADDED"`)
	last := script(t, `echo epilog of $SLURM_PROCID, $ADDED2`)
	plan := shell("echo task $ADDED, $ADDED2, ${GONE-gone}; exit 3", "exit 0")
	for i, task := range plan.Tasks {
		task.Env = append(task.Env, "GONE=here", fmt.Sprintf("SLURM_PROCID=%d", i))
		task.Prologs, task.Epilogs = []string{first, second}, []string{last, "/no/such/epilog"}
	}
	s := launch(t, normal, plan)
	s.start()
	state := s.ended()
	wantExit(t, state, 0, "3:0")
	wantExit(t, state, 1, "0:0")
	if got := s.file("out.0"); got != "hello 0\ntask first word, n1+first word, gone\nepilog of 0, n1+first word\n" {
		t.Errorf("output %q", got)
	}
	if got := s.file("out.1"); got != "hello 1\nepilog of 1, n1+first word\n" {
		t.Errorf("output %q", got)
	}
	if got := s.file("err.0"); !strings.HasPrefix(got, "complaint\n") || !strings.Contains(got, "task epilog /no/such/epilog: No such file or directory") {
		t.Errorf("stderr %q", got)
	}
}

func TestEndOfOneTaskIsNotThatOfAnotherWhosePrologStillRuns(t *testing.T) {
	hold := filepath.Join(t.TempDir(), "hold")
	plan := shell("exit 3", "exit 0")
	plan.Tasks[0].Epilogs = []string{"/bin/true"}
	plan.Tasks[1].Prologs = []string{script(t, "while [ ! -e "+hold+" ]; do sleep 0.01; done")}
	s := launch(t, normal, plan)
	s.start()
	state := s.await("the first end", func(x *supervisorv1.StepState) bool { return x.GetTasks()[0].GetEnded() })
	if state.GetTasks()[1].GetEnded() {
		t.Errorf("state %v", state)
	}
	if err := os.WriteFile(hold, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	state = s.ended()
	wantExit(t, state, 0, "3:0")
	wantExit(t, state, 1, "0:0")
}

func TestTaskWithoutItsPrologIsNotExecuted(t *testing.T) {
	for name, c := range map[string]struct{ program, exit, sentence string }{
		"fails":   {script(t, "exit 7"), "7:0", "it ended with exit code 7"},
		"killed":  {script(t, "kill -9 $$"), "1:0", "it was ended by signal 9"},
		"slow":    {script(t, "exec sleep 1000"), "1:0", "it was killed because it took more than 300ms"},
		"missing": {"/no/such/prolog", "1:0", "No such file or directory"},
	} {
		t.Run(name, func(t *testing.T) {
			plan := shell("echo ran", "exec sleep 1000")
			plan.Tasks[0].Prologs, plan.TaskProgramTimeoutMs = []string{c.program}, 300
			s := launch(t, normal, plan)
			s.start()
			state := s.ended()
			wantExit(t, state, 0, c.exit)
			wantExit(t, state, 1, "0:15") // no part of a gang goes on alone
			want := "task prolog " + c.program + ": " + c.sentence
			if got := state.GetTasks()[0].GetExit().GetLaunchError(); !strings.HasPrefix(got, want) {
				t.Errorf("the task's exit says %q", got)
			}
			if got := s.file("err.0"); !strings.HasPrefix(got, "slurmstepd-n1: error: "+want) && name != "missing" {
				t.Errorf("stderr %q", got)
			}
			if got := s.file("out.0"); got != "" {
				t.Errorf("output %q", got)
			}
		})
	}
}

func TestStepThatIsEndedDuringAPrologExecutesNothing(t *testing.T) {
	plan := shell("echo ran")
	plan.Tasks[0].Prologs = []string{script(t, "trap 'echo print no; exit 0' TERM; echo up >&2; while :; do sleep 0.01; done")}
	plan.Tasks[0].Epilogs = []string{script(t, "echo after")}
	s := launch(t, normal, plan)
	s.start()
	eventually(t, "the prolog runs", func() bool { return s.file("err.0") != "" })
	if _, err := s.Terminate(bound(t), time.Minute, ""); err != nil {
		t.Fatal(err)
	}
	state := s.ended()
	wantExit(t, state, 0, "0:15")
	if got := s.file("out.0"); got != "" || !state.GetTasks()[0].GetExit().GetEndedBySupervisor() {
		t.Errorf("output %q, state %v", got, state)
	}
}

func TestEpilogsRunAfterTERMAndNotAfterKILL(t *testing.T) {
	for grace, want := range map[time.Duration]string{time.Minute: "ready\nafter\n", 0: "ready\n"} {
		plan := shell("echo ready; exec sleep 1000")
		plan.Tasks[0].Epilogs = []string{script(t, "echo after")}
		s := launch(t, normal, plan)
		s.start()
		s.ready()
		if _, err := s.Terminate(bound(t), grace, ""); err != nil {
			t.Fatal(err)
		}
		s.ended()
		if got := s.file("out.0"); got != want {
			t.Errorf("with a grace of %v the output is %q", grace, got)
		}
	}
}

func TestWhatAPrologLeavesBehindHoldsNothingUp(t *testing.T) {
	plan := shell("echo ran $A")
	plan.Tasks[0].Prologs = []string{script(t, "echo export A=1; setsid sleep 1000 &")}
	s := launch(t, normal, plan)
	s.start()
	wantExit(t, s.ended(), 0, "0:0")
	if got := s.file("out.0"); got != "ran 1\n" {
		t.Errorf("output %q", got)
	}
}

func TestLinesComeBeforeWhatTheTaskWrites(t *testing.T) {
	plan := shell("echo $$ $SLURM_TASK_PID; echo from the task >&2")
	plan.Tasks[0].Lines = []string{"cpu-bind=MASK - n1, task  0  0 [%p]: mask 0x1 set", "second"}
	s := launch(t, normal, plan)
	s.start()
	state := s.ended()
	pid := state.GetTasks()[0].GetPid()
	if got, want := s.file("err.0"), fmt.Sprintf("cpu-bind=MASK - n1, task  0  0 [%d]: mask 0x1 set\nsecond\nfrom the task\n", pid); got != want {
		t.Errorf("stderr %q, want %q", got, want)
	}
	if got, want := s.file("out.0"), fmt.Sprintf("%d %d\n", pid, pid); got != want {
		t.Errorf("output %q, want %q", got, want)
	}
}

func TestWarningsComeInTimeAndOnce(t *testing.T) {
	const count = "trap 'echo usr1 $(cut -d\" \" -f1 /proc/uptime)' USR1; trap 'echo usr2' USR2; echo ready; while :; do sleep 0.01; done"
	plan := shell(count)
	plan.TimeLimitMs = 3_600_000
	plan.Warnings = []*supervisorv1.Warning{{Number: 1, Signal: uint32(unix.SIGUSR1), AfterMs: 600}, {Number: 2, Signal: uint32(unix.SIGUSR2), AfterMs: 3_000_000}}
	s := launch(t, normal, plan)
	s.start()
	s.ready()
	state := s.await("the first warning", func(x *supervisorv1.StepState) bool { return len(x.GetWarned()) == 1 })
	if d := time.Duration(run.BootNow() - state.GetStartBootNs()); d < 600*time.Millisecond || d > 1600*time.Millisecond {
		t.Errorf("it came after %v", d)
	}
	eventually(t, "the task saw it", func() bool { return strings.Contains(s.file("out.0"), "usr1") })
	_ = s.Close()
	// An agent that comes later moves the limit back: the second one is due, the first one was sent.
	h, err := run.Attach(bound(t), s.dir)
	if err != nil {
		t.Fatal(err)
	}
	s.Handle = h
	plan.Warnings[0].AfterMs, plan.Warnings[1].AfterMs = 500, 100
	if _, err := s.SetTiming(bound(t), time.Hour, plan.Warnings); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the second warning", func() bool { return strings.Contains(s.file("out.0"), "usr2") })
	// A later limit: the first one comes again, before that one.
	elapsed := time.Duration(run.BootNow() - state.GetStartBootNs())
	plan.Warnings[0].AfterMs = uint64(elapsed/time.Millisecond) + 300
	if _, err := s.SetTiming(bound(t), time.Hour, plan.Warnings[:1]); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the first warning again", func() bool { return strings.Count(s.file("out.0"), "usr1") == 2 })
	if _, err := s.SetTimeLimit(bound(t), time.Millisecond); err != nil {
		t.Fatal(err)
	}
	if state := s.ended(); !state.GetTimeLimit() || len(state.GetWarned()) != 2 {
		t.Errorf("state %v", state)
	}
	if got := s.file("out.0"); strings.Count(got, "usr1") != 2 || strings.Count(got, "usr2") != 1 {
		t.Errorf("output %q", got)
	}
}

func TestWarningReachesTheTreeOrTheFirstProcess(t *testing.T) {
	const both = "trap 'echo shell' USR1; (trap 'echo child; exit' USR1; echo ready; while :; do sleep 0.01; done); while :; do sleep 0.01; done"
	for tree, want := range map[bool]string{true: "child", false: "shell"} {
		plan := shell(both)
		plan.Tasks[0].Args = []string{"sh", "-c", both}
		plan.Warnings = []*supervisorv1.Warning{{Number: 1, Signal: uint32(unix.SIGUSR1), AfterMs: 500, Tree: tree}}
		plan.TimeLimitMs, plan.KillGraceMs = 1500, 0
		s := launch(t, normal, plan)
		s.start()
		s.ended()
		if got := s.file("out.0"); strings.Contains(got, "child") != tree || tree && !strings.Contains(got, want) {
			t.Errorf("with tree %v the output is %q", tree, got)
		}
	}
}

func TestWhatWasMeasuredIsTold(t *testing.T) {
	plan := shell("i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done", "true")
	before := time.Now()
	s := launch(t, normal, plan)
	s.start()
	state := s.ended()
	if at := time.Unix(0, state.GetStartUnixNs()); at.Before(before) || at.After(time.Now()) {
		t.Errorf("executed at %v", at)
	}
	elapsed := state.GetEndBootNs() - state.GetStartBootNs()
	if elapsed <= 0 || elapsed > int64(20*time.Second) {
		t.Errorf("it took %v", time.Duration(elapsed))
	}
	for i, task := range state.GetTasks() {
		u := task.GetUsage()
		if u.GetMaxRssBytes() < 100<<10 || i == 0 && u.GetUserNs()+u.GetSystemNs() == 0 {
			t.Errorf("task %d used %v", i, u)
		}
	}
	if stored, err := run.ReadResult(s.dir); err != nil || stored.GetEndBootNs() != state.GetEndBootNs() || stored.GetTasks()[0].GetUsage() == nil {
		t.Errorf("result %v, error %v", stored, err)
	}
}

// Whatever way a task is executed: it has its three descriptors and its variables, and nothing else.
func TestNothingLeaksIntoTasksOnAnyWay(t *testing.T) {
	const look = "import os\nprint(sorted(int(f) for f in os.listdir('/proc/self/fd') if os.path.exists('/proc/self/fd/'+f)))\nprint(sorted(os.environ))"
	python, err := findPython()
	if err != nil {
		t.Skip("needs python3: a shell changes its environment")
	}
	for name, change := range map[string]func(*supervisorv1.StepPlan){
		"at once":        func(*supervisorv1.StepPlan) {},
		"through stages": func(p *supervisorv1.StepPlan) { p.Tasks[0].Lines = []string{"a line"} },
		"after a prolog": func(p *supervisorv1.StepPlan) { p.Tasks[0].Prologs = []string{"/bin/true"} },
	} {
		plan := shell("")
		plan.Tasks[0].Args = []string{python, "-S", "-E", "-c", look}
		plan.Tasks[0].Env = []string{"MINE=1"}
		change(plan)
		s := launch(t, normal, plan)
		s.start()
		wantExit(t, s.ended(), 0, "0:0")
		got := regexp.MustCompile(`'LC_CTYPE', `).ReplaceAllString(s.file("out.0"), "") // python's own
		if want := "[0, 1, 2]\n['MINE', 'MUSTER_STEP_COOKIE', 'SLURM_TASK_PID']\n"; got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
}

func findPython() (string, error) {
	const path = "/usr/bin/python3"
	_, err := os.Stat(path)
	return path, err
}
