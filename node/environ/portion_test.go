package environ

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	"github.com/muster-hpc/muster/proto/notation"

	"github.com/muster-hpc/muster/node/bind"
)

func group(tasks uint32, cpus, gpus uint64, memory uint64) *apiv1.NodeGroup {
	return &apiv1.NodeGroup{Nodes: []uint32{7}, CpuMask: []uint64{cpus}, GpuMask: []uint64{gpus}, MemoryMb: memory, Tasks: tasks}
}

// parted is the second node's share of srun -n3 a : -n4 --gpus-per-task=1 b: ranks 2 of the first part, 5 and 6 of the second.
func parted() (*nodev1.DesiredAttempt, *nodev1.DesiredStep) {
	order := job(1)
	order.CpuMask, order.GpuMask, order.Job.Spec.Resources = []uint64{0xff}, []uint64{0xf}, nil
	step := &nodev1.DesiredStep{
		Step: &apiv1.Step{JobId: 1, Id: 3, NodeList: "n[1-2]", NumTasks: 7, PartRanks: []uint32{3}, Spec: &apiv1.StepSpec{
			Args: []string{"a"}, TaskOptions: &apiv1.TaskOptions{Distribution: "block"}, Resources: &apiv1.ResourceRequest{Ntasks: 3},
			Parts: []*apiv1.StepSpec{{Args: []string{"b", "x"}, TaskOptions: &apiv1.TaskOptions{Distribution: "plane=2:block", Label: true},
				Resources: &apiv1.ResourceRequest{Ntasks: 4, GpusPerTask: 1, MemoryPerCpuMb: 10, CpusPerTask: 2}}},
		}, Placement: &apiv1.Placement{Groups: []*apiv1.NodeGroup{group(1, 1, 0, 0), group(2, 0x1e, 6, 40)}}},
		NodeIndex: 1, Ranks: []uint32{2, 5, 6}, TasksPerNode: []uint32{4, 3},
	}
	return order, step
}

func TestPartsOfAStepHaveTheirOwnProgramsAndDevices(t *testing.T) {
	order, step := parted()
	portions := Portions(order, step)
	if len(portions) != 2 || portions[0].Part != 0 || portions[1].Part != 1 || portions[1].First != 3 || portions[1].MemoryMB != 40 {
		t.Fatalf("the portions are %+v", portions)
	}
	if got := fmt.Sprint(portions[0].Ranks, portions[1].Ranks, portions[0].Args, portions[1].Args); got != "[2] [5 6] [a] [b x]" {
		t.Errorf("ranks and programs are %s", got)
	}
	tasks := Tasks(Request{Node: "n2", Order: order, Step: step, Bindings: []Binding{{}, {GPUs: []int{1}, Some: true}, {GPUs: []int{2}, Some: true}}})
	for i, want := range []map[string]string{
		{"SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_GTIDS": "2,5,6", "SLURM_DISTRIBUTION": "block", "SLURM_STEP_GPUS": "", "CUDA_VISIBLE_DEVICES": "",
			"SLURM_JOB_GPUS": "0,1,2,3", "SLURM_LABELIO": "", "SLURM_MEM_PER_CPU": "", "SLURM_CPUS_PER_TASK": "", "SLURM_CPUS_ON_NODE": "5", "SLURM_NTASKS": "7"},
		{"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_DISTRIBUTION": "plane", "SLURM_DIST_PLANESIZE": "2", "SLURM_STEP_GPUS": "1,2",
			"CUDA_VISIBLE_DEVICES": "1", "SLURM_GPUS_ON_NODE": "2", "SLURM_GPUS_PER_TASK": "1", "SLURM_LABELIO": "1", "SLURM_MEM_PER_CPU": "10",
			"SLURM_CPUS_PER_TASK": "2", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "4,3"},
		{"SLURM_PROCID": "6", "SLURM_LOCALID": "2", "CUDA_VISIBLE_DEVICES": "2", "GPU_DEVICE_ORDINAL": "2"},
	} {
		got := environment(tasks[i])
		for name, value := range want {
			if got[name] != value {
				t.Errorf("task %d: %s is %q, want %q", i, name, got[name], value)
			}
		}
	}
}

func TestAStepWhoseDevicesAreNotSaidHasThoseOfTheAttempt(t *testing.T) {
	order := job(0)
	order.MemoryMb = 7
	for _, step := range []*nodev1.DesiredStep{parallelStep(0, 2), batchStep()} {
		p := Portions(order, step)
		if len(p) != 1 || p[0].CPUs.Count() != 2 || p[0].GPUs.Count() != 2 || p[0].MemoryMB != 7 || len(p[0].Ranks) != len(step.Ranks) {
			t.Errorf("step %d has %+v", step.Step.Id, p)
		}
	}
	// The batch step takes nothing, and may use everything.
	batch := batchStep()
	batch.Step.Placement = &apiv1.Placement{Groups: []*apiv1.NodeGroup{group(1, 0, 0, 0)}}
	if p := Portions(order, batch); p[0].GPUs.Count() != 2 || p[0].CPUs.Count() != 2 {
		t.Errorf("the batch step has %+v", p)
	}
	// A step without accelerators sees none of the job's.
	step := parallelStep(0, 1)
	step.Step.Placement = &apiv1.Placement{Groups: []*apiv1.NodeGroup{group(1, 1, 0, 0)}}
	got := environment(Tasks(Request{Node: "n1", Order: order, Step: step})[0])
	if v, ok := got["CUDA_VISIBLE_DEVICES"]; ok || got["SLURM_JOB_GPUS"] != "0,1" || got["SLURM_CPUS_ON_NODE"] != "1" {
		t.Errorf("a step without accelerators sees %q, of the job's %q, on %q CPUs", v, got["SLURM_JOB_GPUS"], got["SLURM_CPUS_ON_NODE"])
	}
}

