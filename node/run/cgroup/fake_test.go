package cgroup_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/muster-hpc/muster/node/run/cgroup"
)

// files2 are those of a group of version 2 with all controllers, as far as they are read or written.
var files2 = map[string]string{
	"cgroup.controllers": "cpuset cpu io memory hugetlb pids", "cgroup.subtree_control": "", "cgroup.procs": "",
	"cpuset.cpus": "", "cpuset.cpus.effective": "0-127", "cpu.weight": "100", "pids.max": "max",
	"memory.max": "max", "memory.swap.max": "max", "memory.oom.group": "0", "memory.current": "1048576", "memory.peak": "2097152",
	"memory.events": "low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 1\n",
	"cpu.stat":      "usage_usec 30\nuser_usec 20\nsystem_usec 10\n",
}

// fake2 is a plain directory that looks like a mounted cgroup2: it shows which files get which values, in all groups of
// one step and one task.
func fake2(t *testing.T, without ...string) (*cgroup.Hierarchy, []string, string) {
	t.Helper()
	mount := t.TempDir()
	dir := mount
	for _, part := range []string{"", "muster", "n1", "job_7.1", "step_0", "task_3"} {
		dir = filepath.Join(dir, part)
		for name, content := range files2 {
			if !slices.ContainsFunc(without, func(prefix string) bool { return strings.HasPrefix(name, prefix) }) {
				put(t, filepath.Join(dir, name), content)
			}
		}
	}
	proc := fakeProc(t, "tmpfs / tmpfs rw 0 0\ncgroup2 "+mount+" cgroup2 rw,nosuid 0 0\n", "0::/\n")
	h, missing := cgroup.Detect(cgroup.Detection{Node: "n1", Proc: proc})
	if h == nil {
		t.Fatalf("nothing was detected: %v", missing)
	}
	return h, missing, mount
}

func TestControllersOfVersion2GetTheirValues(t *testing.T) {
	h, _, mount := fake2(t)
	g, err := h.Step(7, 1, 0)
	if err != nil {
		t.Fatal(err)
	}
	apply(t, g, cgroup.Limits{CPUs: []uint64{0b1011, 1}, CPUShares: 4096, MemoryMB: 8192, PIDs: 5000})
	last := task(t, g, 3)
	dir := filepath.Join(mount, "muster/n1/job_7.1/step_0")
	wantFile(t, dir, "cpuset.cpus", "0-1,3,64")
	wantFile(t, dir, "cpu.weight", "157")
	wantFile(t, dir, "memory.max", mb(8192))
	wantFile(t, dir, "memory.swap.max", "0")
	wantFile(t, dir, "pids.max", "5000")
	wantFile(t, dir, "memory.oom.group", "0")
	wantFile(t, filepath.Join(dir, "task_3"), "memory.oom.group", "1")
	wantFile(t, filepath.Join(dir, "task_3"), "memory.max", "max")
	for above := dir; above != filepath.Dir(mount); above = filepath.Dir(above) {
		// A plain file keeps the last of the writes; the kernel gathers them.
		wantFile(t, above, "cgroup.subtree_control", "+pids")
	}
	wantFile(t, filepath.Join(dir, "task_3"), "cgroup.subtree_control", "")
	if o := last.OOM(); o != (cgroup.OOM{Kills: 2, PeakBytes: 2 << 20}) {
		t.Errorf("OOM %+v", o)
	}
	if o := g.OOM(); o.LimitBytes != 8192<<20 {
		t.Errorf("OOM of the step %+v", o)
	}
	if u := last.Usage(); u != (cgroup.Usage{UserNS: 20000, SystemNS: 10000, MemoryBytes: 1 << 20, PeakBytes: 2 << 20}) {
		t.Errorf("usage %+v", u)
	}
	if got, want := last.Files(), []string{filepath.Join(dir, "task_3/cgroup.procs")}; !slices.Equal(got, want) {
		t.Errorf("files %v, want %v", got, want)
	}
}

func TestMissingControllersAreSaid(t *testing.T) {
	put := files2["cgroup.controllers"]
	t.Cleanup(func() { files2["cgroup.controllers"] = put })
	files2["cgroup.controllers"] = "cpu pids"
	h, missing, _ := fake2(t, "memory.", "cpuset.")
	for _, want := range []string{"no cgroup controller memory", "no cgroup controller cpuset"} {
		if !slices.ContainsFunc(missing, func(s string) bool { return strings.HasPrefix(s, want) }) {
			t.Errorf("no %q in %q", want, missing)
		}
	}
	g, err := h.Step(7, 1, 0)
	if err != nil {
		t.Fatal(err)
	}
	missing, err = g.Apply(cgroup.Limits{CPUs: []uint64{1}, MemoryMB: 1, PIDs: 500, CPUShares: 1024})
	if err != nil || len(missing) != 2 {
		t.Errorf("missing %q, error %v", missing, err)
	}
	wantFile(t, h.Roots()[cgroup.Unified]+"/job_7.1/step_0", "pids.max", "500")
}

