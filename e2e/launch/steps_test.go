package launch

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/muster-hpc/muster/e2e/cluster"
)

func TestStepsShareAnAllocation(t *testing.T) {
	c := cluster.Up(t, "--nodes", "2", "--cpus", "80", "--gpus", "2")
	for _, test := range []struct {
		property string
		holds    func(*testing.T, *cluster.Cluster)
	}{
		{"exact steps run side by side, with CPUs and GPUs of their own", sideBySide},
		{"a step waits until another has left room, and an interrupt while it waits leaves nothing", busyThenFree},
		{"each rank runs its program, on two nodes", multiProg},
		{"a host file says where each rank is", hostFile},
		{"a step can have several parts", parts},
		{"a terminal is shown with its size, and put back", terminal},
		{"the first bad exit ends the others", killOnBadExit},
		{"signals come within a second of their time", warnings},
		{"tasks are prepared and followed by programs", aroundTasks},
		{"64 ranks write at once, and a reader that stalls holds up nothing but them", manyWriters},
	} {
		t.Run(test.property, func(t *testing.T) { test.holds(t, c) })
	}
}

// batch runs a script as a batch job to its end, and returns its output.
func batch(t *testing.T, c *cluster.Cluster, flags, script string) string {
	t.Helper()
	dir, err := os.MkdirTemp(c.Dir, "batch")
	if err != nil {
		t.Fatal(err)
	}
	args := append(strings.Fields(flags), "--wait", "-D", dir, "-o", filepath.Join(dir, "output"), "--wrap", "waits() { n=0; until eval \"$1\"; do n=$((n+1)); [ $n -lt 1200 ] || exit 99; sleep 0.05; done; }\n"+script)
	out := c.Run(dir, "sbatch", args...)
	text, err := os.ReadFile(filepath.Join(dir, "output"))
	if out.Code != 0 || err != nil {
		t.Errorf("sbatch: exit %d, %s, %v\n%s", out.Code, out.Stderr, err, text)
	}
	return string(text)
}

func sideBySide(t *testing.T, c *cluster.Cluster) {
	text := batch(t, c, "-N1 -n2 -c2 --gpus-per-node=2", `
meet() { srun --exact -n1 -c2 --gpus=1 sh -c 'echo '$1' $SLURM_STEP_GPUS $SLURM_CPUS_ON_NODE; touch '$1'; n=0; until [ -e '$2' ]; do n=$((n+1)); [ $n -lt 1200 ] || exit 1; sleep 0.05; done'; }
meet a b & first=$!
meet b a & second=$!
wait $first && wait $second || exit 1`)
	if !regexp.MustCompile(`(?m)^a [01] 2$`).MatchString(text) || !regexp.MustCompile(`(?m)^b [01] 2$`).MatchString(text) ||
		strings.Count(text, " 0 ") != 1 || strings.Contains(text, "disabled") {
		t.Errorf("%s", text)
	}
}

func busyThenFree(t *testing.T, c *cluster.Cluster) {
	text := batch(t, c, "-N1 -n2", `
srun -n1 sh -c 'touch begun; n=0; until [ -e end ]; do n=$((n+1)); [ $n -lt 1200 ] || exit 1; sleep 0.05; done' &
waits '[ -e begun ]'
srun -n1 echo second 2>waiting & second=$!
waits 'grep -q "temporarily disabled" waiting'
srun --overlap -n1 echo beside
srun --immediate=1 -n1 echo never; echo immediate $?
srun -n1 echo interrupted 2>third & third=$!
waits 'grep -q "temporarily disabled" third'
kill -INT $third; wait $third; echo given up $?
touch end
wait $second; echo second ended $?
cat waiting third`)
	for _, want := range []string{
		`(?m)^beside$`, `(?m)^second$`, `(?m)^second ended 0$`, `(?m)^immediate 1$`, `(?m)^given up 1$`,
		`(?m)^srun: Job \d+ step creation temporarily disabled, retrying \(Requested nodes are busy\)$`,
		`(?m)^srun: Step created for StepId=\d+\.2$`, `(?m)^srun: Cancelled pending job step with signal 2$`,
		`(?m)^srun: error: Unable to create step for job \d+: Requested nodes are busy$`,
	} {
		if !regexp.MustCompile(want).MatchString(text) {
			t.Errorf("no line %s in\n%s", want, text)
		}
	}
	if strings.Contains(text, "never") || strings.Contains(text, "interrupted\n") {
		t.Errorf("a step ran that was given up:\n%s", text)
	}
}

