// Package cluster gives whole-system tests a real local cluster (`muster dev`), driven as a user drives it: by its commands, its
// environment and its API. Each test has its own directory and ports; at its end nothing of the cluster is left, also no
// process of a job, and the logs are kept when the test failed.
package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/muster-hpc/muster/rpc/client"
)

// Cluster is a running local cluster.
type Cluster struct {
	// Dir is its directory.
	Dir string
	// Env has the variables with which commands find it.
	Env []string

	t   testing.TB
	bin string
}

// Process is one process of the cluster, as `muster dev status --json` says.
type Process struct {
	Name    string   `json:"name"`
	Role    string   `json:"role"`
	Pid     int      `json:"pid"`
	Alive   bool     `json:"alive"`
	Address string   `json:"address"`
	Voter   bool     `json:"voter"`
	Answers bool     `json:"answers"`
	Index   uint64   `json:"index"`
	Sockets []string `json:"sockets"`
	Log     string   `json:"log"`
}

// Status is what `muster dev status --json` says.
type Status struct {
	Leader    string    `json:"leader"`
	Term      uint64    `json:"term"`
	Processes []Process `json:"processes"`
}

// Outcome is how a command ended.
type Outcome struct {
	// Code is its exit code.
	Code int
	// Stdout and Stderr are what it wrote.
	Stdout, Stderr string
	// Took is the time from start to exit.
	Took time.Duration
}

// Slack is the factor by which bounds of time are widened on machines that are not quiet: 1 in the campaign, otherwise 2.
// $MUSTER_SLACK overrides it.
func Slack(d time.Duration) time.Duration {
	factor := 2.0
	if Campaign() {
		factor = 1
	}
	if s := os.Getenv("MUSTER_SLACK"); s != "" {
		if _, err := fmt.Sscan(s, &factor); err != nil {
			panic("MUSTER_SLACK is not a number: " + s)
		}
	}
	return time.Duration(float64(d) * factor)
}

// Campaign reports whether this is the long run.
func Campaign() bool { return os.Getenv("MUSTER_CAMPAIGN") != "" }

// Bin returns the folder of the built programs; the test is skipped with the remedy if they were not built.
func Bin(t testing.TB) string {
	t.Helper()
	bin, err := filepath.Abs("../../bin")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(bin, "muster")); err != nil {
		t.Fatalf("the programs are not built: run `make build` first (%v)", err)
	}
	return bin
}

// Up starts a cluster with further flags of `muster dev up` and stops it when the test ends.
func Up(t testing.TB, flags ...string) *Cluster {
	t.Helper()
	dir, err := os.MkdirTemp("", "muster-e2e-")
	if err != nil {
		t.Fatal(err)
	}
	c := &Cluster{Dir: dir, t: t, bin: Bin(t)}
	t.Cleanup(c.down)
	c.Dev(append([]string{"up"}, flags...)...)
	c.Env = append(os.Environ(), c.exports("env")...)
	return c
}

func (c *Cluster) down() {
	if out := c.finish(exec.Command(filepath.Join(c.bin, "muster"), "dev", "down", "--dir", c.Dir)); out.Code != 0 {
		c.t.Errorf("muster dev down: %s", out.Stderr)
	}
	if c.t.Failed() {
		c.t.Logf("the cluster's logs are kept in %s", c.Dir)
		return
	}
	if err := os.RemoveAll(c.Dir); err != nil {
		c.t.Error(err)
	}
}

// Dev runs `muster dev VERB --dir DIR …` and fails the test if it fails.
func (c *Cluster) Dev(args ...string) string {
	c.t.Helper()
	args = append([]string{"dev", args[0], "--dir", c.Dir}, args[1:]...)
	out := c.finish(exec.Command(filepath.Join(c.bin, "muster"), args...))
	if out.Code != 0 {
		c.t.Fatalf("muster %s: exit %d\n%s%s", strings.Join(args, " "), out.Code, out.Stdout, out.Stderr)
	}
	return out.Stdout
}

// exports turns the shell exports of `muster dev env` into NAME=value, with PATH expanded.
func (c *Cluster) exports(args ...string) []string {
	c.t.Helper()
	script := c.Dev(args...) + "\nenv -0\n"
	cmd := exec.Command("/bin/sh", "-c", script)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH")}
	out, err := cmd.Output()
	if err != nil {
		c.t.Fatalf("the output of muster dev env is not shell: %v\n%s", err, script)
	}
	var vars []string
	for v := range strings.SplitSeq(string(out), "\x00") {
		if name, _, ok := strings.Cut(v, "="); ok && (name == "PATH" || strings.HasPrefix(name, "MUSTER_")) {
			vars = append(vars, v)
		}
	}
	return vars
}

// Run runs a command of the cluster ("sbatch", "squeue", "muster", …) in dir and returns how it ended.
func (c *Cluster) Run(dir, name string, args ...string) Outcome {
	c.t.Helper()
	return c.RunWith(Command{Dir: dir, Name: name, Args: args})
}

