package srun

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/muster-hpc/muster/cmd/internal/launch"
	"github.com/muster-hpc/muster/cmd/internal/slurm/fetch"
	"github.com/muster-hpc/muster/cmd/internal/slurm/option"
	"github.com/muster-hpc/muster/cmd/internal/slurm/session"
	"github.com/muster-hpc/muster/cmd/internal/slurm/submit"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

const operands = "PROGRAM [ARGUMENTS...]"

// run is one call of srun.
type run struct {
	s       *session.Session
	options *option.Set
	spec    *apiv1.JobSpec
	env     []byte
	streams streams
	wait    time.Duration
	heard   <-chan os.Signal // nil hears nothing

	job     uint32 // the enclosing job; 0 outside
	trace   *launch.Trace
	attempt uint32 // the attempt in which srun runs; 0 if it does not run in that job
}

// Run is the command. It returns the exit code of the tasks, 255 for words that cannot be parsed, and 1 for refusals.
func Run(ctx context.Context, s *session.Session) int {
	table := submit.Srun()
	line, words, err := table.Parse(s.Args)
	if err != nil {
		return fail(s, err)
	}
	switch {
	case line.Has("help"):
		fmt.Fprint(s.Stdout, table.Help(s.Program, operands, "Runs a program on all nodes of an allocation, or makes one for it."))
		return 0
	case line.Has("usage"):
		fmt.Fprint(s.Stdout, table.Usage(s.Program, operands))
		return 0
	case line.Has("version"):
		s.Version()
		return 0
	case listsMPI(line):
		fmt.Fprint(s.Stdout, mpiKinds)
		return 0
	}
	trace := launch.NewTrace(s.Get(launch.TraceVariable), s.Now())
	defer func() { trace.Mark("exit"); trace.Print(s.Stderr, s.Program) }()
	r, err := prepare(s, table, line, words)
	if err != nil {
		return fail(s, err)
	}
	r.trace = trace
	signal.Ignore(syscall.SIGPIPE) // a reader that left is an error of Write, not the end of this process
	if s.Signals != nil {
		heard, silence := s.Signals(signalsHeard...)
		defer silence()
		r.heard = heard
	}
	cluster, err := s.Cluster(ctx)
	if err != nil {
		s.Errorf("Unable to allocate resources: Unable to contact the cluster\n%s", s.Sentence(err))
		return submit.CodeRefused
	}
	trace.Mark("vouched")
	if name := r.options.Text("clusters"); name != "" && !session.NamesCluster(name, cluster.ClusterName()) {
		s.Errorf("'%s' can't be reached now, or it is an invalid entry for --cluster.\nThis is cluster %s; there is no other here.", name, cluster.ClusterName())
		return submit.CodeRefused
	}
	r.env = append(r.env, launchAddress(cluster.Controllers())...)
	if r.job != 0 {
		return r.step(ctx, cluster)
	}
	return r.allocate(ctx, cluster)
}

// launchVariable is environ.LaunchVariable of the agents, which make SLURM_LAUNCH_NODE_IPADDR and SLURM_SRUN_COMM_HOST of it.
const launchVariable = "MUSTER_LAUNCH_ADDRESS"

// launchAddress is a variable with this host's address on the way to the controllers, as a string of an environment; empty
// if the host has none. Connecting a datagram socket sends nothing.
func launchAddress(controllers []string) []byte {
	if len(controllers) == 0 {
		return nil
	}
	conn, err := net.Dial("udp", controllers[0])
	if err != nil {
		return nil
	}
	defer conn.Close()
	host, _, err := net.SplitHostPort(conn.LocalAddr().String())
	if err != nil {
		return nil
	}
	return []byte(launchVariable + "=" + host + "\x00")
}

