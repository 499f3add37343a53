package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// call runs one command line against no cluster.
func call(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errOut bytes.Buffer
	a := &app{in: strings.NewReader(""), out: &out, errOut: &errOut}
	code = a.execute(context.Background(), append([]string{"--socket", filepath.Join(t.TempDir(), "none.sock")}, args...))
	return code, out.String(), errOut.String()
}

func TestWrongUsageIsRefusedBeforeAnybodyIsAsked(t *testing.T) {
	script := filepath.Join(t.TempDir(), "s.sh")
	dos := filepath.Join(t.TempDir(), "dos.sh")
	for path, text := range map[string]string{script: "#!/bin/sh\n", dos: "#!/bin/sh\r\ntrue\r\n"} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		line string
		want string
		code int
	}{
		{"jbos", "did you mean jobs", exitUsage},
		{"jobs --stat x", "unknown flag", exitUsage},
		{"jobs --state happy", "PENDING", exitUsage},
		{"show job", "needs a job id", exitUsage},
		{"show job x", "names no job", exitUsage},
		{"show step 17", "JOB.STEP", exitUsage},
		{"cancel", "needs job ids or a choice", exitUsage},
		{"cancel 17 --signal FOO", "USR1", exitUsage},
		{"cancel 17 --batch", "--signal", exitUsage},
		{"hold", "needs job ids", exitUsage},
		{"submit", "needs a script", exitUsage},
		{"submit --wrap x " + script, "exclude each other", exitUsage},
		{"submit " + dos, "DOS line ends", exitFailed},
		{"submit /no/such", "no such file", exitFailed},
		{"submit --nodes 4-2 " + script, "--nodes", exitUsage},
		{"submit --gpus-per-node x:y " + script, "h100:8", exitUsage},
		{"submit --memory 1G --memory-per-cpu 1G " + script, "exclude each other", exitUsage},
		{"submit --time never " + script, "--time", exitUsage},
		{"submit --begin noon " + script, "--begin", exitUsage},
		{"submit --count 0 " + script, "--count", exitUsage},
		{"run", "needs a command", exitUsage},
		{"run --stdin some true", "all, first or none", exitUsage},
		{"nodes drain n1", "--reason", exitUsage},
		{"nodes drain", "needs node names", exitUsage},
		{"nodes n[1-", "n[1-", exitUsage},
		{"events --after yesterday", "1.4711.0", exitUsage},
		{"cluster members add c4", "--id", exitUsage},
		{"cluster configure /no/such", "no such file", exitFailed},
		{"dev status --dir /no/such", "muster dev up", exitFailed},
		{"dev up --dir /tmp/x --lease -1s", "--lease", exitUsage},
		{"jobs", "is muster-agent running", exitNoAnswer},
		{"submit --wrap true", "is muster-agent running", exitNoAnswer},
	} {
		code, stdout, stderr := call(t, strings.Fields(c.line)...)
		if code != c.code || !strings.Contains(stderr, c.want) || stdout != "" {
			t.Errorf("muster %s: exit %d, %q, %q; expected %d and %q", c.line, code, stdout, stderr, c.code, c.want)
		}
	}
}

func TestEveryCommandExplainsItself(t *testing.T) {
	var visit func(c *cobra.Command)
	visit = func(c *cobra.Command) {
		if c.Short == "" {
			t.Errorf("%s says nothing about itself", c.CommandPath())
		}
		for _, sub := range c.Commands() {
			visit(sub)
		}
	}
	visit((&app{}).root())
}

