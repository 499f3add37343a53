//go:build cgo

package main

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
)

func (l *library) health() *nodev1.GpuHealth {
	h := &nodev1.GpuHealth{}
	why := l.gpus(func(index int, d nvml.Device, ret nvml.Return) {
		r := &reader{r: &nodev1.GpuReading{Index: uint32(index)}, d: d}
		h.Gpus = append(h.Gpus, r.r)
		if ret != nvml.SUCCESS {
			r.failed("reach it", ret)
			return
		}
		r.read(l)
	})
	if why != nil {
		return &nodev1.GpuHealth{Unknown: why}
	}
	return h
}

// reader reads one GPU. What the device does not offer stays unset; what it offers and can't tell is noted. Nothing more is
// asked of a GPU that is lost: each question may take seconds.
type reader struct {
	r *nodev1.GpuReading
	d nvml.Device
}

// failed notes an answer other than SUCCESS and reports whether there was one.
func (r *reader) failed(what string, ret nvml.Return) bool {
	switch {
	case ret == nvml.SUCCESS:
		return false
	case unusable(ret):
		r.r.Lost = true
	case ret == nvml.ERROR_RESET_REQUIRED:
		r.r.Recovery = nodev1.GpuRecovery_GPU_RECOVERY_RESET
	case absent(ret):
		return true
	}
	r.r.Errors = append(r.r.Errors, what+": "+said(ret))
	return true
}

// number keeps a number if it was read.
func number[N uint32 | uint64, M uint32 | uint64](r *reader, to **M, what string, n N, ret nvml.Return) {
	if !r.failed(what, ret) {
		m := M(n)
		*to = &m
	}
}

func (r *reader) read(l *library) {
	uuid, ret := r.d.GetUUID()
	if r.failed("UUID", ret) {
		return
	}
	r.r.Uuid = uuid
	for _, part := range []func(*library){r.heat, r.power, r.memoryErrors, r.remapping, r.links, r.fabric, r.fields, r.use} {
		if part(l); r.r.Lost {
			return
		}
	}
}

func (r *reader) heat(*library) {
	n, ret := r.d.GetTemperature(nvml.TEMPERATURE_GPU)
	number(r, &r.r.TemperatureC, "temperature", n, ret)
	n, ret = r.d.GetTemperatureThreshold(nvml.TEMPERATURE_THRESHOLD_SLOWDOWN)
	number(r, &r.r.SlowdownC, "temperature of slowdown", n, ret)
	n, ret = r.d.GetTemperatureThreshold(nvml.TEMPERATURE_THRESHOLD_SHUTDOWN)
	number(r, &r.r.ShutdownC, "temperature of shutdown", n, ret)
	n, ret = r.d.GetTemperatureThreshold(nvml.TEMPERATURE_THRESHOLD_MEM_MAX)
	number(r, &r.r.MemoryMaxC, "highest temperature of memory", n, ret)
}

func (r *reader) power(*library) {
	n, ret := r.d.GetPowerUsage()
	number(r, &r.r.PowerMw, "power", n, ret)
	n, ret = r.d.GetEnforcedPowerLimit()
	number(r, &r.r.PowerLimitMw, "power limit", n, ret)
	reasons, ret := r.d.GetCurrentClocksThrottleReasons()
	if r.failed("reasons of low clocks", ret) {
		return
	}
	for _, s := range []struct {
		bit  uint64
		says nodev1.GpuSlowdown
	}{
		{nvml.ClocksThrottleReasonHwSlowdown, nodev1.GpuSlowdown_GPU_SLOWDOWN_HARDWARE},
		{nvml.ClocksThrottleReasonHwThermalSlowdown, nodev1.GpuSlowdown_GPU_SLOWDOWN_HARDWARE_THERMAL},
		{nvml.ClocksThrottleReasonHwPowerBrakeSlowdown, nodev1.GpuSlowdown_GPU_SLOWDOWN_POWER_BRAKE},
		{nvml.ClocksThrottleReasonSwThermalSlowdown, nodev1.GpuSlowdown_GPU_SLOWDOWN_SOFTWARE_THERMAL},
	} {
		if reasons&s.bit != 0 {
			r.r.Slowdowns = append(r.r.Slowdowns, s.says)
		}
	}
}

