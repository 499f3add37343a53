package shape

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/notation"
)

// Portion is what one part of a step has on one node.
type Portion struct {
	// Part is 0 for the step itself, n for its n-th further part (srun A : B).
	Part int
	// Index is the node's place among the nodes of the part, in the order of the placement.
	Index int
	// Group has the devices; its tasks are those on each of its nodes.
	Group *apiv1.NodeGroup
	// Ranks are the ranks of the part's tasks on the node, ascending: as many as Group.tasks.
	Ranks []uint32
}

// Ranks returns the ranks of a step's tasks on a node, ascending; nil if it has none there. It is the only place where ranks come from.
func Ranks(step *apiv1.Step, node uint32) []uint32 {
	portions := Portions(step, node)
	if len(portions) == 1 {
		return portions[0].Ranks
	}
	var ranks []uint32
	for _, p := range portions {
		ranks = append(ranks, p.Ranks...)
	}
	return ranks
}

// Portions returns what the parts of a step have on a node, in the order of the parts. A part has a node at most once.
func Portions(step *apiv1.Step, node uint32) []Portion {
	var found []Portion
	part, base := 0, uint32(0)
	groups := step.Placement.GetGroups()
	for begin := 0; begin < len(groups); part++ {
		end, next := begin, base
		last := part >= len(step.PartRanks)
		for end < len(groups) && (last || next < step.PartRanks[part]) {
			next += uint32(len(groups[end].Nodes)) * groups[end].Tasks
			end++
		}
		if end == begin {
			break // a placement that does not match its part_ranks; Apply stores none
		}
		if p, has := portion(step, part, base, groups[begin:end], node); has {
			found = append(found, p)
		}
		begin, base = end, next
	}
	return found
}

func portion(step *apiv1.Step, part int, base uint32, groups []*apiv1.NodeGroup, node uint32) (Portion, bool) {
	before := 0
	for i, g := range groups {
		within := slices.Index(g.Nodes, node)
		if within < 0 {
			before += len(g.Nodes)
			continue
		}
		resources, options := step.Spec.GetResources(), step.Spec.GetTaskOptions()
		if part > 0 {
			resources, options = step.Spec.Parts[part-1].GetResources(), step.Spec.Parts[part-1].GetTaskOptions()
		}
		p := Portion{Part: part, Index: before + within, Group: g}
		d, err := ParseDistribution(options.GetDistribution())
		switch {
		case err == nil && d.Arbitrary && len(resources.GetTaskNodes()) > 0:
			p.Ranks = arbitrary(nameIn(step, node), base, resources.GetTaskNodes())
		case err == nil && d.Plane > 0:
			p.Ranks = inTurn(groups, i, within, base, d.Plane)
		default: // block; and what an older program took for block
			p.Ranks = block(groups, i, within, base)
		}
		return p, true
	}
	return Portion{}, false
}

// block: each node takes the next ranks until it has its tasks.
func block(groups []*apiv1.NodeGroup, at, within int, base uint32) []uint32 {
	first := base + uint32(within)*groups[at].Tasks
	for _, g := range groups[:at] {
		first += uint32(len(g.Nodes)) * g.Tasks
	}
	ranks := make([]uint32, groups[at].Tasks)
	for i := range ranks {
		ranks[i] = first + uint32(i)
	}
	return ranks
}

// inTurn: the nodes take so many ranks each in turn; a node that has its tasks is passed over.
func inTurn(groups []*apiv1.NodeGroup, at, within int, base, size uint32) []uint32 {
	tasks := groups[at].Tasks
	ranks := make([]uint32, 0, tasks)
	for dealt := uint32(0); dealt < tasks; dealt += min(size, tasks-dealt) {
		take := min(size, tasks-dealt)
		first := base + uint32(within)*take
		for i, g := range groups {
			n := uint32(len(g.Nodes))
			first += n * min(g.Tasks, dealt)
			if i < at && g.Tasks > dealt {
				first += n * min(size, g.Tasks-dealt)
			}
		}
		for i := range take {
			ranks = append(ranks, first+i)
		}
	}
	return ranks
}

// arbitrary: a list says where each rank is.
func arbitrary(name string, base uint32, names []string) []uint32 {
	var ranks []uint32
	for i, n := range names {
		if n == name {
			ranks = append(ranks, base+uint32(i))
		}
	}
	return ranks
}

// nameIn returns the name of one of a step's nodes.
func nameIn(step *apiv1.Step, node uint32) string {
	names, err := notation.Expand(step.NodeList)
	i := slices.Index(Nodes(step.Placement), node)
	if err != nil || i < 0 || i >= len(names) {
		return "" // no placement without its names is ever stored
	}
	return names[i]
}

// Nodes returns the nodes of a placement, each once, in the order in which they come first.
func Nodes(p *apiv1.Placement) []uint32 {
	var nodes []uint32
	seen := make(map[uint32]bool)
	for _, g := range p.GetGroups() {
		for _, n := range g.Nodes {
			if !seen[n] {
				seen[n] = true
				nodes = append(nodes, n)
			}
		}
	}
	return nodes
}

// Distribution is how ranks are laid out over nodes.
type Distribution struct {
	// Plane is how many consecutive ranks a node takes in its turn: 1 for "cyclic", N for "plane=N", 0 for "block".
	Plane uint32
	// Arbitrary means that ResourceRequest.task_nodes says where each rank is.
	Arbitrary bool
}

// maxPlane bounds the size of a plane: nobody has more tasks on a node.
const maxPlane = 65_536

// ParseDistribution reads the text of TaskOptions.distribution: block (also "" and "*"), cyclic, plane=N or arbitrary, and after it, separated by ":", at
// most two words for the binding to sockets and cores (block, cyclic, fcyclic or *), which the node reads. An error is a sentence.
func ParseDistribution(text string) (Distribution, error) {
	first, rest, binds := strings.Cut(strings.ToLower(text), ":")
	if binds {
		for i, word := range strings.Split(rest, ":") {
			if i > 1 || !slices.Contains([]string{"block", "cyclic", "fcyclic", "*"}, word) {
				return Distribution{}, fmt.Errorf("%q is not a distribution: after the first word come at most two of block, cyclic, fcyclic and *", text)
			}
		}
	}
	if number, isPlane := strings.CutPrefix(first, "plane="); isPlane {
		n, err := strconv.ParseUint(number, 10, 32)
		if err != nil || n == 0 || n > maxPlane {
			return Distribution{}, fmt.Errorf("%q is not a distribution: the size of a plane is 1 to %d", text, maxPlane)
		}
		return Distribution{Plane: uint32(n)}, nil
	}
	switch first {
	case "", "*", "block":
		return Distribution{}, nil
	case "cyclic":
		return Distribution{Plane: 1}, nil
	case "arbitrary":
		return Distribution{Arbitrary: true}, nil
	default:
		return Distribution{}, fmt.Errorf("%q is not a distribution: block, cyclic, plane=N and arbitrary are", text)
	}
}
