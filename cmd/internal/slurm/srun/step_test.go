package srun

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/muster-hpc/muster/cmd/internal/slurm/slurmtest"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
)

// quick are two agents whose tasks end well at once.
func quick(t *testing.T) *slurmtest.Cluster {
	return twoAgents(t, &slurmtest.Agent{Exits: slurmtest.Ends(0, 1, 0, 0)}, &slurmtest.Agent{Exits: slurmtest.Ends(1, 1, 0, 0)})
}

// holding makes steps be refused until the function is called; it wakes who watches.
func holding(c *slurmtest.Cluster) (free func()) {
	full := true
	c.StepList = []*apiv1.Step{{JobId: 6, Id: 0, Attempt: 1, State: apiv1.StepState_STEP_STATE_RUNNING, Unreported: []uint32{1}}}
	c.RefuseStep = func(*apiv1.CreateStepRequest) *apiv1.ErrorDetail { // called with the cluster's lock held
		if !full {
			return nil
		}
		return &apiv1.ErrorDetail{Reason: "STEP_BUSY", Subject: "job 6", Sentence: "the step has to wait: it asks for 1 node; now step 6.0 has 2 CPUs"}
	}
	return func() {
		c.ChangeStep(6, 0, func(step *apiv1.Step) {
			full = false
			step.State, step.Unreported = apiv1.StepState_STEP_STATE_COMPLETED, nil
		})
	}
}

const disabled = "srun: Job 6 step creation temporarily disabled, retrying (Requested nodes are busy)\n"

func TestABusyStepWaitsForAnotherToEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := quick(t)
		free := holding(c)
		go func() {
			time.Sleep(time.Hour) // virtual
			free()
		}()
		got := try(t, c, inside, "--exact", "x")
		if want := disabled + "srun: Step created for StepId=6.1\n"; got.Code != 0 || got.Stderr != want {
			t.Errorf("%+v, want %q", got, want)
		}
		// Once at first, once because the other may have ended before the watch began, and once when it had.
		if len(c.Created) != 3 || !c.Created[0].GetSpec().GetResources().GetExact() {
			t.Errorf("%d tries, asked %v", len(c.Created), c.Created[0].GetSpec().GetResources())
		}
	})
}

func TestTheRoomThatWasLeftBeforeTheWatchBeganIsSeen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := quick(t)
		tries := 0
		c.RefuseStep = func(*apiv1.CreateStepRequest) *apiv1.ErrorDetail {
			if tries++; tries > 1 {
				return nil
			}
			return &apiv1.ErrorDetail{Reason: "STEP_BUSY"}
		}
		begun := time.Now()
		if got := try(t, c, inside, "x"); got.Code != 0 || time.Since(begun) > time.Second {
			t.Errorf("%+v after %v", got, time.Since(begun))
		}
	})
}

func TestImmediateGivesUpWaiting(t *testing.T) {
	for words, want := range map[string]struct {
		err  string
		took time.Duration
	}{
		"-I x":             {disabled + "srun: error: Unable to create step for job 6: Requested nodes are busy\n", time.Second},
		"--immediate=60 x": {disabled + "srun: error: Unable to create step for job 6: Requested nodes are busy\n", time.Minute},
		"-I0 x":            {"srun: error: Unable to create step for job 6: Requested nodes are busy\n", 0},
	} {
		synctest.Test(t, func(t *testing.T) {
			c := quick(t)
			holding(c)
			begun := time.Now()
			got := try(t, c, inside, strings.Fields(words)...)
			if got.Code != 1 || !strings.HasPrefix(got.Stderr, want.err) || time.Since(begun) != want.took {
				t.Errorf("%s: %+v after %v", words, got, time.Since(begun))
			}
		})
	}
}

