package srun

import (
	"os"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/muster-hpc/muster/cmd/internal/slurm/slurmtest"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	"github.com/muster-hpc/muster/proto/muster/node/v1/nodev1connect"
)

// inside is the environment of the batch script of job 6 on two nodes.
var inside = []string{
	"SLURM_JOB_ID=6", "SLURM_NNODES=2", "SLURM_NTASKS=2", "MUSTER_JOB_ID=6", "MUSTER_ATTEMPT=1", "SLURM_JOB_NAME=run1",
	"SLURM_CPUS_PER_TASK=1", "PATH=/bin",
}

func twoAgents(t *testing.T, one, two *slurmtest.Agent) *slurmtest.Cluster {
	c := slurmtest.Recorded(t)
	c.Nodes = map[string]nodev1connect.NodeServiceHandler{"n1:1": one, "n2:1": two}
	c.StepList = nil
	return c
}

// try runs srun in an environment.
func try(t *testing.T, c *slurmtest.Cluster, environ []string, words ...string) slurmtest.Outcome {
	t.Helper()
	s, stdout, stderr := c.Session(t, append([]string{"srun"}, words...)...)
	s.Environ = environ
	code := Run(t.Context(), s)
	return slurmtest.Outcome{Code: code, Stdout: stdout.String(), Stderr: stderr.String()}
}

func TestAStepInTheEnclosingJob(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := twoAgents(t,
			&slurmtest.Agent{Pieces: []*nodev1.ReadOutputResponse{slurmtest.Out(0, 0, "n1\n")}, Exits: slurmtest.Ends(0, 1, 0, 0)},
			&slurmtest.Agent{Pieces: []*nodev1.ReadOutputResponse{slurmtest.Out(1, 0, "n2\n")}, Exits: slurmtest.Ends(1, 1, 85, 0)})
		got := try(t, c, inside, "-l", "-K", "--mpi=none", "-u", "--cpu-bind=q", "hostname", "-f")
		if got.Code != 85 || !strings.Contains(got.Stdout, "0: n1\n") || !strings.Contains(got.Stdout, "1: n2\n") ||
			got.Stderr != "srun: error: n2: task 1: Exited with exit code 85\n" {
			t.Errorf("%+v", got)
		}
		r := c.Created[0]
		if r.GetJobId() != 6 || r.GetAttempt() != 1 || r.GetSpec().GetName() != "hostname" || !reflect.DeepEqual(r.GetSpec().GetArgs(), []string{"hostname", "-f"}) {
			t.Errorf("created %v", r)
		}
		o := r.GetSpec().GetTaskOptions()
		if !o.GetLabel() || !o.GetKillOnBadExit() || !o.GetStdinAll() {
			t.Errorf("task options %v", o)
		}
		if ask := r.GetSpec().GetResources(); ask.GetNodesMin() != 2 || ask.GetNtasks() != 2 || ask.GetCpusPerTask() != 1 {
			t.Errorf("asked %v", ask)
		}
	})
}

