package shape

import (
	"errors"
	"fmt"
	"math/rand"
	"slices"
	"testing"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/notation"
)

// someAllocation makes an allocation of a few nodes on which other steps hold something.
func someAllocation(rng *rand.Rand) []Share {
	var shares []Share
	for i := range 1 + rng.Intn(4) {
		spec := &apiv1.NodeSpec{Cpus: 16, Gres: []*apiv1.Gres{{Name: "ib", Type: "a", Count: 2}, {Name: "ib", Type: "b", Count: 1}}}
		for g := range 8 {
			spec.Gpus = append(spec.Gpus, &apiv1.Gpu{Index: uint32(g), Type: []string{"x", "y"}[rng.Intn(2)], CpuMask: []uint64{3 << (2 * g)}})
		}
		s := Share{
			Node: uint32(i + 1), Name: fmt.Sprintf("n%d", i+1), Epoch: 1, Spec: spec, CPUMask: []uint64{1 + uint64(rng.Intn(1<<16-1))},
			GPUMask: Trim([]uint64{uint64(rng.Intn(1 << 8))}), MemoryMB: uint64(rng.Intn(2) * 1000),
		}
		if ib := uint64(rng.Intn(8)); ib > 0 {
			s.Gres = []*apiv1.GresShare{{Name: "ib", Mask: []uint64{ib}}}
		}
		if rng.Intn(2) == 0 {
			s.Holds = []Hold{{
				Step: "step 1.0", CPUMask: Common(s.CPUMask, []uint64{uint64(rng.Intn(1 << 16))}), GPUMask: Common(s.GPUMask, []uint64{uint64(rng.Intn(1 << 8))}),
				MemoryMB: s.MemoryMB / 4,
			}}
		}
		shares = append(shares, s)
	}
	return shares
}

func somePart(rng *rand.Rand) Part {
	number := func(n int) uint32 { return uint32(max(0, rng.Intn(3*n)-2*n)) }
	r := &apiv1.ResourceRequest{
		NodesMin: number(4), Ntasks: number(12), NtasksPerNode: number(4), CpusPerTask: number(4), Exact: rng.Intn(2) == 0, Overlap: rng.Intn(6) == 0,
		Overcommit: rng.Intn(8) == 0,
	}
	switch rng.Intn(7) {
	case 0:
		r.GpusPerNode = uint32(rng.Intn(5))
	case 1:
		r.GpusTotal = uint32(rng.Intn(9))
	case 2:
		r.GpusPerTask, r.Ntasks = uint32(1+rng.Intn(2)), uint32(1+rng.Intn(4))
	case 3:
		r.Gres = []*apiv1.GresRequest{{Name: "gpu", Type: "x", Count: uint32(rng.Intn(3))}, {Name: "gpu", Type: "y", Count: uint32(rng.Intn(3))}, {Name: "ib", Count: uint32(rng.Intn(3))}}
	case 4:
		r.NtasksPerGpu, r.GpusTotal = uint32(1+rng.Intn(3)), uint32(1+rng.Intn(6))
	}
	if rng.Intn(3) == 0 {
		r.MemoryPerNodeMb = uint64(rng.Intn(600))
	} else if rng.Intn(3) == 0 {
		r.MemoryPerCpuMb = uint64(rng.Intn(100))
	}
	return Part{r, &apiv1.TaskOptions{Distribution: []string{"", "cyclic", "plane=3"}[rng.Intn(3)]}}
}

// Whatever is asked for: a layout has devices of the allocation that nobody else has, as many as were asked for, and every rank exactly once; who has
// to wait would fit if nobody else were there.
func TestLayoutsKeepWhatTheyPromise(t *testing.T) {
	laid, busy, impossible := 0, 0, 0
	for seed := range int64(8_000) {
		rng := rand.New(rand.NewSource(seed))
		allocation := someAllocation(rng)
		parts := []Part{somePart(rng)}
		for rng.Intn(4) == 0 {
			parts = append(parts, somePart(rng))
		}
		layout, err := Lay(parts, allocation)
		var wait *BusyError
		switch {
		case errors.As(err, &wait):
			busy++
			alone := slices.Clone(allocation)
			for i := range alone {
				alone[i].Holds = nil
			}
			if _, err := Lay(parts, alone); err != nil {
				t.Fatalf("seed %d: has to wait (%v), and never fits: %v", seed, wait, err)
			}
		case err != nil:
			impossible++
		default:
			laid++
			if err := checkLayout(parts, allocation, layout); err != nil {
				t.Fatalf("seed %d: %v\nparts %v\nallocation %+v\nlayout %v", seed, err, parts, allocation, layout.Placement)
			}
		}
	}
	if laid < 500 || busy < 50 || impossible < 500 {
		t.Errorf("%d layouts, %d busy, %d impossible: the requests are not what they should be", laid, busy, impossible)
	}
}

