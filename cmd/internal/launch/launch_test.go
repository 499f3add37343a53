package launch_test

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/muster-hpc/muster/cmd/internal/launch"
	"github.com/muster-hpc/muster/cmd/internal/slurm/slurmtest"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	"github.com/muster-hpc/muster/proto/muster/node/v1/nodev1connect"
)

// cluster is step 6.0 with two tasks on each of the agents.
func cluster(t *testing.T, agents ...*slurmtest.Agent) *slurmtest.Cluster {
	c := slurmtest.Recorded(t)
	c.Nodes = map[string]nodev1connect.NodeServiceHandler{}
	var shares []*apiv1.NodeShare
	for i, agent := range agents {
		name := string(rune('1' + i))
		c.Nodes["a"+name] = agent
		shares = append(shares, &apiv1.NodeShare{Node: "n" + name, AgentAddress: "a" + name, Tasks: 2})
	}
	c.Shares[6] = shares
	c.StepList = []*apiv1.Step{{JobId: 6, Id: 0, Attempt: 1, State: apiv1.StepState_STEP_STATE_RUNNING, NumTasks: uint32(2 * len(agents))}}
	return c
}

// attach attaches to step 6.0 and returns everything.
func attach(t *testing.T, c *slurmtest.Cluster, change func(*launch.Options)) (out, errs string, outcome launch.Outcome, err error) {
	t.Helper()
	stdout, stderr := &slurmtest.Buffer{}, &slurmtest.Buffer{}
	o := launch.Options{Program: "srun", Job: 6, Attempt: 1, Stdout: stdout, Stderr: stderr, StdinRank: -1}
	if change != nil {
		change(&o)
	}
	outcome, err = launch.Attach(t.Context(), c, o)
	return stdout.String(), stderr.String(), outcome, err
}

func TestOutputAndHighestExitCodeOfAllNodes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		one := &slurmtest.Agent{Pieces: []*nodev1.ReadOutputResponse{slurmtest.Out(0, 0, "a\n")}, Exits: slurmtest.Ends(0, 2, 0, 0)}
		two := &slurmtest.Agent{Pieces: []*nodev1.ReadOutputResponse{slurmtest.Err(3, 0, "oops\n")}, Exits: slurmtest.Ends(2, 2, 7, 0)}
		out, errs, outcome, err := attach(t, cluster(t, one, two), nil)
		if err != nil || out != "a\n" || outcome.ExitCode != 7 {
			t.Errorf("out %q, outcome %+v, %v", out, outcome, err)
		}
		if errs != "oops\nsrun: error: n2: tasks 2-3: Exited with exit code 7\n" {
			t.Errorf("stderr %q", errs)
		}
	})
}

func TestEveryLineIsLabelledAndAPartialOneEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		agent := &slurmtest.Agent{Pieces: []*nodev1.ReadOutputResponse{
			slurmtest.Out(0, 0, "one\ntw"), slurmtest.Out(1, 0, "x\n"), slurmtest.Out(0, 6, "o\nend"), slurmtest.End(0, 11),
			slurmtest.Err(1, 0, "no newline"),
		}, Exits: slurmtest.Ends(0, 2, 0, 0)}
		out, errs, _, err := attach(t, cluster(t, agent), func(o *launch.Options) { o.Label = true })
		if err != nil || out != "0: one\n1: x\n0: two\n0: end\n" || errs != "1: no newline\n" {
			t.Errorf("out %q, stderr %q, %v", out, errs, err)
		}
	})
}

func TestABrokenConnectionLosesAndRepeatsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		agent := &slurmtest.Agent{NotYet: 2, BreakAfter: []int{-1, -1, 1, 2, 3}, Pieces: []*nodev1.ReadOutputResponse{
			slurmtest.Out(0, 0, "aaa"), slurmtest.Out(0, 3, "bbb"), slurmtest.Out(0, 2, "abbbccc"), slurmtest.Out(1, 0, "ddd"),
		}, Exits: slurmtest.Ends(0, 2, 0, 0)}
		out, errs, outcome, err := attach(t, cluster(t, agent), nil)
		if err != nil || out != "aaabbbcccddd" || errs != "" || outcome.ExitCode != 0 {
			t.Errorf("out %q, stderr %q, %+v, %v", out, errs, outcome, err)
		}
		if last := agent.Reads[len(agent.Reads)-1]; len(last.GetOffsets()) == 0 {
			t.Error("the last connection began at 0")
		}
	})
}

