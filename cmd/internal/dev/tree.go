package dev

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// seen is one process in a look at the whole machine.
type seen struct {
	pid     int
	stat    procStat
	command []string
	// job: it belongs to a job (SLURM_JOB_ID) of the node whose agent's socket this is (MUSTER_AGENT_SOCKET).
	job    string
	socket string
}

// look reads all processes that can be read. Those of other users have no environment for us; they are found as
// descendants.
func look() (map[int]*seen, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	all := map[int]*seen{}
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		s, err := statOf(pid)
		if err != nil || s.state == 'Z' || s.state == 'X' {
			continue // it has just ended
		}
		one := &seen{pid: pid, stat: s}
		if text, err := os.ReadFile("/proc/" + entry.Name() + "/cmdline"); err == nil {
			one.command = strings.Split(strings.TrimRight(string(text), "\x00"), "\x00")
		}
		if text, err := os.ReadFile("/proc/" + entry.Name() + "/environ"); err == nil {
			for variable := range bytes.SplitSeq(text, []byte{0}) {
				name, value, _ := bytes.Cut(variable, []byte{'='})
				switch string(name) {
				case "SLURM_JOB_ID":
					one.job = string(value)
				case "MUSTER_AGENT_SOCKET":
					one.socket = string(value)
				}
			}
		}
		all[pid] = one
	}
	return all, nil
}

// place is where a node's files are, by both names of the cluster's directory.
type place struct{ dirs, sockets []string }

// roots reports whether a process by itself, not by its ancestors, belongs to the node: a supervisor of a step in its
// directory, or a task of its jobs. A shell in which somebody set MUSTER_AGENT_SOCKET is neither.
func (l place) roots(s *seen) bool {
	if s.job != "" && slices.Contains(l.sockets, s.socket) {
		return true
	}
	if len(s.command) == 0 || filepath.Base(s.command[0]) != "muster-supervisor" {
		return false
	}
	for _, argument := range s.command[1:] {
		for _, dir := range l.dirs {
			if strings.HasPrefix(argument, dir+"/") {
				return true
			}
		}
	}
	return false
}

// tree returns the processes of the nodes, with their descendants, except for this program and its ancestors.
func tree(all map[int]*seen, places []place) []*seen {
	spared := map[int]bool{1: true}
	for pid := os.Getpid(); pid > 1 && !spared[pid]; {
		spared[pid] = true
		if s := all[pid]; s != nil {
			pid = s.stat.parent
		}
	}
	belongs := map[int]bool{}
	var decide func(pid int) bool
	decide = func(pid int) bool {
		if answer, known := belongs[pid]; known {
			return answer
		}
		s := all[pid]
		if s == nil || spared[pid] {
			return false
		}
		belongs[pid] = false // against circles in a list that was read while it changed
		answer := decide(s.stat.parent)
		for _, l := range places {
			answer = answer || l.roots(s)
		}
		belongs[pid] = answer
		return answer
	}
	var found []*seen
	for pid, s := range all {
		if decide(pid) {
			found = append(found, s)
		}
	}
	return found
}

// signalTree sends a signal to everything of the nodes besides their agents.
func signalTree(places []place, signal syscall.Signal) (count int, err error) {
	all, err := look()
	if err != nil {
		return 0, err
	}
	for _, s := range tree(all, places) {
		hit, err := send(s.pid, s.stat.start, signal)
		if err != nil {
			return count, err
		}
		if hit {
			count++
		}
	}
	return count, nil
}

// killTree kills everything of the nodes besides their agents, which must be dead or stopped already, until nothing is
// left: a process may fork while the list is read.
func killTree(places []place) (count int, err error) {
	deadline := time.Now().Add(killWait)
	for clean := 0; clean < 2; {
		hit, err := signalTree(places, syscall.SIGKILL)
		if err != nil {
			return count, err
		}
		count += hit
		if hit == 0 {
			clean++
			continue
		}
		clean = 0
		if time.Now().After(deadline) {
			return count, fmt.Errorf("processes of the node are still there %v after SIGKILL", killWait)
		}
		time.Sleep(pollInterval / 4)
	}
	return count, nil
}

// JobProcess is one process of a job on this machine.
type JobProcess struct {
	Pid   int
	Start uint64 // clock ticks from the machine's boot: with Pid the identity of the process
	// Program is the base name of what runs.
	Program string
}

// JobProcesses returns the processes of a job of this cluster, those of other users excepted.
func (c *Cluster) JobProcesses(job uint32) ([]JobProcess, error) {
	s, err := loadState(c.dir)
	if err != nil {
		return nil, err
	}
	all, err := look()
	if err != nil {
		return nil, err
	}
	var found []JobProcess
	for _, p := range s.agents() {
		for _, l := range c.places(s, p) {
			for _, one := range all {
				if one.job == strconv.FormatUint(uint64(job), 10) && slices.Contains(l.sockets, one.socket) && len(one.command) > 0 {
					found = append(found, JobProcess{Pid: one.pid, Start: one.stat.start, Program: filepath.Base(one.command[0])})
				}
			}
		}
	}
	slices.SortFunc(found, func(a, b JobProcess) int { return a.Pid - b.Pid })
	return found, nil
}
