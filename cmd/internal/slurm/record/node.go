package record

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/notation"
)

// NodeState is how a node's state is written.
type NodeState struct {
	// Base is "DOWN", "IDLE", "MIXED" or "ALLOCATED".
	Base string
	// Drain tells that nothing new is placed there.
	Drain bool
	// Busy tells that jobs are there.
	Busy bool
	// Completing tells that all its jobs are being ended.
	Completing bool
	// Silent tells that it does not answer.
	Silent bool
}

// StateOfNode is the state of a node; completing tells whether all jobs on it are being ended.
func StateOfNode(n *apiv1.Node, completing bool) NodeState {
	s := NodeState{Base: "IDLE", Drain: n.GetDrain(), Busy: n.GetCpusAllocated() > 0 || len(n.GetOwners()) > 0}
	switch {
	case n.GetState() == apiv1.NodeState_NODE_STATE_DOWN:
		s.Base, s.Silent = "DOWN", true
	case n.GetCpusAllocated() > 0 && n.GetCpusAllocated() >= n.GetSpec().GetCpus():
		s.Base = "ALLOCATED"
	case s.Busy:
		s.Base = "MIXED"
	}
	s.Completing = completing && s.Busy && s.Base != "DOWN"
	return s
}

// Long is sinfo's %T ("draining").
func (s NodeState) Long() string {
	return s.text("allocated", "mixed", "drained", "draining", "completing")
}

// Short is sinfo's %t ("drng").
func (s NodeState) Short() string { return s.text("alloc", "mix", "drain", "drng", "comp") }

func (s NodeState) text(alloc, mix, drained, draining, completing string) string {
	word := map[string]string{"DOWN": "down", "IDLE": "idle", "MIXED": mix, "ALLOCATED": alloc}[s.Base]
	switch {
	case s.Drain && s.Busy && s.Base != "DOWN":
		word = draining
	case s.Drain:
		word = drained
	case s.Completing:
		word = completing
	}
	if s.Silent {
		word += "*"
	}
	return word
}

// Words are the state as scontrol and JSON write it: the base and its flags.
func (s NodeState) Words() []string {
	words := []string{s.Base}
	if s.Completing {
		words = append(words, "COMPLETING")
	}
	if s.Drain {
		words = append(words, "DRAIN")
	}
	if s.Silent {
		words = append(words, "NOT_RESPONDING")
	}
	return words
}

// Weight orders states as sinfo does: those with flags first, then mixed, allocated, idle and down.
func (s NodeState) Weight() int {
	weight := map[string]int{"DOWN": 1, "IDLE": 2, "ALLOCATED": 3, "MIXED": 5}[s.Base]
	if s.Drain {
		weight += 0x200
	}
	if s.Completing {
		weight += 0x400
	}
	if s.Silent {
		weight += 0x800
	}
	return weight
}

// Shares of CPUs and nodes by what they do, as in "A/I/O/T".
type Shares struct{ Allocated, Idle, Other, Total uint32 }

// String writes "A/I/O/T".
func (s Shares) String() string {
	return fmt.Sprintf("%d/%d/%d/%d", s.Allocated, s.Idle, s.Other, s.Total)
}

// Plus adds.
func (s Shares) Plus(o Shares) Shares {
	return Shares{s.Allocated + o.Allocated, s.Idle + o.Idle, s.Other + o.Other, s.Total + o.Total}
}

// CPUShares is what a node's CPUs do: idle ones of a drained or lost node are "other".
func CPUShares(n *apiv1.Node) Shares {
	total, used := n.GetSpec().GetCpus(), n.GetCpusAllocated()
	free := total - min(used, total)
	if n.GetState() == apiv1.NodeState_NODE_STATE_DOWN || n.GetDrain() {
		return Shares{Allocated: used, Other: free, Total: total}
	}
	return Shares{Allocated: used, Idle: free, Total: total}
}

// NodeShares is what a node does.
func NodeShares(s NodeState) Shares {
	switch {
	case s.Base == "DOWN" || s.Drain && !s.Busy:
		return Shares{Other: 1, Total: 1}
	case s.Busy:
		return Shares{Allocated: 1, Total: 1}
	}
	return Shares{Idle: 1, Total: 1}
}

