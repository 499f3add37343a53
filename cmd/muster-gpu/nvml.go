//go:build cgo

package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
)

// library is a probe over NVML, real or pretended.
//
// Functions that came with later drivers are called only after has: a symbol that the loaded library lacks ends the
// process. Older ones are those of the drivers for the first GPUs with MIG (release 450), the oldest supported.
type library struct {
	nvml nvml.Interface
	host host
	mock bool

	events nvml.EventSet
	// names are of the GPUs whose errors are reported: asking a GPU that just fell off the bus for its name may hang.
	names map[nvml.Device]*nodev1.GpuXid
	// listening are the UUIDs of the GPUs that are registered.
	listening map[string]bool
	known     map[string]bool
}

// open loads the library. Nothing else of NVML may be called before that succeeded.
func open(o options) (probe, *nodev1.GpuUnknown, error) {
	if o.mock != "" {
		return openMock(o)
	}
	l := &library{nvml: nvml.New(), host: machine{sys: "/sys", proc: "/proc"}}
	if why := l.init(); why != nil {
		return nil, why, nil
	}
	return l, nil, nil
}

func (l *library) init() *nodev1.GpuUnknown {
	if ret := l.nvml.Init(); ret != nvml.SUCCESS {
		return unknown("load the driver's library", ret)
	}
	l.known = map[string]bool{}
	return nil
}

func (l *library) close() {
	if l.events != nil {
		l.events.Free()
	}
	// A failing Shutdown leaves nothing behind that matters to a process that reads.
	l.nvml.Shutdown()
}

// has reports whether the loaded library has a function.
func (l *library) has(symbol string) bool {
	has, asked := l.known[symbol]
	if !asked {
		has = l.nvml.Extensions().LookupSymbol(symbol) == nil
		l.known[symbol] = has
	}
	return has
}

// unknown says why nothing is known after a call that all others depend on.
func unknown(doing string, ret nvml.Return) *nodev1.GpuUnknown {
	u := &nodev1.GpuUnknown{Code: nodev1.GpuUnknownCode_GPU_UNKNOWN_CODE_NVML_ERROR}
	advice := "see the kernel's log"
	switch ret {
	case nvml.ERROR_LIBRARY_NOT_FOUND:
		u.Code, advice = nodev1.GpuUnknownCode_GPU_UNKNOWN_CODE_NO_LIBRARY, "install the driver's libnvidia-ml.so.1, if the machine has GPUs"
	case nvml.ERROR_DRIVER_NOT_LOADED:
		u.Code, advice = nodev1.GpuUnknownCode_GPU_UNKNOWN_CODE_NO_DRIVER, "load the kernel module nvidia, if the machine has GPUs"
	case nvml.ERROR_LIB_RM_VERSION_MISMATCH:
		u.Code, advice = nodev1.GpuUnknownCode_GPU_UNKNOWN_CODE_VERSION_MISMATCH, "reboot the node, or load the kernel module of the library's version"
	case nvml.ERROR_NO_PERMISSION:
		u.Code, advice = nodev1.GpuUnknownCode_GPU_UNKNOWN_CODE_NO_PERMISSION, "run it as a user who may open /dev/nvidiactl"
	}
	u.Sentence = fmt.Sprintf("unknown: could not %s: %s; %s", doing, said(ret), advice)
	return u
}

// said is the library's text for an error, without its name in capitals where there is something better.
func said(ret nvml.Return) string {
	return strings.ToLower(strings.ReplaceAll(strings.TrimPrefix(ret.Error(), "ERROR_"), "_", " "))
}

// unusable reports whether an answer says that the GPU is gone or can't work. Everything else, such as a driver that
// takes too long or an error that it calls unknown, says nothing about the GPU.
func unusable(ret nvml.Return) bool {
	switch ret {
	case nvml.ERROR_GPU_IS_LOST, nvml.ERROR_GPU_NOT_FOUND, nvml.ERROR_INSUFFICIENT_POWER, nvml.ERROR_IRQ_ISSUE:
		return true
	}
	return false
}

// absent reports whether an answer says that the device or driver has no such thing, which is normal.
func absent(ret nvml.Return) bool {
	switch ret {
	case nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_FUNCTION_NOT_FOUND, nvml.ERROR_NO_DATA, nvml.ERROR_DEPRECATED,
		nvml.ERROR_ARGUMENT_VERSION_MISMATCH, nvml.ERROR_NOT_FOUND, nvml.ERROR_NO_PERMISSION:
		return true
	}
	return false
}

// gpus calls f for every GPU that the driver lists; the device is nil if it can't be reached, then ret says why.
func (l *library) gpus(f func(index int, d nvml.Device, ret nvml.Return)) *nodev1.GpuUnknown {
	count, ret := l.nvml.DeviceGetCount()
	if ret != nvml.SUCCESS {
		return unknown("count the GPUs", ret)
	}
	for i := range count {
		d, ret := l.nvml.DeviceGetHandleByIndex(i)
		if ret != nvml.SUCCESS {
			f(i, nil, ret)
			continue
		}
		f(i, d, ret)
	}
	return nil
}

// listen registers for the errors of all GPUs that are not registered yet. The set of events is kept, so that none that
// waits in it gets lost.
func (l *library) listen() {
	if l.events == nil {
		events, ret := l.nvml.EventSetCreate()
		if ret != nvml.SUCCESS {
			return // Then health alone tells of errors.
		}
		l.events, l.names = events, map[nvml.Device]*nodev1.GpuXid{}
	}
	reached := map[string]bool{}
	l.gpus(func(index int, d nvml.Device, ret nvml.Return) {
		if ret != nvml.SUCCESS {
			return
		}
		uuid, ret := d.GetUUID()
		if ret != nvml.SUCCESS {
			return
		}
		if l.listening[uuid] || d.RegisterEvents(nvml.EventTypeXidCriticalError, l.events) == nvml.SUCCESS {
			reached[uuid] = true
			l.names[d] = &nodev1.GpuXid{Index: uint32(index), Uuid: uuid}
		}
	})
	// One that can't be reached is registered again when it is back; its name stays for the errors that wait.
	l.listening = reached
}

// noInstance is what NVML says where an event or a process concerns no MIG instance.
const noInstance = 0xFFFFFFFF

// listenAgain is the pause after a failed wait, so that nobody asks in a busy loop.
const listenAgain = time.Second

// wait returns the next error.
func (l *library) wait(timeout time.Duration) *nodev1.GpuXid {
	if len(l.listening) == 0 {
		time.Sleep(timeout)
		return nil
	}
	// NVML waits whole milliseconds; at least one, so that nobody asks in a busy loop.
	event, ret := l.events.Wait(uint32(max(1, timeout.Milliseconds())))
	switch ret {
	case nvml.SUCCESS:
	case nvml.ERROR_TIMEOUT:
		return nil
	default:
		// A lost GPU may make every wait fail, also for the others: listen anew to those that can be reached.
		l.events.Free()
		l.events, l.listening = nil, nil
		time.Sleep(min(listenAgain, timeout))
		l.listen()
		return nil
	}
	if event.EventType&nvml.EventTypeXidCriticalError == 0 {
		return nil
	}
	xid := &nodev1.GpuXid{Xid: uint32(event.EventData)}
	if name := l.names[event.Device]; name != nil {
		xid.Index, xid.Uuid = name.Index, name.Uuid
	}
	if event.GpuInstanceId != noInstance {
		xid.GpuInstance = &event.GpuInstanceId
	}
	if event.ComputeInstanceId != noInstance {
		xid.ComputeInstance = &event.ComputeInstanceId
	}
	return xid
}
