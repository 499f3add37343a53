package control

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/muster-hpc/muster/fsm"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

// A node of a gang goes silent. Where the attempt has ended, or the tasks of its peers fail, a job that stops itself runs elsewhere after
// lease and window, counted from the last grant and from the beginning of the leader's term. Others wait for the node.
func TestASilentNodeHoldsUpWhatStoppedItselfOnlyForLeaseAndWindow(t *testing.T) {
	for _, c := range []struct {
		name        string
		optedIn     bool
		peersFail   bool
		ended       bool
		leaderAfter time.Duration // a new leader that long after the silence began; 0: none
		min, max    time.Duration // when the attempt is accounted for everywhere, after the silence began; 0: not before the loss
	}{
		{"the attempt is ended", true, false, true, 0, 15 * time.Second, 19 * time.Second},
		{"its peers fail", true, true, false, 0, 15 * time.Second, 19 * time.Second},
		{"a new leader counts from its first day", true, false, true, 12 * time.Second, 27 * time.Second, 31 * time.Second},
		{"nobody says anything", true, false, false, 0, 0, 0},
		{"it does not stop itself", false, false, true, 0, 0, 0},
		{"it does not stop itself, and its peers fail", false, true, false, 0, 0, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, nil, Faults{})
				defer r.end()
				agents := r.cluster(6)
				for _, a := range agents {
					a.tidy.Store(true)
				}
				s := spec(2)
				s.Kind, s.Args, s.ScriptBlob, s.AutomaticRecovery = apiv1.JobKind_JOB_KIND_RUN, []string{"train"}, "", c.optedIn
				id := r.submit(s)
				r.eventually(5*time.Second, "runs", r.running(id))
				a := r.log.View().Attempt(id, 1)
				time.Sleep(10 * time.Second)
				agents[1].stop()
				silent := time.Now()
				switch {
				case c.ended:
					r.must(&logv1.Command{Op: &logv1.Command_EndAttempt{EndAttempt: &logv1.EndAttempt{JobId: id, Fence: a.Fence,
						Failure: apiv1.FailureClass_FAILURE_CLASS_HARDWARE, Sentence: "a GPU is broken", FaultNode: agents[0].number}}})
				case c.peersFail:
					r.must(&logv1.Command{Principal: &apiv1.Principal{Kind: apiv1.PrincipalKind_PRINCIPAL_KIND_NODE, Name: "n1"},
						Op: &logv1.Command_ReportTasks{ReportTasks: &logv1.ReportTasks{Node: agents[0].number, Epoch: 1, Instance: agents[0].instance,
							Reports: []*logv1.TaskReport{{JobId: id, Fence: a.Fence, Event: &logv1.TaskReport_StepEnded{StepEnded: &logv1.StepEnded{
								Exits: []*apiv1.TaskExit{{FirstRank: 0, Count: 1, Code: 1}}}}}}}}})
				}
				if c.leaderAfter > 0 {
					time.Sleep(c.leaderAfter)
					r.depose()
					r.lead()
				}
				accounted := func() bool { return r.log.View().Attempt(id, 1).State == apiv1.AttemptState_ATTEMPT_STATE_ENDED }
				if c.max == 0 {
					for time.Since(silent) < 50*time.Second {
						if time.Sleep(time.Second); accounted() {
							t.Fatalf("accounted for after %v", time.Since(silent))
						}
					}
					return
				}
				r.eventually(time.Minute, "accounted for", accounted)
				// The last Sync was up to 3 s before the silence began.
				if took := time.Since(silent); took < c.min-3*time.Second || took > c.max {
					t.Errorf("accounted for after %v, not within %v to %v", took, c.min, c.max)
				}
				n := r.log.View().Node(agents[1].number)
				if n.State != apiv1.NodeState_NODE_STATE_UP || n.Epoch != 1 || len(n.Owners) != 0 {
					t.Errorf("node %v", n)
				}
				r.eventually(time.Second, "placed elsewhere", func() bool { return r.job(id).Status.Attempt == 2 })
				if list := r.job(id).Status.NodeList; list != "n[1,3]" {
					t.Errorf("placed on %s", list)
				}
				if err := fsm.CheckInvariants(r.log.View()); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// More nodes are silent than may be: then nothing is accounted for, because whoever is silent may go on.
func TestNothingIsAccountedForWhileTooManyAreSilent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil, Faults{})
		defer r.end()
		agents := r.cluster(6)
		s := spec(2)
		s.AutomaticRecovery = true
		id := r.submit(s)
		r.eventually(5*time.Second, "runs", r.running(id))
		for _, a := range agents[1:4] {
			a.stop()
		}
		r.must(&logv1.Command{Op: &logv1.Command_CancelJobs{CancelJobs: &logv1.CancelJobs{JobIds: []uint32{id}}}})
		time.Sleep(10 * time.Minute)
		if n := r.log.count(&logv1.Command_FenceNode{}); n > 0 {
			t.Errorf("%d fences", n)
		}
	})
}
