package supervise

import (
	"bytes"
	"errors"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/muster-hpc/muster/node/run/cgroup"
	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
)

// tree is all processes of the step: the descendants of the supervisor.
type tree struct {
	self int
	// lists says that the kernel lists the children of a thread (CONFIG_PROC_CHILDREN).
	lists bool
}

func newTree() tree {
	pid := os.Getpid()
	_, err := os.Stat("/proc/self/task/" + strconv.Itoa(pid) + "/children")
	return tree{self: pid, lists: err == nil}
}

// members returns the processes, parents before children, zombies included. Processes that are being born meanwhile
// may be missing.
func (t tree) members() []int {
	childrenOf := threadChildren
	if !t.lists {
		childrenOf = scanParents()
	}
	var all []int
	queue := []int{t.self}
	for len(queue) > 0 && len(all) < 1<<20 {
		next := childrenOf(queue[0])
		queue = append(queue[1:], next...)
		all = append(all, next...)
	}
	return all
}

// threadChildren reads the children of every thread of a process.
func threadChildren(pid int) []int {
	dir := "/proc/" + strconv.Itoa(pid) + "/task/"
	threads, err := os.ReadDir(dir)
	if err != nil {
		return nil // It is gone.
	}
	var pids []int
	for _, thread := range threads {
		b, err := os.ReadFile(dir + thread.Name() + "/children")
		if err != nil {
			continue
		}
		for word := range bytes.FieldsSeq(b) {
			if pid, err := strconv.Atoi(string(word)); err == nil {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

// scanParents reads the parents of all processes once.
func scanParents() func(pid int) []int {
	children := make(map[int][]int)
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return func(int) []int { return nil }
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if parent, _, ok := status(pid); ok {
			children[parent] = append(children[parent], pid)
		}
	}
	return func(pid int) []int { return children[pid] }
}

// status returns the parent of a process and its state letter.
func status(pid int) (parent int, state string, ok bool) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, "", false
	}
	// The name in parentheses may contain anything.
	fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	if len(fields) < 2 {
		return 0, "", false
	}
	parent, err = strconv.Atoi(fields[1])
	return parent, fields[0], err == nil
}

// signal sends a signal once to every process. groups are process groups that exist for certain (their leaders are not
// reaped); the kernel reaches all of a group's members, also those being born. Others are signalled one by one.
func (t tree) signal(groups []int, sig unix.Signal) {
	reached := make(map[int]bool, len(groups))
	others := t.members()
	for _, group := range groups {
		if err := unix.Kill(-group, sig); err == nil {
			reached[group] = true
		}
	}
	for _, pid := range others {
		group, err := unix.Getpgid(pid)
		if err == nil && !reached[group] {
			_ = unix.Kill(pid, sig) // It may be gone: that is what is wanted.
		}
	}
}

// stuck are the processes that survived KILL: all but zombies.
func (t tree) stuck() []cgroup.Process {
	var all []cgroup.Process
	for _, pid := range t.members() {
		if p, ok := cgroup.Look(pid); ok && p.State != "Z" && p.State != "X" {
			all = append(all, p)
		}
	}
	return all
}

// reap collects one process that ended, and what it and those that it waited for used. pid is 0 if none has; empty is true if there are no
// processes at all.
func reap() (pid int, status unix.WaitStatus, used *unix.Rusage, empty bool, err error) {
	used = new(unix.Rusage)
	for {
		pid, err = unix.Wait4(-1, &status, unix.WNOHANG|unix.WALL, used)
		switch {
		case err == nil:
			return pid, status, used, false, nil
		case errors.Is(err, unix.ECHILD):
			return 0, 0, nil, true, nil
		case !errors.Is(err, unix.EINTR):
			return 0, 0, nil, false, err
		}
	}
}

// measured completes what a task's group counted, nil if it has none, with what the kernel tells of its first process and those that were
// waited for.
func measured(u *supervisorv1.TaskUsage, used *unix.Rusage) *supervisorv1.TaskUsage {
	if used == nil {
		return u
	}
	if u == nil {
		u = &supervisorv1.TaskUsage{UserNs: uint64(used.Utime.Nano()), SystemNs: uint64(used.Stime.Nano())}
	}
	u.MaxRssBytes = uint64(used.Maxrss) * 1024
	return u
}