func TestTheShapeOfStepsWithinAJob(t *testing.T) {
	for _, test := range []struct {
		env    string
		words  string
		nodes  uint32
		tasks  uint32
		hosts  []string
		cpus   uint32
		refuse string
		code   int // of the refusal; 0 means 1
	}{
		{env: "", words: "x", nodes: 2, tasks: 2, cpus: 1},
		{env: "", words: "-N1 x", nodes: 1, tasks: 1, cpus: 1},
		{env: "", words: "-w n2 x", nodes: 1, tasks: 1, hosts: []string{"n2"}, cpus: 1},
		{env: "", words: "-n1 x", nodes: 1, tasks: 1, cpus: 1},
		{env: "", words: "-n4 x", nodes: 2, tasks: 4, cpus: 1},
		{env: "SLURM_NTASKS=4 SLURM_NTASKS_PER_NODE=2", words: "x", nodes: 2, tasks: 4, cpus: 1},
		{env: "SLURM_NTASKS=4 SLURM_NTASKS_PER_NODE=2", words: "-N1 x", nodes: 1, tasks: 2, cpus: 1},
		{env: "SLURM_NTASKS=4 SLURM_NTASKS_PER_NODE=2", words: "-n2 -N2 x", nodes: 2, tasks: 2, cpus: 1},
		{env: "", words: "--ntasks-per-node=8 x", nodes: 2, tasks: 16, cpus: 1},
		{env: "", words: "-c 4 x", nodes: 2, tasks: 2, cpus: 4},
		{env: "SRUN_CPUS_PER_TASK=1", words: "x", nodes: 2, tasks: 2, cpus: 1},
		{env: "SRUN_CPUS_PER_TASK=3", words: "x", refuse: "differ"},
		{env: "", words: "-r1 x", nodes: 1, tasks: 1, cpus: 1},
		{env: "", words: "-r1 -n3 x", nodes: 1, tasks: 3, cpus: 1},
		{env: "SLURM_JOB_NODELIST=n[1-2]", words: "-x n1 x", nodes: 1, tasks: 1, cpus: 1},
		{env: "SLURM_CPUS_PER_GPU=2", words: "-c3 x", nodes: 2, tasks: 2, cpus: 3},
		{env: "", words: "--exclusive=user x", refuse: "--exclusive=user is for jobs"},
		{env: "", words: "--pty=3 bash", refuse: "--pty=3 is not supported yet"},
		{env: "", words: "--resv-ports x", refuse: "--resv-ports is not supported yet"},
		{env: "", words: "-Z x", refuse: "--no-allocate is not supported yet"},
		{env: "", words: "--cpu-bind=ldoms x", refuse: "--cpu-bind=ldoms is not supported yet"},
		{env: "", words: "--mem-bind=rank x", refuse: "--mem-bind=rank is not supported yet"},
		{env: "", words: "-m block,Pack x", refuse: "--distribution=block,Pack is not supported yet"},
		{env: "", words: "-w n1 -F hosts x", refuse: "--nodefile and --nodelist both"},
		{env: "", words: "--signal=B:USR1 x", refuse: "Invalid --signal specification", code: 255},
		{env: "", words: "--cpu-bind=bogus x", refuse: "unrecognized --cpu-bind argument \"bogus\"", code: 255},
		{env: "", words: "--immediate=soon x", refuse: "Invalid --immediate specification", code: 255},
		{env: "", words: "--propagate=BOGUS x", refuse: "Invalid --propagate specification", code: 255},
		{env: "", words: "-m diagonal x", refuse: "Invalid --distribution specification", code: 255},
		{env: "SLURM_GPU_BIND=bogus", words: "x", refuse: "unrecognized --gpu-bind argument", code: 255},
		{env: "", words: "--het-group=0 x", refuse: "--het-group is not supported yet"},
		{env: "", words: "--multi-prog f", refuse: "Unable to open configuration file /home/user/work/f"},
		{env: "", words: "--multi-prog f a", refuse: "--multi-prog takes one file"},
		{env: "", words: "--mpi=pmix x", refuse: "Invalid MPI type 'pmix', --mpi=list for acceptable types"},
	} {
		t.Run(test.env+" "+test.words, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := twoAgents(t, &slurmtest.Agent{Exits: slurmtest.Ends(0, 1, 0, 0)}, &slurmtest.Agent{Exits: slurmtest.Ends(1, 1, 0, 0)})
				environ := append(strings.Fields(test.env), inside...) // the first of a repeated name counts
				got := try(t, c, environ, strings.Fields(test.words)...)
				if test.refuse != "" {
					if got.Code != max(test.code, 1) || !strings.Contains(got.Stderr, test.refuse) || len(c.Created) != 0 {
						t.Errorf("%+v, want a refusal with %q", got, test.refuse)
					}
					return
				}
				if got.Code != 0 {
					t.Fatalf("%+v", got)
				}
				ask := c.Created[0].GetSpec().GetResources()
				if ask.GetNodesMin() != test.nodes || ask.GetNodesMax() != test.nodes || ask.GetNtasks() != test.tasks ||
					!reflect.DeepEqual(ask.GetNodeList(), test.hosts) || ask.GetCpusPerTask() != test.cpus {
					t.Errorf("asked %v", ask)
				}
			})
		})
	}
}

func TestAJobOfItsOwnWaitsAndRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := twoAgents(t, &slurmtest.Agent{Pieces: []*nodev1.ReadOutputResponse{slurmtest.Out(0, 0, "n1\n")}, Exits: slurmtest.Ends(0, 1, 0, 0)}, &slurmtest.Agent{Exits: slurmtest.Ends(1, 1, 0, 0)})
		go func() {
			time.Sleep(2 * time.Second) // virtual
			c.Change(21, func(j *apiv1.Job) {
				c.Shares[21] = c.Shares[6]
				c.StepList = append(c.StepList, &apiv1.Step{JobId: 21, Attempt: 1, State: apiv1.StepState_STEP_STATE_RUNNING, NumTasks: 2})
				j.Status.State, j.Status.Attempt = apiv1.JobState_JOB_STATE_CONFIGURING, 1
			})
		}()
		got := try(t, c, []string{"PATH=/bin", "SLURM_LABELIO=1"}, "-N2", "-J", "name", "-p", "main", "hostname")
		want := slurmtest.Outcome{Stdout: "0: n1\n", Stderr: "srun: job 21 queued and waiting for resources\nsrun: job 21 has been allocated resources\n"}
		if got != want {
			t.Errorf("%+v", got)
		}
		spec := c.Submitted[0].GetSpec()
		if spec.GetKind() != apiv1.JobKind_JOB_KIND_RUN || spec.GetRequeue() || spec.GetName() != "name" || spec.GetPartitions()[0] != "main" || spec.GetResources().GetNodesMin() != 2 {
			t.Errorf("submitted %v", spec)
		}
	})
}

func TestAnAttemptThatNeverRanIsFollowedByTheNext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := twoAgents(t, &slurmtest.Agent{Exits: slurmtest.Ends(0, 1, 0, 0)}, &slurmtest.Agent{Exits: slurmtest.Ends(1, 1, 3, 0)})
		c.OnSubmit = func(j *apiv1.Job) {
			// The first attempt is over already, without a start; its step has no nodes left to read.
			j.Status.State, j.Status.Attempt = apiv1.JobState_JOB_STATE_CONFIGURING, 1
			c.StepList = []*apiv1.Step{{JobId: j.GetId(), Attempt: 1, State: apiv1.StepState_STEP_STATE_FAILED}}
		}
		go func() {
			time.Sleep(time.Second) // virtual
			c.Change(21, func(j *apiv1.Job) {
				c.Shares[21] = c.Shares[6]
				c.StepList = []*apiv1.Step{{JobId: 21, Attempt: 2, State: apiv1.StepState_STEP_STATE_RUNNING, NumTasks: 2}}
				j.Status.Attempt = 2
			})
		}()
		if got := try(t, c, nil, "x"); got.Code != 3 {
			t.Errorf("%+v", got)
		}
	})
}

func TestACancelledWaitingJob(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := twoAgents(t, &slurmtest.Agent{}, &slurmtest.Agent{})
		s, _, stderr := c.Session(t, "srun", "-Q", "hostname")
		signals := make(chan os.Signal, 1)
		s.Signals = func(...os.Signal) (<-chan os.Signal, func()) { return signals, func() {} }
		s.Environ = nil
		go func() { time.Sleep(time.Second); signals <- syscall.SIGTERM }() // virtual
		if code := Run(t.Context(), s); code != 1 || stderr.String() != "srun: Job allocation 21 has been revoked\nsrun: Force Terminated JobId=21\n" {
			t.Errorf("code %d, %q", code, stderr.String())
		}
	})
}

// interruptible runs a step that ends when it is cancelled.
func interruptible(t *testing.T, words []string, drive func(signals chan<- os.Signal)) (*slurmtest.Cluster, int, string) {
	release := make(chan struct{})
	c := twoAgents(t, &slurmtest.Agent{Release: release, Exits: slurmtest.Ends(0, 1, 0, 15)}, &slurmtest.Agent{Release: release, Exits: slurmtest.Ends(1, 1, 0, 15)})
	s, _, stderr := c.Session(t, append([]string{"srun"}, words...)...)
	s.Environ = inside
	s.Now = time.Now
	signals := make(chan os.Signal, 4)
	s.Signals = func(...os.Signal) (<-chan os.Signal, func()) { return signals, func() {} }
	go func() {
		drive(signals)
		close(release)
	}()
	code := Run(t.Context(), s)
	return c, code, stderr.String()
}

func TestTwoInterruptsWithinASecondEndTheStep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, code, stderr := interruptible(t, []string{"sleep", "9"}, func(signals chan<- os.Signal) {
			synctest.Wait()
			signals <- syscall.SIGINT
			synctest.Wait()
			time.Sleep(3 * time.Second) // too late: it counts as the first
			signals <- syscall.SIGINT
			synctest.Wait()
			signals <- syscall.SIGINT
			synctest.Wait()
		})
		if code != 143 || strings.Count(stderr, "interrupt (one more within 1 sec to abort)\n") != 2 ||
			!strings.Contains(stderr, "srun: StepId=6.0 tasks 0-1: running\n") || !strings.Contains(stderr, "forcing job termination\n") {
			t.Errorf("code %d, %s", code, stderr)
		}
		if len(c.Cancelled) != 1 || c.Cancelled[0].GetSignal() != 0 || c.Cancelled[0].GetStep() != 0 || c.Cancelled[0].Step == nil {
			t.Errorf("cancelled %v", c.Cancelled)
		}
	})
}

