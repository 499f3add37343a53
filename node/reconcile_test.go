package node

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"

	"github.com/muster-hpc/muster/node/environ"
)

func fenceOf(attempt, placement uint32) *apiv1.Fence {
	return &apiv1.Fence{Incarnation: 1, Attempt: attempt, Placement: placement}
}

func orderFor(job uint32, fence *apiv1.Fence, want nodev1.WorkState, steps ...*nodev1.DesiredStep) *nodev1.DesiredAttempt {
	return &nodev1.DesiredAttempt{Job: &apiv1.Job{Id: job}, Fence: fence, Want: want, Steps: steps, KillGraceS: 30, EndSentence: "enough"}
}

func stepFor(id uint32, want nodev1.WorkState) *nodev1.DesiredStep {
	return &nodev1.DesiredStep{Step: &apiv1.Step{Id: id, Unreported: []uint32{7}}, Want: want, Ranks: []uint32{0}}
}

// words writes actions shortly: kind, job.attempt.placement, step.
func words(actions []Action) []string {
	names := map[ActionKind]string{ActionAdmit: "admit", ActionBegin: "begin", ActionPrepare: "prepare", ActionStart: "start",
		ActionEnd: "end", ActionSignal: "signal", ActionLimit: "limit", ActionReap: "reap", ActionReportReaped: "reaped again",
		ActionReportEnded: "ended again", ActionReportMissing: "missing"}
	out := []string{}
	for _, a := range actions {
		s := fmt.Sprintf("%s %d.%d.%d", names[a.Kind], a.Job, a.Fence.GetAttempt(), a.Fence.GetPlacement())
		if a.StepOrder != nil || a.Kind == ActionEnd {
			s += fmt.Sprintf(" step %d", a.Step)
		}
		if a.Signal != nil {
			s += fmt.Sprintf(" signal %d", a.Signal.GetSignal())
		}
		out = append(out, s)
	}
	return out
}

