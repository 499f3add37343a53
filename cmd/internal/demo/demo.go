package demo

import (
	"context"
	"errors"
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
	"time"

	"github.com/muster-hpc/muster/cmd/internal/dev"
	"github.com/muster-hpc/muster/cmd/internal/plot"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/rpc/client"
)

// Options of a demo.
type Options struct {
	// Bin is the directory of the programs; empty means that of the running one.
	Bin string
	// Script is the batch script; empty means examples/train/train.sbatch beside Bin.
	Script string
	// Dir is the cluster's directory; empty means a temporary one that is removed in the end.
	Dir string
	// Out takes the story. Colour allows escapes.
	Out    io.Writer
	Colour bool
}

const (
	limit     = 110 * time.Second // for the whole demo
	tasks     = 8                 // 4 nodes, 2 tasks each
	steps     = 1500
	pace      = 22 * time.Millisecond // a step takes at least this long: about 33 s in all
	rate      = "0.003"               // learning rate: slow enough to see the loss fall all the way
	firstKill = 200                   // steps after which the first failure comes
	between   = 350                   // steps between failures, at least
	goesOn    = 50                    // steps that the training must make after each failure
	goodModel = 0.88                  // share of digits that the model must read in the end
	victim    = "n1"                  // the node whose agent is killed: the batch script and its srun run there
)

// failure is one line of the result.
type failure struct {
	what     string        // what was killed
	step     int           // the last step before
	later    int           // a step that was reported after it
	same     bool          // all tasks are the same processes as before
	nextAck  time.Duration // to the next acknowledged request
	restored time.Duration // to the killed process serving again
	silence  time.Duration // longest time between two lines of the training's output around it
}

// show is one run.
type show struct {
	Options
	cluster   *dev.Cluster
	client    *client.Client
	probe     *probe
	listener  *listener
	job       uint32
	output    string // path of the job's output
	processes []dev.JobProcess
	failures  []failure
}

// Run shows it all. The error says what was not as claimed.
func Run(ctx context.Context, o Options) (err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("the demo took longer than %v", limit))
	defer cancel()
	s := &show{Options: o}
	began := time.Now()
	if s.Dir == "" {
		if s.Dir, err = os.MkdirTemp("", "muster-demo-"); err != nil {
			return fmt.Errorf("make a directory for the demo: %w", err)
		}
		defer func() {
			if err == nil {
				err = os.RemoveAll(s.Dir)
			} else {
				fmt.Fprintf(o.Out, "\nData and logs stay in %s\n", s.Dir)
			}
		}()
	}
	defer func() { err = errors.Join(err, s.down()) }()
	if err := s.up(ctx); err != nil {
		return err
	}
	defer s.client.Close()
	if err := s.submit(ctx); err != nil {
		return err
	}
	if err := s.disturb(ctx); err != nil {
		return err
	}
	if err := s.finish(ctx); err != nil {
		return err
	}
	s.say("\nEverything above was measured in this run, which took %.0f s.\n", time.Since(began).Seconds())
	return nil
}

func (s *show) say(format string, args ...any) { fmt.Fprintf(s.Out, format, args...) }

// up starts the cluster.
func (s *show) up(ctx context.Context) (err error) {
	began := time.Now()
	s.say("A cluster on this machine: 3 controllers, 4 nodes of 8 declared GPUs\n")
	s.cluster, _, err = dev.Up(ctx, dev.Options{Dir: s.Dir, Bin: s.Bin, Controllers: 3, Nodes: 4, GPUs: 8, CPUs: 64, Memory: "512G"})
	if err != nil {
		return err
	}
	leader, err := s.cluster.Leader(ctx)
	if err != nil {
		return err
	}
	s.say("  ready after %.1f s; %s leads\n\n", time.Since(began).Seconds(), leader)
	variables, err := s.cluster.Env("n4") // not the node whose agent dies: its user is somewhere else
	if err != nil {
		return err
	}
	for _, v := range variables {
		if v.Name == "MUSTER_AGENT_SOCKET" {
			s.client, err = client.Open(ctx, client.Config{Socket: v.Value})
		}
	}
	return err
}

// down ends the cluster; nothing of it stays.
func (s *show) down() error {
	if s.cluster == nil {
		return nil
	}
	return s.cluster.Down()
}

var submitted = regexp.MustCompile(`^Submitted batch job (\d+)\n$`)

