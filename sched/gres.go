package sched

import (
	"fmt"
	"slices"
	"strings"

	"github.com/muster-hpc/muster/proto/wiring"
)

// gpuName is the name under which requests of generic resources speak of GPUs.
const gpuName = "gpu"

// pool is a set of equal units on each node: those of a name, or of a name and a type.
type pool struct{ name, kind string }

// extra is what each node must have for a job besides its amount: free GPUs of a type (typ above 0), or free units of a pool.
type extra struct {
	typ   int
	pool  int
	count int32
}

// sameShares compares units, both in the order of names.
func sameShares(a, b []GresShare) bool {
	return slices.EqualFunc(a, b, func(x, y GresShare) bool { return x.Name == y.Name && x.Units.Equal(y.Units) })
}

func unitsIn(shares []GresShare, name string) Mask {
	for i := range shares {
		if shares[i].Name == name {
			return shares[i].Units
		}
	}
	return nil
}

// plusUnits returns a new list with further units.
func plusUnits(shares, more []GresShare) []GresShare {
	sum := slices.Clone(shares)
	for _, s := range more {
		i, found := slices.BinarySearchFunc(sum, s, func(a, b GresShare) int { return strings.Compare(a.Name, b.Name) })
		if found {
			sum[i].Units = sum[i].Units.with(s.Units)
		} else {
			sum = slices.Insert(sum, i, s)
		}
	}
	return sum
}

// addPools makes the pools of a node known.
func (x *index) addPools(n *node) {
	for _, g := range n.Gres {
		for _, p := range []pool{{g.Name, ""}, {g.Name, g.Type}} {
			if _, known := x.poolOf[p]; !known {
				x.poolOf[p] = len(x.pools)
				x.pools = append(x.pools, p)
			}
		}
	}
}

// unitsOf returns a node's units in each pool.
func (x *index) unitsOf(n *node) []Mask {
	units := make([]Mask, len(x.pools))
	first := map[string]int{}
	for _, g := range n.Gres {
		from := first[g.Name]
		first[g.Name] += int(g.Count)
		span := upTo(from + int(g.Count)).without(upTo(from))
		for _, kind := range slices.Compact([]string{"", g.Type}) {
			i := x.poolOf[pool{g.Name, kind}]
			units[i] = units[i].with(span)
		}
	}
	return units
}

// extras finds the types and pools of a request. Nothing that no node has is ever free.
func (x *index) extras(s *shape) ([]extra, Reason) {
	var all []extra
	for _, g := range s.gpuTypes {
		typ, known := x.typeOf[g.Type]
		if !known {
			return nil, Reason{BadConstraints, fmt.Sprintf("asks for GPUs of type %s; no node has them", g.Type)}
		}
		all = append(all, extra{typ: typ, count: int32(g.Count)})
	}
	for _, g := range s.gres {
		i, known := x.poolOf[pool{g.Name, g.Type}]
		if !known {
			return nil, Reason{BadConstraints, fmt.Sprintf("asks for %s; no node has any", gresWords(g.Name, g.Type))}
		}
		all = append(all, extra{pool: i, count: int32(g.Count)})
	}
	return all, Reason{}
}

func gresWords(name, kind string) string {
	if kind == "" {
		return name
	}
	return name + ":" + kind
}

// capacity is how many units of a shape a slot takes now, 0 if it can't be part.
func (p *pass) capacity(slot int, s *classShape, blocked bitset) uint32 {
	// What a promise leaves of other devices is not kept: nothing.
	if len(s.extra) > 0 && (blocked != nil && blocked.has(slot) || !s.hasExtra(p.st, slot)) {
		return 0
	}
	return s.capacity(p.roomOf(slot, s, blocked))
}

// capacityAt is the same at a time if every job runs to its limit and nothing else starts.
func (p *pass) capacityAt(slot int, s *classShape, at Time) uint32 {
	if len(s.extra) > 0 && !p.hasExtraAt(slot, s, at) {
		return 0
	}
	return s.capacity(p.roomAt(slot, s.typ, at))
}

