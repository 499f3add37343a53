package sched

import (
	"slices"
	"strings"
	"testing"

	"github.com/muster-hpc/muster/proto/wiring"
)

// twoIslands is a node of eight GPUs in two groups of four with links, the even ones and the odd ones, each with CPUs of its own.
func twoIslands(id NodeID, name string) Node {
	n := Node{ID: id, Name: name, CPUs: 16, MemoryMB: 1000}
	for i := range 8 {
		d := wiring.Device{NUMA: i % 2, Board: wiring.Unknown, Links: make([]int, 8)}
		for k := range 8 {
			if k != i && k%2 == i%2 {
				d.Links[k] = 4
			}
		}
		n.GPUs, n.Wiring = append(n.GPUs, "h100"), append(n.Wiring, d)
		n.NearCPUs = append(n.NearCPUs, Mask{0xff << (8 * (i % 2))})
	}
	return n
}

func planOne(t *testing.T, q Request, nodes ...Node) (Group, Reason) {
	t.Helper()
	v := NewView()
	var ids []NodeID
	for _, n := range nodes {
		v.SetNode(n)
		ids = append(ids, n.ID)
	}
	v.SetPartitions([]Partition{{Name: "p", Nodes: ids}})
	v.SetJob(Job{ID: 1, Attempt: 1, Partitions: []string{"p"}, TimeLimitS: 60, Request: q})
	d := v.Plan(1000, DefaultLimits())
	if len(d.Placements) == 0 {
		return Group{}, d.Reason(1)
	}
	return d.Placements[0].Groups[0], Reason{}
}

func TestGPUsOfAJobAreLinkedAndItsCPUsAreNearThem(t *testing.T) {
	n := twoIslands(1, "n1")
	n.UsedGPUs = Mask{1 << 2} // of the even island three are left
	g, why := planOne(t, Request{GPUsPerNode: 4, CPUsPerTask: 4}, n)
	if !g.GPUs.Equal(Mask{0b10101010}) || !g.CPUs.Equal(Mask{0x0f00}) {
		t.Fatalf("GPUs %b and CPUs %x (%v); want the odd ones, and CPUs 8 to 11", g.GPUs, g.CPUs, why)
	}
	// Where too few are near, the rest are others.
	g, why = planOne(t, Request{GPUsPerNode: 4, CPUsPerTask: 10}, n)
	if !g.CPUs.Equal(Mask{0xff03}) {
		t.Fatalf("CPUs %x (%v)", g.CPUs, why)
	}
}

func TestDegradedDevicesAndNodesAreTakenLast(t *testing.T) {
	n, other := twoIslands(1, "n1"), twoIslands(2, "n2")
	n.DegradedGPUs = Mask{1 << 3}
	if g, _ := planOne(t, Request{GPUsPerNode: 1}, n, other); g.Nodes[0] != 2 {
		t.Errorf("a node with a degraded GPU was preferred")
	}
	if g, _ := planOne(t, Request{GPUsPerNode: 4}, n); !g.GPUs.Equal(Mask{0b01010101}) {
		t.Errorf("GPUs %b with GPU 3 degraded", g.GPUs)
	}
	if g, _ := planOne(t, Request{GPUsPerNode: 8}, n); g.GPUs.Count() != 8 {
		t.Error("a degraded GPU is usable")
	}
	other.Degraded = true
	other.UsedGPUs = Mask{0xf} // it would fit more tightly
	n.DegradedGPUs = nil
	if g, _ := planOne(t, Request{GPUsPerNode: 1}, n, other); g.Nodes[0] != 1 {
		t.Error("a degraded node was preferred")
	}
}

