package sched

import (
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
)

// allChanges looks at every job that waits.
func allChanges(d *Decisions) map[JobID]Reason {
	changed := map[JobID]Reason{}
	for id, j := range d.view.jobs {
		if r := d.reason(j); !d.placed[id] && r != j.Shown {
			changed[id] = r
		}
	}
	return changed
}

// crowd changes a view in which many jobs ask for the same few things.
func crowd(v *View, r *rand.Rand, now Time) {
	id := JobID(1 + r.IntN(30))
	switch r.IntN(10) {
	case 0:
		v.RemoveJob(id)
	case 1:
		v.Defer(id, now+Time(r.IntN(100)))
	case 2, 3:
		n := v.nodes[NodeID(1+r.IntN(3))].Node
		n.State = NodeState(r.IntN(2)) * NodeDrained
		v.SetNode(n)
	case 4:
		n := v.nodes[NodeID(1+r.IntN(3))].Node
		n.UsedGPUs, n.Owners = Mask{uint64(0xff * r.IntN(2))}, 1
		v.SetNode(n)
	case 5:
		if old := v.jobs[id]; old != nil {
			j := old.Job
			j.Shown = Reason{Code: BadConstraints, Sentence: "somebody else says"}
			v.SetJob(j)
		}
	default:
		j := gang(id, 1+r.Uint32N(4), 8, 60)
		j.Priority = r.Uint32N(3)
		if old := v.jobs[id]; old != nil {
			j.Shown = old.Shown
		}
		switch r.IntN(4) {
		case 0:
			j.BeginAt = now + Time(r.IntN(100))
		case 1:
			j.Held = 1
		}
		v.SetJob(j)
	}
}

func TestChangesAreThoseThatALookAtEveryJobFinds(t *testing.T) {
	told := 0
	for i := range 500 {
		r := seeded(i)
		v := cluster(3, 8)
		now := Time(1000)
		for range 100 {
			crowd(v, r, now)
			if r.IntN(3) > 0 {
				continue
			}
			limits := DefaultLimits()
			if r.IntN(4) == 0 {
				limits.Tests, limits.Placements = 1+r.IntN(3), 1+r.IntN(3)
			}
			now += Time(r.IntN(100))
			d := v.Plan(now, limits)
			for range r.IntN(3) {
				want := allChanges(d)
				got, more := d.Changes(100)
				if !maps.Equal(got, want) || more {
					t.Fatalf("seed %d: %v, by a look at every job %v", i, got, want)
				}
				told += len(got)
				for _, id := range slices.Sorted(maps.Keys(got)) {
					if r.IntN(8) == 0 {
						continue // That one was not written.
					}
					j := v.jobs[id].Job
					j.Shown = got[id]
					v.SetJob(j)
				}
			}
		}
	}
	if told < 10_000 {
		t.Errorf("only %d reasons changed: the test does not test much", told)
	}
}

func TestChangesGoOnWhereTheLimitEndedThem(t *testing.T) {
	v := cluster(1, 8)
	for id := JobID(1); id <= 25; id++ {
		v.SetJob(gang(id, 1, 8, 60+uint32(id%3)))
	}
	d := v.Plan(0, DefaultLimits())
	start(v, d.Placements[0], Never)
	d = v.Plan(0, DefaultLimits())
	told := map[JobID]bool{}
	for round := range 4 {
		changes, more := d.Changes(8)
		if more != (round < 2) || len(changes) != []int{8, 8, 8, 0}[round] {
			t.Fatalf("round %d: %d changes, more: %v", round, len(changes), more)
		}
		for id, reason := range changes {
			if told[id] || id > JobID(2+8*(round+1)) {
				t.Errorf("round %d tells job %d", round, id)
			}
			told[id] = true
			j := v.jobs[id].Job
			j.Shown = reason
			v.SetJob(j)
		}
	}
	if len(v.loose) > 3 { // The first of each class is always looked at.
		t.Errorf("%d jobs are still looked at", len(v.loose))
	}
}

// BenchmarkChanges asks for changes where 100,000 jobs wait and nothing changed.
func BenchmarkChanges(b *testing.B) {
	v := cluster(4, 8)
	for id := JobID(1); id <= 100_000; id++ {
		j := gang(id, 1, 8, 60)
		j.Held = 1
		j.Shown = Reason{Code: HeldUser}
		v.SetJob(j)
	}
	d := v.Plan(0, DefaultLimits())
	b.Run("all", func(b *testing.B) {
		for b.Loop() {
			allChanges(d)
		}
	})
	b.Run("changed", func(b *testing.B) {
		for b.Loop() {
			d.Changes(1000)
		}
	})
}