func TestWithoutGroupsThereIsOneSentence(t *testing.T) {
	for name, mounts := range map[string]string{"none": "tmpfs / tmpfs rw 0 0\n", "gone": "cgroup2 /no/such/mount cgroup2 rw 0 0\n"} {
		h, missing := cgroup.Detect(cgroup.Detection{Node: "n1", Proc: fakeProc(t, mounts, "0::/\n")})
		if h != nil || len(missing) != 1 || !strings.HasPrefix(missing[0], "no cgroup: process groups and rlimits only") {
			t.Errorf("%s: %v, %q", name, h, missing)
		}
	}
	if h, missing := cgroup.Detect(cgroup.Detection{Node: "../x"}); h != nil || len(missing) != 1 {
		t.Errorf("a name with a slash: %v, %q", h, missing)
	}
}

func TestVersion2IsChosenWhereItHasTheControllers(t *testing.T) {
	mount1, mount2 := t.TempDir(), t.TempDir()
	put(t, filepath.Join(mount2, "cgroup.controllers"), "hugetlb")
	proc := fakeProc(t, "c "+mount1+" cgroup rw,pids 0 0\nc "+mount2+" cgroup2 rw 0 0\n", "0::/\n1:pids:/\n")
	h, _ := cgroup.Detect(cgroup.Detection{Node: "n1", Proc: proc})
	if h == nil || h.Version() != cgroup.V1 {
		t.Errorf("both mounted, version 2 without controllers: %+v", h)
	}
	put(t, filepath.Join(mount2, "cgroup.controllers"), "memory pids cpu cpuset")
	put(t, filepath.Join(mount2, "cgroup.subtree_control"), "")
	put(t, filepath.Join(mount2, "muster/n1/cgroup.procs"), "")
	if h, _ = cgroup.Detect(cgroup.Detection{Node: "n1", Proc: proc}); h == nil || h.Version() != cgroup.V2 {
		t.Errorf("both mounted, version 2 with controllers: %+v", h)
	}
}

func TestAgentLeavesItsDelegatedGroup(t *testing.T) {
	if os.Getuid() == 0 {
		// Root needs systemd's mark, which a test directory can only have in the user's name space.
		t.Log("as root the group is told by its mark")
	}
	mount := t.TempDir()
	own := filepath.Join(mount, "system.slice/muster-agent.service")
	for _, dir := range []string{own, own + "/agent", own + "/muster", own + "/muster/n1"} {
		for _, name := range []string{"cgroup.procs", "cgroup.subtree_control"} {
			put(t, filepath.Join(dir, name), "")
		}
		put(t, filepath.Join(dir, "cgroup.controllers"), "memory pids")
	}
	put(t, filepath.Join(mount, "cgroup.controllers"), "memory pids")
	if err := setDelegated(own); err != nil {
		t.Skipf("the file system of %s keeps no marks: %v", own, err)
	}
	// A plain file does not empty itself when its process moves: the agent says that it does not get out.
	put(t, filepath.Join(own, "cgroup.procs"), "4711\n")
	detection := cgroup.Detection{Node: "n1", Proc: fakeProc(t, "c "+mount+" cgroup2 rw 0 0\n", "0::/system.slice/muster-agent.service\n")}
	h, missing := cgroup.Detect(detection)
	if h != nil || len(missing) != 1 || !strings.Contains(missing[0], "new ones appear all the time") {
		t.Errorf("%v, %q", h, missing)
	}
	wantFile(t, own+"/agent", "cgroup.procs", "4711")
	put(t, filepath.Join(own, "cgroup.procs"), "")
	if h, missing = cgroup.Detect(detection); h == nil || h.Roots()[cgroup.Unified] != own+"/muster/n1" {
		t.Errorf("%v, %q", h, missing)
	}
	// Started again it is in the child already.
	detection.Proc = fakeProc(t, "c "+mount+" cgroup2 rw 0 0\n", "0::/system.slice/muster-agent.service/agent\n")
	if h, missing = cgroup.Detect(detection); h == nil || h.Roots()[cgroup.Unified] != own+"/muster/n1" {
		t.Errorf("again: %v, %q", h, missing)
	}
}

func TestRootsTravelToAnotherProcess(t *testing.T) {
	h := real1(t)
	again, err := cgroup.New(h.Version(), h.Roots())
	if err != nil {
		t.Fatal(err)
	}
	g := step(t, h)
	if got, want := fmt.Sprint(again.Find(cgroup.Name{Job: 7, Attempt: 1, IsStep: true}).Files()), fmt.Sprint(g.Files()); got != want {
		t.Errorf("files %s, want %s", got, want)
	}
	for _, bad := range []struct {
		version cgroup.Version
		roots   map[string]string
	}{{0, nil}, {1, nil}, {2, map[string]string{"cpu": "/x"}}, {1, map[string]string{"blkio": "/x"}}, {3, map[string]string{"unified": "/x"}}} {
		if _, err := cgroup.New(bad.version, bad.roots); err == nil {
			t.Errorf("version %d with %v was accepted", bad.version, sorted(bad.roots))
		}
	}
}
