package slurm

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/muster-hpc/muster/cmd/internal/slurm/option"
	"github.com/muster-hpc/muster/cmd/internal/slurm/sacct"
	"github.com/muster-hpc/muster/cmd/internal/slurm/sbatch"
	"github.com/muster-hpc/muster/cmd/internal/slurm/scancel"
	"github.com/muster-hpc/muster/cmd/internal/slurm/scontrol"
	"github.com/muster-hpc/muster/cmd/internal/slurm/session"
	"github.com/muster-hpc/muster/cmd/internal/slurm/sinfo"
	"github.com/muster-hpc/muster/cmd/internal/slurm/slurmtest"
	"github.com/muster-hpc/muster/cmd/internal/slurm/squeue"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// variables are those that the manual pages of 24.11 list as another way to give an option.
var variables = map[string]string{
	"sbatch": `SBATCH_ACCOUNT SBATCH_ACCTG_FREQ SBATCH_ARRAY_INX SBATCH_BATCH SBATCH_CLUSTERS SLURM_CLUSTERS SBATCH_CONSTRAINT
		SBATCH_CONTAINER SBATCH_CONTAINER_ID SBATCH_CORE_SPEC SBATCH_CPUS_PER_GPU SBATCH_DEBUG SBATCH_DELAY_BOOT SBATCH_DISTRIBUTION
		SBATCH_ERROR SBATCH_EXCLUSIVE SBATCH_EXPORT SBATCH_GET_USER_ENV SBATCH_GPU_BIND SBATCH_GPU_FREQ SBATCH_GPUS SBATCH_GPUS_PER_NODE
		SBATCH_GPUS_PER_TASK SBATCH_GRES SBATCH_GRES_FLAGS SBATCH_HINT SLURM_HINT SBATCH_IGNORE_PBS SBATCH_INPUT SBATCH_JOB_NAME
		SBATCH_MEM_BIND SBATCH_MEM_PER_CPU SBATCH_MEM_PER_GPU SBATCH_MEM_PER_NODE SBATCH_NETWORK SBATCH_NO_KILL SBATCH_NO_REQUEUE
		SBATCH_OPEN_MODE SBATCH_OUTPUT SBATCH_OVERCOMMIT SBATCH_PARTITION SBATCH_POWER SBATCH_PROFILE SBATCH_QOS SBATCH_REQ_SWITCH
		SBATCH_REQUEUE SBATCH_RESERVATION SBATCH_SEGMENT_SIZE SBATCH_SIGNAL SBATCH_SPREAD_JOB SBATCH_THREAD_SPEC
		SBATCH_THREADS_PER_CORE SBATCH_TIMELIMIT SBATCH_TRES_BIND SBATCH_TRES_PER_TASK SBATCH_USE_MIN_NODES SBATCH_WAIT
		SBATCH_WAIT_ALL_NODES SBATCH_WCKEY`,
	"srun": "SLURM_CLUSTERS SLURM_HINT SLURM_DEBUG SLURM_EPILOG SLURM_CONSTRAINT SLURM_CPU_BIND",
	"squeue": `SLURM_CLUSTERS SQUEUE_ACCOUNT SQUEUE_ALL SQUEUE_ARRAY SQUEUE_NAMES SQUEUE_FEDERATION SQUEUE_FORMAT SQUEUE_FORMAT2
		SQUEUE_LICENSES SQUEUE_LOCAL SQUEUE_PARTITION SQUEUE_PRIORITY SQUEUE_QOS SQUEUE_SIBLING SQUEUE_SORT SQUEUE_STATES SQUEUE_USERS`,
	"sinfo": "SLURM_CLUSTERS SINFO_ALL SINFO_FEDERATION SINFO_FORMAT SINFO_LOCAL SINFO_PARTITION SINFO_SORT",
	"scancel": `SLURM_CLUSTERS SCANCEL_ACCOUNT SCANCEL_BATCH SCANCEL_CRON SCANCEL_CTLD SCANCEL_FULL SCANCEL_HURRY SCANCEL_INTERACTIVE
		SCANCEL_NAME SCANCEL_PARTITION SCANCEL_QOS SCANCEL_STATE SCANCEL_USER SCANCEL_VERBOSE SCANCEL_WCKEY`,
	"scontrol": "SLURM_CLUSTERS SCONTROL_ALL SCONTROL_FEDERATION SCONTROL_FUTURE SCONTROL_LOCAL",
	"sacct":    "SLURM_CLUSTERS SACCT_FEDERATION SACCT_FORMAT SACCT_LOCAL",
}

