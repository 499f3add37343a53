package node

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/muster-hpc/muster/node/run"
)

// armForce arranges that a step which should be over by then is ended without its supervisor's help. a.mu is held.
func (a *Agent) armForce(s *step, after time.Duration) {
	if s.force != nil {
		s.force.Stop()
	}
	s.force = time.AfterFunc(after, func() { a.forceEnd(s) })
}

// forceEnd kills the supervisor of a step that should be over and is not: it hangs or was stopped. The step is then
// concluded, which kills what is left of its processes. It is done again until the step is over.
func (a *Agent) forceEnd(s *step) {
	a.mu.Lock()
	if a.stopped || s.phase.over() || s.dir == "" {
		a.mu.Unlock()
		return
	}
	a.armForce(s, forceAgain)
	a.mu.Unlock()
	_, noResult := run.ReadResult(s.dir)
	killed, err := killSupervisor(s.dir)
	switch {
	case err != nil:
		a.log.Error("a supervisor that did not end its step in time could not be killed", "step", label(s.key, s.id), "err", err)
	case noResult == nil: // it had ended its step by itself
		a.log.Debug("a step was over before it had to be ended by force", "step", label(s.key, s.id), "killed", killed)
	case killed > 0:
		a.log.Error("a supervisor did not end its step in time; it was killed, and its processes follow", "step", label(s.key, s.id),
			"killed", killed)
	default:
		a.log.Warn("a step that should be over has neither supervisor nor result; its processes are ended", "step", label(s.key, s.id))
	}
}

// watchDeadline arranges that attempts which stop themselves are ended when the deadline has passed, even if their
// supervisors do not do it. a.mu is held.
func (a *Agent) watchDeadline() {
	for _, at := range a.attempts {
		for _, s := range at.steps {
			if s.record.GetOrder().GetStopsItself() && !s.phase.over() && s.end == nil {
				a.armForce(s, max(0, a.lease.deadline-a.boot())+deadlineSlack)
			}
		}
	}
}

// killSupervisor kills the processes that were started as supervisors of a step's directory, by their command lines:
// one that hangs does not tell its process id.
func killSupervisor(dir string) (killed int, err error) { return signalSupervisor(dir, unix.SIGKILL) }

// signalSupervisor signals them, and returns how many were.
func signalSupervisor(dir string, sig unix.Signal) (signalled int, err error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return 0, fmt.Errorf("look for a supervisor: %w", err)
	}
	for _, e := range entries {
		pid, notPID := strconv.Atoi(e.Name())
		if notPID != nil || !supervises(pid, dir) {
			continue
		}
		// The descriptor holds on to this very process: the number may be another's by the time of the signal.
		fd, openErr := unix.PidfdOpen(pid, 0)
		if openErr != nil {
			continue // it has ended
		}
		if supervises(pid, dir) {
			if sendErr := unix.PidfdSendSignal(fd, sig, nil, 0); sendErr == nil {
				signalled++
			} else if !errors.Is(sendErr, unix.ESRCH) {
				err = errors.Join(err, fmt.Errorf("signal the supervisor %d: %w", pid, sendErr))
			}
		}
		err = errors.Join(err, unix.Close(fd))
	}
	return signalled, err
}

// supervises reports whether a process was started as "…/muster-supervisor DIR".
func supervises(pid int, dir string) bool {
	cmdline, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "cmdline"))
	if err != nil {
		return false
	}
	args := bytes.Split(bytes.TrimRight(cmdline, "\x00"), []byte{0}) // one that was started ahead has room behind it
	return len(args) >= 2 && string(args[len(args)-1]) == dir
}
