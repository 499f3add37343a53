package control

import (
	"testing"
	"testing/synctest"
	"time"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

// More shapes wait than a pass considers, and none of the first fits: the last is started without any change, every job is explained,
// and then the planner rests.
func TestJobsBehindThePassesLimitAreStartedWithoutAChangeAndThenThePlannerRests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil, Faults{})
		defer r.end()
		r.cluster(2)
		r.depose()
		r.control.limits.Tests = 4
		half := spec(2)
		half.Resources.GpusPerNode = 7
		var ids []uint32
		first := r.submit(half)
		for i := range uint32(40) {
			s := spec(2)
			s.TimeLimitS = 60 * (i + 1)
			ids = append(ids, r.submit(s))
		}
		small := spec(1)
		small.Resources.GpusPerNode, small.TimeLimitS = 1, 60
		last := r.submit(small)
		r.lead()
		r.eventually(5*time.Second, "the first and the last run", func() bool { return r.running(first)() && r.running(last)() })
		r.eventually(30*time.Second, "every other is explained", func() bool {
			for _, id := range ids {
				if r.job(id).Status.Reason == apiv1.WaitReason_WAIT_REASON_UNSPECIFIED {
					return false
				}
			}
			return true
		})
		time.Sleep(5 * time.Second)
		passes, explained := r.control.Status().Passes, r.log.count(&logv1.Command_ExplainJobs{})
		time.Sleep(time.Minute)
		if n := r.control.Status().Passes - passes; n > 1 {
			t.Errorf("%d passes while nothing changed", n)
		}
		if n := r.log.count(&logv1.Command_ExplainJobs{}) - explained; n > 0 {
			t.Errorf("%d explanations while nothing changed", n)
		}
	})
}
