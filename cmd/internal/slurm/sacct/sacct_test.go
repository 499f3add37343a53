package sacct

import (
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/muster-hpc/muster/cmd/internal/slurm/slurmtest"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// accounted is the recorded cluster with a cancelled job of two steps, and one that was started again.
func accounted(t *testing.T) *slurmtest.Cluster {
	c := slurmtest.Recorded(t)
	at := func(clock string) *timestamppb.Timestamp { return timestamppb.New(slurmtest.Day(clock)) }
	for _, job := range c.JobList {
		switch job.GetId() {
		case 1:
			job.Status.Attempt = 1
			c.StepList = append(c.StepList,
				&apiv1.Step{JobId: 1, Id: 0, Attempt: 1, State: apiv1.StepState_STEP_STATE_FAILED, NodeList: "n1", NumTasks: 2, StartTime: at("14:09:48"), EndTime: at("14:09:48"),
					Spec: &apiv1.StepSpec{Name: "hostname"}, Exits: []*apiv1.TaskExit{{Count: 2, Code: 5}}},
				&apiv1.Step{JobId: 1, Id: 4294967291, Attempt: 1, State: apiv1.StepState_STEP_STATE_COMPLETED, NodeList: "n1", NumTasks: 1, StartTime: at("14:09:48"), EndTime: at("14:09:48"),
					Spec: &apiv1.StepSpec{Name: "batch"}, Exits: []*apiv1.TaskExit{{Count: 1}}})
			job.Status.DerivedExitCode = 5
		case 2:
			job.Status.Attempt, job.Status.ExitCode = 1, 130
		case 6:
			job.Status.State, job.Status.CancelledBy, job.Status.EndTime = apiv1.JobState_JOB_STATE_CANCELLED, 0, at("14:10:02")
			c.StepList[0].State, c.StepList[0].EndTime, c.StepList[0].Exits = apiv1.StepState_STEP_STATE_CANCELLED, at("14:10:02"), []*apiv1.TaskExit{{Count: 1, Signal: 15}}
		}
	}
	return c
}

func TestTheUsualLayout(t *testing.T) {
	got := accounted(t).Run(t, Run, "sacct", "-j", "1,2,6,7")
	want := `JobID           JobName  Partition    Account  AllocCPUS      State ExitCode 
------------ ---------- ---------- ---------- ---------- ---------- -------- 
1              early-ok       main                     1  COMPLETED      0:0 
1.batch           batch                                1  COMPLETED      0:0 
1.0            hostname                                2     FAILED      5:0 
2            early-fail       main                     1     FAILED      2:0 
6                  run1       main                     2 CANCELLED+      0:0 
6.batch           batch                                1  CANCELLED     0:15 
7                   big       main                     0    PENDING      0:0 
`
	if got.Stdout != want || got.Code != 0 {
		t.Errorf("%s\ngot:\n%s\nwant:\n%s", got.Stderr, got.Stdout, want)
	}
}

func TestWhatClientsAskFor(t *testing.T) {
	for _, test := range []struct{ words, want string }{
		{"-o JobID,State,NodeList --parsable2 -j 6 -j 7", "JobID|State|NodeList\n7|PENDING|None assigned\n"},
		{"-P -n --format=JobIdRaw,State -j 6", "6|CANCELLED by 0\n6.batch|CANCELLED\n"},
		{"-X --noheader --format=jobid,state%20 --job 1,6", "1                       COMPLETED \n6                  CANCELLED by 0 \n"},
		{"-j 6 -n -X -o nodelist%-20", "n[1-2]               \n"},
		{"-j 999", "JobID           JobName  Partition    Account  AllocCPUS      State ExitCode \n------------ ---------- ---------- ---------- ---------- ---------- -------- \n"},
		{"-n -j 999", ""},
		{"-n -P -j 3_1", ""},
		{"-n -P -o jobid,exitcode -j 1.0", "1.0|5:0\n"},
		{"-n -P -o jobid,exitcode -j 1.batch", "1.batch|0:0\n"},
		{"-n -p -o jobid,derivedexitcode -X -j 1", "1|5:0|\n"},
		{"-n -P --delimiter ; -o jobid,submit,start,end,elapsed -X -j 6", "6;2026-11-30T14:09:51;2026-11-30T14:09:54;2026-11-30T14:10:02;00:00:08\n"},
		{"-n -P -X -o jobid,timelimit,reqcpus,reqtres -j 6", "6|00:10:00|2|cpu=2,node=2,billing=2,gres/gpu=4\n"},
		{"-n -P -X -o jobid --name early-ok", "1\n"},
		{"-n -P -X -o jobid,state -s CD", ""},
		{"-n -P -X -o jobid,state -s CD -S 00:00", "1|COMPLETED\n"},
		{"-n -P -X -o jobid -s PD -n --name done", "10\n"},
		{"-n -P -X -o jobid -i 9", "17\n"},
		{"-n -P -X -o jobid -k 5 -K 15", "6\n"},
		{"-b -n -P -X -j 2", "2|FAILED|2:0\n"},
		{"-n -P -X --clusters all -o jobidraw,state --starttime 2026-11-30T00:00 --endtime now --name early-ok", "1|COMPLETED\n"},
	} {
		got := accounted(t).Run(t, Run, append([]string{"sacct"}, strings.Fields(test.words)...)...)
		if got.Stdout != test.want || got.Code != 0 {
			t.Errorf("%s: %+v, want %q", test.words, got, test.want)
		}
	}
}

func TestDuplicatesShowEarlierAttempts(t *testing.T) {
	c := accounted(t)
	for _, job := range c.JobList {
		if job.GetId() == 6 {
			job.Status.Attempt, job.Status.Restarts = 2, 1
		}
	}
	c.StepList[0].Attempt = 2
	c.Attempts[6] = []*apiv1.Attempt{
		{Number: 1, Failure: apiv1.FailureClass_FAILURE_CLASS_REQUEUED, StartTime: timestamppb.New(slurmtest.Day("14:09:52")), EndTime: timestamppb.New(slurmtest.Day("14:09:53"))},
		{Number: 2},
	}
	got := c.Run(t, Run, "sacct", "-D", "-n", "-P", "-o", "jobid,state,elapsed,restarts", "-j", "6")
	if want := "6|REQUEUED|00:00:01|1\n6|CANCELLED by 0|00:00:08|1\n6.batch|CANCELLED|00:00:08|\n"; got.Stdout != want {
		t.Errorf("got %q, want %q", got.Stdout, want)
	}
	if got := c.Run(t, Run, "sacct", "-X", "-n", "-P", "-o", "jobid,state", "-j", "6"); got.Stdout != "6|CANCELLED by 0\n" {
		t.Errorf("without -D: %+v", got)
	}
}

func TestTheWindowWithoutTimes(t *testing.T) {
	c := accounted(t)
	c.Run(t, Run, "sacct", "-X")
	c.Run(t, Run, "sacct", "-X", "-j", "6")
	s, _, _ := c.Session(t, "sacct", "-X")
	s.UID = 1000
	Run(t.Context(), s)
	since := func(i int) string {
		at := c.Listed[i].GetFilter().GetEndedSince()
		if at == nil {
			return "ever"
		}
		return at.AsTime().In(slurmtest.Day("00:00:00").Location()).Format("15:04:05")
	}
	if since(0) != "00:00:00" || since(1) != "ever" {
		t.Errorf("since %s, and %s for jobs that are named", since(0), since(1))
	}
	if len(c.Listed[0].GetFilter().GetUids()) != 0 || !reflect.DeepEqual(c.Listed[2].GetFilter().GetUids(), []uint32{1000}) {
		t.Errorf("users %v for root, %v for user 1000", c.Listed[0].GetFilter(), c.Listed[2].GetFilter())
	}
}

func TestThousandsOfIdsAreAllReturned(t *testing.T) {
	c := slurmtest.Recorded(t)
	c.JobList = nil
	var ids []string
	for id := uint32(1); id <= 12_000; id++ {
		c.JobList = append(c.JobList, &apiv1.Job{Id: id, Spec: &apiv1.JobSpec{}, Status: &apiv1.JobStatus{State: apiv1.JobState_JOB_STATE_PENDING}})
		ids = append(ids, fmt.Sprint(id))
	}
	got := c.Run(t, Run, "sacct", "-n", "-P", "-o", "jobid", "-j", strings.Join(ids, ","))
	if lines := strings.Fields(got.Stdout); !slices.Equal(lines, ids) {
		t.Errorf("%d lines", len(lines))
	}
}

func TestWhatIsRefused(t *testing.T) {
	for words, want := range map[string]string{
		"-o bad":      "sacct: error: Invalid field requested: \"bad\"\n",
		"-c":          "sacct: error: --completion is not supported yet: there is one record of jobs, which is complete\n",
		"--bogus":     "sacct: unrecognized option '--bogus'\nTry \"sacct --help\" for more information\n",
		"-S nonsense": "sacct: error: Invalid time specification (pos=0): nonsense\n",
	} {
		if got := accounted(t).Run(t, Run, append([]string{"sacct"}, strings.Fields(words)...)...); got.Code != 1 || got.Stderr != want {
			t.Errorf("%s: %+v", words, got)
		}
	}
}

func TestUnits(t *testing.T) {
	c := accounted(t)
	for _, job := range c.JobList {
		job.Spec.Resources.MemoryPerNodeMb = 1536
	}
	for words, want := range map[string]string{"": "1536M\n", "--units=G": "1.5G\n", "--units K": "1572864K\n", "--noconvert": "1536M\n"} {
		got := c.Run(t, Run, append([]string{"sacct", "-nPX", "-o", "reqmem", "-j", "1"}, strings.Fields(words)...)...)
		if got.Stdout != want {
			t.Errorf("%q: %+v, want %q", words, got, want)
		}
	}
}

func TestJSON(t *testing.T) {
	got := accounted(t).Run(t, Run, "sacct", "--json", "-j", "1,6")
	var d struct {
		Jobs []struct {
			ID    int `json:"job_id"`
			State struct{ Current []string }
			Steps []struct{ Step struct{ ID string } }
		}
	}
	if err := json.Unmarshal([]byte(got.Stdout), &d); err != nil || len(d.Jobs) != 2 {
		t.Fatal(err, got)
	}
	if d.Jobs[0].Steps[1].Step.ID != "1.0" || d.Jobs[1].State.Current[0] != "CANCELLED" || len(d.Jobs[1].Steps) != 1 {
		t.Errorf("%+v", d)
	}
}

func TestEveryColumnHasAValueForEveryLine(t *testing.T) {
	for _, words := range [][]string{{"-l"}, {"-o", "ALL"}} {
		got := accounted(t).Run(t, Run, append([]string{"sacct", "-P"}, words...)...)
		var columns int
		for i, row := range strings.Split(strings.TrimRight(got.Stdout, "\n"), "\n") {
			n := strings.Count(row, "|")
			if i == 0 {
				columns = n
			}
			if n != columns {
				t.Errorf("%v: %d columns in %q, want %d", words, n, row, columns)
			}
		}
		if columns < 30 {
			t.Errorf("%v: %d columns, %+v", words, columns, got)
		}
	}
}
