package run

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/muster-hpc/muster/node/run/cgroup"
)

// ErrUnkillable means that a process was still there when the time was over, though it was sent KILL.
var ErrUnkillable = errors.New("a process does not die")

// KillLeftovers kills every process that carries the cookie in its environment, whoever started it and wherever it
// hangs in the process tree, and returns their number when none is left. Without root it sees only processes of the
// same user, which are all that a supervisor without root could have started. It never kills its own process.
// ErrUnkillable (with the process ids), joined with the context's error, if ctx ends before they are gone.
// A process that overwrote its own environment is not found.
func KillLeftovers(ctx context.Context, cookie string) (int, error) {
	if cookie == "" {
		return 0, errors.New("killing leftovers: the step has no cookie")
	}
	mark := []byte(CookieVariable + "=" + cookie)
	seen := make(map[int]bool)
	for pause := time.Millisecond; ; pause = min(2*pause, 100*time.Millisecond) {
		left, err := killMarked(mark)
		if err != nil {
			return len(seen), fmt.Errorf("killing leftovers: %w", err)
		}
		for _, pid := range left {
			seen[pid] = true
		}
		if len(left) == 0 {
			return len(seen), nil
		}
		select {
		case <-ctx.Done():
			return len(seen), fmt.Errorf("killing leftovers: %w: process ids %v: %w", ErrUnkillable, left, ctx.Err())
		case <-time.After(pause):
		}
	}
}

// Marked are the processes that carry a cookie; those that cannot be looked at are left out.
func Marked(cookie string) []cgroup.Process {
	names, err := os.ReadDir("/proc")
	if err != nil || cookie == "" {
		return nil
	}
	var all []cgroup.Process
	for _, name := range names {
		pid, err := strconv.Atoi(name.Name())
		if err != nil || !marked(pid, []byte(CookieVariable+"="+cookie)) {
			continue
		}
		if p, ok := cgroup.Look(pid); ok {
			all = append(all, p)
		}
	}
	return all
}

// killMarked sends KILL to all processes with the mark and returns them.
func killMarked(mark []byte) ([]int, error) {
	proc, err := os.Open("/proc")
	if err != nil {
		return nil, err
	}
	names, err := proc.Readdirnames(-1)
	if err = errors.Join(err, proc.Close()); err != nil {
		return nil, err
	}
	var left []int
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil || pid == os.Getpid() || !marked(pid, mark) {
			continue
		}
		// The descriptor pins the process, so the second look and the signal concern the same one.
		fd, err := unix.PidfdOpen(pid, 0)
		if err == nil {
			if marked(pid, mark) {
				left = append(left, pid)
				err = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
			}
			_ = unix.Close(fd)
		} else if errors.Is(err, unix.ENOSYS) { // before Linux 5.3
			left = append(left, pid)
			err = unix.Kill(pid, unix.SIGKILL)
		}
		if err != nil && !errors.Is(err, unix.ESRCH) {
			return left, fmt.Errorf("process %d: %w", pid, err)
		}
	}
	return left, nil
}

// marked reports whether the environment of a process has the mark. A process that is gone, a zombie, or one of
// another user has not.
func marked(pid int, mark []byte) bool {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "environ"))
	if err != nil {
		return false
	}
	for len(b) > 0 {
		var v []byte
		v, b, _ = bytes.Cut(b, []byte{0})
		if bytes.Equal(v, mark) {
			return true
		}
	}
	return false
}