func TestSignalsAreForwardedAndTermEndsTheStep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, _, _ := interruptible(t, []string{"sleep", "9"}, func(signals chan<- os.Signal) {
			synctest.Wait()
			for _, s := range []os.Signal{syscall.SIGUSR1, syscall.SIGTERM} {
				signals <- s
				synctest.Wait()
			}
		})
		if len(c.Cancelled) != 2 || c.Cancelled[0].GetSignal() != 10 || c.Cancelled[1].GetSignal() != 0 {
			t.Errorf("cancelled %v", c.Cancelled)
		}
	})
}

// deaf runs a step on n1, whose task ends when it is told to, and n2, which never answers.
func deaf(t *testing.T, words []string, drive func(signals chan<- os.Signal)) (code int, stderr string, took time.Duration, c *slurmtest.Cluster) {
	release := make(chan struct{})
	c = twoAgents(t, &slurmtest.Agent{Release: release, Exits: slurmtest.Ends(0, 1, 0, 15)}, &slurmtest.Agent{Release: make(chan struct{})})
	s, _, errs := c.Session(t, append([]string{"srun"}, words...)...)
	s.Environ, s.Now = inside, time.Now
	signals := make(chan os.Signal, 4)
	s.Signals = func(...os.Signal) (<-chan os.Signal, func()) { return signals, func() {} }
	begin := time.Now()
	go func() {
		synctest.Wait()
		drive(signals)
		close(release)
	}()
	code = Run(t.Context(), s)
	return code, errs.String(), time.Since(begin), c
}

const notResponding = "srun: error: node n2 is not responding; step 6.0 was told to end, and does so when it answers or is lost\n"

func TestANodeThatDoesNotAnswerIsNotWaitedForWithoutEnd(t *testing.T) {
	for name, test := range map[string]struct {
		words []string
		send  []os.Signal
		code  int
	}{
		"TERM":         {[]string{"sleep", "9"}, []os.Signal{syscall.SIGTERM}, 143},
		"TERM twice":   {[]string{"sleep", "9"}, []os.Signal{syscall.SIGTERM, syscall.SIGCONT, syscall.SIGTERM}, 143}, // as from timeout
		"two Ctrl-C":   {[]string{"sleep", "9"}, []os.Signal{syscall.SIGINT, syscall.SIGINT}, 130},
		"after --wait": {[]string{"--wait=1", "sleep", "9"}, nil, 1},
	} {
		synctest.Test(t, func(t *testing.T) {
			code, stderr, took, c := deaf(t, test.words, func(signals chan<- os.Signal) {
				for _, s := range test.send {
					signals <- s
					synctest.Wait()
				}
			})
			ends := 0
			for _, r := range c.Cancelled {
				if r.GetSignal() == 0 {
					ends++
				}
			}
			if code != test.code || !strings.HasSuffix(stderr, notResponding) || ends != 1 || strings.Count(stderr, "got SIGTERM") > 1 ||
				took < usualGrace+afterGrace || took > usualGrace+afterGrace+2*time.Second {
				t.Errorf("%s: code %d after %v, %d ends, %s", name, code, took, ends, stderr)
			}
		})
	}
}

func TestTheWaitForSilentNodesFollowsTheJobsGrace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		c := twoAgents(t, &slurmtest.Agent{Release: release}, &slurmtest.Agent{Release: release})
		c.Change(6, func(j *apiv1.Job) { j.Spec.KillGraceS = 300 })
		s, _, errs := c.Session(t, "srun", "sleep", "9")
		s.Environ, s.Now = inside, time.Now
		signals := make(chan os.Signal, 1)
		s.Signals = func(...os.Signal) (<-chan os.Signal, func()) { return signals, func() {} }
		signals <- syscall.SIGHUP
		begin := time.Now()
		code := Run(t.Context(), s)
		if took := time.Since(begin); code != 129 || took < 300*time.Second+afterGrace || took > 302*time.Second+afterGrace ||
			!strings.Contains(errs.String(), "nodes n[1-2] are not responding; step 6.0 was told to end, and does so when they answer or are lost\n") {
			t.Errorf("code %d after %v, %s", code, took, errs)
		}
	})
}

