package sched

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
)

const rounds = 8_000

func seeded(i int) *rand.Rand { return rand.New(rand.NewPCG(uint64(i), 7)) }

func order(w *world) []Job {
	var jobs []Job
	for _, j := range w.jobs {
		jobs = append(jobs, j)
	}
	slices.SortFunc(jobs, func(a, b Job) int { return before(&job{Job: a}, &job{Job: b}) })
	return jobs
}

// Every placement satisfies every word of its request and gives nothing twice; until the first job that is blocked, exactly the jobs that
// a slow search can place are placed; and what starts behind a blocked job does not delay it.
func TestPlanAgreesWithASlowSearch(t *testing.T) {
	placed, refused, backfilled, checked := 0, 0, 0, 0
	for i := range rounds {
		r := seeded(i)
		w := randomWorld(r)
		now := Time(1_000_000)
		for range 3 {
			jobs := order(w)
			v := w.view(r)
			d := v.Plan(now, DefaultLimits())
			byJob := map[JobID]Placement{}
			for _, p := range d.Placements {
				byJob[p.Job] = p
			}
			part := &w.partitions[0]
			head := JobID(0)
			for _, j := range jobs {
				p, ok := byJob[j.ID]
				if !ok {
					reason := d.Reason(j.ID)
					if reason.Code == None {
						t.Fatalf("seed %d: job %d neither placed nor explained", i, j.ID)
					}
					if head == 0 && w.possible(j, part) && !contradicts(j, part) {
						t.Fatalf("seed %d: job %+v was not placed (%v) but could be\n%s", i, j, reason, v.Dump())
					}
					if reason.Code == Resources {
						head = j.ID
					}
					refused++
					continue
				}
				if err := w.apply(p, now); err != nil {
					t.Fatalf("seed %d: job %+v placed %+v: %v", i, j, p, err)
				}
				placed++
				if head != 0 {
					backfilled++
				}
			}
			if len(d.Reservations) > 0 {
				after := w.view(r).Plan(now, Limits{Placements: 1000, Tests: 1000, Work: 1e9, Reservations: 1})
				if len(after.Placements) > 0 || len(after.Reservations) == 0 || after.Reservations[0].Job != d.Reservations[0].Job {
					t.Fatalf("seed %d: planned again, %+v instead of %+v", i, after, d.Reservations)
				}
				if after.Reservations[0].Start > d.Reservations[0].Start {
					t.Fatalf("seed %d: job %d was promised %d, then %d", i, head, d.Reservations[0].Start, after.Reservations[0].Start)
				}
				checked++
			}
			now += Time(r.IntN(30_000))
			finish(w, r)
			for k := range r.IntN(3) {
				id := JobID(1000*(int(now)%1000) + k + 20)
				if _, runs := w.claims[id]; !runs {
					w.jobs[id] = randomJob(r, id, len(w.nodes))
				}
			}
		}
	}
	t.Logf("%d placed, %d refused, %d backfilled, %d promises checked", placed, refused, backfilled, checked)
	if placed < 1000 || refused < 1000 || backfilled < 100 || checked < 100 {
		t.Fatal("the random worlds do not reach what they are for")
	}
}

// contradicts: requests that the planner refuses by themselves, whatever the nodes.
func contradicts(j Job, part *Partition) bool {
	_, sentence := shapeOf(&j.Request, part)
	return sentence != ""
}