// submit hands the script to sbatch and waits until the model trains.
func (s *show) submit(ctx context.Context) error {
	bin := s.Bin
	if bin == "" {
		self, err := os.Executable()
		if err != nil {
			return fmt.Errorf("find this program's directory: %w", err)
		}
		bin = filepath.Dir(self)
	}
	shown := s.Script
	if s.Script == "" {
		shown = filepath.Join("examples", "train", "train.sbatch")
		s.Script = filepath.Join(bin, "..", shown)
	}
	script, err := filepath.Abs(s.Script)
	if err != nil {
		return fmt.Errorf("batch script: %w", err)
	}
	program, err := filepath.Abs(filepath.Join(bin, "examples", "train"))
	if err != nil {
		return fmt.Errorf("training program: %w", err)
	}
	work := filepath.Join(s.Dir, "work")
	if err := os.MkdirAll(work, 0o755); err != nil {
		return fmt.Errorf("make the job's directory: %w", err)
	}
	variables, err := s.cluster.Env("n4")
	if err != nil {
		return err
	}
	command := exec.CommandContext(ctx, filepath.Join(bin, "slurm", "sbatch"), script)
	command.Dir = work
	command.Env = append(os.Environ(), "TRAIN="+program, fmt.Sprintf("TRAIN_ARGS=--steps %d --pace %v --rate %s", steps, pace, rate))
	for _, v := range variables {
		if v.Name == "PATH" {
			v.Value += ":" + os.Getenv("PATH")
		}
		command.Env = append(command.Env, v.Name+"="+v.Value)
	}
	s.say("$ sbatch %s\n", shown)
	answer, err := command.CombinedOutput()
	s.say("%s", answer)
	if err != nil {
		return fmt.Errorf("sbatch: %w", err)
	}
	match := submitted.FindSubmatch(answer)
	if match == nil {
		return fmt.Errorf("sbatch answered %q", answer)
	}
	id, err := strconv.ParseUint(string(match[1]), 10, 32)
	if err != nil {
		return fmt.Errorf("sbatch answered %q: %w", answer, err)
	}
	s.job, s.output = uint32(id), filepath.Join(work, fmt.Sprintf("digits-%d.out", id))
	if _, err := s.awaitStep(ctx, 1); err != nil {
		return err
	}
	if s.processes, err = s.tasks(); err != nil {
		return err
	}
	if len(s.processes) != tasks {
		return fmt.Errorf("%d processes train; the job has %d tasks", len(s.processes), tasks)
	}
	s.say("  %d processes on 4 nodes exchange gradients over TCP; the loss falls\n\n", tasks)
	return nil
}

// tasks returns the training processes.
func (s *show) tasks() ([]dev.JobProcess, error) {
	all, err := s.cluster.JobProcesses(s.job)
	return slices.DeleteFunc(all, func(p dev.JobProcess) bool { return p.Program != "train" }), err
}

