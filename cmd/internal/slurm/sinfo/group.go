package sinfo

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	"github.com/muster-hpc/muster/cmd/internal/slurm/fetch"
	"github.com/muster-hpc/muster/cmd/internal/slurm/record"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/notation"
)

// group is a row: nodes of a partition that are shown together.
type group struct {
	cluster   string
	partition *apiv1.Partition
	index     int // position of the partition in the configuration
	nodes     []*apiv1.Node
	state     record.NodeState // of the first node
	members   int              // nodes of the whole partition
	names     func(uid uint32) string
}

// role is what a column does to the grouping.
type role int

const (
	sums     role = iota // counts over the nodes of a row: never tells nodes apart
	tells                // tells nodes apart
	measures             // tells nodes apart only with --exact
	ofPart               // tells partitions apart
)

// measure writes the smallest value of a row, with "+" if some node has more.
func measure(g *group, value func(*apiv1.Node) uint64) string {
	if len(g.nodes) == 0 {
		return "0"
	}
	low, high := value(g.nodes[0]), value(g.nodes[0])
	for _, n := range g.nodes[1:] {
		low, high = min(low, value(n)), max(high, value(n))
	}
	text := strconv.FormatUint(low, 10)
	if high > low {
		text += "+"
	}
	return text
}

// grouping says how nodes become rows.
type grouping struct {
	parts  bool // partitions are told apart
	keys   []func(*group) string
	single bool // a row for each node
}

// gather makes the rows from what passes keep.
func (how grouping) gather(list *fetch.Nodes, cluster string, names func(uint32) string, partitions []string,
	keep func(*apiv1.Node, record.NodeState) bool) []*group {
	var groups []*group
	found := map[string]*group{}
	for i, p := range list.Partitions {
		if partitions != nil && !slices.Contains(partitions, p.GetName()) {
			continue
		}
		members := record.Members(p, list.Nodes)
		add := func(g *group, key string) {
			if how.parts {
				key = p.GetName() + "\x00" + key
			}
			if have := found[key]; have != nil {
				if !slices.Contains(have.nodes, g.nodes[0]) {
					have.nodes = append(have.nodes, g.nodes[0])
				}
				return
			}
			found[key] = g
			groups = append(groups, g)
		}
		for _, n := range members {
			state := list.State(n)
			if !keep(n, state) {
				continue
			}
			g := &group{cluster: cluster, partition: p, index: i, nodes: []*apiv1.Node{n}, state: state, members: len(members), names: names}
			key := ""
			for _, of := range how.keys {
				key += of(g) + "\x00"
			}
			if how.single {
				key += n.GetSpec().GetName()
			}
			add(g, key)
		}
		if len(members) == 0 && keep(nil, record.NodeState{}) && how.parts {
			groups = append(groups, &group{cluster: cluster, partition: p, index: i, names: names})
		}
	}
	return groups
}

// order sorts rows by letters; rows that are equal stay in order of partition and node.
func order(groups []*group, text string) {
	byName := !strings.Contains(text, "#")
	var compare []func(a, b *group) int
	down := false
	for _, letter := range text {
		var by func(a, b *group) int
		switch letter {
		case '-':
			down = true
			continue
		case ',', '+', '#', ' ':
			continue
		case 'P', 'R':
			by = func(a, b *group) int {
				if byName {
					return strings.Compare(a.partition.GetName(), b.partition.GetName())
				}
				return a.index - b.index
			}
		case 't', 'T':
			by = func(a, b *group) int { return a.state.Weight() - b.state.Weight() }
		case 'N', 'n':
			by = func(a, b *group) int { return notation.Compare(firstName(a), firstName(b)) }
		default:
			column, ok := letters[byte(letter)]
			if !ok {
				continue
			}
			by = func(a, b *group) int { return natural(column.Value(a), column.Value(b)) }
		}
		if down {
			up := by
			by = func(a, b *group) int { return up(b, a) }
		}
		down = false
		compare = append(compare, by)
	}
	slices.SortStableFunc(groups, func(a, b *group) int {
		for _, by := range compare {
			if n := by(a, b); n != 0 {
				return n
			}
		}
		return 0
	})
}

func firstName(g *group) string {
	if len(g.nodes) == 0 {
		return ""
	}
	return g.nodes[0].GetSpec().GetName()
}

// natural compares numbers as numbers and everything else as text.
func natural(a, b string) int {
	x, err1 := strconv.ParseInt(strings.TrimSuffix(a, "+"), 10, 64)
	y, err2 := strconv.ParseInt(strings.TrimSuffix(b, "+"), 10, 64)
	if err1 == nil && err2 == nil {
		return cmp.Compare(x, y)
	}
	return strings.Compare(a, b)
}
