//go:build cgo

package main

import (
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
)

// card is a GPU while an inventory is read.
type card struct {
	device nvml.Device
	says   *nodev1.GpuDevice
	// toSwitches is how many of its active NVLinks end at NVSwitches; toPCI how many end at the GPU of a PCI address.
	toSwitches uint32
	toPCI      map[string]uint32
}

func (l *library) inventory() *nodev1.GpuInventory {
	inv := &nodev1.GpuInventory{Mock: l.mock, PciGpus: l.host.onBus()}
	inv.DriverVersion, _ = l.nvml.SystemGetDriverVersion()
	inv.NvmlVersion, _ = l.nvml.SystemGetNVMLVersion()
	if v, ret := l.nvml.SystemGetCudaDriverVersion(); ret == nvml.SUCCESS {
		inv.CudaVersion = fmt.Sprintf("%d.%d", v/1000, v%1000/10)
	}
	var gpus []*card
	why := l.gpus(func(index int, d nvml.Device, ret nvml.Return) {
		g := &card{device: d, says: &nodev1.GpuDevice{Index: uint32(index)}}
		if ret == nvml.SUCCESS {
			ret = l.describe(g)
		}
		if ret != nvml.SUCCESS {
			g.says.Lost, g.says.Fault = unusable(ret), fmt.Sprintf("the driver lists GPU %d and can't describe it: %s", index, said(ret))
		} else {
			gpus = append(gpus, g)
		}
		inv.Devices = append(inv.Devices, g.says)
		if ret == nvml.SUCCESS && g.says.MigEnabled {
			inv.Devices = append(inv.Devices, l.instances(g)...)
		}
	})
	if why != nil {
		return &nodev1.GpuInventory{Unknown: why, Mock: l.mock, PciGpus: inv.PciGpus}
	}
	for i, a := range gpus {
		for _, b := range gpus[i+1:] {
			inv.Pairs = append(inv.Pairs, l.pair(a, b))
		}
	}
	return inv
}

// describe fills in what a GPU is. An answer other than SUCCESS means that the GPU can't be used.
func (l *library) describe(g *card) nvml.Return {
	d, s := g.device, g.says
	var ret nvml.Return
	if s.Uuid, ret = d.GetUUID(); ret != nvml.SUCCESS {
		return ret
	}
	if s.Model, ret = d.GetName(); ret != nvml.SUCCESS {
		return ret
	}
	memory, ret := d.GetMemoryInfo()
	if ret != nvml.SUCCESS {
		return ret
	}
	pci, ret := d.GetPciInfo()
	if ret != nvml.SUCCESS {
		return ret
	}
	s.Type, s.MemoryMb, s.PciAddress = typeOf(s.Model), memory.Total>>20, address(pci)
	s.NumaNode, s.Cpus = l.host.numaNode(s.PciAddress), l.host.cpus(s.PciAddress)
	if minor, ret := d.GetMinorNumber(); ret == nvml.SUCCESS && minor >= 0 {
		m := uint32(minor)
		s.Minor = &m
	}
	if serial, ret := d.GetSerial(); ret == nvml.SUCCESS {
		s.Serial = serial
	}
	if major, minor, ret := d.GetCudaComputeCapability(); ret == nvml.SUCCESS {
		s.ComputeCapability = fmt.Sprintf("%d.%d", major, minor)
	}
	if current, pending, ret := d.GetMigMode(); ret == nvml.SUCCESS {
		s.MigEnabled, s.MigPending = current == nvml.DEVICE_MIG_ENABLE, current != pending
	}
	l.links(g)
	return nvml.SUCCESS
}

// address writes a PCI address as sysfs does: four digits of the domain, where NVML writes eight.
func address(p nvml.PciInfo) string {
	return fmt.Sprintf("%04x:%02x:%02x.0", p.Domain, p.Bus, p.Device)
}

