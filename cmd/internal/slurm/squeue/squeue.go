package squeue

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/muster-hpc/muster/cmd/internal/slurm/document"
	"github.com/muster-hpc/muster/cmd/internal/slurm/fetch"
	"github.com/muster-hpc/muster/cmd/internal/slurm/format"
	"github.com/muster-hpc/muster/cmd/internal/slurm/option"
	"github.com/muster-hpc/muster/cmd/internal/slurm/record"
	"github.com/muster-hpc/muster/cmd/internal/slurm/session"
	"github.com/muster-hpc/muster/cmd/internal/slurm/value"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/notation"
	"github.com/muster-hpc/muster/rpc"
)

// Layouts of Slurm.
const (
	layoutJobs  = "%.18i %.9P %.8j %.8u %.2t %.10M %.6D %R"
	layoutLong  = "%.18i %.9P %.8j %.8u %.8T %.10M %.9l %.6D %R"
	layoutStart = "%.18i %.9P %.8j %.8u %.2t %.19S %.6D %20Y %R"
	layoutSteps = "%.15i %.8j %.9P %.8u %.9M %N"
	stepsLong   = "%.15i %.8j %.9P %.8u %.9M %.9l %N"
)

// flushBytes is how much output is gathered before it is written.
const flushBytes = 256 << 10

// query is what a command line asks for.
type query struct {
	options   *option.Set
	filter    *apiv1.JobFilter
	states    value.StateFilter
	all       bool // states were asked for with "all"
	named     int  // how many ids were named
	stepIDs   map[[2]uint32]bool
	steps     bool
	qos       []string
	nothing   bool // a filter that no job passes
	notUser   *uint32
	layout    format.Layout[*row]
	unknown   []string // names of -O that no field has
	keys      []format.SortKey
	startOnly bool
	every     time.Duration
}

// Run is the command. It returns 0, or 1 if words cannot be parsed, the cluster cannot be asked, or the one job named
// does not exist.
func Run(ctx context.Context, s *session.Session) int {
	table := Table()
	o, operands, err := table.Parse(s.Args)
	if err != nil {
		var usage *option.UsageError
		if errors.As(err, &usage) {
			s.Usage(usage)
		} else {
			s.Errorf("%v", err)
		}
		return 1
	}
	switch {
	case o.Has("help"):
		fmt.Fprint(s.Stdout, table.Help(s.Program, "", "Lists jobs, or with --steps their steps."))
		return 0
	case o.Has("usage"):
		fmt.Fprint(s.Stdout, table.Usage(s.Program, ""))
		return 0
	case o.Has("version"):
		s.Version()
		return 0
	}
	env, err := table.Environment(s.Lookup)
	if err != nil {
		s.Errorf("%v", err)
		return 1
	}
	if o.Has("format") || o.Has("Format") { // either on the command line wins over both variables
		env.Drop("format")
		env.Drop("Format")
	}
	q, err := parse(s, o.Over(env), operands)
	if err != nil {
		s.Errorf("%v", err)
		return 1
	}
	for _, name := range q.unknown { // said, and otherwise without consequence, as in Slurm
		s.Errorf("Invalid job format specification: %s", name)
	}
	for {
		if code := list(ctx, s, q); code != 0 || q.every == 0 {
			return code
		}
		timer := time.NewTimer(q.every)
		select {
		case <-ctx.Done():
			timer.Stop()
			return 0
		case <-timer.C:
		}
	}
}

// parse turns options into a query.
func parse(s *session.Session, o *option.Set, operands []string) (*query, error) {
	q := &query{options: o, filter: &apiv1.JobFilter{}, steps: o.Has("steps"), startOnly: o.Has("start")}
	jobs, stepList := o.Text("jobs"), o.Text("steps")
	for _, word := range operands {
		v, asked := o.Get("jobs")
		switch digit := word != "" && word[0] >= '0' && word[0] <= '9'; {
		case digit && asked && !v.Given && jobs == "":
			jobs = word
		case digit && q.steps && stepList == "":
			stepList = word
		default:
			return nil, fmt.Errorf("Unrecognized option: %s", word)
		}
	}
	for _, read := range []func() error{
		func() error { return q.readJobs(jobs, stepList) },
		func() error { return q.readWho(s) },
		q.readStates,
		q.readLayout,
	} {
		if err := read(); err != nil {
			return nil, err
		}
	}
	if v, ok := o.Get("iterate"); ok {
		n, err := strconv.Atoi(v.Text)
		if err != nil || n <= 0 {
			return nil, fmt.Errorf("Invalid --iterate value %q: a number of seconds above 0 is needed", v.Text)
		}
		q.every = time.Duration(n) * time.Second
	}
	if v, ok := o.Get("json"); ok && v.Given && !document.Speaks(v.Text) {
		return nil, fmt.Errorf("--json=%s: only %s is spoken", v.Text, document.Parser)
	}
	return q, nil
}

