package failover

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/muster-hpc/muster/e2e/cluster"
)

// TestABatchScriptsStepsWaitForItsNodesAgent: each srun asks the agent of its node who it is, and that one is away when
// the second begins.
func TestABatchScriptsStepsWaitForItsNodesAgent(t *testing.T) {
	c := cluster.Up(t, "--nodes", "2")
	script := c.Script("steps.sh", "#!/bin/sh\nset -e\nsrun -n1 true\ntouch first\nwhile [ ! -e away ]; do sleep 0.02; done\n"+
		"for i in 1 2 3; do srun -n1 true; done\n")
	id := c.Must(c.Dir, "sbatch", "--parsable", "-N1", script)
	c.Eventually(cluster.Slack(20*time.Second), "a step ran", func() bool {
		_, err := os.Stat(filepath.Join(c.Dir, "first"))
		return err == nil
	})
	node := strings.TrimSpace(c.Must(c.Dir, "squeue", "-h", "-j", id, "-o", "%N"))
	c.Dev("kill", "--agent-only", node)
	if err := os.WriteFile(filepath.Join(c.Dir, "away"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	time.Sleep(3 * time.Second) // the time for which the agent is away
	c.Dev("start", node)
	c.WaitState(cluster.Slack(30*time.Second), id, "COMPLETED", "FAILED")
	if state, exit := c.JobState(id); state != "COMPLETED" {
		t.Errorf("the job is %s %s", state, exit)
	}
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