// Command is what RunWith runs.
type Command struct {
	// Name of the command and its arguments.
	Name string
	Args []string
	// Dir is the working directory.
	Dir string
	// Stdin is fed to it.
	Stdin string
	// Env has more variables.
	Env []string
	// Timeout after which it is killed; 0 means three minutes.
	Timeout time.Duration
}

// RunWith runs a command of the cluster.
func (c *Cluster) RunWith(cmd Command) Outcome {
	c.t.Helper()
	path := filepath.Join(c.bin, "slurm", cmd.Name)
	if _, err := os.Stat(path); err != nil {
		path = filepath.Join(c.bin, cmd.Name)
	}
	if cmd.Timeout == 0 {
		cmd.Timeout = 3 * time.Minute
	}
	ctx, cancel := context.WithTimeout(context.Background(), cmd.Timeout)
	defer cancel()
	process := exec.CommandContext(ctx, path, cmd.Args...)
	process.Env = append(append([]string(nil), c.Env...), cmd.Env...)
	process.Dir, process.Stdin = cmd.Dir, strings.NewReader(cmd.Stdin)
	return c.finish(process)
}

// finish runs a process to its end.
func (c *Cluster) finish(process *exec.Cmd) Outcome {
	c.t.Helper()
	var stdout, stderr bytes.Buffer
	process.Stdout, process.Stderr = &stdout, &stderr
	begin := time.Now()
	err := process.Run()
	out := Outcome{Stdout: stdout.String(), Stderr: stderr.String(), Took: time.Since(begin)}
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		out.Code = exit.ExitCode()
	case err != nil:
		c.t.Fatalf("%s: %v", process.Path, err)
	}
	return out
}

// Must is Run for a command that has to succeed; it returns what it wrote to stdout without surrounding blanks.
func (c *Cluster) Must(dir, name string, args ...string) string {
	c.t.Helper()
	out := c.Run(dir, name, args...)
	if out.Code != 0 {
		c.t.Fatalf("%s %s: exit %d\n%s%s", name, strings.Join(args, " "), out.Code, out.Stdout, out.Stderr)
	}
	return strings.TrimSpace(out.Stdout)
}

// Status asks for the status of the processes.
func (c *Cluster) Status() Status {
	c.t.Helper()
	var s Status
	if err := json.Unmarshal([]byte(c.Dev("status", "--json")), &s); err != nil {
		c.t.Fatalf("muster dev status --json: %v", err)
	}
	return s
}

// Leader waits until a controller leads and returns its name.
func (c *Cluster) Leader() string {
	c.t.Helper()
	var name string
	c.Eventually(30*time.Second, "a controller leads", func() bool {
		name = c.Status().Leader
		return name != ""
	})
	return name
}

// Process returns the process of that name.
func (c *Cluster) Process(name string) Process {
	c.t.Helper()
	for _, p := range c.Status().Processes {
		if p.Name == name {
			return p
		}
	}
	c.t.Fatalf("the cluster has no process %s", name)
	return Process{}
}

// Client opens a client of the API as the user who runs the test, through the agent of node n1.
func (c *Cluster) Client() *client.Client {
	c.t.Helper()
	api, err := client.Open(context.Background(), client.Config{Socket: c.Socket()})
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(api.Close)
	return api
}

// Eventually waits until what holds, looking every 20 ms, and fails the test after the bound.
func (c *Cluster) Eventually(bound time.Duration, what string, holds func() bool) {
	c.t.Helper()
	for deadline := time.Now().Add(bound); ; time.Sleep(20 * time.Millisecond) {
		if holds() {
			return
		}
		if time.Now().After(deadline) {
			c.t.Fatalf("after %v it still is not so that %s", bound, what)
		}
	}
}

// JobState returns the state of a job in full words and its exit code, as sacct says.
func (c *Cluster) JobState(id string) (state, exit string) {
	c.t.Helper()
	line := c.Must(c.Dir, "sacct", "-X", "-n", "-P", "-j", id, "-o", "State,ExitCode")
	state, exit, _ = strings.Cut(line, "|")
	return state, exit
}

// WaitState waits until a job is in one of the states.
func (c *Cluster) WaitState(bound time.Duration, id string, states ...string) {
	c.t.Helper()
	last := ""
	deadline := time.Now().Add(bound)
	for {
		last, _ = c.JobState(id)
		for _, s := range states {
			if strings.HasPrefix(last, s) {
				return
			}
		}
		if time.Now().After(deadline) {
			c.t.Fatalf("job %s is %s after %v, not %v", id, last, bound, states)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// Script writes an executable script into the cluster's directory and returns its path.
func (c *Cluster) Script(name, text string) string {
	c.t.Helper()
	path := filepath.Join(c.Dir, name)
	if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
		c.t.Fatal(err)
	}
	return path
}