// prepare merges options and reads all values.
func prepare(s *session.Session, table *option.Table, line *option.Set, words []string) (*run, error) {
	if len(words) == 0 {
		return nil, &submit.Error{Text: "No command given to execute.", Fatal: true, Code: submit.CodeRefused}
	}
	env, err := table.Environment(s.Lookup)
	if err != nil {
		return nil, err
	}
	r := &run{s: s}
	if err := r.enclosing(line); err != nil {
		return nil, err
	}
	if r.job != 0 {
		env.Drop("job-name") // of the job, not of the step
		for _, name := range []string{"exclusive"} {
			if line.Has(name) {
				return nil, &submit.Error{Text: "--" + name + " is not supported yet within an allocation: the steps of a job share it", Code: submit.CodeRefused}
			}
			env.Drop(name)
		}
		if err := inherit(s, table, line, env); err != nil {
			return nil, err
		}
	}
	r.options = submit.Merge(line, env, &option.Set{})
	r.spec, err = submit.Job(r.options, submit.Caller{Dir: s.Dir, Host: s.Host, Umask: s.Umask, UID: s.UID, UserID: s.UserID, Now: s.Now()})
	if err != nil {
		return nil, err
	}
	r.spec.Kind, r.spec.Args, r.spec.CommandLine = apiv1.JobKind_JOB_KIND_RUN, words, words[0]
	if !r.options.Has("job-name") {
		r.spec.Name = filepath.Base(words[0])
	}
	if err := r.readStreams(); err != nil {
		return nil, err
	}
	if err := r.readTaskOptions(); err != nil {
		return nil, err
	}
	set := map[string]string{}
	if r.job == 0 {
		set["SLURM_SUBMIT_DIR"], set["SLURM_SUBMIT_HOST"] = s.Dir, s.Host
	}
	if err := r.readMPI(set); err != nil {
		return nil, err
	}
	r.env, err = submit.Environment(s.Environ, r.options.Text("export"), set)
	return r, err
}

// enclosing finds the job to run in.
func (r *run) enclosing(line *option.Set) error {
	word := r.s.Get("SLURM_JOB_ID")
	if word == "" {
		word = r.s.Get("SLURM_JOBID")
	}
	if v, ok := line.Get("jobid"); ok {
		word = v.Text
	}
	if word == "" {
		return nil
	}
	id, known, err := fetch.JobID(word)
	if err != nil || !known {
		return &submit.Error{Text: "Invalid job id specified: " + word, Code: submit.CodeRefused}
	}
	r.job = id
	if r.s.Get("MUSTER_JOB_ID") == strconv.FormatUint(uint64(id), 10) {
		attempt, err := strconv.ParseUint(r.s.Get("MUSTER_ATTEMPT"), 10, 32)
		if err == nil {
			r.attempt = uint32(attempt)
		}
	}
	return nil
}

// readTaskOptions reads how tasks are started.
func (r *run) readTaskOptions() error {
	t := r.spec.TaskOptions
	t.Label = r.options.Has("label")
	if v, ok := r.options.Get("kill-on-bad-exit"); ok {
		switch v.Text {
		case "0":
		case "1", "":
			t.KillOnBadExit = true
		default:
			return &submit.Error{Text: fmt.Sprintf("Invalid --kill-on-bad-exit specification: %s", v.Text), Code: submit.CodeUsage}
		}
	}
	if v, ok := r.options.Get("wait"); ok {
		n, err := strconv.ParseUint(v.Text, 10, 31)
		if err != nil {
			return &submit.Error{Text: fmt.Sprintf("Invalid numeric value \"%s\" for --wait.", v.Text), Code: submit.CodeRefused}
		}
		r.wait = time.Duration(n) * time.Second
	}
	return nil
}

