package failover

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/muster-hpc/muster/e2e/cluster"
)

// TestABatchScriptsStepsWaitForItsNodesAgent: each srun asks the agent of its node who it is, and that one is away for a
// while.
func TestABatchScriptsStepsWaitForItsNodesAgent(t *testing.T) {
	c := cluster.Up(t, "--nodes", "2")
	script := c.Script("steps.sh", "#!/bin/sh\nset -e\ni=0\nwhile [ ! -e enough ]; do srun -n1 true; i=$((i+1)); echo $i > steps; done\n")
	id := c.Must(c.Dir, "sbatch", "--parsable", "-N1", script)
	steps := func() string {
		text, _ := os.ReadFile(filepath.Join(c.Dir, "steps")) // none before the first step
		return strings.TrimSpace(string(text))
	}
	c.Eventually(cluster.Slack(20*time.Second), "a step ran", func() bool { return steps() != "" })
	node := strings.TrimSpace(c.Must(c.Dir, "squeue", "-h", "-j", id, "-o", "%N"))
	c.Dev("kill", "--agent-only", node)
	time.Sleep(3 * time.Second) // the time for which the agent is away
	c.Dev("start", node)
	before := steps()
	c.Eventually(cluster.Slack(30*time.Second), "steps go on", func() bool {
		state, _ := c.JobState(id)
		return steps() != before || state != "RUNNING"
	})
	if err := os.WriteFile(filepath.Join(c.Dir, "enough"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	c.WaitState(cluster.Slack(30*time.Second), id, "COMPLETED")
}

func TestAScriptWithoutTheUsersEnvironmentFindsTheCommands(t *testing.T) {
	c := cluster.Up(t, "--nodes", "2")
	script := c.Script("bare.sh", "#!/bin/sh\nsrun -n1 echo found\n")
	id := c.Must(c.Dir, "sbatch", "--parsable", "--export=NONE", script)
	c.WaitState(cluster.Slack(30*time.Second), id, "COMPLETED", "FAILED")
	output, err := os.ReadFile(filepath.Join(c.Dir, "slurm-"+id+".out"))
	if err != nil || string(output) != "found\n" {
		t.Errorf("the script wrote %q (%v)", output, err)
	}
}
