package sched

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/muster-hpc/muster/proto/wiring"
)

// View is what the planner knows: nodes, partitions, waiting jobs, and what runs. It is fed by changes and belongs to one goroutine.
type View struct {
	nodes      map[NodeID]*node
	names      map[string]*node
	partitions map[string]*partition
	jobs       map[JobID]*job
	classes    map[string]*class
	claims     map[JobID]*Claim
	timed      timedQueue
	loose      []*job
	// stale: the index must be built again, because nodes or partitions came, went, or changed what they have.
	stale bool
	dirty bool
	idx   *index
	work  scratch
	// resume is where the last pass stopped at a limit; the front if it did not. laps is how many times the end must still be reached until
	// every job has had its turn since the last change.
	resume position
	laps   int
	// reuse: what the last pass found out about classes holds still.
	reuse bool
}

// node is a machine with what the index keeps of it.
type node struct {
	Node
	slot    int
	kind    int
	suspect bool
	// holds has what claims own here, by (end, job).
	holds []hold
	// byType has the GPUs of each type.
	byType map[string]Mask
	all    Mask
	// usable is the kind that it is without its unusable devices.
	usable int
	// units are those of each pool of the index.
	units []Mask
}

// hold is what one claim owns on one node.
type hold struct {
	job   JobID
	end   Time
	cpus  Mask
	gpus  Mask
	gres  []GresShare
	owned amount
}

// NewView returns an empty view.
func NewView() *View {
	return &View{
		nodes: map[NodeID]*node{}, names: map[string]*node{}, partitions: map[string]*partition{},
		jobs: map[JobID]*job{}, classes: map[string]*class{}, claims: map[JobID]*Claim{}, stale: true,
	}
}

// Dirty tells whether anything that matters for a decision changed since the last Plan. Shown reasons do not matter.
func (v *View) Dirty() bool { return v.dirty }

// SetNode adds or replaces a node.
func (v *View) SetNode(n Node) {
	old := v.nodes[n.ID]
	if old == nil {
		old = &node{}
		v.nodes[n.ID] = old
		v.stale = true
		// Claims may have come before the node.
		for _, c := range v.claims {
			old.hold(n.ID, c)
		}
	} else if sameNode(&old.Node, &n) {
		return
	}
	if old.Name != n.Name || v.names[n.Name] != old || !sameDevices(&old.Node, &n) {
		if v.names[old.Name] == old {
			delete(v.names, old.Name)
		}
		v.names[n.Name] = old
		v.stale = true
		old.byType, old.all = gpuTypes(n.GPUs)
	}
	moved := old.State != n.State
	old.Node = n
	v.dirty = true
	if v.stale {
		return
	}
	v.idx.refresh(old)
	if moved {
		v.idx.generation++
		for _, p := range v.partitions {
			if p.slots.has(old.slot) {
				p.countUp(v.idx)
			}
		}
	}
}

func sameNode(a, b *Node) bool {
	return a.Name == b.Name && a.Epoch == b.Epoch && a.State == b.State && a.Reason == b.Reason &&
		a.UsedMemoryMB == b.UsedMemoryMB && a.Owners == b.Owners && a.Faults == b.Faults && a.UsedCPUs.Equal(b.UsedCPUs) &&
		a.UsedGPUs.Equal(b.UsedGPUs) && sameShares(a.UsedGres, b.UsedGres) && sameDevices(a, b)
}

// sameDevices compares what two nodes have, and which of it can be used.
func sameDevices(a, b *Node) bool {
	return a.CPUs == b.CPUs && a.MemoryMB == b.MemoryMB && slices.Equal(a.GPUs, b.GPUs) && a.UnusableCPUs.Equal(b.UnusableCPUs) &&
		a.UnusableGPUs.Equal(b.UnusableGPUs) && a.Degraded == b.Degraded && a.DegradedGPUs.Equal(b.DegradedGPUs) && slices.Equal(a.Gres, b.Gres) &&
		sameWiring(a.Wiring, b.Wiring) && slices.EqualFunc(a.NearCPUs, b.NearCPUs, Mask.Equal)
}

func sameWiring(a, b wiring.Topology) bool {
	if len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0]) {
		return true
	}
	return slices.EqualFunc(a, b, func(x, y wiring.Device) bool {
		return x.NUMA == y.NUMA && x.Board == y.Board && slices.Equal(x.Links, y.Links) && slices.Equal(x.Paths, y.Paths)
	})
}

func gpuTypes(gpus []string) (map[string]Mask, Mask) {
	byType, all := map[string]Mask{}, make(Mask, (len(gpus)+63)/64)
	for i, t := range gpus {
		if t == "" {
			continue
		}
		if byType[t] == nil {
			byType[t] = make(Mask, len(all))
		}
		byType[t][i>>6] |= 1 << (i & 63)
		all[i>>6] |= 1 << (i & 63)
	}
	return byType, all
}

// RemoveNode forgets a node.
func (v *View) RemoveNode(id NodeID) {
	if n := v.nodes[id]; n != nil {
		delete(v.nodes, id)
		if v.names[n.Name] == n {
			delete(v.names, n.Name)
		}
		v.stale, v.dirty = true, true
	}
}

