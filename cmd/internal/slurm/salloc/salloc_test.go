package salloc

import (
	"context"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/muster-hpc/muster/cmd/internal/slurm/session"
	"github.com/muster-hpc/muster/cmd/internal/slurm/slurmtest"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// granted makes every allocation run at once on the nodes of the recorded job.
func granted(t *testing.T) *slurmtest.Cluster {
	c := slurmtest.Recorded(t)
	c.OnSubmit = func(j *apiv1.Job) {
		j.Status.State, j.Status.Attempt, j.Status.NodeList, j.Status.NumNodes, j.Status.NumTasks = apiv1.JobState_JOB_STATE_RUNNING, 1, "n[1-2]", 2, 2
		j.Status.StartTime, j.Status.TimeLimitS = timestamppb.New(time.Unix(1000, 0)), 60
		c.Shares[j.GetId()] = c.Shares[6]
	}
	return c
}

func open(t *testing.T, c *slurmtest.Cluster, words ...string) (*session.Session, *slurmtest.Buffer, *slurmtest.Buffer) {
	s, stdout, stderr := c.Session(t, append([]string{"salloc"}, words...)...)
	s.Dir = t.TempDir()
	s.Environ = []string{"PATH=/usr/bin:/bin", "SHELL=/bin/sh", "SLURM_PROCID=3", "SLURM_JOB_ID=6", "MUSTER_ATTEMPT=9", "SLURM_CPU_BIND=none"}
	return s, stdout, stderr
}

func TestTheCommandHasTheJobsVariablesAndItsExitCodeIsTheEndOfTheJob(t *testing.T) {
	c := granted(t)
	s, stdout, stderr := open(t, c, "-N2", "-n2", "--gpus-per-node=h100:1", "-c3", "sh", "-c", "env; exit 7")
	if code := Run(t.Context(), s); code != 7 {
		t.Fatalf("exit code %d: %s", code, stderr)
	}
	if want := "salloc: Granted job allocation 21\nsalloc: Nodes n[1-2] are ready for job\nsalloc: Relinquishing job allocation 21\n"; stderr.String() != want {
		t.Errorf("it says %q", stderr)
	}
	got := strings.Split(stdout.String(), "\n")
	for _, want := range []string{
		"SLURM_JOB_ID=21", "SLURM_JOBID=21", "SLURM_JOB_NAME=sh", "SLURM_JOB_NODELIST=n[1-2]", "SLURM_NODELIST=n[1-2]", "SLURM_JOB_NUM_NODES=2", "SLURM_NNODES=2",
		"SLURM_TASKS_PER_NODE=1(x2)", "SLURM_JOB_CPUS_PER_NODE=1(x2)", "SLURM_NTASKS=2", "SLURM_NPROCS=2", "SLURM_CPUS_PER_TASK=3", "SLURM_GPUS_PER_NODE=h100:1",
		"SLURM_CLUSTER_NAME=base", "SLURM_JOB_PARTITION=main", "SLURM_JOB_QOS=normal", "SLURM_SUBMIT_HOST=vm", "SLURM_SUBMIT_DIR=" + s.Dir,
		"SLURM_JOB_START_TIME=1000", "SLURM_JOB_END_TIME=1060", "MUSTER_JOB_ID=21", "MUSTER_ATTEMPT=1", "SLURM_CPU_BIND=none",
	} {
		if !slices.Contains(got, want) {
			t.Errorf("the environment lacks %s", want)
		}
	}
	if strings.Contains(stdout.String(), "SLURM_PROCID") {
		t.Error("a variable of the task around is there")
	}
	spec := c.Submitted[0].GetSpec()
	if spec.GetKind() != apiv1.JobKind_JOB_KIND_ALLOCATION || spec.GetRequeue() || spec.GetName() != "sh" || spec.GetCommandLine() != "sh -c env; exit 7" {
		t.Errorf("submitted %v", spec)
	}
	if len(c.Cancelled) != 1 || !c.Cancelled[0].GetComplete() || c.Cancelled[0].GetExitCode() != 7 {
		t.Errorf("given back by %v", c.Cancelled)
	}
}

func TestWithoutACommandTheUsersShellRuns(t *testing.T) {
	c := granted(t)
	s, stdout, stderr := open(t, c, "-Q")
	s.Stdin = strings.NewReader("echo in $SLURM_JOB_NAME\n")
	if code := Run(t.Context(), s); code != 0 || stdout.String() != "in interactive\n" || stderr.String() != "" {
		t.Errorf("exit code %d, %q, %q", code, stdout, stderr)
	}
}

func TestTheExitCodeOfACommandThatASignalEnded(t *testing.T) {
	for signal, want := range map[string]int{"KILL": 0, "HUP": 0, "INT": 0, "QUIT": 0, "TERM": 1, "USR1": 1} {
		c := granted(t)
		s, _, stderr := open(t, c, "sh", "-c", "kill -"+signal+" $$")
		if code := Run(t.Context(), s); code != want || c.Cancelled[0].GetExitSignal() == 0 || c.Cancelled[0].GetExitCode() != 0 {
			t.Errorf("%s: exit code %d, %v, %s", signal, code, c.Cancelled, stderr)
		}
	}
}

func TestACommandThatCannotRunGivesTheNodesBack(t *testing.T) {
	for _, name := range []string{"/no/such", "nosuchprogram"} {
		c := granted(t)
		s, _, stderr := open(t, c, name)
		if code := Run(t.Context(), s); code != 1 || len(c.Cancelled) != 1 || !strings.Contains(stderr.String(), `Unable to exec command "`+name+`"`) {
			t.Errorf("%s: exit code %d, %v, %s", name, code, c.Cancelled, stderr)
		}
	}
}

// speaker is told when something is written.
type speaker struct{ spoke chan struct{} }

func (s *speaker) Write(p []byte) (int, error) { s.spoke <- struct{}{}; return len(p), nil }

func TestTheEndOfTheJobIsSaidAndSignalledIfAsked(t *testing.T) {
	for _, test := range []struct {
		name  string
		words []string
		want  int
	}{
		{"the usual signal", []string{"-K", "sh", "-c", "echo up; sleep 60 & wait"}, 1},
		{"another signal", []string{"--kill-command=USR1", "sh", "-c", "trap 'exit 9' USR1; echo up; sleep 60 & wait"}, 9},
		{"none", []string{"sh", "-c", "echo up; read line; exit 4"}, 4},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := granted(t)
			s, _, stderr := open(t, c, test.words...)
			out := &speaker{make(chan struct{}, 8)}
			s.Stdout = out
			in, feed, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			defer in.Close()
			s.Stdin = in
			said := make(chan struct{})
			go func() {
				<-out.spoke
				c.Change(21, func(j *apiv1.Job) { j.Status.State = apiv1.JobState_JOB_STATE_CANCELLED })
				for !strings.Contains(stderr.String(), "salloc: Job allocation 21 has been revoked.\n") {
					time.Sleep(time.Millisecond)
				}
				_ = feed.Close()
				close(said)
			}()
			if code := Run(t.Context(), s); code != test.want || len(c.Cancelled) != 0 || strings.Contains(stderr.String(), "Relinquishing") {
				t.Errorf("exit code %d, %v, %s", code, c.Cancelled, stderr)
			}
			<-said
		})
	}
}

