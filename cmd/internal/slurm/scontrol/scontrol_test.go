package scontrol

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/muster-hpc/muster/cmd/internal/slurm/slurmtest"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// newer rewrites a recording of 22.05 as 24.11 has it, and hides what Muster does not know (loads, sessions, the time
// of the last look at a job). The resources are compared without what accounting adds to them.
func newer(t *testing.T, name string) string {
	t.Helper()
	data, err := os.ReadFile("testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return hide(string(data))
}

var hidden = []struct{ pattern, with string }{
	{`(?m)^   Power=\n`, ""},
	{` Power= `, " "},
	{`gres:gpu`, "gres/gpu"},
	{`(?m)^   (ReqTRES|TRES)=cpu=.*\n`, ""},
	{`(?m)^   AllocTRES=.*\n`, ""},
	{` (ReqTRES|AllocTRES|TRES)=[^ ]*`, ""},
	{`LastSchedEval=[^ ]*`, "LastSchedEval=?"},
	{`:Sid=localhost:\d+`, ":Sid=localhost:?"},
	{`(?m)^   CapWatts=n/a\n`, ""},
	{`(?m)^   ExtSensors.*\n`, ""},
	{`CPULoad=[^ \n]*`, "CPULoad=?"}, {`FreeMem=[^ ]*`, "FreeMem=?"},
	{` ResumeAfterTime=None`, ""},
	{`(?m)^   CfgTRES=(cpu=\d+,mem=\d+M,billing=\d+).*$`, "   CfgTRES=$1"},
	{`BootTime=[^ ]*`, "BootTime=?"},
	{`(?m)^(   TRES=cpu=\d+,mem=\d+M,node=\d+,billing=\d+).*$`, "$1"},
}

func hide(text string) string {
	for _, h := range hidden {
		text = regexp.MustCompile(h.pattern).ReplaceAllString(text, h.with)
	}
	return text
}

func cancelled(c *slurmtest.Cluster) {
	for _, job := range c.JobList {
		if job.GetId() == 6 {
			job.Status.State, job.Status.ExitSignal = apiv1.JobState_JOB_STATE_CANCELLED, 15
			job.Status.EndTime = timestamppb.New(slurmtest.Day("14:10:05"))
		}
	}
}

func drained(c *slurmtest.Cluster) {
	n := c.NodeList[3]
	n.Drain, n.Reason, n.ReasonBy, n.ReasonTime = true, "bad dimm", "root", timestamppb.New(slurmtest.Day("14:10:05"))
}

func TestOutputEqualsTheRecordedOne(t *testing.T) {
	for _, test := range []struct {
		file, words string
		change      func(*slurmtest.Cluster)
	}{
		{"scontrol-show-job-COMPLETED.txt", "show job 1", nil},
		{"scontrol-show-job-FAILED.txt", "show jobs 2", nil},
		{"scontrol-show-job-running.txt", "show job=6", nil},
		{"scontrol-d-show-job-running.txt", "show jobid -dd 6", nil},
		{"scontrol-o-show-job.txt", "show job 6 --oneliner", nil},
		{"scontrol-show-job-CANCELLED.txt", "show job 6", cancelled},
		{"scontrol-show-job-pending-begin.txt", "show job 13", nil},
		{"scontrol-show-job-pending-big.txt", "show job 7", nil},
		{"scontrol-show-job-pending-held.txt", "show job 9", nil},
		{"scontrol-show-job-pending-prio.txt", "show job 8", nil},
		{"scontrol-show-node.txt", "show node n1", nil},
		{"scontrol-d-show-node.txt", "-d show node n1", nil},
		{"scontrol-show-node-drain.txt", "show node n4", drained},
		{"scontrol-show-partition.txt", "show partition", nil},
		{"scontrol-show-step.txt", "show step 6.batch", nil},
		{"scontrol-ping.txt", "ping", nil},
		{"scontrol-show-hostlist.txt", "show hostlist n1,n2,n3", nil},
		{"scontrol-show-hostnames.txt", "show hostnames n[1-3,7]", nil},
	} {
		t.Run(test.words, func(t *testing.T) {
			c := slurmtest.Recorded(t)
			if test.change != nil {
				test.change(c)
			}
			got := c.Run(t, Run, append([]string{"scontrol"}, strings.Fields(test.words)...)...)
			want := newer(t, test.file)
			if hide(got.Stdout) != want || got.Code != 0 {
				t.Errorf("code %d, stderr %q\ngot:\n%s\nwant:\n%s", got.Code, got.Stderr, hide(got.Stdout), want)
			}
		})
	}
}

func TestTheResourcesOfAJob(t *testing.T) {
	got := slurmtest.Recorded(t).Run(t, Run, "scontrol", "show", "job", "6").Stdout
	for _, want := range []string{"   ReqTRES=cpu=2,node=2,billing=2,gres/gpu=4\n", "   AllocTRES=cpu=2,node=2,billing=2,gres/gpu=4\n"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is not in\n%s", want, got)
		}
	}
}

