//go:build cgo

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// faults are what is wrong with a pretended machine: a JSON file such as
//
//	{"hang_s": 0, "driver": "", "gpus": {"3": {"state": "lost", "xids": [79]}, "0": {"mig": ["3g.40gb", "4g.40gb"]}}}
type faults struct {
	// HangS is for how many seconds every reading hangs.
	HangS float64 `json:"hang_s"`
	// Driver is "" or what is wrong with it: "library" (not there), "driver" (not loaded), "mismatch" (of versions).
	Driver string `json:"driver"`
	// GPUs by index.
	GPUs map[string]gpuFault `json:"gpus"`
}

// gpuFault is what is wrong with one GPU.
type gpuFault struct {
	// State is "", "lost" (listed, and can't be reached) or "missing" (no longer listed).
	State string `json:"state"`
	// Xids are reported in this order, each once in the life of the probe's process; append to it.
	Xids []uint32 `json:"xids"`
	// TemperatureC replaces the temperature if it is not 0.
	TemperatureC uint32 `json:"temperature_c"`
	// Slowdowns are reasons of low clocks: "hardware", "hardware_thermal", "power_brake", "software_thermal".
	Slowdowns []string `json:"slowdowns"`
	// EccCorrected and EccUncorrected are counts of memory errors.
	EccCorrected   uint64 `json:"ecc_corrected"`
	EccUncorrected uint64 `json:"ecc_uncorrected"`
	// SramThresholdExceeded, RowsRemapped, RemapPending and RemapFailed are as in the readings.
	SramThresholdExceeded bool   `json:"sram_threshold_exceeded"`
	RowsRemapped          uint32 `json:"rows_remapped"`
	RemapPending          bool   `json:"remap_pending"`
	RemapFailed           bool   `json:"remap_failed"`
	// NvlinksDown is how many of its links are down.
	NvlinksDown int `json:"nvlinks_down"`
	// Recovery is what the driver wants: "", "reset", "reboot", "drain_peers", "drain_and_reset".
	Recovery string `json:"recovery"`
	// Fabric is "" (joined), "not_started" or "in_progress".
	Fabric string `json:"fabric"`
	// UtilizationPercent is how busy it is.
	UtilizationPercent uint32 `json:"utilization_percent"`
	// Processes have a context on it.
	Processes []processFault `json:"processes"`
	// Mig has the profiles of its MIG instances; MIG is on if there are any.
	Mig []string `json:"mig"`
}

// processFault is a process on a GPU.
type processFault struct {
	// PID is its process id.
	PID uint32 `json:"pid"`
	// MemoryMB is its memory on the GPU in MiB.
	MemoryMB uint64 `json:"memory_mb"`
}

var drivers = map[string]nvml.Return{
	"": nvml.SUCCESS, "library": nvml.ERROR_LIBRARY_NOT_FOUND, "driver": nvml.ERROR_DRIVER_NOT_LOADED, "mismatch": nvml.ERROR_LIB_RM_VERSION_MISMATCH,
}

var slowdowns = map[string]uint64{
	"hardware": nvml.ClocksThrottleReasonHwSlowdown, "hardware_thermal": nvml.ClocksThrottleReasonHwThermalSlowdown,
	"power_brake": nvml.ClocksThrottleReasonHwPowerBrakeSlowdown, "software_thermal": nvml.ClocksThrottleReasonSwThermalSlowdown,
}

// recoveryNames are in the order of recoveries.
var recoveryNames = map[string]uint32{"": 0, "reset": 1, "reboot": 2, "drain_peers": 3, "drain_and_reset": 4}

var fabrics = map[string]uint8{
	"": nvml.GPU_FABRIC_STATE_COMPLETED, "not_started": nvml.GPU_FABRIC_STATE_NOT_STARTED, "in_progress": nvml.GPU_FABRIC_STATE_IN_PROGRESS,
}

// parseFaults reads the file and refuses what it does not know, so that no test waits for a fault that is never made.
func parseFaults(text []byte) (faults, error) {
	var f faults
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&f); err != nil {
		return f, err
	}
	if _, ok := drivers[f.Driver]; !ok {
		return f, fmt.Errorf("driver %q: library, driver or mismatch", f.Driver)
	}
	for index, g := range f.GPUs {
		if n, err := strconv.Atoi(index); err != nil || n < 0 {
			return f, fmt.Errorf("GPU %q is not an index", index)
		}
		if g.State != "" && g.State != "lost" && g.State != "missing" {
			return f, fmt.Errorf("state %q of GPU %s: lost or missing", g.State, index)
		}
		for _, s := range g.Slowdowns {
			if _, ok := slowdowns[s]; !ok {
				return f, fmt.Errorf("slowdown %q of GPU %s: hardware, hardware_thermal, power_brake or software_thermal", s, index)
			}
		}
		if _, ok := recoveryNames[g.Recovery]; !ok {
			return f, fmt.Errorf("recovery %q of GPU %s: reset, reboot, drain_peers or drain_and_reset", g.Recovery, index)
		}
		if _, ok := fabrics[g.Fabric]; !ok {
			return f, fmt.Errorf("fabric %q of GPU %s: not_started or in_progress", g.Fabric, index)
		}
	}
	return f, nil
}

func (f faults) of(gpu int) gpuFault { return f.GPUs[strconv.Itoa(gpu)] }

func (f faults) init() nvml.Return { return drivers[f.Driver] }

func (g gpuFault) slowdown() uint64 {
	bits := uint64(0)
	for _, s := range g.Slowdowns {
		bits |= slowdowns[s]
	}
	return bits
}

func (g gpuFault) recovery() uint32 { return recoveryNames[g.Recovery] }

func (g gpuFault) fabric() uint8 { return fabrics[g.Fabric] }
