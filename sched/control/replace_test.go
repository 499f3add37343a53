package control

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

func TestANodeThatCannotPrepareIsReplacedAndTheJobIsChargedNothing(t *testing.T) {
	for _, failure := range []string{"says so", "never gets ready", "goes silent", "says so to a leader that is deposed"} {
		t.Run(failure, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, &apiv1.Settings{PrepareTimeoutMs: 15_000}, Faults{})
				defer r.end()
				agents := r.cluster(4)
				within := 3 * time.Second
				switch failure {
				case "says so":
					agents[1].broken.Store(true)
				case "never gets ready":
					agents[1].lazy.Store(true)
					within = 20 * time.Second
				case "goes silent":
					agents[1].lazy.Store(true)
					time.Sleep(time.Second)
					agents[1].stop()
					within = 20 * time.Second
				default:
					agents[1].broken.Store(true)
					agents[2].lazy.Store(true) // The old leader waits for it a little.
				}
				for _, a := range agents {
					a.tidy.Store(true)
				}
				id := r.submit(spec(3))
				if failure == "says so to a leader that is deposed" {
					r.eventually(time.Second, "marked", func() bool { return len(r.log.View().Attempt(id, 1).GetUnprepared()) == 1 })
					r.depose()
					time.Sleep(time.Minute)
					agents[2].lazy.Store(false)
					r.lead()
					within = 10 * time.Second
				}
				r.eventually(within, "started", r.running(id))
				a, s := r.log.View().Attempt(id, 1), r.job(id).Status
				if s.Attempt != 1 || s.NodeList != "n[1,3-4]" || a.Fence.Placement != 2 || s.LaunchFailures != 0 || len(a.Unprepared) != 1 {
					t.Errorf("job %v, attempt %v", s, a)
				}
				n := r.log.View().NodeByName("n2")
				if n.LaunchFailures != 1 {
					t.Errorf("node %v", n)
				}
				if failure != "goes silent" {
					r.eventually(5*time.Second, "n2 accounts for it", func() bool { return len(r.log.View().NodeByName("n2").Owners) == 0 })
				}
			})
		})
	}
}

// One node fails every launch and others are fine: no job waits longer than for a replacement, and the node is drained after its third.
func TestANodeThatFailsEveryLaunchIsDrainedAndHoldsNobodyUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil, Faults{})
		defer r.end()
		agents := r.cluster(4)
		for _, a := range agents {
			a.tidy.Store(true)
		}
		agents[0].broken.Store(true)
		for range 5 {
			id := r.submit(spec(2))
			r.eventually(5*time.Second, "started", r.running(id))
			if s := r.job(id).Status; s.Attempt != 1 || s.LaunchFailures != 0 {
				t.Errorf("job %v", s)
			}
			r.must(&logv1.Command{Op: &logv1.Command_CancelJobs{CancelJobs: &logv1.CancelJobs{JobIds: []uint32{id}}}})
			r.eventually(5*time.Second, "ended", func() bool { return r.job(id).Status.State == apiv1.JobState_JOB_STATE_CANCELLED })
		}
		n := r.log.View().NodeByName("n1")
		if !n.Drain || n.LaunchFailures != 3 || !strings.Contains(n.Reason, "the disk is full") {
			t.Errorf("node %v", n)
		}
		if places := r.log.count(&logv1.Command_Place{}); places != 8 {
			t.Errorf("%d placements of 5 jobs of which 3 met the node", places)
		}
	})
}

// Every node fails every launch: after a bounded number of attempts, each of a bounded number of placements, with growing pauses, the
// job is held and says why; then nothing more happens.
func TestAJobThatNoNodeCanPrepareIsHeldAfterABoundedNumberOfAttempts(t *testing.T) {
	for _, how := range []string{"all say so", "none gets ready", "all but one say so"} {
		t.Run(how, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, &apiv1.Settings{PrepareTimeoutMs: 10_000}, Faults{})
				defer r.end()
				agents := r.cluster(30)
				for _, a := range agents {
					a.tidy.Store(true)
					a.broken.Store(how != "none gets ready")
					a.lazy.Store(true)
				}
				if how == "all but one say so" {
					agents[0].broken.Store(false)
					agents[0].lazy.Store(false)
				}
				id := r.submit(spec(2))
				r.eventually(10*time.Minute, "held", func() bool { return r.job(id).Status.Held == 2 })
				s := r.job(id).Status
				if s.Attempt != 3 || !strings.HasPrefix(s.Sentence, "held after 3 failed launches, the last one: node") {
					t.Errorf("job %v", s)
				}
				places, ends := r.log.count(&logv1.Command_Place{}), r.log.count(&logv1.Command_EndAttempt{})
				want := 3
				if how == "all but one say so" {
					want = 3 * placementsMost
				}
				if places != want || ends != 3 {
					t.Errorf("%d placements, %d ends", places, ends)
				}
				time.Sleep(time.Hour)
				if n := r.log.count(&logv1.Command_Place{}); n != places {
					t.Errorf("%d placements of a held job", n-places)
				}
				if n := r.log.count(&logv1.Command_ExplainJobs{}); n > 20 {
					t.Errorf("%d explanations", n)
				}
			})
		})
	}
}
