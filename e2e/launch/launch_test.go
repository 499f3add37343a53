package launch

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/muster-hpc/muster/e2e/cluster"
)

func TestWhatTasksWriteReachesTheUser(t *testing.T) {
	c := cluster.Up(t, "--nodes", "2")
	for _, test := range []struct {
		property string
		holds    func(*testing.T, *cluster.Cluster)
	}{
		{"many short steps at once lose no output", manyShort},
		{"muster run and muster logs print the output of all ranks", musterCommands},
		{"labels are those of the ranks", labels},
		{"a hundred megabytes of four ranks arrive unchanged", large},
		{"a slow reader gets every byte, in bounded memory", slowReader},
		{"a command that was stopped gets every byte", stopped},
		{"stdin reaches every rank", stdin},
		{"the exit code is the highest, and a killed rank is said", exits},
		{"a missing program is said once by each node", missing},
		{"--wait counts from the end of the first task", wait},
	} {
		t.Run(test.property, func(t *testing.T) { test.holds(t, c) })
	}
}

func manyShort(t *testing.T, c *cluster.Cluster) {
	const steps, workers = 96, 8
	var group sync.WaitGroup
	for w := range workers {
		group.Go(func() {
			for i := w; i < steps; i += workers {
				out := c.Run(c.Dir, "srun", "-Q", "echo", "hi"+strconv.Itoa(i))
				if want := fmt.Sprintf("hi%d\n", i); out.Code != 0 || out.Stdout != want {
					t.Errorf("srun echo hi%d: exit %d, %q, %s", i, out.Code, out.Stdout, out.Stderr)
				}
			}
		})
	}
	group.Wait()
}

func musterCommands(t *testing.T, c *cluster.Cluster) {
	c.Script("ranks", "#!/bin/sh\necho out\necho err >&2\n")
	for range 5 {
		out := c.Run(c.Dir, "muster", "run", "-N2", filepath.Join(c.Dir, "ranks"))
		if out.Code != 0 || out.Stdout != "out\nout\n" || !strings.Contains(out.Stderr, "err\nerr\n") {
			t.Fatalf("muster run: exit %d, %q, %q", out.Code, out.Stdout, out.Stderr)
		}
	}
	submitted := c.Must(c.Dir, "muster", "run", "--detach", "-N2", "sh", "-c", "echo begin; sleep 2; echo end")
	id := submitted[strings.LastIndex(submitted, " ")+1:]
	for _, when := range []string{"while it runs", "after its end"} {
		out := c.Run(c.Dir, "muster", "logs", "-f", id)
		if out.Code != 0 || strings.Count(out.Stdout, "begin\n") != 2 || strings.Count(out.Stdout, "end\n") != 2 {
			t.Errorf("muster logs -f %s: exit %d, %q, %q", when, out.Code, out.Stdout, out.Stderr)
		}
	}
	if out := c.Run(c.Dir, "muster", "logs", id); out.Code != 0 || out.Stdout != "begin\nend\nbegin\nend\n" {
		t.Errorf("muster logs: exit %d, %q, %q", out.Code, out.Stdout, out.Stderr)
	}
}

func labels(t *testing.T, c *cluster.Cluster) {
	out := c.Run(c.Dir, "srun", "-l", "-N2", "-n4", "sh", "-c", "echo I am $SLURM_PROCID")
	for rank := range 4 {
		if want := fmt.Sprintf("%d: I am %d\n", rank, rank); strings.Count(out.Stdout, want) != 1 {
			t.Errorf("%q lacks %q", out.Stdout, want)
		}
	}
	out = c.Run(c.Dir, "srun", "-l", "-N2", "-n4", "-o", "labelled", "sh", "-c", "echo I am $SLURM_PROCID")
	text, err := os.ReadFile(filepath.Join(c.Dir, "labelled"))
	for rank := range 4 {
		if want := fmt.Sprintf("%d: I am %d\n", rank, rank); out.Code != 0 || err != nil || strings.Count(string(text), want) != 1 {
			t.Errorf("the file has %q, without %q; exit %d, %s, %v", text, want, out.Code, out.Stderr, err)
		}
	}
	if out = c.Run(c.Dir, "srun", "-l", "-o", "file.%t", "hostname"); out.Code != 1 || !strings.Contains(out.Stderr, "--label") {
		t.Errorf("labels in a file of each task are neither made nor refused: exit %d, %s", out.Code, out.Stderr)
	}
}

func large(t *testing.T, c *cluster.Cluster) {
	const last = 3_300_000 // 25 MB
	want := sha256.New()
	w := bufio.NewWriter(want)
	for i := 1; i <= last; i++ {
		fmt.Fprintln(w, i)
	}
	w.Flush()
	out := c.Run(c.Dir, "srun", "-l", "-N2", "-n4", "seq", strconv.Itoa(last))
	if out.Code != 0 || len(out.Stdout) < 100_000_000 {
		t.Fatalf("exit %d, %d bytes, %s", out.Code, len(out.Stdout), out.Stderr)
	}
	ranks := map[string]io.Writer{}
	sums := map[string]func() []byte{}
	for line := range strings.Lines(out.Stdout) {
		rank, text, _ := strings.Cut(line, ": ")
		if ranks[rank] == nil {
			h := sha256.New()
			b := bufio.NewWriterSize(h, 1<<16)
			ranks[rank], sums[rank] = b, func() []byte { b.Flush(); return h.Sum(nil) }
		}
		io.WriteString(ranks[rank], text)
	}
	for rank, sum := range sums {
		if !bytes.Equal(sum(), want.Sum(nil)) {
			t.Errorf("the output of rank %q was changed on its way", rank)
		}
	}
	if len(sums) != 4 {
		t.Errorf("%d ranks", len(sums))
	}
}

