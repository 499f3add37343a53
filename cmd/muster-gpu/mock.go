//go:build cgo

package main

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/dgxa100"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/dgxb200"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/dgxh100"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/dgxh200"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/server"

	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
)

// pretended is a machine of NVIDIA's mock servers, which know what such machines consist of; what they lack (links,
// telemetry, processes, errors) is added here. Faults come from a file, which is read again whenever the GPUs are counted
// (each reading begins so) and while errors are waited for.
type pretended struct {
	server *server.Server
	path   string
	links  int
	faults faults
	// reported is how many of each GPU's errors were handed out.
	reported map[int]int
	// instances are the MIG instances of each GPU, made when its faults ask for them.
	instances map[int]*instances
}

var machines = map[string]struct {
	build func() *server.Server
	links int
}{
	"dgxa100": {dgxa100.New, 12}, "dgxh100": {dgxh100.New, 18}, "dgxh200": {dgxh200.New, 18}, "dgxb200": {dgxb200.New, 18},
}

func openMock(o options) (probe, *nodev1.GpuUnknown, error) {
	name, seed, _ := strings.Cut(o.mock, ":")
	kind, ok := machines[name]
	if !ok {
		return nil, nil, fmt.Errorf("--mock %q is no machine that can be pretended: dgxa100, dgxh100, dgxh200 or dgxb200", name)
	}
	p := &pretended{server: kind.build(), path: o.faults, links: kind.links, reported: map[int]int{}, instances: map[int]*instances{}}
	if err := p.refresh(); err != nil {
		return nil, nil, err
	}
	p.server.InitFunc = func() nvml.Return { return p.faults.init() }
	p.server.DeviceGetCountFunc = p.count
	p.server.DeviceGetHandleByIndexFunc = p.handle
	p.server.EventSetCreateFunc = func() (nvml.EventSet, nvml.Return) {
		return &mock.EventSet{WaitFunc: p.wait, FreeFunc: func() nvml.Return { return nvml.SUCCESS }}, nvml.SUCCESS
	}
	for i, d := range p.server.Devices {
		p.furnish(i, d.(*server.Device), seed)
	}
	l := &library{nvml: p.server, host: pretendedHost{p}, mock: true}
	if why := l.init(); why != nil {
		return nil, why, nil
	}
	return l, nil, nil
}

// refresh reads the faults again, and hangs if they say so.
func (p *pretended) refresh() error {
	if p.path == "" {
		return nil
	}
	text, err := os.ReadFile(p.path)
	if err != nil {
		return fmt.Errorf("read the faults of the pretended machine: %w", err)
	}
	f, err := parseFaults(text)
	if err != nil {
		return fmt.Errorf("read the faults of the pretended machine in %s: %w", p.path, err)
	}
	p.faults = f
	if f.HangS > 0 {
		time.Sleep(time.Duration(f.HangS * float64(time.Second)))
	}
	return nil
}

// listed returns the GPUs that the driver lists: all but the missing ones.
func (p *pretended) listed() []int {
	var all []int
	for i := range p.server.Devices {
		if p.faults.of(i).State != "missing" {
			all = append(all, i)
		}
	}
	return all
}

func (p *pretended) count() (int, nvml.Return) {
	if err := p.refresh(); err != nil {
		fmt.Fprintln(os.Stderr, "muster-gpu:", err)
		return 0, nvml.ERROR_UNKNOWN
	}
	if ret := p.faults.init(); ret != nvml.SUCCESS {
		return 0, ret
	}
	return len(p.listed()), nvml.SUCCESS
}

func (p *pretended) handle(index int) (nvml.Device, nvml.Return) {
	listed := p.listed()
	if index < 0 || index >= len(listed) {
		return nil, nvml.ERROR_INVALID_ARGUMENT
	}
	i := listed[index]
	if p.faults.of(i).State == "lost" {
		return nil, nvml.ERROR_GPU_IS_LOST
	}
	return p.server.Devices[i], nvml.SUCCESS
}

