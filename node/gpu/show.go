package gpu

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	"github.com/muster-hpc/muster/proto/wiring"
)

// DeviceFiles returns the device files that a process needs to use a device: the GPU's own (/dev/nvidiaN), those of the driver that all
// GPUs share, and for a MIG instance those of its capabilities. Files that a machine lacks (nvidia-uvm-tools) are listed, too. A
// device whose minor number is not known gets no file of its own.
func DeviceFiles(d *nodev1.GpuDevice) []string {
	var files []string
	if d.Minor != nil {
		files = append(files, fmt.Sprintf("/dev/nvidia%d", d.GetMinor()))
	}
	files = append(files, "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
	if d.Mig == nil {
		return files
	}
	for _, n := range []*uint32{d.Mig.GpuInstanceCap, d.Mig.ComputeInstanceCap} {
		if n != nil {
			files = append(files, fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", *n))
		}
	}
	return files
}

// VisibleDevices returns the value of CUDA_VISIBLE_DEVICES for a task with these devices. Whole GPUs are named by index, in
// the order of PCI addresses (CUDA_DEVICE_ORDER=PCI_BUS_ID): if reachable is given, by their position among those that
// the task's control group lets it open, because CUDA counts only what it can open. If there is a MIG instance among the devices,
// all are named by UUID; CUDA then uses the first instance only.
func VisibleDevices(devices, reachable []*nodev1.GpuDevice) string {
	mig := func(d *nodev1.GpuDevice) bool { return d.Mig != nil }
	names := make([]string, 0, len(devices))
	if slices.ContainsFunc(devices, mig) || slices.ContainsFunc(reachable, mig) {
		for _, d := range devices {
			names = append(names, d.Uuid)
		}
		return strings.Join(names, ",")
	}
	indexes := make([]int, 0, len(devices))
	for _, d := range devices {
		index := int(d.Index)
		if reachable != nil {
			index = 0
			for _, r := range reachable {
				if r.Index < d.Index {
					index++
				}
			}
		}
		indexes = append(indexes, index)
	}
	slices.Sort(indexes)
	for _, i := range indexes {
		names = append(names, strconv.Itoa(i))
	}
	return strings.Join(names, ",")
}

// Wiring returns how an inventory's devices are connected, by number, for wiring.Choose.
func Wiring(inv *nodev1.GpuInventory) wiring.Topology {
	byNumber := ByNumber(inv)
	size, indexes := 0, map[uint32][]uint32{}
	for n, d := range byNumber {
		size = max(size, int(n)+1)
		if d.Mig == nil && !d.Missing {
			indexes[d.Index] = append(indexes[d.Index], n)
		}
	}
	t := make(wiring.Topology, size)
	for n := range t {
		t[n] = wiring.Device{NUMA: wiring.Unknown, Board: wiring.Unknown, Links: make([]int, size), Paths: make([]int, size)}
		if d := byNumber[uint32(n)]; d != nil {
			t[n].Board = int(d.Index)
			if d.NumaNode != nil {
				t[n].NUMA = int(d.GetNumaNode())
			}
			if d.Missing {
				t[n].Board = wiring.Unknown
			}
		}
	}
	for _, p := range inv.GetPairs() {
		for _, a := range indexes[p.A] {
			for _, b := range indexes[p.B] {
				t[a].Links[b], t[a].Paths[b] = int(p.Nvlinks), int(p.Path)
				t[b].Links[a], t[b].Paths[a] = int(p.Nvlinks), int(p.Path)
			}
		}
	}
	return t
}

// Choose returns n of the free devices that work best together, see wiring.Choose.
func Choose(inv *nodev1.GpuInventory, free []uint64, n int) ([]uint64, bool) {
	return wiring.Choose(Wiring(inv), free, n)
}

// OfType returns the mask of the devices of a type that are not lost: "h100", a MIG profile, or "" for all.
func OfType(inv *nodev1.GpuInventory, kind string) []uint64 {
	var mask []uint64
	for n, d := range ByNumber(inv) {
		if d.Lost || kind != "" && !strings.EqualFold(d.Type, kind) {
			continue
		}
		for len(mask) <= int(n)/64 {
			mask = append(mask, 0)
		}
		mask[n/64] |= 1 << (n % 64)
	}
	return mask
}

// Left returns findings about processes that use GPUs and belong to nobody: owned says whether a process id belongs to
// work that is known. Programs that serve several (nvidia-cuda-mps-…) and graphics are the site's matter and left alone. On
// a GPU in MIG mode only the instance is concerned.
func Left(inv *nodev1.GpuInventory, processes []*nodev1.GpuProcess, owned func(pid uint32) bool) []Finding {
	byDevice := map[string]*Finding{}
	for _, p := range processes {
		if p.Use == nodev1.GpuUse_GPU_USE_GRAPHICS || strings.HasPrefix(p.Command, "nvidia-cuda-mps") || p.Pid != 0 && owned(p.Pid) {
			continue
		}
		numbers := numbersOf(inv, p)
		key := fmt.Sprint(p.Uuid, numbers)
		f := byDevice[key]
		if f == nil {
			f = &Finding{
				Verdict: Failed, Severity: SeverityFailed, Owner: OwnerSite, Code: CodeProcessLeft, UUID: p.Uuid, Devices: numbers,
				Reason: fmt.Sprintf("GPU %d is used by processes of no job:", p.Index), Clears: "the processes end",
			}
			byDevice[key] = f
		}
		f.Reason += " " + describe(p) + ","
	}
	all := make([]Finding, 0, len(byDevice))
	for _, f := range byDevice {
		f.Reason = strings.TrimSuffix(f.Reason, ",")
		all = append(all, *f)
	}
	slices.SortFunc(all, func(a, b Finding) int {
		return cmp.Or(slices.Compare(a.Devices, b.Devices), cmp.Compare(a.UUID, b.UUID))
	})
	return all
}

func numbersOf(inv *nodev1.GpuInventory, p *nodev1.GpuProcess) []uint32 {
	if p.GpuInstance == nil {
		return Numbers(inv, p.Uuid)
	}
	var numbers []uint32
	for _, d := range inv.GetDevices() {
		if d.Number != nil && d.Mig.GetParentUuid() == p.Uuid && d.Mig.GetGpuInstance() == p.GetGpuInstance() &&
			(p.ComputeInstance == nil || d.Mig.GetComputeInstance() == p.GetComputeInstance()) {
			numbers = append(numbers, *d.Number)
		}
	}
	slices.Sort(numbers)
	return numbers
}

func describe(p *nodev1.GpuProcess) string {
	if p.Pid == 0 {
		return "one of another pid namespace"
	}
	words := []string{fmt.Sprintf("%d", p.Pid)}
	if p.Command != "" {
		words = append(words, p.Command)
	}
	if p.Uid != nil {
		words = append(words, fmt.Sprintf("uid %d", p.GetUid()))
	}
	if p.MemoryMb != nil {
		words = append(words, fmt.Sprintf("%d MiB", p.GetMemoryMb()))
	}
	if len(words) == 1 {
		return words[0]
	}
	return words[0] + " (" + strings.Join(words[1:], ", ") + ")"
}