// finish ends a random part of what runs.
func finish(w *world, r *rand.Rand) {
	ids := []JobID{}
	for id := range w.claims {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	for _, id := range ids {
		if r.IntN(2) == 0 {
			continue
		}
		for _, g := range w.claims[id].Groups {
			for _, nid := range g.Nodes {
				n := w.nodes[nid]
				n.UsedCPUs, n.UsedGPUs = without(n.UsedCPUs, g.CPUs), without(n.UsedGPUs, g.GPUs)
				n.UsedMemoryMB -= g.MemoryMB
				n.UsedGres = slices.Clone(n.UsedGres)
				for i, s := range n.UsedGres {
					n.UsedGres[i].Units = without(s.Units, unitsIn(g.Gres, s.Name))
				}
				n.Owners--
				w.nodes[nid] = n
			}
		}
		delete(w.claims, id)
	}
}

func without(m, o Mask) Mask {
	m = slices.Clone(m)
	for i := range m {
		m[i] &^= o.word(i)
	}
	return m
}

func TestSameViewSameDecisions(t *testing.T) {
	for i := range 500 {
		r := seeded(i)
		w := randomWorld(r)
		a, b := w.view(r), w.view(r)
		da, db := a.Plan(5000, DefaultLimits()), b.Plan(5000, DefaultLimits())
		if a.Dump() != b.Dump() {
			t.Fatalf("seed %d: views differ by order of feeding:\n%s\n%s", i, a.Dump(), b.Dump())
		}
		if !reflect.DeepEqual(da.Placements, db.Placements) || !reflect.DeepEqual(da.Reservations, db.Reservations) {
			t.Fatalf("seed %d: %+v and %+v", i, da, db)
		}
		for _, id := range a.Waiting() {
			if da.Reason(id) != db.Reason(id) {
				t.Fatalf("seed %d: job %d: %v and %v", i, id, da.Reason(id), db.Reason(id))
			}
		}
	}
}

// A view that went through any changes decides like one built from the result.
func TestChangedViewDecidesLikeANewOne(t *testing.T) {
	for i := range 1000 {
		r := seeded(i)
		w := randomWorld(r)
		v := w.view(r)
		for range 20 {
			change(w, v, r)
			if r.IntN(3) == 0 {
				fresh := w.view(r)
				if v.Dump() != fresh.Dump() {
					t.Fatalf("seed %d: changed\n%s\nnew\n%s", i, v.Dump(), fresh.Dump())
				}
				a, b := v.Plan(5000, DefaultLimits()), fresh.Plan(5000, DefaultLimits())
				if !reflect.DeepEqual(a.Placements, b.Placements) || !reflect.DeepEqual(a.Reservations, b.Reservations) {
					t.Fatalf("seed %d: %+v\n%+v", i, a, b)
				}
				for _, id := range v.Waiting() {
					if a.Reason(id) != b.Reason(id) {
						t.Fatalf("seed %d: job %d: %v and %v", i, id, a.Reason(id), b.Reason(id))
					}
				}
			}
		}
	}
}

func change(w *world, v *View, r *rand.Rand) {
	switch r.IntN(8) {
	case 0:
		id := JobID(10 + r.IntN(8))
		w.jobs[id] = randomJob(r, id, len(w.nodes))
		v.SetJob(w.jobs[id])
	case 1:
		id := JobID(10 + r.IntN(8))
		delete(w.jobs, id)
		v.RemoveJob(id)
	case 2:
		id := NodeID(1 + r.IntN(5))
		n, known := w.nodes[id]
		if !known {
			n = Node{ID: id, Name: fmt.Sprintf("n%d", 7+id), CPUs: 3, MemoryMB: 20, GPUs: []string{"b", "", "a"}}
		}
		n.State = NodeState(r.IntN(3))
		n.Epoch++
		w.nodes[id] = n
		v.SetNode(n)
	case 3:
		id := NodeID(1 + r.IntN(5))
		delete(w.nodes, id)
		v.RemoveNode(id)
	case 4:
		w.partitions = slices.Clone(w.partitions)
		w.partitions[0].Tier++
		w.partitions[0].Nodes = append(slices.Clone(w.partitions[0].Nodes), NodeID(1+r.IntN(5)))
		v.SetPartitions(w.partitions)
	case 5:
		id := JobID(100 + r.IntN(3))
		c := Claim{Job: id, End: Time(5000 + r.IntN(50_000)), Groups: []Group{{Nodes: []NodeID{NodeID(1 + r.IntN(5))}, CPUs: Mask{1 << r.IntN(3)}}}}
		w.claims[id] = c
		v.SetClaim(c)
	case 6:
		id := JobID(100 + r.IntN(3))
		delete(w.claims, id)
		v.RemoveClaim(id)
	case 7:
		for id, j := range w.jobs {
			j.Held = uint8(r.IntN(2))
			j.BeginAt = Time(4000 + r.IntN(2000))
			w.jobs[id] = j
			v.SetJob(j)
			break
		}
	}
}

func cluster(nodes, gpus int) *View {
	v := NewView()
	var ids []NodeID
	for i := range nodes {
		n := Node{ID: NodeID(i + 1), Name: fmt.Sprintf("n%d", i+1), Epoch: 1, CPUs: 64, MemoryMB: 1 << 19}
		for range gpus {
			n.GPUs = append(n.GPUs, "h100")
		}
		v.SetNode(n)
		ids = append(ids, n.ID)
	}
	v.SetPartitions([]Partition{{Name: "gpu", Nodes: ids}})
	return v
}

func gang(id JobID, nodes, gpus, limitS uint32) Job {
	return Job{ID: id, Attempt: 1, Partitions: []string{"gpu"}, TimeLimitS: limitS, Request: Request{NodesMin: nodes, GPUsPerNode: gpus}}
}

// start plays what the cluster does with a placement.
func start(v *View, p Placement, end Time) {
	for _, g := range p.Groups {
		for _, id := range g.Nodes {
			n := v.nodes[id].Node
			n.UsedCPUs, n.UsedGPUs = n.UsedCPUs.with(g.CPUs), n.UsedGPUs.with(g.GPUs)
			n.UsedMemoryMB += g.MemoryMB
			n.Owners++
			v.SetNode(n)
		}
	}
	v.RemoveJob(p.Job)
	v.SetClaim(Claim{Job: p.Job, End: end, Groups: p.Groups})
}

func TestASmallJobPacksAndLeavesNodesWhole(t *testing.T) {
	v := cluster(4, 8)
	v.SetJob(gang(1, 1, 3, 60))
	v.SetJob(gang(2, 1, 4, 60))
	v.SetJob(gang(3, 3, 8, 60))
	v.SetJob(gang(4, 1, 1, 60))
	d := v.Plan(0, DefaultLimits())
	if len(d.Placements) != 4 {
		t.Fatalf("placed %+v", d.Placements)
	}
	for _, p := range d.Placements[:2] {
		if !slices.Equal(p.Groups[0].Nodes, []NodeID{1}) {
			t.Errorf("job %d on %v", p.Job, p.Groups[0].Nodes)
		}
	}
	if got := d.Placements[3].Groups[0]; !slices.Equal(got.Nodes, []NodeID{1}) || !got.GPUs.Equal(Mask{1 << 7}) {
		t.Errorf("the last small job took %+v", got)
	}
}

func TestBackfillOnlyWhatDoesNotDelayTheFirst(t *testing.T) {
	v := cluster(4, 8)
	v.SetJob(gang(1, 3, 8, 100))
	start(v, v.Plan(0, DefaultLimits()).Placements[0], 100_000)
	v.SetJob(gang(2, 4, 8, 1000)) // Blocked until 100 s.
	v.SetJob(gang(3, 1, 8, 99))   // Ends before.
	v.SetJob(gang(4, 1, 8, 101))  // Would delay it.
	d := v.Plan(0, DefaultLimits())
	if len(d.Placements) != 1 || d.Placements[0].Job != 3 {
		t.Fatalf("placed %+v", d.Placements)
	}
	if d.Reservations[0].Start != 100_000 {
		t.Errorf("promised %v", d.Reservations[0])
	}
	want := Reason{Resources, "needs 4 nodes with 8 free GPUs in partition gpu; 1 is free now"}
	if got := d.Reason(2); got != want {
		t.Errorf("reason %+v", got)
	}
	if got := d.Reason(4); got.Code != Priority || !strings.Contains(got.Sentence, "job 2") {
		t.Errorf("reason %+v", got)
	}
}

func TestNothingPassesTheFirstWhereItsNodesNeverComeBack(t *testing.T) {
	v := cluster(2, 8)
	v.SetJob(gang(1, 1, 8, Unlimited))
	start(v, v.Plan(0, DefaultLimits()).Placements[0], Never)
	v.SetJob(gang(2, 2, 8, Unlimited))
	for id := JobID(3); id < 10; id++ {
		v.SetJob(gang(id, 1, 1, Unlimited))
	}
	if d := v.Plan(0, DefaultLimits()); len(d.Placements) > 0 {
		t.Fatalf("placed %+v in front of the gang", d.Placements)
	}
}

func TestReasonsSayWhatIsMissing(t *testing.T) {
	v := cluster(4, 8)
	drained := v.nodes[4].Node
	drained.State, drained.Reason = NodeDrained, "bad fan"
	v.SetNode(drained)
	v.SetPartitions([]Partition{{Name: "gpu", Nodes: []NodeID{1, 2, 3, 4}, MaxNodes: 8, MaxTimeS: 7200}, {Name: "off", Nodes: []NodeID{1}, Down: true}})
	v.SetJob(gang(1, 2, 5, 60))
	start(v, v.Plan(0, DefaultLimits()).Placements[0], 60_000)
	add := func(id JobID, change func(*Job)) {
		j := gang(id, 1, 1, 60)
		change(&j)
		v.SetJob(j)
	}
	add(2, func(j *Job) { j.Request.NodesMin = 3; j.Request.GPUsPerNode = 8; j.Priority = 9 })
	add(3, func(j *Job) { j.Request.NodesMin = 4; j.Request.GPUsPerNode = 8 })
	add(4, func(j *Job) { j.Request.GPUsPerNode = 9 })
	add(5, func(j *Job) { j.Request.NodesMin = 9 })
	add(6, func(j *Job) { j.TimeLimitS = 7201 })
	add(7, func(j *Job) { j.Partitions = []string{"off"} })
	add(8, func(j *Job) { j.Request.Include = []string{"n4"} })
	add(9, func(j *Job) { j.Request.GPUType = "b200" })
	add(10, func(j *Job) { j.Held = 1 })
	add(11, func(j *Job) { j.BeginAt = 86_400_000 })
	add(12, func(j *Job) { j.Cleaning = true })
	add(13, func(j *Job) { j.RetryAt = 5000 })
	add(14, func(j *Job) { j.Request = Request{NodesMin: 5} })
	d := v.Plan(0, DefaultLimits())
	for id, want := range map[JobID]Reason{
		2:  {Resources, "needs 3 nodes with 8 free GPUs in partition gpu; 1 is free now, 1 is drained"},
		3:  {NodeNotAvail, "needs 4 nodes with 8 free GPUs in partition gpu; 3 are up, 1 is drained (n4: bad fan)"},
		4:  {BadConstraints, "asks for 9 GPUs per node; the largest node in partition gpu has 8"},
		5:  {PartitionNodeLimit, "asks for 9 nodes; partition gpu allows 8"},
		6:  {PartitionTimeLimit, "asks for 2h0m1s; partition gpu allows 2h0m0s"},
		7:  {PartitionDown, "partition off is down"},
		8:  {NodeNotAvail, "needs node n4, which is drained (bad fan)"},
		9:  {BadConstraints, "asks for GPUs of type b200; no node has them"},
		10: {Code: HeldUser},
		11: {BeginTime, "begins no earlier than 1970-01-02 00:00:00 UTC"},
		12: {Code: Cleaning},
		13: {Code: Backoff},
		14: {BadConstraints, "needs 5 nodes with 1 free CPU; partition gpu has 4"},
	} {
		if got := d.Reason(id); got != want {
			t.Errorf("job %d: %+v, want %+v", id, got, want)
		}
	}
	if d.NextWake != 5000 {
		t.Errorf("next wake %d", d.NextWake)
	}
	changes, more := d.Changes(5)
	if len(changes) != 5 || !more {
		t.Errorf("changes %v %v", changes, more)
	}
}

func TestJobsWaitForTheirTime(t *testing.T) {
	v := cluster(1, 8)
	j := gang(1, 1, 1, 60)
	j.BeginAt = 5000
	v.SetJob(j)
	if d := v.Plan(4999, DefaultLimits()); len(d.Placements) != 0 || d.NextWake != 5000 {
		t.Fatalf("%+v", d)
	}
	if d := v.Plan(5000, DefaultLimits()); len(d.Placements) != 1 {
		t.Fatalf("%+v", d)
	}
	v.Defer(1, 9000)
	if d := v.Plan(8000, DefaultLimits()); len(d.Placements) != 0 || d.NextWake != 9000 {
		t.Fatalf("%+v", d)
	}
	if d := v.Plan(9000, DefaultLimits()); len(d.Placements) != 1 {
		t.Fatalf("%+v", d)
	}
}

func TestNothingIsPlacedOnASilentNode(t *testing.T) {
	v := cluster(2, 8)
	v.SetSuspect(1, true)
	v.SetJob(gang(1, 2, 8, 60))
	v.SetJob(gang(2, 1, 8, 60))
	d := v.Plan(0, DefaultLimits())
	if len(d.Placements) != 0 && d.Placements[0].Groups[0].Nodes[0] == 1 {
		t.Fatalf("%+v", d.Placements)
	}
	if r := d.Reason(1); r.Code != Resources || !strings.HasSuffix(r.Sentence, "1 is free now, 1 is silent") {
		t.Errorf("%+v", r)
	}
	v.SetSuspect(1, false)
	if d := v.Plan(0, DefaultLimits()); len(d.Placements) != 1 || d.Placements[0].Job != 1 {
		t.Fatalf("%+v", d.Placements)
	}
}

func TestShownReasonsDoNotMakeAViewDirty(t *testing.T) {
	v := cluster(1, 8)
	j := gang(1, 2, 1, 60)
	v.SetJob(j)
	v.Plan(0, DefaultLimits())
	j.Shown = Reason{Code: BadConstraints}
	v.SetJob(j)
	if v.Dirty() {
		t.Error("dirty after a shown reason")
	}
	j.Priority = 3
	v.SetJob(j)
	if !v.Dirty() {
		t.Error("not dirty after a new priority")
	}
}

func TestAPassStopsAtItsLimitsAndLeavesTheRestAsItIs(t *testing.T) {
	v := cluster(2, 8)
	shown := Reason{Code: Resources, Sentence: "before"}
	for id := JobID(1); id <= 10; id++ {
		j := gang(id, 1, 8, 60+uint32(id))
		j.Shown = shown
		v.SetJob(j)
	}
	limits := DefaultLimits()
	limits.Tests = 4
	d := v.Plan(0, limits)
	if d.Complete || len(d.Placements) != 2 || d.Considered != 4 {
		t.Fatalf("%+v", d)
	}
	if d.Reason(3) == shown || d.Reason(9) != shown {
		t.Errorf("reasons %v, %v", d.Reason(3), d.Reason(9))
	}
	limits = DefaultLimits()
	limits.Placements = 1
	if d := v.Plan(0, limits); d.Complete || len(d.Placements) != 1 {
		t.Fatalf("%+v", d)
	}
}

func TestNamesSortAsPeopleDo(t *testing.T) {
	names := []string{"n10", "n2", "a", "n02", "n1", "n", "rack2-n1", "rack10-n1"}
	slices.SortFunc(names, CompareNames)
	if got := strings.Join(names, " "); got != "a n n1 n2 n02 n10 rack2-n1 rack10-n1" {
		t.Error(got)
	}
}
