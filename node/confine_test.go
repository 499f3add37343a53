package node

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"

	"github.com/muster-hpc/muster/node/environ"
	"github.com/muster-hpc/muster/node/run"
	"github.com/muster-hpc/muster/node/run/cgroup"
	"github.com/muster-hpc/muster/node/run/private"
)

// kept gives an agent real control groups and private directories. At the end of the test nothing may be left there.
func kept(t *testing.T, dir string) func(*Config) {
	t.Helper()
	if err := private.Supported(); err != nil {
		t.Skip(err)
	}
	name := fmt.Sprintf("test-%d-%s", os.Getpid(), t.Name())
	h, missing := cgroup.Detect(cgroup.Detection{Node: name})
	if h == nil || len(missing) > 0 {
		t.Skipf("no control groups with all controllers: %v", missing)
	}
	store := &private.Store{Disk: filepath.Join(dir, "private"), Memory: private.MemoryDir(name)}
	t.Cleanup(func() {
		if names, err := h.Names(); len(names) > 0 || err != nil {
			t.Errorf("groups are left: %v, error %v", names, err)
		}
		if n, err := store.Clean(func(uint32, uint32) bool { return false }); n > 0 || err != nil {
			t.Errorf("private directories of %d jobs are left, error %v", n, err)
		}
		if _, _, err := h.Clean(context.Background(), func(cgroup.Name) bool { return false }); err != nil {
			t.Error(err)
		}
		if err := h.RemoveNode(); err != nil {
			t.Error(err)
		}
		if err := os.RemoveAll(store.Memory); err != nil {
			t.Error(err)
		}
	})
	return func(c *Config) { c.Groups, c.Private = h, store }
}

// visible is a directory that tasks with a /tmp of their own can see, too.
func visible(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "muster-node")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestJobThatExceedsItsMemoryIsReportedAndLeavesNothing(t *testing.T) {
	f, work := newFake(t), visible(t)
	dir := filepath.Join(work, "agent")
	f.begin(dir, kept(t, dir))
	f.batch(6, work, "#!/bin/sh\nulimit -S -n >limit; nice >nice; echo >/tmp/here; ls /tmp >tmp\n"+
		"dd if=/dev/zero of=/dev/null bs=400M count=1\nexit 3\n", func(d *nodev1.DesiredAttempt) {
		d.MemoryMb = 48
		d.Job.Spec.TaskOptions = &apiv1.TaskOptions{Nice: 4, Rlimits: []*apiv1.ResourceLimit{{Name: "NOFILE", Soft: 77}}}
	})
	f.eventually("prepared", func() bool { return f.state(6, environ.BatchStep) == prepared })
	f.want(6, running)
	f.finish(6)
	f.mu.Lock()
	defer f.mu.Unlock()
	end := f.ended(6, environ.BatchStep)
	if exit := end.GetExits()[0]; !exit.GetOutOfMemory() || exit.GetCode() != 3 {
		t.Errorf("exit %v", exit)
	}
	if want := "Rank 0 was killed for memory: its step used 48 of 48 MiB on n1; ask for more with --mem."; end.GetSentence() != want {
		t.Errorf("sentence %q, want %q", end.GetSentence(), want)
	}
	own, err := unix.Getpriority(unix.PRIO_PROCESS, 0)
	if err != nil {
		t.Fatal(err)
	}
	nice := strconv.Itoa(min(20-own+4, 19)) + "\n" // of the agent, and 4 more
	for file, want := range map[string]string{"limit": "77\n", "nice": nice, "tmp": "here\n"} {
		if got := read(t, filepath.Join(work, file)); got != want {
			t.Errorf("%s: %q, want %q", file, got, want)
		}
	}
}

func TestNothingIsLeftOfAStepThatLostAgentAndSupervisor(t *testing.T) {
	f, work := newFake(t), visible(t)
	dir := filepath.Join(work, "agent")
	change := kept(t, dir)
	l := f.begin(dir, change)
	f.batch(7, work, "#!/bin/sh\nenv -i setsid sh -c 'echo $$ >pid; exec sleep 1000' >/dev/null 2>&1 </dev/null &\nexec sleep 1000\n", nil)
	f.eventually("prepared", func() bool { return f.state(7, environ.BatchStep) == prepared })
	f.want(7, running)
	pid := 0
	waitFor(t, func() bool {
		b, err := os.ReadFile(filepath.Join(work, "pid"))
		if err != nil {
			return false
		}
		pid, err = strconv.Atoi(strings.TrimSpace(string(b)))
		return err == nil
	})
	if err := l.end(); err != nil {
		t.Fatal(err)
	}
	stepDir := filepath.Join(dir, "steps", fmt.Sprintf("7.1.%d", uint32(environ.BatchStep)))
	h, err := run.Attach(t.Context(), stepDir)
	if err != nil {
		t.Fatal(err)
	}
	state := <-h.Events()
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(int(state.GetPid()), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	waitFor(t, func() bool { alive, err := run.Alive(stepDir); return err == nil && !alive })
	if _, ok := cgroup.Look(pid); !ok {
		t.Fatal("the daemon went by itself: the test shows nothing")
	}
	f.begin(dir, change)
	f.finish(7)
	if p, ok := cgroup.Look(pid); ok && p.State != "Z" {
		t.Errorf("%v is left", p)
	}
}

func TestNewAgentRemovesWhatNobodyUses(t *testing.T) {
	f, work := newFake(t), visible(t)
	dir := filepath.Join(work, "agent")
	change := kept(t, dir)
	var cfg Config
	change(&cfg)
	if _, err := cfg.Groups.Step(98, 1, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := cfg.Private.Make(98, 1); err != nil {
		t.Fatal(err)
	}
	f.begin(dir, change)
	waitFor(t, func() bool {
		names, err := cfg.Groups.Names()
		return err == nil && len(names) == 0
	})
}

func TestOnlyAcceleratorsOfOthersAreDenied(t *testing.T) {
	gpus := []*apiv1.Gpu{
		{Index: 0, DeviceFiles: []string{"/dev/null", "/dev/tty"}}, {Index: 1, DeviceFiles: []string{"/dev/zero", "/dev/tty"}},
		{Index: 2, DeviceFiles: []string{"/dev/full", "/dev/tty"}}, {Index: 64, DeviceFiles: []string{"/dev/random"}},
	}
	denied, err := deniedDevices(gpus, []uint64{0b010, 1})
	if want := "[c 1:3 c 1:7]"; err != nil || fmt.Sprint(denied) != want {
		t.Errorf("denied %v, error %v, want %s", denied, err, want)
	}
	if _, err := deniedDevices([]*apiv1.Gpu{{DeviceFiles: []string{"/no/such/device"}}}, nil); err == nil {
		t.Error("a device file that does not exist was passed over")
	}
}
