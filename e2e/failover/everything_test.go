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

func TestAJobOutlivesAllControllersAndAgents(t *testing.T) {
	c := cluster.Up(t)
	job := watch(c, 4)
	// A second job ends with exit code 7 while nobody is there to hear it.
	quiet := c.Script("quiet.sh", "#!/bin/sh\nwhile [ ! -e gone ]; do sleep 0.05; done\nsleep 0.5\nexit 7\n")
	id := c.Must(c.Dir, "sbatch", "--parsable", "--job-name=watched", quiet)
	c.WaitState(cluster.Slack(10*time.Second), id, "RUNNING")

	var names []string
	for _, p := range c.Status().Processes {
		names = append(names, p.Name)
		if p.Role == "node" {
			c.Dev("kill", "--agent-only", p.Name)
		} else {
			c.Dev("kill", p.Name)
		}
	}
	if err := os.WriteFile(filepath.Join(c.Dir, "gone"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	before := job.count(0)
	c.Eventually(cluster.Slack(10*time.Second), "tasks go on without controllers and agents", func() bool { return job.count(0) > before+15 })
	for _, name := range names {
		c.Dev("start", name)
	}
	c.WaitState(cluster.Slack(30*time.Second), id, "FAILED")
	if state, exit := c.JobState(id); state != "FAILED" || exit != "7:0" {
		t.Errorf("the job that ended unheard is %s %s, not FAILED 7:0", state, exit)
	}
	job.goesOn(t, 8)
	job.finish(t)
}

func TestAnAgentIsKilledAndItsTasksDoNotNotice(t *testing.T) {
	c := cluster.Up(t)
	job := watch(c, 4)
	for _, node := range []string{"n1", "n2", "n3"} {
		c.Dev("kill", "--agent-only", node)
		before := job.count(0)
		c.Eventually(cluster.Slack(10*time.Second), "rank 0 goes on", func() bool { return job.count(0) > before+3 })
		c.Dev("start", node)
	}
	job.goesOn(t, 8)
	job.finish(t)
}

func TestASecondAgentWithTheSameNameIsRefused(t *testing.T) {
	c := cluster.Up(t, "--nodes", "2")
	job := watch(c, 2)
	real := c.Process("n1")
	// The same certificate and another data directory: a cloned image.
	clone := filepath.Join(c.Dir, "clone")
	source := filepath.Dir(real.Sockets[0])
	if resolved, err := filepath.EvalSymlinks(source); err == nil {
		source = resolved
	}
	tls := filepath.Join(clone, "tls")
	if err := os.MkdirAll(tls, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{"ca.pem", "cert.pem", "key.pem"} {
		data, err := os.ReadFile(filepath.Join(source, "tls", file))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(tls, file), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var controllers []string
	for _, p := range c.Status().Processes {
		if p.Role == "controller" {
			controllers = append(controllers, p.Address)
		}
	}
	out := c.RunWith(cluster.Command{Name: "muster-agent", Timeout: 90 * time.Second, Args: []string{
		"--dir", clone, "--name", "n1", "--listen", "127.0.0.1:0", "--controllers", strings.Join(controllers, ","),
		"--cpus", "64", "--memory", "512G", "--gpus", "8", "--boot-id", "a-cloned-image",
	}})
	if out.Code == 0 || !strings.Contains(out.Stderr, "n1") {
		t.Errorf("the second agent ended with %d and said %q", out.Code, out.Stderr)
	}
	job.goesOn(t, 4)
	job.finish(t)
}

func TestAGangIsLaunchedWholeOrNotAtAll(t *testing.T) {
	c := cluster.Up(t, "--nodes", "2")
	script := c.Script("gang.sh", "#!/bin/sh\nsrun sh -c 'echo $SLURM_PROCID > started.$SLURM_JOB_ID.$SLURM_PROCID; sleep 1'\n")
	for range 5 {
		id := c.Must(c.Dir, "sbatch", "--parsable", "-N2", "--ntasks-per-node=2", "--requeue", script)
		c.Dev("kill", "--agent-only", "n2")
		c.Dev("start", "n2")
		c.WaitState(cluster.Slack(60*time.Second), id, "COMPLETED")
		for rank := range 4 {
			if _, err := os.Stat(filepath.Join(c.Dir, fmt.Sprintf("started.%s.%d", id, rank))); err != nil {
				t.Errorf("job %s completed without rank %d: %v", id, rank, err)
			}
		}
	}
}
