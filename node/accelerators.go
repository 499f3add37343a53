package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"

	"github.com/muster-hpc/muster/node/gpu"
)

// ownerGPU is the owner of what is found of accelerators.
const ownerGPU = gpu.Check

// codeGPUUnknown says that nothing new is known of the accelerators.
const codeGPUUnknown = "GPU_UNKNOWN"

// ErrInventoryChanged is the error of Run when the node has other accelerators than it said: the agent is to be opened again with another
// specification. All work goes on meanwhile, as when an agent is started again.
var ErrInventoryChanged = errors.New("the node has other accelerators than before")

// Accelerators is what the agent needs of a gpu.Monitor.
type Accelerators interface {
	// Inventory is what the node has, as last known, and how old that is; nil if nothing ever was.
	Inventory() (*nodev1.GpuInventory, time.Duration)
	// Readings is the last reading; nil if there is none.
	Readings() *nodev1.GpuHealth
	// Health is what is wrong.
	Health() []gpu.Finding
	// Changed is closed at the next change of what is wrong.
	Changed() <-chan struct{}
	// Forget drops what is remembered of one: its errors, and if the driver no longer lists it the accelerator itself.
	Forget(uuid string)
	// Processes asks who uses them.
	Processes(ctx context.Context) ([]*nodev1.GpuProcess, error)
}

// SpecGPUs are the accelerators as the specification of a node with so many CPUs has them; nil if none is known. CPUs close to them that the
// node does not offer are left out.
func SpecGPUs(inv *nodev1.GpuInventory, cpus uint32) []*apiv1.Gpu {
	if len(inv.GetDevices()) == 0 {
		return nil
	}
	entries := gpu.Entries(inv)
	for _, e := range entries {
		e.CpuMask = below(e.CpuMask, int(cpus))
	}
	return entries
}

// watcher is the state of gpuLoop, which alone uses it.
type watcher struct {
	a     *Agent
	began time.Time
	// left are processes of no job, asked when they may have changed.
	left    []gpu.Finding
	askAt   time.Time
	changed time.Time // since when the inventory is another than the specification
	// resumed is the last time that an operator put the node back to work, as far as it was taken in.
	resumed time.Time
}

// gpuLoop keeps the conditions of accelerators. It returns true if the node has others than it said, for good.
func (a *Agent) gpuLoop(ctx context.Context) bool {
	w := &watcher{a: a, began: time.Now(), askAt: time.Now().Add(processesFirst)}
	for {
		changed := a.cfg.Accelerators.Changed()
		now := time.Now()
		w.forget()
		if w.inventory(now) {
			return true
		}
		if !now.Before(w.askAt) {
			w.processes(ctx)
		}
		w.judge(now)
		wait := min(healthEvery, time.Until(w.askAt))
		if !w.changed.IsZero() {
			wait = min(wait, inventorySettle)
		}
		if a.cfg.Accelerators.Readings() == nil {
			wait = min(wait, unknownAfter/4)
		}
		timer := time.NewTimer(max(wait, time.Second))
		select {
		case <-ctx.Done():
			timer.Stop()
			return false
		case <-changed:
		case <-a.resumed:
		case <-a.used: // a job has left: who is still there?
			w.askAt = time.Now().Add(processesSettle)
		case <-timer.C:
		}
		timer.Stop()
	}
}

// forget drops the errors that are older than the last time that an operator put the node back to work: they were looked after. What is still
// the case is found again.
func (w *watcher) forget() {
	resumed := w.a.ailments.lastResume()
	if !resumed.After(w.resumed) {
		return
	}
	w.resumed = resumed
	done := map[string]bool{}
	for _, f := range w.a.cfg.Accelerators.Health() {
		if f.UUID != "" && f.Since.Before(resumed) && f.Code != gpu.CodeProcessLeft && !done[f.UUID] {
			done[f.UUID] = true
			w.a.log.Info("an operator put the node back to work: errors of a GPU are forgotten", "gpu", f.UUID, "code", f.Code)
			w.a.cfg.Accelerators.Forget(f.UUID)
		}
	}
}

// inventory reports whether the node has other accelerators than it said, long enough that they are not about to come back.
func (w *watcher) inventory(now time.Time) bool {
	inv, _ := w.a.cfg.Accelerators.Inventory()
	if inv == nil || slices.EqualFunc(SpecGPUs(inv, w.a.cfg.Spec.GetCpus()), w.a.cfg.Spec.GetGpus(), func(x, y *apiv1.Gpu) bool { return proto.Equal(x, y) }) {
		w.changed = time.Time{}
		return false
	}
	if w.changed.IsZero() {
		w.changed = now
	}
	return now.Sub(w.changed) >= inventorySettle
}