// awaitStep waits until the training has reported a step, and returns the last one.
func (s *show) awaitStep(ctx context.Context, step int) (int, error) {
	for {
		o, err := readOutput(s.output)
		if err != nil {
			return 0, err
		}
		if o.step() >= step {
			return o.step(), nil
		}
		answer, err := s.client.Jobs().GetJob(ctx, &apiv1.GetJobRequest{JobId: s.job})
		if err == nil && answer.Job.Status.State >= apiv1.JobState_JOB_STATE_COMPLETED {
			return 0, fmt.Errorf("job %d ended as %v (%s) at step %d; see %s", s.job, answer.Job.Status.State, answer.Job.Status.Sentence, o.step(), s.output)
		}
		select {
		case <-ctx.Done():
			return 0, fmt.Errorf("the training is at step %d, and was expected to reach %d: %w", o.step(), step, context.Cause(ctx))
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// disturb kills the leader twice and an agent once while a user submits jobs all the time.
func (s *show) disturb(ctx context.Context) error {
	s.probe = &probe{client: s.client}
	probing, stop := context.WithCancel(ctx)
	var group sync.WaitGroup
	group.Go(func() { s.probe.run(probing) })
	s.listener = &listener{path: s.output}
	group.Go(func() { s.listener.run(probing) })
	defer func() { stop(); group.Wait() }()
	for i, target := range []string{"leader", "leader", victim} {
		if _, err := s.awaitStep(ctx, firstKill+i*between); err != nil {
			return err
		}
		if err := s.kill(ctx, target); err != nil {
			return err
		}
	}
	return nil
}

// kill kills one process, measures, and starts it again.
func (s *show) kill(ctx context.Context, target string) error {
	o, err := readOutput(s.output)
	if err != nil {
		return err
	}
	f := failure{step: o.step()}
	action, err := s.cluster.Kill(ctx, target, target == victim)
	if err != nil {
		return err
	}
	dead := action.At
	f.what = fmt.Sprintf("leader %s (process %d)", action.Name, action.Pid)
	if target == victim {
		f.what = fmt.Sprintf("agent of %s (process %d)", action.Name, action.Pid)
	}
	s.say("kill -9: %s at step %d\n", f.what, f.step)
	if f.nextAck, err = s.probe.firstAfter(ctx, dead); err != nil {
		return err
	}
	s.say("  the next request is acknowledged after %d ms\n", f.nextAck.Milliseconds())
	if _, err := s.cluster.Start(ctx, action.Name, ""); err != nil {
		return err
	}
	f.restored = time.Since(dead)
	s.say("  %s was started again and serves after %.1f s\n", action.Name, f.restored.Seconds())
	if f.later, err = s.awaitStep(ctx, f.step+goesOn); err != nil {
		return err
	}
	now, err := s.tasks()
	if err != nil {
		return err
	}
	f.same = slices.Equal(now, s.processes)
	f.silence = s.listener.longest(dead)
	same := "are the same"
	if !f.same {
		same = "are NOT the same"
	}
	s.say("  the training is at step %d, its %d processes %s; longest pause between two lines of it: %d ms (usual: %d)\n\n",
		f.later, tasks, same, f.silence.Milliseconds(), s.listener.usual().Milliseconds())
	s.failures = append(s.failures, f)
	return nil
}

// finish waits for the job's end and checks everything that was claimed.
func (s *show) finish(ctx context.Context) error {
	var answer *apiv1.GetJobResponse
	for {
		var err error
		if answer, err = s.client.Jobs().GetJob(ctx, &apiv1.GetJobRequest{JobId: s.job}); err != nil {
			return fmt.Errorf("look at job %d: %w", s.job, err)
		}
		st := answer.Job.Status
		if st.State >= apiv1.JobState_JOB_STATE_COMPLETED && !st.Completing {
			break
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("job %d is %v: %w", s.job, st.State, context.Cause(ctx))
		case <-time.After(100 * time.Millisecond):
		}
	}
	o, err := readOutput(s.output)
	if err != nil {
		return err
	}
	probes, probeErr := s.probe.settle(ctx)
	s.picture(o)
	untrue := s.check(answer, o)
	if probeErr != nil {
		untrue = append(untrue, probeErr.Error())
	}
	st := answer.Job.Status
	s.say("\nJob %d: %s, exit code %d:%d, %d attempt, %d restarts; %.1f %% of digits it never saw are read right\n", s.job,
		strings.TrimPrefix(st.State.String(), "JOB_STATE_"), st.ExitCode, st.ExitSignal, len(answer.Attempts), st.Restarts, 100*o.accuracy)
	if probeErr == nil {
		s.say("%d requests of another user were acknowledged meanwhile; every one of them is there, none twice\n", probes)
	}
	s.say("The training wrote a line every %d ms.\n", s.listener.usual().Milliseconds())
	if len(untrue) > 0 {
		return fmt.Errorf("not as claimed:\n  - %s", strings.Join(untrue, "\n  - "))
	}
	return nil
}

// check returns what is not as claimed.
func (s *show) check(answer *apiv1.GetJobResponse, o output) (untrue []string) {
	claim := func(holds bool, format string, args ...any) {
		if !holds {
			untrue = append(untrue, fmt.Sprintf(format, args...))
		}
	}
	st := answer.Job.Status
	claim(st.State == apiv1.JobState_JOB_STATE_COMPLETED, "job %d ended as %v: %s", s.job, st.State, st.Sentence)
	claim(st.ExitCode == 0 && st.ExitSignal == 0, "its exit code is %d:%d", st.ExitCode, st.ExitSignal)
	claim(len(answer.Attempts) == 1 && st.Restarts == 0, "it had %d attempts and %d restarts", len(answer.Attempts), st.Restarts)
	claim(o.step() == steps, "the last step in its output is %d of %d", o.step(), steps)
	claim(o.disorder() == "", "its steps are out of order: %s", o.disorder())
	claim(o.accuracy >= goodModel, "the model reads %.1f %% of the digits, less than %.0f %%", 100*o.accuracy, 100*goodModel)
	claim(len(s.failures) == 3, "%d processes were killed", len(s.failures))
	for _, f := range s.failures {
		claim(f.same, "after the end of the %s the tasks were other processes", f.what)
		claim(f.later >= f.step+goesOn, "after the end of the %s the training stood still at step %d", f.what, f.later)
	}
	return untrue
}

// picture draws the loss curve with the failures in it, and a line for each.
func (s *show) picture(o output) {
	var marks []plot.Mark
	for _, f := range s.failures {
		marks = append(marks, plot.Mark{X: float64(f.step), Label: f.what + " killed"})
	}
	s.say("Loss of each step (nats)\n%s\n", plot.Curve(o.points, marks, plot.Size{Width: 72, Height: 14}))
	s.say("%-29s  %-7s  %-25s  %-14s  %s\n", "KILLED WITH SIGKILL", "AT STEP", "WHAT THE TRAINING NOTICED", "LONGEST PAUSE", "NEXT REQUEST DONE")
	for _, f := range s.failures {
		noticed := "nothing: same processes"
		if !f.same {
			noticed = "its processes changed"
		}
		s.say("%-29s  %-7d  %-25s  %-14s  after %d ms\n", f.what, f.step, noticed, fmt.Sprintf("%d ms", f.silence.Milliseconds()),
			f.nextAck.Milliseconds())
	}
}