func TestSignalsAndMissingPrograms(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		agent := &slurmtest.Agent{Exits: []*apiv1.TaskExit{
			{FirstRank: 0, Count: 1, Code: 2, LaunchError: "execve(): /no/such: No such file or directory"},
			{FirstRank: 1, Count: 1, Signal: 9},
		}}
		_, errs, outcome, _ := attach(t, cluster(t, agent), nil)
		want := "srun: error: n1: task 0: Exited with exit code 2\nsrun: error: n1: task 1: Killed\n"
		if errs != want || outcome.ExitCode != 137 {
			t.Errorf("stderr %q, code %d", errs, outcome.ExitCode)
		}
	})
}

func TestTasksThatCouldNotBePreparedSayWhyAndAreNoSignal(t *testing.T) {
	const why = "The standard output /no/x-0 cannot be opened: No such file or directory."
	for name, test := range map[string]struct {
		sentence, want string
	}{
		"the record does not show the end": {"", "srun: error: n1: " + why + "\n"},
		"the record says the same":         {why, "srun: error: n1: " + why + "\n"},
		"the record says more":             {"node n2 failed", "srun: error: n1: " + why + "\nsrun: error: step 6.0: node n2 failed\n"},
	} {
		synctest.Test(t, func(t *testing.T) {
			c := cluster(t, &slurmtest.Agent{Exits: []*apiv1.TaskExit{{FirstRank: 0, Count: 2, Signal: 53, LaunchError: why}}})
			if test.sentence != "" {
				c.StepList[0].State, c.StepList[0].EndSentence = apiv1.StepState_STEP_STATE_FAILED, test.sentence
			}
			_, errs, outcome, err := attach(t, c, nil)
			if err != nil || errs != test.want || outcome.ExitCode != 1 {
				t.Errorf("%s: stderr %q, code %d, %v", name, errs, outcome.ExitCode, err)
			}
		})
	}
	if code := launch.ExitCode(&apiv1.TaskExit{Signal: 53}); code != 128+53 {
		t.Errorf("a task that a signal 53 ended gives %d", code)
	}
}

func TestStdinGoesToAllOrToOne(t *testing.T) {
	for _, test := range []struct {
		rank     int
		one, two string
	}{{-1, "hello", "hello"}, {1, "hello", ""}, {2, "", "hello"}} {
		synctest.Test(t, func(t *testing.T) {
			release := make(chan struct{})
			one := &slurmtest.Agent{Release: release, Exits: slurmtest.Ends(0, 2, 0, 0), Wrote: make(chan struct{})}
			two := &slurmtest.Agent{Release: release, Exits: slurmtest.Ends(2, 2, 0, 0), Wrote: make(chan struct{})}
			go func() {
				for _, a := range []*slurmtest.Agent{one, two} {
					if test.rank < 0 || (test.rank >= 2) == (a == two) {
						<-a.Wrote
					}
				}
				close(release)
			}()
			_, _, _, err := attach(t, cluster(t, one, two), func(o *launch.Options) { o.Stdin, o.StdinRank = strings.NewReader("hello"), test.rank })
			got1, _ := one.Got()
			got2, _ := two.Got()
			if err != nil || got1 != test.one || got2 != test.two {
				t.Errorf("rank %d: %q and %q, %v", test.rank, got1, got2, err)
			}
		})
	}
}

func TestASilentAgentIsNotWaitedForAfterTheStepsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := cluster(t, &slurmtest.Agent{Exits: slurmtest.Ends(0, 2, 0, 0)}, &slurmtest.Agent{Release: make(chan struct{})})
		c.StepList[0].State = apiv1.StepState_STEP_STATE_NODE_FAIL
		c.StepList[0].EndSentence = "node n2 failed"
		c.StepList[0].Exits = []*apiv1.TaskExit{{FirstRank: 0, Count: 4, Signal: 15}}
		_, errs, outcome, err := attach(t, c, nil)
		if err != nil || outcome.ExitCode != 143 || !strings.Contains(errs, "n2: tasks 2-3: Terminated\n") || !strings.HasSuffix(errs, "step 6.0: node n2 failed\n") {
			t.Errorf("stderr %q, %+v, %v", errs, outcome, err)
		}
	})
}

// slow takes a minute for every piece.
type slow struct{ slurmtest.Buffer }

func (s *slow) Write(p []byte) (int, error) {
	time.Sleep(time.Minute) // virtual
	return s.Buffer.Write(p)
}