func TestRanksHaveTheProgramsOfTheirEntries(t *testing.T) {
	p := Portion{Args: []string{"none"}, Options: &apiv1.TaskOptions{Programs: []*apiv1.RankProgram{
		{Ranks: "4-6,1", Args: []string{"/a", "%t:%o", "100%%"}}, {Ranks: "0,2-3", Args: []string{"/b", "%o%t%x"}},
	}}}
	for rank, want := range []string{"/b 00%x", "/a 1:3 100%%", "/b 12%x", "/b 23%x", "/a 4:0 100%%", "/a 5:1 100%%", "/a 6:2 100%%"} {
		args, ok := p.Program(uint32(rank))
		if got := strings.Join(args, " "); !ok || got != want {
			t.Errorf("rank %d runs %q, want %q", rank, got, want)
		}
	}
	if args, ok := p.Program(7); ok {
		t.Errorf("rank 7 runs %q", args)
	}
	if args, ok := (&Portion{Args: []string{"x"}, Options: &apiv1.TaskOptions{}}).Program(9); !ok || !slices.Equal(args, []string{"x"}) {
		t.Errorf("a step of one program runs %q", args)
	}
}

func TestBindingsAreToldAsSlurmDoes(t *testing.T) {
	b, err := bind.CPUs(bind.CPURequest{Topology: bind.Regular(8, 1, 8, 1), CPUs: notation.MaskUpTo(8), Tasks: 2, PerTask: 4})
	if err != nil {
		t.Fatal(err)
	}
	got := environment(Tasks(Request{Node: "n1", Order: job(0), Step: parallelStep(0, 2), Bindings: []Binding{{CPU: b}, {CPU: b}}})[1])
	for name, want := range map[string]string{"SLURM_CPU_BIND": "quiet,mask_cpu:0xf,0xf0", "SLURM_CPU_BIND_TYPE": "mask_cpu:",
		"SLURM_CPU_BIND_LIST": "0xf,0xf0", "SLURM_CPU_BIND_VERBOSE": "quiet"} {
		if got[name] != want {
			t.Errorf("%s is %q, want %q", name, got[name], want)
		}
	}
}

func TestAcceleratorsAreNamedAsLibrariesCountThem(t *testing.T) {
	whole := []*apiv1.Gpu{{Index: 0, Type: "h100", Pci: "0000:9a:00.0"}, {Index: 1, Type: "h100", Pci: "0000:1b:00.0"}, {Index: 2, Type: "h100", Pci: "0000:4c:00.0"}}
	mig := []*apiv1.Gpu{{Index: 0, Type: "h100", Uuid: "GPU-0"}, {Index: 1, Type: "1g.10gb", Uuid: "MIG-1", MigParent: proto.Uint32(1)}}
	for _, c := range []struct {
		what      string
		gpus      []*apiv1.Gpu
		reachable []int
		mask      uint64
		name      string
		want      string
	}{
		{"declared", nil, nil, 6, "CUDA_VISIBLE_DEVICES", "1,2"},
		{"declared, and others kept away", nil, []int{1, 2}, 6, "CUDA_VISIBLE_DEVICES", "0,1"},
		{"detected: in the order of the bus", whole, nil, 1, "CUDA_VISIBLE_DEVICES", "2"},
		{"detected, and others kept away", whole, []int{0, 2}, 1, "CUDA_VISIBLE_DEVICES", "1"},
		{"MIG instances", mig, []int{1}, 2, "CUDA_VISIBLE_DEVICES", "MIG-1"},
		{"MIG instances beside a whole one", mig, nil, 3, "CUDA_VISIBLE_DEVICES", "GPU-0,MIG-1"},
		{"AMD", []*apiv1.Gpu{{Index: 0, Type: "mi300x"}}, nil, 1, "ROCR_VISIBLE_DEVICES", "0"},
		{"Intel", []*apiv1.Gpu{{Index: 0, Type: "max1550"}}, nil, 1, "ZE_AFFINITY_MASK", "0"},
	} {
		order, step := job(0), parallelStep(0, 1)
		order.GpuMask = []uint64{c.mask}
		got := environment(Tasks(Request{Node: "n1", Order: order, Step: step, GPUs: c.gpus, Reachable: c.reachable, User: []string{"ROCR_VISIBLE_DEVICES=9"}})[0])
		if got[c.name] != c.want || got["GPU_DEVICE_ORDINAL"] != c.want {
			t.Errorf("%s: %s is %q, want %q", c.what, c.name, got[c.name], c.want)
		}
		detected := c.gpus != nil && c.gpus[0].Pci != ""
		if order, counted := got["CUDA_DEVICE_ORDER"]; counted != detected || counted && order != "PCI_BUS_ID" {
			t.Errorf("%s: CUDA_DEVICE_ORDER is %q; it is set exactly where places are counted along the bus", c.what, order)
		}
		vendors := 0
		for _, name := range []string{"CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"} {
			if _, ok := got[name]; ok {
				vendors++
			}
		}
		if vendors != 1 {
			t.Errorf("%s: the variables of %d vendors are set", c.what, vendors)
		}
	}
}