func TestASignalAfterTheOrderOfAnEndEndsSrunAtOnce(t *testing.T) {
	for _, test := range []struct {
		second syscall.Signal
		code   int
	}{{syscall.SIGTERM, 143}, {syscall.SIGHUP, 129}, {syscall.SIGINT, 130}} {
		synctest.Test(t, func(t *testing.T) {
			code, stderr, took, _ := deaf(t, []string{"sleep", "9"}, func(signals chan<- os.Signal) {
				signals <- syscall.SIGTERM
				time.Sleep(2 * time.Second) // virtual
				signals <- test.second
			})
			if code != test.code || took > 3*time.Second || !strings.Contains(stderr, "not waiting for the end of step 6.0; it is being ended\n") {
				t.Errorf("%v: code %d after %v, %s", test.second, code, took, stderr)
			}
		})
	}
}

func TestAJobThatEndsAlreadyIsSaidOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		c := twoAgents(t, &slurmtest.Agent{Release: release, Exits: slurmtest.Ends(0, 1, 0, 15)}, &slurmtest.Agent{Release: release, Exits: slurmtest.Ends(1, 1, 0, 15)})
		c.RefuseJob = func(uint32) *apiv1.ErrorDetail {
			return &apiv1.ErrorDetail{Reason: "JOB_NOT_RUNNING", Subject: "job 6", Sentence: "job 6 does not run: it is COMPLETING"}
		}
		s, _, stderr := c.Session(t, "srun", "sleep", "9")
		s.Environ, s.Now = inside, time.Now
		signals := make(chan os.Signal, 4)
		s.Signals = func(...os.Signal) (<-chan os.Signal, func()) { return signals, func() {} }
		go func() {
			synctest.Wait()
			signals <- syscall.SIGCONT
			synctest.Wait()
			signals <- syscall.SIGTERM
			synctest.Wait()
			close(release)
		}()
		if code := Run(t.Context(), s); code != 143 || strings.Contains(stderr.String(), "Unable") || len(c.Cancelled) != 2 {
			t.Errorf("code %d, cancelled %v, %s", code, c.Cancelled, stderr.String())
		}
	})
}

func TestWaitEndsTheStepAfterTheFirstEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		c := twoAgents(t, &slurmtest.Agent{Exits: slurmtest.Ends(0, 1, 1, 0)}, &slurmtest.Agent{Release: release, Exits: slurmtest.Ends(1, 1, 0, 9)})
		go func() { time.Sleep(61 * time.Second); close(release) }()
		got := try(t, c, inside, "--wait=60", "x")
		if got.Code != 137 || len(c.Cancelled) != 1 || !strings.Contains(got.Stderr,
			"srun: First task exited 60s ago\nsrun: StepId=6.0 task 1: running\nsrun: StepId=6.0 task 0: exited abnormally\nsrun: Terminating StepId=6.0\n") {
			t.Errorf("%+v, cancelled %v", got, c.Cancelled)
		}
	})
}