// Gres is a node's GPUs as "gpu:h100:8", by type, and its other devices ("ib:mlx5:2"); empty if it has none.
func Gres(n *apiv1.Node) string {
	parts := []string{gresText(n, "", func(int) bool { return true })}
	for _, g := range n.GetSpec().GetGres() {
		parts = append(parts, gresName(g)+strconv.FormatUint(uint64(g.GetCount()), 10))
	}
	return joined(parts)
}

// GresUsed is what of a node's GPUs and other devices is in use, as "gpu:h100:2(IDX:0-1),ib:0(IDX:N/A)".
func GresUsed(n *apiv1.Node) string {
	parts := []string{gresText(n, "(IDX:%s)", notation.Mask(n.GetGpusAllocatedMask()).Has)}
	used := map[string]notation.Mask{}
	for _, share := range n.GetGresAllocated() {
		used[share.GetName()] = share.GetMask()
	}
	first := map[string]int{} // units are counted over all entries of a name
	for _, g := range n.GetSpec().GetGres() {
		from := first[g.GetName()]
		first[g.GetName()] += int(g.GetCount())
		var units []int
		for _, unit := range used[g.GetName()].Devices() {
			if unit >= from && unit < from+int(g.GetCount()) {
				units = append(units, unit)
			}
		}
		list := notation.FoldIndexes(units)
		if list == "" {
			list = "N/A"
		}
		parts = append(parts, fmt.Sprintf("%s%d(IDX:%s)", gresName(g), len(units), list))
	}
	return joined(parts)
}

// gresName is the name and type of a generic resource, ready for a count.
func gresName(g *apiv1.Gres) string {
	if g.GetType() == "" {
		return g.GetName() + ":"
	}
	return g.GetName() + ":" + g.GetType() + ":"
}

// joined joins what is not empty with commas.
func joined(parts []string) string {
	return strings.Join(slices.DeleteFunc(parts, func(s string) bool { return s == "" }), ",")
}

// gresText counts the GPUs that are wanted, by type in order of appearance; index is a format for their numbers.
func gresText(n *apiv1.Node, index string, wanted func(int) bool) string {
	var order []string
	by := map[string][]int{}
	for _, g := range n.GetSpec().GetGpus() {
		if _, seen := by[g.GetType()]; !seen {
			order = append(order, g.GetType())
			by[g.GetType()] = nil
		}
		if wanted(int(g.GetIndex())) {
			by[g.GetType()] = append(by[g.GetType()], int(g.GetIndex()))
		}
	}
	var parts []string
	for _, kind := range order {
		text := "gpu:"
		if kind != "" {
			text += kind + ":"
		}
		text += strconv.Itoa(len(by[kind]))
		if index != "" {
			list := notation.FoldIndexes(by[kind])
			if list == "" {
				list = "N/A"
			}
			text += fmt.Sprintf(index, list)
		}
		parts = append(parts, text)
	}
	return strings.Join(parts, ",")
}

// Members returns the nodes of a partition in natural order of their names.
func Members(p *apiv1.Partition, nodes []*apiv1.Node) []*apiv1.Node {
	var names map[string]bool
	if !strings.EqualFold(p.GetNodes(), "ALL") {
		names = map[string]bool{}
		list, err := notation.Expand(p.GetNodes())
		if err == nil {
			for _, name := range list {
				names[name] = true
			}
		}
	}
	var members []*apiv1.Node
	for _, n := range nodes {
		if names == nil || names[n.GetSpec().GetName()] {
			members = append(members, n)
		}
	}
	slices.SortStableFunc(members, func(a, b *apiv1.Node) int {
		return notation.Compare(a.GetSpec().GetName(), b.GetSpec().GetName())
	})
	return members
}

// NodeNames folds the names of nodes.
func NodeNames(nodes []*apiv1.Node) string {
	names := make([]string, len(nodes))
	for i, n := range nodes {
		names[i] = n.GetSpec().GetName()
	}
	return notation.Fold(names)
}

// OwnerJobs are the jobs that are on a node.
func OwnerJobs(n *apiv1.Node) []uint32 {
	var jobs []uint32
	for _, owner := range n.GetOwners() {
		if id := uint32(owner >> 32); !slices.Contains(jobs, id) {
			jobs = append(jobs, id)
		}
	}
	return jobs
}

// PriorityTier is the tier of a partition; one that was not given is 1, as in Slurm.
func PriorityTier(p *apiv1.Partition) uint32 {
	if tier := p.GetPriorityTier(); tier != 0 {
		return tier
	}
	return 1
}
