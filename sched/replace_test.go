package sched

import (
	"slices"
	"testing"
)

// A replacement satisfies every word of the request, leaves who stays what it had, and has none of the nodes that leave or are to be
// avoided; where a spare node of the same kind is idle, there is one.
func TestAReplacementSatisfiesTheRequestAndMovesNobodyWhoStays(t *testing.T) {
	replaced, impossible := 0, 0
	for seed := range 6000 {
		r := seeded(seed)
		w := randomWorld(r)
		now := Time(1_000_000)
		jobs := map[JobID]Job{}
		for id, j := range w.jobs {
			jobs[id] = j
		}
		v := w.view(r)
		for _, p := range v.Plan(now, DefaultLimits()).Placements {
			if err := w.apply(p, now); err != nil {
				t.Fatal(err)
			}
		}
		for id, c := range w.claims {
			var nodes []NodeID
			for _, g := range c.Groups {
				nodes = append(nodes, g.Nodes...)
			}
			leave := nodes[r.IntN(len(nodes))]
			avoid := NodeID(1 + r.IntN(len(w.nodes)))
			ask := &Replacement{Job: jobs[id], Partition: "p", Groups: c.Groups, Leave: []NodeID{leave}, Avoid: map[NodeID]bool{avoid: true}}
			v := w.view(r)
			before := v.Dump()
			p, ok := v.Replace(ask)
			if v.Dump() != before {
				t.Fatalf("seed %d: the view changed", seed)
			}
			if !ok {
				impossible++
				for _, n := range w.nodes {
					a, b := n, w.nodes[leave]
					if n.State == NodeUp && n.Owners == 0 && n.ID != avoid && a.CPUs == b.CPUs && a.MemoryMB == b.MemoryMB && slices.Equal(a.GPUs, b.GPUs) && slices.Equal(a.Gres, b.Gres) &&
						a.UnusableCPUs.Equal(b.UnusableCPUs) && a.UnusableGPUs.Equal(b.UnusableGPUs) &&
						!slices.Contains(nodes, n.ID) && !slices.Contains(ask.Job.Request.Exclude, n.Name) && !slices.Contains(ask.Job.Request.Include, b.Name) {
						t.Fatalf("seed %d: node %s is idle and equal to %s, and does not take its place in %+v", seed, n.Name, b.Name, ask.Job)
					}
				}
				continue
			}
			replaced++
			after := &world{nodes: map[NodeID]Node{}, partitions: w.partitions, jobs: map[JobID]Job{id: jobs[id]}, claims: map[JobID]Claim{}}
			for nid, n := range w.nodes { // As if the job had gone.
				for _, g := range c.Groups {
					if slices.Contains(g.Nodes, nid) {
						n.UsedCPUs, n.UsedGPUs = without(n.UsedCPUs, g.CPUs), without(n.UsedGPUs, g.GPUs)
						n.UsedMemoryMB -= g.MemoryMB
						n.Owners--
					}
				}
				after.nodes[nid] = n
			}
			if err := after.apply(p, now); err != nil {
				t.Fatalf("seed %d: job %+v instead of %+v: %v", seed, jobs[id], c.Groups, err)
			}
			for _, g := range p.Groups {
				for _, n := range g.Nodes {
					if n == leave || !slices.Contains(nodes, n) && n == avoid {
						t.Fatalf("seed %d: node %d is part of it", seed, n)
					}
					for _, old := range c.Groups {
						if slices.Contains(old.Nodes, n) && !sameShare(&old, &g) {
							t.Fatalf("seed %d: node %d had %+v and gets %+v", seed, n, old, g)
						}
					}
				}
			}
		}
	}
	t.Logf("%d replaced, %d impossible", replaced, impossible)
	if replaced < 300 || impossible < 300 {
		t.Fatal("the random worlds do not reach what they are for")
	}
}
