package gpu

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"

	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
)

// withMIG turns a GPU's MIG mode on, with instances of these ids.
func withMIG(inv *nodev1.GpuInventory, gpu int, instances ...uint32) *nodev1.GpuInventory {
	at := slices.IndexFunc(inv.Devices, func(d *nodev1.GpuDevice) bool { return d.Mig == nil && d.Index == uint32(gpu) })
	parent := inv.Devices[at]
	parent.MigEnabled = true
	for k, id := range instances {
		inv.Devices = slices.Insert(inv.Devices, at+1+k, &nodev1.GpuDevice{
			Index: parent.Index, Uuid: fmt.Sprintf("MIG-%d-%d", gpu, id), Model: parent.Model, Type: "2g.20gb", MemoryMb: 19968,
			PciAddress: parent.PciAddress, NumaNode: parent.NumaNode, Minor: parent.Minor,
			Mig: &nodev1.GpuMig{
				ParentUuid: parent.Uuid, GpuInstance: id, Profile: "2g.20gb", GpuInstanceCap: proto.Uint32(10 + id), ComputeInstanceCap: proto.Uint32(11 + id),
			},
		})
	}
	return inv
}

// numbers returns the devices by number, as "number:uuid", and "lost" behind those that are.
func numbers(inv *nodev1.GpuInventory) []string {
	var all []string
	for n, d := range ByNumber(inv) {
		s := fmt.Sprintf("%d:%s", n, d.Uuid)
		if d.Lost {
			s += " lost"
		}
		all = append(all, s)
	}
	slices.Sort(all)
	return all
}

func expect(t *testing.T, what string, inv *nodev1.GpuInventory, want ...string) {
	t.Helper()
	if got := numbers(inv); !slices.Equal(got, want) {
		t.Errorf("%s: %v, want %v", what, got, want)
	}
}

func without(inv *nodev1.GpuInventory, gpu int) *nodev1.GpuInventory {
	inv.Devices = slices.DeleteFunc(inv.Devices, func(d *nodev1.GpuDevice) bool { return d.Index == uint32(gpu) })
	for i, d := range inv.Devices {
		d.Index = uint32(i)
	}
	inv.Pairs = nil
	return inv
}

func TestDevicesKeepTheirNumbers(t *testing.T) {
	all := Merge(nil, machineOf(3))
	expect(t, "at first", all, "0:GPU-0", "1:GPU-1", "2:GPU-2")
	fewer := Merge(all, without(machineOf(3), 1))
	expect(t, "one is no longer listed", fewer, "0:GPU-0", "1:GPU-1 lost", "2:GPU-2")
	if d := ByNumber(fewer)[1]; !d.Missing {
		t.Errorf("GPU 1 is not missing: %v", d)
	}
	expect(t, "still not listed", Merge(fewer, without(machineOf(3), 1)), "0:GPU-0", "1:GPU-1 lost", "2:GPU-2")
	expect(t, "it is back", Merge(fewer, machineOf(3)), "0:GPU-0", "1:GPU-1", "2:GPU-2")
	replaced := machineOf(3)
	replaced.Devices[1].Uuid = "GPU-new"
	expect(t, "another board in its place", Merge(fewer, replaced), "0:GPU-0", "1:GPU-new", "2:GPU-2")
	more := Merge(fewer, without(machineOf(4), 1))
	expect(t, "another one more", more, "0:GPU-0", "1:GPU-1 lost", "2:GPU-2", "3:GPU-3")
}

func TestAGPUThatCannotBeDescribedIsTheOneKnownByItsIndex(t *testing.T) {
	all := Merge(nil, machineOf(3))
	sick := machineOf(3)
	sick.Devices[1] = &nodev1.GpuDevice{Index: 1, Lost: true, Fault: "gone"}
	merged := Merge(all, sick)
	expect(t, "lost", merged, "0:GPU-0", "1:GPU-1 lost", "2:GPU-2")
	if d := ByNumber(merged)[1]; d.Missing || d.Fault != "gone" || d.MemoryMb != 81920 {
		t.Errorf("the lost GPU is %v", d)
	}
	sick.Devices[1].Lost = false
	expect(t, "unreadable", Merge(all, sick), "0:GPU-0", "1:GPU-1", "2:GPU-2")
	expect(t, "lost when there is no memory", Merge(nil, sick), "0:GPU-0", "1:GPU-2")
}

