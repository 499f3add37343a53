package node

import (
	"bytes"
	"cmp"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"

	"github.com/muster-hpc/muster/node/run"
	"github.com/muster-hpc/muster/node/run/cgroup"
)

// maxUsagePIDs bounds the process ids that are told of one task; a row of docs/limits.md.
const maxUsagePIDs = 1000

// ticks is the length of the kernel's clock ticks in milliseconds, as /proc counts them on every Linux.
const tickMS = 10

// watched is a step of which the use is asked.
type watched struct {
	id     uint32
	mark   []byte
	ranks  []uint32
	groups *cgroup.Group // nil where there are none
}

// Usage says what the tasks of a job's running steps use here, by step and rank; step nil means all steps. Counted tells that control
// groups counted the CPU time, so that processes that are gone are in it. Of a process that changed its environment and left its parents
// nothing is known without control groups.
func (a *Agent) Usage(job uint32, step *uint32) (tasks []*nodev1.TaskUsage, counted bool) {
	steps := a.watched(job, step)
	if len(steps) == 0 {
		return nil, false
	}
	processes := readProcesses()
	for _, s := range steps {
		of := processes.ranks(s)
		for _, rank := range s.ranks {
			u := &nodev1.TaskUsage{StepId: s.id, Rank: rank}
			processes.add(u, of[rank])
			if s.groups != nil {
				if used := s.groups.FindTask(rank).Usage(); used.UserNS+used.SystemNS > 0 {
					u.UserMs, u.SystemMs, counted = used.UserNS/1e6, used.SystemNS/1e6, true
				}
			}
			tasks = append(tasks, u)
		}
	}
	return tasks, counted
}

// watched are the steps of a job that run here.
func (a *Agent) watched(job uint32, step *uint32) []watched {
	a.mu.Lock()
	defer a.mu.Unlock()
	var out []watched
	for key, at := range a.attempts {
		if key.job != job {
			continue
		}
		for id, s := range at.steps {
			if step != nil && *step != id || s.phase != PhaseRunning {
				continue
			}
			w := watched{id: id, mark: []byte(run.CookieVariable + "=" + s.record.GetCookie()), ranks: s.record.GetOrder().GetSteps()[0].GetRanks()}
			if a.cfg.Groups != nil {
				w.groups = a.cfg.Groups.Find(cgroup.Name{Job: key.job, Attempt: key.attempt, Step: id, IsStep: true})
			}
			out = append(out, w)
		}
	}
	slices.SortFunc(out, func(x, y watched) int { return cmp.Compare(x.id, y.id) })
	return out
}

// process is one that runs, as /proc/PID/stat tells.
type process struct {
	pid, parent         int
	start               uint64 // clock ticks since the boot
	user, system        uint64 // clock ticks, with those of children that were waited for
	faults, virtual, rs uint64 // major faults, bytes, pages
}

type processes map[int]process

// readProcesses looks at all processes once.
func readProcesses() processes {
	all := processes{}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return all
	}
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			if p, ok := readProcess(pid); ok {
				all[pid] = p
			}
		}
	}
	return all
}

// readProcess reads /proc/PID/stat; false if the process is gone or a zombie.
func readProcess(pid int) (process, bool) {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return process{}, false
	}
	// The name in parentheses may contain anything.
	f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	if len(f) < 22 || f[0] == "Z" || f[0] == "X" {
		return process{}, false
	}
	n := func(field int) uint64 { // by proc(5)'s numbers, from 1
		v, err := strconv.ParseUint(f[field-3], 10, 64)
		if err != nil {
			return 0 // only signed fields can be negative, and none of them is read
		}
		return v
	}
	return process{
		pid: pid, parent: int(n(4)), faults: n(12), user: n(14) + n(16), system: n(15) + n(17), start: n(22), virtual: n(23), rs: n(24),
	}, true
}

// ranks are the processes of each task of a step: those in its control group; without one those that carry the step's mark and the
// rank in their environment, and what they started.
func (all processes) ranks(s watched) map[uint32][]int {
	of := map[uint32][]int{}
	if s.groups != nil && s.groups.CountsTasks() {
		for _, rank := range s.ranks {
			if pids, err := s.groups.FindTask(rank).Procs(); err == nil && len(pids) > 0 {
				of[rank] = pids
			}
		}
		if len(of) > 0 {
			return of
		}
	}
	known := map[int]uint32{}
	for pid := range all {
		if rank, ok := rankOf(pid, s.mark); ok {
			known[pid] = rank
		}
	}
	for pid := range all {
		for at, depth := pid, 0; at > 1 && depth < len(all); at, depth = all[at].parent, depth+1 {
			if rank, ok := known[at]; ok {
				of[rank] = append(of[rank], pid)
				break
			}
		}
	}
	return of
}

// rankOf reads the rank of a task from a process's environment, if it has the step's mark.
func rankOf(pid int, mark []byte) (uint32, bool) {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "environ"))
	if err != nil || !bytes.Contains(b, mark) {
		return 0, false
	}
	marked, rank, ranked := false, uint64(0), false
	for v := range bytes.SplitSeq(b, []byte{0}) {
		if bytes.Equal(v, mark) {
			marked = true
		} else if text, ok := bytes.CutPrefix(v, []byte("SLURM_PROCID=")); ok {
			if n, err := strconv.ParseUint(string(text), 10, 32); err == nil {
				rank, ranked = n, true
			}
		}
	}
	return uint32(rank), marked && ranked
}

// add adds up what the processes of a task use. The highest resident memory is the highest that is proven: that of its largest process, or
// what all of them have now.
func (all processes) add(u *nodev1.TaskUsage, pids []int) {
	slices.Sort(pids)
	pages := uint64(os.Getpagesize()) / 1024
	var first process
	for _, pid := range pids {
		p, ok := all[pid]
		if !ok {
			continue // it began after the look, or is gone
		}
		if first.pid == 0 || p.start < first.start {
			first = p
		}
		u.UserMs += p.user * tickMS
		u.SystemMs += p.system * tickMS
		u.RssKb += p.rs * pages
		u.VirtualKb += p.virtual / 1024
		u.MajorFaults += p.faults
		u.MaxRssKb = max(u.MaxRssKb, procField(pid, "status", "VmHWM:"))
		u.ReadBytes += procField(pid, "io", "read_bytes:")
		u.WriteBytes += procField(pid, "io", "write_bytes:")
		if len(u.Pids) < maxUsagePIDs {
			u.Pids = append(u.Pids, uint32(pid))
		}
	}
	u.Pid, u.MaxRssKb = uint32(first.pid), max(u.MaxRssKb, u.RssKb)
}

// procField returns the number after a word in a file of a process; 0 if it cannot be read.
func procField(pid int, file, word string) uint64 {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), file))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) >= 2 && f[0] == word {
			if n, err := strconv.ParseUint(f[1], 10, 64); err == nil {
				return n
			}
		}
	}
	return 0
}