// signalled is srun whose signals the test sends.
func signalled(t *testing.T, c *slurmtest.Cluster, environ []string, drive func(chan<- os.Signal), words ...string) slurmtest.Outcome {
	s, stdout, stderr := c.Session(t, append([]string{"srun"}, words...)...)
	s.Environ, s.Now = environ, time.Now
	signals := make(chan os.Signal, 4)
	s.Signals = func(which ...os.Signal) (<-chan os.Signal, func()) {
		if which[0] == syscall.SIGWINCH {
			return make(chan os.Signal), func() {}
		}
		return signals, func() {}
	}
	go drive(signals)
	code := Run(t.Context(), s)
	return slurmtest.Outcome{Code: code, Stdout: stdout.String(), Stderr: stderr.String()}
}

func TestAnInterruptWhileWaitingLeavesNothingBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := quick(t)
		holding(c)
		got := signalled(t, c, inside, func(signals chan<- os.Signal) {
			synctest.Wait()
			signals <- syscall.SIGINT
		}, "x")
		want := disabled + "srun: Cancelled pending job step with signal 2\nsrun: error: Unable to create step for job 6: Job/step already completing or completed\n"
		if got.Code != 1 || got.Stderr != want || len(c.StepList) != 1 {
			t.Errorf("%+v, %d steps", got, len(c.StepList))
		}
	})
}

func TestAnInterruptWhileTheStepIsBeingMadeEndsIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := quick(t)
		signals := make(chan os.Signal, 4)
		tries := 0
		c.RefuseStep = func(*apiv1.CreateStepRequest) *apiv1.ErrorDetail {
			if tries++; tries == 1 {
				return &apiv1.ErrorDetail{Reason: "STEP_BUSY"}
			}
			signals <- syscall.SIGINT
			return nil
		}
		s, _, stderr := c.Session(t, "srun", "x")
		s.Environ = inside
		s.Signals = func(...os.Signal) (<-chan os.Signal, func()) { return signals, func() {} }
		if code := Run(t.Context(), s); code != 1 || !strings.Contains(stderr.String(), "Cancelled pending job step with signal 2\n") {
			t.Errorf("code %d, %s", code, stderr)
		}
		if len(c.Cancelled) != 1 || c.Cancelled[0].Step == nil || c.Cancelled[0].GetSignal() != 0 {
			t.Errorf("cancelled %v", c.Cancelled)
		}
	})
}

func TestAJobThatEndsWhileAStepWaitsIsSaid(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := quick(t)
		gone := false
		c.RefuseStep = func(*apiv1.CreateStepRequest) *apiv1.ErrorDetail {
			if gone {
				return &apiv1.ErrorDetail{Reason: "JOB_ENDED", Sentence: "job 6 has ended already"}
			}
			return &apiv1.ErrorDetail{Reason: "STEP_BUSY"}
		}
		go func() {
			time.Sleep(time.Minute) // virtual
			c.Change(6, func(j *apiv1.Job) { gone = true; j.Status.State = apiv1.JobState_JOB_STATE_CANCELLED })
		}()
		got := try(t, c, inside, "x")
		if got.Code != 1 || !strings.Contains(got.Stderr, "Unable to create step for job 6: Job/step already completing or completed\n") {
			t.Errorf("%+v", got)
		}
	})
}

