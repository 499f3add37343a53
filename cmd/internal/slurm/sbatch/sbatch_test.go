package sbatch

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/muster-hpc/muster/cmd/internal/slurm/record"
	"github.com/muster-hpc/muster/cmd/internal/slurm/slurmtest"
	"github.com/muster-hpc/muster/cmd/internal/slurm/value"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// verified is an answer of the real sbatch.
type verified struct {
	title  string
	code   int
	err    string
	fields map[string]string
}

var (
	titleLine = regexp.MustCompile(`^## (.*)$`)
	answer    = regexp.MustCompile(`^   rc=(\d+) out='.*?' err='(.*)'$`)
	pair      = regexp.MustCompile(`(\w+)='([^']*)'`)
)

// read reads a file of verified answers.
func read(t *testing.T, name string) []*verified {
	t.Helper()
	data, err := os.ReadFile("testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	var list []*verified
	for line := range strings.SplitSeq(string(data), "\n") {
		if m := titleLine.FindStringSubmatch(line); m != nil {
			list = append(list, &verified{title: m[1], fields: map[string]string{}})
			continue
		}
		if len(list) == 0 {
			continue
		}
		v := list[len(list)-1]
		if m := answer.FindStringSubmatch(line); m != nil {
			v.code, _ = strconv.Atoi(m[1])
			text := strings.NewReplacer(`\\`, "\x00", `\n`, "\n", `\'`, "'").Replace(m[2])
			v.err = strings.ReplaceAll(text, "\x00", `\`)
			continue
		}
		for _, m := range pair.FindAllStringSubmatch(line, -1) {
			v.fields[m[1]] = m[2]
		}
	}
	return list
}

// server is a cluster that refuses what the controllers would: unknown partitions and nodes, and more nodes than there are.
func server(t *testing.T) *slurmtest.Cluster {
	c := slurmtest.Recorded(t)
	c.JobList = nil
	c.Refuse = func(s *apiv1.JobSubmission) *apiv1.ErrorDetail {
		for _, name := range s.GetSpec().GetPartitions() {
			if name != "main" && name != "debug" {
				return &apiv1.ErrorDetail{Reason: "PARTITION_UNKNOWN", Subject: "partition " + name, Sentence: "partition " + name + " does not exist; partitions: main, debug"}
			}
		}
		for _, name := range s.GetSpec().GetResources().GetExclude() {
			if !strings.HasPrefix(name, "gpu-00") {
				return &apiv1.ErrorDetail{Reason: "NODE_UNKNOWN", Subject: "node " + name, Sentence: "node " + name + " does not exist"}
			}
		}
		if n := s.GetSpec().GetResources().GetNodesMin(); n > 4 {
			return &apiv1.ErrorDetail{Reason: "NODES_TOO_MANY", Subject: "partition main", Sentence: fmt.Sprintf("asks for %d nodes; partition main has 4", n)}
		}
		if limit := s.GetSpec().GetTimeLimitS(); limit == value.Unlimited {
			return &apiv1.ErrorDetail{Reason: "TIME_LIMIT_INVALID", Subject: "partition main", Sentence: "asks for UNLIMITED; partition main allows 7-00:00:00"}
		}
		return nil
	}
	return c
}

// try runs sbatch with a script on standard input.
func try(t *testing.T, c *slurmtest.Cluster, script string, environ []string, words ...string) slurmtest.Outcome {
	t.Helper()
	s, stdout, stderr := c.Session(t, append([]string{"sbatch", "--parsable"}, words...)...)
	s.Stdin = strings.NewReader(script)
	s.Environ = append(environ, s.Environ...)
	code := Run(t.Context(), s)
	return slurmtest.Outcome{Code: code, Stdout: stdout.String(), Stderr: stderr.String()}
}

// shown is a field of scontrol show job.
func shown(t *testing.T, c *slurmtest.Cluster, name string) string {
	t.Helper()
	job := c.JobList[len(c.JobList)-1]
	r := &record.Row{Job: job, View: &record.View{}}
	ask := job.GetSpec().GetResources()
	local := func(path string) string {
		return strings.ReplaceAll(strings.Replace(path, "/home/user/work/", "./", 1), r.ID(), "<JID>")
	}
	switch name {
	case "TimeLimit":
		if job.GetSpec().GetTimeLimitS() == 0 {
			return "01:00:00" // the partition's default
		}
		return r.TimeLimit(value.Padded)
	case "JobName":
		return job.GetSpec().GetName()
	case "Partition":
		if len(job.GetSpec().GetPartitions()) > 0 {
			return strings.Join(job.GetSpec().GetPartitions(), ",")
		}
		return "main"
	case "NumNodes":
		if ask.GetNodesMax() > 0 {
			return fmt.Sprintf("%d-%d", ask.GetNodesMin(), ask.GetNodesMax())
		}
		return fmt.Sprint(r.Nodes())
	case "NumTasks":
		return fmt.Sprint(r.Tasks())
	case "NumCPUs":
		return fmt.Sprint(r.CPUs())
	case "StdOut":
		return local(r.Stdout())
	case "StdErr":
		return local(r.Stderr())
	case "MinMemoryNode":
		return r.MinMemory()
	case "TresPerNode":
		return strings.Replace(r.TresPerNode(), "gres/", "gres:", 1)
	case "TresPerJob":
		return strings.Replace(r.TresPerJob(), "gres/", "gres:", 1)
	case "ExcNodeList":
		return strings.Join(ask.GetExclude(), ",")
	case "EligibleTime":
		return value.Stamp(record.At(job.GetSpec().GetBeginTime()), "Unknown")
	case "Nice":
		return fmt.Sprint(job.GetSpec().GetNice())
	case "OverSubscribe":
		return r.OverSubscribe()
	case "Comment":
		return job.GetSpec().GetComment()
	}
	t.Fatalf("no field %s", name)
	return ""
}

// differs says where we answer otherwise than the recorded sbatch, and how.
var differs = map[string]string{
	"gres 'gpu:-1'": "Invalid generic resource (gres) specification", // Slurm accepts a number below zero
}

// unsupported are options that are refused by name.
var unsupported = map[string]string{
	"array": "--array is not supported yet", "constraint": "--constraint is not supported yet",
	"dependency": "--dependency is not supported yet",
}

func TestValuesOfDirectivesAreReadAsByTheRealOne(t *testing.T) {
	quoted := regexp.MustCompile(`^(\w+) '(.*)'$`)
	list := read(t, "out1.txt")
	if len(list) < 70 {
		t.Fatalf("only %d answers", len(list))
	}
	for _, v := range list {
		m := quoted.FindStringSubmatch(v.title)
		kind, text := m[1], m[2]
		directive := "#SBATCH --" + kind + "=" + text
		if kind == "opts" {
			directive = "#SBATCH " + text
		}
		c := server(t)
		got := try(t, c, "#!/bin/sh\n"+directive+"\ntrue\n", nil)
		if want := unsupported[kind]; want != "" {
			if got.Code != 1 || !strings.Contains(got.Stderr, want) || len(c.Submitted) > 0 {
				t.Errorf("%s: %+v, want a refusal", v.title, got)
			}
			continue
		}
		if want := differs[v.title]; want != "" {
			if got.Code != 1 || !strings.Contains(got.Stderr, want) {
				t.Errorf("%s: %+v, want %q", v.title, got, want)
			}
			continue
		}
		compare(t, c, v, got)
	}
}

// compare compares an answer with the real one's.
func compare(t *testing.T, c *slurmtest.Cluster, v *verified, got slurmtest.Outcome) {
	t.Helper()
	first := strings.TrimSuffix(got.Stderr, "\n")
	if len(first) > len(v.err) && strings.HasPrefix(first, v.err+"\nsbatch: ") && v.err != "" {
		first = v.err // a sentence of ours follows
	}
	if got.Code != v.code || first != v.err {
		t.Errorf("%s: code %d, %q\nwant code %d, %q", v.title, got.Code, got.Stderr, v.code, v.err)
		return
	}
	if v.code != 0 {
		return
	}
	for name, want := range v.fields {
		want = strings.TrimSpace(want)
		if name == "ExcNodeList" {
			want = strings.NewReplacer("gpu-[001-002]", "gpu-001,gpu-002", "gpu-[001,003]", "gpu-001,gpu-003").Replace(want)
		}
		if name == "TresPerNode" {
			want = strings.NewReplacer("A100", "a100", "a100=1", "a100:1", "gres:gpu:0", "").Replace(want)
		}
		if have := shown(t, c, name); have != want {
			t.Errorf("%s: %s is %q, want %q", v.title, name, have, want)
		}
	}
}

// form is a script or a call for each title of out2.txt.
type form struct {
	head    string // lines after the first
	script  string // instead of the usual one
	words   []string
	environ []string
	refused string // refused by name, other than the real one
	skip    string // fields that are other than the real one's
}

func opt(text string) form { return form{head: "#SBATCH " + text} }

var forms = map[string]form{
	"inline comment":                       {head: "#SBATCH --job-name=a1#b\n#SBATCH -t 5 # five minutes"},
	"inline comment inside quotes":         opt(`--job-name="a #b"`),
	"single quotes":                        opt(`--job-name='my job'`),
	"quote in middle":                      opt(`--job-name=my" "job`),
	"unbalanced quote":                     opt(`--job-name="abc`),
	"tab separators":                       {head: "#SBATCH\t-J\ttabs\t-t\t7"},
	"two options on a line":                opt("-J two -t 6 -N1"),
	"-t10 glued":                           opt("-t10 -J glued"),
	"-J=name":                              opt("-J=name"),
	"--time = 5":                           opt("--time = 5"),
	"--job-name= (empty)":                  opt("--job-name= -t 5"),
	"indented directive":                   {head: " #SBATCH --job-name=no\n#SBATCH -t 5"},
	"directive after assignment":           {head: "X=1\n#SBATCH --job-name=no"},
	"CRLF":                                 {script: "#!/bin/sh\r\n#SBATCH -t 5\r\ntrue\r\n"},
	"BOM":                                  {script: "\ufeff#!/bin/sh\ntrue\n"},
	"blank first line":                     {script: "\n#!/bin/sh\ntrue\n"},
	"only shebang":                         {script: "#!/bin/sh\n"},
	"PBS directives":                       {head: "#PBS -N pbsname -l walltime=0:07:00"},
	"unknown short":                        opt("-y"),
	"--ntasks_per_node underscore":         opt("--ntasks_per_node=2"),
	"prefix --part main":                   opt("--part main"),
	"--err prefix":                         opt("--err x.err"),
	"empty #SBATCH":                        {head: "#SBATCH\n#SBATCH -J emptyfirst"},
	"#SBATCH hetjob":                       {head: "#SBATCH -J h0\n#SBATCH hetjob\n#SBATCH -J h1", refused: "heterogeneous jobs"},
	"duplicate option: last wins?":         {head: "#SBATCH -J d1 -t 5\n#SBATCH -J d2\n#SBATCH -t 8"},
	"typo #SBACTH":                         {head: "#SBACTH -J x"},
	"env beats directive":                  {head: "#SBATCH -t 5 -p main", environ: []string{"SBATCH_TIMELIMIT=9", "SBATCH_PARTITION=debug"}},
	"SBATCH_JOB_NAME env":                  {environ: []string{"SBATCH_JOB_NAME=fromenv"}},
	"$HOME in output":                      opt("-o $HOME/x_%j.out"),
	"patterns":                             opt("-J pat -o %x_%j_%A_%a_%N_%n_%t_%u_%s_%J_%%_%5j_%08j_%b.out"),
	"unicode name":                         {words: []string{"-J", "日本語-é", "--comment", "naïve,comment|x;y"}},
	"name with slash":                      opt("-J a/b -o %x.out"),
	"comment 2000 chars":                   opt("--comment=" + strings.Repeat("x", 2000)),
	"script 5 MB":                          {head: strings.Repeat("# padding\n", 500_000)},
	"line of 5000 chars directive":         opt("--comment=" + strings.Repeat("x", 900) + strings.Repeat(" ", 4000) + "-J longline"),
	"-N 1-2":                               opt("-N 1-2"),
	"-N 0":                                 {head: "#SBATCH -N 0", skip: "NumNodes NumTasks"}, // no number, as if it had not been given
	"-N 99":                                opt("-N 99"),
	"-c 0":                                 opt("-c 0"),
	"-n 4 -N 2 --ntasks-per-node=1":        opt("-n 4 -N 2 --ntasks-per-node=1"),
	"-p nosuch":                            opt("-p nosuch"),
	"-q nosuch":                            opt("-q nosuch"),
	"--exclusive":                          opt("--exclusive"),
	"--mail-type=END,FAIL":                 {head: "#SBATCH --mail-type=END,FAIL", refused: "--mail-type=END,FAIL is not supported yet"},
	"--mail-type=bogus":                    opt("--mail-type=bogus"),
	"--begin=16:00":                        opt("--begin=16:00"),
	"--begin=2010-01-20T12:34:00":          opt("--begin=2010-01-20T12:34:00"),
	"--nice":                               opt("--nice"),
	"--open-mode=append":                   opt("--open-mode=append"),
	"--hint=nomultithread":                 {head: "#SBATCH --hint=nomultithread", refused: "--hint is not supported yet"},
	"--export=NONE,A=b":                    opt("--export=NONE,A=b"),
	"--container-image (pyxis not loaded)": opt("--container-image=x"),
	"--gpu-bind=closest":                   opt("--gpu-bind=closest"),
	"STDIN wrap and script":                {words: []string{"--wrap", "true", "script.sh"}},
	"STDIN binary as script":               {script: "\x7fELF\x02\x01\x01\x00"},
}

func TestScriptsAreReadAsByTheRealOne(t *testing.T) {
	list := read(t, "out2.txt")
	seen := map[string]bool{}
	for _, v := range list {
		seen[v.title] = true
		f, ok := forms[v.title]
		if !ok {
			t.Errorf("%s: no test", v.title)
			continue
		}
		script := f.script
		if script == "" {
			script = "#!/bin/sh\n" + f.head + "\ntrue\n"
		}
		c := server(t)
		got := try(t, c, script, f.environ, f.words...)
		if f.refused != "" {
			if got.Code != 1 || !strings.Contains(got.Stderr, f.refused) || len(c.Submitted) > 0 {
				t.Errorf("%s: %+v, want a refusal with %q", v.title, got, f.refused)
			}
			continue
		}
		for name := range strings.FieldsSeq(f.skip) {
			delete(v.fields, name)
		}
		compare(t, c, v, got)
	}
	for title := range forms {
		if !seen[title] {
			t.Errorf("%s is not in the recording", title)
		}
	}
}

func TestErrorsOfSamples(t *testing.T) {
	for _, test := range []struct {
		words string
		code  int
		want  string
	}{
		{"--bogus", 255, "sbatch: unrecognized option '--bogus'\nTry \"sbatch --help\" for more information\n"},
		{"/no/such.sh", 1, "sbatch: error: Unable to open file /no/such.sh\n"},
		{"--mem=1G --mem-per-cpu=1G", 1, "sbatch: fatal: --mem, --mem-per-cpu, and --mem-per-gpu are mutually exclusive.\n"},
		{"--gpus-per-task=1", 1, "sbatch: fatal: --gpus-per-task needs --ntasks, or --nodes with --ntasks-per-node, or --gpus, to say how many tasks there are\n"},
		{"--switches=2", 1, "sbatch: error: --switches is not supported yet: the planner does not know the network yet\n"},
		{"--time", 255, "sbatch: option '--time' requires an argument\nTry \"sbatch --help\" for more information\n"},
		{"--hold=1", 255, "sbatch: option '--hold' doesn't allow an argument\nTry \"sbatch --help\" for more information\n"},
		{"-J", 255, "sbatch: option requires an argument -- 'J'\nTry \"sbatch --help\" for more information\n"},
	} {
		got := try(t, server(t), "#!/bin/sh\n", nil, strings.Fields(test.words)...)
		if got.Code != test.code || got.Stderr != test.want {
			t.Errorf("%s: %+v", test.words, got)
		}
	}
}

func TestAnAmbiguousPrefixListsThePossibilities(t *testing.T) {
	got := try(t, server(t), "#!/bin/sh\n", nil, "--gpus-per=1")
	want := "sbatch: option '--gpus-per=1' is ambiguous; possibilities: '--gpus-per-node' '--gpus-per-socket' '--gpus-per-task'\n"
	if got.Code != 255 || !strings.HasPrefix(got.Stderr, want) {
		t.Errorf("%+v", got)
	}
}

func TestWhatIsSubmitted(t *testing.T) {
	c := server(t)
	script := "#!/bin/bash\n#SBATCH --nodes=4 --requeue\n#SBATCH --ntasks-per-node=8 --gpus-per-node=h100:8 --mem=0 --exclusive\necho srun\n"
	got := try(t, c, script, []string{"FOO=bar"}, "--nodes=2", "--export=FOO,X=1", "-D", "sub", "--wckey=k", "-A", "a@v100")
	if got.Code != 0 || got.Stdout != "1\n" || got.Stderr != "" {
		t.Fatalf("%+v", got)
	}
	sent := c.Submitted[0]
	spec, ask := sent.GetSpec(), sent.GetSpec().GetResources()
	if string(sent.GetScript()) != script || spec.GetKind() != apiv1.JobKind_JOB_KIND_BATCH || spec.GetWorkDir() != "/home/user/work/sub" ||
		!spec.GetRequeue() || !spec.GetAutomaticRecovery() || spec.GetWckey() != "k" || spec.GetAccount() != "a@v100" || spec.GetCommandLine() != "(null)" {
		t.Errorf("spec %v", spec)
	}
	if ask.GetNodesMin() != 2 || ask.GetNtasks() != 16 || ask.GetGpusPerNode() != 8 || ask.GetGpuType() != "h100" || !ask.GetMemoryAll() || !ask.GetExclusive() || ask.GetGpusOption() != "gpus-per-node" {
		t.Errorf("resources %v", ask)
	}
	env := map[string]bool{}
	for _, pair := range bytes.Split(sent.GetEnvironment(), []byte{0}) {
		env[string(pair)] = true
	}
	if !env["FOO=bar"] || !env["X=1"] || env["PATH=/usr/bin:/bin"] || !env["SLURM_SUBMIT_DIR=/home/user/work"] || !env["SLURM_EXPORT_ENV=FOO,X=1"] {
		t.Errorf("environment %v", env)
	}
}

func TestRequeueIsAllowedByDefaultWithoutRecovery(t *testing.T) {
	for words, want := range map[string][2]bool{"": {true, false}, "--requeue": {true, true}, "--no-requeue": {false, false}, "--requeue --no-requeue": {false, false}} {
		c := server(t)
		try(t, c, "#!/bin/sh\n", nil, strings.Fields(words)...)
		spec := c.Submitted[0].GetSpec()
		if spec.GetRequeue() != want[0] || spec.GetAutomaticRecovery() != want[1] {
			t.Errorf("%q: requeue %v, recovery %v", words, spec.GetRequeue(), spec.GetAutomaticRecovery())
		}
	}
}

func TestWhatIsPrinted(t *testing.T) {
	c := server(t)
	for _, test := range []struct{ words, want string }{
		{"--wrap true", "Submitted batch job 1\n"},
		{"--parsable --wrap true", "2\n"},
		{"--parsable --clusters base --wrap true", "3;base\n"},
		{"-Q --wrap true", ""},
	} {
		if got := c.Run(t, Run, append([]string{"sbatch"}, strings.Fields(test.words)...)...); got.Stdout != test.want || got.Code != 0 {
			t.Errorf("%s: %+v", test.words, got)
		}
	}
	if got := c.Run(t, Run, "sbatch", "--clusters=other", "--wrap", "true"); got.Code != 1 || len(c.Submitted) != 4 {
		t.Errorf("another cluster: %+v", got)
	}
	if got := c.Run(t, Run, "sbatch", "--test-only", "--wrap", "true"); got.Code != 0 || len(c.Submitted) != 4 {
		t.Errorf("--test-only: %+v", got)
	}
}

func TestWaitReturnsTheExitCodeOfTheJob(t *testing.T) {
	for _, test := range []struct {
		state        apiv1.JobState
		code, signal uint32
		want         int
	}{
		{apiv1.JobState_JOB_STATE_COMPLETED, 0, 0, 0}, {apiv1.JobState_JOB_STATE_FAILED, 7, 0, 7}, {apiv1.JobState_JOB_STATE_FAILED, 0, 9, 1},
		{apiv1.JobState_JOB_STATE_CANCELLED, 0, 0, 1},
	} {
		synctest.Test(t, func(t *testing.T) {
			c := server(t)
			go func() {
				time.Sleep(time.Hour) // virtual
				c.Change(1, func(j *apiv1.Job) {
					j.Status.State, j.Status.ExitCode, j.Status.ExitSignal = test.state, test.code, test.signal
				})
			}()
			if got := c.Run(t, Run, "sbatch", "--wait", "--wrap", "true"); got.Code != test.want {
				t.Errorf("%v: %+v", test, got)
			}
		})
	}
}

func TestOptionsOfStepsAreKeptAndPassedToThem(t *testing.T) {
	hosts := filepath.Join(t.TempDir(), "hosts")
	if err := os.WriteFile(hosts, []byte("gpu-002 # the fast one\n\ngpu-001,gpu-002\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	c := server(t)
	head := "#SBATCH --signal=B:USR1@90 -k -O --cpus-per-gpu=4 --ntasks-per-gpu=2 --gpus=2 --gpu-bind=v,closest --open-mode=append\n" +
		"#SBATCH --distribution=cyclic:block -F " + hosts + " --gres=ib:1\n"
	if got := try(t, c, "#!/bin/sh\n"+head, nil); got.Code != 0 {
		t.Fatalf("%+v", got)
	}
	spec := c.Submitted[0].GetSpec()
	if w := spec.GetWarnSignal(); w.GetSignal() != 10 || w.GetLeadS() != 90 || !w.GetBatchOnly() || !spec.GetNoKill() {
		t.Errorf("warning %v, no kill %v", w, spec.GetNoKill())
	}
	r := spec.GetResources()
	if !r.GetOvercommit() || r.GetCpusPerGpu() != 4 || r.GetNtasksPerGpu() != 2 || len(r.GetGres()) != 1 || r.GetGres()[0].GetName() != "ib" ||
		strings.Join(r.GetNodeList(), " ") != "gpu-002 gpu-001" || r.GetNodesMin() != 2 {
		t.Errorf("asked %v", r)
	}
	if got := (&record.Row{Job: c.JobList[len(c.JobList)-1]}).TresPerNode(); got != "gres/ib:1" {
		t.Errorf("TresPerNode=%s", got)
	}
	if o := spec.GetTaskOptions(); o.GetGpuBind() != "verbose,closest" || o.GetDistribution() != "cyclic:block" {
		t.Errorf("task options %v", o)
	}
	for _, want := range []string{"SLURM_CPUS_PER_GPU=4", "SLURM_NTASKS_PER_GPU=2", "SLURM_GPU_BIND=v,closest", "SLURM_OVERCOMMIT=1", "SLURM_OPEN_MODE=append"} {
		if !strings.Contains(string(c.Submitted[0].GetEnvironment()), want+"\x00") {
			t.Errorf("the environment lacks %s", want)
		}
	}
}

func TestAScriptGetsTheNodesOfAnArbitraryDistribution(t *testing.T) {
	c := server(t)
	if got := try(t, c, "#!/bin/sh\n#SBATCH -m arbitrary -w gpu-002,gpu-001,gpu-002\n", nil); got.Code != 0 {
		t.Fatalf("%+v", got)
	}
	r := c.Submitted[0].GetSpec().GetResources()
	if r.GetNtasks() != 3 || len(r.GetTaskNodes()) != 0 || strings.Join(r.GetNodeList(), " ") != "gpu-002 gpu-001" || r.GetNodesMin() != 2 {
		t.Errorf("asked %v", r)
	}
	if got := try(t, server(t), "#!/bin/sh\n#SBATCH -m arbitrary\n", nil); got.Code != 1 || !strings.Contains(got.Stderr, "name a file in SLURM_HOSTFILE") {
		t.Errorf("%+v", got)
	}
}
