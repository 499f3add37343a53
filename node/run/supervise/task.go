package supervise

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"syscall"
	"unsafe"

	"github.com/muster-hpc/muster/node/run"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
	"golang.org/x/sys/unix"
)

// task is one task of the plan and what became of it.
type task struct {
	plan *supervisorv1.TaskPlan
	// pid is its first process, leader of a session and group of its own; 0 before exec.
	pid int
	// reaped: pid means nothing any more.
	reaped bool
	// exit is set when it ended.
	exit *apiv1.TaskExit
	// untold is why it does not find its process id in its environment; nil if it does, or was not to.
	untold error
	// usage is what it used, once it ended.
	usage *supervisorv1.TaskUsage
	// env is its environment; prints are for its standard output before it is executed.
	env    []string
	prints []string
	// prologs and epilogs are the programs before and after it that were not started yet; aside is the one that runs.
	prologs, epilogs []string
	aside            *program
}

func (t *task) end(exit *apiv1.TaskExit) {
	exit.FirstRank, exit.Count = t.plan.GetRank(), 1
	t.exit = exit
}

// bad reports whether it ended with an error.
func (t *task) bad() bool { return t.exit != nil && (t.exit.Code != 0 || t.exit.Signal != 0) }

func (t *task) state() *supervisorv1.TaskState {
	return &supervisorv1.TaskState{Rank: t.plan.GetRank(), Pid: uint32(t.pid), Ended: t.exit != nil, Exit: t.exit, Usage: t.usage}
}

// execution is what is executed with what.
type execution struct {
	program               string
	args, env             []string
	stdin, stdout, stderr int
	// terminal: the standard input is the terminal of its session. manager is its connection to the process manager; 0 if it has none.
	terminal bool
	manager  int
	// prints and lines are written to its standard output and error before it is executed.
	prints, lines []string
	cpus          []uint64
	// told: it finds its process id in SLURM_TASK_PID.
	told bool
}

// launch starts a task's first process from the loop's thread, whose death kills it. An error is the user's, as a shell would see it,
// and becomes the task's exit. With a stage it is not certain yet whether the task is executed.
func (s *supervisor) launch(i int) *staged {
	t, ready := s.tasks[i], s.ready.tasks[i]
	if ready.lookup != 0 {
		t.end(launchFailure("execve", t.plan, ready.lookup))
		return nil
	}
	e := execution{
		program: ready.program, args: t.plan.GetArgs(), env: t.env, stdin: ready.stdin, stdout: ready.stdout, stderr: ready.stderr,
		terminal: ready.terminal != nil, manager: ready.manager, prints: t.prints, lines: t.plan.GetLines(), told: true,
	}
	stage, pid, err := s.fork(t, i, e)
	if err == nil {
		t.pid = pid
		return stage
	}
	failure, call := errno(err), "execve"
	if wantsStage(s.ready, e) || failure == unix.EAGAIN || failure == unix.ENOMEM {
		call = "fork"
	}
	t.end(launchFailure(call, t.plan, failure))
	return nil
}

// fork executes on the CPUs of a task, as the user: through a stage, if one is needed.
func (s *supervisor) fork(t *task, i int, e execution) (*staged, int, error) {
	if s.cpus == nil {
		s.cpus = newBinding()
	}
	mask := t.plan.GetCpuMask()
	if len(mask) > 0 && !s.cpus.bind(mask) {
		mask, s.unbound = nil, true
	}
	defer s.cpus.release()
	e.cpus = mask
	if wantsStage(s.ready, e) || adjusts(s.plan) && !e.told {
		return t.stage(s.plan, s.ready, i, e)
	}
	attr := &syscall.ProcAttr{
		Dir: s.ready.workDir, Env: e.env, Files: []uintptr{uintptr(e.stdin), uintptr(e.stdout), uintptr(e.stderr)},
		Sys: &syscall.SysProcAttr{Setsid: true, Setctty: e.terminal, Pdeathsig: syscall.SIGKILL},
	}
	attr.Files = withManager(attr.Files, e.manager)
	if os.Geteuid() == 0 {
		attr.Sys.Credential = &syscall.Credential{Uid: s.plan.GetUid(), Gid: s.plan.GetGid(), Groups: s.plan.GetGroups()}
	}
	if e.told {
		err := t.start(s.plan, e.program, attr)
		if errors.Is(err, errNotAdjusted) {
			return t.stage(s.plan, s.ready, i, e)
		}
		return nil, t.pid, err
	}
	pid, err := syscall.ForkExec(e.program, e.args, attr)
	return nil, pid, err
}

