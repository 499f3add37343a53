package sched

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// crowded is a random world with two partitions that share nodes, and more jobs of different shapes than a pass considers.
func crowded(r *rand.Rand) *world {
	w := randomWorld(r)
	p := w.partitions[0]
	q := Partition{Name: "q", Nodes: p.Nodes[:1+r.IntN(len(p.Nodes))]}
	w.partitions = append(w.partitions, q)
	for id := JobID(100); id < 100+JobID(10+r.IntN(20)); id++ {
		j := randomJob(r, id, len(w.nodes))
		j.Partitions = [][]string{{"p"}, {"q"}, {"p", "q"}, {"q", "p"}}[r.IntN(4)]
		w.jobs[id] = j
	}
	return w
}

// However many shapes wait and however small a pass's limits: after a bounded number of passes that need no change in between, nothing
// is left that a pass without limits would start, nobody in front was delayed, and the passes say that they are done.
func TestEveryJobHasItsTurnWithinABoundedNumberOfPasses(t *testing.T) {
	unlimited := Limits{Placements: 1000, Tests: 1 << 30, Work: 1 << 40, Reservations: 8}
	stopped, behind := 0, 0
	for seed := range 3000 {
		r := seeded(seed)
		w := crowded(r)
		now := Time(1_000_000)
		v := w.view(r)
		limits := Limits{Placements: 1 + r.IntN(3), Tests: 1 + r.IntN(4), Work: 1 << 40, Reservations: 8}
		if r.IntN(3) == 0 {
			limits.Tests, limits.Work = 1<<30, 1+r.IntN(20)
		}
		promised := w.view(r).Plan(now, unlimited).Reservations
		passes, most := 0, 0
		for {
			d := v.Plan(now, limits)
			if passes++; passes > most+3*len(w.jobs)+5 {
				t.Fatalf("seed %d: no end after %d passes", seed, passes)
			}
			for _, p := range d.Placements {
				if err := w.apply(p, now); err != nil {
					t.Fatalf("seed %d: %v", seed, err)
				}
				v.RemoveJob(p.Job)
				for _, g := range p.Groups {
					for _, id := range g.Nodes {
						v.SetNode(w.nodes[id])
					}
				}
				v.SetClaim(w.claims[p.Job])
				most = passes // Progress: the bound counts from here.
				if len(promised) > 0 && p.Job > promised[0].Job {
					behind++
				}
			}
			if d.Complete && len(d.Placements) == 0 {
				break
			}
			stopped++
		}
		if v.Dirty() {
			t.Fatalf("seed %d: dirty after the last pass", seed)
		}
		d := w.view(r).Plan(now, unlimited)
		if len(d.Placements) > 0 {
			t.Fatalf("seed %d: limits %+v: a pass without limits still places %+v\n%s", seed, limits, d.Placements, v.Dump())
		}
		for _, before := range promised[:min(1, len(promised))] { // The next ones' nodes depend on those of the first.
			i := slices.IndexFunc(d.Reservations, func(a Reservation) bool { return a.Job == before.Job })
			if i >= 0 && d.Reservations[i].Start > before.Start {
				t.Fatalf("seed %d: limits %+v: job %d was promised %d, then %d", seed, limits, before.Job, before.Start, d.Reservations[i].Start)
			}
		}
		for id := range w.jobs {
			if a, b := v.Plan(now, unlimited).Reason(id), d.Reason(id); a != b {
				t.Fatalf("seed %d: job %d waits for %+v, or for %+v", seed, id, a, b)
			}
		}
	}
	t.Logf("%d passes stopped at limits, %d placements behind the first blocked", stopped, behind)
	if stopped < 3000 || behind < 300 {
		t.Fatal("the random worlds do not reach what they are for")
	}
}

// A cluster in which something changes before every pass keeps nobody behind the limit waiting, and the first jobs have their turn in
// each pass.
func TestChangesDoNotSendThoseBehindTheLimitBack(t *testing.T) {
	v := cluster(4, 8)
	v.SetJob(gang(1, 4, 7, 60))
	start(v, v.Plan(0, DefaultLimits()).Placements[0], 3_600_000)
	v.SetJob(gang(2, 4, 8, 60)) // The first that does not fit, promised the time when job 1 ends.
	const shapes = 100
	for id := JobID(10); id < 10+shapes; id++ {
		v.SetJob(gang(id, 2, 8, uint32(id))) // None fits, and each is another shape.
	}
	last := gang(500, 1, 1, 60)
	v.SetJob(last)
	limits := DefaultLimits()
	limits.Tests = 10
	node := v.nodes[1].Node
	for passes := 1; ; passes++ {
		if passes > 2*shapes/5 {
			t.Fatalf("the last job is not placed after %d passes", passes)
		}
		node.Reason += "."
		v.SetNode(node)
		d := v.Plan(0, limits)
		if d.Considered > 11 {
			t.Fatalf("%d considered", d.Considered)
		}
		if len(d.Reservations) != 1 || d.Reservations[0].Job != 2 {
			t.Fatalf("pass %d: the first is promised nothing: %+v", passes, d.Reservations)
		}
		if len(d.Placements) > 0 {
			if d.Placements[0].Job != 500 {
				t.Fatalf("%+v", d.Placements)
			}
			return
		}
	}
}

// What was found out before a pass stopped is still known at the end of the passes that go on with it.
func TestReasonsOfSeveralPassesAddUp(t *testing.T) {
	v := cluster(1, 8)
	v.SetJob(gang(1, 1, 8, 60))
	start(v, v.Plan(0, DefaultLimits()).Placements[0], 60_000)
	for id := JobID(2); id < 30; id++ {
		v.SetJob(gang(id, 1, 1, 60*uint32(id)))
	}
	limits := DefaultLimits()
	limits.Tests = 4
	var d *Decisions
	for passes := 0; d == nil || !d.Complete; passes++ {
		if d = v.Plan(0, limits); passes > 30 {
			t.Fatal("no end")
		}
	}
	for id := JobID(2); id < 30; id++ {
		if d.Reason(id).Code == None {
			t.Errorf("job %d is not explained", id)
		}
	}
}
