package cgroup

import (
	"fmt"
	"strconv"
	"strings"
)

// Process is one that is in the way.
type Process struct {
	// PID is its number.
	PID int
	// Name is the program's, as the kernel shortens it.
	Name string
	// State is the kernel's letter: D is uninterruptible sleep, Z a zombie.
	State string
	// Where is the kernel function in which it waits; empty if the kernel does not tell.
	Where string
	// Start is when it began, in clock ticks since the boot: with the number it names the process for ever.
	Start uint64
}

func (p Process) String() string {
	s := fmt.Sprintf("process %d (%s, state %s", p.PID, p.Name, p.State)
	if p.Where != "" {
		s += ", in " + p.Where
	}
	return s + ")"
}

// Look describes a process; false if it is gone.
func Look(pid int) (Process, bool) {
	dir := "/proc/" + strconv.Itoa(pid)
	stat := read(dir, "stat")
	// The name in parentheses may contain anything.
	from, to := strings.IndexByte(stat, '('), strings.LastIndexByte(stat, ')')
	if from < 0 || to < from {
		return Process{}, false
	}
	rest := strings.Fields(stat[to+1:])
	if len(rest) < 20 {
		return Process{}, false
	}
	start, err := strconv.ParseUint(rest[19], 10, 64)
	if err != nil {
		return Process{}, false
	}
	p := Process{PID: pid, Name: stat[from+1 : to], State: rest[0], Where: read(dir, "wchan"), Start: start}
	if p.Where == "0" {
		p.Where = ""
	}
	return p, true
}

// Stuck describes the processes in the group that are not dead.
func (g *Group) Stuck() []Process {
	pids, err := g.Procs()
	if err != nil {
		return nil
	}
	var all []Process
	for _, pid := range pids {
		if p, ok := Look(pid); ok && p.State != "Z" && p.State != "X" {
			all = append(all, p)
		}
	}
	return all
}

// described bounds the processes that a sentence names.
const described = 3

// Describe is part of a sentence: who is in the way.
func Describe(all []Process) string {
	if len(all) == 0 {
		return "no process is seen in it"
	}
	var parts []string
	for i, p := range all {
		if i == described {
			parts = append(parts, fmt.Sprintf("%d more", len(all)-described))
			break
		}
		parts = append(parts, p.String())
	}
	return strings.Join(parts, ", ")
}