func TestSignalsReachTheCommand(t *testing.T) {
	c := granted(t)
	s, _, stderr := open(t, c, "sh", "-c", "trap 'exit 9' TERM; echo up; sleep 60 & wait")
	out := &speaker{make(chan struct{}, 8)}
	s.Stdout = out
	signals := make(chan os.Signal, 1)
	s.Signals = func(...os.Signal) (<-chan os.Signal, func()) { return signals, func() {} }
	go func() { <-out.spoke; signals <- syscall.SIGTERM }()
	if code := Run(t.Context(), s); code != 9 || len(c.Cancelled) != 1 || c.Cancelled[0].GetExitCode() != 9 {
		t.Errorf("exit code %d, %v, %s", code, c.Cancelled, stderr)
	}
}

func TestAWaitingJobIsSaidAndEndsWithCtrlC(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := slurmtest.Recorded(t)
		s, _, stderr := open(t, c, "-N2")
		signals := make(chan os.Signal, 1)
		s.Signals = func(...os.Signal) (<-chan os.Signal, func()) { return signals, func() {} }
		go func() { time.Sleep(time.Second); signals <- syscall.SIGINT }() // virtual
		want := "salloc: Pending job allocation 21\nsalloc: job 21 queued and waiting for resources\nsalloc: Job allocation 21 has been revoked.\n"
		if code := Run(t.Context(), s); code != 1 || stderr.String() != want || len(c.Cancelled) != 1 || !c.Cancelled[0].GetComplete() {
			t.Errorf("exit code %d, %v, %q", code, c.Cancelled, stderr)
		}
	})
}