func multiProg(t *testing.T, c *cluster.Cluster) {
	text := batch(t, c, "-N2 -n4", `
cat >programs <<'END'
# rank, program
0   sh -c 'echo first of $SLURM_NTASKS on $SLURM_NODEID'
1,3 echo odd %t %o \
    'and more'
*   echo rest %t
END
srun -l --multi-prog programs`)
	for _, want := range []string{"0: first of 4 on 0\n", "1: odd 1 0 and more\n", "2: rest 2\n", "3: odd 3 1 and more\n"} {
		if strings.Count(text, want) != 1 {
			t.Errorf("%q lacks %q", text, want)
		}
	}
}

func hostFile(t *testing.T, c *cluster.Cluster) {
	text := batch(t, c, "-N2 -n4 -w n1,n2 -m cyclic", `
printf 'n2\nn1\nn2\n' >hosts
SLURM_HOSTFILE=hosts srun -l sh -c 'echo $SLURMD_NODENAME $SLURM_LOCALID'
srun -l sh -c 'echo cyclic $SLURMD_NODENAME'
srun -m plane=2 -N2 -n4 -l sh -c 'echo plane $SLURMD_NODENAME'
srun -r1 -n1 sh -c 'echo relative $SLURMD_NODENAME $SLURM_NNODES'`)
	for _, want := range []string{
		"0: n2 0\n", "1: n1 0\n", "2: n2 1\n", "0: plane n1\n", "1: plane n1\n", "2: plane n2\n", "3: plane n2\n", "0: cyclic n1\n", "1: cyclic n2\n", "relative n2 1\n",
	} {
		if strings.Count(text, want) != 1 {
			t.Errorf("%q lacks %q", text, want)
		}
	}
}

func parts(t *testing.T, c *cluster.Cluster) {
	text := batch(t, c, "-N2 -n4", `srun -l -n1 echo one : -n2 sh -c 'echo two of $SLURM_NTASKS'`)
	if strings.Count(text, "0: one\n") != 1 || strings.Count(text, "1: two of ") != 1 || strings.Count(text, "2: two of ") != 1 {
		t.Errorf("%q", text)
	}
	if out := c.Run(c.Dir, "srun", "true", ":", "true"); out.Code != 1 || !strings.Contains(out.Stderr, "Heterogeneous jobs are not supported yet") {
		t.Errorf("exit %d, %s", out.Code, out.Stderr)
	}
}

// pty opens a terminal.
func pty(t *testing.T) (keyboard, tty *os.File) {
	t.Helper()
	keyboard, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skip("no pseudo terminals here: ", err)
	}
	t.Cleanup(func() { keyboard.Close() })
	if err := unix.IoctlSetPointerInt(int(keyboard.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(keyboard.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	tty, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tty.Close() })
	return keyboard, tty
}

