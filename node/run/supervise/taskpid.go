package supervise

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"

	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
	"golang.org/x/sys/unix"
)

// A task shall find its own process id in SLURM_TASK_PID, but nobody knows the number before the process is there, and an
// intermediate program that asks for it would cost more than everything else of a start. So the first variable of a task's
// environment is room for it: the kernel stops the task after its exec, before its first instruction (as for a debugger), the
// supervisor writes the number into the room, and lets it go. Where that is not allowed the task has no SLURM_TASK_PID.
const (
	pidVariable = "SLURM_TASK_PID="
	// pidRoom is what the task sees if the number cannot be written. It is as long as the variable with the largest number.
	pidRoom = "MUSTER_TASK_PID_UNKNOWN=1"
)

// errNotAdjusted means that the kernel does not let a task be stopped before its first instruction, so that a stage must do for it what
// is to be done by then. Nothing was executed.
var errNotAdjusted = errors.New("the task cannot be stopped before its first instruction")

// start starts the first process of a task that needs no stage, with its process id in its environment where the kernel
// allows that. What the plan asks for beside that is done before the first instruction, or errNotAdjusted returned.
func (t *task) start(plan *supervisorv1.StepPlan, program string, attr *syscall.ProcAttr) error {
	var pid int
	err := error(unix.EPERM)
	traced := !privileged(program, attr.Dir)
	if traced {
		with, sys := *attr, *attr.Sys
		with.Env, with.Sys = append([]string{pidRoom}, attr.Env...), &sys
		sys.Ptrace = true
		pid, err = syscall.ForkExec(program, t.plan.GetArgs(), &with)
	}
	if errors.Is(err, unix.EPERM) && adjusts(plan) {
		return errNotAdjusted
	}
	if errors.Is(err, unix.EPERM) { // tracing is forbidden here, or something else is, which shows now
		traced = false
		pid, err = syscall.ForkExec(program, t.plan.GetArgs(), attr)
	}
	if err != nil {
		return err
	}
	if !traced {
		t.pid = pid
		return nil
	}
	var used unix.Rusage
	status, untold, err := release(pid, &used, func() error { return adjust(plan, pid) })
	if err != nil {
		discard(pid)
		return errNotAdjusted // the stage fails, too, and says why
	}
	t.pid, t.untold = pid, untold
	if status != nil {
		t.reaped, t.usage = true, measured(nil, &used)
		t.end(exitOf(*status))
	}
	return nil
}

// discard ends a process that is stopped before its first instruction.
func discard(pid int) {
	_ = unix.Kill(pid, unix.SIGKILL)
	for {
		var status unix.WaitStatus
		_, err := unix.Wait4(pid, &status, unix.WALL, nil)
		if err == nil && (status.Exited() || status.Signaled()) || err != nil && !errors.Is(err, unix.EINTR) {
			return
		}
	}
}

// privileged reports whether a program gets other rights at exec: the kernel takes them away from one that is stopped there.
// One of which it cannot be said counts as privileged.
func privileged(program, workDir string) bool {
	path := absolute(program, workDir)
	var st unix.Stat_t
	if unix.Stat(path, &st) != nil || st.Mode&(unix.S_ISUID|unix.S_ISGID) != 0 {
		return true
	}
	_, err := unix.Getxattr(path, "security.capability", nil)
	return err == nil || !errors.Is(err, unix.ENODATA) && !errors.Is(err, unix.ENOTSUP)
}

// release waits until a task that was started traced has executed its program, has adjust do what is to be done before its first
// instruction, tells it its process id and lets it go. Not earlier: an exec that is not over takes the stack's limit back. The status
// is not nil if the task has ended instead, which is collected with that. untold says why it has no SLURM_TASK_PID. With an
// error, which is adjust's, it is still stopped.
func release(pid int, used *unix.Rusage, adjust func() error) (ended *unix.WaitStatus, untold, err error) {
	var told error
	var later []unix.Signal
	for {
		var status unix.WaitStatus
		if _, err := unix.Wait4(pid, &status, unix.WALL, used); errors.Is(err, unix.EINTR) {
			continue
		} else if err != nil {
			return nil, fmt.Errorf("waiting for the exec of process %d: %w", pid, err), nil
		}
		if !status.Stopped() {
			return &status, nil, nil
		}
		if sig := status.StopSignal(); sig != unix.SIGTRAP { // it came in between, and is delivered when the task is free
			later = append(later, sig)
			if err := unix.PtraceCont(pid, 0); err != nil && !errors.Is(err, unix.ESRCH) {
				return nil, fmt.Errorf("letting process %d come to its exec: %w", pid, err), nil
			}
			continue
		}
		if err := adjust(); err != nil {
			return nil, nil, err
		}
		told = tellPID(pid)
		if err := unix.PtraceDetach(pid); err != nil && !errors.Is(err, unix.ESRCH) { // killed: its end is collected as usual
			told = errors.Join(told, fmt.Errorf("letting process %d go: %w", pid, err))
		}
		for _, sig := range later {
			_ = unix.Kill(pid, sig) // it may be gone
		}
		return nil, told, nil
	}
}

// tellPID writes the process id of a stopped process over the first variable of its environment.
func tellPID(pid int) error {
	at, err := environmentOf(pid)
	if err != nil {
		return err
	}
	first := make([]byte, len(pidRoom)+1)
	if _, err := unix.PtracePeekData(pid, at, first); err != nil {
		return fmt.Errorf("reading the environment of process %d: %w", pid, err)
	}
	if string(first) != pidRoom+"\x00" {
		return fmt.Errorf("the environment of process %d is not where it was expected", pid)
	}
	room := make([]byte, len(pidRoom))
	copy(room, pidVariable+strconv.Itoa(pid))
	if _, err := unix.PtracePokeData(pid, at, room); err != nil {
		return fmt.Errorf("writing into the environment of process %d: %w", pid, err)
	}
	return nil
}

// environmentOf returns the address at which the strings of a process's environment begin.
func environmentOf(pid int) (uintptr, error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, fmt.Errorf("looking for the environment of process %d: %w", pid, err)
	}
	// The name in parentheses may contain anything; the state behind it is field 3, the address field 50.
	fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	if len(fields) < 48 {
		return 0, fmt.Errorf("the kernel does not say where the environment of process %d is", pid)
	}
	at, err := strconv.ParseUint(fields[47], 10, 64)
	if err != nil || at == 0 {
		return 0, fmt.Errorf("the kernel does not say where the environment of process %d is", pid)
	}
	return uintptr(at), nil
}