func (q *query) readJobs(jobs, stepList string) error {
	ids, named, err := fetch.JobIDs(jobs)
	if err != nil {
		return err
	}
	q.named = named
	if named > 0 {
		q.filter.JobIds, q.nothing = ids, len(ids) == 0
	}
	if stepList == "" {
		return nil
	}
	q.stepIDs = map[[2]uint32]bool{}
	for word := range strings.SplitSeq(stepList, ",") {
		job, step, dotted, err := fetch.Step(word)
		if err != nil {
			return err
		}
		q.filter.JobIds = append(q.filter.JobIds, job)
		if !dotted {
			step = 0
			q.stepIDs[[2]uint32{job, record.BatchStep + 1}] = true // any step of it
			continue
		}
		q.stepIDs[[2]uint32{job, step}] = true
	}
	return nil
}

func (q *query) readWho(s *session.Session) error {
	o := q.options
	if v, ok := o.Get("user"); ok {
		uids, err := s.UserIDs(v.Text)
		if err != nil {
			return err
		}
		q.filter.Uids = uids
	}
	if o.Has("me") {
		q.filter.Uids = []uint32{s.UID}
	}
	if o.Has("notme") {
		q.notUser = &s.UID
	}
	for name, to := range map[string]*[]string{
		"account": &q.filter.Accounts, "name": &q.filter.Names, "partition": &q.filter.Partitions, "qos": &q.qos,
	} {
		if v, ok := o.Get(name); ok && v.Text != "" {
			*to = strings.Split(v.Text, ",")
		}
	}
	if v, ok := o.Get("nodelist"); ok {
		hosts, err := notation.Expand(v.Text)
		if err != nil {
			return fmt.Errorf("Invalid node name specified: %w", err)
		}
		q.filter.Nodes = hosts
	}
	q.nothing = q.nothing || o.Text("licenses") != "" || o.Text("reservation") != ""
	return nil
}

func (q *query) readStates() error {
	v, ok := q.options.Get("states")
	if !ok || v.Text == "" {
		if q.startOnly {
			q.states, _ = value.ParseStates("PENDING")
		} else {
			q.states, _ = value.ParseStates("PENDING,CONFIGURING,RUNNING,COMPLETING")
		}
	} else {
		var err error
		if q.states, err = value.ParseStates(v.Text); err != nil {
			return fmt.Errorf("%w\nValid job states include: %s", err, value.StateWords())
		}
	}
	q.all = q.states.All
	ended := q.all
	for state := range q.states.States {
		ended = ended || value.Ended(state)
	}
	q.filter.Active = !ended && q.named == 0 && !q.steps
	return nil
}

func (q *query) readLayout() error {
	o := q.options
	o.Has("all")
	fields, defaultKeys := letters, "P,t,-p"
	text := layoutJobs
	switch {
	case q.steps && o.Has("long"):
		fields, text, defaultKeys = stepLetters, stepsLong, "P,i"
	case q.steps:
		fields, text, defaultKeys = stepLetters, layoutSteps, "P,i"
	case q.startOnly:
		text, defaultKeys = layoutStart, "S"
	case o.Has("long"):
		text = layoutLong
	}
	if v, ok := o.Get("format"); ok {
		text = v.Text
	}
	q.layout = format.Letters(text, fields)
	if v, ok := o.Get("Format"); ok {
		known := names()
		if q.steps {
			known = stepNames()
		}
		q.layout, q.unknown = format.Names(v.Text, known)
	}
	if v, ok := o.Get("sort"); ok {
		defaultKeys = v.Text
	}
	keys, err := format.SortKeys(defaultKeys, func(letter byte) bool { return numeric[letter] != nil || letters[letter].Value != nil })
	q.keys = keys
	return err
}

// list asks once and prints.
func list(ctx context.Context, s *session.Session, q *query) int {
	cluster, err := s.Cluster(ctx)
	if err != nil {
		s.Line("%s", fetch.Error("slurm_load_jobs", err))
		return 1
	}
	if name := q.options.Text("clusters"); name != "" && !session.NamesCluster(name, cluster.ClusterName()) {
		s.Errorf("'%s' can't be reached now, or it is an invalid entry for --cluster.\nThis is cluster %s; there is no other here.", name, cluster.ClusterName())
		return 1
	}
	if name, err := q.strange(ctx, cluster); err != nil {
		fmt.Fprintln(s.Stderr, fetch.Error("slurm_load_node", err))
		return 1
	} else if name != "" {
		s.Errorf("Invalid node name %s", name)
		return 1
	}
	json := q.options.Has("json")
	rows, view, err := q.rows(ctx, s, cluster, json)
	if err != nil {
		fmt.Fprintln(s.Stderr, fetch.Error("slurm_load_jobs", err))
		return 1
	}
	if rows == nil && q.named == 1 {
		fmt.Fprintln(s.Stderr, "slurm_load_jobs error: Invalid job id specified")
		return 1
	}
	if json {
		return document.WriteJobs(s, rows, view)
	}
	if q.every > 0 || q.options.Has("long") {
		fmt.Fprintln(s.Stdout, view.Now.Format("Mon Jan 02 15:04:05 2006"))
	}
	if q.options.Has("clusters") {
		fmt.Fprintf(s.Stdout, "CLUSTER: %s\n", view.Cluster)
	}
	return q.write(s.Stdout, rows)
}

