package shape

import (
	"fmt"
	"slices"
	"testing"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

func TestRanksCoverTheStepExactly(t *testing.T) {
	placements := map[string]*apiv1.Placement{
		"one node":     {Groups: []*apiv1.NodeGroup{{Nodes: []uint32{1}, Tasks: 4}}},
		"even":         {Groups: []*apiv1.NodeGroup{{Nodes: []uint32{1, 2, 3}, Tasks: 2}}},
		"uneven":       {Groups: []*apiv1.NodeGroup{{Nodes: []uint32{1, 2}, Tasks: 3}, {Nodes: []uint32{3}, Tasks: 1}, {Nodes: []uint32{4, 5}, Tasks: 2}}},
		"without some": {Groups: []*apiv1.NodeGroup{{Nodes: []uint32{1}, Tasks: 2}, {Nodes: []uint32{2}, Tasks: 0}, {Nodes: []uint32{3}, Tasks: 1}}},
		"wide":         {Groups: []*apiv1.NodeGroup{{Nodes: []uint32{1}, Tasks: 9}, {Nodes: []uint32{3, 2}, Tasks: 5}, {Nodes: []uint32{7}, Tasks: 11}}},
	}
	for name, placement := range placements {
		for distribution, turn := range map[string]uint32{"": 0, "block": 0, "cyclic": 1, "Cyclic:block": 1, "plane=2": 2, "plane=4:*:fcyclic": 4} {
			want := map[uint32][]uint32{} // by the definition, task by task
			var nodes, room []uint32
			total := uint32(0)
			for _, g := range placement.Groups {
				for _, n := range g.Nodes {
					nodes, room = append(nodes, n), append(room, g.Tasks)
					total += g.Tasks
				}
			}
			for rank, i := uint32(0), 0; rank < total; i++ {
				at := i % len(nodes)
				for taken := uint32(0); room[at] > 0 && (turn == 0 || taken < turn); taken++ {
					want[nodes[at]] = append(want[nodes[at]], rank)
					room[at]--
					rank++
				}
			}
			step := &apiv1.Step{Placement: placement, Spec: &apiv1.StepSpec{TaskOptions: &apiv1.TaskOptions{Distribution: distribution}}}
			for _, n := range nodes {
				if got := Ranks(step, n); fmt.Sprint(got) != fmt.Sprint(want[n]) {
					t.Errorf("%s, %q: node %d has ranks %v, should have %v", name, distribution, n, got, want[n])
				}
			}
		}
	}
}

func TestRanksOfPartsFollowOneAnother(t *testing.T) {
	step := &apiv1.Step{
		NodeList: "n[1-3]", PartRanks: []uint32{3, 7},
		Placement: &apiv1.Placement{Groups: []*apiv1.NodeGroup{
			{Nodes: []uint32{1}, Tasks: 2}, {Nodes: []uint32{2}, Tasks: 1}, // the step itself
			{Nodes: []uint32{2, 3}, Tasks: 2},                              // part 1, cyclic
			{Nodes: []uint32{1}, Tasks: 1}, {Nodes: []uint32{3}, Tasks: 2}, // part 2, arbitrary
		}},
		Spec: &apiv1.StepSpec{Parts: []*apiv1.StepSpec{
			{TaskOptions: &apiv1.TaskOptions{Distribution: "cyclic"}},
			{TaskOptions: &apiv1.TaskOptions{Distribution: "arbitrary"}, Resources: &apiv1.ResourceRequest{TaskNodes: []string{"n3", "n1", "n3"}}},
		}},
	}
	for node, want := range map[uint32][]uint32{1: {0, 1, 8}, 2: {2, 3, 5}, 3: {4, 6, 7, 9}, 4: nil} {
		if got := Ranks(step, node); !slices.Equal(got, want) {
			t.Errorf("node %d has ranks %v, should have %v", node, got, want)
		}
	}
	portions := Portions(step, 3)
	if len(portions) != 2 || portions[0].Part != 1 || portions[0].Index != 1 || portions[1].Part != 2 || portions[1].Index != 1 || portions[1].Group.Tasks != 2 {
		t.Errorf("node 3 has %+v", portions)
	}
	if nodes := Nodes(step.Placement); !slices.Equal(nodes, []uint32{1, 2, 3}) {
		t.Errorf("nodes are %v", nodes)
	}
}

func TestDistributionsAreReadOrRefused(t *testing.T) {
	for text, want := range map[string]Distribution{
		"": {}, "*": {}, "block": {}, "cyclic": {Plane: 1}, "plane=3": {Plane: 3}, "arbitrary": {Arbitrary: true}, "*:cyclic": {}, "block:block:fcyclic": {},
		"CYCLIC:*": {Plane: 1},
	} {
		if got, err := ParseDistribution(text); err != nil || got != want {
			t.Errorf("%q: %+v, %v", text, got, err)
		}
	}
	for _, text := range []string{"round", "plane", "plane=", "plane=0", "plane=-1", "plane=99999", "block:", "block:x", "block:block:block:block", ":block:x", "cyclic,pack"} {
		if got, err := ParseDistribution(text); err == nil {
			t.Errorf("%q was read as %+v", text, got)
		}
	}
}
