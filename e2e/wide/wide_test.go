package wide

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/muster-hpc/muster/e2e/cluster"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// size is over how many nodes srun and a batch script launch.
func size() (srun, batch int) {
	if cluster.Campaign() {
		return 1000, 500
	}
	return 200, 100
}

func TestAStepOverManyNodesRunsOnceOnEachAndEveryExitCodeIsKnown(t *testing.T) {
	nodes, batch := size()
	c := cluster.Up(t, "--nodes", strconv.Itoa(nodes), "--agents-per-process", "100", "--cpus", "8", "--timing", "production")
	t.Run("srun", func(t *testing.T) { srun(t, c, nodes) })
	t.Run("a batch script that calls srun", func(t *testing.T) { script(t, c, batch) })
}

// srun gives every seventh task another exit code.
func srun(t *testing.T, c *cluster.Cluster, nodes int) {
	n := strconv.Itoa(nodes)
	out := c.Run(c.Dir, "srun", "-Q", "-J", "wide", "-N", n, "-n", n, "sh", "-c", `echo $SLURM_PROCID $SLURMD_NODENAME; exit $((SLURM_PROCID % 7))`)
	if out.Code != 6 {
		t.Errorf("exit code %d, not the highest of the tasks': %.2000s", out.Code, out.Stderr)
	}
	ranks, hosts := map[string]int{}, map[string]int{}
	for line := range strings.Lines(out.Stdout) {
		rank, host, _ := strings.Cut(strings.TrimSpace(line), " ")
		ranks[rank]++
		hosts[host]++
	}
	for i := range nodes {
		if rank, host := strconv.Itoa(i), fmt.Sprintf("n%d", i+1); ranks[rank] != 1 || hosts[host] != 1 {
			t.Errorf("rank %s wrote %d lines, node %s %d", rank, ranks[rank], host, hosts[host])
		}
	}
	step := stepOf(t, c, "wide")
	codes := map[uint32]uint32{}
	for _, exit := range step.GetExits() {
		for i := range exit.Count {
			codes[exit.FirstRank+i] = exit.Code
		}
	}
	for rank := range uint32(nodes) {
		if code, known := codes[rank]; !known || code != rank%7 {
			t.Errorf("the exit code of rank %d: %d, known: %t", rank, code, known)
		}
	}
	begin, last := step.GetCreateTime().AsTime(), step.GetLastExecTime().AsTime()
	t.Logf("%d nodes: last exec %v after the step was made, start skew %v, exit of srun after %v", nodes, last.Sub(begin),
		time.Duration(step.GetStartSkewUs())*time.Microsecond, out.Took)
	if took := last.Sub(begin); cluster.Campaign() && took > cluster.Slack(15*time.Second) {
		t.Errorf("the last exec was %v after the step was made", took)
	}
}

func script(t *testing.T, c *cluster.Cluster, nodes int) {
	path := c.Script("wide.sh", "#!/bin/sh\nsrun sh -c 'echo $SLURM_PROCID' > "+c.Dir+"/ranks || exit 9\nexit 3\n")
	out := c.Run(c.Dir, "sbatch", "-W", "-J", "widescript", "-N", strconv.Itoa(nodes), "--ntasks-per-node=1", "-o", c.Dir+"/wide.out", path)
	if out.Code != 3 {
		t.Fatalf("exit code %d: %s", out.Code, out.Stderr)
	}
	text, err := os.ReadFile(c.Dir + "/ranks")
	if err != nil {
		t.Fatal(err)
	}
	ranks := map[string]bool{}
	for rank := range strings.FieldsSeq(string(text)) {
		ranks[rank] = true
	}
	if len(ranks) != nodes {
		t.Errorf("%d ranks of %d wrote", len(ranks), nodes)
	}
	step := stepOf(t, c, "widescript")
	t.Logf("%d nodes: last exec %v after the step was made, start skew %v, job over after %v", nodes,
		step.GetLastExecTime().AsTime().Sub(step.GetCreateTime().AsTime()), time.Duration(step.GetStartSkewUs())*time.Microsecond, out.Took)
}

// stepOf waits until the controllers know the end of step 0 of the job with this name.
func stepOf(t *testing.T, c *cluster.Cluster, name string) (step *apiv1.Step) {
	jobs := c.Client().Jobs()
	list, err := jobs.ListJobs(t.Context(), &apiv1.ListJobsRequest{Filter: &apiv1.JobFilter{Names: []string{name}}, Brief: true})
	if err != nil || len(list.Jobs) != 1 {
		t.Fatalf("jobs called %s: %v, %v", name, list, err)
	}
	c.Eventually(cluster.Slack(20*time.Second), "the step's end is known", func() bool {
		answer, err := jobs.GetStep(t.Context(), &apiv1.GetStepRequest{JobId: list.Jobs[0].Id, StepId: 0})
		if err != nil {
			t.Fatal(err)
		}
		step = answer.Step
		return step.GetEndTime() != nil
	})
	return step
}
