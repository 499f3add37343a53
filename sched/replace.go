package sched

import "slices"

// Replacement asks for other nodes in place of some of a job's that has its nodes but has not started.
type Replacement struct {
	// Job with its request; Attempt is the present one.
	Job Job
	// Partition it was placed in.
	Partition string
	// Groups are its present nodes in rank order.
	Groups []Group
	// Leave are the nodes to replace.
	Leave []NodeID
	// Avoid are nodes that must not be chosen, besides those of the job.
	Avoid map[NodeID]bool
}

// Replace finds free nodes for what the leaving ones had, and returns the whole new placement: who stays has what it had. false if there are
// none, or if a leaving node is one that the job must have. Promises to jobs that wait do not count: this one was placed before them. The
// view is not changed, except by taking in what is new.
func (v *View) Replace(r *Replacement) (Placement, bool) {
	if v.stale {
		v.rebuild()
	}
	part := v.partitions[r.Partition]
	if part == nil || part.Down {
		return Placement{}, false
	}
	shape, sentence := shapeOf(&r.Job.Request, &part.Partition)
	typ, known := v.idx.typeOf[shape.gpuType]
	if sentence != "" || !known {
		return Placement{}, false
	}
	extra, never := v.idx.extras(&shape)
	if never.Code != None {
		return Placement{}, false
	}
	f := replacing{v: v, r: r, part: part, shape: &classShape{shape: shape, part: part, typ: typ, extra: extra}, taken: map[NodeID]bool{}}
	return f.placement()
}

// replacing is the search for a replacement.
type replacing struct {
	v     *View
	r     *Replacement
	part  *partition
	shape *classShape
	taken map[NodeID]bool
}

// share is a node with what it gives.
type share struct {
	n *node
	g Group
}

func (f *replacing) placement() (Placement, bool) {
	var shares []share
	var leaving []Group
	for _, g := range f.r.Groups {
		for _, id := range g.Nodes {
			n, own := f.v.nodes[id], g
			own.Nodes = []NodeID{id}
			f.taken[id] = true
			switch {
			case n == nil:
				return Placement{}, false
			case slices.Contains(f.r.Leave, id):
				if slices.Contains(f.r.Job.Request.Include, n.Name) {
					return Placement{}, false
				}
				leaving = append(leaving, own)
			default:
				shares = append(shares, share{n, own})
			}
		}
	}
	for i := range leaving {
		s, ok := f.instead(&leaving[i])
		if !ok {
			return Placement{}, false
		}
		f.taken[s.n.ID] = true
		shares = append(shares, s)
	}
	slices.SortFunc(shares, func(a, b share) int { return a.n.slot - b.n.slot })
	p := Placement{Job: f.r.Job.ID, Attempt: f.r.Job.Attempt, Partition: f.r.Partition}
	for i := range shares {
		s := &shares[i]
		p.Epochs = append(p.Epochs, s.n.Epoch)
		if k := len(p.Groups); k > 0 && sameShare(&p.Groups[k-1], &s.g) {
			p.Groups[k-1].Nodes = append(p.Groups[k-1].Nodes, s.n.ID)
		} else {
			p.Groups = append(p.Groups, s.g)
		}
	}
	return p, true
}

// instead finds the node that taking a leaving node's share leaves the least of: fewest free GPUs, then CPUs, then the first.
func (f *replacing) instead(left *Group) (share, bool) {
	units := f.unitsOf(left)
	st := &f.v.idx.base
	best := -1
	for slot, n := range f.v.idx.nodes {
		if !f.part.slots.has(slot) || !f.v.idx.takes.has(slot) || f.taken[n.ID] || f.r.Avoid[n.ID] || slices.Contains(f.r.Job.Request.Exclude, n.Name) {
			continue
		}
		free := room{
			cpus: int(st.cpus[slot]), gpus: int(st.gpus[f.shape.typ][slot]), memory: st.memory[slot],
			idle: st.owners[slot] == 0, memoryWhole: st.used[slot] == 0,
		}
		if !f.shape.hasExtra(st, slot) || f.shape.capacity(free) < max(units, 1) {
			continue
		}
		if best >= 0 && f.v.idx.degraded.has(slot) != f.v.idx.degraded.has(best) {
			if f.v.idx.degraded.has(best) {
				best = slot
			}
			continue
		}
		if best < 0 || st.gpus[f.shape.typ][slot] < st.gpus[f.shape.typ][best] ||
			st.gpus[f.shape.typ][slot] == st.gpus[f.shape.typ][best] && st.cpus[slot] < st.cpus[best] {
			best = slot
		}
	}
	if best < 0 {
		return share{}, false
	}
	n := f.v.idx.nodes[best]
	return share{n, give(f.v.idx, n, f.shape, units, st)}, true
}

// unitsOf returns how many of the job's units a share has; 0 where every node has the same.
func (f *replacing) unitsOf(g *Group) uint32 {
	switch s := f.shape; {
	case s.units == 0:
		return 0
	case s.unit.tasks > 0:
		return g.Tasks / s.unit.tasks
	default:
		return uint32(g.GPUs.Count()) / s.unit.gpus
	}
}
