package squeue

import (
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect/v2"

	"github.com/muster-hpc/muster/cmd/internal/slurm/slurmtest"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/rpc"
)

// ours are the jobs of the recordings that Muster can have: no arrays, no dependencies.
var ours = []string{"1", "2", "6", "7", "8", "9", "10", "11", "12", "13", "17", "19", "20"}

// recorded reads a listing of the real command and keeps its headers and the lines of our jobs. id finds the job.
func recorded(t *testing.T, name string, id *regexp.Regexp, translate ...string) string {
	t.Helper()
	data, err := os.ReadFile("testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	text := strings.NewReplacer(translate...).Replace(string(data))
	var out []string
	for line := range strings.Lines(text) {
		if m := id.FindStringSubmatch(line); m != nil && !slices.Contains(ours, m[1]) {
			continue
		}
		out = append(out, line)
	}
	return strings.Join(out, "")
}

var (
	byColumn = regexp.MustCompile(`^ *(\d[^ ]*) `)
	byField9 = regexp.MustCompile(`^\(null\)\|(?:[^|]*\|){7}([^|]*)\|`)
	byStep   = regexp.MustCompile(`^ *(\d+(?:_\d+)?)\.batch`)
)

func TestListingsEqualTheRecordedOnes(t *testing.T) {
	all := "%a|%b|%c|%d|%e|%f|%g|%h|%i|%j|%k|%l|%m|%n|%o|%p|%q|%r|%s|%t|%u|%v|%w|%x|%y|%z|%A|%B|%C|%D|%E|%F|%G|%H|%I|%J|%K|%L|%M|%N|%O|%P|%Q|%R|%S|%T|%U|%V|%W|%X|%Y|%Z"
	for _, c := range []struct {
		file  string
		id    *regexp.Regexp
		words []string
		// translate is where 24.11 differs from the recorded 22.05.
		translate []string
	}{
		{"squeue-default.txt", byColumn, nil, nil},
		{"squeue-long.txt", byColumn, []string{"-l"}, nil},
		{"squeue-all-states.txt", byColumn, []string{"-t", "all"}, nil},
		{"squeue-start.txt", byColumn, []string{"--start"}, nil},
		{"squeue-steps.txt", byStep, []string{"-s"}, nil},
		{"squeue-o-all.txt", byField9, []string{"-o", all}, []string{"gres:gpu:2", "gres/gpu:2"}},
	} {
		t.Run(c.file, func(t *testing.T) {
			cluster := slurmtest.Recorded(t)
			cluster.PageSize = 4 // several pages
			got := cluster.Run(t, Run, append([]string{"squeue"}, c.words...)...)
			if want := recorded(t, c.file, c.id, c.translate...); got.Stdout != want || got.Code != 0 {
				t.Errorf("code %d, stderr %q\ngot:\n%s\nwant:\n%s", got.Code, got.Stderr, got.Stdout, want)
			}
		})
	}
}

func TestJobsThatDoNotExist(t *testing.T) {
	for _, test := range []struct {
		words string
		want  slurmtest.Outcome
	}{
		{"-h -j 999", slurmtest.Outcome{Code: 1, Stderr: "slurm_load_jobs error: Invalid job id specified\n"}},
		{"-h -j 3_1", slurmtest.Outcome{Code: 1, Stderr: "slurm_load_jobs error: Invalid job id specified\n"}},
		{"-h -j 999,998", slurmtest.Outcome{}},
		{"-h -o %i --jobs=1", slurmtest.Outcome{}}, // it has ended
		{"-h -o %i -j 7 -u root", slurmtest.Outcome{Stdout: "7\n"}},
		{"-h -o %i --jobs 7,8", slurmtest.Outcome{Stdout: "7\n8\n"}},
		{"-j abc", slurmtest.Outcome{Code: 1, Stderr: "squeue: error: Unrecognized option: abc\n"}},
		{"-jabc", slurmtest.Outcome{Code: 1, Stderr: "squeue: error: Invalid job id: abc\n"}},
		{"-h -t bogus", slurmtest.Outcome{Code: 1, Stderr: "squeue: error: Invalid job state specified: BOGUS\nsqueue: error: Valid job states include: PENDING,CONFIGURING,RUNNING,COMPLETED,FAILED,CANCELLED,TIMEOUT,NODE_FAIL,OUT_OF_MEMORY,DEADLINE,PREEMPTED,BOOT_FAIL,COMPLETING\n"}},
		{"-h -O bad,jobid:.4 -j 7", slurmtest.Outcome{Stdout: "   7\n", Stderr: "squeue: error: Invalid job format specification: bad\n"}},
		{"-h -o %?%i -j 7", slurmtest.Outcome{Stdout: "7\n"}},
		{"--yaml", slurmtest.Outcome{Code: 1, Stderr: "squeue: error: --yaml is not supported yet: use --json\n"}},
	} {
		if got := slurmtest.Recorded(t).Run(t, Run, append([]string{"squeue"}, strings.Fields(test.words)...)...); got != test.want {
			t.Errorf("%s: %+v, want %+v", test.words, got, test.want)
		}
	}
}

func TestFiltersAndSorting(t *testing.T) {
	for _, test := range []struct {
		words, env, want string
	}{
		{words: "-t R", want: "6"},
		{words: "-t all -n early-ok,big", want: "1 7"},
		{words: "--me -t pd -S -i", want: "20 19 17 13 12 11 10 9 8 7"},
		{words: "-u root -S i -t R,PD", want: "6 7 8 9 10 11 12 13 17 19 20"},
		{words: "-S l,i", want: "12 6 7 8 9 10 11 13 17 19 20"},
		{words: "-S -D,i -t PD", want: "17 7 8 20 9 10 11 12 13 19"},
		{words: "-S j,i -t PD", want: "13 7 10 11 9 8 17 19 20 12"},
		{words: "-p nosuch", want: ""},
		{words: "-w n2", want: "6"},
		{words: "-q none", want: ""},
		{words: "-L lic", want: ""},
		{words: "-t R --notme", want: ""},
		{words: "", env: "SQUEUE_STATES=R", want: "6"},
		{words: "-t PD -n big", env: "SQUEUE_STATES=R", want: "7"},
		{words: "-t CG,CF,S,NF", want: ""},
	} {
		c := slurmtest.Recorded(t)
		s, stdout, stderr := c.Session(t, append([]string{"squeue", "-h", "-o", "%i"}, strings.Fields(test.words)...)...)
		if test.env != "" {
			s.Environ = append(s.Environ, test.env)
		}
		if code := Run(t.Context(), s); code != 0 || strings.Join(strings.Fields(stdout.String()), " ") != test.want {
			t.Errorf("%s %s: code %d, %q %s, want %q", test.env, test.words, code, stdout.String(), stderr.String(), test.want)
		}
	}
}

func TestWhatPortalsAskFor(t *testing.T) {
	c := slurmtest.Recorded(t)
	names := "Account,JobID,BatchHost,Comment,Command,Contiguous,Dependency,EndTime,ExcNodes,Feature,GroupID,GroupName,JobArrayID,Licenses,MinCPUs,MinMemory," +
		"Name,Nice,NodeList,NumCPUs,NumNodes,OverSubscribe,Partition,Priority,PriorityLong,QOS,Reason,ReqNodes,Reservation,SCT,StartTime,State,StateCompact," +
		"SubmitTime,TimeLeft,TimeLimit,TimeUsed,tres-alloc,tres-per-node,UserID,UserName,WCKey,WorkDir,STDOUT"
	format := strings.ReplaceAll(names, ",", ":\x1f,") + ":\x1f"
	got := c.Run(t, Run, "squeue", "--all", "--states=all", "--noconvert", "-O", format, "-j", "6")
	lines := strings.Split(strings.TrimSuffix(got.Stdout, "\n"), "\n")
	if got.Code != 0 || len(lines) != 2 || strings.Count(lines[1], "\x1f") != 44 || strings.Count(lines[0], "\x1f") != 44 {
		t.Fatalf("%+v", got)
	}
	for _, want := range []string{"\x1f6\x1f", "\x1fcpu=2,node=2,billing=2,gres/gpu=4\x1f", "\x1fgres/gpu:2\x1f", "\x1f/dev/null\x1f"} {
		if !strings.Contains(lines[1], want) {
			t.Errorf("%q is not in %q", want, lines[1])
		}
	}
}

func TestEveryLetterGivesAValue(t *testing.T) {
	c := slurmtest.Recorded(t)
	for letter, f := range letters {
		got := c.Run(t, Run, "squeue", "-t", "all", "-o", "<%"+string(letter)+">")
		if lines := strings.Count(got.Stdout, "\n"); got.Code != 0 || lines != 14 || !strings.HasPrefix(got.Stdout, "<"+f.Header+">\n") {
			t.Errorf("%%%c: %d lines, %+v", letter, lines, got)
		}
	}
	for name := range names() {
		if got := c.Run(t, Run, "squeue", "-h", "-O", name+":", "-j", "6"); got.Code != 0 || got.Stderr != "" {
			t.Errorf("-O %s: %+v", name, got)
		}
	}
}

func TestJSONSpeaks2411AndHonoursFilters(t *testing.T) {
	got := slurmtest.Recorded(t).Run(t, Run, "squeue", "--json", "-j", "6,7", "-t", "R")
	var d struct {
		Jobs []struct {
			ID        int      `json:"job_id"`
			State     []string `json:"job_state"`
			Resources struct {
				Nodes struct {
					Allocation []struct{ Name string }
				}
			} `json:"job_resources"`
			TimeLimit struct {
				Set, Infinite bool
				Number        int
			} `json:"time_limit"`
		}
		Meta struct {
			Plugin struct {
				Parser string `json:"data_parser"`
			}
		}
		Errors, Warnings []string
	}
	if err := json.Unmarshal([]byte(got.Stdout), &d); err != nil || got.Code != 0 || len(d.Jobs) != 1 {
		t.Fatal(err, got)
	}
	if j := d.Jobs[0]; j.ID != 6 || j.State[0] != "RUNNING" || len(j.Resources.Nodes.Allocation) != 2 || j.TimeLimit.Number != 10 || d.Meta.Plugin.Parser != "data_parser/v0.0.42" {
		t.Errorf("%+v", d)
	}
}

func TestBriefListingsUnlessAColumnNeedsMore(t *testing.T) {
	for format, brief := range map[string]bool{"%i %T": true, "%k,%A": false, "%Z": false} {
		c := slurmtest.Recorded(t)
		c.Run(t, Run, "squeue", "-h", "-o", format)
		if c.Listed[0].GetBrief() != brief {
			t.Errorf("%s: brief is %v", format, c.Listed[0].GetBrief())
		}
	}
}

func BenchmarkFormattingOf100000Jobs(b *testing.B) {
	c := &slurmtest.Cluster{Now: slurmtest.Day("14:10:04")}
	for id := uint32(1); id <= 100_000; id++ {
		c.JobList = append(c.JobList, &apiv1.Job{Id: id, Owner: &apiv1.JobOwner{User: "root"}, Spec: &apiv1.JobSpec{Name: "train", Resources: &apiv1.ResourceRequest{NodesMin: 4}},
			Status: &apiv1.JobStatus{State: apiv1.JobState_JOB_STATE_PENDING, Reason: apiv1.WaitReason_WAIT_REASON_PRIORITY, Partition: "main", Priority: id}})
	}
	for b.Loop() {
		if got := c.Run(b, Run, "squeue"); got.Code != 0 || len(got.Stdout) < 7_000_000 {
			b.Fatal(got.Code, len(got.Stdout))
		}
	}
}

func TestWithoutAQuorumTheListingIsOldAndSaysSo(t *testing.T) {
	c := slurmtest.Recorded(t)
	c.PageSize = 5 // all pages have to be stale
	fresh := c.Run(t, Run, "squeue")
	c.NoQuorum = rpc.Refuse(connect.CodeUnavailable, rpc.ReasonNoQuorum, "", "1 of 3 controllers answers")
	if got := c.Run(t, Run, "squeue"); got.Code != 0 || got.Stdout != fresh.Stdout || got.Stderr != "as of 1m0s ago: no quorum: 1 of 3 controllers answers\n" {
		t.Errorf("%+v", got)
	}
	c.Fail = c.NoQuorum
	if got := c.Run(t, Run, "squeue"); got.Code != 1 || got.Stdout != "" || !strings.Contains(got.Stderr, "1 of 3 controllers answers") {
		t.Errorf("nobody has anything: %+v", got)
	}
}
