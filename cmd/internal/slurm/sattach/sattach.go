package sattach

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"

	"github.com/muster-hpc/muster/cmd/internal/launch"
	"github.com/muster-hpc/muster/cmd/internal/slurm/fetch"
	"github.com/muster-hpc/muster/cmd/internal/slurm/option"
	"github.com/muster-hpc/muster/cmd/internal/slurm/record"
	"github.com/muster-hpc/muster/cmd/internal/slurm/session"
	"github.com/muster-hpc/muster/cmd/internal/slurm/submit"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/notation"
)

const operands = "JOB.STEP"

// Table is the table of sattach.
func Table() *option.Table {
	const none, required = option.None, option.Required
	return &option.Table{Options: []option.Option{
		{Long: "error-filter", Arity: required, Meta: "RANK", Help: "show stderr of this rank only"},
		{Long: "help", Short: 'h', Arity: none, Help: "this text"},
		{Long: "input-filter", Arity: required, Meta: "RANK", Help: "send stdin if this rank reads it"},
		{Long: "label", Short: 'l', Arity: none, Help: "put the rank in front of every line"},
		{Long: "layout", Arity: none, Help: "show which ranks are on which node, and do not attach"},
		{Long: "output-filter", Arity: required, Meta: "RANK", Help: "show stdout of this rank only"},
		{Long: "pty", Arity: none, Help: "use this terminal for a step that was started with srun --pty"},
		{Long: "quiet", Short: 'Q', Arity: none, Help: "no messages besides errors"},
		{Long: "usage", Short: 'u', Arity: none, Help: "a short list of options"},
		{Long: "verbose", Short: 'v', Arity: none, Help: "say more"},
		{Long: "version", Short: 'V', Arity: none, Help: "the release of Slurm whose dialect is spoken"},
	}}
}

// attach is one call of sattach.
type attach struct {
	s       *session.Session
	options *option.Set
	// in, out and err are the ranks that the filters name; nil for all.
	in, out, err *uint32
}

// Run is the command.
func Run(ctx context.Context, s *session.Session) int {
	table := Table()
	o, words, err := table.Parse(s.Args)
	switch {
	case err != nil:
		return usage(s, err)
	case o.Has("help"):
		fmt.Fprint(s.Stdout, table.Help(s.Program, operands, "Shows the output of a running step and sends it input."))
		return 0
	case o.Has("usage"):
		fmt.Fprint(s.Stdout, table.Usage(s.Program, operands))
		return 0
	case o.Has("version"):
		s.Version()
		return 0
	case len(words) != 1:
		s.Errorf("Exactly one step must be named, as JOB.STEP")
		return submit.CodeRefused
	}
	job, step, dotted, err := fetch.Step(words[0])
	if err != nil || !dotted {
		s.Errorf("Invalid job id specified: %s is not JOB.STEP", words[0])
		return submit.CodeRefused
	}
	a := &attach{s: s, options: o}
	if err := a.filters(); err != nil {
		s.Errorf("%v", err)
		return submit.CodeUsage
	}
	cluster, err := s.Cluster(ctx)
	if err != nil {
		s.Errorf("Unable to contact the cluster\n%s", s.Sentence(err))
		return submit.CodeRefused
	}
	answer, err := cluster.Jobs().GetStep(ctx, &apiv1.GetStepRequest{JobId: job, StepId: step})
	if err != nil {
		submit.Explain(s, "Could not get job step info", err)
		return submit.CodeRefused
	}
	if o.Has("layout") {
		layout(s, answer)
		return 0
	}
	return a.follow(ctx, cluster, answer)
}

func usage(s *session.Session, err error) int {
	var text *option.UsageError
	if errors.As(err, &text) {
		s.Usage(text)
		return submit.CodeUsage
	}
	s.Errorf("%v", err)
	return submit.CodeRefused
}

// filters reads the ranks to which the streams are limited.
func (a *attach) filters() error {
	for name, to := range map[string]**uint32{"input-filter": &a.in, "output-filter": &a.out, "error-filter": &a.err} {
		v, ok := a.options.Get(name)
		if !ok || strings.EqualFold(v.Text, "all") {
			continue
		}
		n, err := strconv.ParseUint(v.Text, 10, 32)
		if err != nil {
			return fmt.Errorf("--%s=%s is not the number of a task", name, v.Text)
		}
		rank := uint32(n)
		*to = &rank
	}
	return nil
}

