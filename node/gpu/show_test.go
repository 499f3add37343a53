package gpu

import (
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
)

// mixed is a merged machine of three GPUs, the first of which has two MIG instances.
func mixed() *nodev1.GpuInventory { return Merge(nil, withMIG(machineOf(3), 0, 1, 2)) }

func TestDeviceFilesAreWhatATaskMustOpen(t *testing.T) {
	byNumber := ByNumber(mixed())
	shared := []string{"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"}
	if got, want := DeviceFiles(byNumber[2]), append([]string{"/dev/nvidia1"}, shared...); !slices.Equal(got, want) {
		t.Errorf("a GPU: %v, want %v", got, want)
	}
	want := append(append([]string{"/dev/nvidia0"}, shared...), "/dev/nvidia-caps/nvidia-cap12", "/dev/nvidia-caps/nvidia-cap13")
	if got := DeviceFiles(byNumber[1]); !slices.Equal(got, want) {
		t.Errorf("an instance: %v, want %v", got, want)
	}
}

func TestVisibleDevicesAreIndexesOrTheUUIDsOfInstances(t *testing.T) {
	all := ByNumber(Merge(nil, machineOf(4)))
	pick := func(from map[uint32]*nodev1.GpuDevice, numbers ...uint32) (d []*nodev1.GpuDevice) {
		for _, n := range numbers {
			d = append(d, from[n])
		}
		return d
	}
	if got := VisibleDevices(pick(all, 3, 1), nil); got != "1,3" {
		t.Errorf("without control group: %q", got)
	}
	if got := VisibleDevices(pick(all, 2, 3), pick(all, 1, 2, 3)); got != "1,2" {
		t.Errorf("where GPU 0 can't be opened: %q", got)
	}
	if got := VisibleDevices(pick(ByNumber(mixed()), 1), nil); got != "MIG-0-2" {
		t.Errorf("an instance: %q", got)
	}
	if got := VisibleDevices(nil, nil); got != "" {
		t.Errorf("no device: %q", got)
	}
}

func TestChoiceFollowsTheInventory(t *testing.T) {
	inv := Merge(nil, machineOf(8))
	if got, ok := Choose(inv, []uint64{0b11110111}, 4); !ok || got[0] != 0b11110000 {
		t.Errorf("four of a machine without GPU 3: %08b, %v", got, ok)
	}
	if got := OfType(mixed(), "2G.20GB"); !slices.Equal(got, []uint64{0b0011}) {
		t.Errorf("instances: %b", got)
	}
	if got := OfType(mixed(), ""); !slices.Equal(got, []uint64{0b1111}) {
		t.Errorf("any type: %b", got)
	}
	lost := Merge(inv, without(machineOf(8), 2))
	if got := OfType(lost, "h100"); !slices.Equal(got, []uint64{0b11111011}) {
		t.Errorf("with a lost GPU: %b", got)
	}
}

func TestProcessesOfNoJobAreFound(t *testing.T) {
	inv := mixed()
	owned := func(pid uint32) bool { return pid == 10 }
	found := Left(inv, []*nodev1.GpuProcess{
		{Uuid: "GPU-1", Index: 1, Pid: 10},
		{Uuid: "GPU-1", Index: 1, Pid: 11, Use: nodev1.GpuUse_GPU_USE_GRAPHICS},
		{Uuid: "GPU-1", Index: 1, Pid: 12, Command: "nvidia-cuda-mps-server"},
		{Uuid: "GPU-2", Index: 2, Pid: 13, Command: "python", Uid: proto.Uint32(1000), MemoryMb: proto.Uint64(512)},
		{Uuid: "GPU-2", Index: 2, Pid: 14},
		{Uuid: "GPU-0", Pid: 15, GpuInstance: proto.Uint32(2), ComputeInstance: proto.Uint32(0)},
	}, owned)
	if len(found) != 2 {
		t.Fatalf("%+v", found)
	}
	if f := found[0]; !slices.Equal(f.Devices, []uint32{1}) || f.Severity != SeverityFailed || f.EndsWork {
		t.Errorf("on an instance: %+v", f)
	}
	if f := found[1]; !slices.Equal(f.Devices, []uint32{3}) || !strings.Contains(f.Reason, "13 (python, uid 1000, 512 MiB), 14") {
		t.Errorf("on a GPU: %+v", f)
	}
}

func TestEntriesStandAtTheirNumbers(t *testing.T) {
	inv := Merge(mixed(), withMIG(machineOf(3), 0, 2))
	inv.Devices[0].Cpus = ""
	ByNumber(inv)[2].Cpus = "0-1,64"
	entries := Entries(inv)
	if len(entries) != 4 {
		t.Fatalf("%v", entries)
	}
	for n, e := range entries {
		if e.Index != uint32(n) {
			t.Errorf("entry %d has index %d", n, e.Index)
		}
	}
	if e := entries[0]; e.Type != "none" || e.Uuid != "" {
		t.Errorf("the number of a destroyed instance is %v", e)
	}
	if e := entries[1]; e.Type != "2g.20gb" || e.MigParent == nil || *e.MigParent != 0 || len(e.Nvlinks) != 0 {
		t.Errorf("an instance is %v", e)
	}
	if e := entries[2]; e.Type != "h100" || e.MigParent != nil || e.Numa != 0 || !slices.Equal(e.CpuMask, []uint64{3, 1}) || !slices.Equal(e.Nvlinks, []uint32{0, 0, 0, 18}) {
		t.Errorf("a GPU is %v", e)
	}
	conditions := Conditions(inv, nil)
	if len(conditions) != 1 || !slices.Equal(conditions[0].GpuMask, []uint64{1}) || conditions[0].Severity != apiv1.ConditionSeverity_CONDITION_SEVERITY_FAILED {
		t.Errorf("the unused number: %v", conditions)
	}
}

func TestConditionsJoinWhatIsFoundOfSeveralDevices(t *testing.T) {
	since := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	conditions := Conditions(Merge(nil, machineOf(4)), []Finding{
		{Code: CodeHot, Severity: SeverityInfo, Reason: "GPU 1 is warm", Devices: []uint32{1}, Since: since.Add(time.Hour)},
		{Code: CodeHot, Severity: SeverityDegraded, Reason: "GPU 3 is hot", Devices: []uint32{3}, Since: since},
		{Code: CodeLost, Severity: SeverityFailed, Reason: "GPU 2 is lost", Clears: "reboot", Devices: []uint32{2}, EndsWork: true},
	})
	if len(conditions) != 2 {
		t.Fatalf("%v", conditions)
	}
	hot, lost := conditions[0], conditions[1]
	if !slices.Equal(hot.GpuMask, []uint64{0b1010}) || hot.EndsWork || hot.Severity != apiv1.ConditionSeverity_CONDITION_SEVERITY_DEGRADED ||
		hot.Reason != "GPU 1 is warm; GPU 3 is hot" || !hot.Since.AsTime().Equal(since) {
		t.Errorf("%v", hot)
	}
	if !slices.Equal(lost.GpuMask, []uint64{0b100}) || !lost.EndsWork || lost.Owner != "gpu" || lost.Clears != "reboot" {
		t.Errorf("%v", lost)
	}
}

func TestListsOfCPUsAreRead(t *testing.T) {
	for list, want := range map[string][]uint64{
		"0-3": {0xf}, "0,2,65": {5, 2}, "": nil, "x": nil, "0-": nil, "0-4000000000": nil,
	} {
		if got := cpuMask(list); !slices.Equal(got, want) {
			t.Errorf("%q is %x, want %x", list, got, want)
		}
	}
}
