package fsm

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"

	"github.com/muster-hpc/muster/fsm/shape"
)

// picture writes everything the twin knows, to be compared with pictureOf.
func (w *twin) picture() string {
	var b strings.Builder
	for _, id := range slices.Sorted(maps.Keys(w.jobs)) {
		j := w.jobs[id]
		completing := j.last() != nil && j.last().state == attemptEnding
		fmt.Fprintf(&b, "job %d %s held=%d completing=%t restarts=%d failures=%d notBefore=%d\n", id, j.state, j.held, completing,
			j.restarts, j.failures, j.notBefore)
		for _, a := range j.attempts {
			fmt.Fprintf(&b, " attempt %d.%d %s %s final=%s on %v step ended=%t ending=%t\n", a.number, a.placement, a.state, a.class,
				a.final, slices.Sorted(maps.Keys(a.shares)), a.step.ended, a.step.ending)
			for _, x := range a.extras {
				fmt.Fprintf(&b, "  step %d on %d running=%t ending=%t ended=%t\n", x.id, x.node, x.running && !x.ended, x.ending, x.ended)
			}
		}
	}
	for _, number := range slices.Sorted(maps.Keys(w.nodes)) {
		n := w.nodes[number]
		cpus, gpus, memory, _, _ := w.owners(number, nil)
		fmt.Fprintf(&b, "node %d epoch=%d up=%t silent=%t drain=%t failures=%d cpus=%x gpus=%x memory=%d ib=%x", number, n.epoch, n.up, n.silent, n.drain,
			n.failures, cpus, gpus, memory, w.ibOf(number, nil))
		fmt.Fprintf(&b, " out=%x drained=%t withheld=%t\n", n.out(), n.byHealth, n.withheld)
	}
	return b.String()
}

func pictureOf(v *View) string {
	var b strings.Builder
	for j := range v.Jobs(0) {
		s := j.Status
		notBefore := int64(0)
		if s.NotBefore != nil {
			notBefore = s.NotBefore.AsTime().UnixMilli()
		}
		fmt.Fprintf(&b, "job %d %s held=%d completing=%t restarts=%d failures=%d notBefore=%d\n", j.Id, s.State, s.Held, s.Completing,
			s.Restarts, s.LaunchFailures, notBefore)
		for a := range v.Attempts(j.Id) {
			id, _ := firstStepID(j.Spec.Kind)
			step := v.Step(j.Id, a.Number, id)
			fmt.Fprintf(&b, " attempt %d.%d %s %s final=%s on %v step ended=%t ending=%t\n", a.Number, a.Fence.Placement, a.State, a.Failure,
				a.FinalState, slices.Sorted(slices.Values(a.Unaccounted)), StepEnded(step.State), step.Ending)
			for x := range v.AttemptSteps(j.Id, a.Number) {
				if x.Id != id {
					fmt.Fprintf(&b, "  step %d on %d running=%t ending=%t ended=%t\n", x.Id, x.Placement.Groups[0].Nodes[0],
						x.State == apiv1.StepState_STEP_STATE_RUNNING, x.Ending, StepEnded(x.State))
				}
			}
		}
	}
	word := func(mask []uint64) uint64 {
		if len(mask) == 0 {
			return 0
		}
		return mask[0]
	}
	for n := range v.Nodes() {
		fmt.Fprintf(&b, "node %d epoch=%d up=%t silent=%t drain=%t failures=%d cpus=%x gpus=%x memory=%d ib=%x", n.Number, n.Epoch, n.State == nodeUp, n.LostOnSilence, n.Drain,
			n.LaunchFailures, word(n.CpusAllocatedMask), word(n.GpusAllocatedMask), n.MemoryAllocatedMb,
			word(shape.GresMask(n.GresAllocated, "ib")))
		fmt.Fprintf(&b, " out=%x drained=%t withheld=%t\n", word(n.GpusUnusableMask), n.DrainedByHealth, n.HealthDrainWithheld)
	}
	return b.String()
}
