package state

import (
	"fmt"
	"iter"
	"math/bits"
	"slices"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/notation"
)

// NodeSet is an immutable set of node numbers.
type NodeSet struct {
	words []uint64
	count int
}

// Has reports whether a node is in the set.
func (s *NodeSet) Has(number uint32) bool {
	return s != nil && int(number/64) < len(s.words) && s.words[number/64]&(1<<(number%64)) != 0
}

// Len returns the number of nodes in the set.
func (s *NodeSet) Len() int {
	if s == nil {
		return 0
	}
	return s.count
}

// All yields the node numbers, ascending.
func (s *NodeSet) All() iter.Seq[uint32] {
	return func(yield func(uint32) bool) {
		if s == nil {
			return
		}
		for i, w := range s.words {
			for ; w != 0; w &= w - 1 {
				if !yield(uint32(64*i + bits.TrailingZeros64(w))) {
					return
				}
			}
		}
	}
}

// with returns a set that also has the number.
func (s *NodeSet) with(number uint32) *NodeSet {
	if s.Has(number) {
		return s
	}
	words := make([]uint64, max(len(s.words), int(number/64)+1))
	copy(words, s.words)
	words[number/64] |= 1 << (number % 64)
	return &NodeSet{words: words, count: s.count + 1}
}

// partition is a partition's configuration with its nodes. names is nil if all nodes belong to it.
type partition struct {
	config *apiv1.Partition
	names  map[string]struct{}
	nodes  *NodeSet
	// classes counts the nodes by how they are configured, so that a submission need not look at every node.
	classes []Class
}

func (p *partition) admits(name string) bool {
	if p.names == nil {
		return true
	}
	_, found := p.names[name]
	return found
}

// AllNodes as Partition.nodes means every node that joins.
const AllNodes = "ALL"

// ExpandPartition returns the node names of a partition; all is true for "ALL".
func ExpandPartition(p *apiv1.Partition) (names []string, all bool, err error) {
	if p.Nodes == AllNodes {
		return nil, true, nil
	}
	names, err = notation.Expand(p.Nodes)
	if err != nil {
		return nil, false, fmt.Errorf("nodes of partition %s: %w", p.Name, err)
	}
	return names, false, nil
}

func newPartition(config *apiv1.Partition) (*partition, error) {
	names, all, err := ExpandPartition(config)
	if err != nil {
		return nil, err
	}
	p := &partition{config: config, nodes: &NodeSet{}}
	if !all {
		p.names = make(map[string]struct{}, len(names))
		for _, name := range names {
			p.names[name] = struct{}{}
		}
	}
	return p, nil
}

func (v *View) partition(name string) *partition {
	i := slices.IndexFunc(v.partitions, func(p *partition) bool { return p.config.Name == name })
	if i < 0 {
		return nil
	}
	return v.partitions[i]
}

// Partition returns a partition's configuration, or nil.
func (v *View) Partition(name string) *apiv1.Partition {
	if p := v.partition(name); p != nil {
		return p.config
	}
	return nil
}

// DefaultPartition returns the partition of jobs that name none, or nil.
func (v *View) DefaultPartition() *apiv1.Partition {
	for _, p := range v.partitions {
		if p.config.IsDefault {
			return p.config
		}
	}
	return nil
}

// PartitionNodes returns the nodes of a partition that ever joined; nil if there is no such partition.
func (v *View) PartitionNodes(name string) *NodeSet {
	if p := v.partition(name); p != nil {
		return p.nodes
	}
	return nil
}

// PartitionSize returns how many nodes a partition has, those too that are configured by name and never joined.
func (v *View) PartitionSize(name string) int {
	p := v.partition(name)
	switch {
	case p == nil:
		return 0
	case p.names == nil:
		return p.nodes.Len()
	default:
		return len(p.names)
	}
}

// Class counts the nodes of a partition that are configured alike.
type Class struct {
	// CPUs of each node.
	CPUs uint64
	// MemoryMB of each node, in MiB.
	MemoryMB uint64
	// GPUs of each node.
	GPUs uint64
	// Types maps GPU types to their number on each node. It is never changed.
	Types map[string]uint64
	// Gres maps names of other devices, and NAME:TYPE where they have a type, to their number on each node. It is never changed.
	Gres map[string]uint64
	// Nodes of this class.
	Nodes uint64

	key string
}

// ClassOf returns the class of a node with that specification.
func ClassOf(spec *apiv1.NodeSpec) Class {
	c := Class{CPUs: uint64(spec.Cpus), MemoryMB: spec.MemoryMb, GPUs: uint64(len(spec.Gpus)), Nodes: 1}
	var types []string
	for _, g := range spec.Gpus {
		types = append(types, g.Type)
		if c.Types == nil {
			c.Types = make(map[string]uint64)
		}
		c.Types[g.Type]++
	}
	slices.Sort(types)
	var gres []string
	for _, g := range spec.Gres {
		gres = append(gres, fmt.Sprintf("%s:%s=%d", g.Name, g.Type, g.Count))
		if c.Gres == nil {
			c.Gres = make(map[string]uint64)
		}
		c.Gres[g.Name] += uint64(g.Count)
		if g.Type != "" {
			c.Gres[g.Name+":"+g.Type] += uint64(g.Count)
		}
	}
	slices.Sort(gres)
	c.key = fmt.Sprintf("%d/%d/%q/%q", c.CPUs, c.MemoryMB, types, gres)
	return c
}

// Count adds n nodes of a class to classes, in a new list; n may be negative.
func Count(classes []Class, c Class, n int) []Class {
	classes = slices.Clone(classes)
	i := slices.IndexFunc(classes, func(o Class) bool { return o.key == c.key })
	switch {
	case i < 0 && n > 0:
		c.Nodes = uint64(n)
		return append(classes, c)
	case i < 0:
		return classes
	}
	classes[i].Nodes = uint64(max(0, int64(classes[i].Nodes)+int64(n)))
	if classes[i].Nodes == 0 {
		return slices.Delete(classes, i, i+1)
	}
	return classes
}

// PartitionClasses returns how the nodes of a partition that ever joined are configured. It is shared: never modify it.
func (v *View) PartitionClasses(name string) []Class {
	if p := v.partition(name); p != nil {
		return p.classes
	}
	return nil
}

// NodeConfigured reports whether a partition names the node, though it may never have joined.
func (v *View) NodeConfigured(name string) bool {
	return slices.ContainsFunc(v.partitions, func(p *partition) bool {
		if p.names == nil {
			return false
		}
		_, found := p.names[name]
		return found
	})
}
