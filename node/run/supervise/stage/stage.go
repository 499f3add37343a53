package stage

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// init turns the process into a stage if it was executed as one. It is on the process's first thread, whose identity
// and parent-death signal the program inherits.
func init() {
	if len(os.Args) != 1 || os.Args[0] != Name {
		return
	}
	f := perform()
	_, _ = unix.Write(StatusFD, f.Encode())
	os.Exit(FailureCode)
}

// perform does everything; it returns only if something fails.
func perform() *Failure {
	plan, err := take()
	if err != nil {
		return failure("reading the plan", err)
	}
	if f := plan.enter(); f != nil {
		return f
	}
	if f := plan.become(); f != nil {
		return f
	}
	// The change of identity cleared it.
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0); err != nil {
		return failure("prctl", err)
	}
	if os.Getppid() != plan.Parent {
		return failure("the supervisor is gone", unix.ESRCH)
	}
	if err := unix.Chdir(plan.Dir); err != nil {
		return failure("chdir", err)
	}
	for _, l := range plan.Limits {
		if err := l.set(); err != nil {
			return failure("setrlimit", err)
		}
	}
	say(1, plan.Prints)
	say(2, plan.Lines)
	if _, err := unix.Write(StatusFD, []byte{Started}); err != nil {
		return failure("write", err)
	}
	return failure("execve", syscall.Exec(plan.Program, plan.Args, withPID(plan.Env)))
}

// say writes lines as far as they can be written: whoever reads them is the user's matter.
func say(fd int, lines []string) {
	for _, line := range lines {
		rest := []byte(strings.ReplaceAll(line, "%p", strconv.Itoa(os.Getpid())) + "\n")
		for len(rest) > 0 {
			n, err := unix.Write(fd, rest)
			if errors.Is(err, unix.EINTR) {
				continue
			}
			if err != nil {
				return
			}
			rest = rest[n:]
		}
	}
}

// pidVariable tells a task the id of its first process, which nobody knows before that exists.
const pidVariable = "SLURM_TASK_PID="

// withPID sets the variable.
func withPID(env []string) []string {
	env = slices.DeleteFunc(env, func(v string) bool { return strings.HasPrefix(v, pidVariable) })
	return append(env, pidVariable+strconv.Itoa(os.Getpid()))
}

// take reads the plan and keeps its descriptors from the program.
func take() (*Plan, error) {
	for fd := PlanFD; fd <= NamespaceFD; fd++ {
		unix.CloseOnExec(fd)
	}
	f := os.NewFile(PlanFD, "plan")
	b, err := io.ReadAll(f)
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, err
	}
	return Decode(b)
}

// enter goes where the step is.
func (p *Plan) enter() *Failure {
	for _, file := range p.Groups {
		fd, err := unix.Open(file, unix.O_WRONLY|unix.O_CLOEXEC, 0)
		if err == nil {
			_, err = unix.Write(fd, []byte("0"))
			err = errors.Join(err, unix.Close(fd))
		}
		if err != nil {
			return failure("entering the control group "+file, err)
		}
	}
	// Entering a group may have widened what the thread was bound to.
	var cpus unix.CPUSet
	for word, bits := range p.CPUs {
		for bit := range 64 {
			if bits&(1<<bit) != 0 {
				cpus.Set(64*word + bit)
			}
		}
	}
	if len(p.CPUs) > 0 {
		if err := unix.SchedSetaffinity(0, &cpus); err != nil {
			return failure("sched_setaffinity", err)
		}
	}
	if p.Namespace {
		// A thread that shares its working directory with others cannot go to another namespace.
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			return failure("unshare", err)
		}
		if err := unix.Setns(NamespaceFD, unix.CLONE_NEWNS); err != nil {
			return failure("setns", err)
		}
	}
	return nil
}

// become takes the user's priority and identity. Raw calls: only this thread executes the program; the others end.
func (p *Plan) become() *Failure {
	if p.SetNice {
		if err := unix.Setpriority(unix.PRIO_PROCESS, 0, p.Nice); err != nil && !errors.Is(err, unix.EACCES) && !errors.Is(err, unix.EPERM) {
			return failure("setpriority", err) // Without root a lower value than ours is not to be had.
		}
	}
	if !p.SetUser {
		return nil
	}
	groups := uintptr(unsafe.Pointer(unsafe.SliceData(p.Supplement)))
	if _, _, e := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(p.Supplement)), groups, 0); e != 0 {
		return failure("setgroups", e)
	}
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESGID, uintptr(p.GID), uintptr(p.GID), uintptr(p.GID)); e != 0 {
		return failure("setgid", e)
	}
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(p.UID), uintptr(p.UID), uintptr(p.UID)); e != 0 {
		return failure("setuid", e)
	}
	return nil
}

// set sets a soft limit, not above the hard one. It goes through package syscall, which keeps its own idea of the
// number of descriptors for execution.
func (l Limit) set() error {
	var r syscall.Rlimit
	if err := syscall.Getrlimit(l.Resource, &r); err != nil {
		return fmt.Errorf("reading resource limit %d: %w", l.Resource, err)
	}
	r.Cur = min(l.Soft, r.Max)
	if err := syscall.Setrlimit(l.Resource, &r); err != nil {
		return fmt.Errorf("setting resource limit %d: %w", l.Resource, err)
	}
	return nil
}

func failure(call string, err error) *Failure {
	e := unix.EIO
	_ = errors.As(err, &e)
	return &Failure{Call: call, Errno: uint32(e)}
}