func TestEveryVariableThatGivesAnOptionIsKnown(t *testing.T) {
	for command, list := range variables {
		for _, name := range strings.Fields(list) {
			if !slices.ContainsFunc(tables[command].Options, func(o option.Option) bool { return slices.Contains(strings.Split(o.Env, ","), name) }) {
				t.Errorf("%s: nothing reads %s", command, name)
			}
		}
	}
}

func TestAVariableOfAnotherClusterOrOfAnUnsupportedOptionIsRefused(t *testing.T) {
	for _, test := range []struct {
		variable string
		code     int
		want     string
	}{
		{"SBATCH_CLUSTERS=other", 1, "'other' can't be reached now"},
		{"SLURM_CLUSTERS=other", 1, "'other' can't be reached now"},
		{"SLURM_CLUSTERS=base", 0, ""},
		{"SLURM_HINT=nomultithread", 1, "variable SLURM_HINT: --hint is not supported yet"},
		{"SBATCH_CONSTRAINT=a100", 1, "variable SBATCH_CONSTRAINT: --constraint is not supported yet"},
	} {
		c := slurmtest.Recorded(t)
		s, _, stderr := c.Session(t, "sbatch", "--wrap", "true")
		s.Environ = append(s.Environ, test.variable)
		if code := sbatch.Run(t.Context(), s); code != test.code || !strings.Contains(stderr.String(), test.want) || len(c.Submitted) != 1-test.code {
			t.Errorf("%s: code %d, %d jobs, %q", test.variable, code, len(c.Submitted), stderr)
		}
	}
}

// TestWhatIsWrongIsSaid has the messages and exit codes for words that name nothing.
func TestWhatIsWrongIsSaid(t *testing.T) {
	for _, test := range []struct {
		run   func(context.Context, *session.Session) int
		words string
		want  slurmtest.Outcome
	}{
		{squeue.Run, "squeue -S bad", slurmtest.Outcome{Code: 1, Stderr: "squeue: error: Invalid sort specification: bad\n"}},
		{squeue.Run, "squeue -S P,-?", slurmtest.Outcome{Code: 1, Stderr: "squeue: error: Invalid sort specification: -?\n"}},
		{sinfo.Run, "sinfo -S bad", slurmtest.Outcome{Code: 1, Stderr: "sinfo: error: Invalid sort specification: bad\n"}},
		{squeue.Run, "squeue -w n1,n9", slurmtest.Outcome{Code: 1, Stderr: "squeue: error: Invalid node name n9\n"}},
		{squeue.Run, "squeue -O ALL", slurmtest.Outcome{Stderr: "squeue: error: Invalid job format specification: ALL\n"}},
		{sinfo.Run, "sinfo -O bad", slurmtest.Outcome{Stderr: "sinfo: error: Invalid node format specification: bad\n"}},
		{squeue.Run, "squeue -h -w n1 -S #P,-t,+i -o %? -j 999", slurmtest.Outcome{Code: 1, Stderr: "slurm_load_jobs error: Invalid job id specified\n"}},
	} {
		if got := slurmtest.Recorded(t).Run(t, test.run, strings.Fields(test.words)...); got != test.want {
			t.Errorf("%s: %+v, want %+v", test.words, got, test.want)
		}
	}
}

func TestAStepThatDoesNotExistIsSaidAndIsNoFailure(t *testing.T) {
	c := slurmtest.Recorded(t)
	c.RefuseJob = func(uint32) *apiv1.ErrorDetail {
		return &apiv1.ErrorDetail{Reason: "STEP_UNKNOWN", Subject: "step 6.77", Sentence: "job 6 has no step 6.77 now"}
	}
	got := c.Run(t, scancel.Run, "scancel", "6.77")
	if want := "scancel: error: Kill job error on job step id 6.77: Invalid job id specified (job 6 has no step 6.77 now)\n"; got.Code != 0 || got.Stderr != want {
		t.Errorf("%+v", got)
	}
	if got := c.Run(t, scancel.Run, "scancel", "-Q", "6.77"); got != (slurmtest.Outcome{}) {
		t.Errorf("with -Q: %+v", got)
	}
}

