package sstat

import (
	"strings"
	"testing"

	"github.com/muster-hpc/muster/cmd/internal/slurm/slurmtest"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	"github.com/muster-hpc/muster/proto/muster/node/v1/nodev1connect"
)

func cluster(t *testing.T, second *slurmtest.Agent) *slurmtest.Cluster {
	c := slurmtest.Recorded(t)
	c.StepList = append(c.StepList, &apiv1.Step{JobId: 6, Id: 0, Attempt: 1, State: apiv1.StepState_STEP_STATE_RUNNING, NodeList: "n[1-2]", NumTasks: 2})
	c.Nodes = map[string]nodev1connect.NodeServiceHandler{
		"n1:1": &slurmtest.Agent{Usage: []*nodev1.TaskUsage{
			{StepId: 0, Rank: 0, Pid: 10, Pids: []uint32{10, 11}, UserMs: 61_000, SystemMs: 1000, MaxRssKb: 2048, VirtualKb: 4000, ReadBytes: 100, MajorFaults: 3},
			{StepId: 4294967291, Rank: 0, Pid: 9, Pids: []uint32{9}, UserMs: 5, MaxRssKb: 100},
		}},
		"n2:1": second,
	}
	return c
}

var other = []*nodev1.TaskUsage{{StepId: 0, Rank: 1, Pid: 20, Pids: []uint32{20}, UserMs: 4000, MaxRssKb: 3001, VirtualKb: 4000, WriteBytes: 1 << 20, MajorFaults: 1}}

func TestFiguresOfAStepOverItsNodes(t *testing.T) {
	c := cluster(t, &slurmtest.Agent{Usage: other})
	for _, test := range []struct{ words, want string }{
		{"-P -j 6 -o jobid,maxrss,maxrssnode,maxrsstask,averss,avecpu,mincpu,mincpunode,mincputask,ntasks",
			"JobID|MaxRSS|MaxRSSNode|MaxRSSTask|AveRSS|AveCPU|MinCPU|MinCPUNode|MinCPUTask|NTasks\n6.0|3001K|n2|1|2585088|00:00:33|00:00:04|n2|1|2\n"},
		{"-nPj6.0 --format=maxdiskread,maxdiskreadnode,maxdiskwrite,avediskwrite,maxpages,avepages,avevmsize,avecpufreq", "100|n1|1M|512K|3|2|4000K|\n"},
		{"-n -p --noconvert -j 6.0 -o maxrss,MaxDiskW", "3073024|1048576|\n"},
		{"-naP -j 6 -o jobid,nodelist,pids", "6.0|n[1-2]|10,11,20\n6.batch|n1|9\n"},
		{"-niP -j 6", "6.0|n1|10,11\n6.0|n2|20\n"},
		{"-n -j 6.batch -o jobid%9,ntasks", "  6.batch        1 \n"},
	} {
		got := c.Run(t, Run, append([]string{"sstat"}, strings.Fields(test.words)...)...)
		if got.Code != 0 || got.Stdout != test.want || got.Stderr != "" {
			t.Errorf("%s: %+v", test.words, got)
		}
	}
}

func TestANodeThatDoesNotAnswerIsSaidAndNotGuessed(t *testing.T) {
	got := cluster(t, &slurmtest.Agent{}).Run(t, Run, "sstat", "-nP", "-j", "6.0", "-o", "jobid,maxrss,maxrssnode")
	if got.Code != 1 || got.Stdout != "6.0|2M|n1\n" || !strings.Contains(got.Stderr, "n2: step 6.0") {
		t.Errorf("%+v", got)
	}
}

func TestWhatCannotBeShown(t *testing.T) {
	c := cluster(t, &slurmtest.Agent{Usage: other})
	for words, want := range map[string]string{
		"":                   "You didn't give me any jobs to stat",
		"-j 6 -o nosuch":     "Invalid field requested: \"nosuch\"",
		"-j 7":               "no steps running for job 7",
		"-j 6.5":             "Invalid job id specified",
		"-j 6 -o jobid%x":    "Invalid width of a field",
		"-j 6 --bogus":       "unrecognized option '--bogus'",
		"-j 6 extra operand": "unknown argument extra",
	} {
		if got := c.Run(t, Run, append([]string{"sstat"}, strings.Fields(words)...)...); got.Code != 1 || !strings.Contains(got.Stderr, want) {
			t.Errorf("%q: %+v", words, got)
		}
	}
}