// wait returns the next error of any GPU.
func (p *pretended) wait(timeoutMS uint32) (nvml.EventData, nvml.Return) {
	const look = 50 * time.Millisecond
	for end := time.Now().Add(time.Duration(timeoutMS) * time.Millisecond); ; time.Sleep(min(look, max(0, time.Until(end)))) {
		if err := p.refresh(); err != nil {
			fmt.Fprintln(os.Stderr, "muster-gpu:", err)
		}
		for i, d := range p.server.Devices {
			if xids := p.faults.of(i).Xids; p.reported[i] < len(xids) {
				p.reported[i]++
				return nvml.EventData{
					Device: d, EventType: nvml.EventTypeXidCriticalError, EventData: uint64(xids[p.reported[i]-1]),
					GpuInstanceId: noInstance, ComputeInstanceId: noInstance,
				}, nvml.SUCCESS
			}
		}
		if !time.Now().Before(end) {
			return nvml.EventData{}, nvml.ERROR_TIMEOUT
		}
	}
}

// uuid makes the same id for the same machine, seed and number every time.
func uuid(prefix string, parts ...any) string {
	h := sha256.Sum256([]byte(fmt.Sprint(parts...)))
	return fmt.Sprintf("%s-%x-%x-%x-%x-%x", prefix, h[0:4], h[4:6], h[6:8], h[8:10], h[10:16])
}

// furnish gives a GPU what the mock server leaves out.
func (p *pretended) furnish(i int, d *server.Device, seed string) {
	d.UUID = uuid("GPU", d.Config.Name, seed, i)
	d.GetPciInfoFunc = func() (nvml.PciInfo, nvml.Return) { return pciOf(i), nvml.SUCCESS }
	d.GetSerialFunc = func() (string, nvml.Return) { return fmt.Sprintf("16500%08d", i), nvml.SUCCESS }
	d.GetTopologyCommonAncestorFunc = func(other nvml.Device) (nvml.GpuTopologyLevel, nvml.Return) {
		if o, ok := other.(*server.Device); ok && o.Index/4 == i/4 {
			return nvml.TOPOLOGY_NODE, nvml.SUCCESS
		}
		return nvml.TOPOLOGY_SYSTEM, nvml.SUCCESS
	}
	d.GetNvLinkStateFunc = func(link int) (nvml.EnableState, nvml.Return) {
		switch {
		case link >= p.links:
			return 0, nvml.ERROR_INVALID_ARGUMENT
		case link < p.faults.of(i).NvlinksDown:
			return nvml.FEATURE_DISABLED, nvml.SUCCESS
		}
		return nvml.FEATURE_ENABLED, nvml.SUCCESS
	}
	d.GetNvLinkRemoteDeviceTypeFunc = func(int) (nvml.IntNvLinkDeviceType, nvml.Return) {
		return nvml.NVLINK_DEVICE_TYPE_SWITCH, nvml.SUCCESS
	}
	d.GetNvLinkErrorCounterFunc = func(int, nvml.NvLinkErrorCounter) (uint64, nvml.Return) { return 0, nvml.SUCCESS }
	d.RegisterEventsFunc = func(uint64, nvml.EventSet) nvml.Return { return nvml.SUCCESS }
	p.furnishTelemetry(i, d)
	p.furnishMIG(i, d, seed)
}

// pciOf gives the GPUs the addresses of a DGX H100.
func pciOf(i int) nvml.PciInfo {
	buses := []uint32{0x1b, 0x43, 0x52, 0x61, 0x9d, 0xc3, 0xd1, 0xdf}
	return nvml.PciInfo{Bus: buses[i%len(buses)], Domain: uint32(i / len(buses))}
}

