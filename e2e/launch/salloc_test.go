package launch

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/muster-hpc/muster/e2e/cluster"
)

func TestAllocationsHoldTheirNodesWhateverIsKilled(t *testing.T) {
	c := cluster.Up(t, "--nodes", "2")
	for _, test := range []struct {
		property string
		holds    func(*testing.T, *cluster.Cluster)
	}{
		{"steps run in it while the leader is killed, and the job ends as the command", leaderKilled},
		{"a job that is cancelled is told to the command if that was asked for", cancelledMeanwhile},
		{"a node that is killed ends the allocation", nodeKilled},
		{"files are sent, watched and attached to", sentAndWatched},
	} {
		t.Run(test.property, func(t *testing.T) { test.holds(t, c) })
	}
}

// idle waits until no job is left.
func idle(c *cluster.Cluster) {
	c.Eventually(30*time.Second, "no job is left", func() bool { return c.Run(c.Dir, "squeue", "-h").Stdout == "" })
}

func last(t *testing.T, c *cluster.Cluster) string {
	t.Helper()
	lines := strings.Fields(c.Must(c.Dir, "sacct", "-X", "-n", "-P", "-o", "JobID,State,ExitCode"))
	return lines[len(lines)-1]
}

func leaderKilled(t *testing.T, c *cluster.Cluster) {
	leader := c.Leader()
	out := c.Run(c.Dir, "salloc", "-N2", "sh", "-c",
		"srun sh -c 'echo $SLURM_PROCID' && muster dev kill --dir "+c.Dir+" "+leader+" && srun -l -N1 echo second; exit 5")
	if out.Code != 5 || !strings.Contains(out.Stdout, "0\n") || !strings.Contains(out.Stdout, "1\n") || !strings.Contains(out.Stdout, "0: second\n") {
		t.Errorf("exit %d, %q, %s", out.Code, out.Stdout, out.Stderr)
	}
	c.Dev("start", leader)
	idle(c)
	if got := last(t, c); !strings.HasSuffix(got, "|FAILED|5:0") {
		t.Errorf("the job is %s", got)
	}
}

func cancelledMeanwhile(t *testing.T, c *cluster.Cluster) {
	out := c.Run(c.Dir, "salloc", "-N2", "-K", "sh", "-c", "scancel $SLURM_JOB_ID; sleep 60 & wait")
	if out.Code != 1 || !strings.Contains(out.Stderr, "has been revoked.") || out.Took > cluster.Slack(20*time.Second) {
		t.Errorf("exit %d after %v, %s", out.Code, out.Took, out.Stderr)
	}
	idle(c)
}

func nodeKilled(t *testing.T, c *cluster.Cluster) {
	out := c.Run(c.Dir, "salloc", "-N2", "-K", "sh", "-c", "muster dev kill --dir "+c.Dir+" n2; muster dev start --dir "+c.Dir+" n2 & sleep 90 & wait %2")
	if out.Code != 1 || !strings.Contains(out.Stderr, "has been revoked.") {
		t.Errorf("exit %d after %v, %s", out.Code, out.Took, out.Stderr)
	}
	idle(c)
	if got := last(t, c); !strings.Contains(got, "|NODE_FAIL|") {
		t.Errorf("the job is %s", got)
	}
	c.Eventually(60*time.Second, "both nodes are idle", func() bool {
		return strings.TrimSpace(c.Run(c.Dir, "sinfo", "-h", "-t", "idle", "-r", "-o", "%D").Stdout) == "2"
	})
}

func sentAndWatched(t *testing.T, c *cluster.Cluster) {
	data := strings.Repeat("0123456789abcdef", 40_000)
	source, dest := filepath.Join(c.Dir, "source"), filepath.Join(c.Dir, "dest")
	if err := os.WriteFile(source, []byte(data), 0o600); err != nil {
		t.Fatal(err)
	}
	script := c.Script("watched", `#!/bin/sh
sbcast -f source `+dest+` || exit 1
sleep 30 | srun -n1 sh -c 'echo begin; read line; echo got $line' > out &
for i in 1 2 3 4 5 6 7 8 9 10; do sstat -nP -j $SLURM_JOB_ID.0 -o MaxRSS,NTasks > used; grep -q "[KM]|1" used && break; sleep 0.2; done
cat used
echo hello | sattach -Q $SLURM_JOB_ID.0
`)
	out := c.RunWith(cluster.Command{Dir: c.Dir, Name: "salloc", Args: []string{"-Q", "-N1", script}, Timeout: time.Minute})
	if out.Code != 0 || !strings.Contains(out.Stdout, "begin\ngot hello\n") || !strings.Contains(out.Stdout, "|1\n") {
		t.Errorf("exit %d, %q, %s", out.Code, out.Stdout, out.Stderr)
	}
	if got, err := os.ReadFile(dest); err != nil || string(got) != data {
		t.Errorf("%d bytes arrived (%v)", len(got), err)
	}
}