func terminal(t *testing.T, c *cluster.Cluster) {
	keyboard, tty := pty(t)
	resize := func(rows, columns uint16) {
		if err := unix.IoctlSetWinsize(int(keyboard.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: columns}); err != nil {
			t.Fatal(err)
		}
	}
	mode := func() string {
		m, err := unix.IoctlGetTermios(int(tty.Fd()), unix.TCGETS)
		if err != nil {
			t.Fatal(err)
		}
		return fmt.Sprint(*m)
	}
	resize(31, 101)
	before := mode()
	cmd := exec.Command(filepath.Join(cluster.Bin(t), "slurm", "srun"), "--pty", "-n2", "sh")
	cmd.Env, cmd.Dir = append(slices.Clone(c.Env), "PS1=ready> "), c.Dir
	cmd.Stdin, cmd.Stdout, cmd.Stderr = tty, tty, tty
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() }) // it has ended, unless the test failed
	shown := &screen{}
	go func() { _, _ = io.Copy(shown, keyboard) }() // ends when the terminal is closed
	typed := func(text string) {
		if _, err := keyboard.WriteString(text); err != nil {
			t.Fatal(err)
		}
	}
	shown.await(t, c, "ready> ")
	typed("stty size; tty; echo rank $SLURM_PROCID\r")
	shown.await(t, c, "31 101\r\n")
	shown.await(t, c, "rank 0\r\n")
	resize(45, 140) // tells srun with SIGWINCH
	c.Eventually(30*time.Second, "the step learns the new size", func() bool {
		typed("stty size\r")
		time.Sleep(100 * time.Millisecond) // for what was typed
		return shown.has("45 140\r\n")
	})
	typed("sh -c 'trap \"echo caught; exit\" INT; echo armed; while :; do sleep 0.1; done'\r")
	shown.await(t, c, "armed\r\n")
	typed("\x03") // for the program, not for srun
	shown.await(t, c, "caught\r\n")
	typed("exit 7\r")
	late := time.AfterFunc(cluster.Slack(30*time.Second), func() { _ = cmd.Process.Kill() })
	err := cmd.Wait()
	late.Stop()
	if cmd.ProcessState.ExitCode() != 7 {
		t.Errorf("%v; the terminal shows %q", err, shown.String())
	}
	if mode() != before {
		t.Error("the terminal was not put back")
	}
}

// screen is what a terminal shows.
type screen struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *screen) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func (s *screen) has(text string) bool { return strings.Contains(s.String(), text) }

func (s *screen) await(t *testing.T, c *cluster.Cluster, text string) {
	t.Helper()
	defer func() {
		if t.Failed() {
			t.Logf("the terminal shows %q", s.String())
		}
	}()
	c.Eventually(30*time.Second, fmt.Sprintf("the terminal shows %q", text), func() bool { return s.has(text) })
}

func killOnBadExit(t *testing.T, c *cluster.Cluster) {
	const script = "if [ $SLURM_PROCID = 0 ]; then exit 3; fi; exec sleep 100"
	for _, args := range [][]string{
		{"-K", "-N2", "-n2", "sh", "-c", script},
		{"-N2", "-n2", "--gpus-per-node=1", "sh", "-c", script}, // GPUs on several nodes: without being asked
	} {
		out := c.Run(c.Dir, "srun", args...)
		if out.Code != 143 || !strings.Contains(out.Stderr, "task 0: Exited with exit code 3\n") || !strings.Contains(out.Stderr, "task 1: Terminated\n") ||
			out.Took > cluster.Slack(30*time.Second) {
			t.Errorf("srun %v: exit %d after %v, %s", args, out.Code, out.Took, out.Stderr)
		}
	}
	if out := c.Run(c.Dir, "srun", "-K0", "-N2", "-n2", "--gpus-per-node=1", "sh", "-c", "if [ $SLURM_PROCID = 0 ]; then exit 3; fi; sleep 1; echo done"); out.Code != 3 || out.Stdout != "done\n" {
		t.Errorf("-K0: exit %d, %q, %s", out.Code, out.Stdout, out.Stderr)
	}
}

// warned is a program that says how many milliseconds after its start USR1 comes.
const warned = `begun=$(date +%s%3N); trap 'echo "$0 after $(( $(date +%s%3N) - begun ))"; exit 0' USR1; while :; do sleep 0.02; done`

func warnings(t *testing.T, c *cluster.Cluster) {
	var group sync.WaitGroup
	check := func(text string, from int) {
		found := regexp.MustCompile(`after (\d+)`).FindStringSubmatch(text)
		if found == nil {
			t.Errorf("no signal came: %q", text)
			return
		}
		ms, err := strconv.Atoi(found[1])
		if slack := int(cluster.Slack(time.Second) / time.Millisecond); err != nil || ms < from-1000 || ms > from+slack {
			t.Errorf("the signal came after %s ms; %d were asked for", found[1], from)
		}
	}
	group.Go(func() {
		out := c.Run(c.Dir, "srun", "-t1", "--signal=USR1@55", "sh", "-c", warned, "alone")
		check(out.Stdout, 5000)
	})
	group.Go(func() {
		check(batch(t, c, "-n1 -t1 --signal=B:USR1@55", "srun sleep 8 &\nset -- shell\n"+warned), 5000)
	})
	group.Go(func() {
		text := batch(t, c, "-n1 -t1 --signal=USR1@55", "trap 'echo the shell got it, too' USR1\nsrun sh -c '"+strings.ReplaceAll(warned, "'", `'\''`)+"' step; true")
		check(text, 5000)
		if strings.Contains(text, "the shell got it") {
			t.Errorf("without B: the signal is for the steps alone: %q", text)
		}
	})
	group.Go(func() {
		text := batch(t, c, "-n1 -t5", "srun -t1 --signal=USR1@55 sh -c '"+strings.ReplaceAll(warned, "'", `'\''`)+"' limited; true")
		check(text, 5000)
	})
	group.Wait()
}