// furnishTelemetry makes an idle, healthy GPU with its faults.
func (p *pretended) furnishTelemetry(i int, d *server.Device) {
	f := func() gpuFault { return p.faults.of(i) }
	d.GetTemperatureFunc = func(nvml.TemperatureSensors) (uint32, nvml.Return) {
		if t := f().TemperatureC; t != 0 {
			return t, nvml.SUCCESS
		}
		return 34 + uint32(i), nvml.SUCCESS
	}
	d.GetTemperatureThresholdFunc = func(t nvml.TemperatureThresholds) (uint32, nvml.Return) {
		limits := map[nvml.TemperatureThresholds]uint32{
			nvml.TEMPERATURE_THRESHOLD_SLOWDOWN: 89, nvml.TEMPERATURE_THRESHOLD_SHUTDOWN: 92, nvml.TEMPERATURE_THRESHOLD_MEM_MAX: 95,
		}
		return limits[t], nvml.SUCCESS
	}
	d.GetPowerUsageFunc = func() (uint32, nvml.Return) { return 72_000, nvml.SUCCESS }
	d.GetEnforcedPowerLimitFunc = func() (uint32, nvml.Return) { return 700_000, nvml.SUCCESS }
	d.GetCurrentClocksThrottleReasonsFunc = func() (uint64, nvml.Return) { return f().slowdown() | nvml.ClocksThrottleReasonGpuIdle, nvml.SUCCESS }
	d.GetEccModeFunc = func() (nvml.EnableState, nvml.EnableState, nvml.Return) {
		return nvml.FEATURE_ENABLED, nvml.FEATURE_ENABLED, nvml.SUCCESS
	}
	d.GetTotalEccErrorsFunc = func(kind nvml.MemoryErrorType, _ nvml.EccCounterType) (uint64, nvml.Return) {
		if kind == nvml.MEMORY_ERROR_TYPE_CORRECTED {
			return f().EccCorrected, nvml.SUCCESS
		}
		return f().EccUncorrected, nvml.SUCCESS
	}
	d.GetSramEccErrorStatusFunc = func() (nvml.EccSramErrorStatus, nvml.Return) {
		var s nvml.EccSramErrorStatus
		if f().SramThresholdExceeded {
			s.BThresholdExceeded = 1
		}
		return s, nvml.SUCCESS
	}
	d.GetRemappedRowsFunc = func() (int, int, bool, bool, nvml.Return) {
		return 0, int(f().RowsRemapped), f().RemapPending, f().RemapFailed, nvml.SUCCESS
	}
	d.GetGpuFabricInfoFunc = func() (nvml.GpuFabricInfo, nvml.Return) {
		return nvml.GpuFabricInfo{State: f().fabric()}, nvml.SUCCESS
	}
	d.GetFieldValuesFunc = func(values []nvml.FieldValue) nvml.Return {
		for k := range values {
			n := uint32(40)
			if values[k].FieldId == nvml.FI_DEV_GET_GPU_RECOVERY_ACTION {
				n = f().recovery()
			}
			values[k].NvmlReturn = uint32(nvml.SUCCESS)
			binary.NativeEndian.PutUint32(values[k].Value[:4], n)
		}
		return nvml.SUCCESS
	}
	d.GetUtilizationRatesFunc = func() (nvml.Utilization, nvml.Return) {
		return nvml.Utilization{Gpu: f().UtilizationPercent}, nvml.SUCCESS
	}
	d.GetComputeRunningProcessesFunc = func() ([]nvml.ProcessInfo, nvml.Return) {
		var all []nvml.ProcessInfo
		for _, q := range f().Processes {
			all = append(all, nvml.ProcessInfo{Pid: q.PID, UsedGpuMemory: q.MemoryMB << 20, GpuInstanceId: noInstance, ComputeInstanceId: noInstance})
		}
		return all, nvml.SUCCESS
	}
	d.GetGraphicsRunningProcessesFunc = func() ([]nvml.ProcessInfo, nvml.Return) { return nil, nvml.SUCCESS }
}

// pretendedHost is a machine with two NUMA nodes of 56 cores with two threads, as a DGX H100 has.
type pretendedHost struct{ p *pretended }

func (h pretendedHost) half(pci string) (uint32, bool) {
	for i := range h.p.server.Devices {
		if address(pciOf(i)) == pci {
			return uint32(i / 4 % 2), true
		}
	}
	return 0, false
}

func (h pretendedHost) numaNode(pci string) *uint32 {
	if n, ok := h.half(pci); ok {
		return &n
	}
	return nil
}

func (h pretendedHost) cpus(pci string) string {
	if n, ok := h.half(pci); ok {
		return []string{"0-55,112-167", "56-111,168-223"}[n]
	}
	return ""
}

func (h pretendedHost) onBus() *uint32 {
	n := uint32(len(h.p.server.Devices))
	return &n
}

// capability numbers as the driver does: one for each GPU and GPU instance, and one for each of up to 8 compute instances.
func (h pretendedHost) capability(minor, gpuInstance, computeInstance int) *uint32 {
	n := uint32(3 + minor*135 + gpuInstance*9 + 1 + computeInstance)
	return &n
}

func (h pretendedHost) process(pid uint32) (string, *uint32) {
	return machine{proc: "/proc"}.process(pid)
}
