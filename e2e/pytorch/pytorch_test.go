package pytorch

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/muster-hpc/muster/e2e/cluster"
)

const python = "/usr/bin/python3"

// examples returns the directory of the scripts; the test is skipped where PyTorch is not installed.
func examples(t *testing.T) string {
	t.Helper()
	if out, err := exec.Command(python, "-c", "import torch").CombinedOutput(); err != nil {
		t.Skipf("%s has no PyTorch (Debian: apt-get install python3-torch): %s", python, strings.TrimSpace(string(out)))
	}
	dir, err := filepath.Abs("../../examples/pytorch")
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// train submits a script and returns the job's state, its exit code and its output.
func train(t *testing.T, c *cluster.Cluster, script, name, args string) (state, exit, output string) {
	t.Helper()
	answer := c.RunWith(cluster.Command{
		Name: "sbatch", Args: []string{"--parsable", script}, Dir: c.Dir,
		Env: []string{"EXAMPLES=" + filepath.Dir(script), "PYTHON=" + python, "TRAIN_ARGS=" + args},
	})
	if answer.Code != 0 {
		t.Fatalf("sbatch: exit %d: %s", answer.Code, answer.Stderr)
	}
	id := strings.TrimSpace(answer.Stdout)
	c.WaitState(cluster.Slack(2*time.Minute), id, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
	state, exit = c.JobState(id)
	text, err := os.ReadFile(filepath.Join(c.Dir, name+"-"+id+".out"))
	if err != nil {
		t.Fatal(err)
	}
	return state, exit, string(text)
}

// learned fails the test unless the output ends with a good accuracy.
func learned(t *testing.T, output string) {
	t.Helper()
	// torchrun puts the rank in front of the line.
	match := regexp.MustCompile(`accuracy (\S+) on`).FindStringSubmatch(output)
	if match == nil {
		t.Fatalf("no accuracy in the output:\n%s", output)
	}
	if accuracy, err := strconv.ParseFloat(match[1], 64); err != nil || accuracy < 0.88 {
		t.Errorf("accuracy %s, expected at least 0.88 (%v)", match[1], err)
	}
}

func TestDDPTrainsOverTwoNodesFailsAndResumes(t *testing.T) {
	script := filepath.Join(examples(t), "ddp.sbatch")
	c := cluster.Up(t, "--nodes", "2")
	state, exit, output := train(t, c, script, "ddp", "--dir ck --steps 200 --fail-at 60")
	if state != "FAILED" || exit == "0:0" || !strings.Contains(output, "failing on purpose at step 60") {
		t.Fatalf("the training that fails on purpose is %s %s:\n%s", state, exit, output)
	}
	if !strings.Contains(output, "4 processes") {
		t.Errorf("not 4 processes:\n%s", output)
	}
	state, exit, output = train(t, c, script, "ddp", "--dir ck --steps 200")
	if state != "COMPLETED" || exit != "0:0" {
		t.Fatalf("%s %s:\n%s", state, exit, output)
	}
	if !strings.Contains(output, "resumed at step 50") || strings.Contains(output, "step 50 loss") || !strings.Contains(output, "step 200 loss") {
		t.Errorf("it did not resume at step 50:\n%s", output)
	}
	learned(t, output)
}

func TestTorchrunStartsTwoProcessesOnEachOfTwoNodes(t *testing.T) {
	script := filepath.Join(examples(t), "torchrun.sbatch")
	c := cluster.Up(t, "--nodes", "2")
	state, exit, output := train(t, c, script, "torchrun", "--dir ck --steps 200")
	if state != "COMPLETED" || exit != "0:0" {
		t.Fatalf("%s %s:\n%s", state, exit, output)
	}
	if !strings.Contains(output, "4 processes") {
		t.Errorf("not 4 processes:\n%s", output)
	}
	learned(t, output)
}