// SetSuspect marks a node as silent: nothing new is placed there, but it still counts as part of the cluster.
func (v *View) SetSuspect(id NodeID, suspect bool) {
	if n := v.nodes[id]; n != nil && n.suspect != suspect {
		n.suspect = suspect
		v.dirty = true
		if !v.stale {
			v.idx.refresh(n)
		}
	}
}

// SetPartitions replaces all partitions.
func (v *View) SetPartitions(all []Partition) {
	if len(all) == len(v.partitions) && !slices.ContainsFunc(all, func(p Partition) bool {
		old := v.partitions[p.Name]
		return old == nil || !samePartition(&old.Partition, &p)
	}) {
		return
	}
	tiers := map[string]uint32{}
	for name, p := range v.partitions {
		tiers[name] = p.Tier
	}
	clear(v.partitions)
	retier := false
	for _, p := range all {
		v.partitions[p.Name] = &partition{Partition: p}
		old, known := tiers[p.Name]
		retier = retier || !known || old != p.Tier
	}
	if retier {
		for _, c := range v.classes {
			c.tier = v.tierOf(c.partitions)
		}
	}
	v.stale, v.dirty = true, true
}

func samePartition(a, b *Partition) bool {
	return a.Name == b.Name && a.Tier == b.Tier && a.Down == b.Down && a.Exclusive == b.Exclusive && a.MaxNodes == b.MaxNodes &&
		a.MaxTimeS == b.MaxTimeS && a.DefaultMemoryPerCPUMB == b.DefaultMemoryPerCPUMB && slices.Equal(a.Nodes, b.Nodes)
}

func (v *View) tierOf(partitions []string) uint32 {
	tier := uint32(0)
	for _, name := range partitions {
		if p := v.partitions[name]; p != nil {
			tier = max(tier, p.Tier)
		}
	}
	return tier
}

// SetClaim records what a job's attempt owns; it replaces what was known of the job.
func (v *View) SetClaim(c Claim) {
	if old := v.claims[c.Job]; old != nil {
		if old.End == c.End && slices.EqualFunc(old.Groups, c.Groups, sameGroup) {
			return
		}
		v.release(old)
	}
	v.claims[c.Job] = &c
	for _, g := range c.Groups {
		for _, id := range g.Nodes {
			if n := v.nodes[id]; n != nil {
				n.insert(holdOf(&c, &g))
			}
		}
	}
	v.dirty = true
}

func sameGroup(a, b Group) bool {
	return a.MemoryMB == b.MemoryMB && a.Tasks == b.Tasks && slices.Equal(a.Nodes, b.Nodes) && a.CPUs.Equal(b.CPUs) && a.GPUs.Equal(b.GPUs) &&
		sameShares(a.Gres, b.Gres)
}

// RemoveClaim forgets what a job's attempt owned.
func (v *View) RemoveClaim(id JobID) {
	if c := v.claims[id]; c != nil {
		v.release(c)
		delete(v.claims, id)
		v.dirty = true
	}
}

func (v *View) release(c *Claim) {
	for _, g := range c.Groups {
		for _, id := range g.Nodes {
			if n := v.nodes[id]; n != nil {
				n.holds = slices.DeleteFunc(n.holds, func(h hold) bool { return h.job == c.Job })
			}
		}
	}
}

func holdOf(c *Claim, g *Group) hold {
	return hold{job: c.Job, end: c.End, cpus: g.CPUs, gpus: g.GPUs, gres: g.Gres, owned: amount{cpus: uint32(g.CPUs.Count()), gpus: uint32(g.GPUs.Count()), memory: g.MemoryMB}}
}

// hold takes in a claim that was known before the node.
func (n *node) hold(id NodeID, c *Claim) {
	for _, g := range c.Groups {
		if slices.Contains(g.Nodes, id) {
			n.insert(holdOf(c, &g))
		}
	}
}

func (n *node) insert(h hold) {
	i, _ := slices.BinarySearchFunc(n.holds, h, func(a, b hold) int { return cmp.Or(cmp.Compare(a.end, b.end), cmp.Compare(a.job, b.job)) })
	n.holds = slices.Insert(n.holds, i, h)
}

// Dump renders the view in a canonical form: two views that would decide alike give the same text.
func (v *View) Dump() string {
	var b strings.Builder
	for _, id := range slices.Sorted(maps.Keys(v.nodes)) {
		n := v.nodes[id]
		fmt.Fprintf(&b, "node %+v suspect=%v holds=%+v\n", canonical(n.Node), n.suspect, n.holds)
	}
	for _, name := range slices.Sorted(maps.Keys(v.partitions)) {
		fmt.Fprintf(&b, "partition %+v\n", v.partitions[name].Partition)
	}
	for _, id := range slices.Sorted(maps.Keys(v.jobs)) {
		fmt.Fprintf(&b, "job %+v\n", v.jobs[id].Job)
	}
	for _, id := range slices.Sorted(maps.Keys(v.claims)) {
		fmt.Fprintf(&b, "claim %+v\n", *v.claims[id])
	}
	return b.String()
}

// canonical cuts zero words off the masks.
func canonical(n Node) Node {
	n.UsedCPUs, n.UsedGPUs = n.UsedCPUs.trimmed(), n.UsedGPUs.trimmed()
	n.UnusableCPUs, n.UnusableGPUs, n.DegradedGPUs = n.UnusableCPUs.trimmed(), n.UnusableGPUs.trimmed(), n.DegradedGPUs.trimmed()
	return n
}