// layout says which ranks are where.
func layout(s *session.Session, answer *apiv1.GetStepResponse) {
	step := answer.GetStep()
	fmt.Fprintf(s.Stdout, "Job step layout:\n\t%d tasks, %d nodes (%s)\n\n", step.GetNumTasks(), countNodes(answer.GetShares()), step.GetNodeList())
	next := uint32(0)
	for i, share := range answer.GetShares() {
		ranks := share.GetRanks()
		if ranks == "" && share.GetTasks() > 0 {
			var list []int
			for rank := next; rank < next+share.GetTasks(); rank++ {
				list = append(list, int(rank))
			}
			ranks = notation.FoldIndexes(list)
		}
		next += share.GetTasks()
		fmt.Fprintf(s.Stdout, "\tNode %d (%s), %d task(s): %s\n", i, share.GetNode(), share.GetTasks(), ranks)
	}
}

func countNodes(shares []*apiv1.NodeShare) int {
	seen := map[string]bool{}
	for _, share := range shares {
		seen[share.GetNode()] = true
	}
	return len(seen)
}

// follow shows the step until it ends, or a signal comes.
func (a *attach) follow(ctx context.Context, cluster session.Cluster, answer *apiv1.GetStepResponse) int {
	s, step := a.s, answer.GetStep()
	for _, rank := range []*uint32{a.in, a.out, a.err} {
		if rank != nil && *rank >= step.GetNumTasks() {
			s.Errorf("step %d.%s has no task %d: there are %d, from 0", step.GetJobId(), record.StepName(step.GetId()), *rank, step.GetNumTasks())
			return submit.CodeRefused
		}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if s.Signals != nil {
		heard, silence := s.Signals(syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
		stop := make(chan struct{})
		done := make(chan struct{})
		go func() {
			defer close(done)
			select {
			case sig := <-heard:
				cancel(detached{sig})
			case <-stop:
			}
		}()
		defer func() { close(stop); <-done; silence() }()
	}
	options := launch.Options{
		Program: s.Program, Job: step.GetJobId(), Attempt: step.GetAttempt(), Step: step.GetId(), Label: a.options.Has("label"),
		Stdout: s.Stdout, Stderr: s.Stderr, OnlyStdout: a.out, OnlyStderr: a.err, Quiet: a.options.Has("quiet"), StdinRank: -1,
		Created: step, Shares: answer.GetShares(),
	}
	if code, ok := a.streams(step, &options); !ok {
		return code
	}
	if options.Terminal != nil && s.Signals != nil {
		resized, silence := s.Signals(syscall.SIGWINCH)
		defer silence()
		options.Resized = resized
	}
	outcome, err := launch.Attach(ctx, &onward{Cluster: cluster, from: map[string]uint64{}}, options)
	options.Terminal.Restore()
	var left detached
	switch {
	case errors.As(context.Cause(ctx), &left):
		if number, ok := left.signal.(syscall.Signal); ok {
			return 128 + int(number)
		}
		return submit.CodeRefused
	case err != nil:
		s.Errorf("%s", s.Sentence(err))
		return submit.CodeRefused
	}
	return outcome.ExitCode
}

// detached is a signal that ended sattach.
type detached struct{ signal os.Signal }

func (d detached) Error() string { return "detached by " + d.signal.String() }

// streams chooses what is sent and shown; ok is false, with an exit code, if that cannot be.
func (a *attach) streams(step *apiv1.Step, options *launch.Options) (code int, ok bool) {
	task := step.GetSpec().GetTaskOptions()
	name := fmt.Sprintf("step %d.%s", step.GetJobId(), record.StepName(step.GetId()))
	if a.options.Has("pty") {
		if !task.GetPty() {
			a.s.Errorf("%s has no terminal: it was not started with srun --pty", name)
			return submit.CodeRefused, false
		}
		options.Terminal, options.Label = launch.OpenTerminal(a.s.Stdin), false
		options.Started = func() {
			if err := options.Terminal.Raw(); err != nil {
				a.s.Errorf("%v", err)
			}
		}
	}
	if path := step.GetSpec().GetStdoutPath(); path != "" && !a.options.Has("quiet") {
		a.s.Line("stdout of %s goes to the file %s", name, path)
	}
	reads := step.GetSpec().GetStdinPath() == "" && step.GetId() != record.BatchStep
	wanted := a.in == nil || task.GetStdinAll() || task.GetStdinRank() < 0 || uint32(task.GetStdinRank()) == *a.in
	switch {
	case reads && wanted:
		options.Stdin = a.s.Stdin
		if !task.GetStdinAll() && task.GetStdinRank() >= 0 {
			options.StdinRank = int(task.GetStdinRank())
		}
	case a.in != nil:
		a.s.Errorf("task %d of %s does not read stdin", *a.in, name)
		return submit.CodeRefused, false
	}
	return 0, true
}