func TestReconcile(t *testing.T) {
	one := func(steps ...LocalStep) []LocalAttempt {
		return []LocalAttempt{{Job: 5, Fence: fenceOf(1, 1), Steps: steps}}
	}
	started := func(steps ...LocalStep) []LocalAttempt {
		return []LocalAttempt{{Job: 5, Fence: fenceOf(1, 1), Started: true, Steps: steps}}
	}
	cases := []struct {
		name     string
		desired  []*nodev1.DesiredAttempt
		attempts []LocalAttempt
		unleased bool
		want     []string
	}{
		{"nothing", nil, nil, false, nil},
		{"a new attempt is admitted first", []*nodev1.DesiredAttempt{orderFor(5, fenceOf(1, 1), prepared, stepFor(0, prepared))}, nil, false, []string{"admit 5.1.1"}},
		{"then its steps are prepared", []*nodev1.DesiredAttempt{orderFor(5, fenceOf(1, 1), prepared, stepFor(0, prepared))}, one(), false, []string{"prepare 5.1.1 step 0"}},
		{"a prepared step waits", []*nodev1.DesiredAttempt{orderFor(5, fenceOf(1, 1), prepared, stepFor(0, prepared))}, one(LocalStep{Phase: PhasePrepared}), false, nil},
		{"a prepared step is started", []*nodev1.DesiredAttempt{orderFor(5, fenceOf(1, 1), running, stepFor(0, running))}, one(LocalStep{Phase: PhasePrepared}), false,
			[]string{"begin 5.1.1", "start 5.1.1 step 0"}},
		{"but not without a lease", []*nodev1.DesiredAttempt{orderFor(5, fenceOf(1, 1), running, stepFor(0, running))}, started(LocalStep{Phase: PhasePrepared}), true, nil},
		{"nor while its start is under way", []*nodev1.DesiredAttempt{orderFor(5, fenceOf(1, 1), running, stepFor(0, running))}, started(LocalStep{Phase: PhaseStarting}), false, nil},
		{"nor after its end", []*nodev1.DesiredAttempt{orderFor(5, fenceOf(1, 1), running, stepFor(0, running))}, started(LocalStep{Phase: PhaseEnded, Reported: true}), false, nil},
		{"nor when its end was ordered", []*nodev1.DesiredAttempt{orderFor(5, fenceOf(1, 1), running, stepFor(0, running))}, started(LocalStep{Phase: PhasePrepared, Ending: true}), false, nil},
		{"an end that the controllers still wait for is reported again", []*nodev1.DesiredAttempt{orderFor(5, fenceOf(1, 1), running, stepFor(0, running))},
			started(LocalStep{Phase: PhaseEnded, Reported: true, Repeat: true}), false, []string{"ended again 5.1.1 step 0"}},
		{"a step that should run and is not known is missing", []*nodev1.DesiredAttempt{orderFor(5, fenceOf(1, 1), running, stepFor(0, running))}, started(), false, []string{"missing 5.1.1 step 0"}},
		{"a later step is prepared while the attempt runs", []*nodev1.DesiredAttempt{orderFor(5, fenceOf(1, 1), running, stepFor(2, prepared))},
			started(LocalStep{ID: 1, Phase: PhaseRunning}), false, []string{"prepare 5.1.1 step 2"}},
		{"one step is ended, others go on", []*nodev1.DesiredAttempt{orderFor(5, fenceOf(1, 1), running, stepFor(1, running), stepFor(2, ended))},
			started(LocalStep{ID: 1, Phase: PhaseRunning}, LocalStep{ID: 2, Phase: PhaseRunning}), false, []string{"end 5.1.1 step 2"}},
		{"an end is ordered once", []*nodev1.DesiredAttempt{orderFor(5, fenceOf(1, 1), running, stepFor(2, ended))},
			started(LocalStep{ID: 2, Phase: PhaseRunning, Ending: true}), false, nil},
		{"a step that is not listed goes on", []*nodev1.DesiredAttempt{orderFor(5, fenceOf(1, 1), running)}, started(LocalStep{ID: 2, Phase: PhaseRunning}), false, nil},
		{"an attempt that is absent goes on", nil, started(LocalStep{ID: 2, Phase: PhaseRunning}), false, nil},
		{"another job does not touch it", []*nodev1.DesiredAttempt{orderFor(6, fenceOf(9, 9), ended)}, started(LocalStep{Phase: PhaseRunning}), false, []string{"admit 6.9.9"}},
		{"an end ends every step", []*nodev1.DesiredAttempt{orderFor(5, fenceOf(1, 1), ended)},
			started(LocalStep{ID: 0, Phase: PhaseRunning}, LocalStep{ID: 1, Phase: PhasePreparing}, LocalStep{ID: 2, Phase: PhaseEnded, Reported: true}), false,
			[]string{"end 5.1.1 step 0", "end 5.1.1 step 1"}},
		{"nothing is reaped before every end is in the journal", []*nodev1.DesiredAttempt{orderFor(5, fenceOf(1, 1), ended)},
			started(LocalStep{Phase: PhaseEnded}), false, nil},
		{"then what is left is looked for", []*nodev1.DesiredAttempt{orderFor(5, fenceOf(1, 1), ended)},
			started(LocalStep{Phase: PhaseEnded, Reported: true}, LocalStep{ID: 1, Phase: PhaseFailed, Reported: true}), false, []string{"reap 5.1.1"}},
		{"once", []*nodev1.DesiredAttempt{orderFor(5, fenceOf(1, 1), ended)}, []LocalAttempt{{Job: 5, Fence: fenceOf(1, 1), Reaping: true}}, false, nil},
		{"an acknowledged reaping is not reported at once again", []*nodev1.DesiredAttempt{orderFor(5, fenceOf(1, 1), ended)}, []LocalAttempt{{Job: 5, Fence: fenceOf(1, 1), Reaped: true}}, false, nil},
		{"but when it is still waited for", []*nodev1.DesiredAttempt{orderFor(5, fenceOf(1, 1), ended)}, []LocalAttempt{{Job: 5, Fence: fenceOf(1, 1), Reaped: true, Repeat: true}}, false, []string{"reaped again 5.1.1"}},
		{"what was reaped does not come back", []*nodev1.DesiredAttempt{orderFor(5, fenceOf(1, 1), running, stepFor(0, running), stepFor(1, prepared))},
			[]LocalAttempt{{Job: 5, Fence: fenceOf(1, 1), Reaped: true}}, false, nil},
		{"a later attempt ends an earlier one first", []*nodev1.DesiredAttempt{orderFor(5, fenceOf(2, 1), prepared, stepFor(0, prepared))},
			started(LocalStep{Phase: PhaseRunning}), false, []string{"end 5.1.1 step 0"}},
		{"and waits until it is reaped", []*nodev1.DesiredAttempt{orderFor(5, fenceOf(1, 2), prepared, stepFor(0, prepared))},
			one(LocalStep{Phase: PhaseEnded, Reported: true}), false, []string{"reap 5.1.1"}},
		{"then it is admitted", []*nodev1.DesiredAttempt{orderFor(5, fenceOf(1, 2), prepared, stepFor(0, prepared))},
			[]LocalAttempt{{Job: 5, Fence: fenceOf(1, 1), Reaped: true}}, false, []string{"admit 5.1.2"}},
		{"an older placement is not admitted", []*nodev1.DesiredAttempt{orderFor(5, fenceOf(1, 1), prepared, stepFor(0, prepared))},
			[]LocalAttempt{{Job: 5, Fence: fenceOf(1, 2)}}, false, nil},
		{"the end of a placement that the node never heard of ends an earlier one first", []*nodev1.DesiredAttempt{orderFor(5, fenceOf(1, 2), ended)},
			one(LocalStep{Phase: PhasePrepared}), false, []string{"end 5.1.1 step 0"}},
		{"and reaps it", []*nodev1.DesiredAttempt{orderFor(5, fenceOf(1, 2), ended)},
			one(LocalStep{Phase: PhaseEnded, Reported: true}), false, []string{"reap 5.1.1"}},
		{"and is said when nothing is left", []*nodev1.DesiredAttempt{orderFor(5, fenceOf(1, 2), ended)},
			[]LocalAttempt{{Job: 5, Fence: fenceOf(1, 1), Reaped: true}}, false, []string{"admit 5.1.2"}},
		{"an end of what was never here is remembered", []*nodev1.DesiredAttempt{orderFor(5, fenceOf(1, 1), ended)}, nil, false, []string{"admit 5.1.1"}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			got := words(Reconcile(c.desired, Local{Node: 7, Leased: !c.unleased, Attempts: c.attempts}))
			if !slices.Equal(got, append([]string{}, c.want...)) {
				t.Errorf("it would do %q, want %q", got, c.want)
			}
		})
	}
}