func TestFilesOfEachTaskAreTheNodesAffair(t *testing.T) {
	for _, test := range []struct {
		words        string
		in, out, err string
		stdinRank    int32
		stdinAll     bool
		refuse       string
	}{
		{words: "x", stdinRank: -1, stdinAll: true},
		{words: "--input none x", in: "/dev/null", stdinRank: -1, stdinAll: true},
		{words: "-i 1 x", stdinRank: 1},
		{words: "-i data.%t x", in: "/home/user/work/data.%t", stdinRank: -1, stdinAll: true},
		{words: "--unbuffered --output F%j_%t --error /e/F x", out: "/home/user/work/F%j_%t", err: "/e/F", stdinRank: -1, stdinAll: true},
		{words: "-o f.%N x", out: "/home/user/work/f.%N", err: "/home/user/work/f.%N", stdinRank: -1, stdinAll: true},
		{words: "-o f.%4t -e none x", out: "/home/user/work/f.%4t", err: "/dev/null", stdinRank: -1, stdinAll: true},
		{words: "-o none -e all x", stdinRank: -1, stdinAll: true},
		{words: "-o none -e e.%n x", out: "/dev/null", err: "/home/user/work/e.%n", stdinRank: -1, stdinAll: true},
		{words: "-o f.%t -e all x", refuse: "name a file for --error too"},
		{words: "-i 7 -n2 x", refuse: "there are only 2 tasks"},
		{words: "-i missing x", refuse: "Could not open stdin file: open /home/user/work/missing: no such file or directory"},
		{words: "-l -o f.%t x", refuse: "--label is not supported yet with --output=/home/user/work/f.%t"},
		{words: "-l -e f%t x", refuse: "--label is not supported yet with --error=/home/user/work/f%t"},
		{words: "-l -o none x", out: "/dev/null", err: "/dev/null", stdinRank: -1, stdinAll: true},
	} {
		synctest.Test(t, func(t *testing.T) {
			c := twoAgents(t, &slurmtest.Agent{Exits: slurmtest.Ends(0, 1, 0, 0)}, &slurmtest.Agent{Exits: slurmtest.Ends(1, 1, 0, 0)})
			got := try(t, c, inside, strings.Fields(test.words)...)
			if test.refuse != "" {
				if got.Code != 1 || !strings.Contains(got.Stderr, test.refuse) {
					t.Errorf("%s: %+v", test.words, got)
				}
				return
			}
			if got.Code != 0 {
				t.Fatalf("%s: %+v", test.words, got)
			}
			spec := c.Created[0].GetSpec()
			if spec.GetStdinPath() != test.in || spec.GetStdoutPath() != test.out || spec.GetStderrPath() != test.err ||
				spec.GetTaskOptions().GetStdinAll() != test.stdinAll || spec.GetTaskOptions().GetStdinRank() != test.stdinRank {
				t.Errorf("%s: %v", test.words, spec)
			}
		})
	}
}

func TestJobidFromOutsideAsksForTheShape(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := twoAgents(t, &slurmtest.Agent{Exits: slurmtest.Ends(0, 1, 0, 0)}, &slurmtest.Agent{Exits: slurmtest.Ends(1, 1, 0, 0)})
		if got := try(t, c, nil, "--ntasks=1", "--overlap", "--quiet", "--jobid", "6", "x"); got.Code != 0 {
			t.Fatalf("%+v", got)
		}
		if r := c.Created[0]; r.GetAttempt() != 0 || r.GetSpec().GetResources().GetNodesMin() != 1 || r.GetSpec().GetResources().GetNtasks() != 1 {
			t.Errorf("created %v", r)
		}
	})
}

func TestWordsThatCannotBeParsed(t *testing.T) {
	c := slurmtest.Recorded(t)
	if got := try(t, c, nil, "--bogus", "x"); got.Code != 255 || got.Stderr != "srun: unrecognized option '--bogus'\nTry \"srun --help\" for more information\n" {
		t.Errorf("%+v", got)
	}
	if got := try(t, c, nil, "-N2"); got.Code != 1 || got.Stderr != "srun: fatal: No command given to execute.\n" {
		t.Errorf("%+v", got)
	}
}

func TestMPITasksGetAProcessManagerAndANewSecretEachTime(t *testing.T) {
	secrets := map[string]bool{}
	for _, how := range []string{"--mpi=pmi2 x", "SLURM_MPI_TYPE=pmi2 x", "--mpi=pmi2 x", "--mpi=none x", "x"} {
		synctest.Test(t, func(t *testing.T) {
			c := twoAgents(t, &slurmtest.Agent{Exits: slurmtest.Ends(0, 1, 0, 0)}, &slurmtest.Agent{Exits: slurmtest.Ends(1, 1, 0, 0)})
			words, environ := strings.Fields(how), inside
			if strings.HasPrefix(how, "SLURM_") {
				words, environ = words[1:], append([]string{words[0]}, inside...)
			}
			if got := try(t, c, environ, words...); got.Code != 0 {
				t.Fatalf("%s: %+v", how, got)
			}
			kind, wants := c.Created[0].GetSpec().GetTaskOptions().GetMpi(), strings.Contains(how, "pmi2")
			if (kind == "pmi2") != wants {
				t.Errorf("%s asks for %q", how, kind)
			}
			secret := ""
			for _, v := range strings.Split(string(c.Created[0].GetEnvironment()), "\x00") {
				if value, ok := strings.CutPrefix(v, secretVariable+"="); ok {
					secret = value
				}
			}
			if (len(secret) >= 16) != wants || secrets[secret] && wants {
				t.Errorf("%s has the secret %q", how, secret)
			}
			secrets[secret] = true
		})
	}
	got := try(t, slurmtest.Recorded(t), nil, "--mpi=list")
	if got.Code != 0 || got.Stdout != mpiKinds {
		t.Errorf("--mpi=list: %+v", got)
	}
}
