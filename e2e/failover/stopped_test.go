package failover

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/muster-hpc/muster/e2e/cluster"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// TestAStoppedAgentIsShownAsNotRespondingAndItsWorkGoesOn: every command marks the node, and nothing that runs there ends.
func TestAStoppedAgentIsShownAsNotRespondingAndItsWorkGoesOn(t *testing.T) {
	c := cluster.Up(t, "--controllers", "1", "--nodes", "2", "--lease", "2s")
	counts := c.Script("counts.sh", "#!/bin/sh\necho $$ >> pids\ni=0; while [ ! -e stop ]; do i=$((i+1)); echo $i > count.0; sleep 0.05; done\nexit 3\n")
	w := watched{c: c, id: c.Must(c.Dir, "sbatch", "--parsable", "-w", "n2", counts)}
	c.Eventually(cluster.Slack(20*time.Second), "the job counts", func() bool { return w.count(0) > 0 })
	c.Dev("pause", "n2")
	short := func(node string) string { return c.Must(c.Dir, "sinfo", "-h", "-n", node, "-o", "%t") }
	c.Eventually(cluster.Slack(15*time.Second), "sinfo marks the node", func() bool { return short("n2") == "mix*" })
	if got := short("n1"); got != "idle" {
		t.Errorf("n1, which answers, is %s", got)
	}
	if text := c.Must(c.Dir, "scontrol", "show", "node", "n2"); !strings.Contains(text, "State=MIXED+NOT_RESPONDING ") {
		t.Errorf("scontrol show node:\n%s", text)
	}
	for command, key := range map[string]string{"scontrol show node n2 --json": "nodes", "sinfo -n n2 --json": "sinfo"} {
		words := strings.Fields(command)
		var answer map[string]json.RawMessage
		if err := json.Unmarshal([]byte(c.Must(c.Dir, words[0], words[1:]...)), &answer); err != nil || !strings.Contains(string(answer[key]), `"NOT_RESPONDING"`) {
			t.Errorf("%s: %v: %s", command, err, answer[key])
		}
	}
	for _, line := range []string{"muster nodes n2", "muster show node n2"} {
		words := strings.Fields(line)
		if text := c.Must(c.Dir, words[0], words[1:]...); !strings.Contains(text, "UP (not responding, last heard ") {
			t.Errorf("%s:\n%s", line, text)
		}
	}
	before := w.count(0)
	c.Eventually(cluster.Slack(10*time.Second), "the job goes on", func() bool { return w.count(0) > before })
	c.Dev("resume", "n2")
	c.Eventually(cluster.Slack(15*time.Second), "the mark is gone", func() bool { return short("n2") == "mix" })
	if err := os.WriteFile(filepath.Join(c.Dir, "stop"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	c.WaitState(cluster.Slack(20*time.Second), w.id, "FAILED")
	pids, err := os.ReadFile(filepath.Join(c.Dir, "pids"))
	if state, exit := c.JobState(w.id); exit != "3:0" || err != nil || strings.Count(string(pids), "\n") != 1 {
		t.Errorf("the job is %s %s, and was run by %q, %v", state, exit, pids, err)
	}
}

// TestANodeThatStopsWhileItPreparesIsReplacedBeforeAnythingRan: a gang of three, one of whose agents stands still, gets the spare node;
// the failure is the node's, not the job's.
func TestANodeThatStopsWhileItPreparesIsReplacedBeforeAnythingRan(t *testing.T) {
	c := cluster.Up(t, "--controllers", "1", "--nodes", "4", "--prepare-timeout", "3s", "--lease", "20s")
	api := c.Client()
	script := c.Script("gang.sh", "#!/bin/sh\necho $SLURM_JOB_NODELIST >> begun\nsrun sh -c 'echo $SLURM_PROCID >> ran.$SLURMD_NODENAME'\n")
	look := func(id uint32) *apiv1.GetJobResponse {
		t.Helper()
		answer, err := api.Jobs().GetJob(context.Background(), &apiv1.GetJobRequest{JobId: id})
		if err != nil {
			t.Fatal(err)
		}
		return answer
	}
	node := func(name string) *apiv1.Node {
		t.Helper()
		answer, err := api.Cluster().ListNodes(context.Background(), &apiv1.ListNodesRequest{Names: []string{name}})
		if err != nil {
			t.Fatal(err)
		}
		return answer.Nodes[0]
	}
	stopped := node("n2")
	// The leader has just heard of it, and gives it work.
	c.Dev("pause", "n2")
	id := number(t, c.Must(c.Dir, "sbatch", "--parsable", "-N3", "--exclusive", script))
	var attempt *apiv1.Attempt
	c.Eventually(cluster.Slack(10*time.Second), "the gang is placed", func() bool {
		if answer := look(id); len(answer.Attempts) > 0 {
			attempt = answer.Attempts[0]
		}
		return attempt != nil
	})
	if nodes := nodesOf(attempt); !slices.Contains(nodes, stopped.Number) || len(nodes) != 3 || attempt.State != apiv1.AttemptState_ATTEMPT_STATE_PREPARING {
		t.Fatalf("the stopped node %d is not one that prepares: %v", stopped.Number, attempt)
	}
	c.Eventually(cluster.Slack(20*time.Second), "the gang has run", func() bool { return look(id).Job.Status.EndTime != nil })
	answer := look(id)
	attempt = answer.Attempts[0]
	if attempt.Fence.Placement != 2 || slices.Contains(nodesOf(attempt), stopped.Number) || len(attempt.Unprepared) != 1 || attempt.Unprepared[0].Node != stopped.Number ||
		!strings.Contains(attempt.Unprepared[0].Sentence, "node n2 did not get ready within 3s") {
		t.Errorf("the attempt is %v", attempt)
	}
	if failures := node("n2").LaunchFailures; failures != 1 {
		t.Errorf("%d launch failures were charged to the node", failures)
	}
	// The job is completing until the node that left has accounted for it.
	c.Dev("resume", "n2")
	c.Eventually(cluster.Slack(20*time.Second), "the job has its final state", func() bool { return look(id).Job.Status.State > apiv1.JobState_JOB_STATE_RUNNING })
	answer = look(id)
	if status := answer.Job.Status; status.State != apiv1.JobState_JOB_STATE_COMPLETED || status.Restarts != 0 || len(answer.Attempts) != 1 || status.LaunchFailures != 0 {
		t.Errorf("the job is %v", status)
	}
	if owners := node("n2").Owners; len(owners) != 0 {
		t.Errorf("the node that left has %v", owners)
	}
	ran, err := filepath.Glob(filepath.Join(c.Dir, "ran.*"))
	for i := range ran {
		ran[i] = filepath.Base(ran[i])
	}
	if err != nil || strings.Join(ran, " ") != "ran.n1 ran.n3 ran.n4" {
		t.Errorf("user processes ran as %v, %v", ran, err)
	}
	for _, name := range append(ran, "begun") {
		if text, err := os.ReadFile(filepath.Join(c.Dir, name)); err != nil || strings.Count(string(text), "\n") != 1 {
			t.Errorf("%s was written by other than one process: %q, %v", name, text, err)
		}
	}
}

func number(t *testing.T, id string) uint32 {
	t.Helper()
	n, err := strconv.ParseUint(id, 10, 32)
	if err != nil {
		t.Fatal(err)
	}
	return uint32(n)
}

func nodesOf(a *apiv1.Attempt) (numbers []uint32) {
	for _, group := range a.Placement.Groups {
		numbers = append(numbers, group.Nodes...)
	}
	return numbers
}