// capacity is the same of a node of a kind when nothing runs there.
func (x *index) capacity(k int, s *classShape) uint32 {
	for _, e := range s.extra {
		have := x.kinds[k].gpus[e.typ]
		if e.typ == 0 {
			have = x.kinds[k].gres[e.pool]
		}
		if have < int(e.count) {
			return 0
		}
	}
	return s.shape.capacity(x.whole(k, s.typ))
}

func (s *classShape) hasExtra(st *state, slot int) bool {
	for _, e := range s.extra {
		if free(st, slot, e) < e.count {
			return false
		}
	}
	return true
}

func free(st *state, slot int, e extra) int32 {
	if e.typ > 0 {
		return st.gpus[e.typ][slot]
	}
	return st.gres[e.pool][slot]
}

func (p *pass) hasExtraAt(slot int, s *classShape, at Time) bool {
	n := p.x.nodes[slot]
	for _, e := range s.extra {
		have := int(free(p.st, slot, e))
		for _, list := range [2][]hold{n.holds, p.later[slot]} {
			for i := range list {
				h := &list[i]
				switch {
				case p.until(h) > at:
				case e.typ > 0:
					have += h.gpus.without(n.UnusableGPUs).countIn(n.byType[p.x.types[e.typ]])
				default:
					have += unitsIn(h.gres, p.x.pools[e.pool].name).countIn(n.units[e.pool])
				}
			}
		}
		if have < int(e.count) {
			return false
		}
	}
	return true
}

// devices chooses GPUs, CPUs close to them, and other devices of one node for an amount. The caller knows that they are free.
func (s *classShape) devices(x *index, n *node, a amount, st *state) Group {
	g := Group{Nodes: []NodeID{n.ID}, Tasks: a.tasks, MemoryMB: a.memory}
	taken := st.gpuMasks[n.slot]
	left := int(a.gpus)
	for _, want := range s.gpuTypes {
		more := chooseGPUs(n, n.byType[want.Type].without(taken), int(want.Count))
		g.GPUs, taken, left = g.GPUs.with(more), taken.with(more), left-int(want.Count)
	}
	gpus := n.all
	if s.gpuType != "" {
		gpus = n.byType[s.gpuType]
	}
	if left > 0 || g.GPUs == nil {
		g.GPUs = g.GPUs.with(chooseGPUs(n, gpus.without(taken), left))
	}
	g.CPUs = n.cpusNear(g.GPUs, int(a.cpus), st.cpuMasks[n.slot])
	g.Gres = s.chooseGres(x, n, st)
	return g
}

// chooseGPUs chooses some of the free GPUs: those to which nothing is preferred, and of them those that work best together.
func chooseGPUs(n *node, free Mask, count int) Mask {
	if good := free.without(n.DegradedGPUs); good.Count() >= count {
		free = good
	}
	if n.Wiring != nil && count > 0 {
		if best, ok := wiring.Choose(n.Wiring, free, count); ok {
			return best
		}
	}
	return lowest(count, free, nil)
}

// cpusNear chooses the lowest free CPUs of those close to the GPUs first.
func (n *node) cpusNear(gpus Mask, count int, used Mask) Mask {
	all := upTo(int(n.CPUs))
	var near Mask
	for i, m := range n.NearCPUs {
		if gpus.Has(i) {
			near = near.with(m)
		}
	}
	nearby := all.inBoth(near).without(used)
	if have := nearby.Count(); have < count {
		return nearby.with(lowest(count-have, all, used.with(nearby)))
	}
	return lowest(count, nearby, nil)
}

// chooseGres chooses the lowest free units of what is asked by type first.
func (s *classShape) chooseGres(x *index, n *node, st *state) []GresShare {
	var chosen []GresShare
	for i := len(s.gres) - 1; i >= 0; i-- { // Those with a type follow the total of their name: they are taken first.
		g := s.gres[i]
		own := unitsIn(chosen, g.Name)
		units := n.units[x.poolOf[pool{g.Name, g.Type}]]
		count := int(g.Count)
		if g.Type == "" {
			count -= own.Count()
		}
		chosen = plusUnits(chosen, []GresShare{{g.Name, lowest(count, units, unitsIn(st.units[n.slot], g.Name).with(own))}})
	}
	return chosen
}
