package failover

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/muster-hpc/muster/e2e/cluster"
)

// An agent that is stopped for longer than a node may be silent ends nothing that did not opt into recovery: its processes go on, and the
// exit code is the true one, also of a job that ended during the silence.
func TestAnAgentsSilenceEndsOnlyWhatOptedIn(t *testing.T) {
	c := cluster.Up(t, "--nodes", "2", "--lost-after", "4s", "--lease", "2s", "--fence-window", "1s")
	stays := c.Script("stays.sh", "#!/bin/sh\necho $$ >> pid.$SLURM_JOB_ID\nwhile [ ! -e $1 ]; do sleep 0.05; done\nexit 7\n")
	// Every process of the one that opted in holds a lock: two attempts at once would show.
	moves := c.Script("moves.sh", "#!/bin/sh\nexec 9> lock\nflock -n 9 || touch twice\n"+
		"[ \"$SLURM_RESTART_COUNT\" = 1 ] && exit 0\nwhile :; do sleep 0.05; done\n")
	quiet := c.Must(c.Dir, "sbatch", "--parsable", "--no-requeue", "-w", "n2", stays, "gone")
	long := c.Must(c.Dir, "sbatch", "--parsable", "--no-requeue", "-w", "n2", stays, "back")
	// The commands speak with the agent of n1; what opted in begins on n2 too, because n1 is taken for that moment.
	filler := c.Must(c.Dir, "sbatch", "--parsable", "--exclusive", "-w", "n1", c.Script("filler.sh", "#!/bin/sh\nsleep 1000\n"))
	c.WaitState(cluster.Slack(20*time.Second), filler, "RUNNING")
	recovers := c.Must(c.Dir, "sbatch", "--parsable", "--requeue", moves)
	for _, id := range []string{quiet, long, recovers} {
		c.WaitState(cluster.Slack(20*time.Second), id, "RUNNING")
	}
	c.Must(c.Dir, "scancel", filler)
	c.Dev("pause", "n2")
	if err := os.WriteFile(filepath.Join(c.Dir, "gone"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	c.Eventually(cluster.Slack(30*time.Second), "the silent node is lost", func() bool {
		return strings.Contains(strings.ToLower(c.Must(c.Dir, "sinfo", "-h", "-n", "n2", "-o", "%t")), "down")
	})
	if state, _ := c.JobState(long); state != "RUNNING" {
		t.Errorf("the job that did not opt in is %s on a silent node", state)
	}
	c.WaitState(cluster.Slack(30*time.Second), recovers, "COMPLETED")
	c.Dev("resume", "n2")
	if _, err := os.Stat(filepath.Join(c.Dir, "twice")); err == nil {
		t.Error("two attempts ran at once")
	}
	if err := os.WriteFile(filepath.Join(c.Dir, "back"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{quiet, long} {
		c.WaitState(cluster.Slack(30*time.Second), id, "FAILED")
		pids, err := os.ReadFile(filepath.Join(c.Dir, fmt.Sprintf("pid.%s", id)))
		if state, exit := c.JobState(id); state != "FAILED" || exit != "7:0" || err != nil || strings.Count(string(pids), "\n") != 1 {
			t.Errorf("job %s is %s %s, and was run by %q, %v", id, state, exit, pids, err)
		}
	}
}
