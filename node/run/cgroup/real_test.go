package cgroup_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/muster-hpc/muster/node/run/cgroup"
)

func TestLimitsOfVersion1AreInTheFiles(t *testing.T) {
	h := real1(t)
	g := step(t, h)
	limits := cgroup.Limits{CPUs: []uint64{1}, CPUShares: 2048, MemoryMB: 64, SwapMB: 8, PIDs: 100}
	apply(t, g, limits)
	wantFile(t, at(h, cgroup.CPUSet), "cpuset.cpus", "0")
	wantFile(t, at(h, cgroup.CPU), "cpu.shares", "2048")
	wantFile(t, at(h, cgroup.Memory), "memory.limit_in_bytes", mb(64))
	wantFile(t, at(h, cgroup.Memory), "memory.memsw.limit_in_bytes", mb(72))
	wantFile(t, at(h, cgroup.PIDs), "pids.max", "100")
	// Again, and in both directions.
	apply(t, g, limits)
	limits.MemoryMB, limits.SwapMB = 128, 0
	apply(t, g, limits)
	wantFile(t, at(h, cgroup.Memory), "memory.memsw.limit_in_bytes", mb(128))
	limits.MemoryMB = 32
	apply(t, g, limits)
	wantFile(t, at(h, cgroup.Memory), "memory.limit_in_bytes", mb(32))
	apply(t, g, cgroup.Limits{PIDs: 1})
	wantFile(t, at(h, cgroup.PIDs), "pids.max", "64") // a launch would not fit
	if out := sh(t, task(t, g, 0), "grep Cpus_allowed_list /proc/self/status"); code(t, out) != 0 || !strings.HasSuffix(output(out), "\t0\n") {
		t.Errorf("CPUs of a task: %s", output(out))
	}
}

func TestCPUsThatTheMachineDoesNotHaveAreSaidNotSet(t *testing.T) {
	h := real1(t)
	g := step(t, h)
	missing, err := g.Apply(cgroup.Limits{CPUs: []uint64{1, 0, 0, 1 << 63}})
	if err != nil || len(missing) != 1 || !strings.Contains(missing[0], "declared") {
		t.Errorf("missing %q, error %v", missing, err)
	}
	if out := sh(t, g, "true"); code(t, out) != 0 {
		t.Errorf("the group cannot be entered: %s", output(out))
	}
}

func TestWhoIsKilledForMemoryIsKnownByRank(t *testing.T) {
	h := real1(t)
	g := step(t, h)
	apply(t, g, cgroup.Limits{MemoryMB: 48})
	innocent, hungry := task(t, g, 2), task(t, g, 3)
	waits := sh(t, innocent, "exec sleep 1000")
	eats := sh(t, hungry, "exec dd if=/dev/zero of=/dev/null bs=400M count=1")
	if c := code(t, eats); c != -1 {
		t.Fatalf("the hungry task ended with %d: %.200s", c, output(eats))
	}
	if o := innocent.OOM(); o.Kills != 0 {
		t.Errorf("the innocent rank: %+v", o)
	}
	o := hungry.OOM()
	if o.Kills != 1 {
		t.Errorf("the hungry rank: %+v", o)
	}
	of := g.OOM()
	if got, want := of.Verdict(3, "n2"), "rank 3 was killed for memory: its step used 48 of 48 MiB on n2; ask for more with --mem"; got != want {
		t.Errorf("verdict %q, want %q", got, want)
	}
	if u := hungry.Usage(); u.PeakBytes < 30<<20 || u.UserNS+u.SystemNS == 0 {
		t.Errorf("usage of the hungry rank: %+v", u)
	}
	if u := innocent.Usage(); u.PeakBytes > 20<<20 {
		t.Errorf("usage of the innocent rank: %+v", u)
	}
	if err := waits.Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("the innocent rank is gone: %v", err)
	}
}

