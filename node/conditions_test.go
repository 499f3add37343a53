package node

import (
	"context"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"

	"github.com/muster-hpc/muster/node/gpu"
	"github.com/muster-hpc/muster/node/health"
)

// fakeGPUs are accelerators of which is known what a test says.
type fakeGPUs struct {
	mu        sync.Mutex
	inventory *nodev1.GpuInventory
	readings  *nodev1.GpuHealth
	findings  []gpu.Finding
	processes []*nodev1.GpuProcess
	changed   chan struct{}
}

func twoGPUs() *nodev1.GpuInventory {
	inv := &nodev1.GpuInventory{}
	for i := range uint32(2) {
		inv.Devices = append(inv.Devices, &nodev1.GpuDevice{Index: i, Number: &i, Uuid: "GPU-" + string('a'+rune(i)), Type: "h100", Cpus: "0-63"})
	}
	return inv
}

func (f *fakeGPUs) set(change func(*fakeGPUs)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change(f)
	close(f.changed)
	f.changed = make(chan struct{})
}

func (f *fakeGPUs) Inventory() (*nodev1.GpuInventory, time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.inventory, 0
}

func (f *fakeGPUs) Readings() *nodev1.GpuHealth {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.readings
}

func (f *fakeGPUs) Health() []gpu.Finding {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.findings
}

func (f *fakeGPUs) Changed() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.changed
}

func (f *fakeGPUs) Forget(uuid string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.findings = slices.DeleteFunc(f.findings, func(x gpu.Finding) bool { return x.UUID == uuid && x.Code == "GPU_XID_79" })
}

func (f *fakeGPUs) Processes(context.Context) ([]*nodev1.GpuProcess, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.processes, nil
}

// withGPUs runs the loop of accelerators of an agent that is otherwise still.
func withGPUs(t *testing.T, f *fakeGPUs, gpus []*apiv1.Gpu, test func(a *Agent, other <-chan bool)) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		f.changed = make(chan struct{})
		a := &Agent{
			log: slog.New(slog.DiscardHandler), news: make(chan struct{}, 1), used: make(chan struct{}, 1), resumed: make(chan struct{}, 1), attempts: map[attemptKey]*attempt{},
			cfg:    Config{Dir: dir, Spec: &apiv1.NodeSpec{Name: "n1", Cpus: 4, Gpus: gpus}, Accelerators: f},
			health: health.New(health.Config{Dir: filepath.Join(dir, "health"), Node: "n1", Log: slog.New(slog.DiscardHandler), Changed: func() {}}),
		}
		a.ailments.byOwner, a.ailments.judged = map[string][]*apiv1.Condition{}, map[string]bool{ownerAgent: true}
		ctx, cancel := context.WithCancel(t.Context())
		other := make(chan bool, 1)
		go func() { other <- a.gpuLoop(ctx) }()
		test(a, other)
		cancel()
		synctest.Wait()
	})
}

func TestAProbeThatSaysNothingIsNoFailureAndTakesNothingBack(t *testing.T) {
	f := &fakeGPUs{inventory: twoGPUs(), findings: []gpu.Finding{{
		Verdict: gpu.Unknown, Severity: gpu.SeverityDegraded, Code: gpu.CodeProbeTimeout, Reason: "unknown: no answer", EndsWork: true}}}
	withGPUs(t, f, SpecGPUs(twoGPUs(), 4), func(a *Agent, _ <-chan bool) {
		synctest.Wait()
		if _, known := a.conditions(); known {
			t.Error("something is said of GPUs that were never read: what was known before would be cleared")
		}
		time.Sleep(unknownAfter + time.Second)
		synctest.Wait()
		list, known := a.conditions()
		if !known || len(list) != 1 || list[0].Code != codeGPUUnknown || list[0].Severity != severityInfo || list[0].EndsWork {
			t.Fatalf("%v %v", known, list)
		}
		// A GPU that is known to be lost stays lost while the probe is silent.
		f.set(func(f *fakeGPUs) {
			f.findings = append(f.findings, gpu.Finding{Verdict: gpu.Failed, Severity: gpu.SeverityFailed, Code: gpu.CodeLost, UUID: "GPU-b", Devices: []uint32{1}, EndsWork: true})
		})
		synctest.Wait()
		list, _ = a.conditions()
		if len(list) != 2 || list[1].Severity != severityFailed || list[1].GpuMask[0] != 2 {
			t.Errorf("%v", list)
		}
	})
}

