package supervise_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/muster-hpc/muster/node/run"
	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
	"google.golang.org/protobuf/proto"
)

func TestTasksInheritNothingOfTheSupervisor(t *testing.T) {
	const look = `for f in /proc/$$/fd/*; do [ -e $f ] && echo fd ${f##*/}; done
echo env; env | sort
umask; pwd; echo ids $$ $(cut -d' ' -f5,6 /proc/$$/stat); cat /proc/$$/oom_score_adj >&2`
	plan := shell(look, "exec grep -E '^(SigBlk|SigIgn):' /proc/self/status")
	plan.Umask, plan.WorkDir = 0o027, t.TempDir()
	dir := newDir(t)
	// By hand, with a descriptor and ignored signals that somebody forgot.
	b, err := proto.Marshal(plan)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, run.PlanFile), b, 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("sh", "-c", "trap '' HUP INT TERM USR1 PIPE TSTP TTIN CHLD; exec 7</etc/passwd; exec \"$0\" \"$1\"",
		filepath.Join(programs, normal), dir)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Wait() })
	var h *run.Handle
	eventually(t, "the supervisor listens", func() bool { h, err = run.Attach(context.Background(), dir); return err == nil })
	s := &step{Handle: h, t: t, dir: dir, cookie: plan.GetCookie()}
	t.Cleanup(s.clean)
	s.start("ADDED=1")
	wantExit(t, s.ended(), 0, "0:0")
	out := s.file("out.0")
	if head, _, _ := strings.Cut(out, "env\n"); head != "fd 0\nfd 1\nfd 2\n" {
		t.Errorf("descriptors: %s", head)
	}
	if got := s.file("out.1"); got != "SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n" {
		t.Errorf("signals: %s", got)
	}
	for _, want := range []string{"\nADDED=1\n", "\n" + run.CookieVariable + "=" + plan.GetCookie() + "\n", "\n0027\n", "\n" + plan.GetWorkDir() + "\n"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in %s", want, out)
		}
	}
	for _, leaked := range []string{"GOGC", "GOMAXPROCS", run.InheritedVariable} {
		if strings.Contains(out, leaked) {
			t.Errorf("%s leaked", leaked)
		}
	}
	_, ids, _ := strings.Cut(out, "ids ")
	if f := strings.Fields(ids); len(f) != 3 || f[0] != f[1] || f[0] != f[2] {
		t.Errorf("pid, group and session: %v", f)
	}
}