func TestVerdictSaysWhatIsKnown(t *testing.T) {
	for want, o := range map[string]cgroup.OOM{
		"rank 3 was killed for memory: its step used 8,192 of 8,192 MiB on n2; ask for more with --mem":   {PeakBytes: 8192 << 20, LimitBytes: 8192 << 20},
		"rank 3 was killed for memory: its step used all of its 8,192 MiB on n2; ask for more with --mem": {LimitBytes: 8192 << 20},
		"rank 3 was killed for memory: n2 had none left, and its step, which had used 1,234,567 MiB there, had no limit; ask for as much as it needs with --mem": {
			PeakBytes: 1234567 << 20},
	} {
		if got := o.Verdict(3, "n2"); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

func TestForkBombEnds(t *testing.T) {
	h := real1(t)
	g := step(t, h)
	apply(t, g, cgroup.Limits{PIDs: 64})
	cmd := sh(t, task(t, g, 0), "trap '' TERM; while :; do setsid sh -c 'while :; do sleep 9 & done' & done 2>/dev/null")
	eventually(t, "the bomb went off", func() bool { return len(procs(t, g)) > 40 })
	eventually(t, "every process is gone", func() bool {
		if err := g.Kill(); err != nil {
			t.Fatal(err)
		}
		return len(procs(t, g)) == 0
	})
	_ = cmd.Wait()
}

func TestKillReachesWhatShedEverything(t *testing.T) {
	both(t, func(t *testing.T, h *cgroup.Hierarchy) {
		g := step(t, h)
		// A daemon: no parent of ours, no session of ours, no environment of ours.
		cmd := sh(t, task(t, g, 0), "setsid env -i sleep 1000 >/dev/null 2>&1 </dev/null & exit 0")
		if c := code(t, cmd); c != 0 {
			t.Fatalf("exit %d: %s", c, output(cmd))
		}
		if len(procs(t, g)) == 0 {
			t.Fatal("the daemon is not in the group")
		}
		if err := g.Freeze(); err != nil { // A frozen one dies, too.
			t.Fatal(err)
		}
		eventually(t, "the daemon is gone", func() bool {
			if err := g.Kill(); err != nil {
				t.Fatal(err)
			}
			return len(procs(t, g)) == 0
		})
	})
}

func TestFrozenProcessesStandStill(t *testing.T) {
	both(t, func(t *testing.T, h *cgroup.Hierarchy) {
		g := step(t, h)
		counter := filepath.Join(t.TempDir(), "counter")
		sh(t, task(t, g, 0), "while :; do echo >>"+counter+"; sleep 0.01; done")
		size := func() int64 {
			info, err := os.Stat(counter)
			if err != nil {
				return 0
			}
			return info.Size()
		}
		eventually(t, "it counts", func() bool { return size() > 2 })
		if err := g.Freeze(); err != nil {
			t.Fatal(err)
		}
		eventually(t, "it stands still", func() bool {
			before := size()
			time.Sleep(60 * time.Millisecond)
			return before == size()
		})
		if err := g.Thaw(); err != nil {
			t.Fatal(err)
		}
		before := size()
		eventually(t, "it counts again", func() bool { return size() > before })
	})
}

func TestProcessIsBornInItsGroupInVersion2(t *testing.T) {
	h := real2(t)
	g := task(t, step(t, h), 5)
	f, err := g.Descriptor()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	cmd := exec.Command("sleep", "1000")
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(f.Fd())}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if pids := procs(t, g); len(pids) != 1 || pids[0] != cmd.Process.Pid {
		t.Errorf("processes %v, want %d", pids, cmd.Process.Pid)
	}
	if err := g.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	if f, err := task(t, step(t, real1(t)), 5).Descriptor(); f != nil || err != nil {
		t.Errorf("version 1 gave %v, %v", f, err)
	}
}

func TestDevicesOfOthersCannotBeOpened(t *testing.T) {
	both(t, func(t *testing.T, h *cgroup.Hierarchy) {
		full, err := cgroup.DeviceOf("/dev/full")
		if err != nil {
			t.Fatal(err)
		}
		zero, err := cgroup.DeviceOf("/dev/zero")
		if err != nil {
			t.Fatal(err)
		}
		g := step(t, h)
		apply(t, g, cgroup.Limits{Devices: &cgroup.DeviceRules{Others: true, Listed: []cgroup.Device{full}}})
		if out := sh(t, task(t, g, 0), "head -c1 /dev/zero >/dev/null || exit 1; head -c1 /dev/full && exit 2; exit 0"); code(t, out) != 0 ||
			!strings.Contains(output(out), "Operation not permitted") {
			t.Errorf("the others: %s", output(out))
		}
		only, err := h.Step(7, 1, 1)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if _, err := only.Destroy(context.Background()); err != nil {
				t.Error(err)
			}
		})
		apply(t, only, cgroup.Limits{Devices: &cgroup.DeviceRules{Listed: []cgroup.Device{zero, {Major: 1, Minor: 3}}}})
		if out := sh(t, task(t, only, 0), "head -c1 /dev/zero >/dev/null || exit 1; head -c1 /dev/full && exit 2; exit 0"); code(t, out) != 0 {
			t.Errorf("only these: %s", output(out))
		}
	})
}

