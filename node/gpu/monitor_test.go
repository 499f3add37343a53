package gpu

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
)

func TestBeforeTheFirstReadingNothingIsKnownAndNothingFailed(t *testing.T) {
	b := newBench(t, "follow", nil)
	found := b.m.Health()
	if len(found) != 1 || found[0].Verdict != Unknown || found[0].EndsWork {
		t.Errorf("findings before the first reading: %+v", found)
	}
	if inv, _ := b.m.Inventory(); inv != nil {
		t.Errorf("an inventory before the first reading: %v", inv)
	}
}

func TestWhatTheProbeSaysIsKnown(t *testing.T) {
	b := newBench(t, "follow", nil)
	b.run()
	b.say("watch", inventoryEvent(machineOf(8)), healthEvent(wellness(8)))
	b.await("all well", func(f []Finding) bool { return len(f) == 0 })
	inv, age := b.m.Inventory()
	if len(ByNumber(inv)) != 8 || age > time.Minute {
		t.Errorf("inventory of age %v: %v", age, inv)
	}
	b.say("watch", xidEvent("GPU-3", 79))
	f := find(b.await("XID 79", has("GPU_XID_79")), "GPU_XID_79")
	if f.Verdict != Failed || !f.EndsWork || len(f.Devices) != 1 || f.Devices[0] != 3 || f.Since.IsZero() {
		t.Errorf("XID 79 of GPU 3 is %+v", f)
	}
}

func TestAHangingProbeMeansUnknownAndKeepsWhatWasKnown(t *testing.T) {
	b := newBench(t, "follow", func(c *Config) { c.Timeout, c.Interval = 300*time.Millisecond, 10*time.Millisecond })
	b.run()
	well := wellness(8)
	well.Gpus[2].RemapFailed = proto.Bool(true)
	b.say("watch", inventoryEvent(machineOf(8)), healthEvent(well))
	b.await("a reading", has(CodeRemapFailed))
	// From now on the probe is silent: it is killed, and so is every further one.
	if err := os.WriteFile(filepath.Join(b.dir, "way"), []byte("hang"), 0o600); err != nil {
		t.Fatal(err)
	}
	found := b.await("silence noticed", has(CodeProbeTimeout))
	f := find(found, CodeProbeTimeout)
	if f.Verdict != Unknown || f.Severity == SeverityFailed || f.EndsWork {
		t.Errorf("silence is %+v", f)
	}
	if find(found, CodeRemapFailed) == nil {
		t.Errorf("silence made a known fault forgotten: %+v", found)
	}
	for _, g := range found {
		if g.Code != CodeRemapFailed && g.Verdict == Failed {
			t.Errorf("silence means a failure: %+v", g)
		}
	}
	if inv, age := b.m.Inventory(); len(ByNumber(inv)) != 8 || age <= 0 {
		t.Errorf("silence made the inventory forgotten: %v, age %v", inv, age)
	}
}

func TestAKilledProbeIsGoneWhenRunReturns(t *testing.T) {
	for _, way := range []string{"hang", "follow"} {
		b := newBench(t, way, nil)
		stop := b.run()
		waitFor(t, "the probe runs", func() bool { return len(b.starts("watch")) > 0 })
		pid := b.starts("watch")[0]
		stop()
		if err := syscall.Kill(pid, 0); !errors.Is(err, syscall.ESRCH) {
			t.Errorf("%s: probe %d is still there: %v", way, pid, err)
		}
	}
}

func TestADeadProbeMeansUnknownAndSaysHowItDied(t *testing.T) {
	for way, want := range map[string]string{"die": "left with 3: the library ended us", "garbage": "can't be understood"} {
		b := newBench(t, way, nil)
		b.run()
		f := find(b.await(way, func(f []Finding) bool {
			return len(f) == 1 && strings.Contains(f[0].Reason, want)
		}), CodeProbeUnknown)
		if f == nil || f.Verdict != Unknown || f.EndsWork {
			t.Errorf("%s: %+v", way, f)
		}
	}
}

