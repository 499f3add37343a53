package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
)

// stuckTask is a process of a step that could not be killed. Its devices are kept from new work until it is gone.
type stuckTask struct {
	Step  string   `json:"step"`
	PID   uint32   `json:"pid"`
	Start uint64   `json:"start"`
	Name  string   `json:"name"`
	Waits string   `json:"waits"`
	GPUs  []uint64 `json:"gpus"`
	CPUs  []uint64 `json:"cpus"`
}

// alive reports whether the process still exists: one with its number that began at another time is another.
func (s *stuckTask) alive() bool {
	data, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(int(s.PID)), "stat"))
	if err != nil {
		return !errors.Is(err, fs.ErrNotExist)
	}
	// The name, in brackets, may hold anything; the start is the 20th field after it.
	fields := strings.Fields(string(data[strings.LastIndexByte(string(data), ')')+1:]))
	if len(fields) < 20 || fields[0] == "Z" {
		return len(fields) < 20
	}
	start, err := strconv.ParseUint(fields[19], 10, 64)
	return err != nil || s.Start == 0 || start == s.Start
}

func (a *Agent) stuckFile() string { return filepath.Join(a.cfg.Dir, "stuck") }

// noteStuck remembers processes of a step that ended without them. a.mu is held.
func (a *Agent) noteStuck(s *step, state *supervisorv1.StepState) {
	if len(state.GetStuck()) == 0 {
		return
	}
	group := s.record.GetOrder()
	var fresh []stuckTask
	for _, p := range state.GetStuck() {
		fresh = append(fresh, stuckTask{
			Step: label(s.key, s.id), PID: p.GetPid(), Start: p.GetStartTicks(), Name: p.GetName(), Waits: p.GetWaitsIn(),
			GPUs: group.GetGpuMask(), CPUs: group.GetCpuMask(),
		})
	}
	a.ailments.mu.Lock()
	for _, f := range fresh {
		if !slices.ContainsFunc(a.ailments.stuck, func(o stuckTask) bool { return o.PID == f.PID && o.Start == f.Start }) {
			a.ailments.stuck = append(a.ailments.stuck, f)
		}
	}
	a.ailments.stuck = a.ailments.stuck[max(0, len(a.ailments.stuck)-maxStuck):]
	data, err := json.Marshal(a.ailments.stuck)
	a.ailments.mu.Unlock()
	if err == nil {
		err = replaceFile(a.stuckFile(), data, false)
	}
	if err != nil {
		a.log.Warn("processes that can't be killed may be forgotten at the agent's next start", "err", err)
	}
	a.poke(a.look)
}

// loadStuck reads what an earlier life of the agent knew.
func (l *ailments) loadStuck(path string) {
	data, err := os.ReadFile(path)
	var kept []stuckTask
	if err != nil || json.Unmarshal(data, &kept) != nil {
		return // none, or what a crash left of the file
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stuck = append(kept, l.stuck...)
}

func (l *ailments) hasStuck() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.stuck) > 0
}

// stuckTasks forgets those that are gone, and is the condition about the others: only their devices get no new work.
func (l *ailments) stuckTasks() *apiv1.Condition {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stuck = slices.DeleteFunc(l.stuck, func(s stuckTask) bool { return !s.alive() })
	if len(l.stuck) == 0 {
		return nil
	}
	c := &apiv1.Condition{Code: codeStuck, Severity: severityFailed, Clears: "the processes end, which may need a repair of what they wait for or a reboot"}
	var words []string
	for _, s := range l.stuck {
		words = append(words, fmt.Sprintf("process %d (%s) of step %s waits in the kernel (%s)", s.PID, s.Name, s.Step, s.Waits))
		c.GpuMask, c.CpuMask = union(c.GpuMask, s.GPUs), union(c.CpuMask, s.CPUs)
	}
	c.Reason = strings.Join(words, "; ")
	return c
}

func union(a, b []uint64) []uint64 {
	sum := make([]uint64, max(len(a), len(b)))
	copy(sum, a)
	for i, w := range b {
		sum[i] |= w
	}
	return sum
}