func TestOptionsReachTheStep(t *testing.T) {
	environ := append([]string{"SLURM_GPUS_ON_NODE=8", "SLURM_GPUS_PER_NODE=8", "SLURM_MEM_PER_NODE=300", "SLURM_EXACT=0"}, inside...)
	for words, holds := range map[string]func(*apiv1.StepSpec) bool{
		"--exclusive x": func(s *apiv1.StepSpec) bool { return s.Resources.Exact && !s.Resources.Exclusive },
		"--overlap x":   func(s *apiv1.StepSpec) bool { return s.Resources.Overlap && !s.Resources.Exact },
		"-r1 x":         func(s *apiv1.StepSpec) bool { return s.Resources.GetRelative() == 1 && s.Resources.Relative != nil },
		"-O -n9 x":      func(s *apiv1.StepSpec) bool { return s.Resources.Overcommit && s.Resources.Ntasks == 9 },
		"x":             func(s *apiv1.StepSpec) bool { return s.Resources.MemoryPerNodeMb == 0 && s.Resources.GpusPerNode == 8 },
		"--mem=2G x":    func(s *apiv1.StepSpec) bool { return s.Resources.MemoryPerNodeMb == 2048 },
		"--gpus-per-task=1 -n4 x": func(s *apiv1.StepSpec) bool {
			return s.Resources.GpusPerTask == 1 && s.Resources.GpusPerNode == 0 && s.TaskOptions.BindGpusPerTask
		},
		"--gres=gpu:a100:1,gpu:h100:2 x": func(s *apiv1.StepSpec) bool {
			return len(s.Resources.Gres) == 2 && s.Resources.Gres[1].Type == "h100" && s.Resources.GpusPerNode == 0
		},
		"--gres=none x": func(s *apiv1.StepSpec) bool {
			return len(s.Resources.Gres) == 1 && s.Resources.Gres[0].Count == 0 && s.Resources.GpusPerNode == 0 && !s.TaskOptions.KillOnBadExit
		},
		"--gres=gpu:0 x": func(s *apiv1.StepSpec) bool {
			return len(s.Resources.Gres) == 1 && s.Resources.Gres[0].Count == 0 && s.Resources.GpusPerNode == 0 && s.Resources.GpusTotal == 0 && s.Resources.GpusPerTask == 0
		},
		"--gpus=0 x": func(s *apiv1.StepSpec) bool {
			return len(s.Resources.Gres) == 1 && s.Resources.Gres[0].Count == 0 && s.Resources.GpusPerNode == 0 && s.Resources.GpusTotal == 0 && s.Resources.GpusPerTask == 0
		},
		"--gpus-per-task=0 -n2 x": func(s *apiv1.StepSpec) bool {
			return len(s.Resources.Gres) == 1 && s.Resources.Gres[0].Count == 0 && s.Resources.GpusPerNode == 0 && s.Resources.GpusTotal == 0 && s.Resources.GpusPerTask == 0
		},
		"--gpus-per-node=0 x": func(s *apiv1.StepSpec) bool {
			return len(s.Resources.Gres) == 1 && s.Resources.Gres[0].Count == 0 && s.Resources.GpusPerNode == 0 && s.Resources.GpusTotal == 0 && s.Resources.GpusPerTask == 0
		},
		"--ntasks-per-gpu=2 --gpus=4 x": func(s *apiv1.StepSpec) bool {
			return s.Resources.NtasksPerGpu == 2 && s.Resources.GpusTotal == 4 && s.Resources.Ntasks == 0
		},
		"--cpus-per-gpu=3 --gpus=2 x": func(s *apiv1.StepSpec) bool { return s.Resources.CpusPerGpu == 3 && s.Resources.CpusPerTask == 0 },
		"-m plane=2 x":                func(s *apiv1.StepSpec) bool { return s.TaskOptions.Distribution == "plane=2" },
		"-m cyclic:block x":           func(s *apiv1.StepSpec) bool { return s.TaskOptions.Distribution == "cyclic:block" },
		"-m arbitrary -w n2,n1,n2 x": func(s *apiv1.StepSpec) bool {
			return reflect.DeepEqual(s.Resources.TaskNodes, []string{"n2", "n1", "n2"}) && s.Resources.Ntasks == 3 && s.Resources.NodesMin == 2 && len(s.Resources.NodeList) == 0 && s.TaskOptions.Distribution == "arbitrary"
		},
		"--cpu-bind=v,map_cpu:0,1 x": func(s *apiv1.StepSpec) bool { return s.TaskOptions.CpuBind == "verbose,map_cpu:0,1" },
		"--gpu-bind=single:2 x":      func(s *apiv1.StepSpec) bool { return s.TaskOptions.GpuBind == "single:2" },
		"--mem-bind=local x":         func(s *apiv1.StepSpec) bool { return true },
		"--signal=USR1@30 -t2 x": func(s *apiv1.StepSpec) bool {
			return s.WarnSignal.GetSignal() == 10 && s.WarnSignal.GetLeadS() == 30 && s.TimeLimitS == 120
		},
		"-k x":             func(s *apiv1.StepSpec) bool { return s.NoKill },
		"--no-kill=off x":  func(s *apiv1.StepSpec) bool { return !s.NoKill },
		"-N2 hostname":     func(s *apiv1.StepSpec) bool { return s.TaskOptions.KillOnBadExit }, // GPUs on several nodes
		"-N1 hostname":     func(s *apiv1.StepSpec) bool { return !s.TaskOptions.KillOnBadExit },
		"-K0 -N2 hostname": func(s *apiv1.StepSpec) bool { return !s.TaskOptions.KillOnBadExit },
		"--task-prolog=./p --task-epilog /e/p x": func(s *apiv1.StepSpec) bool {
			return s.TaskOptions.TaskProlog == "/home/user/work/p" && s.TaskOptions.TaskEpilog == "/e/p"
		},
		"--task-prolog=none x": func(s *apiv1.StepSpec) bool { return s.TaskOptions.TaskProlog == "" },
		"--propagate=STACK,CORE x": func(s *apiv1.StepSpec) bool {
			return len(s.TaskOptions.Rlimits) == 2 && s.TaskOptions.Rlimits[0].Name == "STACK" && s.TaskOptions.Rlimits[0].Soft > 0
		},
		"--propagate=NONE x":                func(s *apiv1.StepSpec) bool { return len(s.TaskOptions.Rlimits) == 0 },
		"-T8 --msg-timeout=5 --nice=3 -u x": func(s *apiv1.StepSpec) bool { return true },
	} {
		t.Run(words, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := quick(t)
				if got := try(t, c, environ, strings.Fields(words)...); got.Code != 0 || len(c.Created) != 1 || !holds(c.Created[0].GetSpec()) {
					t.Errorf("%+v, created %v", got, c.Created)
				}
			})
		})
	}
}