func TestWhatCannotBeExecutedIsTheTasksExit(t *testing.T) {
	dir := t.TempDir()
	script := filepath.Join(dir, "script")
	plain := filepath.Join(dir, "plain")
	for path, mode := range map[string]os.FileMode{script: 0o755, plain: 0o644} {
		if err := os.WriteFile(path, []byte("#!/no/such/interpreter\n"), mode); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct{ program, exit, message string }{
		{"no-such-program", "2:0", "execve(): no-such-program: No such file or directory"},
		{"/no/such/program", "2:0", "execve(): /no/such/program: No such file or directory"},
		{script, "2:0", "execve(): " + script + ": No such file or directory"},
		{plain, "13:0", "execve(): " + plain + ": Permission denied"},
		{dir, "13:0", "execve(): " + dir + ": Permission denied"},
		{"plain", "13:0", "execve(): plain: Permission denied"},
	} {
		plan := shell("true", "exec sleep 1000")
		plan.Tasks[0].Args = []string{c.program}
		plan.Tasks[0].Env = []string{"PATH=" + dir + ":/usr/bin"}
		s := launch(t, normal, plan)
		s.phase(supervisorv1.Phase_PHASE_PREPARED) // It is not the node's fault.
		s.start()
		state := s.ended()
		wantExit(t, state, 0, c.exit)
		wantExit(t, state, 1, "0:15") // No part of a gang goes on alone.
		if got := state.GetTasks()[0].GetExit().GetLaunchError(); got != c.message {
			t.Errorf("%s: %q", c.program, got)
		}
		if got := s.file("err.0"); got != "slurmstepd: error: "+c.message+"\n" {
			t.Errorf("%s: stderr %q", c.program, got)
		}
	}
}

func TestWhyNothingCouldBeExecutedIsSaidOnceByTheNode(t *testing.T) {
	plan := shell("true", "true")
	for _, task := range plan.Tasks {
		task.Args, task.Env = []string{"/no/such"}, append(task.Env, "SLURMD_NODENAME=n1")
	}
	s := launch(t, normal, plan)
	s.phase(supervisorv1.Phase_PHASE_PREPARED)
	s.start()
	s.ended()
	if got := s.file("err.0") + s.file("err.1"); got != "slurmstepd-n1: error: execve(): /no/such: No such file or directory\n" {
		t.Errorf("stderr %q", got)
	}
}

func TestRelativeProgramIsFoundFromTheWorkingDirectory(t *testing.T) {
	plan := shell("true")
	plan.WorkDir = t.TempDir()
	if err := os.WriteFile(filepath.Join(plan.WorkDir, "program"), []byte("#!/bin/sh\nexit 21\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	plan.Tasks[0].Args = []string{"./program"}
	s := launch(t, normal, plan)
	s.start()
	wantExit(t, s.ended(), 0, "21:0")
}

func TestMissingOutputDirectoryFailsThePreparation(t *testing.T) {
	plan := shell("echo ran >&2")
	plan.Tasks[0].StdoutPath = "/no/such/directory/out"
	s := launch(t, normal, plan)
	state := s.ended()
	if state.GetPhase() != supervisorv1.Phase_PHASE_FAILED || !state.GetUsersFault() ||
		state.GetSentence() != "The standard output /no/such/directory/out cannot be opened: No such file or directory." {
		t.Errorf("state %v", state)
	}
	wantExit(t, state, 0, "0:53")
	if _, err := s.Start(bound(t), nil); !refused(err, "STATE") {
		t.Errorf("a start after a failed preparation: %v", err)
	}
	if stored, err := run.ReadResult(s.dir); err != nil || !proto.Equal(stored, state) {
		t.Errorf("result %v, error %v", stored, err)
	}
}

func TestMissingWorkingDirectoryIsReplacedAndSaid(t *testing.T) {
	plan := shell("pwd")
	plan.WorkDir = "/no/such/directory"
	s := launch(t, normal, plan)
	s.start()
	state := s.ended()
	wantExit(t, state, 0, "0:0")
	if s.file("out.0") != "/tmp\n" || !strings.Contains(state.GetSentence(), "/no/such/directory") ||
		!strings.Contains(s.file("err.0"), "/no/such/directory") {
		t.Errorf("output %q, stderr %q, state %v", s.file("out.0"), s.file("err.0"), state)
	}
}

func TestTasksAreBoundToCPUsThatExist(t *testing.T) {
	const look = "grep Cpus_allowed_list /proc/self/status | cut -f2"
	plan := shell(look, look, look)
	plan.Tasks[0].CpuMask = []uint64{1}
	plan.Tasks[1].CpuMask = []uint64{1, 0, 0, 1 << 63} // declared
	s := launch(t, normal, plan)
	s.start()
	s.ended()
	whole := s.file("out.2")
	if s.file("out.0") != "0\n" || s.file("out.1") != whole || whole == "" {
		t.Errorf("bound to %q, %q and %q", s.file("out.0"), s.file("out.1"), whole)
	}
	if log := s.file(run.LogFile); strings.Count(log, "not bound to CPUs") != 1 {
		t.Errorf("log %s", log)
	}
}

func TestAsRootTasksAreTheUser(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	base, err := os.MkdirTemp("", "muster-run-user")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(base) })
	own := filepath.Join(base, "own")
	if err := os.Mkdir(own, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{os.Chmod(base, 0o755), os.Chown(own, 65533, 65532)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	plan := shell("id -u; id -g; id -G; echo again >/dev/stderr; touch file; exec sleep 1000")
	plan.Uid, plan.Gid, plan.Groups, plan.Umask, plan.WorkDir = 65533, 65532, []uint32{65532, 65531}, 0o077, own
	plan.Tasks[0].StdoutPath = filepath.Join(own, "out")
	s := launch(t, normal, plan)
	s.start()
	eventually(t, "the task did its work", func() bool { _, err := os.Stat(filepath.Join(own, "file")); return err == nil })
	b, err := os.ReadFile(filepath.Join(own, "out"))
	if err != nil || string(b) != "65533\n65532\n65532 65531\n" {
		t.Errorf("output %q, error %v", b, err)
	}
	if got := s.file("err.0"); got != "again\n" {
		t.Errorf("stderr %q", got)
	}
	if out, err := exec.Command("stat", "-c", "%u %g %a", filepath.Join(own, "out"), filepath.Join(own, "file")).Output(); err != nil ||
		string(out) != "65533 65532 600\n65533 65532 600\n" {
		t.Errorf("files: %s, error %v", out, err)
	}
	if _, err := s.Terminate(bound(t), 0, ""); err != nil {
		t.Fatal(err)
	}
	wantExit(t, s.ended(), 0, "0:9")

	// What root may write, but not the user, stays untouched.
	plan = shell("true")
	plan.Uid, plan.Gid = 65533, 65532
	plan.Tasks[0].StdoutPath = filepath.Join(base, "roots")
	s = launch(t, normal, plan)
	state := s.ended()
	if state.GetPhase() != supervisorv1.Phase_PHASE_FAILED || !strings.Contains(state.GetSentence(), "Permission denied") {
		t.Errorf("state %v", state)
	}
	if _, err := os.Stat(filepath.Join(base, "roots")); !os.IsNotExist(err) {
		t.Errorf("root's file: %v", err)
	}
}