func TestAJobThatWaitedIsGrantedAndCanStayWithoutAShell(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := slurmtest.Recorded(t)
		s, _, stderr := open(t, c, "--no-shell")
		go func() {
			time.Sleep(time.Second) // virtual
			c.Change(21, func(j *apiv1.Job) { j.Status.State, j.Status.Attempt = apiv1.JobState_JOB_STATE_CONFIGURING, 1 })
			time.Sleep(time.Second)
			c.Change(21, func(j *apiv1.Job) { j.Status.State, j.Status.NodeList = apiv1.JobState_JOB_STATE_RUNNING, "n3" })
		}()
		want := "salloc: Pending job allocation 21\nsalloc: job 21 queued and waiting for resources\nsalloc: job 21 has been allocated resources\n" +
			"salloc: Granted job allocation 21\nsalloc: Nodes n3 are ready for job\n"
		if code := Run(t.Context(), s); code != 0 || stderr.String() != want || len(c.Cancelled) != 0 {
			t.Errorf("exit code %d, %v, %q", code, c.Cancelled, stderr)
		}
	})
}

func TestImmediateGivesUpInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := slurmtest.Recorded(t)
		s, _, stderr := open(t, c, "-I5")
		begin := time.Now()
		if code := Run(t.Context(), s); code != 1 || time.Since(begin) != 5*time.Second || len(c.Cancelled) != 1 || !strings.Contains(stderr.String(), "Requested nodes are busy") {
			t.Errorf("exit code %d after %v, %v, %q", code, time.Since(begin), c.Cancelled, stderr)
		}
	})
}

func TestRefusalsAreSaid(t *testing.T) {
	c := slurmtest.Recorded(t)
	c.Refuse = func(*apiv1.JobSubmission) *apiv1.ErrorDetail {
		return &apiv1.ErrorDetail{Reason: "RESOURCES_IMPOSSIBLE", Sentence: "asks for 9 GPUs per node"}
	}
	for _, test := range []struct {
		words string
		code  int
		want  string
	}{
		{"-N1", 1, "salloc: error: Unable to allocate resources: Requested node configuration is not available\nsalloc: error: asks for 9 GPUs per node\n"},
		{"--no-shell true", 1, "salloc: error: --no-shell starts no command, and true was given\n"},
		{"--kill-command=NOSUCH", 255, "salloc: error: Invalid --kill-command specification: NOSUCH\n"},
		{"--immediate=x", 255, "salloc: error: Invalid --immediate specification: x\n"},
		{"--x11", 1, "salloc: error: --x11 is not supported yet: X11 is not forwarded\n"},
		{"--bogus", 255, "salloc: unrecognized option '--bogus'\nTry \"salloc --help\" for more information\n"},
	} {
		s, _, stderr := open(t, c, strings.Fields(test.words)...)
		if code := Run(context.Background(), s); code != test.code || stderr.String() != test.want {
			t.Errorf("%s: exit code %d, %q", test.words, code, stderr)
		}
	}
}