func TestASlowReaderOfTheOutputLosesNothingAfterTheStepsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := cluster(t, &slurmtest.Agent{Pieces: []*nodev1.ReadOutputResponse{
			slurmtest.Out(0, 0, "aaa"), slurmtest.Out(0, 3, "bbb"), slurmtest.Out(1, 0, "ccc"),
		}, Exits: slurmtest.Ends(0, 2, 0, 0)})
		c.StepList[0].State, c.StepList[0].StartTime = apiv1.StepState_STEP_STATE_COMPLETED, timestamppb.Now()
		out := &slow{}
		_, errs, outcome, err := attach(t, c, func(o *launch.Options) { o.Stdout = out })
		if err != nil || out.String() != "aaabbbccc" || errs != "" || outcome.ExitCode != 0 || outcome.Cut {
			t.Errorf("out %q, stderr %q, %+v, %v", out.String(), errs, outcome, err)
		}
	})
}

func TestOutputThatIsMissingIsSaidAndIsNoSuccess(t *testing.T) {
	for name, agent := range map[string]*slurmtest.Agent{
		"silent":     {Release: make(chan struct{})},
		"unknown":    {NotYet: 1 << 30},
		"with a gap": {Pieces: []*nodev1.ReadOutputResponse{slurmtest.Out(0, 5, "tail")}, Exits: slurmtest.Ends(0, 2, 0, 0)},
	} {
		synctest.Test(t, func(t *testing.T) {
			if agent.Release != nil {
				agent.Release = make(chan struct{}) // of this bubble
			}
			c := cluster(t, agent)
			c.StepList[0].State, c.StepList[0].StartTime = apiv1.StepState_STEP_STATE_COMPLETED, timestamppb.Now()
			c.StepList[0].Exits = []*apiv1.TaskExit{{FirstRank: 0, Count: 2}}
			_, errs, outcome, err := attach(t, c, nil)
			if err != nil || outcome.ExitCode != 1 || !outcome.Cut || !strings.Contains(errs, "missing") {
				t.Errorf("%s: stderr %q, %+v, %v", name, errs, outcome, err)
			}
		})
	}
}

func TestTheFirstEndIsThatOfOneTask(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		c := cluster(t, &slurmtest.Agent{Pieces: []*nodev1.ReadOutputResponse{
			{Ended: []*apiv1.TaskExit{{FirstRank: 1, Count: 1, Code: 1}}},
		}, Release: release, Exits: slurmtest.Ends(0, 2, 0, 0)})
		calls := 0
		_, _, _, err := attach(t, c, func(o *launch.Options) { o.FirstEnd = func() { calls++; close(release) } })
		if err != nil || calls != 1 {
			t.Errorf("%d calls, %v", calls, err)
		}
	})
}

func TestAStreamThatGoesToAFileIsNotPrinted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rank := uint32(1)
		agent := &slurmtest.Agent{Pieces: []*nodev1.ReadOutputResponse{
			slurmtest.Out(0, 0, "file"), slurmtest.Err(0, 0, "zero"), slurmtest.Err(1, 0, "one"),
		}, Exits: slurmtest.Ends(0, 2, 0, 0)}
		out, errs, _, _ := attach(t, cluster(t, agent), func(o *launch.Options) { o.NoStdout, o.OnlyStderr = true, &rank })
		if out != "" || errs != "one" {
			t.Errorf("out %q, stderr %q", out, errs)
		}
		skipped := 0
		for _, o := range agent.Reads[0].GetOffsets() {
			if o.GetOffset() > 1<<60 {
				skipped++
			}
		}
		if skipped != 3 {
			t.Errorf("%d streams are skipped, want 3: %v", skipped, agent.Reads[0])
		}
	})
}

type closedPipe struct{}

func (closedPipe) Write([]byte) (int, error) { return 0, io.ErrClosedPipe }

func TestAClosedOutputEndsTheAttachmentWithAnError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		agent := &slurmtest.Agent{Pieces: []*nodev1.ReadOutputResponse{slurmtest.Out(0, 0, "a\n")}, Release: make(chan struct{})}
		_, _, _, err := attach(t, cluster(t, agent), func(o *launch.Options) { o.Stdout = closedPipe{} })
		if !errors.Is(err, launch.ErrOutput) || !errors.Is(err, io.ErrClosedPipe) {
			t.Errorf("got %v", err)
		}
	})
}

func TestTheContextEndsAnAttachment(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		c := cluster(t, &slurmtest.Agent{Release: make(chan struct{})})
		go func() { synctest.Wait(); cancel() }()
		_, err := launch.Attach(ctx, c, launch.Options{Program: "srun", Job: 6, Stdout: io.Discard, Stderr: io.Discard})
		if !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
	})
}
