package bench

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// usage is what a process has used so far.
type usage struct {
	name, role string
	pid        int
	leader     bool
	// cpu and children are seconds of CPU: of the process, and of those that it started and that have ended.
	cpu, children float64
	// peakMB is the most memory that was resident; presentMB is what is.
	peakMB, presentMB float64
}

// clockTicks is the unit of /proc/PID/stat, a second's part: the kernel gives programs always 100.
const clockTicks = 100

// usages reads the usage of every process of the cluster.
func (r *run) usages(ctx context.Context) ([]usage, error) {
	status, err := r.cluster.Status(ctx)
	if err != nil {
		return nil, err
	}
	var all []usage
	for _, p := range status.Processes {
		if !p.Alive || slices.ContainsFunc(all, func(u usage) bool { return u.pid == p.Pid }) {
			continue
		}
		u, err := usageOf(p.Pid)
		if err != nil {
			return nil, err
		}
		u.name, u.role, u.leader = p.Name, p.Role, p.Name == status.Leader
		all = append(all, u)
	}
	return all, nil
}

// usageOf reads the usage of one process.
func usageOf(pid int) (usage, error) {
	u := usage{pid: pid}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return u, err
	}
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	if len(fields) < 15 {
		return u, fmt.Errorf("/proc/%d/stat has %d fields after the name", pid, len(fields))
	}
	var ticks [4]float64
	for i := range ticks { // utime stime cutime cstime
		if ticks[i], err = strconv.ParseFloat(fields[11+i], 64); err != nil {
			return u, fmt.Errorf("read the CPU time of process %d: %w", pid, err)
		}
	}
	u.cpu, u.children = (ticks[0]+ticks[1])/clockTicks, (ticks[2]+ticks[3])/clockTicks
	if u.peakMB, err = memoryMB(pid, "VmHWM"); err != nil {
		return u, err
	}
	u.presentMB, err = memoryMB(pid, "VmRSS")
	return u, err
}

// memoryMB reads a line with a size of /proc/PID/status.
func memoryMB(pid int, line string) (float64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	for have := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(have, line+":"); ok {
			kb, err := strconv.ParseFloat(strings.Fields(rest)[0], 64)
			return kb / 1024, err
		}
	}
	return 0, fmt.Errorf("process %d has no %s", pid, line)
}

// spent adds up the CPU time of a role between two looks; supervisors and tasks count as children of the agents.
func spent(before, after []usage, counts func(usage) bool) (cpu, children float64) {
	for _, b := range after {
		for _, a := range before {
			if a.pid == b.pid && counts(b) {
				cpu, children = cpu+b.cpu-a.cpu, children+b.children-a.children
			}
		}
	}
	return cpu, children
}

func isController(u usage) bool { return u.role == "controller" }
func isAgent(u usage) bool      { return u.role == "node" }
func isLeader(u usage) bool     { return u.leader }
func isFollower(u usage) bool   { return isController(u) && !u.leader }

// peak is the highest peak of those that count.
func peak(all []usage, counts func(usage) bool) float64 {
	most := 0.0
	for _, u := range all {
		if counts(u) {
			most = max(most, u.peakMB)
		}
	}
	return most
}

// supervisors returns the processes of the cluster's supervisors: those whose command line names a directory of the cluster.
func (r *run) supervisors() ([]int, error) {
	processes, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return nil, err
	}
	own, err := os.Stat(r.cluster.Dir())
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, path := range processes {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		arguments := strings.Split(string(text), "\x00")
		if len(arguments) < 2 || filepath.Base(arguments[0]) != "muster-supervisor" {
			continue
		}
		// ROOT/NODE/steps/STEP, where ROOT is the cluster's directory or a short name of it.
		root, err := os.Stat(filepath.Dir(filepath.Dir(filepath.Dir(arguments[1]))))
		if err != nil || !os.SameFile(root, own) {
			continue
		}
		pid, err := strconv.Atoi(strings.Split(path, "/")[2])
		if err != nil {
			return nil, err
		}
		pids = append(pids, pid)
	}
	return pids, nil
}