func TestSignalsGoToWhomTheyAreMeantFor(t *testing.T) {
	order := orderFor(5, fenceOf(1, 1), running, stepFor(environ.BatchStep, running), stepFor(0, running), stepFor(1, running))
	second := uint32(1)
	order.Signals = []*apiv1.SignalOrder{
		{Ordinal: 1, Signal: 10}, {Ordinal: 2, Signal: 20, BatchOnly: true}, {Ordinal: 3, Signal: 30, Full: true}, {Ordinal: 4, Signal: 40, Step: &second},
	}
	local := Local{Node: 7, Leased: true, Attempts: []LocalAttempt{{Job: 5, Fence: fenceOf(1, 1), Started: true, Steps: []LocalStep{
		{ID: environ.BatchStep, Phase: PhaseRunning}, {ID: 0, Phase: PhaseRunning, SignalsDelivered: 1}, {ID: 1, Phase: PhaseRunning},
	}}}}
	want := []string{
		"signal 5.1.1 step 4294967291 signal 20", "signal 5.1.1 step 4294967291 signal 30",
		"signal 5.1.1 step 0 signal 30",
		"signal 5.1.1 step 1 signal 10", "signal 5.1.1 step 1 signal 30", "signal 5.1.1 step 1 signal 40",
	}
	if got := words(Reconcile([]*nodev1.DesiredAttempt{order}, local)); !slices.Equal(got, want) {
		t.Errorf("it would do %q, want %q", got, want)
	}
	order.TimeLimitS = 60
	local.Attempts[0].Steps = []LocalStep{{ID: 1, Phase: PhaseRunning, SignalsDelivered: 4, LimitS: 30}}
	order.Steps = order.Steps[2:]
	if got := words(Reconcile([]*nodev1.DesiredAttempt{order}, local)); !slices.Equal(got, []string{"limit 5.1.1 step 1"}) {
		t.Errorf("with another limit it would do %q", got)
	}
}

