package gpu

import (
	"cmp"
	"fmt"
	"slices"

	"google.golang.org/protobuf/proto"

	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
)

// Merge returns a fresh inventory with the numbers and the devices that are remembered of a known one (nil at first):
//   - A device keeps its number. A new one at the PCI address of one that is gone takes that one's; every other gets the
//     lowest free number, by index and instance. GPUs in MIG mode have none, their instances have.
//   - A GPU that the driver lists and can't describe is the one known by that index.
//   - A GPU that the driver no longer lists stays, as lost, with its MIG instances.
//   - A MIG instance that is gone while its GPU is there was destroyed, and its number is free.
//   - The most NVLinks that were up are kept.
//
// Neither argument is changed.
func Merge(known, fresh *nodev1.GpuInventory) *nodev1.GpuInventory {
	m := merger{out: proto.CloneOf(fresh), known: known.GetDevices(), present: map[string]bool{}}
	for _, d := range m.out.Devices {
		d.Number = nil
		if d.Uuid != "" {
			m.present[d.Uuid] = true
		}
	}
	m.recogniseByIndex()
	m.keepLost()
	m.number()
	for _, d := range m.out.Devices {
		d.NvlinksBest = max(d.NvlinksBest, d.NvlinksActive)
		for _, k := range m.known {
			if k.Uuid == d.Uuid {
				d.NvlinksBest = max(d.NvlinksBest, k.NvlinksBest)
			}
		}
	}
	return m.out
}

type merger struct {
	out     *nodev1.GpuInventory
	known   []*nodev1.GpuDevice
	present map[string]bool
}

// recogniseByIndex fills in the GPUs that could not be described.
func (m *merger) recogniseByIndex() {
	for i, d := range m.out.Devices {
		if d.Uuid != "" {
			continue
		}
		for _, k := range m.known {
			if k.Mig == nil && k.Index == d.Index && k.Uuid != "" && !m.present[k.Uuid] && !k.Missing {
				m.out.Devices[i] = withFault(k, d)
				m.present[k.Uuid] = true
				m.keepInstances(k.Uuid, d)
				break
			}
		}
	}
}

// keepLost keeps the GPUs that are no longer listed, unless another one stands in their place.
func (m *merger) keepLost() {
	places := map[string]bool{}
	for _, d := range m.out.Devices {
		if d.Mig == nil && d.PciAddress != "" {
			places[d.PciAddress] = true
		}
	}
	for _, k := range m.known {
		if k.Mig != nil || k.Uuid == "" || m.present[k.Uuid] || places[k.PciAddress] {
			continue
		}
		gone := &nodev1.GpuDevice{
			Lost: true, Missing: true, Fault: fmt.Sprintf("the driver no longer lists GPU %s at %s", k.Uuid, k.PciAddress),
		}
		m.out.Devices = append(m.out.Devices, withFault(k, gone))
		m.keepInstances(k.Uuid, gone)
	}
}

// keepInstances keeps the MIG instances of a GPU that shares what is said of it.
func (m *merger) keepInstances(parent string, says *nodev1.GpuDevice) {
	for _, k := range m.known {
		if k.Mig.GetParentUuid() == parent && !m.present[k.Uuid] {
			m.out.Devices = append(m.out.Devices, withFault(k, says))
			m.present[k.Uuid] = true
		}
	}
}

// withFault is a known device with what is said of it now.
func withFault(k, says *nodev1.GpuDevice) *nodev1.GpuDevice {
	d := proto.CloneOf(k)
	d.Number, d.Lost, d.Missing, d.Fault = nil, says.Lost, says.Missing, says.Fault
	return d
}

// number gives every device that can be allocated its number.
func (m *merger) number() {
	slices.SortStableFunc(m.out.Devices, func(a, b *nodev1.GpuDevice) int {
		return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(rank(a), rank(b)),
			cmp.Compare(a.Mig.GetGpuInstance(), b.Mig.GetGpuInstance()), cmp.Compare(a.Mig.GetComputeInstance(), b.Mig.GetComputeInstance()))
	})
	byUUID, byPlace := map[string]uint32{}, map[string]uint32{}
	for _, k := range m.known {
		if k.Number == nil {
			continue
		}
		byUUID[k.Uuid] = *k.Number
		if k.Mig == nil && !m.present[k.Uuid] {
			byPlace[k.PciAddress] = *k.Number
		}
	}
	taken := map[uint32]bool{}
	give := func(d *nodev1.GpuDevice, n uint32, ok bool) {
		if ok && d.Number == nil && !taken[n] {
			d.Number, taken[n] = &n, true
		}
	}
	for _, numbers := range []func(d *nodev1.GpuDevice) (uint32, bool){
		func(d *nodev1.GpuDevice) (uint32, bool) { n, ok := byUUID[d.Uuid]; return n, ok },
		func(d *nodev1.GpuDevice) (uint32, bool) { n, ok := byPlace[d.PciAddress]; return n, ok && d.Mig == nil },
		func(*nodev1.GpuDevice) (uint32, bool) { return lowestFree(taken), true },
	} {
		for _, d := range m.out.Devices {
			if allocatable(d) {
				n, ok := numbers(d)
				give(d, n, ok)
			}
		}
	}
}

// rank orders devices of one index: a GPU, its instances, then lost ones that had that index.
func rank(d *nodev1.GpuDevice) int {
	switch {
	case d.Missing:
		return 2
	case d.Mig != nil:
		return 1
	default:
		return 0
	}
}

// allocatable reports whether a device has a number: whole GPUs and MIG instances whose identity is known.
func allocatable(d *nodev1.GpuDevice) bool { return d.Uuid != "" && !d.MigEnabled }

func lowestFree(taken map[uint32]bool) uint32 {
	n := uint32(0)
	for taken[n] {
		n++
	}
	return n
}

// Numbers returns the numbers of a GPU by its UUID: its own, or those of its MIG instances; ascending.
func Numbers(inv *nodev1.GpuInventory, gpu string) []uint32 {
	var all []uint32
	for _, d := range inv.GetDevices() {
		if d.Number != nil && gpu != "" && (d.Uuid == gpu || d.Mig.GetParentUuid() == gpu) {
			all = append(all, *d.Number)
		}
	}
	slices.Sort(all)
	return all
}

// ByNumber returns the devices that can be allocated, by number.
func ByNumber(inv *nodev1.GpuInventory) map[uint32]*nodev1.GpuDevice {
	all := map[uint32]*nodev1.GpuDevice{}
	for _, d := range inv.GetDevices() {
		if d.Number != nil {
			all[*d.Number] = d
		}
	}
	return all
}
