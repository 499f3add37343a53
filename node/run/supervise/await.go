package supervise

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"unsafe"

	"github.com/muster-hpc/muster/node/run"
	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
	"golang.org/x/sys/unix"
)

// IsIdle reports whether this process was started ahead: its argument is no directory, but room for one.
func IsIdle(argument string) bool { return strings.HasPrefix(argument, run.IdlePrefix) }

// Await is the time of a supervisor that was started ahead: it makes everything ready that does not depend on the step, and
// waits until it is given one. nil without error means that the agent went away: there is nothing to do. It must be called
// from the main goroutine, with the process's arguments as they came, and only once.
func Await(args []string) (*run.Handed, error) {
	runtime.LockOSThread()
	if err := secure(); err != nil {
		return nil, err
	}
	if err := warm(); err != nil {
		return nil, err
	}
	handed, err := run.AwaitHanded()
	if handed == nil || err != nil {
		return nil, err
	}
	if err := errors.Join(unix.Close(run.IdleFD), rename(args[1], handed.Dir), takeLog(handed.Log)); err != nil {
		return nil, err
	}
	return handed, nil
}

// takeLog puts the step's log in the place of stdout and stderr.
func takeLog(log *os.File) error {
	for _, fd := range []int{1, 2} {
		if err := unix.Dup3(int(log.Fd()), fd, 0); err != nil {
			return fmt.Errorf("opening the step's log: %w", err)
		}
	}
	return log.Close()
}

// rename writes the step's directory over the argument that made room for it. Everybody finds supervisors by that: the agent
// that must end one which hangs, and people who look at the list of processes.
func rename(argument, dir string) error {
	if len(dir) > len(argument) {
		return fmt.Errorf("taking a step over: its directory's name is longer than %d bytes", len(argument))
	}
	// The runtime does not copy the arguments: the string is the kernel's memory, which belongs to the process.
	memory := unsafe.Slice(unsafe.StringData(argument), len(argument))
	clear(memory[copy(memory, dir):])
	return nil
}

// warm goes the ways once that every step goes, so that the first step does not pay for pages and tables that are made at
// their first use.
func warm() error {
	if _, err := run.BootID(); err != nil {
		return err
	}
	task := &supervisorv1.TaskPlan{Args: []string{"true"}, Env: []string{"A=b"}}
	state := &supervisorv1.StepState{Phase: supervisorv1.Phase_PHASE_PREPARED, Tasks: []*supervisorv1.TaskState{{Rank: 1}}}
	start := &supervisorv1.Request{Verb: &supervisorv1.Request_Start{Start: &supervisorv1.Start{Env: []string{"A=b"}}}}
	var buffer bytes.Buffer
	if err := errors.Join(
		run.WriteFrame(&buffer, start), run.ReadFrame(&buffer, new(supervisorv1.Request)),
		run.WriteFrame(&buffer, &supervisorv1.StepPlan{Tasks: []*supervisorv1.TaskPlan{task}}),
		run.ReadFrame(&buffer, new(supervisorv1.StepPlan)),
		run.WriteFrame(io.Discard, &supervisorv1.Event{State: state}),
	); err != nil {
		return fmt.Errorf("making ready: %w", err)
	}
	newTree()
	a, err := newAlarm()
	if err != nil {
		return err
	}
	a.close()
	return nil
}