// judge makes conditions of what is known. Nothing is said before the first answer, or before it is overdue: what the controllers know
// from before stays until then.
func (w *watcher) judge(now time.Time) {
	m := w.a.cfg.Accelerators
	if m.Readings() == nil && now.Sub(w.began) < unknownAfter {
		return
	}
	var findings []gpu.Finding
	for _, f := range m.Health() {
		if f.UUID != "" || len(f.Devices) > 0 || f.Verdict != gpu.Unknown {
			findings = append(findings, f)
			continue
		}
		// That a probe says nothing says nothing of the devices: they stay as usable as they were.
		if f.Since.IsZero() || now.Sub(f.Since) >= unknownAfter || m.Readings() == nil {
			f.Code, f.Severity, f.EndsWork = codeGPUUnknown, gpu.SeverityInfo, false
			findings = append(findings, f)
		}
	}
	inv, _ := m.Inventory()
	list := gpu.Conditions(inv, append(findings, w.left...))
	entries := len(w.a.cfg.Spec.GetGpus())
	for _, c := range list {
		c.GpuMask = below(c.GpuMask, entries)
	}
	// Of a device that the controllers do not know yet nothing can be said; a condition about nothing but such would be one of the node.
	list = slices.DeleteFunc(list, func(c *apiv1.Condition) bool {
		return len(c.GpuMask) == 0 && c.Severity == severityFailed
	})
	w.a.found(ownerGPU, list[:min(len(list), maxGPUConditions)])
}

// below cuts devices with numbers of n or more off.
func below(mask []uint64, n int) []uint64 {
	cut := slices.Clone(mask)
	for i := range cut {
		switch from := 64 * i; {
		case from >= n:
			cut[i] = 0
		case n-from < 64:
			cut[i] &= 1<<(n-from) - 1
		}
	}
	for len(cut) > 0 && cut[len(cut)-1] == 0 {
		cut = cut[:len(cut)-1]
	}
	return cut
}

// processes asks who uses the accelerators, and finds those who belong to no job.
func (w *watcher) processes(ctx context.Context) {
	a := w.a
	inv, _ := a.cfg.Accelerators.Inventory()
	w.askAt = time.Now().Add(processesEvery)
	if len(inv.GetDevices()) == 0 {
		return
	}
	list, err := a.cfg.Accelerators.Processes(ctx)
	if err != nil { // what was found before stays: an answer that is missing says nothing
		a.log.Debug("nobody knows who uses the GPUs", "err", err)
		return
	}
	w.left = gpu.Left(inv, list, a.owned())
	if len(w.left) > 0 {
		w.askAt = time.Now().Add(processesAgain)
	}
}

// owned returns a function that tells whether a process belongs to a step that is here.
func (a *Agent) owned() func(pid uint32) bool {
	a.mu.Lock()
	cookies := map[string]bool{}
	for _, at := range a.attempts {
		for _, s := range at.steps {
			if !s.phase.over() {
				cookies[s.record.GetCookie()] = true
			}
		}
	}
	a.mu.Unlock()
	return func(pid uint32) bool {
		for range maxAncestors {
			if pid <= 1 {
				return false
			}
			if cookies[cookieOf(pid)] {
				return true
			}
			parent, err := parentOf(pid)
			if err != nil {
				return false
			}
			pid = parent
		}
		return false
	}
}

// cookieOf is the mark of a step in the environment with which a process began; empty if it has none.
func cookieOf(pid uint32) string {
	data, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(int(pid)), "environ"))
	if err != nil {
		return ""
	}
	for variable := range strings.SplitSeq(string(data), "\x00") {
		if cookie, ok := strings.CutPrefix(variable, "MUSTER_STEP_COOKIE="); ok {
			return cookie
		}
	}
	return ""
}

func parentOf(pid uint32) (uint32, error) {
	data, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(int(pid)), "stat"))
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(data[strings.LastIndexByte(string(data), ')')+1:]))
	if len(fields) < 2 {
		return 0, fmt.Errorf("read the parent of process %d", pid)
	}
	parent, err := strconv.ParseUint(fields[1], 10, 32)
	return uint32(parent), err
}