// world is a dumb model of a node that carries out actions, with controllers that order anything at any time.
type world struct {
	t       *testing.T
	rng     *rand.Rand
	local   Local
	desired []*nodev1.DesiredAttempt
	// execs counts starts by fence and step; endable says which fences were ever named in an end or overtaken.
	execs   map[string]int
	endable map[string]bool
	reports map[string]bool
}

func key(job uint32, f *apiv1.Fence) string {
	return fmt.Sprintf("%d.%d.%d", job, f.GetAttempt(), f.GetPlacement())
}

func (w *world) attempt(job uint32, f *apiv1.Fence) *LocalAttempt {
	for i := range w.local.Attempts {
		if a := &w.local.Attempts[i]; a.Job == job && CompareFences(a.Fence, f) == 0 {
			return a
		}
	}
	return nil
}

func (a *LocalAttempt) step(id uint32) *LocalStep {
	for i := range a.Steps {
		if a.Steps[i].ID == id {
			return &a.Steps[i]
		}
	}
	return nil
}

// order draws what the controllers desire: any attempts in any states, old ones too.
func (w *world) order() {
	w.desired = nil
	wants := []nodev1.WorkState{prepared, running, ended}
	for job := uint32(1); job <= 2; job++ {
		if w.rng.IntN(4) == 0 {
			continue // absent
		}
		f := fenceOf(1+w.rng.Uint32N(2), 1+w.rng.Uint32N(2))
		d := orderFor(job, f, wants[w.rng.IntN(3)])
		for id := range uint32(2) {
			if w.rng.IntN(3) > 0 {
				s := stepFor(id, wants[w.rng.IntN(3)])
				d.Steps = append(d.Steps, s)
			}
		}
		w.desired = append(w.desired, d)
		if d.Want == ended {
			w.endable[key(job, f)] = true
		}
		for _, a := range w.local.Attempts {
			sameAttempt := a.Fence.GetAttempt() == f.GetAttempt()
			if a.Job == job && CompareFences(a.Fence, f) < 0 && (d.Want != ended || sameAttempt) {
				w.endable[key(job, a.Fence)] = true
			}
		}
	}
}