// start starts srun with its stdout in a pipe.
func start(t *testing.T, c *cluster.Cluster, args ...string) (*exec.Cmd, io.Reader, *bytes.Buffer) {
	t.Helper()
	cmd := exec.Command(filepath.Join(cluster.Bin(t), "slurm", "srun"), args...)
	cmd.Env, cmd.Dir = c.Env, c.Dir
	errs := new(bytes.Buffer)
	cmd.Stderr = errs
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return cmd, out, errs
}

// all reads everything that is left, and checks that it is n bytes and that the command ends well.
func all(t *testing.T, cmd *exec.Cmd, out io.Reader, errs *bytes.Buffer, n int64) {
	t.Helper()
	got, err := io.Copy(io.Discard, out)
	if wait := cmd.Wait(); err != nil || wait != nil || got != n {
		t.Errorf("%d bytes of %d arrived; %v, %v, %s", got, n, err, wait, errs)
	}
}

// beyondDrain is longer than a silent agent is waited for after the step's end.
const beyondDrain = 9 * time.Second

func slowReader(t *testing.T, c *cluster.Cluster) {
	const size = 200_000_000
	cmd, out, errs := start(t, c, "head", "-c", strconv.Itoa(size), "/dev/zero")
	time.Sleep(beyondDrain) // nobody reads
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	peak := regexp.MustCompile(`VmHWM:\s+(\d+) kB`).FindSubmatch(status)
	if kb, err := strconv.Atoi(string(peak[1])); err != nil || kb > 128<<10 {
		t.Errorf("srun holds %d KiB while nobody reads", kb)
	}
	all(t, cmd, out, errs, size)
}

func stopped(t *testing.T, c *cluster.Cluster) {
	const size = 50_000_000
	cmd, out, errs := start(t, c, "sh", "-c", fmt.Sprintf("sleep 1; exec head -c %d /dev/zero", size))
	time.Sleep(500 * time.Millisecond)
	if err := cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	time.Sleep(12 * time.Second)
	if err := cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	all(t, cmd, out, errs, size)
}

func stdin(t *testing.T, c *cluster.Cluster) {
	text := strings.Repeat("a line of input\n", 20_000)
	out := c.RunWith(cluster.Command{Dir: c.Dir, Name: "srun", Args: []string{"-l", "-N2", "-n2", "cat"}, Stdin: text})
	for _, rank := range []string{"0: ", "1: "} {
		if n := strings.Count(out.Stdout, rank+"a line of input\n"); n != 20_000 {
			t.Errorf("rank %s wrote %d lines of 20000; exit %d, %s", rank, n, out.Code, out.Stderr)
		}
	}
}

func exits(t *testing.T, c *cluster.Cluster) {
	out := c.Run(c.Dir, "srun", "-N2", "-n4", "sh", "-c", "exit $((SLURM_PROCID + 3))")
	if out.Code != 6 || !strings.Contains(out.Stderr, "task 3: Exited with exit code 6\n") {
		t.Errorf("exit %d, %s", out.Code, out.Stderr)
	}
	out = c.Run(c.Dir, "srun", "-N2", "-n2", "sh", "-c", "echo $SLURM_PROCID; [ $SLURM_PROCID = 0 ] || kill -9 $$")
	if out.Code != 137 || !strings.Contains(out.Stderr, "task 1: Killed\n") || len(out.Stdout) != 4 {
		t.Errorf("exit %d, %q, %s", out.Code, out.Stdout, out.Stderr)
	}
}

func missing(t *testing.T, c *cluster.Cluster) {
	out := c.Run(c.Dir, "srun", "-N2", "-n4", "/no/such")
	for _, node := range []string{"n1", "n2"} {
		if n := strings.Count(out.Stderr, "slurmstepd-"+node+": error: execve(): /no/such: No such file or directory\n"); n != 1 {
			t.Errorf("node %s says it %d times: %s", node, n, out.Stderr)
		}
	}
	if out.Code != 2 || strings.Count(out.Stderr, "execve") != 2 {
		t.Errorf("exit %d, %s", out.Code, out.Stderr)
	}
}

func wait(t *testing.T, c *cluster.Cluster) {
	out := c.Run(c.Dir, "srun", "-N1", "-n2", "-W2", "sh", "-c", "[ $SLURM_PROCID = 0 ] || exec sleep 100")
	if out.Code != 143 || !strings.Contains(out.Stderr, "First task exited 2s ago") || out.Took > cluster.Slack(20*time.Second) {
		t.Errorf("exit %d after %v, %s", out.Code, out.Took, out.Stderr)
	}
}
