package control

import (
	"testing"
	"testing/synctest"
	"time"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// Nothing of an allocation runs on its nodes that could measure the time; a leader that came later must not forget it.
func TestAllocationsEndAtTheirTimeLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil, Faults{})
		defer r.end()
		r.cluster(2)
		s := spec(2)
		s.Kind, s.Args, s.ScriptBlob, s.TimeLimitS = apiv1.JobKind_JOB_KIND_ALLOCATION, nil, "", 60
		limited := r.submit(s)
		s = spec(0)
		s.Kind, s.Args, s.ScriptBlob, s.TimeLimitS = apiv1.JobKind_JOB_KIND_ALLOCATION, nil, "", 3600
		longer := r.submit(s)
		r.eventually(5*time.Second, "the first runs", r.running(limited))
		begun := time.Now()
		time.Sleep(30 * time.Second)
		r.depose()
		r.lead()
		r.eventually(2*time.Minute, "it is ended", func() bool {
			a := r.log.View().Attempt(limited, 1)
			return a.Failure == apiv1.FailureClass_FAILURE_CLASS_TIME_LIMIT && a.FinalState == apiv1.JobState_JOB_STATE_TIMEOUT
		})
		if took := time.Since(begun); took < 59*time.Second || took > 70*time.Second {
			t.Errorf("ended after %v", took)
		}
		if a := r.log.View().Attempt(longer, 1); a != nil && a.State == apiv1.AttemptState_ATTEMPT_STATE_ENDING {
			t.Error("one with a longer limit was ended")
		}
	})
}