func TestMIGInstancesAreDevicesAndTheirGPUIsNot(t *testing.T) {
	all := Merge(nil, withMIG(machineOf(2), 0, 1, 2, 3))
	expect(t, "at first", all, "0:MIG-0-1", "1:MIG-0-2", "2:MIG-0-3", "3:GPU-1")
	fewer := Merge(all, withMIG(machineOf(2), 0, 1, 3))
	expect(t, "one was destroyed", fewer, "0:MIG-0-1", "2:MIG-0-3", "3:GPU-1")
	expect(t, "another was made", Merge(fewer, withMIG(machineOf(2), 0, 1, 3, 4)), "0:MIG-0-1", "1:MIG-0-4", "2:MIG-0-3", "3:GPU-1")
	expect(t, "MIG was turned off", Merge(fewer, machineOf(2)), "0:GPU-0", "3:GPU-1")
	lost := withMIG(machineOf(2), 0)
	lost.Devices[0] = &nodev1.GpuDevice{Index: 0, Lost: true, Fault: "gone"}
	expect(t, "the GPU is lost", Merge(fewer, lost), "0:MIG-0-1 lost", "2:MIG-0-3 lost", "3:GPU-1")
	if got := Numbers(fewer, "GPU-0"); !slices.Equal(got, []uint32{0, 2}) {
		t.Errorf("numbers of GPU 0 are %v", got)
	}
}

func TestTheMostLinksAreKept(t *testing.T) {
	down := machineOf(2)
	down.Devices[1].NvlinksActive = 3
	merged := Merge(Merge(Merge(nil, machineOf(2)), down), down)
	if d := ByNumber(merged)[1]; d.NvlinksActive != 3 || d.NvlinksBest != 18 {
		t.Errorf("%v", d)
	}
}

// TestNumbersAreUniqueAndStable takes machines through random changes.
func TestNumbersAreUniqueAndStable(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 3))
		var known *nodev1.GpuInventory
		for step := range 12 {
			fresh := machineOf(6)
			if r.IntN(3) == 0 {
				var ids []uint32
				for id := range uint32(7) {
					if r.IntN(2) == 0 {
						ids = append(ids, id)
					}
				}
				fresh = withMIG(fresh, r.IntN(6), ids...)
			}
			if r.IntN(3) == 0 {
				fresh = without(fresh, r.IntN(6))
			}
			if k := r.IntN(len(fresh.Devices)); r.IntN(3) == 0 && fresh.Devices[k].Mig == nil && !fresh.Devices[k].MigEnabled {
				fresh.Devices[k] = &nodev1.GpuDevice{Index: fresh.Devices[k].Index, Lost: true, Fault: "gone"}
			}
			before := proto.CloneOf(fresh)
			merged := Merge(known, fresh)
			if !proto.Equal(before, fresh) {
				t.Fatalf("seed %d step %d: the argument was changed", seed, step)
			}
			taken := map[uint32]string{}
			for _, d := range merged.Devices {
				if d.Number == nil {
					continue
				}
				if other, is := taken[*d.Number]; is {
					t.Fatalf("seed %d step %d: %s and %s are number %d", seed, step, other, d.Uuid, *d.Number)
				}
				taken[*d.Number] = d.Uuid
			}
			for n, d := range ByNumber(known) {
				if now := byUUID(merged, d.Uuid); now != nil && now.Number != nil && *now.Number != n {
					t.Fatalf("seed %d step %d: %s was number %d and is %d", seed, step, d.Uuid, n, *now.Number)
				} else if now == nil && d.Mig == nil && !d.MigEnabled {
					t.Fatalf("seed %d step %d: %s was forgotten", seed, step, d.Uuid)
				}
			}
			if again := Merge(merged, fresh); !proto.Equal(again, merged) {
				t.Fatalf("seed %d step %d: the same inventory again changes something\n%v\n%v", seed, step, numbers(merged), numbers(again))
			}
			known = merged
		}
	}
}

func byUUID(inv *nodev1.GpuInventory, uuid string) *nodev1.GpuDevice {
	for _, d := range inv.GetDevices() {
		if d.Uuid == uuid {
			return d
		}
	}
	return nil
}