func TestStepsInheritTheDistributionOfTheirJob(t *testing.T) {
	for variables, want := range map[string]string{
		"SLURM_DISTRIBUTION=cyclic": "cyclic", "SLURM_DISTRIBUTION=plane SLURM_DIST_PLANESIZE=4": "plane=4",
		"SLURM_DISTRIBUTION=cyclic SLURM_STEP_ID=3": "", // that of the step in which srun is called
	} {
		synctest.Test(t, func(t *testing.T) {
			c := quick(t)
			if got := try(t, c, append(strings.Fields(variables), inside...), "x"); got.Code != 0 || c.Created[0].GetSpec().GetTaskOptions().GetDistribution() != want {
				t.Errorf("%s: %+v, created %v", variables, got, c.Created)
			}
		})
	}
}

func TestAHostfileSaysWhereEachTaskIs(t *testing.T) {
	hosts := filepath.Join(t.TempDir(), "hosts")
	if err := os.WriteFile(hosts, []byte("n2\nn1 # comment\n\nn[1-2]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		c := quick(t)
		if got := try(t, c, append([]string{"SLURM_HOSTFILE=" + hosts}, inside...), "x"); got.Code != 0 {
			t.Fatalf("%+v", got)
		}
		s := c.Created[0].GetSpec()
		if !reflect.DeepEqual(s.GetResources().GetTaskNodes(), []string{"n2", "n1", "n1", "n2"}) || s.GetResources().GetNtasks() != 4 || s.GetTaskOptions().GetDistribution() != "arbitrary" {
			t.Errorf("created %v", s)
		}
		for words, want := range map[string]string{
			"-n5 x": "SLURM_HOSTFILE names the nodes of 4 tasks; --ntasks asks for 5",
		} {
			if got := try(t, quick(t), append([]string{"SLURM_HOSTFILE=" + hosts}, inside...), strings.Fields(words)...); got.Code != 1 || !strings.Contains(got.Stderr, want) {
				t.Errorf("%s: %+v", words, got)
			}
		}
		if got := try(t, quick(t), []string{"SLURM_HOSTFILE=" + hosts}, "x"); got.Code != 1 || !strings.Contains(got.Stderr, "Only a step in an allocation") {
			t.Errorf("outside: %+v", got)
		}
		named := quick(t) // who names nodes does not mean the file
		if got := try(t, named, append([]string{"SLURM_HOSTFILE=" + hosts}, inside...), "-w", "n1", "x"); got.Code != 0 || len(named.Created[0].GetSpec().GetResources().GetTaskNodes()) != 0 {
			t.Errorf("%+v", got)
		}
	})
}