func (w *world) do(a Action) {
	at := w.attempt(a.Job, a.Fence)
	k := key(a.Job, a.Fence)
	stepKey := fmt.Sprintf("%s/%d", k, a.Step)
	switch a.Kind {
	case ActionAdmit:
		for _, other := range w.local.Attempts {
			earlier := other.Fence.GetAttempt() == a.Fence.GetAttempt() && CompareFences(other.Fence, a.Fence) < 0
			if other.Job == a.Job && !other.Reaped && (a.Order.GetWant() != ended || earlier) {
				w.t.Fatalf("%s is admitted while %s is not reaped", k, key(other.Job, other.Fence))
			}
		}
		w.local.Attempts = append(w.local.Attempts, LocalAttempt{Job: a.Job, Fence: a.Fence})
	case ActionBegin:
		at.Started = true
	case ActionPrepare:
		at.Steps = append(at.Steps, LocalStep{ID: a.Step, Phase: PhasePreparing})
	case ActionStart:
		if w.execs[stepKey]++; w.execs[stepKey] > 1 {
			w.t.Fatalf("%s is started twice", stepKey)
		}
		if !w.local.Leased {
			w.t.Fatalf("%s is started without a lease", stepKey)
		}
		at.step(a.Step).Phase = PhaseStarting
	case ActionEnd:
		if a.StepOrder == nil && !w.endable[k] {
			w.t.Fatalf("%s is ended although nobody ordered it", k)
		}
		at.step(a.Step).Ending = true
	case ActionReap:
		if !w.endable[k] {
			w.t.Fatalf("%s is reaped although nobody ordered its end", k)
		}
		for _, s := range at.Steps {
			if !s.Phase.over() || !s.Reported {
				w.t.Fatalf("%s is reaped while step %d is not over and reported", k, s.ID)
			}
		}
		at.Reaping = true
	case ActionReportMissing:
		at.Steps = append(at.Steps, LocalStep{ID: a.Step, Phase: PhaseEnded, Reported: true})
	case ActionReportReaped, ActionReportEnded, ActionSignal, ActionLimit:
	}
}

// happen lets one thing happen on the node.
func (w *world) happen() {
	w.local.Leased = w.rng.IntN(4) > 0
	for i := range w.local.Attempts {
		at := &w.local.Attempts[i]
		if at.Reaping && w.rng.IntN(2) == 0 {
			at.Reaping, at.Reaped = false, true
			w.reports[key(at.Job, at.Fence)] = true
		}
		for j := range at.Steps {
			s := &at.Steps[j]
			if w.rng.IntN(2) == 0 {
				continue
			}
			switch {
			case s.Phase.over():
				s.Reported = true
			case s.Ending, s.Phase == PhaseRunning && w.rng.IntN(3) == 0:
				s.Phase = PhaseEnded
			case s.Phase == PhasePreparing:
				s.Phase = []Phase{PhasePrepared, PhaseFailed}[min(1, w.rng.IntN(8)/7)]
			case s.Phase == PhaseStarting:
				s.Phase = PhaseRunning
			}
		}
	}
}

func TestWhateverIsOrderedNothingStartsTwiceAndNothingEndsUnordered(t *testing.T) {
	for seed := range uint64(3000) {
		w := &world{t: t, rng: rand.New(rand.NewPCG(seed, 1)), execs: map[string]int{}, endable: map[string]bool{}, reports: map[string]bool{}}
		w.local.Node = 7
		for range 40 {
			if w.rng.IntN(3) == 0 {
				w.order()
			}
			w.reconcile()
			w.happen()
		}
		// Whatever was before: if all ends are ordered and the node is left to itself, everything is reported as reaped.
		w.desired = nil
		for _, a := range w.local.Attempts {
			w.desired = append(w.desired, orderFor(a.Job, a.Fence, ended))
			w.endable[key(a.Job, a.Fence)] = true
		}
		for range 60 {
			w.reconcile()
			w.happen()
		}
		for _, a := range w.local.Attempts {
			if !w.reports[key(a.Job, a.Fence)] {
				t.Fatalf("seed %d: %s was never reported as reaped", seed, key(a.Job, a.Fence))
			}
		}
	}
}

func (w *world) reconcile() {
	for range maxPasses {
		actions := Reconcile(w.desired, w.local)
		open := 0
		for _, a := range actions {
			if a.Kind != ActionReportReaped && a.Kind != ActionReportEnded && a.Kind != ActionLimit {
				open++
			}
			w.do(a)
		}
		if open == 0 {
			return
		}
	}
	w.t.Fatalf("reconciling does not come to an end")
}