func checkLayout(parts []Part, allocation []Share, l *Layout) error {
	used := make(map[uint32]*node)
	byNumber := make(map[uint32]*Share)
	for i := range allocation {
		s := &allocation[i]
		n := freeOf(s)
		used[s.Node], byNumber[s.Node] = &n, s
	}
	step := &apiv1.Step{Placement: l.Placement, PartRanks: l.PartRanks, NumTasks: l.Tasks, Spec: &apiv1.StepSpec{Resources: parts[0].Resources, TaskOptions: parts[0].Options}}
	for _, p := range parts[1:] {
		step.Spec.Parts = append(step.Spec.Parts, &apiv1.StepSpec{Resources: p.Resources, TaskOptions: p.Options})
	}
	seen := make([]bool, l.Tasks)
	for _, number := range Nodes(l.Placement) {
		for _, portion := range Portions(step, number) {
			r, g, free, s := parts[portion.Part].Resources, portion.Group, used[number], byNumber[number]
			if len(portion.Ranks) != int(g.Tasks) || g.Tasks == 0 {
				return fmt.Errorf("node %d has %d tasks and the ranks %v", number, g.Tasks, portion.Ranks)
			}
			for _, rank := range portion.Ranks {
				if rank >= l.Tasks || seen[rank] {
					return fmt.Errorf("rank %d is there twice, or beyond %d", rank, l.Tasks)
				}
				seen[rank] = true
			}
			see := *free
			if r.GetOverlap() {
				see = node{share: s, cpus: s.CPUMask, gpus: s.GPUMask, gres: s.Gres, memory: s.MemoryMB}
			}
			if Without(g.CpuMask, see.cpus) != nil || Without(g.GpuMask, see.gpus) != nil || GresWithout(g.Gres, see.gres) != nil {
				return fmt.Errorf("node %d: %v is not free", number, g)
			}
			if err := checkPortion(r, g, s, len(parts) > 1); err != nil {
				return fmt.Errorf("node %d: %w", number, err)
			}
			if !r.GetOverlap() {
				free.cpus, free.gpus, free.gres = Without(free.cpus, g.CpuMask), Without(free.gpus, g.GpuMask), GresWithout(free.gres, g.Gres)
			}
		}
	}
	if i := slices.Index(seen, false); i >= 0 {
		return fmt.Errorf("rank %d is nowhere", i)
	}
	return nil
}

func checkPortion(r *apiv1.ResourceRequest, g *apiv1.NodeGroup, s *Share, several bool) error {
	cpus, gpus, need := Count(g.CpuMask), Count(g.GpuMask), Of(r)
	tasks := uint64(g.Tasks)
	switch {
	case !r.Overcommit && cpus < tasks*need.CPUsPerTask:
		return fmt.Errorf("%d CPUs for %d tasks of %d", cpus, tasks, need.CPUsPerTask)
	case (r.Exact || several) && !r.Overcommit && cpus != tasks*need.CPUsPerTask:
		return fmt.Errorf("%d CPUs, exactly, for %d tasks of %d", cpus, tasks, need.CPUsPerTask)
	case !r.Exact && !several && cpus != Count(s.CPUMask):
		return fmt.Errorf("%d of %d CPUs", cpus, Count(s.CPUMask))
	case r.GpusPerNode > 0 && gpus != uint64(r.GpusPerNode), r.GpusPerTask > 0 && gpus != tasks*uint64(r.GpusPerTask):
		return fmt.Errorf("%d GPUs for %d tasks", gpus, tasks)
	case r.NtasksPerGpu > 0 && (gpus*uint64(r.NtasksPerGpu) < tasks || gpus > tasks):
		return fmt.Errorf("%d GPUs for %d tasks, %d on each", gpus, tasks, r.NtasksPerGpu)
	case asksNoDevice(r) && !several && (gpus != Count(s.GPUMask) || !GresEqual(g.Gres, s.Gres)):
		return fmt.Errorf("%d GPUs; it takes all", gpus)
	case asksNoDevice(r) && several && (gpus != 0 || g.Gres != nil):
		return fmt.Errorf("%d GPUs; it asks for none", gpus)
	case g.MemoryMb > s.MemoryMB, r.MemoryPerNodeMb > 0 && s.MemoryMB > 0 && g.MemoryMb != r.MemoryPerNodeMb:
		return fmt.Errorf("%d MiB", g.MemoryMb)
	}
	for _, want := range r.Gres {
		units, of := GresMask(g.Gres, want.Name), GresUnits(s.Spec, want.Name, want.Type)
		if want.Name == gpuName {
			units, of = g.GpuMask, GPUsOfType(s.Spec, want.Type)
		}
		if Count(Common(units, of)) != uint64(want.Count) {
			return fmt.Errorf("%s of %d %s %s", notation.Mask(units), want.Count, want.Name, want.Type)
		}
	}
	return nil
}

// The GPUs of a total lie on the step's nodes, at least one on each, and CPUs are taken close to them.
func TestDevicesAreChosenAsDocumented(t *testing.T) {
	spec := &apiv1.NodeSpec{Cpus: 8, Gpus: []*apiv1.Gpu{{CpuMask: []uint64{0xf0}}, {Index: 1, CpuMask: []uint64{0x0f}}, {Index: 2, CpuMask: []uint64{0x0f}}}}
	var allocation []Share
	for i := range 2 {
		allocation = append(allocation, Share{Node: uint32(i + 1), Name: fmt.Sprintf("n%d", i+1), CPUMask: []uint64{0xff}, GPUMask: []uint64{7}, Spec: spec})
	}
	l, err := Lay([]Part{{Resources: &apiv1.ResourceRequest{NodesMin: 2, Ntasks: 2, GpusTotal: 4, Exact: true, CpusPerTask: 2}}}, allocation)
	if err != nil {
		t.Fatal(err)
	}
	if g := l.Placement.Groups; len(g) != 2 || Count(g[0].GpuMask) != 3 || Count(g[1].GpuMask) != 1 || g[1].CpuMask[0] != 0x30 {
		t.Errorf("laid out as %v", l.Placement)
	}
}