func TestEachRankRunsItsProgram(t *testing.T) {
	config := filepath.Join(t.TempDir(), "silly.conf")
	if err := os.WriteFile(config, []byte("# who does what\n1 echo task:%t 'two words' \\\n  more\n* hostname\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		for where, environ := range map[string][]string{"inside": inside, "outside": {"PATH=/bin"}} {
			c := quick(t)
			c.OnSubmit = func(j *apiv1.Job) {
				c.Shares[j.GetId()] = c.Shares[6]
				c.StepList = []*apiv1.Step{{JobId: j.GetId(), Attempt: 1, State: apiv1.StepState_STEP_STATE_RUNNING, NumTasks: 2}}
				j.Status.State, j.Status.Attempt = apiv1.JobState_JOB_STATE_RUNNING, 1
			}
			if got := try(t, c, environ, "-n4", "--multi-prog", config); got.Code != 0 {
				t.Fatalf("%s: %+v", where, got)
			}
			var name string
			var options *apiv1.TaskOptions
			if where == "inside" {
				name, options = c.Created[0].GetSpec().GetName(), c.Created[0].GetSpec().GetTaskOptions()
			} else {
				name, options = c.Submitted[0].GetSpec().GetName(), c.Submitted[0].GetSpec().GetTaskOptions()
			}
			p := options.GetPrograms()
			if name != "silly.conf" || len(p) != 2 || p[0].GetRanks() != "1" || p[1].GetRanks() != "0,2-3" ||
				!reflect.DeepEqual(p[0].GetArgs(), []string{"echo", "task:%t", "two words", "more"}) || !reflect.DeepEqual(p[1].GetArgs(), []string{"hostname"}) {
				t.Errorf("%s: %q, programs %v", where, name, p)
			}
		}
	})
}

func TestPartsOfAStep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := quick(t)
		if got := try(t, c, inside, "-n1", "-l", "a", "-x", ":", "-n2", "-c2", "--gpus-per-task=1", "b", ":", "c"); got.Code != 0 {
			t.Fatalf("%+v", got)
		}
		s := c.Created[0].GetSpec()
		if !reflect.DeepEqual(s.GetArgs(), []string{"a", "-x"}) || s.GetResources().GetNtasks() != 1 || len(s.GetParts()) != 2 {
			t.Fatalf("created %v", s)
		}
		b, last := s.GetParts()[0], s.GetParts()[1]
		if !reflect.DeepEqual(b.GetArgs(), []string{"b"}) || b.GetResources().GetNtasks() != 2 || b.GetResources().GetCpusPerTask() != 2 ||
			b.GetResources().GetGpusPerTask() != 1 || !b.GetTaskOptions().GetBindGpusPerTask() || last.GetResources().GetNtasks() != 2 {
			t.Errorf("parts %v", s.GetParts())
		}
		for words, want := range map[string]string{
			"a : -o f b":  "--output is for the whole step: give it before the first program, not in part 2",
			"a : -n2":     "No command given to execute in part 2",
			"a : --bogus": "unrecognized option '--bogus'",
		} {
			if got := try(t, quick(t), inside, strings.Fields(words)...); got.Code == 0 || !strings.Contains(got.Stderr, want) {
				t.Errorf("%s: %+v", words, got)
			}
		}
		if got := try(t, quick(t), nil, "a", ":", "b"); got.Code != 1 || !strings.Contains(got.Stderr, "Heterogeneous jobs are not supported yet") {
			t.Errorf("outside: %+v", got)
		}
	})
}