func TestWhoKeepsAGroupIsNamed(t *testing.T) {
	both(t, func(t *testing.T, h *cgroup.Hierarchy) {
		g := step(t, h)
		cmd := sh(t, task(t, g, 0), "exec sleep 1000")
		eventually(t, "it sleeps", func() bool { return len(procs(t, g)) == 1 && strings.Contains(cgroup.Describe(g.Stuck()), "sleep") })
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		stuck, err := g.Remove(ctx)
		if !errors.Is(err, unix.EBUSY) || len(stuck) != 1 || stuck[0].PID != cmd.Process.Pid || stuck[0].Name != "sleep" || stuck[0].State != "S" {
			t.Errorf("stuck %v, error %v", stuck, err)
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait()
		if stuck, err := g.Remove(t.Context()); err != nil || len(stuck) > 0 {
			t.Errorf("after its end: stuck %v, error %v", stuck, err)
		}
		if stuck, err := g.Remove(t.Context()); err != nil || len(stuck) > 0 {
			t.Errorf("again: stuck %v, error %v", stuck, err)
		}
	})
}

func TestCleanRemovesWhatIsNotKept(t *testing.T) {
	both(t, func(t *testing.T, h *cgroup.Hierarchy) {
		for job := range uint32(3) {
			for s := range uint32(2) {
				g, err := h.Step(job+1, 1, s)
				if err != nil {
					t.Fatal(err)
				}
				sh(t, task(t, g, 0), "exec sleep 1000")
				eventually(t, "it is in its group", func() bool { return len(procs(t, g)) > 0 })
			}
		}
		kept := []cgroup.Name{{Job: 2, Attempt: 1, IsStep: true}, {Job: 2, Attempt: 1}}
		removed, stuck, err := h.Clean(t.Context(), func(n cgroup.Name) bool { return n == kept[0] || n == kept[1] })
		if removed != 7 || len(stuck) > 0 || err != nil {
			t.Errorf("removed %d groups, stuck %v, error %v", removed, stuck, err)
		}
		names, err := h.Names()
		if err != nil || len(names) != 2 || names[0] != kept[0] || names[1] != kept[1] {
			t.Errorf("left: %v, %v", names, err)
		}
		if len(procs(t, h.Find(kept[0]))) == 0 {
			t.Error("the kept step lost its process")
		}
		if _, _, err := h.Clean(t.Context(), func(cgroup.Name) bool { return false }); err != nil {
			t.Error(err)
		}
	})
}

func TestStepsLeaveNoGroup(t *testing.T) {
	rounds := 100
	if os.Getenv("MUSTER_CAMPAIGN") == "1" {
		rounds = 10000
	}
	both(t, func(t *testing.T, h *cgroup.Hierarchy) {
		for range rounds {
			g := step2(t, h)
			for rank := range uint32(2) {
				task(t, g, rank)
			}
			if _, err := g.Remove(t.Context()); err != nil {
				t.Fatal(err)
			}
			if _, err := h.Find(cgroup.Name{Job: 7, Attempt: 1}).Remove(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if names, err := h.Names(); len(names) != 0 || err != nil {
			t.Errorf("left: %v, %v", names, err)
		}
	})
}

// step2 makes a step that the test removes itself.
func step2(t *testing.T, h *cgroup.Hierarchy) *cgroup.Group {
	t.Helper()
	g, err := h.Step(7, 1, 0)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func TestWhatDoesNotExistIsEasilyRemoved(t *testing.T) {
	both(t, func(t *testing.T, h *cgroup.Hierarchy) {
		g := h.Find(cgroup.Name{Job: 99, Attempt: 1, IsStep: true})
		if stuck, err := g.Destroy(t.Context()); err != nil || len(stuck) > 0 {
			t.Errorf("stuck %v, error %v", stuck, err)
		}
		if pids := procs(t, g); len(pids) > 0 {
			t.Errorf("processes %v", pids)
		}
	})
}
