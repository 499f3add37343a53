package node

import (
	"log/slog"
	"testing"
	"time"

	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"

	"github.com/muster-hpc/muster/node/run"
)

// TestAStepThatWasOverInTimeRaisesNoAlarm: the force may come between the result and its report.
func TestAStepThatWasOverInTimeRaisesNoAlarm(t *testing.T) {
	for _, result := range []bool{true, false} {
		j, dir := new(journalist), t.TempDir()
		if result {
			if err := run.WriteResult(dir, &supervisorv1.StepState{Phase: supervisorv1.Phase_PHASE_ENDED}); err != nil {
				t.Fatal(err)
			}
		}
		a := &Agent{log: slog.New(slog.NewTextHandler(j, nil)), boot: func() time.Duration { return time.Hour }}
		s := &step{id: 1, key: attemptKey{job: 5, attempt: 1}, dir: dir, phase: PhaseRunning}
		a.forceEnd(s)
		s.force.Stop()
		if errs, warns := j.lines("level=ERROR"), j.lines("level=WARN"); len(errs) > 0 || (len(warns) == 0) != result {
			t.Errorf("with a result (%v) it said %q %q", result, errs, warns)
		}
	}
}
