package cgroup_test

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/muster-hpc/muster/node/run/cgroup"
)

// nodeName is one that no other test and no agent uses.
func nodeName(t *testing.T) string {
	return fmt.Sprintf("test-%d-%s", os.Getpid(), strings.ReplaceAll(t.Name(), "/", "-"))
}

// real1 makes groups of version 1 on this machine, which must be gone at the end of the test.
func real1(t *testing.T) *cgroup.Hierarchy {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root, to make control groups of version 1")
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Contains(mounts, []byte(" cgroup ")) {
		t.Skip("no hierarchy of version 1 is mounted")
	}
	h, missing := cgroup.Detect(cgroup.Detection{Node: nodeName(t)})
	if h == nil || h.Version() != cgroup.V1 {
		t.Skipf("the controllers of version 1 cannot be used: %v", missing)
	}
	if len(missing) > 0 {
		t.Skipf("not all controllers are there: %v", missing)
	}
	leaveNothing(t, h)
	return h
}

// real2 makes groups in a cgroup2 that it mounts.
func real2(t *testing.T) *cgroup.Hierarchy {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root, to mount cgroup2")
	}
	mount := t.TempDir()
	if err := unix.Mount("none", mount, "cgroup2", 0, ""); err != nil {
		t.Skipf("cgroup2 cannot be mounted: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(mount, 0); err != nil {
			t.Errorf("unmounting cgroup2: %v", err)
		}
	})
	h, missing := cgroup.Detect(cgroup.Detection{Node: nodeName(t), Proc: fakeProc(t, "none "+mount+" cgroup2 rw 0 0\n", "0::/\n")})
	if h == nil || h.Version() != cgroup.V2 {
		t.Fatalf("no groups in %s: %v", mount, missing)
	}
	leaveNothing(t, h)
	return h
}

// fakeProc is a directory that looks like /proc as far as the package reads it.
func fakeProc(t *testing.T, mounts, own string) string {
	t.Helper()
	proc := t.TempDir()
	put(t, filepath.Join(proc, "self/mounts"), mounts)
	put(t, filepath.Join(proc, "self/cgroup"), own)
	return proc
}

func put(t *testing.T, path, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

// leaveNothing checks at the end of the test that every group was removed, and removes the node's.
func leaveNothing(t *testing.T, h *cgroup.Hierarchy) {
	t.Cleanup(func() {
		if names, err := h.Names(); len(names) > 0 || err != nil {
			t.Errorf("groups are left: %v, %v", names, err)
		}
		if _, _, err := h.Clean(context.Background(), func(cgroup.Name) bool { return false }); err != nil {
			t.Errorf("cleaning: %v", err)
		}
		if err := h.RemoveNode(); err != nil {
			t.Errorf("removing the node's groups: %v", err)
		}
		for _, root := range h.Roots() {
			if _, err := os.Stat(root); err == nil {
				t.Errorf("%s is left", root)
			}
		}
	})
}

// both runs a test in the real groups of both versions.
func both(t *testing.T, f func(t *testing.T, h *cgroup.Hierarchy)) {
	t.Run("v1", func(t *testing.T) { f(t, real1(t)) })
	t.Run("v2", func(t *testing.T) { f(t, real2(t)) })
}

func step(t *testing.T, h *cgroup.Hierarchy) *cgroup.Group {
	t.Helper()
	g, err := h.Step(7, 1, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, n := range []cgroup.Name{{Job: 7, Attempt: 1, IsStep: true}, {Job: 7, Attempt: 1}} {
			if _, err := h.Find(n).Destroy(context.Background()); err != nil {
				t.Errorf("removing %v: %v", n, err)
			}
		}
	})
	return g
}

func task(t *testing.T, g *cgroup.Group, rank uint32) *cgroup.Group {
	t.Helper()
	g, err := g.Task(rank)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func apply(t *testing.T, g *cgroup.Group, l cgroup.Limits) {
	t.Helper()
	if missing, err := g.Apply(l); err != nil || len(missing) > 0 {
		t.Fatalf("applying limits: %v, missing %q", err, missing)
	}
}

// sh runs a script that enters the group before anything else.
func sh(t *testing.T, g *cgroup.Group, script string) *exec.Cmd {
	t.Helper()
	var enter strings.Builder
	for _, file := range g.Files() {
		fmt.Fprintf(&enter, "echo 0 >%s || exit 99\n", file)
	}
	cmd := exec.Command("sh", "-c", enter.String()+script)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.WaitDelay = 10 * time.Second
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd
}

func output(cmd *exec.Cmd) string { return cmd.Stdout.(*bytes.Buffer).String() }

// code waits for a script and returns its exit code, -1 after a signal.
func code(t *testing.T, cmd *exec.Cmd) int {
	t.Helper()
	if err := cmd.Wait(); cmd.ProcessState == nil {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode()
}

func eventually(t *testing.T, what string, good func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !good(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("it never came true: %s", what)
		}
	}
}

func procs(t *testing.T, g *cgroup.Group) []int {
	t.Helper()
	pids, err := g.Procs()
	if err != nil {
		t.Fatal(err)
	}
	return pids
}

func wantFile(t *testing.T, dir, file, want string) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, file))
	if err != nil || strings.TrimSpace(string(b)) != want {
		t.Errorf("%s in %s is %q, error %v; want %q", file, dir, b, err, want)
	}
}

// at is the directory of the test's step for a controller.
func at(h *cgroup.Hierarchy, controller string, more ...string) string {
	return filepath.Join(append([]string{h.Roots()[controller], "job_7.1", "step_0"}, more...)...)
}

func sorted(m map[string]string) []string { return slices.Sorted(maps.Keys(m)) }

func mb(n uint64) string { return strconv.FormatUint(n<<20, 10) }

// setDelegated marks a directory as systemd does.
func setDelegated(dir string) error {
	if err := unix.Setxattr(dir, "user.delegate", []byte("1"), 0); err == nil {
		return nil
	}
	return unix.Setxattr(dir, "trusted.delegate", []byte("1"), 0)
}