// step runs within the enclosing job.
func (r *run) step(ctx context.Context, cluster session.Cluster) int {
	if err := r.fillFromJob(ctx, cluster); err != nil {
		submit.Explain(r.s, fmt.Sprintf("Unable to confirm allocation for job %d", r.job), err)
		return submit.CodeRefused
	}
	spec := r.spec
	answer, err := cluster.Jobs().CreateStep(ctx, &apiv1.CreateStepRequest{
		RequestId: r.s.RequestID(), JobId: r.job, Attempt: r.attempt, Environment: r.env,
		Spec: &apiv1.StepSpec{
			Name: spec.GetName(), Args: spec.GetArgs(), WorkDir: spec.GetWorkDir(), StdinPath: spec.GetStdinPath(),
			StdoutPath: spec.GetStdoutPath(), StderrPath: spec.GetStderrPath(), OpenAppend: spec.GetOpenAppend(),
			Umask: spec.GetUmask(), Resources: spec.GetResources(), TaskOptions: spec.GetTaskOptions(),
			TimeLimitS: spec.GetTimeLimitS(), SubmitHost: spec.GetSubmitHost(),
		},
	})
	if err != nil {
		submit.Explain(r.s, fmt.Sprintf("Unable to create step for job %d", r.job), err)
		return submit.CodeRefused
	}
	r.trace.Mark("step created")
	step := answer.GetStep()
	if r.options.Has("verbose") {
		r.s.Line("step %d.%d on %s, %d tasks", r.job, step.GetId(), step.GetNodeList(), step.GetNumTasks())
	}
	return r.attach(ctx, cluster, step, answer.GetShares(), false)
}

// attach puts the step on the terminal and returns its exit code. whole tells that the job is srun's own.
func (r *run) attach(ctx context.Context, cluster session.Cluster, step *apiv1.Step, shares []*apiv1.NodeShare, whole bool) int {
	outcome, err := r.follow(ctx, cluster, step, shares, whole)
	if err != nil {
		return r.lost(err)
	}
	return outcome.ExitCode
}

// follow attaches until the step's end, with signals handled.
func (r *run) follow(ctx context.Context, cluster session.Cluster, step *apiv1.Step, shares []*apiv1.NodeShare, whole bool) (launch.Outcome, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	control := &control{run: r, cluster: cluster, step: step, whole: whole, giveUp: cancel}
	stop := control.listen(ctx)
	defer stop()
	options := launch.Options{
		Program: r.s.Program, Job: step.GetJobId(), Attempt: step.GetAttempt(), Step: step.GetId(),
		Label: r.options.Has("label"), Stdout: r.s.Stdout, Stderr: r.s.Stderr, StdinRank: r.streams.stdinRank,
		NoStdout: r.streams.noStdout, NoStderr: r.streams.noStderr, OnlyStdout: r.streams.onlyStdout, OnlyStderr: r.streams.onlyStderr,
		Created: step, Shares: shares, Trace: r.trace,
	}
	if r.streams.stdin {
		options.Stdin = r.s.Stdin
	}
	if r.wait > 0 {
		options.FirstEnd = func() { control.endAfter(ctx, r.wait) }
	}
	outcome, err := launch.Attach(ctx, cluster, options)
	if errors.Is(err, launch.ErrOutput) {
		control.end(context.WithoutCancel(ctx))
	}
	return outcome, err
}

// lost says why an attachment ended before its step did.
func (r *run) lost(err error) int {
	switch {
	case errors.Is(err, context.Canceled):
		return 128 + int(syscall.SIGINT)
	case errors.Is(err, syscall.EPIPE):
		return 128 + int(syscall.SIGPIPE)
	}
	r.s.Errorf("%s", r.s.Sentence(err))
	return submit.CodeRefused
}

// fail prints an error and returns its exit code.
func fail(s *session.Session, err error) int {
	var usage *option.UsageError
	if errors.As(err, &usage) {
		s.Usage(usage)
		return submit.CodeUsage
	}
	var bad *submit.Error
	if errors.As(err, &bad) && bad.Fatal {
		fmt.Fprintf(s.Stderr, "%s: fatal: %s\n", s.Program, bad.Text)
		return bad.Code
	}
	text := strings.Replace(err.Error(), "Batch job submission failed: ", "Unable to allocate resources: ", 1)
	s.Errorf("%s", text)
	return submit.CodeOf(err)
}

// signalsHeard are the signals that srun handles; others act as usual.
var signalsHeard = []os.Signal{
	syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGCONT, syscall.SIGALRM,
}