func (r *reader) memoryErrors(l *library) {
	mode, _, ret := r.d.GetEccMode()
	if r.failed("mode of error correction", ret) || mode != nvml.FEATURE_ENABLED {
		return
	}
	n, ret := r.d.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_CORRECTED, nvml.VOLATILE_ECC)
	number(r, &r.r.EccCorrected, "corrected memory errors", n, ret)
	n, ret = r.d.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.VOLATILE_ECC)
	number(r, &r.r.EccUncorrected, "uncorrected memory errors", n, ret)
	n, ret = r.d.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.AGGREGATE_ECC)
	number(r, &r.r.EccUncorrectedLifetime, "uncorrected memory errors of its life", n, ret)
	if !l.has("nvmlDeviceGetSramEccErrorStatus") {
		return
	}
	status, ret := r.d.GetSramEccErrorStatus()
	if !r.failed("errors of on-chip memory", ret) {
		exceeded := status.BThresholdExceeded != 0
		r.r.SramThresholdExceeded = &exceeded
	}
}

// remapping reads about rows, or on devices before Ampere about pages.
func (r *reader) remapping(*library) {
	corrected, uncorrected, pending, failure, ret := r.d.GetRemappedRows()
	if ret == nvml.ERROR_NOT_SUPPORTED {
		state, ret := r.d.GetRetiredPagesPendingStatus()
		if !r.failed("retired pages", ret) {
			pending := state == nvml.FEATURE_ENABLED
			r.r.RemapPending = &pending
		}
		return
	}
	if r.failed("remapped rows", ret) {
		return
	}
	c, u := uint32(corrected), uint32(uncorrected)
	r.r.RowsRemappedCorrected, r.r.RowsRemappedUncorrected = &c, &u
	r.r.RemapPending, r.r.RemapFailed = &pending, &failure
}

func (r *reader) links(*library) {
	has, active, errors := false, uint32(0), uint64(0)
	for link := range nvml.NVLINK_MAX_LINKS {
		state, ret := r.d.GetNvLinkState(link)
		if ret == nvml.ERROR_INVALID_ARGUMENT || r.failed(fmt.Sprintf("NVLink %d", link), ret) {
			break
		}
		has = true
		if state != nvml.FEATURE_ENABLED {
			continue
		}
		active++
		for _, counter := range []nvml.NvLinkErrorCounter{nvml.NVLINK_ERROR_DL_REPLAY, nvml.NVLINK_ERROR_DL_RECOVERY} {
			// Counters that the device lacks add nothing.
			if n, ret := r.d.GetNvLinkErrorCounter(link, counter); ret == nvml.SUCCESS {
				errors += n
			}
		}
	}
	if has {
		r.r.NvlinksActive, r.r.NvlinkErrors = &active, &errors
	}
}

func (r *reader) fabric(l *library) {
	if !l.has("nvmlDeviceGetGpuFabricInfo") {
		return
	}
	info, ret := r.d.GetGpuFabricInfo()
	if r.failed("NVSwitch fabric", ret) {
		return
	}
	switch info.State {
	case nvml.GPU_FABRIC_STATE_NOT_SUPPORTED:
	case nvml.GPU_FABRIC_STATE_NOT_STARTED:
		r.r.Fabric = nodev1.GpuFabric_GPU_FABRIC_NOT_STARTED
	case nvml.GPU_FABRIC_STATE_IN_PROGRESS:
		r.r.Fabric = nodev1.GpuFabric_GPU_FABRIC_IN_PROGRESS
	case nvml.GPU_FABRIC_STATE_COMPLETED:
		r.r.Fabric = nodev1.GpuFabric_GPU_FABRIC_COMPLETED
		if nvml.Return(info.Status) != nvml.SUCCESS {
			r.r.Fabric = nodev1.GpuFabric_GPU_FABRIC_FAILED
		}
	}
}

// recoveries are the driver's numbers of what must be done (nvmlDeviceGpuRecoveryAction_t).
var recoveries = []nodev1.GpuRecovery{
	nodev1.GpuRecovery_GPU_RECOVERY_NONE, nodev1.GpuRecovery_GPU_RECOVERY_RESET, nodev1.GpuRecovery_GPU_RECOVERY_REBOOT,
	nodev1.GpuRecovery_GPU_RECOVERY_DRAIN_PEERS, nodev1.GpuRecovery_GPU_RECOVERY_DRAIN_AND_RESET,
}

