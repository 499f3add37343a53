package fsm

import (
	"testing"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

// silentNode runs a job that did not opt into recovery on node 1, which is then not heard of.
func silentNode(t *testing.T, options ...Option) (*rig, uint32, *apiv1.Fence) {
	r := newRig(t, options...)
	r.boot()
	r.join("n1", 8, 4)
	r.join("n2", 8, 4)
	spec := runSpec()
	spec.Requeue = true // It may be repeated once it is known to have failed; silence says nothing.
	job := r.submit(alice, spec)
	fence := r.start(job, r.placement(1, 0, 1))
	r.must(member, &logv1.LoseNode{Node: 1, Epoch: 1, Sentence: "silent for 60 s"})
	return r, job, fence
}

// goesOn tells what is wrong with a job that silence must not end, "" if nothing.
func goesOn(s *apiv1.JobStatus) string {
	if s.State == jobRunning && !s.Completing && s.Attempt == 1 && s.Restarts == 0 {
		return ""
	}
	return text(s)
}

func TestSilenceEndsNothingThatDoesNotStopItself(t *testing.T) {
	r, job, fence := silentNode(t)
	r.must(member, &logv1.FenceNode{Node: 1, Epoch: 1})
	if wrong := goesOn(r.status(job)); wrong != "" {
		t.Fatalf("a silent node ended a job: %s", wrong)
	}
	if result := r.must(agentOf("n1"), &logv1.JoinNode{Spec: nodeSpec("n1", 8, 4), Instance: instance("boot-n1", "1")}); result.NodeEpoch != 2 {
		t.Errorf("the agent came back in epoch %d", result.NodeEpoch)
	}
	if wrong := goesOn(r.status(job)); wrong != "" {
		t.Fatalf("the agent's return ended a job: %s", wrong)
	}
	r.report(1, job, fence, &logv1.StepEnded{Exits: exits(0, 1, 7, 0)})
	r.report(1, job, fence, &logv1.AttemptReaped{})
	if s := r.status(job); s.State != apiv1.JobState_JOB_STATE_FAILED || s.ExitCode != 7 {
		t.Errorf("the true end did not count: %s", text(s))
	}
	r.check()
}

func TestAReportThatWasOnItsWayWhenTheNodeWasLostCounts(t *testing.T) {
	r, job, fence := silentNode(t)
	r.must(agentOf("n1"), &logv1.ReportTasks{Node: 1, Epoch: 1, Instance: instance("boot-n1", "1"), Reports: []*logv1.TaskReport{
		{JobId: job, Fence: fence, Event: &logv1.TaskReport_StepEnded{StepEnded: &logv1.StepEnded{Exits: exits(0, 1, 7, 0)}}},
		{JobId: job, Fence: fence, Event: &logv1.TaskReport_AttemptReaped{AttemptReaped: &logv1.AttemptReaped{}}},
	}})
	// It is acknowledged, so nobody would ever say it again.
	if s := r.status(job); s.State != apiv1.JobState_JOB_STATE_FAILED || s.ExitCode != 7 {
		t.Errorf("an exit code was lost: %s", text(s))
	}
	r.check()
}

func TestEvidenceEndsWhatSilenceDidNot(t *testing.T) {
	update := func(r *apiv1.UpdateNodesRequest) *logv1.UpdateNodes {
		r.Names, r.Reason = []string{"n1"}, "burnt"
		return &logv1.UpdateNodes{Request: r}
	}
	for name, test := range map[string]struct {
		do        func(r *rig)
		accounted bool
	}{
		"another boot": {func(r *rig) {
			r.must(agentOf("n1"), &logv1.JoinNode{Spec: nodeSpec("n1", 8, 4), Instance: instance("boot-2", "2"), TakesOver: true})
		}, true},
		"power":                      {func(r *rig) { r.must(member, &logv1.FenceNode{Node: 1, Epoch: 2, PoweredOff: true}) }, true},
		"power, by the epoch before": {func(r *rig) { r.must(member, &logv1.FenceNode{Node: 1, Epoch: 1, PoweredOff: true}) }, true},
		"an operator says down": {func(r *rig) {
			r.must(root, update(&apiv1.UpdateNodesRequest{Change: &apiv1.UpdateNodesRequest_Down{Down: true}}))
		}, false},
		"an operator says fenced": {func(r *rig) {
			r.must(root, update(&apiv1.UpdateNodesRequest{Change: &apiv1.UpdateNodesRequest_Fenced{Fenced: true}}))
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			r, job, fence := silentNode(t)
			test.do(r)
			switch s := r.status(job); {
			case test.accounted && s.State != jobPending, !test.accounted && !s.Completing:
				t.Fatalf("evidence did not end it: %s", text(s))
			case !test.accounted:
				r.must(agentOf("n1"), &logv1.JoinNode{Spec: nodeSpec("n1", 8, 4), Instance: instance("boot-n1", "1")})
				r.report(1, job, fence, &logv1.AttemptReaped{})
			}
			if s := r.status(job); s.State != jobPending || s.Restarts != 1 {
				t.Errorf("it is not queued again: %s", text(s))
			}
			r.check()
		})
	}
}

func TestEndingOnSilenceIsSeen(t *testing.T) {
	r, job, _ := silentNode(t, WithFaults(Faults{EndOnSilence: true}))
	if goesOn(r.status(job)) == "" {
		t.Error("the planted bug does not show")
	}
}
