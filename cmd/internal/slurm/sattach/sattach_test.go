package sattach

import (
	"os"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"

	"github.com/muster-hpc/muster/cmd/internal/slurm/slurmtest"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	"github.com/muster-hpc/muster/proto/muster/node/v1/nodev1connect"
)

// cluster has step 6.0 with a task on each of two nodes.
func cluster(t *testing.T, task *apiv1.TaskOptions, release <-chan struct{}) (*slurmtest.Cluster, [2]*slurmtest.Agent) {
	c := slurmtest.Recorded(t)
	c.StepList = append(c.StepList, &apiv1.Step{
		JobId: 6, Id: 0, Attempt: 1, State: apiv1.StepState_STEP_STATE_RUNNING, NodeList: "n[1-2]", NumTasks: 2, Spec: &apiv1.StepSpec{TaskOptions: task},
	})
	agents := [2]*slurmtest.Agent{
		{Pieces: []*nodev1.ReadOutputResponse{slurmtest.Out(0, 0, "zero\n"), slurmtest.Err(0, 0, "err\n")}, Exits: slurmtest.Ends(0, 1, 0, 0), Release: release},
		{Pieces: []*nodev1.ReadOutputResponse{slurmtest.Out(1, 0, "one\n")}, Exits: slurmtest.Ends(1, 1, 3, 0), Release: release},
	}
	c.Nodes = map[string]nodev1connect.NodeServiceHandler{"n1:1": agents[0], "n2:1": agents[1]}
	return c, agents
}

func TestOutputOfAStepIsShownAndFiltered(t *testing.T) {
	for _, test := range []struct {
		words  string
		stdout []string
		stderr string
	}{
		{"6.0", []string{"zero\n", "one\n"}, "err\n"},
		{"-l 6.0", []string{"0: zero\n", "1: one\n"}, "0: err\n"},
		{"--output-filter 1 --error-filter=1 6.0", []string{"one\n"}, ""},
		{"6.0 --output-filter=0", []string{"zero\n"}, "err\n"},
	} {
		synctest.Test(t, func(t *testing.T) {
			c, _ := cluster(t, nil, nil)
			got := c.Run(t, Run, append([]string{"sattach"}, strings.Fields(test.words)...)...)
			if got.Code != 3 || !strings.Contains(got.Stderr, test.stderr) || test.stderr == "" && strings.Contains(got.Stderr, "err\n") {
				t.Errorf("%s: %+v", test.words, got)
			}
			length := 0
			for _, want := range test.stdout {
				length += len(want)
				if !strings.Contains(got.Stdout, want) {
					t.Errorf("%s: %q lacks %q", test.words, got.Stdout, want)
				}
			}
			if len(got.Stdout) != length {
				t.Errorf("%s: %q", test.words, got.Stdout)
			}
		})
	}
}

func TestInputFollowsWhatOthersSentAndDoesNotEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		c, agents := cluster(t, &apiv1.TaskOptions{StdinAll: true, StdinRank: -1}, release)
		agents[0].Input, agents[1].Input = []byte("before "), []byte("before ")
		s, _, stderr := c.Session(t, "sattach", "6.0")
		s.Stdin = strings.NewReader("mine")
		go func() { synctest.Wait(); close(release) }()
		if code := Run(t.Context(), s); code != 3 {
			t.Errorf("exit code %d, %s", code, stderr)
		}
		for i, a := range agents {
			if got, ended := a.Got(); got != "before mine" || ended {
				t.Errorf("node %d got %q, ended %v", i+1, got, ended)
			}
		}
	})
}

func TestCtrlCLeavesTheStepAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		defer close(release)
		c, _ := cluster(t, nil, release)
		s, _, _ := c.Session(t, "sattach", "6.0")
		signals := make(chan os.Signal, 1)
		s.Signals = func(...os.Signal) (<-chan os.Signal, func()) { return signals, func() {} }
		go func() { synctest.Wait(); signals <- syscall.SIGINT }()
		if code := Run(t.Context(), s); code != 130 || len(c.Cancelled) != 0 {
			t.Errorf("exit code %d, %v", code, c.Cancelled)
		}
	})
}

func TestTheLayoutIsShown(t *testing.T) {
	c, agents := cluster(t, nil, nil)
	got := c.Run(t, Run, "sattach", "--layout", "6.0")
	want := "Job step layout:\n\t2 tasks, 2 nodes (n[1-2])\n\n\tNode 0 (n1), 1 task(s): 0\n\tNode 1 (n2), 1 task(s): 1\n"
	if got.Code != 0 || got.Stdout != want || len(agents[0].Reads) != 0 {
		t.Errorf("%+v", got)
	}
}

func TestWordsThatAreRefused(t *testing.T) {
	for words, want := range map[string]string{
		"":                      "Exactly one step must be named",
		"6":                     "is not JOB.STEP",
		"6.x":                   "is not JOB.STEP",
		"6.7":                   "Could not get job step info",
		"--output-filter x 6.0": "--output-filter=x is not the number of a task",
		"--error-filter 5 6.0":  "has no task 5: there are 2, from 0",
		"--input-filter 1 6.0":  "task 1 of step 6.0 does not read stdin",
		"--pty 6.0":             "step 6.0 has no terminal",
		"--bogus 6.0":           "unrecognized option '--bogus'",
	} {
		c, _ := cluster(t, &apiv1.TaskOptions{}, nil)
		if got := c.Run(t, Run, append([]string{"sattach"}, strings.Fields(words)...)...); got.Code == 0 || !strings.Contains(got.Stderr, want) {
			t.Errorf("%q: %+v", words, got)
		}
	}
}