func TestARequestBecomesTheSpecificationThatWasMeant(t *testing.T) {
	r := request{
		name: "x", partition: "gpu,main", nodes: "2-4", tasksPerNode: 8, gpus: "H100:8", memory: "all", timeLimit: "2-0", nodeList: "n[1-2]",
		exclude: "n9", recover: true, directory: "sub",
	}
	spec, err := r.spec()
	if err != nil {
		t.Fatal(err)
	}
	q := spec.Resources
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	if q.NodesMin != 2 || q.NodesMax != 4 || q.NtasksPerNode != 8 || q.GpusPerNode != 8 || q.GpuType != "h100" || !q.MemoryAll ||
		!slices.Equal(q.NodeList, []string{"n1", "n2"}) || !slices.Equal(q.Exclude, []string{"n9"}) {
		t.Errorf("resources %v", q)
	}
	if !slices.Equal(spec.Partitions, []string{"gpu", "main"}) || spec.TimeLimitS != 172800 || !spec.Requeue || !spec.AutomaticRecovery ||
		spec.WorkDir != filepath.Join(here, "sub") {
		t.Errorf("spec %v", spec)
	}
}

func TestTablesAreAlignedWithColourAndWithout(t *testing.T) {
	write := func(colour bool) string {
		tb := table{header: []string{"ID", "NAME", "STATE"}, right: map[int]bool{0: true}, paint: map[int]func(string) string{2: paintState}}
		tb.add("7", "größer", "RUNNING")
		tb.add("1234", "x", "")
		var b bytes.Buffer
		tb.write(&b, colour)
		return b.String()
	}
	want := "  ID  NAME    STATE\n   7  größer  RUNNING\n1234  x\n"
	if got := write(false); got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
	coloured := write(true)
	if !strings.Contains(coloured, "\x1b[32mRUNNING\x1b[0m") {
		t.Errorf("no colour in %q", coloured)
	}
	for _, escape := range []string{"\x1b[1m", "\x1b[32m", "\x1b[0m", "\x1b[m"} {
		coloured = strings.ReplaceAll(coloured, escape, "")
	}
	if strings.TrimRight(coloured, "\n ") != strings.TrimRight(want, "\n") && !strings.HasPrefix(coloured, "  ID  NAME    STATE\n   7  größer  RUNNING\n") {
		t.Errorf("colour changed the layout: %q", coloured)
	}
}

func TestAJobRowSaysWhyItWaitsOrHowItEnded(t *testing.T) {
	now := time.Unix(1000, 0)
	at := func(s int64) *timestamppb.Timestamp { return timestamppb.New(time.Unix(s, 0)) }
	job := func(st *apiv1.JobStatus) *apiv1.Job {
		return &apiv1.Job{Id: 7, Spec: &apiv1.JobSpec{Name: "x", Resources: &apiv1.ResourceRequest{NodesMin: 2}}, Owner: &apiv1.JobOwner{User: "u"}, Status: st}
	}
	for want, st := range map[string]*apiv1.JobStatus{
		"7|x|u||PENDING||2|||(Resources: waits for 2 nodes)": {State: apiv1.JobState_JOB_STATE_PENDING, Reason: apiv1.WaitReason_WAIT_REASON_RESOURCES, Sentence: "waits for 2 nodes"},
		"7|x|u||RUNNING|1:40|2|16||n[1-2]":                   {State: apiv1.JobState_JOB_STATE_RUNNING, StartTime: at(900), NodeList: "n[1-2]", NumNodes: 2, NumGpus: 16},
		"7|x|u||FAILED+COMPLETING|0:50|2||3:0|n[1-2] (NonZeroExitCode)": {State: apiv1.JobState_JOB_STATE_FAILED, Reason: apiv1.WaitReason_WAIT_REASON_NON_ZERO_EXIT_CODE, Completing: true,
			StartTime: at(900), EndTime: at(950), ExitCode: 3, NodeList: "n[1-2]"},
		"7|x|u||COMPLETED|0:50|2||0:0|n1": {State: apiv1.JobState_JOB_STATE_COMPLETED, StartTime: at(900), EndTime: at(950), NodeList: "n1"},
	} {
		if got := strings.Join(jobRow(job(st), now), "|"); got != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
	}
}