func TestTheNodeJoinsAgainWhenItsGPUsAreOthersForGood(t *testing.T) {
	f := &fakeGPUs{inventory: twoGPUs(), readings: &nodev1.GpuHealth{}}
	spec := SpecGPUs(twoGPUs(), 4)
	if spec[0].CpuMask[0] != 0xf {
		t.Errorf("CPUs that the node does not offer: %x", spec[0].CpuMask)
	}
	withGPUs(t, f, spec, func(a *Agent, other <-chan bool) {
		more := twoGPUs()
		number := uint32(2)
		more.Devices = append(more.Devices, &nodev1.GpuDevice{Index: 2, Number: &number, Uuid: "GPU-c", Type: "h100"})
		f.set(func(f *fakeGPUs) { f.inventory = more })
		time.Sleep(inventorySettle / 2)
		f.set(func(f *fakeGPUs) { f.inventory = twoGPUs() })
		time.Sleep(2 * inventorySettle)
		synctest.Wait()
		if len(other) > 0 {
			t.Fatal("it joins again for a moment's change")
		}
		f.set(func(f *fakeGPUs) { f.inventory = more })
		time.Sleep(2 * inventorySettle)
		synctest.Wait()
		if len(other) == 0 || !<-other {
			t.Error("it does not join again")
		}
	})
}

func TestAProcessOfNoJobOnAGPUIsAConditionUntilItIsGone(t *testing.T) {
	f := &fakeGPUs{inventory: twoGPUs(), readings: &nodev1.GpuHealth{}, processes: []*nodev1.GpuProcess{
		{Uuid: "GPU-b", Index: 1, Pid: 4242, Command: "python", Use: nodev1.GpuUse_GPU_USE_COMPUTE}}}
	withGPUs(t, f, SpecGPUs(twoGPUs(), 4), func(a *Agent, _ <-chan bool) {
		a.used <- struct{}{} // a job has left
		time.Sleep(processesSettle + time.Second)
		synctest.Wait()
		list, _ := a.conditions()
		if len(list) != 1 || list[0].Owner != "gpu" || list[0].Code != gpu.CodeProcessLeft || list[0].GpuMask[0] != 2 || !strings.Contains(list[0].Reason, "4242") {
			t.Fatalf("%v", list)
		}
		f.set(func(f *fakeGPUs) { f.processes = nil })
		time.Sleep(2 * processesAgain)
		synctest.Wait()
		if list, _ := a.conditions(); len(list) != 0 {
			t.Errorf("it is gone, and the condition stays: %v", list)
		}
	})
}

func TestErrorsOfAGPUAreForgottenWhenAnOperatorPutsTheNodeBackToWork(t *testing.T) {
	f := &fakeGPUs{inventory: twoGPUs(), readings: &nodev1.GpuHealth{}}
	withGPUs(t, f, SpecGPUs(twoGPUs(), 4), func(a *Agent, _ <-chan bool) {
		f.set(func(f *fakeGPUs) {
			f.findings = []gpu.Finding{{Verdict: gpu.Failed, Severity: gpu.SeverityFailed, Code: "GPU_XID_79", UUID: "GPU-a", Devices: []uint32{0}, Since: time.Now()}}
		})
		synctest.Wait()
		if list, _ := a.conditions(); len(list) != 1 {
			t.Fatalf("%v", list)
		}
		if a.drained(false) {
			t.Error("a node that was not drained is resumed")
		}
		if a.drained(true) || !a.ailments.drained {
			t.Error("a drain is no resume")
		}
		time.Sleep(time.Second)
		if !a.drained(false) {
			t.Error("the end of a drain is one")
		}
		a.poke(a.resumed)
		synctest.Wait()
		if list, _ := a.conditions(); len(list) != 0 {
			t.Errorf("the error is still remembered: %v", list)
		}
	})
}

func TestAProcessThatCannotBeKilledKeepsOnlyItsDevicesAndOnlyWhileItExists(t *testing.T) {
	sleeper := exec.Command("sleep", "1000")
	if err := sleeper.Start(); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "stuck")
	if err := os.WriteFile(path, []byte(`[{"step":"7.0","pid":`+strconv.Itoa(sleeper.Process.Pid)+`,"name":"python","waits":"nv_wait","gpus":[2]},`+
		`{"step":"6.0","pid":`+strconv.Itoa(sleeper.Process.Pid)+`,"start":1,"gpus":[1]}]`), 0o600); err != nil {
		t.Fatal(err)
	}
	var l ailments
	l.loadStuck(path)
	c := l.stuckTasks()
	if c == nil || c.Code != codeStuck || len(c.GpuMask) != 1 || c.GpuMask[0] != 2 || !strings.Contains(c.Reason, "nv_wait") || strings.Contains(c.Reason, "6.0") {
		t.Errorf("%v", c) // the second is another process with the same number
	}
	_, _ = sleeper.Process.Kill(), sleeper.Wait()
	if c := l.stuckTasks(); c != nil {
		t.Errorf("it is gone: %v", c)
	}
}

func TestAClockIsWrongOnlyIfSeveralAnswersSaySo(t *testing.T) {
	var l ailments
	now := time.Unix(1_000_000, 0)
	for i := range clockStrikes {
		if c := l.clock(); c != nil {
			t.Fatalf("after %d answers: %v", i, c)
		}
		l.told(now.Add(2*clockFar), now)
	}
	if c := l.clock(); c == nil || c.Severity != severityDegraded {
		t.Errorf("%v", c)
	}
	l.told(now, now)
	if c := l.clock(); c != nil {
		t.Errorf("it is right again: %v", c)
	}
}