// fields reads what is offered by number only; a device or driver that does not know a number says so for that number.
func (r *reader) fields(*library) {
	values := []nvml.FieldValue{{FieldId: nvml.FI_DEV_MEMORY_TEMP}, {FieldId: nvml.FI_DEV_GET_GPU_RECOVERY_ACTION}}
	if r.failed("fields", r.d.GetFieldValues(values)) {
		return
	}
	if v := values[0]; nvml.Return(v.NvmlReturn) == nvml.SUCCESS {
		n := binary.NativeEndian.Uint32(v.Value[:4])
		r.r.MemoryTemperatureC = &n
	}
	if v := values[1]; nvml.Return(v.NvmlReturn) == nvml.SUCCESS {
		// A driver that wants a reset says so in errors, too; "none" must not hide that.
		if n := binary.NativeEndian.Uint32(v.Value[:4]); n < uint32(len(recoveries)) && recoveries[n] > r.r.Recovery {
			r.r.Recovery = recoveries[n]
		}
	}
}

func (r *reader) use(*library) {
	u, ret := r.d.GetUtilizationRates()
	if !r.failed("utilisation", ret) {
		r.r.UtilizationPercent, r.r.MemoryUtilizationPercent = &u.Gpu, &u.Memory
	}
	m, ret := r.d.GetMemoryInfo()
	if !r.failed("memory in use", ret) {
		used, total := m.Used>>20, m.Total>>20
		r.r.MemoryUsedMb, r.r.MemoryTotalMb = &used, &total
	}
	if p, ret := r.d.GetComputeRunningProcesses(); !r.failed("processes", ret) {
		n := uint32(len(p))
		r.r.Processes = &n
	}
}

// unknownMemory is what NVML says where a process's memory is not known.
const unknownMemory = ^uint64(0)

func (l *library) processes() *nodev1.GpuProcesses {
	all := &nodev1.GpuProcesses{}
	why := l.gpus(func(index int, d nvml.Device, ret nvml.Return) {
		if ret != nvml.SUCCESS {
			all.Unread = append(all.Unread, uint32(index))
			return
		}
		uuid, _ := d.GetUUID()
		compute, retC := d.GetComputeRunningProcesses()
		graphics, retG := d.GetGraphicsRunningProcesses()
		if retC != nvml.SUCCESS || retG != nvml.SUCCESS && !absent(retG) {
			all.Unread = append(all.Unread, uint32(index))
		}
		if retC == nvml.SUCCESS {
			all.Processes = append(all.Processes, l.users(index, uuid, nodev1.GpuUse_GPU_USE_COMPUTE, compute)...)
		}
		if retG == nvml.SUCCESS {
			all.Processes = append(all.Processes, l.users(index, uuid, nodev1.GpuUse_GPU_USE_GRAPHICS, graphics)...)
		}
	})
	if why != nil {
		return &nodev1.GpuProcesses{Unknown: why}
	}
	slices.SortStableFunc(all.Processes, func(a, b *nodev1.GpuProcess) int {
		return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.Pid, b.Pid))
	})
	return all
}

func (l *library) users(index int, uuid string, use nodev1.GpuUse, list []nvml.ProcessInfo) []*nodev1.GpuProcess {
	users := make([]*nodev1.GpuProcess, 0, len(list))
	for _, p := range list {
		u := &nodev1.GpuProcess{Index: uint32(index), Uuid: uuid, Pid: p.Pid, Use: use}
		if p.UsedGpuMemory != unknownMemory {
			mb := p.UsedGpuMemory >> 20
			u.MemoryMb = &mb
		}
		if p.GpuInstanceId != noInstance {
			u.GpuInstance = &p.GpuInstanceId
		}
		if p.ComputeInstanceId != noInstance {
			u.ComputeInstance = &p.ComputeInstanceId
		}
		u.Command, u.Uid = l.host.process(p.Pid)
		users = append(users, u)
	}
	return users
}
