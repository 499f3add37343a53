package sched

import (
	"maps"
	"math/rand/v2"
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

// show plays what the cluster does with reasons that were written.
func show(w *world, v *View, changes map[JobID]Reason, r *rand.Rand) {
	for id, reason := range changes {
		if r.IntN(4) == 0 {
			continue // That one was not written.
		}
		j := w.jobs[id]
		j.Shown = reason
		w.jobs[id] = j
		v.SetJob(j)
	}
}

func TestChangesAreThoseThatALookAtEveryJobFinds(t *testing.T) {
	told := 0
	for i := range 1000 {
		r := seeded(i)
		w := randomWorld(r)
		v := w.view(r)
		now := Time(4000)
		for range 40 {
			change(w, v, r)
			if r.IntN(8) == 0 {
				v.Defer(JobID(10+r.IntN(8)), now+Time(r.IntN(200)))
			}
			if r.IntN(3) > 0 {
				continue
			}
			limits := DefaultLimits()
			if r.IntN(2) == 0 {
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
				show(w, v, got, r)
			}
		}
	}
	if told < 1000 {
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
