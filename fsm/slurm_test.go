package fsm

import (
	"strings"
	"testing"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

func TestALaunchThatTheRequestSpoiltShowsSlurmsCode(t *testing.T) {
	r := twoNodes(t)
	job := r.submit(alice, batchSpec())
	p := r.placement(1, 0, 1)
	r.must(member, &logv1.Place{JobId: job, Attempt: 1, PlacementNumber: 1, Partition: "main", Placement: p})
	a := r.check().Attempt(job, 1)
	r.report(1, job, a.Fence, &logv1.PrepareFailed{Sentence: "the output cannot be opened", UsersFault: true})
	r.report(1, job, a.Fence, &logv1.AttemptReaped{})
	if s := r.status(job); s.State != apiv1.JobState_JOB_STATE_FAILED || s.ExitCode != 0 || s.ExitSignal != 53 {
		t.Errorf("status is %s", text(s))
	}
}

func TestOnlyACancelledJobThatRanShowsASignal(t *testing.T) {
	r := twoNodes(t)
	ran, waits := r.submit(alice, batchSpec()), r.submit(alice, batchSpec())
	fence := r.start(ran, r.placement(1, 0, 1))
	r.must(alice, &logv1.CancelJobs{JobIds: []uint32{ran, waits}})
	r.report(1, ran, fence, &logv1.AttemptReaped{})
	if s := r.status(ran); s.State != jobCancelled || s.ExitCode != 0 || s.ExitSignal != 15 {
		t.Errorf("cancelled while it ran: %s", text(s))
	}
	if s := r.status(waits); s.State != jobCancelled || s.ExitCode != 0 || s.ExitSignal != 0 {
		t.Errorf("cancelled while it waited: %s", text(s))
	}
}

func TestAPriorityReleasesAndZeroHolds(t *testing.T) {
	r := twoNodes(t)
	job := r.submit(alice, batchSpec())
	set := func(who *apiv1.Principal, priority uint32) *logv1.Result {
		return r.do(who, &logv1.UpdateJobs{Request: &apiv1.UpdateJobRequest{JobIds: []uint32{job}, Change: &apiv1.UpdateJobRequest_Priority{Priority: priority}}})
	}
	if result := set(root, 0); len(result.Refusals) > 0 || r.status(job).Held == 0 {
		t.Fatalf("priority 0: %v, %s", result, text(r.status(job)))
	}
	if result := set(alice, 5); len(result.Refusals) != 1 || r.status(job).Held == 0 {
		t.Errorf("the owner released a hold of an operator's: %v", result)
	}
	if result := set(root, 5); len(result.Refusals) > 0 || r.status(job).Held != 0 || r.status(job).Priority != 5 {
		t.Errorf("priority 5: %v, %s", result, text(r.status(job)))
	}
}

func TestRequestsThatCannotBeMeantAreRefused(t *testing.T) {
	r := twoNodes(t)
	for want, request := range map[string]*apiv1.ResourceRequest{
		"node nosuch does not exist":            {Exclude: []string{"nosuch"}},
		"excludes every node of partition main": {Exclude: []string{"n1", "n2", "n3"}},
		"memory per GPU and for no GPU":         {MemoryPerGpuMb: 300},
		"MiB of memory":                         {MemoryPerGpuMb: 600_000, GpusTotal: 2, Ntasks: 1},
	} {
		spec := batchSpec()
		spec.Resources = request
		if refusal, _ := ValidateSpec(r.check(), spec, alice); !strings.Contains(refusal.GetSentence(), want) {
			t.Errorf("want %q, got %v", want, refusal)
		}
	}
}

func TestSettingsHaveBounds(t *testing.T) {
	for field, settings := range map[string]*apiv1.Settings{
		"lease_ms":           {LeaseMs: 1},
		"fence_window_ms":    {FenceWindowMs: 1},
		"lost_after_ms":      {LostAfterMs: 4294967295},
		"kill_grace_s":       {KillGraceS: 4294967295},
		"prepare_timeout_ms": {PrepareTimeoutMs: 1},
	} {
		c := testConfiguration()
		c.Settings = settings
		if refusal := CheckConfiguration(c); refusal.GetSubject() != "settings."+field || !strings.Contains(refusal.Sentence, field) {
			t.Errorf("%s: got %v", field, refusal)
		}
	}
	c := testConfiguration()
	c.Settings = &apiv1.Settings{LeaseMs: 2000, LostAfterMs: 4000, FenceWindowMs: 1000}
	if refusal := CheckConfiguration(c); refusal != nil {
		t.Errorf("what muster dev uses is refused: %v", refusal)
	}
}

func TestAnAllocationEndsAsWhatUsedItEnded(t *testing.T) {
	r := twoNodes(t)
	spec := &apiv1.JobSpec{Name: "interactive", Kind: apiv1.JobKind_JOB_KIND_ALLOCATION, WorkDir: "/home"}
	for _, test := range []struct {
		code, signal uint32
		want         apiv1.JobState
	}{{0, 0, apiv1.JobState_JOB_STATE_COMPLETED}, {3, 0, apiv1.JobState_JOB_STATE_FAILED}, {0, 9, apiv1.JobState_JOB_STATE_FAILED}} {
		job := r.submit(alice, spec)
		fence := r.start(job, r.placement(1, 0, 1))
		if s := r.status(job); s.State != apiv1.JobState_JOB_STATE_RUNNING {
			t.Fatalf("an allocation does not run without a program: %s", text(s))
		}
		back := &logv1.CancelJobs{JobIds: []uint32{job}, Complete: true, ExitCode: test.code, ExitSignal: test.signal}
		if result := r.do(bob, back); len(result.Refusals) != 1 {
			t.Errorf("somebody else gave it back: %v", result)
		}
		r.must(alice, back)
		r.must(alice, back) // told again
		r.report(1, job, fence, &logv1.AttemptReaped{})
		if s := r.status(job); s.State != test.want || s.ExitCode != test.code || s.ExitSignal != test.signal {
			t.Errorf("%d:%d became %s", test.code, test.signal, text(s))
		}
		if result := r.do(alice, back); len(result.Refusals) != 1 || result.Refusals[0].Reason != "JOB_ENDED" {
			t.Errorf("afterwards: %v", result)
		}
	}
	waits, batch := r.submit(alice, spec), r.submit(alice, batchSpec())
	r.must(alice, &logv1.CancelJobs{JobIds: []uint32{waits}, Complete: true})
	if s := r.status(waits); s.State != jobCancelled {
		t.Errorf("one that was never used: %s", text(s))
	}
	for _, senseless := range []*logv1.CancelJobs{
		{JobIds: []uint32{batch}, Complete: true}, {JobIds: []uint32{batch}, Complete: true, Signal: 9}, {JobIds: []uint32{batch}, Complete: true, ExitCode: 256},
	} {
		if result := r.do(alice, senseless); len(result.Refusals) == 0 && result.Refusal == nil || r.status(batch).State != jobPending {
			t.Errorf("%v: %v", senseless, result)
		}
	}
}