func TestJSONIsTheAPIsFormWithEveryFieldAndNeverVaries(t *testing.T) {
	var out bytes.Buffer
	a := &app{out: &out}
	m := &apiv1.Job{Id: 3, Status: &apiv1.JobStatus{State: apiv1.JobState_JOB_STATE_COMPLETED}}
	if err := a.printJSON(m); err != nil {
		t.Fatal(err)
	}
	var decoded struct {
		ID     int `json:"id"`
		Status struct {
			State    string `json:"state"`
			ExitCode *int   `json:"exitCode"`
		} `json:"status"`
	}
	if err := json.Unmarshal(out.Bytes(), &decoded); err != nil {
		t.Fatal(err)
	}
	if decoded.ID != 3 || decoded.Status.State != "JOB_STATE_COMPLETED" || decoded.Status.ExitCode == nil {
		t.Errorf("%s", out.String())
	}
	first := out.String()
	out.Reset()
	if err := a.printJSON(m); err != nil || out.String() != first || strings.Contains(first, `":  `) {
		t.Errorf("the form varies: %q, %q", first, out.String())
	}
	out.Reset()
	if err := a.printJSONLine(m); err != nil || strings.Count(out.String(), "\n") != 1 {
		t.Errorf("%q, %v", out.String(), err)
	}
}

func TestRevisionsAreReadAsTheyArePrinted(t *testing.T) {
	r := &apiv1.Revision{Incarnation: 2, Index: 4711, Ordinal: 3}
	again, err := parseRevision(formatRevision(r))
	if err != nil || again.Index != 4711 || again.Incarnation != 2 || again.Ordinal != 3 {
		t.Errorf("%v, %v", again, err)
	}
}

func TestJobListsAreBounded(t *testing.T) {
	ids, err := parseJobs([]string{"3,5-7", "9"})
	if err != nil || !slices.Equal(ids, []uint32{3, 5, 6, 7, 9}) {
		t.Errorf("%v, %v", ids, err)
	}
	for _, bad := range []string{"", "0", "7-3", "1-4294967295", "x", "1,"} {
		if _, err := parseJobs([]string{bad}); err == nil {
			t.Errorf("%q was read", bad)
		}
	}
}

func TestWordsAreQuotedForTheShellOnlyWhereNeeded(t *testing.T) {
	for text, want := range map[string]string{"/a/b-c_d.e": "/a/b-c_d.e", "": "''", "a b": "'a b'", "it's": `'it'\''s'`, "$(x)": "'$(x)'", "a;b": "'a;b'"} {
		if got := quote(text); got != want {
			t.Errorf("%q: %s, expected %s", text, got, want)
		}
	}
}

func TestAMemberIsFoundByNameOrIdAndNeverGuessed(t *testing.T) {
	members := []*apiv1.Member{{Id: "aa", Name: "c1"}, {Id: "bb", Name: "c2"}, {Id: "cc", Name: "c2"}}
	if m, err := member(members, "c1"); err != nil || m.Id != "aa" {
		t.Errorf("%v, %v", m, err)
	}
	if m, err := member(members, "cc"); err != nil || m.Id != "cc" {
		t.Errorf("%v, %v", m, err)
	}
	for _, name := range []string{"c2", "c9"} {
		if _, err := member(members, name); err == nil || !strings.Contains(err.Error(), "bb") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestNodesThatDoNotRespondSayForHowLong(t *testing.T) {
	node := func(number uint32, name string) *apiv1.Node {
		return &apiv1.Node{Number: number, Spec: &apiv1.NodeSpec{Name: name, Cpus: 4, MemoryMb: 2048}, State: apiv1.NodeState_NODE_STATE_UP}
	}
	answer := &apiv1.ListNodesResponse{Nodes: []*apiv1.Node{node(7, "n1"), node(9, "n2")}, Silent: []*apiv1.SilentNode{{Node: 9, SilentMs: 14_900}},
		Partitions: []*apiv1.Partition{{Name: "main", Nodes: "ALL"}}}
	for i, want := range []string{"n1|UP|0/4|0M/2G||main||", "n2|UP (not responding, last heard 14 s ago)|0/4|0M/2G||main||"} {
		if got := strings.Join(nodeRow(answer.Nodes[i], answer), "|"); got != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
	}
}