// links reads where a GPU's NVLinks go. A GPU that has none answers "not supported" for the first, and "invalid argument" comes behind
// the last.
func (l *library) links(g *card) {
	g.toPCI = map[string]uint32{}
	for link := range nvml.NVLINK_MAX_LINKS {
		state, ret := g.device.GetNvLinkState(link)
		if ret == nvml.ERROR_INVALID_ARGUMENT {
			break
		}
		if ret != nvml.SUCCESS {
			continue
		}
		g.says.Nvlinks++
		if state != nvml.FEATURE_ENABLED {
			continue
		}
		g.says.NvlinksActive++
		if l.has("nvmlDeviceGetNvLinkRemoteDeviceType") {
			if kind, ret := g.device.GetNvLinkRemoteDeviceType(link); ret == nvml.SUCCESS && kind == nvml.NVLINK_DEVICE_TYPE_SWITCH {
				g.toSwitches++
				continue
			}
		}
		if remote, ret := g.device.GetNvLinkRemotePciInfo(link); ret == nvml.SUCCESS {
			g.toPCI[address(remote)]++
		}
	}
}

func (l *library) pair(a, b *card) *nodev1.GpuPair {
	p := &nodev1.GpuPair{A: a.says.Index, B: b.says.Index}
	p.Nvlinks = min(a.toSwitches, b.toSwitches) + min(a.toPCI[b.says.PciAddress], b.toPCI[a.says.PciAddress])
	level, ret := a.device.GetTopologyCommonAncestor(b.device)
	if ret != nvml.SUCCESS {
		return p
	}
	switch level {
	case nvml.TOPOLOGY_INTERNAL:
		p.Path = nodev1.GpuPath_GPU_PATH_BOARD
	case nvml.TOPOLOGY_SINGLE:
		p.Path = nodev1.GpuPath_GPU_PATH_SWITCH
	case nvml.TOPOLOGY_MULTIPLE:
		p.Path = nodev1.GpuPath_GPU_PATH_SWITCHES
	case nvml.TOPOLOGY_HOSTBRIDGE:
		p.Path = nodev1.GpuPath_GPU_PATH_HOST_BRIDGE
	case nvml.TOPOLOGY_NODE:
		p.Path = nodev1.GpuPath_GPU_PATH_NUMA_NODE
	case nvml.TOPOLOGY_SYSTEM:
		p.Path = nodev1.GpuPath_GPU_PATH_SYSTEM
	}
	return p
}

// instances reads the MIG instances of a GPU.
func (l *library) instances(g *card) []*nodev1.GpuDevice {
	most, ret := g.device.GetMaxMigDeviceCount()
	if ret != nvml.SUCCESS {
		return nil
	}
	var all []*nodev1.GpuDevice
	for i := range most {
		d, ret := g.device.GetMigDeviceHandleByIndex(i)
		if ret != nvml.SUCCESS {
			// Numbers that no instance has answer "not found".
			continue
		}
		if m := l.instance(g, d); m != nil {
			all = append(all, m)
		}
	}
	return all
}

// instance reads one MIG instance; nil if it went away meanwhile.
func (l *library) instance(g *card, d nvml.Device) *nodev1.GpuDevice {
	uuid, ret := d.GetUUID()
	if ret != nvml.SUCCESS {
		return nil
	}
	gi, ret := d.GetGpuInstanceId()
	if ret != nvml.SUCCESS {
		return nil
	}
	ci, ret := d.GetComputeInstanceId()
	if ret != nvml.SUCCESS {
		return nil
	}
	slices, ret := d.GetAttributes()
	if ret != nvml.SUCCESS {
		return nil
	}
	name, _ := d.GetName()
	profile := profileOf(name, slices.GpuInstanceSliceCount, slices.ComputeInstanceSliceCount, slices.MemorySizeMB, g.says.MemoryMb)
	s := &nodev1.GpuDevice{
		Index: g.says.Index, Uuid: uuid, Model: g.says.Model, Type: profile, MemoryMb: slices.MemorySizeMB,
		PciAddress: g.says.PciAddress, NumaNode: g.says.NumaNode, Cpus: g.says.Cpus, Minor: g.says.Minor,
		Serial: g.says.Serial, ComputeCapability: g.says.ComputeCapability,
		Mig: &nodev1.GpuMig{ParentUuid: g.says.Uuid, GpuInstance: uint32(gi), ComputeInstance: uint32(ci), Profile: profile},
	}
	if g.says.Minor != nil {
		minor := int(*g.says.Minor)
		s.Mig.GpuInstanceCap, s.Mig.ComputeInstanceCap = l.host.capability(minor, gi, -1), l.host.capability(minor, gi, ci)
	}
	return s
}