func TestAJobThatDoesNotExist(t *testing.T) {
	want, err := os.ReadFile("testdata/scontrol-show-job-error.txt")
	if err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{"999", "3_1"} {
		if got := slurmtest.Recorded(t).Run(t, Run, "scontrol", "show", "job", id); got.Code != 1 || got.Stderr != string(want) {
			t.Errorf("%s: %+v", id, got)
		}
	}
}

// TestHostListsEqualTheRecordedOnes reads "LIST => rc=0 N lines: WORDS" and "hostlist NAMES => LIST   sorted => LIST".
func TestHostListsEqualTheRecordedOnes(t *testing.T) {
	data, err := os.ReadFile("testdata/hostlist.txt")
	if err != nil {
		t.Fatal(err)
	}
	unfold := regexp.MustCompile(`^(.*) => rc=0 \d+ lines: (.*)$`)
	fold := regexp.MustCompile(`^hostlist (\S+) => (\S+)   sorted => (\S+)$`)
	run := func(words ...string) string {
		got := slurmtest.Recorded(t).Run(t, Run, append([]string{"scontrol", "show"}, words...)...)
		if got.Code != 0 {
			t.Errorf("%q: %+v", words, got)
		}
		return strings.Join(strings.Fields(got.Stdout), " ")
	}
	n := 0
	for line := range strings.SplitSeq(strings.TrimSpace(string(data)), "\n") {
		if m := unfold.FindStringSubmatch(line); m != nil {
			n++
			list, want := m[1], strings.TrimSpace(m[2])
			switch list {
			case "n[1": // Slurm answers "n]"; a list that is not closed is an error here
				want = "Invalid hostlist: n[1"
			case "n[1-2,a]": // the line on stderr has words of its own
				want = "Invalid hostlist: n[1-2,a]"
			}
			got := run("hostnames", list)
			if strings.HasPrefix(list, "c[156") { // the recording is cut
				if !strings.HasPrefix(got, want) || len(strings.Fields(got)) != 12 {
					t.Errorf("%q: got %q, want %q and more", list, got, want)
				}
				continue
			}
			if got != want {
				t.Errorf("%q: got %q, want %q", list, got, want)
			}
		}
		if m := fold.FindStringSubmatch(line); m != nil {
			n++
			if got := run("hostlist", m[1]); got != m[2] {
				t.Errorf("hostlist %s: got %q, want %q", m[1], got, m[2])
			}
			if got := run("hostlistsorted", m[1]); got != m[3] {
				t.Errorf("hostlistsorted %s: got %q, want %q", m[1], got, m[3])
			}
		}
	}
	if n < 15 {
		t.Errorf("only %d lines were understood", n)
	}
}

func TestHostNamesOfTheEnclosingJob(t *testing.T) {
	c := slurmtest.Recorded(t)
	s, stdout, stderr := c.Session(t, "scontrol", "show", "hostname")
	s.Environ = []string{"SLURM_JOB_NODELIST=n[1-2]"}
	if code := Run(t.Context(), s); code != 0 || stdout.String() != "n1\nn2\n" {
		t.Errorf("code %d, %q, %q", code, stdout.String(), stderr.String())
	}
	if got := c.Run(t, Run, "scontrol", "show", "hostnames"); got.Code != 0 || got.Stderr != "scontrol: error: host list is empty\n" {
		t.Errorf("without one: %+v", got)
	}
	if got := c.Run(t, Run, "scontrol", "show", "hostnames=n[3-4]"); got.Stdout != "n3\nn4\n" {
		t.Errorf("with =: %+v", got)
	}
}