func TestAJobThatNeedsAnUnusableGPUWaitsAndSaysWhyAndStopsNobody(t *testing.T) {
	n := twoIslands(1, "n1")
	n.UnusableGPUs, n.Faults = Mask{1}, "gpu: GPU 0 has fallen off the bus"
	v := NewView()
	v.SetNode(n)
	v.SetPartitions([]Partition{{Name: "p", Nodes: []NodeID{1}}})
	v.SetJob(Job{ID: 1, Attempt: 1, Partitions: []string{"p"}, Request: Request{GPUsPerNode: 8}})
	v.SetJob(Job{ID: 2, Attempt: 1, Partitions: []string{"p"}, Request: Request{GPUsPerNode: 7}})
	d := v.Plan(1000, DefaultLimits())
	if len(d.Placements) != 1 || d.Placements[0].Job != 2 {
		t.Fatalf("placed %+v; job 2 fits", d.Placements)
	}
	why := d.Reason(1)
	if why.Code != NodeNotAvail || !strings.Contains(why.Sentence, "fallen off the bus") {
		t.Errorf("job 1 waits for %+v", why)
	}
	n.UnusableGPUs, n.Faults = nil, ""
	v.SetNode(n)
	v.RemoveJob(2)
	if d := v.Plan(1000, DefaultLimits()); len(d.Placements) != 1 {
		t.Errorf("nothing was placed when the GPU was well again: %+v", d.Reason(1))
	}
}

func TestSeveralKindsOfDevicesAreGivenTogether(t *testing.T) {
	n := Node{ID: 1, Name: "n1", CPUs: 8, MemoryMB: 100, GPUs: []string{"2g.24gb", "h100", "h100", "2g.24gb"},
		Gres: []Gres{{"ib", "cx6", 2}, {"ib", "cx7", 2}, {"nvme", "", 1}}, UsedGres: []GresShare{{"ib", Mask{0b0100}}}}
	g, why := planOne(t, Request{Gres: []Gres{{"gpu", "h100", 2}, {"gpu", "2g.24gb", 1}, {"ib", "cx7", 1}, {"ib", "", 1}}}, n)
	if !g.GPUs.Equal(Mask{0b0111}) || !slices.EqualFunc(g.Gres, []GresShare{{"ib", Mask{0b1001}}}, func(a, b GresShare) bool { return a.Name == b.Name && a.Units.Equal(b.Units) }) {
		t.Fatalf("%+v %+v", g, why)
	}
	if _, why := planOne(t, Request{Gres: []Gres{{"ib", "cx8", 1}}}, n); why.Code != BadConstraints || !strings.Contains(why.Sentence, "ib:cx8") {
		t.Errorf("%+v", why)
	}
	if _, why := planOne(t, Request{Gres: []Gres{{"nvme", "", 2}}}, n); why.Code != BadConstraints {
		t.Errorf("%+v", why)
	}
}

func TestCPUsAndTasksFollowFromGPUs(t *testing.T) {
	n := twoIslands(1, "n1")
	for _, test := range []struct {
		request     Request
		cpus, tasks int
	}{
		{Request{GPUsPerNode: 2, CPUsPerGPU: 3}, 6, 1},
		{Request{GPUsTotal: 2, CPUsPerGPU: 3}, 6, 1},
		{Request{GPUsPerTask: 2, Tasks: 2, CPUsPerGPU: 3}, 12, 2},
		{Request{GPUsPerNode: 2, Tasks: 3, CPUsPerGPU: 3}, 6, 3},
		{Request{GPUsPerNode: 2, TasksPerGPU: 2}, 4, 4},
		{Request{GPUsTotal: 2, TasksPerGPU: 2, NodesMin: 1}, 4, 4},
		{Request{Tasks: 4, TasksPerGPU: 2}, 4, 4},
		{Request{Tasks: 100, NodesMin: 1, Overcommit: true}, 1, 100},
	} {
		g, why := planOne(t, test.request, n)
		if g.CPUs.Count() != test.cpus || int(g.Tasks) != test.tasks {
			t.Errorf("%+v: %d CPUs, %d tasks (%v); want %d and %d", test.request, g.CPUs.Count(), g.Tasks, why, test.cpus, test.tasks)
		}
	}
}