func TestSharingIsKeptAndShown(t *testing.T) {
	c := slurmtest.Recorded(t)
	for _, partition := range c.Partitions {
		partition.PriorityTier = 0
	}
	if got := c.Run(t, sbatch.Run, "sbatch", "--parsable", "-s", "--wrap", "true"); got.Code != 0 {
		t.Fatalf("%+v", got)
	} else if shown := c.Run(t, scontrol.Run, "scontrol", "show", "job", strings.TrimSpace(got.Stdout)); !strings.Contains(shown.Stdout, " OverSubscribe=YES ") {
		t.Errorf("%+v", shown)
	}
	if got := c.Run(t, scontrol.Run, "scontrol", "show", "partition"); !strings.Contains(got.Stdout, " PriorityTier=1 ") {
		t.Errorf("%+v", got)
	}
}

func TestNoControlCharacterReachesTheTerminal(t *testing.T) {
	c := slurmtest.Recorded(t)
	job := c.JobList[0]
	job.Spec.Name, job.Spec.Comment = "a\x1b[31m\u009b", "b\nJobId=1"
	job.Spec.CommandLine, job.Spec.WorkDir = "/bin/x \x07\nJobId=99 JobName=forged", "/\r"
	c.NodeList[0].Reason = "broken\n\x1b]0;title\x07"
	id := "1"
	for _, test := range []struct {
		run   func(context.Context, *session.Session) int
		words []string
		lines int // how many lines there must be; 0 is not checked
	}{
		{squeue.Run, []string{"squeue", "-h", "-t", "all", "-j", id, "-o", "%j %k %o %Z"}, 1},
		{squeue.Run, []string{"squeue", "-h", "-t", "all", "-j", id, "-O", "name:,command:,comment:"}, 1},
		{scontrol.Run, []string{"scontrol", "-o", "show", "job", id}, 1},
		{scontrol.Run, []string{"scontrol", "show", "job", id}, 0},
		{scontrol.Run, []string{"scontrol", "show", "node"}, 0},
		{sinfo.Run, []string{"sinfo", "-R"}, 0},
		{sacct.Run, []string{"sacct", "-n", "-P", "-X", "-j", id, "-o", "jobname,comment,submitline,workdir"}, 1},
		{sacct.Run, []string{"sacct", "-n", "-X", "-j", id, "-o", "jobname%40,comment%40"}, 1},
	} {
		got := c.Run(t, test.run, test.words...)
		if i := strings.IndexFunc(got.Stdout, func(r rune) bool { return r != '\n' && (r < ' ' || r >= 0x7f && r < 0xa0) }); i >= 0 || got.Code != 0 || got.Stdout == "" {
			t.Errorf("%v: %+v (at %d)", test.words, got, i)
		}
		if n := strings.Count(got.Stdout, "\n"); test.lines > 0 && n != test.lines || strings.Contains(got.Stdout, "\nJobId=99") {
			t.Errorf("%v: %d lines: %q", test.words, n, got.Stdout)
		}
	}
}

func TestTestOnlyAsksTheCluster(t *testing.T) {
	c := slurmtest.Recorded(t)
	if got := c.Run(t, sbatch.Run, "sbatch", "--test-only", "--wrap", "true"); got.Code != 0 || got.Stderr != "sbatch: the request is valid; no start time is estimated yet\n" {
		t.Errorf("valid: %+v", got)
	}
	c.Refuse = func(*apiv1.JobSubmission) *apiv1.ErrorDetail {
		return &apiv1.ErrorDetail{Reason: "REQUEST_INVALID", Sentence: "asks for node n1 and excludes it"}
	}
	want := "sbatch: error: allocation failure: Requested node configuration is not available\nsbatch: error: asks for node n1 and excludes it\n"
	if got := c.Run(t, sbatch.Run, "sbatch", "--test-only", "-w", "n1", "-x", "n1", "--wrap", "true"); got.Code != 1 || got.Stderr != want {
		t.Errorf("refused: %+v", got)
	}
	if len(c.Submitted) != 0 {
		t.Errorf("%d jobs were submitted", len(c.Submitted))
	}
}

func TestAccountingReadsStepsWithTheListing(t *testing.T) {
	c := slurmtest.Recorded(t)
	if got := c.Run(t, sacct.Run, "sacct", "-S", "00:00", "-n", "-P", "-o", "jobid"); got.Code != 0 || !strings.Contains(got.Stdout, ".batch\n") {
		t.Errorf("%+v", got)
	}
	if len(c.Asked) != 0 {
		t.Errorf("jobs were asked for one by one: %v", c.Asked)
	}
}
