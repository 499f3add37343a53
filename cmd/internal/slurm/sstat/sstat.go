package sstat

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/muster-hpc/muster/cmd/internal/slurm/fetch"
	"github.com/muster-hpc/muster/cmd/internal/slurm/option"
	"github.com/muster-hpc/muster/cmd/internal/slurm/record"
	"github.com/muster-hpc/muster/cmd/internal/slurm/session"
	"github.com/muster-hpc/muster/cmd/internal/slurm/submit"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
)

// Bounds; rows of docs/limits.md.
const (
	// parallel is how many agents are asked at the same time.
	parallel = 32
	// askTimeout is how long one may take to answer.
	askTimeout = 10 * time.Second
)

// Table is the table of sstat.
func Table() *option.Table {
	const none, required = option.None, option.Required
	return &option.Table{Options: []option.Option{
		{Long: "allsteps", Short: 'a', Arity: none, Help: "all running steps of a job; otherwise its first one"},
		{Long: "fields", Arity: required, Same: "format", Meta: "FIELDS"},
		{Long: "format", Short: 'o', Arity: required, Meta: "FIELDS", Help: "columns, with %WIDTH behind a name"},
		{Long: "help", Short: 'h', Arity: none, Help: "this text"},
		{Long: "helpformat", Short: 'e', Arity: none, Help: "names of columns"},
		{Long: "jobs", Short: 'j', Arity: required, Meta: "JOB[.STEP],...", Help: "jobs or steps"},
		{Long: "noconvert", Arity: none, Help: "sizes in bytes"},
		{Long: "noheader", Short: 'n', Arity: none, Help: "no lines of headers"},
		{Long: "parsable", Short: 'p', Arity: none, Help: "columns with | after each"},
		{Long: "parsable2", Short: 'P', Arity: none, Help: "columns with | between them"},
		{Long: "pidformat", Short: 'i', Arity: none, Help: "process ids on each node"},
		{Long: "usage", Arity: none, Help: "a short list of options"},
		{Long: "verbose", Short: 'v', Arity: none, Help: "say more", Harmless: "there is nothing more to say"},
		{Long: "version", Short: 'V', Arity: none, Help: "the release of Slurm whose dialect is spoken"},
	}}
}

// Run is the command.
func Run(ctx context.Context, s *session.Session) int {
	table := Table()
	o, words, err := table.Parse(s.Args)
	if err == nil && len(words) > 0 {
		err = &option.UsageError{Text: "unknown argument " + words[0]}
	}
	var usage *option.UsageError
	switch {
	case errors.As(err, &usage):
		s.Usage(usage)
		return submit.CodeRefused
	case err != nil:
		s.Errorf("%v", err)
		return submit.CodeRefused
	case o.Has("help"):
		fmt.Fprint(s.Stdout, table.Help(s.Program, "-j JOB[.STEP]", "Says what running steps use."))
		return 0
	case o.Has("usage"):
		fmt.Fprint(s.Stdout, table.Usage(s.Program, ""))
		return 0
	case o.Has("version"):
		s.Version()
		return 0
	case o.Has("helpformat"):
		helpFormat(s.Stdout)
		return 0
	}
	q, err := parse(o)
	if err != nil {
		s.Errorf("%v", err)
		return submit.CodeRefused
	}
	cluster, err := s.Cluster(ctx)
	if err != nil {
		fmt.Fprintln(s.Stderr, fetch.Error("slurm_load_jobs", err))
		return submit.CodeRefused
	}
	q.s, q.cluster = s, cluster
	return q.run(ctx)
}

// query is what a command line asks for.
type query struct {
	s       *session.Session
	cluster session.Cluster
	options *option.Set
	layout  layout
	wanted  []wanted
	failed  bool
}

// wanted is a job, or a step of it.
type wanted struct {
	job, step uint32
	hasStep   bool
}

func parse(o *option.Set) (*query, error) {
	q := &query{options: o}
	v, ok := o.Get("jobs")
	if !ok {
		return nil, errors.New("You didn't give me any jobs to stat: name them with --jobs")
	}
	for word := range strings.SplitSeq(v.Text, ",") {
		if word = strings.TrimSpace(word); word == "" {
			continue
		}
		job, step, dotted, err := fetch.Step(word)
		if err != nil {
			return nil, err
		}
		q.wanted = append(q.wanted, wanted{job, step, dotted})
	}
	var err error
	q.layout, err = parseLayout(o)
	return q, err
}