func TestChangesOfJobs(t *testing.T) {
	for _, test := range []struct {
		words string
		check func(r *apiv1.UpdateJobRequest) bool
	}{
		{"hold 7,8", func(r *apiv1.UpdateJobRequest) bool { return r.GetHold() && len(r.GetJobIds()) == 2 }},
		{"release 9", func(r *apiv1.UpdateJobRequest) bool {
			_, ok := r.GetChange().(*apiv1.UpdateJobRequest_Hold)
			return ok && !r.GetHold()
		}},
		{"requeue 6", func(r *apiv1.UpdateJobRequest) bool { return r.GetRequeue() && !r.GetRequeueHold() }},
		{"requeuehold 6", func(r *apiv1.UpdateJobRequest) bool { return r.GetRequeue() && r.GetRequeueHold() }},
		{"update JobId=7 TimeLimit=1-00:00:00", func(r *apiv1.UpdateJobRequest) bool { return r.GetTimeLimitS() == 86400 }},
		{"update jobid=6 TimeLimit+=5", func(r *apiv1.UpdateJobRequest) bool { return r.GetTimeLimitS() == 900 }},
		{"update jobid=6 TimeLimit=-1:30", func(r *apiv1.UpdateJobRequest) bool { return r.GetTimeLimitS() == 480 }},
		{"update Job=7 Priority=5", func(r *apiv1.UpdateJobRequest) bool { return r.GetPriority() == 5 }},
		{"update Job=7 Priority=0", func(r *apiv1.UpdateJobRequest) bool { return r.GetHold() }},
		{"update JobId=7 Comment=a=b", func(r *apiv1.UpdateJobRequest) bool { return r.GetComment() == "a=b" }},
		{"update JobId=7 JobName=x", func(r *apiv1.UpdateJobRequest) bool { return r.GetName() == "x" }},
		{"update JobId=7 Partition=p", func(r *apiv1.UpdateJobRequest) bool { return r.GetPartition() == "p" }},
		{"update JobId=7 Nice=-3", func(r *apiv1.UpdateJobRequest) bool { return r.GetNice() == -3 }},
	} {
		c := slurmtest.Recorded(t)
		got := c.Run(t, Run, append([]string{"scontrol"}, strings.Fields(test.words)...)...)
		if got != (slurmtest.Outcome{}) || len(c.Updated) != 1 || !test.check(c.Updated[0]) || c.Updated[0].GetRequestId() == "" {
			t.Errorf("%s: %+v, sent %v", test.words, got, c.Updated)
		}
	}
}

func TestChangesOfNodes(t *testing.T) {
	c := slurmtest.Recorded(t)
	if got := c.Run(t, Run, "scontrol", "update", "NodeName=n[1-2]", "State=DRAIN", "Reason=bad dimm"); got.Code != 0 {
		t.Fatalf("%+v", got)
	}
	if r := c.NodeCalls[0]; !r.GetDrain() || r.GetReason() != "bad dimm" || len(r.GetNames()) != 2 {
		t.Errorf("sent %v", r)
	}
	if got := c.Run(t, Run, "scontrol", "update", "nodename=n1", "state=resume"); got.Code != 0 || !c.NodeCalls[1].GetResume() {
		t.Errorf("%+v", got)
	}
	if got := c.Run(t, Run, "scontrol", "update", "NodeName=n1", "State=down"); got.Code != 1 || len(c.NodeCalls) != 2 {
		t.Errorf("down without a reason: %+v", got)
	}
}

func TestASilentNodeIsNotResponding(t *testing.T) {
	c := slurmtest.Recorded(t)
	c.Silent = []*apiv1.SilentNode{{Node: c.NodeList[2].GetNumber(), SilentMs: 14_000}}
	for node, want := range map[string]string{"n1": "MIXED", "n3": "IDLE+NOT_RESPONDING"} {
		if got := c.Run(t, Run, "scontrol", "show", "node", node); !strings.Contains(got.Stdout, "   State="+want+" ") || got.Code != 0 {
			t.Errorf("%s is not %s: %+v", node, want, got)
		}
		var d struct{ Nodes []struct{ State []string } }
		got := c.Run(t, Run, "scontrol", "show", "node", node, "--json")
		if err := json.Unmarshal([]byte(got.Stdout), &d); err != nil || len(d.Nodes) != 1 || strings.Join(d.Nodes[0].State, "+") != want {
			t.Errorf("%s is not %s: %v, %+v", node, want, err, got)
		}
	}
}