// launchFailure is the exit of a task that was not executed.
func launchFailure(call string, t *supervisorv1.TaskPlan, failure unix.Errno) *apiv1.TaskExit {
	return &apiv1.TaskExit{Code: uint32(failure), LaunchError: fmt.Sprintf("%s(): %s: %s", call, t.GetArgs()[0], errnoText(failure))}
}

// cookieVariable marks every process of the step.
const cookieVariable = run.CookieVariable

// environment adds to a task's variables those of the start that it does not have, and the cookie, which it must have.
func environment(own, more []string, cookie string) []string {
	has := make(map[string]bool, len(own))
	env := make([]string, 0, len(own)+len(more)+1)
	for _, v := range own {
		name, _, _ := strings.Cut(v, "=")
		if name == cookieVariable {
			continue
		}
		has[name] = true
		env = append(env, v)
	}
	for _, v := range more {
		if name, _, _ := strings.Cut(v, "="); !has[name] && name != cookieVariable {
			env = append(env, v)
		}
	}
	return append(env, cookieVariable+"="+cookie)
}

// exitOf translates a wait status.
func exitOf(status unix.WaitStatus) *apiv1.TaskExit {
	if status.Signaled() {
		return &apiv1.TaskExit{Signal: uint32(status.Signal())}
	}
	return &apiv1.TaskExit{Code: uint32(status.ExitStatus())}
}

// binding sets the CPUs of the calling thread, which children inherit.
type binding struct {
	whole unix.CPUSet
	known bool
}

func newBinding() *binding {
	b := new(binding)
	b.known = unix.SchedGetaffinity(0, &b.whole) == nil
	return b
}

// bind restricts the thread to a mask. It does nothing and returns false if the machine does not have those CPUs for us:
// declared resources may exceed the real ones.
func (b *binding) bind(mask []uint64) bool {
	var set unix.CPUSet
	for word, bits := range mask {
		for bit := range 64 {
			if bits&(1<<bit) == 0 {
				continue
			}
			cpu := 64*word + bit
			if !b.known || !b.whole.IsSet(cpu) {
				return false
			}
			set.Set(cpu)
		}
	}
	return unix.SchedSetaffinity(0, &set) == nil
}

func (b *binding) release() {
	if b.known {
		_ = unix.SchedSetaffinity(0, &b.whole)
	}
}

// setThreadGroups sets the supplementary groups of the calling thread only.
func setThreadGroups(groups []uint32) error {
	_, _, e := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(groups)), uintptr(unsafe.Pointer(unsafe.SliceData(groups))), 0)
	if e != 0 {
		return e
	}
	return nil
}

// scoreFile says how readily the kernel kills this process, and those that it starts, when memory is short.
const scoreFile = "/proc/self/oom_score_adj"

// unprotect gives up a protection that was inherited from the agent: the tasks must not have it.
func unprotect(log *slog.Logger) {
	b, err := os.ReadFile(scoreFile)
	if err == nil && bytes.HasPrefix(b, []byte("-")) {
		err = os.WriteFile(scoreFile, []byte("0"), 0)
	}
	if err != nil {
		log.Warn("tasks are as protected from running out of memory as the agent", "error", err)
	}
}

// protect makes the supervisor one of the last to be killed, where the kernel lets it.
func protect(log *slog.Logger) {
	if os.Geteuid() != 0 {
		return
	}
	if err := os.WriteFile(scoreFile, []byte("-900"), 0); err != nil {
		log.Info("the supervisor is not protected from running out of memory", "error", err)
	}
}