func TestOneFileForAllTasksIsWrittenBySrun(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		c := twoAgents(t,
			&slurmtest.Agent{Pieces: []*nodev1.ReadOutputResponse{slurmtest.Out(0, 0, "a\n"), slurmtest.Err(0, 0, "oops\n")}, Exits: slurmtest.Ends(0, 1, 7, 0)},
			&slurmtest.Agent{Pieces: []*nodev1.ReadOutputResponse{slurmtest.Out(1, 0, "b")}, Exits: slurmtest.Ends(1, 1, 0, 0)})
		got := try(t, c, append([]string{"SLURM_RESTART_COUNT=2"}, inside...), "-l", "-o", dir+"/out-%j-%4s-%x-%r-%%", "-e", dir+"/err.%J", "-D", "/", "x")
		if got.Code != 7 || got.Stdout != "" || got.Stderr != "srun: error: n1: task 0: Exited with exit code 7\n" {
			t.Errorf("%+v", got)
		}
		out, err := os.ReadFile(dir + "/out-6-0000-run1-2-%")
		if text := string(out); err != nil || len(text) != 10 || !strings.Contains(text, "0: a\n") || !strings.Contains(text, "1: b\n") {
			t.Errorf("%q, %v", out, err)
		}
		if errs, err := os.ReadFile(dir + "/err.6.0"); err != nil || string(errs) != "0: oops\n" {
			t.Errorf("%q, %v", errs, err)
		}
		if s := c.Created[0].GetSpec(); s.GetStdoutPath() != "" || s.GetStderrPath() != "" {
			t.Errorf("created %v", s)
		}
		for _, mode := range []string{"append", "truncate"} {
			c = twoAgents(t, &slurmtest.Agent{Pieces: []*nodev1.ReadOutputResponse{slurmtest.Out(0, 0, "new\n"), slurmtest.Err(0, 0, "too\n")}, Exits: slurmtest.Ends(0, 1, 0, 0)}, &slurmtest.Agent{Exits: slurmtest.Ends(1, 1, 0, 0)})
			if err := os.WriteFile(dir+"/both", []byte("old\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			if got := try(t, c, inside, "-o", dir+"/both", "--open-mode="+mode, "x"); got.Code != 0 {
				t.Errorf("%+v", got)
			}
			want := "new\ntoo\n"
			if mode == "append" {
				want = "old\n" + want
			}
			if text, err := os.ReadFile(dir + "/both"); err != nil || string(text) != want {
				t.Errorf("%s: %q, %v", mode, text, err)
			}
		}
	})
}

func TestAFileThatCannotBeWrittenEndsTheStep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := quick(t)
		got := try(t, c, inside, "-o", "/no/such/place", "x")
		if got.Code != 1 || !strings.Contains(got.Stderr, "srun: error: Could not open stdout file: open /no/such/place: no such file or directory\n") {
			t.Errorf("%+v", got)
		}
		if len(c.Cancelled) != 1 || c.Cancelled[0].Step == nil {
			t.Errorf("cancelled %v", c.Cancelled)
		}
	})
}

func TestAFileIsReadForAllTasks(t *testing.T) {
	input := filepath.Join(t.TempDir(), "in")
	if err := os.WriteFile(input, []byte("hello"), 0o600); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		one := &slurmtest.Agent{Release: release, Wrote: make(chan struct{}), Exits: slurmtest.Ends(0, 1, 0, 0)}
		two := &slurmtest.Agent{Release: release, Wrote: make(chan struct{}), Exits: slurmtest.Ends(1, 1, 0, 0)}
		go func() { <-one.Wrote; <-two.Wrote; close(release) }()
		if got := try(t, twoAgents(t, one, two), inside, "-i", input, "cat"); got.Code != 0 {
			t.Errorf("%+v", got)
		}
		for _, agent := range []*slurmtest.Agent{one, two} {
			if text, end := agent.Got(); text != "hello" || !end {
				t.Errorf("a task read %q, end %v", text, end)
			}
		}
	})
}

