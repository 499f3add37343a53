package demo

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

func TestAnUntrueClaimIsNamed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "out")
	text := "step 1 loss 2.3\nstep 10 loss 1.5\nstep 1500 loss 0.02\naccuracy 0.9300 on 297 images it never saw\n"
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	good, err := readOutput(path)
	if err != nil {
		t.Fatal(err)
	}
	job := func(change func(*apiv1.GetJobResponse)) *apiv1.GetJobResponse {
		r := &apiv1.GetJobResponse{
			Job:      &apiv1.Job{Status: &apiv1.JobStatus{State: apiv1.JobState_JOB_STATE_COMPLETED}},
			Attempts: []*apiv1.Attempt{{}},
		}
		change(r)
		return r
	}
	nothing := func(*apiv1.GetJobResponse) {}
	fine := []failure{{what: "a", step: 1, later: 100, same: true}, {what: "b", step: 1, later: 100, same: true}, {what: "c", step: 1, later: 100, same: true}}
	if untrue := (&show{failures: fine}).check(job(nothing), good); len(untrue) > 0 {
		t.Fatalf("a good run: %q", untrue)
	}
	repeated, slow, dumb := good, good, good
	repeated.points = append(good.points[:2:2], good.points[1:]...)
	slow.points = good.points[:2]
	dumb.accuracy = 0.5
	for want, c := range map[string]struct {
		job      *apiv1.GetJobResponse
		out      output
		failures []failure
	}{
		"ended as JOB_STATE_FAILED": {job(func(r *apiv1.GetJobResponse) { r.Job.Status.State = apiv1.JobState_JOB_STATE_FAILED }), good, fine},
		"exit code is 0:9":          {job(func(r *apiv1.GetJobResponse) { r.Job.Status.ExitSignal = 9 }), good, fine},
		"2 attempts":                {job(func(r *apiv1.GetJobResponse) { r.Attempts = append(r.Attempts, &apiv1.Attempt{}) }), good, fine},
		"step 10 follows step 10":   {job(nothing), repeated, fine},
		"last step in its output":   {job(nothing), slow, fine},
		"reads 50.0 %":              {job(nothing), dumb, fine},
		"other processes":           {job(nothing), good, []failure{fine[0], fine[1], {what: "c", step: 1, later: 100}}},
		"stood still":               {job(nothing), good, []failure{fine[0], fine[1], {what: "c", step: 90, later: 100, same: true}}},
		"2 processes were killed":   {job(nothing), good, fine[:2]},
	} {
		untrue := (&show{failures: c.failures}).check(c.job, c.out)
		if len(untrue) != 1 || !strings.Contains(untrue[0], want) {
			t.Errorf("%s: %q", want, untrue)
		}
	}
}