func aroundTasks(t *testing.T, c *cluster.Cluster) {
	prolog := c.Script("task-prolog", "#!/bin/sh\necho export GREETING=hello $SLURM_PROCID\necho unset UNWANTED\necho print before $SLURM_PROCID\n")
	epilog := c.Script("task-epilog", "#!/bin/sh\necho after $SLURM_PROCID >>"+c.Dir+"/epilogs\n")
	out := c.Run(c.Dir, "srun", "-n2", "-l", "--task-prolog", prolog, "--task-epilog", epilog, "--export=ALL,UNWANTED=1", "sh", "-c", "echo $GREETING ${UNWANTED-gone}")
	for _, want := range []string{"0: before 0\n", "0: hello 0 gone\n", "1: hello 1 gone\n"} {
		if out.Code != 0 || !strings.Contains(out.Stdout, want) {
			t.Errorf("exit %d, %q lacks %q, %s", out.Code, out.Stdout, want, out.Stderr)
		}
	}
	c.Eventually(20*time.Second, "programs run after the tasks", func() bool {
		text, err := os.ReadFile(filepath.Join(c.Dir, "epilogs"))
		return err == nil && strings.Contains(string(text), "after 0\n") && strings.Contains(string(text), "after 1\n")
	})
}

func manyWriters(t *testing.T, c *cluster.Cluster) {
	const ranks, width = 64, 100
	bytesEach := 20_000_000
	if cluster.Campaign() {
		bytesEach = 100_000_000
	}
	line := strings.Repeat("0123456789", 10)[:width-1]
	cmd, out, errs := start(t, c, "-l", "-N2", "-n64", "sh", "-c", fmt.Sprintf("yes %s | head -c %d", line, bytesEach))
	counts := map[string]int{}
	torn := 0
	reader := bufio.NewReaderSize(out, 1<<20)
	stalled := false
	for {
		text, err := reader.ReadSlice('\n')
		if len(text) > 0 {
			rank, rest, ok := strings.Cut(string(text), ": ")
			if !ok || rest != line+"\n" {
				if torn++; torn < 4 {
					t.Errorf("a torn line: %q", text)
				}
			}
			counts[strings.TrimLeft(rank, " ")]++
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if !stalled {
			stalled = true
			time.Sleep(5 * time.Second) // nobody reads
			bounded(t, cmd.Process.Pid, "srun", 192<<10)
			if out := c.Run(c.Dir, "srun", "echo", "beside"); out.Code != 0 || out.Took > cluster.Slack(10*time.Second) {
				t.Errorf("another srun is held up: exit %d after %v, %s", out.Code, out.Took, out.Stderr)
			}
		}
	}
	for _, p := range c.Status().Processes {
		if p.Role == "agent" {
			bounded(t, p.Pid, p.Name, 384<<10)
		}
	}
	if err := cmd.Wait(); err != nil || len(counts) != ranks || torn > 0 {
		t.Errorf("%v, %d ranks, %d torn lines, %s", err, len(counts), torn, errs)
	}
	for rank, n := range counts {
		if n != bytesEach/width {
			t.Errorf("rank %s: %d lines of %d", rank, n, bytesEach/width)
		}
	}
}

// bounded checks the most memory that a process has had.
func bounded(t *testing.T, pid int, name string, mostKB int) {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	peak := regexp.MustCompile(`VmHWM:\s+(\d+) kB`).FindSubmatch(status)
	if kb, err := strconv.Atoi(string(peak[1])); err != nil || kb > mostKB {
		t.Errorf("%s has had %d KiB; at most %d are allowed", name, kb, mostKB)
	}
}
