package supervise_test

import (
	"context"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/muster-hpc/muster/node/run/cgroup"
	"github.com/muster-hpc/muster/node/run/private"
	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
)

// groups1 detects the machine's own groups, of version 1.
func groups1(t *testing.T) *cgroup.Hierarchy {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root, to make control groups")
	}
	h, missing := cgroup.Detect(cgroup.Detection{Node: groupNode(t)})
	if h == nil || h.Version() != cgroup.V1 || len(missing) > 0 {
		t.Skipf("no control groups of version 1 with all controllers: %v", missing)
	}
	return emptied(t, h)
}

// groups2 mounts a cgroup2, which needs no controllers for what is tested here.
func groups2(t *testing.T) *cgroup.Hierarchy {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root, to mount cgroup2")
	}
	mount, proc := t.TempDir(), t.TempDir()
	if err := unix.Mount("none", mount, "cgroup2", 0, ""); err != nil {
		t.Skipf("cgroup2 cannot be mounted: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(mount, 0); err != nil {
			t.Errorf("unmounting cgroup2: %v", err)
		}
	})
	if err := os.Mkdir(filepath.Join(proc, "self"), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{"mounts": "none " + mount + " cgroup2 rw 0 0\n", "cgroup": "0::/\n"} {
		if err := os.WriteFile(filepath.Join(proc, "self", name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	h, missing := cgroup.Detect(cgroup.Detection{Node: groupNode(t), Proc: proc})
	if h == nil {
		t.Fatalf("no groups in %s: %v", mount, missing)
	}
	return emptied(t, h)
}

func groupNode(t *testing.T) string {
	return fmt.Sprintf("test-%d-%s", os.Getpid(), strings.ReplaceAll(t.Name(), "/", "-"))
}

// emptied checks at the end of the test that steps left no group, and removes those of the jobs and the node.
func emptied(t *testing.T, h *cgroup.Hierarchy) *cgroup.Hierarchy {
	t.Cleanup(func() {
		names, err := h.Names()
		if err != nil {
			t.Error(err)
		}
		for _, n := range names {
			if n.IsStep {
				t.Errorf("the group of step %d.%d.%d is left", n.Job, n.Attempt, n.Step)
			}
		}
		if _, _, err := h.Clean(context.Background(), func(cgroup.Name) bool { return false }); err != nil {
			t.Errorf("cleaning: %v", err)
		}
		if err := h.RemoveNode(); err != nil {
			t.Error(err)
		}
	})
	return h
}

// confined puts a plan into groups.
func confined(h *cgroup.Hierarchy, plan *supervisorv1.StepPlan, l *supervisorv1.GroupLimits) *supervisorv1.StepPlan {
	plan.Node = "n1"
	plan.ControlGroups = &supervisorv1.ControlGroups{Version: uint32(h.Version()), JobId: 17, Attempt: 1, StepId: 0, Step: l}
	for controller, path := range h.Roots() {
		plan.ControlGroups.Roots = append(plan.ControlGroups.Roots, &supervisorv1.ControlRoot{Controller: controller, Path: path})
	}
	return plan
}

// both runs a test with groups of both versions.
func both(t *testing.T, f func(t *testing.T, h *cgroup.Hierarchy)) {
	t.Run("v1", func(t *testing.T) { f(t, groups1(t)) })
	t.Run("v2", func(t *testing.T) { f(t, groups2(t)) })
}

// burn takes some milliseconds of CPU time.
const burn = "cat /proc/self/cgroup; i=0; while [ $i -lt 30000 ]; do i=$((i+1)); done"

func TestTasksBeginInTheirGroups(t *testing.T) {
	both(t, func(t *testing.T, h *cgroup.Hierarchy) {
		s := launch(t, normal, confined(h, shell(burn, burn), nil))
		s.start()
		state := s.ended()
		for rank := range 2 {
			wantExit(t, state, rank, "0:0")
			out := s.file(fmt.Sprintf("out.%d", rank))
			for controller := range h.Roots() {
				want := "/muster/" + groupNode(t) + "/job_17.1/step_0"
				switch controller {
				case cgroup.Memory, cgroup.CPUAcct, cgroup.Unified:
					want += fmt.Sprintf("/task_%d", rank)
				}
				if controller == cgroup.Unified {
					controller = "" // the line "0::/…"
				}
				if !strings.Contains(out, ":"+controller+":"+want+"\n") {
					t.Errorf("rank %d is not in %s of %q: %s", rank, want, controller, out)
				}
			}
			if u := state.GetTasks()[rank].GetUsage(); u.GetUserNs()+u.GetSystemNs() == 0 {
				t.Errorf("usage of rank %d: %v", rank, u)
			}
		}
	})
}

func TestRankThatIsKilledForMemoryIsSaid(t *testing.T) {
	h := groups1(t)
	s := launch(t, normal, confined(h, shell("exec sleep 1000", "exec dd if=/dev/zero of=/dev/null bs=400M count=1"),
		&supervisorv1.GroupLimits{MemoryMb: 48}))
	s.start()
	state := s.await("the end of rank 1", func(x *supervisorv1.StepState) bool { return x.GetTasks()[1].GetEnded() })
	wantExit(t, state, 1, "0:9")
	const verdict = "ank 1 was killed for memory: its step used 48 of 48 MiB on n1; ask for more with --mem"
	if !state.GetTasks()[1].GetExit().GetOutOfMemory() || state.GetTasks()[0].GetEnded() || state.GetSentence() != "R"+verdict+"." ||
		state.GetTasks()[1].GetUsage().GetMemoryKills() != 1 {
		t.Errorf("state %v", state)
	}
	eventually(t, "it is said in the output", func() bool { return s.file("err.1") == "slurmstepd-n1: error: r"+verdict+"\n" })
	if _, err := s.Terminate(bound(t), 0, ""); err != nil {
		t.Fatal(err)
	}
	if state = s.ended(); state.GetTasks()[0].GetExit().GetOutOfMemory() {
		t.Errorf("state %v", state)
	}
}

func TestForkBombEndsWithItsStep(t *testing.T) {
	h := groups1(t)
	s := launch(t, normal, confined(h, shell("trap '' TERM; while :; do setsid sh -c 'while :; do sleep 9 & done' & done 2>/dev/null"),
		&supervisorv1.GroupLimits{Pids: 100}))
	s.start()
	step := h.Find(cgroup.Name{Job: 17, Attempt: 1, IsStep: true})
	eventually(t, "the bomb went off", func() bool { pids, err := step.Procs(); return err == nil && len(pids) > 60 })
	if _, err := s.Terminate(bound(t), 0, ""); err != nil {
		t.Fatal(err)
	}
	s.ended()
}

func TestDevicesOfOthersAreDenied(t *testing.T) {
	both(t, func(t *testing.T, h *cgroup.Hierarchy) {
		full, err := cgroup.DeviceOf("/dev/full")
		if err != nil {
			t.Fatal(err)
		}
		s := launch(t, normal, confined(h, shell("head -c1 /dev/zero | od -An -tx1; head -c1 /dev/full && echo opened"),
			&supervisorv1.GroupLimits{DeniedDevices: []string{full.String()}}))
		s.start()
		s.ended()
		if out := s.file("out.0"); out != " 00\n" {
			t.Errorf("output %q, errors %s", out, s.file("err.0"))
		}
	})
}

func TestMissingControllersAreTold(t *testing.T) {
	h := groups2(t)
	s := launch(t, normal, confined(h, shell("true"), &supervisorv1.GroupLimits{MemoryMb: 64, Pids: 100}))
	s.start()
	if state := s.ended(); len(state.GetLimitations()) != 2 {
		t.Errorf("limitations %q", state.GetLimitations())
	}
}

func TestGroupsThatCannotBeMadeFailThePreparation(t *testing.T) {
	plan := shell("true")
	plan.ControlGroups = &supervisorv1.ControlGroups{Version: 2, JobId: 17, Attempt: 1,
		Roots: []*supervisorv1.ControlRoot{{Controller: cgroup.Unified, Path: "/proc/no/such"}}}
	s := launch(t, normal, plan)
	if state := s.ended(); state.GetPhase() != supervisorv1.Phase_PHASE_FAILED || state.GetUsersFault() ||
		!strings.Contains(state.GetSentence(), "control group") {
		t.Errorf("state %v", state)
	}
}

func TestTasksHaveTheirLimitsAndNiceValue(t *testing.T) {
	plan := shell("ulimit -S -n; ulimit -S -c; ulimit -S -s; nice; exec grep -E '^(SigBlk|SigIgn):' /proc/self/status")
	nice := int32(7)
	plan.Nice = &nice
	plan.ResourceLimits = []*supervisorv1.ResourceLimit{
		{Resource: unix.RLIMIT_NOFILE, Soft: 123}, {Resource: unix.RLIMIT_CORE, Soft: 0}, {Resource: unix.RLIMIT_STACK, Soft: 4 << 20},
		{Resource: unix.RLIMIT_NPROC, Soft: math.MaxUint64}, // above the hard limit: cut
	}
	s := launch(t, normal, plan)
	s.start()
	wantExit(t, s.ended(), 0, "0:0")
	if got, want := s.file("out.0"), "123\n0\n4096\n7\nSigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n"; got != want {
		t.Errorf("output %q, want %q; errors %s", got, want, s.file("err.0"))
	}
}

func TestWithAStageTasksStillInheritNothing(t *testing.T) {
	plan := shell("for f in /proc/$$/fd/*; do [ -e $f ] && echo fd ${f##*/}; done; env | sort; umask; pwd; echo ids $$ $(cut -d' ' -f5,6 /proc/$$/stat)")
	plan.Tasks[0].Lines, plan.Umask, plan.WorkDir = []string{"through a stage"}, 0o027, t.TempDir()
	s := launch(t, normal, plan)
	s.start("ADDED=1")
	state := s.ended()
	wantExit(t, state, 0, "0:0")
	pid := state.GetTasks()[0].GetPid()
	want := fmt.Sprintf("fd 0\nfd 1\nfd 2\nADDED=1\nMUSTER_STEP_COOKIE=%s\nPATH=/usr/bin:/bin\nPWD=%s\nSLURMD_NODENAME=n1\nSLURM_TASK_PID=%[3]d\n0027\n%[2]s\nids %[3]d %[3]d %[3]d\n",
		plan.GetCookie(), plan.GetWorkDir(), pid)
	if got := s.file("out.0"); got != want {
		t.Errorf("output %s, want %s", got, want)
	}
}

func TestWhatAStageCannotExecuteIsTheTasksExit(t *testing.T) {
	script := filepath.Join(t.TempDir(), "script")
	if err := os.WriteFile(script, []byte("#!/no/such/interpreter\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	plan := shell("true", "exec sleep 1000")
	plan.Tasks[0].Lines, plan.Tasks[0].Args = []string{"through a stage"}, []string{script}
	s := launch(t, normal, plan)
	s.start()
	state := s.ended()
	wantExit(t, state, 0, "2:0")
	wantExit(t, state, 1, "0:15")
	message := "execve(): " + script + ": No such file or directory"
	if got := state.GetTasks()[0].GetExit().GetLaunchError(); got != message {
		t.Errorf("launch error %q", got)
	}
	if got := s.file("err.0"); got != "through a stage\nslurmstepd-n1: error: "+message+"\n" {
		t.Errorf("stderr %q", got)
	}
}

func TestStageBindsItsTaskToCPUs(t *testing.T) {
	plan := shell("grep Cpus_allowed_list /proc/self/status | cut -f2")
	plan.Tasks[0].CpuMask = []uint64{1}
	s := launch(t, normal, confined(groups1(t), plan, nil))
	s.start()
	if s.ended(); s.file("out.0") != "0\n" {
		t.Errorf("bound to %s", s.file("out.0"))
	}
}

func TestAsRootTasksOfAStageAreTheUser(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	plan := shell("id -u; id -g; id -G; echo again >/dev/stderr; kill -0 $PPID && echo reached")
	plan.Uid, plan.Gid, plan.Groups, plan.Tasks[0].Lines = 65533, 65532, []uint32{65532, 65531}, []string{"through a stage"}
	s := launch(t, normal, plan)
	s.start()
	s.ended()
	if got := s.file("out.0"); got != "65533\n65532\n65532 65531\n" {
		t.Errorf("output %q", got)
	}
	if got := s.file("err.0"); !strings.HasPrefix(got, "again\n") {
		t.Errorf("stderr %q", got)
	}
}

func TestStepsOfAJobHaveATmpOfTheirOwn(t *testing.T) {
	if err := private.Supported(); err != nil {
		t.Skip(err)
	}
	store := private.Store{Disk: filepath.Join(t.TempDir(), "private"), Memory: private.MemoryDir(groupNode(t))}
	t.Cleanup(func() {
		if err := os.RemoveAll(store.Memory); err != nil {
			t.Error(err)
		}
	})
	dirs, err := store.Make(17, 1)
	if err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	outside := t.TempDir() // below the node's /tmp
	plan := func(script string) *supervisorv1.StepPlan {
		p := shell(script, "exec sleep 1000")
		p.Uid, p.Gid, p.WorkDir = 65533, 65532, "/tmp/work"
		p.PrivateTmp, p.PrivateShm = dirs.Tmp, dirs.Shm
		return p
	}
	first := launch(t, normal, plan("mkdir /tmp/work; echo '#!/bin/sh\necho it ran in $(pwd)' >/tmp/work/program; chmod +x /tmp/work/program; echo >/dev/shm/mark; pwd"))
	first.start()
	state := first.await("the end of rank 0", func(x *supervisorv1.StepState) bool { return x.GetTasks()[0].GetEnded() })
	wantExit(t, state, 0, "0:0")
	if got := first.file("out.0"); got != "/tmp\n" { // it made its working directory itself
		t.Errorf("output %q, errors %s", got, first.file("err.0"))
	}
	p := plan("")
	p.Tasks[0].Args = []string{"./program"}
	p.Tasks[0].StdoutPath = filepath.Join(outside, "out") // files of the job outlive it: the node's
	if err := os.Chmod(filepath.Dir(outside), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(outside, 65533, 65532); err != nil {
		t.Fatal(err)
	}
	second := launch(t, normal, p)
	second.start()
	wantExit(t, second.await("the end of rank 0", func(x *supervisorv1.StepState) bool { return x.GetTasks()[0].GetEnded() }), 0, "0:0")
	if b, err := os.ReadFile(filepath.Join(outside, "out")); string(b) != "it ran in /tmp/work\n" {
		t.Errorf("output %q, %v", b, err)
	}
	// Killed, the supervisors leave no mount.
	for _, s := range []*step{first, second} {
		if err := unix.Kill(int(s.State().GetPid()), unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	for _, s := range []*step{first, second} {
		eventually(t, "its tasks are gone", func() bool { return unix.Kill(int(s.State().GetTasks()[1].GetPid()), 0) != nil })
	}
	if after, err := os.ReadFile("/proc/self/mountinfo"); err != nil || string(after) != string(before) {
		t.Errorf("mounts are\n%s\nand were\n%s", after, before)
	}
	if err := store.Remove(17, 1); err != nil {
		t.Error(err)
	}
}
