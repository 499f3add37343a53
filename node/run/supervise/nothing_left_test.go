package supervise_test

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/muster-hpc/muster/node/run"
	"github.com/muster-hpc/muster/node/run/cgroup"
	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
)

// daemon leaves its parents, its session and its environment, says its number, and stays.
const daemon = "env -i setsid sh -c 'echo $$ >\"$0\"; exec sleep 1000' \"$FILE\" >/dev/null 2>&1 </dev/null & while [ ! -s \"$FILE\" ]; do sleep 0.01; done; "

func withDaemon(t *testing.T, then string) (*supervisorv1.StepPlan, func() int) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "pid")
	plan := shell(daemon + then)
	plan.Tasks[0].Env = append(plan.Tasks[0].Env, "FILE="+file)
	return plan, func() int {
		b, err := os.ReadFile(file)
		if err != nil {
			return 0
		}
		pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
		if err != nil {
			return 0
		}
		return pid
	}
}

func lives(pid int) bool {
	p, ok := cgroup.Look(pid)
	return ok && p.State != "Z"
}

func TestDaemonOfALostSupervisorEndsWithItsGroup(t *testing.T) {
	both(t, func(t *testing.T, h *cgroup.Hierarchy) {
		plan, pid := withDaemon(t, "exec sleep 1000")
		s := launch(t, normal, confined(h, plan, nil))
		s.start()
		eventually(t, "the daemon runs", func() bool { return pid() != 0 })
		if err := unix.Kill(int(s.State().GetPid()), unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the supervisor is gone", func() bool { alive, err := run.Alive(s.dir); return err == nil && !alive })
		if !lives(pid()) {
			t.Fatal("the daemon went by itself: the test shows nothing")
		}
		state, err := run.Conclude(bound(t), s.dir)
		if err != nil || state.GetPhase() != supervisorv1.Phase_PHASE_ENDED {
			t.Fatalf("state %v, error %v", state, err)
		}
		if lives(pid()) {
			t.Errorf("process %d is left", pid())
		}
	})
}

func TestSupervisorLostBeforeTheStartLeavesNoGroup(t *testing.T) {
	h := groups1(t)
	s := launch(t, normal, confined(h, shell("true"), nil))
	state := s.phase(supervisorv1.Phase_PHASE_PREPARED)
	if err := unix.Kill(int(state.GetPid()), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the supervisor is gone", func() bool { alive, err := run.Alive(s.dir); return err == nil && !alive })
	if names, err := h.Names(); err != nil || len(names) != 2 {
		t.Fatalf("groups %v, error %v: the test shows nothing", names, err)
	}
	if state, err := run.Conclude(bound(t), s.dir); err != nil || state.GetPhase() != supervisorv1.Phase_PHASE_FAILED {
		t.Errorf("state %v, error %v", state, err)
	}
}

func TestWhatNothingCanEndDoesNotKeepTheStep(t *testing.T) {
	h := groups1(t)
	// A frozen process takes no signal, as one that sleeps in a driver. Its freezer is not that of the step.
	ice, err := h.Step(99, 1, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := ice.Destroy(context.Background()); err != nil {
			t.Error(err)
		}
	})
	s := launch(t, resigned, shell("exec sleep 1000", "exec sleep 1000"))
	s.start()
	pid := int(s.State().GetTasks()[1].GetPid())
	eventually(t, "it sleeps", func() bool { p, ok := cgroup.Look(pid); return ok && p.Name == "sleep" })
	freezer := filepath.Join(h.Roots()[cgroup.Freezer], "job_99.1", "step_0")
	if err := os.WriteFile(filepath.Join(freezer, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0); err != nil {
		t.Fatal(err)
	}
	if err := ice.Freeze(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is frozen", func() bool {
		b, err := os.ReadFile(filepath.Join(freezer, "freezer.state"))
		return err == nil && string(b) == "FROZEN\n"
	})
	if _, err := s.Terminate(bound(t), 0, ""); err != nil {
		t.Fatal(err)
	}
	state := s.ended()
	if len(state.GetStuck()) != 1 || int(state.GetStuck()[0].GetPid()) != pid || state.GetStuck()[0].GetState() != "D" ||
		state.GetStuck()[0].GetStartTicks() == 0 || !strings.Contains(state.GetSentence(), "process "+strconv.Itoa(pid)+" (sleep, state D") {
		t.Errorf("state %v", state)
	}
	wantExit(t, state, 0, "0:9")
	wantExit(t, state, 1, "0:9")
	if stored, err := run.ReadResult(s.dir); err != nil || len(stored.GetStuck()) != 1 {
		t.Errorf("result %v, error %v", stored, err)
	}
	if err := ice.Thaw(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it dies when it can", func() bool { return !lives(pid) })
}

func TestStepsLeaveNothing(t *testing.T) {
	steps, parallel := 300, 6
	if os.Getenv("MUSTER_CAMPAIGN") == "1" {
		steps = 10000
	} else if testing.Short() {
		steps = 30
	}
	h := groups1(t)
	mounts := func() string {
		b, err := os.ReadFile("/proc/self/mountinfo")
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	descriptors := func() int {
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	mountsBefore, before := mounts(), descriptors()
	base := t.TempDir()
	next := make(chan int)
	var wait sync.WaitGroup
	for range parallel {
		wait.Go(func() {
			for n := range next {
				if err := oneStep(h, filepath.Join(base, strconv.Itoa(n)), uint32(n)); err != nil {
					t.Errorf("step %d: %v", n, err)
				}
			}
		})
	}
	for n := range steps {
		next <- n
	}
	close(next)
	wait.Wait()
	names, err := h.Names()
	if err != nil || len(names) != 1 {
		t.Errorf("groups %v, error %v", names, err)
	}
	if after := mounts(); after != mountsBefore {
		t.Errorf("mounts are\n%s\nand were\n%s", after, mountsBefore)
	}
	// Waiting for a process keeps a descriptor for a moment.
	eventually(t, "descriptors are closed", func() bool { return descriptors() <= before+2 })
}

// oneStep runs a step that leaves a daemon behind, to its end.
func oneStep(h *cgroup.Hierarchy, dir string, n uint32) error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	plan := confined(h, shell("setsid env -i sleep 1000 >/dev/null 2>&1 </dev/null & exit 3"), &supervisorv1.GroupLimits{Pids: 100})
	plan.ControlGroups.StepId, plan.Cookie = n, plan.Cookie+"-"+strconv.Itoa(int(n))
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	handle, err := run.Launch(ctx, dir, plan, filepath.Join(programs, normal))
	if err != nil {
		return err
	}
	defer handle.Close()
	if _, err := handle.Start(ctx, nil); err != nil {
		return err
	}
	for state := range handle.Events() {
		if final(state) {
			return handle.Dismiss(ctx)
		}
	}
	return handle.Err()
}