// run prints a line for each step.
func (q *query) run(ctx context.Context) int {
	var rows []*row
	for _, w := range q.wanted {
		ids, err := q.steps(ctx, w)
		if err != nil {
			fmt.Fprintln(q.s.Stderr, fetch.Error("slurm_get_job_steps", err))
			q.failed = true
			continue
		}
		if len(ids) == 0 {
			q.s.Errorf("no steps running for job %d", w.job)
			q.failed = true
		}
		for _, id := range ids {
			more, err := q.ask(ctx, w.job, id)
			if err != nil {
				submit.Explain(q.s, fmt.Sprintf("step %d.%s", w.job, record.StepName(id)), err)
				q.failed = true
				continue
			}
			rows = append(rows, more...)
		}
	}
	if err := q.layout.write(q.s.Stdout, rows); err != nil || q.failed {
		return submit.CodeRefused
	}
	return 0
}

// steps are the running steps that a word means: the one it names, all, or the first that is not the batch script.
func (q *query) steps(ctx context.Context, w wanted) ([]uint32, error) {
	if w.hasStep {
		return []uint32{w.step}, nil
	}
	listing, err := fetch.Jobs(ctx, q.cluster, &apiv1.ListJobsRequest{Filter: &apiv1.JobFilter{JobIds: []uint32{w.job}}, Steps: true, Brief: true})
	if err != nil {
		return nil, err
	}
	var ids []uint32
	for _, step := range listing.Steps {
		if step.GetState() == apiv1.StepState_STEP_STATE_RUNNING {
			ids = append(ids, step.GetId())
		}
	}
	slices.Sort(ids) // the batch script has the highest number
	if !q.options.Has("allsteps") && len(ids) > 1 {
		ids = ids[:1]
	}
	return ids, nil
}

// used is a task and where it runs.
type used struct {
	*nodev1.TaskUsage
	node string
}

// row is a line: a step, or with --pidformat what it has on one node.
type row struct {
	job, step uint32
	nodes     string
	tasks     []used
	raw       bool
}

// ask asks all nodes of a step.
func (q *query) ask(ctx context.Context, job, id uint32) ([]*row, error) {
	answer, err := q.cluster.Jobs().GetStep(ctx, &apiv1.GetStepRequest{JobId: job, StepId: id})
	if err != nil {
		return nil, err
	}
	nodes := map[string]string{} // by address
	var order []string
	for _, share := range answer.GetShares() {
		if _, ok := nodes[share.GetAgentAddress()]; !ok {
			nodes[share.GetAgentAddress()] = share.GetNode()
			order = append(order, share.GetAgentAddress())
		}
	}
	answers, errs := make([]*nodev1.GetUsageResponse, len(order)), make([]error, len(order))
	slots := make(chan struct{}, parallel)
	var group sync.WaitGroup
	for i, address := range order {
		group.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			call, cancel := context.WithTimeout(ctx, askTimeout)
			defer cancel()
			answers[i], errs[i] = q.cluster.Node(address).GetUsage(call, &nodev1.GetUsageRequest{JobId: job, StepId: &id})
		})
	}
	group.Wait()
	all := &row{job: job, step: id, nodes: answer.GetStep().GetNodeList(), raw: q.options.Has("noconvert")}
	var each []*row
	for i, address := range order {
		if errs[i] != nil {
			submit.Explain(q.s, fmt.Sprintf("%s: step %d.%s", nodes[address], job, record.StepName(id)), errs[i])
			q.failed = true
			continue
		}
		one := &row{job: job, step: id, nodes: nodes[address], raw: all.raw}
		for _, task := range answers[i].GetTasks() {
			one.tasks = append(one.tasks, used{task, nodes[address]})
		}
		each = append(each, one)
		all.tasks = append(all.tasks, one.tasks...)
	}
	if q.options.Has("pidformat") {
		return each, nil
	}
	return []*row{all}, nil
}