func TestWhatIsNotSupportedIsRefusedByName(t *testing.T) {
	for _, words := range []string{"top 7", "reconfigure", "suspend 6", "show reservation", "update JobId=7 Dependency=afterok:1",
		"update NodeName=n1 Weight=5", "update PartitionName=main State=DOWN", "requeue Incomplete 7", "--yaml show job", "shutdown"} {
		c := slurmtest.Recorded(t)
		got := c.Run(t, Run, append([]string{"scontrol"}, strings.Fields(words)...)...)
		if got.Code != 1 || !strings.Contains(got.Stderr, "not supported yet") || len(c.Updated)+len(c.NodeCalls) != 0 {
			t.Errorf("%s: %+v", words, got)
		}
	}
	if got := slurmtest.Recorded(t).Run(t, Run, "scontrol", "bogus"); got.Code != 1 || got.Stderr != "invalid keyword: bogus\n" {
		t.Errorf("%+v", got)
	}
}

func TestEveryCommandOfSlurmIsKnown(t *testing.T) {
	data, err := os.ReadFile("testdata/commands.txt")
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]bool{}
	for _, v := range verbs {
		known[v.name] = true
	}
	for line := range strings.Lines(string(data)) {
		if name := strings.Fields(line)[0]; !known[name] {
			t.Errorf("%s is neither supported nor refused", name)
		}
	}
}

func TestTheScriptOfAJob(t *testing.T) {
	c := slurmtest.Recorded(t)
	c.JobList[2].Spec.ScriptBlob = "abc"
	c.Blobs = map[string][]byte{"abc": []byte("#!/bin/sh\n")}
	if got := c.Run(t, Run, "scontrol", "write", "batch_script", "6", "-"); got.Stdout != "#!/bin/sh\n" {
		t.Errorf("%+v", got)
	}
	path := filepath.Join(t.TempDir(), "s.sh")
	if got := c.Run(t, Run, "scontrol", "write", "batch_script", "6", path); got.Code != 0 {
		t.Errorf("%+v", got)
	}
	if data, err := os.ReadFile(path); err != nil || string(data) != "#!/bin/sh\n" {
		t.Errorf("%q, %v", data, err)
	}
}

func TestJSONOfJobsAndNodes(t *testing.T) {
	c := slurmtest.Recorded(t)
	var d struct {
		Jobs []struct {
			State     []string `json:"job_state"`
			Resources struct {
				Nodes struct {
					Allocation []struct {
						Name string
						CPUs struct{ Count int }
					}
				}
			} `json:"job_resources"`
			TimeLimit struct {
				Set    bool
				Number int
			} `json:"time_limit"`
		}
	}
	got := c.Run(t, Run, "scontrol", "show", "job", "6", "--json")
	if err := json.Unmarshal([]byte(got.Stdout), &d); err != nil {
		t.Fatal(err, got)
	}
	j := d.Jobs[0]
	if j.State[0] != "RUNNING" || len(j.Resources.Nodes.Allocation) != 2 || j.Resources.Nodes.Allocation[1].Name != "n2" ||
		j.Resources.Nodes.Allocation[0].CPUs.Count != 1 || !j.TimeLimit.Set || j.TimeLimit.Number != 10 {
		t.Errorf("%+v", j)
	}
	if got := c.Run(t, Run, "scontrol", "show", "node", "n1", "--json"); !json.Valid([]byte(got.Stdout)) || !strings.Contains(got.Stdout, `"name": "n1"`) {
		t.Errorf("%+v", got)
	}
	if got := c.Run(t, Run, "scontrol", "show", "config"); got.Code != 0 || !strings.Contains(got.Stdout, "MinJobAge               = 300 sec\n") {
		t.Errorf("%+v", got)
	}
}
