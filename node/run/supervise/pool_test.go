package supervise_test

import (
	"bufio"
	"bytes"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/muster-hpc/muster/node/run"
	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
)

// children are the processes that a process started and that have not ended.
func children(t *testing.T, of int) []int {
	t.Helper()
	var pids []int
	threads, err := filepath.Glob("/proc/" + strconv.Itoa(of) + "/task/*/children")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range threads {
		b, err := os.ReadFile(path)
		if err != nil {
			continue // the thread ended
		}
		for word := range strings.FieldsSeq(string(b)) {
			pid, err := strconv.Atoi(word)
			if err != nil {
				t.Fatal(err)
			}
			if alive(pid) {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

// alive reports whether a process exists and is no zombie.
func alive(pid int) bool {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	return err == nil && !strings.HasPrefix(string(b[bytes.LastIndexByte(b, ')')+1:]), " Z")
}

// idle are the supervisors among the children that wait for a step.
func idle(t *testing.T, of int) []int {
	return slices.DeleteFunc(children(t, of), func(pid int) bool {
		return !strings.HasPrefix(argument(pid), run.IdlePrefix)
	})
}

// argument is the only argument of a process, as everybody sees it.
func argument(pid int) string {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cmdline")
	if err != nil {
		return ""
	}
	_, argument, _ := strings.Cut(strings.TrimRight(string(b), "\x00"), "\x00")
	return argument
}

func newPool(t *testing.T, program string, size int) (*run.Pool, *bytes.Buffer) {
	t.Helper()
	log := new(bytes.Buffer)
	pool := run.NewPool(program, size, slog.New(slog.NewTextHandler(log, nil)))
	t.Cleanup(pool.Close)
	pool.Fill()
	eventually(t, "the pool is full", func() bool { return len(idle(t, os.Getpid())) == size })
	return pool, log
}

// launchFrom launches from a pool.
func launchFrom(t *testing.T, pool *run.Pool, plan *supervisorv1.StepPlan) *step {
	t.Helper()
	dir := newDir(t)
	h, err := pool.Launch(bound(t), dir, plan)
	if err != nil {
		t.Fatal(err)
	}
	s := &step{Handle: h, t: t, dir: dir, cookie: plan.GetCookie()}
	t.Cleanup(s.clean)
	return s
}

func TestSupervisorThatWasStartedAheadIsLikeAnyOther(t *testing.T) {
	pool, complaints := newPool(t, filepath.Join(programs, normal), 1)
	ahead := idle(t, os.Getpid())
	plan := shell("echo hello; for f in /proc/$$/fd/*; do [ -e $f ] && echo ${f##*/}; done; true")
	s := launchFrom(t, pool, plan)
	pid := int(s.phase(supervisorv1.Phase_PHASE_PREPARED).GetPid())
	if pid != ahead[0] {
		t.Errorf("the supervisor is process %d; %v waited for the step", pid, ahead)
	}
	if got := argument(pid); got != s.dir {
		t.Errorf("its command line has %q, want the directory %s", got, s.dir)
	}
	s.start()
	state := s.ended()
	wantExit(t, state, 0, "0:0")
	if out := s.file("out.0"); out != "hello\n0\n1\n2\n" {
		t.Errorf("output and descriptors of the task: %q", out)
	}
	if log := s.file(run.LogFile); !strings.Contains(log, "tasks were executed") {
		t.Errorf("its log is not in the step's directory: %q", log)
	}
	if result, err := run.ReadResult(s.dir); err != nil || !proto.Equal(result.GetTasks()[0], state.GetTasks()[0]) {
		t.Errorf("result %v, %v", result, err)
	}
	eventually(t, "another one takes its place", func() bool { return len(idle(t, os.Getpid())) == 1 })
	if complaints.Len() > 0 {
		t.Error(complaints)
	}
}

func TestStepIsLaunchedWhoeverWaitsOrDoesNot(t *testing.T) {
	original, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(t.TempDir(), normal)
	install := func() {
		if err := os.WriteFile(program+".new", original, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(program+".new", program); err != nil {
			t.Fatal(err)
		}
	}
	install()
	for what, prepare := range map[string]func(pool *run.Pool){
		"the one that waits was killed": func(*run.Pool) {
			pid := idle(t, os.Getpid())[0]
			if err := unix.Kill(pid, unix.SIGKILL); err != nil {
				t.Fatal(err)
			}
			eventually(t, "it is dead", func() bool { return !alive(pid) })
		},
		"the program was replaced": func(*run.Pool) { install() },
		"the pool is closed":       func(pool *run.Pool) { pool.Close() },
		"more steps than wait": func(pool *run.Pool) {
			s := launchFrom(t, pool, shell("exit 0"))
			s.phase(supervisorv1.Phase_PHASE_PREPARED)
		},
	} {
		pool, _ := newPool(t, program, 1)
		before := idle(t, os.Getpid())
		prepare(pool)
		s := launchFrom(t, pool, shell("exit 3"))
		s.start()
		state := s.ended()
		wantExit(t, state, 0, "3:0")
		if exe, err := os.Readlink("/proc/" + strconv.Itoa(int(state.GetPid())) + "/exe"); err != nil || exe != program {
			t.Errorf("%s: the step's supervisor runs %s, %v", what, exe, err)
		}
		pool.Close()
		eventually(t, "those that wait end with their pool", func() bool { return len(idle(t, os.Getpid())) == 0 })
		if slices.Contains(before, int(state.GetPid())) {
			t.Errorf("%s: yet the one that waited got the step", what)
		}
	}
}

func TestIdleSupervisorsEndWithAKilledAgentAndOthersDoNot(t *testing.T) {
	dir := newDir(t)
	plan := shell("echo ready; exec sleep 1000")
	if err := os.Mkdir(filepath.Join(dir, "next"), 0o700); err != nil {
		t.Fatal(err)
	}
	b, err := proto.Marshal(plan)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "next", run.PlanFile), b, 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(filepath.Join(programs, pooling), dir, filepath.Join(programs, normal))
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "started\n" {
		t.Fatalf("the agent said %q, %v", line, err)
	}
	eventually(t, "the pool is full again", func() bool { return len(idle(t, cmd.Process.Pid)) == 2 })
	ahead := idle(t, cmd.Process.Pid)
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	eventually(t, "the idle ones are gone", func() bool { return !slices.ContainsFunc(ahead, alive) })
	h, err := run.Attach(bound(t), dir)
	if err != nil {
		t.Fatalf("the supervisor with a step is gone, too: %v", err)
	}
	s := &step{Handle: h, t: t, dir: dir, cookie: plan.GetCookie()}
	t.Cleanup(s.clean)
	s.phase(supervisorv1.Phase_PHASE_RUNNING)
}