func TestProgramsAroundTheStepRunOnThisHost(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"before", "after"} {
		script := "#!/bin/sh\necho " + name + " $SLURM_JOB_ID ${SLURM_STEP_ID-none} $* >>" + dir + "/log\n"
		if err := os.WriteFile(filepath.Join(dir, name), []byte(script), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	c := quick(t)
	s, _, stderr := c.Session(t, "srun", "--prolog", dir+"/before", "--epilog="+dir+"/after", "x", "arg")
	s.Environ, s.Dir = inside, dir
	if code := Run(t.Context(), s); code != 0 || stderr.String() != "" {
		t.Errorf("code %d, %s", code, stderr)
	}
	if log, err := os.ReadFile(dir + "/log"); err != nil || string(log) != "before 6 none x arg\nafter 6 0 x arg\n" {
		t.Errorf("%q, %v", log, err)
	}
	s, _, stderr = quick(t).Session(t, "srun", "--prolog", dir+"/missing", "x")
	s.Environ, s.Dir = inside, dir
	if code := Run(t.Context(), s); code != 0 || !strings.Contains(stderr.String(), "--prolog="+dir+"/missing: ") {
		t.Errorf("code %d, %s", code, stderr)
	}
}

func TestATerminalShowsTaskZeroAloneAndIsPutBack(t *testing.T) {
	keyboard, tty := slurmtest.Pty(t, 30, 100)
	before := slurmtest.Mode(t, tty)
	release := make(chan struct{})
	one := &slurmtest.Agent{
		Pieces:  []*nodev1.ReadOutputResponse{slurmtest.Out(0, 0, "prompt$ ")},
		Release: release, Exits: slurmtest.Ends(0, 1, 130, 0),
	}
	two := &slurmtest.Agent{Pieces: []*nodev1.ReadOutputResponse{slurmtest.Out(1, 0, "hidden")}, Release: release, Exits: slurmtest.Ends(1, 1, 0, 0)}
	c := twoAgents(t, one, two)
	s, stdout, stderr := c.Session(t, "srun", "--pty", "-l", "bash")
	s.Environ, s.Stdin = inside, tty
	winch := make(chan os.Signal, 1)
	s.Signals = func(which ...os.Signal) (<-chan os.Signal, func()) {
		if which[0] == syscall.SIGWINCH {
			return winch, func() {}
		}
		return make(chan os.Signal), func() {}
	}
	code := make(chan int)
	go func() { code <- Run(t.Context(), s) }()
	until(t, "the terminal is raw", func() bool { return slurmtest.Mode(t, tty) != before })
	if _, err := keyboard.WriteString("ls\x03\r"); err != nil {
		t.Fatal(err)
	}
	until(t, "keys arrive unchanged", func() bool { text, _ := one.Got(); return text == "ls\x03\r" })
	slurmtest.Resize(t, tty, 50, 132)
	winch <- syscall.SIGWINCH
	until(t, "the new size arrives", func() bool { return strings.HasSuffix(strings.Join(one.Resized(), " "), "50x132") })
	close(release)
	if got := <-code; got != 130 || stdout.String() != "prompt$ " || !strings.Contains(stderr.String(), "task 0: Exited with exit code 130\r\n") {
		t.Errorf("code %d, %q, %q", got, stdout, stderr)
	}
	if slurmtest.Mode(t, tty) != before {
		t.Error("the terminal was not put back")
	}
	if text, _ := two.Got(); text != "" {
		t.Errorf("task 1 was sent %q", text)
	}
	if o := c.Created[0].GetSpec().GetTaskOptions(); !o.GetPty() || o.GetPtyRows() != 30 || o.GetPtyColumns() != 100 || o.GetStdinAll() || o.GetStdinRank() != 0 || o.GetLabel() {
		t.Errorf("task options %v", o)
	}
}

// until waits for a condition.
func until(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !holds(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("it never came that %s", what)
		}
	}
}

func TestAJobOfItsOwnIsGivenUpWhenItsTimeIsOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := quick(t)
		got := try(t, c, nil, "-I5", "-Q", "x")
		if got.Code != 1 || got.Stderr != "srun: error: Unable to allocate resources: Requested nodes are busy\n" || len(c.Cancelled) != 1 {
			t.Errorf("%+v, cancelled %v", got, c.Cancelled)
		}
	})
}

func TestTestOnlyRunsNothing(t *testing.T) {
	c := quick(t)
	if got := try(t, c, nil, "--test-only", "-N2", "x"); got.Code != 0 || len(c.Submitted) != 0 || got.Stderr != "srun: the request is valid; no start time is estimated yet\n" {
		t.Errorf("%+v", got)
	}
}