func TestAMissingProbeMeansUnknown(t *testing.T) {
	b := newBench(t, "follow", func(c *Config) { c.Program = "/nonexistent/muster-gpu" })
	b.run()
	b.await("no probe", func(f []Finding) bool {
		return len(f) == 1 && f[0].Verdict == Unknown && strings.Contains(f[0].Reason, "/nonexistent/muster-gpu")
	})
}

// TestProbesThatCannotBeKilledAreLeftAndNotMultiplied takes away the power to kill, as the kernel does with a process in
// uninterruptible sleep.
func TestProbesThatCannotBeKilledAreLeftAndNotMultiplied(t *testing.T) {
	b := newBench(t, "hang", func(c *Config) { c.Timeout = 50 * time.Millisecond })
	b.m.children.kill = func(int) error { return nil }
	b.run()
	b.await("two stuck probes", has(CodeProbeStuck))
	pids := b.starts("watch")
	if len(pids) != maxStuck {
		t.Errorf("%d probes were started; want %d", len(pids), maxStuck)
	}
	if _, err := b.m.Processes(context.Background()); !errors.Is(err, errStuck) {
		t.Errorf("a further probe is started: %v", err)
	}
	if f := find(b.m.Health(), CodeProbeStuck); f.Verdict != Unknown || f.EndsWork {
		t.Errorf("stuck probes are %+v", f)
	}
	// When the kernel lets them go they are collected, and probes are started again.
	b.m.children.mu.Lock()
	b.m.children.kill = func(group int) error { return syscall.Kill(-group, syscall.SIGKILL) }
	b.m.children.mu.Unlock()
	for _, pid := range pids {
		if err := syscall.Kill(-pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	waitFor(t, "a new probe", func() bool { return len(b.starts("watch")) > maxStuck })
}

// TestAFrozenProbeIsLeftBehind uses a real process that SIGKILL does not end: one in a frozen control group (version 1).
func TestAFrozenProbeIsLeftBehind(t *testing.T) {
	group, err := os.MkdirTemp("/sys/fs/cgroup/freezer", "muster-gpu-test-")
	if err != nil {
		t.Skipf("needs a writable cgroup v1 freezer: %v", err)
	}
	b := newBench(t, "hang", nil)
	p, err := b.m.children.start("watch", "--", "hang", b.dir)
	if err != nil {
		t.Fatal(err)
	}
	write := func(file, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(group, file), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		write("freezer.state", "THAWED")
		waitFor(t, "the thawed probe is collected", func() bool {
			b.m.children.mu.Lock()
			defer b.m.children.mu.Unlock()
			b.m.children.reap()
			return len(b.m.children.stuck) == 0
		})
		if err := os.Remove(group); err != nil {
			t.Error(err)
		}
	})
	waitFor(t, "the probe runs", func() bool { return len(b.starts("watch")) > 0 })
	write("cgroup.procs", strconv.Itoa(p.pid))
	write("freezer.state", "FROZEN")
	waitFor(t, "the probe is frozen", func() bool {
		state, err := os.ReadFile(filepath.Join(group, "freezer.state"))
		return err == nil && strings.TrimSpace(string(state)) == "FROZEN"
	})
	began := time.Now()
	if how := p.end(0); !strings.Contains(how, "can't be killed") || time.Since(began) > 10*killWait {
		t.Errorf("a frozen probe ended after %v: %s", time.Since(began), how)
	}
}

func TestNumbersAndErrorsSurviveTheAgentAndErrorsNotTheBoot(t *testing.T) {
	memory := filepath.Join(t.TempDir(), "gpus")
	first := newBench(t, "follow", func(c *Config) { c.Memory = memory })
	stop := first.run()
	first.say("watch", inventoryEvent(machineOf(4)), healthEvent(wellness(4)), xidEvent("GPU-1", 119), xidEvent("GPU-1", 119))
	waitFor(t, "two errors", func() bool {
		x := find(first.m.Health(), "GPU_XID_119")
		return x != nil && strings.Contains(x.Reason, "2 times")
	})
	stop()

	// GPU 0 vanished meanwhile: the others move up in NVML's order.
	fewer := machineOf(4)
	fewer.Devices = fewer.Devices[1:]
	for i, d := range fewer.Devices {
		d.Index = uint32(i)
	}
	fewer.Pairs, fewer.PciGpus = nil, proto.Uint32(3)
	second := newBench(t, "follow", func(c *Config) { c.Memory = memory })
	if inv, age := second.m.Inventory(); len(ByNumber(inv)) != 4 || age > time.Minute {
		t.Errorf("remembered inventory of age %v: %v", age, inv)
	}
	if find(second.m.Health(), "GPU_XID_119") == nil {
		t.Errorf("a restart of the agent forgets an error that only a reset clears")
	}
	stop = second.run()
	second.say("watch", inventoryEvent(fewer), healthEvent(&nodev1.GpuHealth{Gpus: wellness(4).Gpus[1:]}))
	found := second.await("a missing GPU", has(CodeMissing))
	if f := find(found, CodeMissing); f.Devices[0] != 0 || !f.EndsWork {
		t.Errorf("the missing GPU is %+v", f)
	}
	inv, _ := second.m.Inventory()
	for n, d := range ByNumber(inv) {
		if want := "GPU-" + string(rune('0'+n)); d.Uuid != want {
			t.Errorf("device %d is %s, want %s", n, d.Uuid, want)
		}
	}
	second.m.Forget("GPU-0")
	second.m.Forget("GPU-1")
	if found := second.m.Health(); find(found, CodeMissing) != nil || find(found, "GPU_XID_119") != nil {
		t.Errorf("forgotten, and still found: %+v", found)
	}
	second.say("watch", xidEvent("GPU-2", 95))
	second.await("another error", has("GPU_XID_95"))
	stop()

	third := newBench(t, "follow", func(c *Config) { c.Memory, c.BootID = memory, "boot2" })
	if find(third.m.Health(), "GPU_XID_95") != nil {
		t.Error("an error survives a boot")
	}
	if inv, _ := third.m.Inventory(); len(ByNumber(inv)) != 3 {
		t.Errorf("numbers do not survive a boot: %v", inv)
	}
}

func TestADamagedMemoryIsBegunAnew(t *testing.T) {
	memory := filepath.Join(t.TempDir(), "gpus")
	if err := os.WriteFile(memory, []byte(`{"bootId": "boo`), 0o600); err != nil {
		t.Fatal(err)
	}
	b := newBench(t, "follow", func(c *Config) { c.Memory = memory })
	b.run()
	b.say("watch", inventoryEvent(machineOf(2)), healthEvent(wellness(2)))
	b.await("all well", func(f []Finding) bool { return len(f) == 0 })
}

func TestProcessesAreAskedWithALimit(t *testing.T) {
	b := newBench(t, "follow", nil)
	b.say("processes", &nodev1.GpuProcesses{Processes: []*nodev1.GpuProcess{{Uuid: "GPU-0", Pid: 7}}})
	if all, err := b.m.Processes(t.Context()); err != nil || len(all) != 1 || all[0].Pid != 7 {
		t.Errorf("processes: %v, %v", all, err)
	}
	unread := newBench(t, "follow", nil)
	unread.say("processes", &nodev1.GpuProcesses{Unread: []uint32{3}})
	if _, err := unread.m.Processes(t.Context()); err == nil || !strings.Contains(err.Error(), "[3]") {
		t.Errorf("a GPU that could not be read: %v", err)
	}
	hang := newBench(t, "hang", func(c *Config) { c.Timeout = 50 * time.Millisecond })
	if _, err := hang.m.Processes(t.Context()); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a hanging probe: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := newBench(t, "hang", nil).m.Processes(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("a caller who left: %v", err)
	}
}

func TestNoGoroutineOrDescriptorIsLeftBehind(t *testing.T) {
	count := func() (int, int) {
		fds, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Skip("no /proc")
		}
		return runtime.NumGoroutine(), len(fds)
	}
	b := newBench(t, "die", nil)
	_, _ = b.m.Processes(t.Context())
	goroutines, fds := count()
	for range 20 {
		_, _ = b.m.Processes(t.Context())
	}
	waitFor(t, "goroutines and descriptors as before", func() bool {
		g, f := count()
		return g <= goroutines && f <= fds
	})
}

// waitFor looks until something is the case: for what no channel tells.
func waitFor(t *testing.T, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !is(); {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within 30 s", what)
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-t.Context().Done():
		}
	}
}