// strange returns the first node of --nodelist that the cluster does not have; empty if there is none.
func (q *query) strange(ctx context.Context, cluster session.Cluster) (string, error) {
	names := q.filter.GetNodes()
	if len(names) == 0 {
		return "", nil
	}
	answer, err := cluster.Cluster().ListNodes(ctx, &apiv1.ListNodesRequest{Names: names})
	if detail := rpc.Detail(err); detail.GetReason() == "NODE_UNKNOWN" {
		return strings.TrimPrefix(detail.GetSubject(), "node "), nil
	}
	if err != nil {
		return "", err
	}
	for _, name := range names {
		if !slices.ContainsFunc(answer.GetNodes(), func(n *apiv1.Node) bool { return n.GetSpec().GetName() == name }) {
			return name, nil
		}
	}
	return "", nil
}

// write prints header and rows; a layout without any field prints nothing.
func (q *query) write(to io.Writer, rows []*row) int {
	if len(q.unknown) > 0 && len(q.layout.Columns) == 0 {
		return 0
	}
	var out []byte
	if !q.options.Has("noheader") {
		out = q.layout.AppendHeader(out)
	}
	for _, r := range rows {
		out = q.layout.AppendRow(out, r)
		if len(out) >= flushBytes {
			if _, err := to.Write(out); err != nil {
				return 1
			}
			out = out[:0]
		}
	}
	if _, err := to.Write(out); err != nil {
		return 1
	}
	return 0
}

// rows asks for jobs or steps and keeps those that are wanted, sorted. nil means that none of the jobs that were named
// exists.
func (q *query) rows(ctx context.Context, s *session.Session, cluster session.Cluster, full bool) ([]*row, *record.View, error) {
	view := &record.View{Names: s, Now: s.Now(), Cluster: cluster.ClusterName(), Raw: q.options.Has("noconvert")}
	if q.nothing {
		if q.named > 0 {
			return nil, view, nil
		}
		return []*row{}, view, nil
	}
	request := &apiv1.ListJobsRequest{Filter: q.filter, Brief: !full && !q.layout.NeedsFull(), Steps: q.steps}
	if !q.filter.GetActive() && q.named == 0 && !q.steps {
		q.filter.EndedSince = fetch.Recent(s.Now())
	}
	listing, err := fetch.JobsOrStale(ctx, cluster, request, s.Stderr)
	if err != nil {
		return nil, nil, err
	}
	view.Now = listing.Now
	if q.named > 0 && len(listing.Jobs) == 0 {
		exists, err := q.exists(ctx, cluster)
		if err != nil || !exists {
			return nil, view, err
		}
	}
	rows := make([]*row, 0, len(listing.Jobs))
	if q.steps {
		rows = q.stepRows(rows, listing, view)
	} else {
		for _, job := range listing.Jobs {
			rows = q.jobRows(rows, job, view)
		}
	}
	order(rows, q.keys)
	return rows, view, nil
}

// exists tells whether a job that was named exists, though other filters left it out.
func (q *query) exists(ctx context.Context, cluster session.Cluster) (bool, error) {
	if q.named > 1 {
		return true, nil
	}
	listing, err := fetch.Jobs(ctx, cluster, &apiv1.ListJobsRequest{Filter: &apiv1.JobFilter{JobIds: q.filter.GetJobIds()}, Brief: true})
	return err == nil && len(listing.Jobs) > 0, err
}

// wanted applies the filters that the server does not know.
func (q *query) wanted(job *apiv1.Job) bool {
	return (q.qos == nil || slices.Contains(q.qos, job.GetSpec().GetQos())) &&
		(q.notUser == nil || job.GetOwner().GetUid() != *q.notUser)
}

func (q *query) jobRows(rows []*row, job *apiv1.Job, view *record.View) []*row {
	if !q.wanted(job) || !q.states.Match(job.GetStatus()) {
		return rows
	}
	candidates := job.GetSpec().GetPartitions()
	if q.options.Has("priority") && len(candidates) > 1 && job.GetStatus().GetState() == apiv1.JobState_JOB_STATE_PENDING {
		for _, name := range candidates {
			rows = append(rows, &row{Job: job, Partition: name, View: view})
		}
		return rows
	}
	return append(rows, &row{Job: job, View: view})
}

func (q *query) stepRows(rows []*row, listing *fetch.Listing, view *record.View) []*row {
	jobs := map[uint32]*apiv1.Job{}
	for _, job := range listing.Jobs {
		jobs[job.GetId()] = job
	}
	for _, step := range listing.Steps {
		job := jobs[step.GetJobId()]
		switch {
		case job == nil || !q.wanted(job):
		case q.stepIDs != nil && !q.stepIDs[[2]uint32{job.GetId(), step.GetId()}] && !q.stepIDs[[2]uint32{job.GetId(), record.BatchStep + 1}]:
		case step.GetState() == apiv1.StepState_STEP_STATE_PREPARING || step.GetState() == apiv1.StepState_STEP_STATE_RUNNING:
			rows = append(rows, &row{Job: job, Step: step, View: view})
		}
	}
	return rows
}
