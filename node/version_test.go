package node

import (
	"log/slog"
	"path/filepath"
	"strings"
	"testing"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
)

// A plan that asks for what its supervisor does not know is not carried out in part: it fails, and says what to do.
func TestASupervisorThatIsTooOldForItsPlanFailsThePrepare(t *testing.T) {
	for name, c := range map[string]struct {
		plan    *supervisorv1.StepPlan
		version uint32
		fails   string
	}{
		"an old plan":               {&supervisorv1.StepPlan{Tasks: []*supervisorv1.TaskPlan{{}}}, 1, ""},
		"a terminal":                {&supervisorv1.StepPlan{Tasks: []*supervisorv1.TaskPlan{{Terminal: &supervisorv1.Terminal{}}}}, 1, "terminals"},
		"a prolog":                  {&supervisorv1.StepPlan{Tasks: []*supervisorv1.TaskPlan{{}, {Prologs: []string{"/p"}}}}, 1, "programs around tasks"},
		"a warning":                 {&supervisorv1.StepPlan{Warnings: []*supervisorv1.Warning{{}}}, 1, "signals before the time limit"},
		"a warning, newer programs": {&supervisorv1.StepPlan{Warnings: []*supervisorv1.Warning{{}}}, 3, ""},
	} {
		f := newFake(t)
		a, err := Open(Config{Dir: filepath.Join(t.TempDir(), "agent"), Spec: &apiv1.NodeSpec{Name: "n1"}, Controllers: f, Refusal: refusalOf,
			Supervisor: supervisorPath, Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = a.Close() })
		s := newStep(attemptKey{job: 5}, &nodev1.StepRecord{Order: &nodev1.DesiredAttempt{Steps: []*nodev1.DesiredStep{{}}}}, t.TempDir())
		s.needs, s.needsFor = needs(c.plan)
		a.observe(s, &supervisorv1.StepState{Version: c.version, Phase: supervisorv1.Phase_PHASE_PREPARED})
		if s.force != nil {
			s.force.Stop()
		}
		switch {
		case c.fails == "" && (s.phase != PhasePrepared || s.failed != nil):
			t.Errorf("%s: phase %d, %v", name, s.phase, s.failed)
		case c.fails != "" && (s.phase == PhasePrepared || s.end == nil || s.failed == nil || !strings.Contains(s.failed.sentence, c.fails)):
			t.Errorf("%s: phase %d, %v", name, s.phase, s.failed)
		}
	}
}
