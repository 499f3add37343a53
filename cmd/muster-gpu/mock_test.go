//go:build cgo

package main

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/muster-hpc/muster/node/gpu"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
)

// asked runs a verb on a pretended machine.
func asked[M proto.Message](t *testing.T, verb, machine, faults string, answer M) M {
	t.Helper()
	o := options{mock: machine}
	if faults != "" {
		o.faults = faultFile(t, filepath.Join(t.TempDir(), "faults"), faults)
	}
	var out bytes.Buffer
	if err := run(o, verb, &out); err != nil {
		t.Fatalf("%s of %s: %v", verb, machine, err)
	}
	if err := protojson.Unmarshal(out.Bytes(), answer); err != nil {
		t.Fatalf("%s of %s: %v", verb, machine, err)
	}
	return answer
}

// faultFile writes faults so that no reader sees half of them.
func faultFile(t *testing.T, path, faults string) string {
	t.Helper()
	if err := os.WriteFile(path+".new", []byte(faults), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestTheInventoryOfEveryMachineIsComplete(t *testing.T) {
	for machine, want := range map[string]struct {
		kind   string
		memory uint64
		links  uint32
	}{"dgxa100": {"a100", 40960, 12}, "dgxh100": {"h100", 81920, 18}, "dgxh200": {"h200", 144384, 18}, "dgxb200": {"b200", 184320, 18}} {
		inv := asked(t, "inventory", machine+":seed", "", &nodev1.GpuInventory{})
		if inv.Unknown != nil || !inv.Mock || inv.DriverVersion == "" || inv.CudaVersion == "" || inv.GetPciGpus() != 8 || len(inv.Devices) != 8 || len(inv.Pairs) != 28 {
			t.Fatalf("%s: %v", machine, inv)
		}
		uuids := map[string]bool{}
		for i, d := range inv.Devices {
			uuids[d.Uuid] = true
			if d.Index != uint32(i) || d.Type != want.kind || d.Nvlinks != want.links || d.NvlinksActive != want.links || d.Minor == nil ||
				d.GetNumaNode() != uint32(i/4) || d.Cpus == "" || len(d.PciAddress) != len("0000:1b:00.0") || d.ComputeCapability == "" || d.Serial == "" {
				t.Errorf("%s: %v", machine, d)
			}
			if d.MemoryMb < want.memory-4096 || d.MemoryMb > want.memory+4096 {
				t.Errorf("%s has %d MiB", machine, d.MemoryMb)
			}
		}
		if len(uuids) != 8 {
			t.Errorf("%s has UUIDs %v", machine, uuids)
		}
		for _, p := range inv.Pairs {
			if p.A >= p.B || p.Nvlinks != want.links || (p.Path == nodev1.GpuPath_GPU_PATH_NUMA_NODE) != (p.A/4 == p.B/4) {
				t.Errorf("%s: %v", machine, p)
			}
		}
		again := asked(t, "inventory", machine+":seed", "", &nodev1.GpuInventory{})
		if !proto.Equal(inv, again) {
			t.Errorf("%s is another machine the second time", machine)
		}
		if other := asked(t, "inventory", machine+":other", "", &nodev1.GpuInventory{}); uuids[other.Devices[0].Uuid] {
			t.Errorf("%s has the same UUIDs with another seed", machine)
		}
	}
}

func TestMIGInstancesAreRead(t *testing.T) {
	inv := asked(t, "inventory", "dgxh100", `{"gpus": {"1": {"mig": ["1g.10gb", "2g.20gb", "4g.40gb"]}}}`, &nodev1.GpuInventory{})
	if len(inv.Devices) != 11 || !inv.Devices[1].MigEnabled || inv.Devices[0].MigEnabled {
		t.Fatalf("%v", inv.Devices)
	}
	for i, profile := range []string{"1g.10gb", "2g.20gb", "4g.40gb"} {
		d := inv.Devices[2+i]
		if d.Type != profile || d.Mig.GetProfile() != profile || d.Mig.GetParentUuid() != inv.Devices[1].Uuid || d.Index != 1 ||
			!strings.HasPrefix(d.Uuid, "MIG-") || d.Mig.GpuInstanceCap == nil || d.Mig.ComputeInstanceCap == nil || d.MemoryMb == 0 || d.GetMinor() != 1 {
			t.Errorf("instance %d: %v", i, d)
		}
	}
}

func TestAHealthyMachineReadsWell(t *testing.T) {
	h := asked(t, "health", "dgxh100", "", &nodev1.GpuHealth{})
	inv := asked(t, "inventory", "dgxh100", "", &nodev1.GpuInventory{})
	if len(h.Gpus) != 8 {
		t.Fatalf("%v", h)
	}
	r := h.Gpus[0]
	if r.TemperatureC == nil || r.SlowdownC == nil || r.ShutdownC == nil || r.MemoryTemperatureC == nil || r.PowerMw == nil || r.PowerLimitMw == nil ||
		r.EccCorrected == nil || r.EccUncorrected == nil || r.RemapPending == nil || r.NvlinksActive == nil || r.UtilizationPercent == nil ||
		r.MemoryTotalMb == nil || r.Processes == nil || r.Recovery != nodev1.GpuRecovery_GPU_RECOVERY_NONE || r.Fabric != nodev1.GpuFabric_GPU_FABRIC_COMPLETED {
		t.Errorf("%v", r)
	}
	if found := gpu.Judge(gpu.Facts{Inventory: gpu.Merge(nil, inv), Health: h}, time.Now()); len(found) != 0 {
		t.Errorf("a healthy machine: %+v", found)
	}
}

func TestFaultsAreRead(t *testing.T) {
	for faults, want := range map[string]string{
		`{"gpus": {"3": {"state": "lost"}}}`:                          gpu.CodeLost,
		`{"gpus": {"3": {"temperature_c": 95}}}`:                      gpu.CodeHot,
		`{"gpus": {"3": {"slowdowns": ["power_brake"]}}}`:             gpu.CodeSlowed,
		`{"gpus": {"3": {"ecc_uncorrected": 4}}}`:                     gpu.CodeMemoryErrors,
		`{"gpus": {"3": {"sram_threshold_exceeded": true}}}`:          gpu.CodeOnChipErrors,
		`{"gpus": {"3": {"remap_pending": true}}}`:                    gpu.CodeRemapPending,
		`{"gpus": {"3": {"remap_failed": true, "rows_remapped": 8}}}`: gpu.CodeRemapFailed,
		`{"gpus": {"3": {"nvlinks_down": 2}}}`:                        gpu.CodeLinksDown,
		`{"gpus": {"3": {"recovery": "reset"}}}`:                      gpu.CodeRecovery,
		`{"gpus": {"3": {"fabric": "in_progress"}}}`:                  gpu.CodeFabric,
	} {
		h := asked(t, "health", "dgxh100", faults, &nodev1.GpuHealth{})
		inv := gpu.Merge(nil, asked(t, "inventory", "dgxh100", "", &nodev1.GpuInventory{}))
		found := gpu.Judge(gpu.Facts{Inventory: inv, Health: h}, time.Now())
		if len(found) != 1 || found[0].Code != want || !slices.Equal(found[0].Devices, []uint32{3}) {
			t.Errorf("%s: %+v", faults, found)
		}
	}
	for driver, want := range map[string]nodev1.GpuUnknownCode{
		"library": nodev1.GpuUnknownCode_GPU_UNKNOWN_CODE_NO_LIBRARY, "driver": nodev1.GpuUnknownCode_GPU_UNKNOWN_CODE_NO_DRIVER,
		"mismatch": nodev1.GpuUnknownCode_GPU_UNKNOWN_CODE_VERSION_MISMATCH,
	} {
		if u := asked(t, "health", "dgxh100", `{"driver": "`+driver+`"}`, &nodev1.GpuHealth{}).Unknown; u.GetCode() != want {
			t.Errorf("%s: %v", driver, u)
		}
	}
}

func TestFaultsThatAreNotKnownAreRefused(t *testing.T) {
	for _, faults := range []string{
		`{`, `{"hang": 3}`, `{"driver": "odd"}`, `{"gpus": {"x": {}}}`, `{"gpus": {"1": {"state": "odd"}}}`, `{"gpus": {"1": {"slowdowns": ["odd"]}}}`,
		`{"gpus": {"1": {"recovery": "odd"}}}`, `{"gpus": {"1": {"fabric": "odd"}}}`, `{"gpus": {"1": {"vanish": true}}}`,
	} {
		if _, err := parseFaults([]byte(faults)); err == nil {
			t.Errorf("%s is taken", faults)
		}
	}
	for _, o := range []options{{mock: "dgx1"}, {mock: "dgxh100", faults: filepath.Join(t.TempDir(), "none")}} {
		if err := run(o, "inventory", io.Discard); err == nil {
			t.Errorf("%+v is taken", o)
		}
	}
}

func TestProcessesAreRead(t *testing.T) {
	faults := `{"gpus": {"2": {"processes": [{"pid": 1, "memory_mb": 512}]}, "5": {"state": "lost"}}}`
	all := asked(t, "processes", "dgxh100", faults, &nodev1.GpuProcesses{})
	if len(all.Processes) != 1 || !slices.Equal(all.Unread, []uint32{5}) {
		t.Fatalf("%v", all)
	}
	if p := all.Processes[0]; p.Index != 2 || p.Pid != 1 || p.GetMemoryMb() != 512 || p.Command == "" || p.Use != nodev1.GpuUse_GPU_USE_COMPUTE {
		t.Errorf("%v", p)
	}
}

// cluster is an agent's monitor over a pretended machine, as muster dev has it.
type cluster struct {
	t      *testing.T
	m      *gpu.Monitor
	faults string
}

func newCluster(t *testing.T, change func(*gpu.Config)) *cluster {
	t.Helper()
	c := &cluster{t: t, faults: faultFile(t, filepath.Join(t.TempDir(), "faults"), `{}`)}
	cfg := gpu.Config{
		Program: os.Args[0], Args: []string{"--mock", "dgxh100:n1", "--mock-faults", c.faults}, Timeout: 20 * time.Second,
		Interval: 20 * time.Millisecond, Log: slog.New(slog.NewTextHandler(io.Discard, nil)),
	}
	if change != nil {
		change(&cfg)
	}
	c.m = gpu.Open(cfg)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		c.m.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	c.await("all well", func(f []gpu.Finding) bool { return len(f) == 0 })
	return c
}

func (c *cluster) await(what string, want func([]gpu.Finding) bool) {
	c.t.Helper()
	deadline := time.After(60 * time.Second)
	for {
		changed := c.m.Changed()
		found := c.m.Health()
		if want(found) {
			return
		}
		select {
		case <-changed:
		case <-deadline:
			c.t.Fatalf("%s: not within 60 s; findings are %+v", what, found)
		}
	}
}

func only(code string, devices ...uint32) func([]gpu.Finding) bool {
	return func(all []gpu.Finding) bool {
		return len(all) == 1 && all[0].Code == code && slices.Equal(all[0].Devices, devices)
	}
}

func TestAGPUThatVanishesUnderAJobIsMissingUntilItIsBack(t *testing.T) {
	c := newCluster(t, nil)
	before, _ := c.m.Inventory()
	for state, code := range map[string]string{"missing": gpu.CodeMissing, "lost": gpu.CodeLost} {
		faultFile(t, c.faults, `{"gpus": {"3": {"state": "`+state+`"}}}`)
		c.await(state, func(all []gpu.Finding) bool {
			return slices.ContainsFunc(all, func(f gpu.Finding) bool { return f.Code == code && f.EndsWork && slices.Equal(f.Devices, []uint32{3}) }) &&
				gpu.VerdictOn(all, 3) == gpu.Failed && gpu.VerdictOn(all, 4) == gpu.OK
		})
		inv, _ := c.m.Inventory()
		for n, d := range gpu.ByNumber(inv) {
			if want := gpu.ByNumber(before)[n].Uuid; d.Uuid != want {
				t.Errorf("%s: device %d is %s and was %s", state, n, d.Uuid, want)
			}
		}
		faultFile(t, c.faults, `{}`)
		c.await("it is back", func(f []gpu.Finding) bool { return len(f) == 0 })
	}
}

func TestAnErrorUnderAJobIsReportedAtOnceAndRemembered(t *testing.T) {
	// The next reading is far away: the error does not wait for it.
	c := newCluster(t, func(cfg *gpu.Config) { cfg.Interval = time.Hour })
	faultFile(t, c.faults, `{"gpus": {"6": {"xids": [31, 79]}}}`)
	c.await("XID 79", func(all []gpu.Finding) bool {
		return len(all) == 2 && all[0].Code == "GPU_XID_79" && all[0].EndsWork && all[1].Code == "GPU_XID_31" && !all[1].EndsWork && all[0].Devices[0] == 6
	})
}

func TestADriverThatHangsAndComesBackWasUnknown(t *testing.T) {
	c := newCluster(t, func(cfg *gpu.Config) { cfg.Timeout = 2 * time.Second })
	faultFile(t, c.faults, `{"hang_s": 3600}`)
	c.await("unknown", only(gpu.CodeProbeTimeout))
	if inv, _ := c.m.Inventory(); len(gpu.ByNumber(inv)) != 8 {
		t.Errorf("the inventory is forgotten: %v", inv)
	}
	faultFile(t, c.faults, `{}`)
	c.await("well again", func(f []gpu.Finding) bool { return len(f) == 0 })
}

func TestADriverThatIsUnloadedIsUnknown(t *testing.T) {
	c := newCluster(t, nil)
	faultFile(t, c.faults, `{"driver": "driver"}`)
	c.await("unknown", only(gpu.CodeDriverUnknown))
	faultFile(t, c.faults, `{}`)
	c.await("well again", func(f []gpu.Finding) bool { return len(f) == 0 })
}

func TestAProcessLeftOnAGPUIsFound(t *testing.T) {
	c := newCluster(t, nil)
	faultFile(t, c.faults, `{"gpus": {"2": {"processes": [{"pid": 1, "memory_mb": 512}]}}}`)
	processes, err := c.m.Processes(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	inv, _ := c.m.Inventory()
	nobody := func(uint32) bool { return false }
	if found := gpu.Left(inv, processes, nobody); len(found) != 1 || found[0].Code != gpu.CodeProcessLeft || found[0].Devices[0] != 2 {
		t.Errorf("%+v", found)
	}
	if found := gpu.Left(inv, processes, func(pid uint32) bool { return pid == 1 }); len(found) != 0 {
		t.Errorf("a job's process: %+v", found)
	}
}

func TestChangedMIGInstancesAreNoticedWithinSomeReadings(t *testing.T) {
	c := newCluster(t, nil)
	faultFile(t, c.faults, `{"gpus": {"1": {"mig": ["3g.40gb", "3g.40gb"]}}}`)
	deadline := time.After(60 * time.Second)
	for {
		changed := c.m.Changed()
		if inv, _ := c.m.Inventory(); len(gpu.ByNumber(inv)) == 9 {
			return
		}
		select {
		case <-changed:
		case <-deadline:
			inv, _ := c.m.Inventory()
			t.Fatalf("not within 60 s; devices are %v", gpu.ByNumber(inv))
		}
	}
}
