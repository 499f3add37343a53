package scancel

import (
	"reflect"
	"strings"
	"testing"

	"github.com/muster-hpc/muster/cmd/internal/slurm/slurmtest"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

func TestUnknownJobsAreNoError(t *testing.T) {
	c := slurmtest.Recorded(t)
	if got := c.Run(t, Run, "scancel", "999", "3_1"); got != (slurmtest.Outcome{}) {
		t.Errorf("got %+v, want silence and 0", got)
	}
	if got := c.Run(t, Run, "scancel", "-v", "999"); got.Code != 0 || !strings.Contains(got.Stderr, "Kill job error on job id 999: Invalid job id specified") {
		t.Errorf("with -v: %+v", got)
	}
}

func TestNothingIsCancelledWithoutAChoice(t *testing.T) {
	c := slurmtest.Recorded(t)
	got := c.Run(t, Run, "scancel")
	if got.Code != 1 || got.Stderr != "scancel: error: No job identification provided\n" || len(c.Cancelled) != 0 {
		t.Errorf("got %+v, calls %v", got, c.Cancelled)
	}
}

func TestWhatIsAskedFor(t *testing.T) {
	step := func(n uint32) *uint32 { return &n }
	for _, test := range []struct {
		words  string
		ids    []uint32
		signal uint32
		step   *uint32
		batch  bool
		full   bool
	}{
		{words: "7 8,10", ids: []uint32{7, 8, 10}},
		{words: "7-9", ids: []uint32{7, 8, 9}},
		{words: "[7-9]", ids: []uint32{7, 8, 9}},
		{words: "6 --signal SIGTERM", ids: []uint32{6}, signal: 15},
		{words: "-s usr1 6", ids: []uint32{6}, signal: 10},
		{words: "--signal=USR2 --batch 6", ids: []uint32{6}, signal: 12, batch: true},
		{words: "-f -s 2 6", ids: []uint32{6}, signal: 2, full: true},
		{words: "-b 6", ids: []uint32{6}},
		{words: "6.0", ids: []uint32{6}, step: step(0)},
		{words: "6.batch", ids: []uint32{6}, step: step(4294967291)},
		{words: "-t PENDING --qos= -n big", ids: []uint32{7}},
		{words: "--clusters=all 7", ids: []uint32{7}},
	} {
		c := slurmtest.Recorded(t)
		got := c.Run(t, Run, append([]string{"scancel"}, strings.Fields(test.words)...)...)
		if got.Code != 0 || len(c.Cancelled) != 1 {
			t.Errorf("%s: %+v, %d calls", test.words, got, len(c.Cancelled))
			continue
		}
		r := c.Cancelled[0]
		if !reflect.DeepEqual(r.GetFilter().GetJobIds(), test.ids) || r.GetSignal() != test.signal || !reflect.DeepEqual(r.Step, test.step) ||
			r.GetBatchOnly() != test.batch || r.GetFull() != test.full || r.GetRequestId() == "" {
			t.Errorf("%s: sent %v", test.words, r)
		}
	}
}

func TestFiltersReachTheApiAndEndedJobsDoNot(t *testing.T) {
	c := slurmtest.Recorded(t)
	if got := c.Run(t, Run, "scancel", "-u", "root", "-p", "main", "-n", "big", "-A", "a", "-w", "n1"); got.Code != 0 {
		t.Fatalf("%+v", got)
	}
	f := c.Cancelled[0].GetFilter()
	if !f.GetActive() || f.GetUids()[0] != 0 || f.GetPartitions()[0] != "main" || f.GetNames()[0] != "big" || f.GetAccounts()[0] != "a" || f.GetNodes()[0] != "n1" {
		t.Errorf("filter %v", f)
	}
}

func TestInteractiveAsksForEachJob(t *testing.T) {
	c := slurmtest.Recorded(t)
	s, stdout, _ := c.Session(t, "scancel", "-i", "7", "8", "10")
	s.Stdin = strings.NewReader("y\nno\ny\n")
	if code := Run(t.Context(), s); code != 0 {
		t.Fatal(code)
	}
	want := "Cancel job_id=7 name=big partition=main [y/n]? Cancel job_id=8 name=prio partition=main [y/n]? Cancel job_id=10 name=done partition=main [y/n]? "
	if stdout.String() != want || !reflect.DeepEqual(c.Cancelled[0].GetFilter().GetJobIds(), []uint32{7, 10}) {
		t.Errorf("asked %q, cancelled %v", stdout.String(), c.Cancelled[0])
	}
}

func TestRefusalsAreSaidAndCount(t *testing.T) {
	c := slurmtest.Recorded(t)
	c.RefuseJob = func(id uint32) *apiv1.ErrorDetail {
		return &apiv1.ErrorDetail{Reason: "NOT_OWNER", Subject: "job 7", Sentence: "Job 7 belongs to root."}
	}
	got := c.Run(t, Run, "scancel", "7")
	if got.Code != 1 || got.Stderr != "scancel: error: Kill job error on job id 7: Access/permission denied (Job 7 belongs to root.)\n" {
		t.Errorf("%+v", got)
	}
}
