package sched

import (
	"math/rand/v2"
	"testing"
)

// busy returns 10,000 nodes of 8 GPUs, nearly full, and the given number of jobs that wait with many different requests.
func busy(pending int) *View {
	v := cluster(10_000, 8)
	v.rebuild()
	r := rand.New(rand.NewPCG(1, 2))
	id := JobID(1)
	for free := 80_000; free > 400; id++ {
		j := randomGang(r, id)
		v.SetJob(j)
		limits := DefaultLimits()
		d := v.Plan(0, limits)
		if len(d.Placements) == 0 {
			v.RemoveJob(id)
			free -= 100
			continue
		}
		for _, g := range d.Placements[0].Groups {
			free -= len(g.Nodes) * g.GPUs.Count()
		}
		start(v, d.Placements[0], Time(r.IntN(86_400_000)))
	}
	for range pending {
		id++
		v.SetJob(randomGang(r, id))
	}
	return v
}

// settle starts all that can be started.
func settle(v *View) *View {
	for {
		d := v.Plan(0, DefaultLimits())
		for _, p := range d.Placements {
			start(v, p, 7_200_000)
		}
		if len(d.Placements) == 0 {
			return v
		}
	}
}

func randomGang(r *rand.Rand, id JobID) (j Job) {
	j = gang(id, 1, 1+r.Uint32N(8), 60*(1+r.Uint32N(2000)))
	defer func() { j.Request.CPUsPerTask = max(j.Request.CPUsPerTask, 8*j.Request.GPUsPerNode) }()
	if r.IntN(3) == 0 {
		j.Request.NodesMin, j.Request.GPUsPerNode = 1+r.Uint32N(64), 8
	}
	if r.IntN(10) == 0 {
		j.Request = Request{Tasks: 1 + r.Uint32N(64), CPUsPerTask: 4}
	}
	return j
}

func benchmarkPlan(b *testing.B, v *View) {
	b.ResetTimer()
	placed, considered := 0, 0
	for b.Loop() {
		d := v.Plan(0, DefaultLimits())
		placed, considered = len(d.Placements), d.Considered
	}
	b.ReportMetric(float64(placed), "placed/op")
	b.ReportMetric(float64(considered), "considered/op")
	b.ReportMetric(float64(len(v.classes)), "classes")
}

// BenchmarkPlan is a pass in a cluster that is full, 10,000 jobs waiting.
func BenchmarkPlan(b *testing.B) { benchmarkPlan(b, settle(busy(10_000))) }

// BenchmarkPlan100000 is the same with 100,000 jobs waiting.
func BenchmarkPlan100000(b *testing.B) { benchmarkPlan(b, settle(busy(100_000))) }

// BenchmarkPlanPlaces is a pass that places hundreds of jobs.
func BenchmarkPlanPlaces(b *testing.B) { benchmarkPlan(b, busy(10_000)) }

// BenchmarkReplan is one job's end and what follows: the change, and the pass.
func BenchmarkReplan(b *testing.B) {
	v := settle(busy(10_000))
	n := v.nodes[17].Node
	used := n
	n.UsedGPUs, n.UsedCPUs, n.Owners = nil, nil, 0
	for b.Loop() {
		v.SetNode(n)
		v.Plan(0, DefaultLimits())
		v.SetNode(used)
	}
}
