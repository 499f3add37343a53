package sacct

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect/v2"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/muster-hpc/muster/cmd/internal/slurm/document"
	"github.com/muster-hpc/muster/cmd/internal/slurm/fetch"
	"github.com/muster-hpc/muster/cmd/internal/slurm/option"
	"github.com/muster-hpc/muster/cmd/internal/slurm/record"
	"github.com/muster-hpc/muster/cmd/internal/slurm/session"
	"github.com/muster-hpc/muster/cmd/internal/slurm/value"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/notation"
)

// parallel is how many jobs are asked for their steps at once; a row of docs/limits.md.
const parallel = 16

// idsPerCall is how many ids one listing may name; a row of docs/limits.md.
const idsPerCall = 5_000

// Table is the option table of sacct.
func Table() *option.Table {
	const none, required, optional = option.None, option.Required, option.Optional
	const oneCluster = "there is one cluster here, and no federation"
	return &option.Table{Options: []option.Option{
		{Long: "accounts", Short: 'A', Arity: required, Meta: "NAMES", Help: "jobs of these accounts"},
		{Long: "allclusters", Short: 'L', Arity: none, Help: "all clusters", Harmless: oneCluster},
		{Long: "allocations", Short: 'X', Arity: none, Help: "no steps"},
		{Long: "allusers", Short: 'a', Arity: none, Help: "jobs of all users"},
		{Long: "array", Arity: none, Help: "a line for each task of an array", Harmless: "there are no arrays yet"},
		{Long: "associations", Short: 'x', Arity: required, Refused: "there are no associations yet"},
		{Long: "batch-script", Short: 'B', Arity: none, Refused: "use scontrol write batch_script"},
		{Long: "brief", Short: 'b', Arity: none, Help: "id, state and exit code"},
		{Long: "clusters", Short: 'M', Arity: required, Meta: "NAMES", Help: "must name this cluster, or all", Env: "SLURM_CLUSTERS"},
		{Long: "completion", Short: 'c', Arity: none, Refused: "there is one record of jobs, which is complete"},
		{Long: "constraints", Short: 'C', Arity: required, Refused: "nodes are chosen by resources, --nodelist and --exclude only"},
		{Long: "delimiter", Arity: required, Meta: "TEXT", Help: "between columns of -p and -P"},
		{Long: "duplicates", Short: 'D', Arity: none, Help: "also attempts after which a job was started again"},
		{Long: "endtime", Short: 'E', Arity: required, Meta: "TIME", Help: "jobs until then"},
		{Long: "env-vars", Arity: none, Refused: "environments are shown to nobody"},
		{Long: "federation", Arity: none, Help: "jobs of the federation", Harmless: oneCluster, Env: "SACCT_FEDERATION"},
		{Long: "file", Short: 'f', Arity: required, Refused: "records are in the replicated state"},
		{Long: "flags", Short: 'F', Arity: required, Refused: "jobs have no such flags"},
		{Long: "format", Short: 'o', Arity: required, Meta: "FIELDS", Help: "columns, as JobID,State%20", Env: "SACCT_FORMAT"},
		{Long: "gid", Short: 'g', Arity: required, Meta: "GROUPS", Help: "jobs of these groups"},
		{Long: "group", Same: "gid", Arity: required, Meta: "GROUPS"},
		{Long: "help", Short: 'h', Arity: none, Help: "this text"},
		{Long: "helpformat", Short: 'e', Arity: none, Help: "the names of columns"},
		{Long: "jobs", Short: 'j', Arity: required, Meta: "IDS", Help: "these jobs or steps"},
		{Long: "job", Same: "jobs", Arity: required, Meta: "IDS"},
		{Long: "json", Arity: optional, Meta: "PARSER", Help: "everything, as JSON"},
		{Long: "local", Arity: none, Help: "this cluster only", Harmless: oneCluster, Env: "SACCT_LOCAL"},
		{Long: "long", Short: 'l', Arity: none, Help: "more columns"},
		{Long: "name", Arity: required, Meta: "NAMES", Help: "jobs of these names"},
		{Long: "ncpus", Short: 'I', Arity: required, Meta: "MIN[-MAX]", Help: "jobs with so many CPUs"},
		{Long: "nnodes", Short: 'i', Arity: required, Meta: "MIN[-MAX]", Help: "jobs with so many nodes"},
		{Long: "noconvert", Arity: none, Help: "sizes in MiB"},
		{Long: "nodelist", Short: 'N', Arity: required, Meta: "HOSTS", Help: "jobs that ran on these nodes"},
		{Long: "noheader", Short: 'n', Arity: none, Help: "no lines of headers"},
		{Long: "parsable", Short: 'p', Arity: none, Help: "columns with | after each"},
		{Long: "parsable2", Short: 'P', Arity: none, Help: "columns with | between them"},
		{Long: "partition", Short: 'r', Arity: required, Meta: "NAMES", Help: "jobs of these partitions"},
		{Long: "qos", Short: 'q', Arity: required, Meta: "NAMES", Help: "jobs of these qualities of service"},
		{Long: "reason", Short: 'R', Arity: required, Meta: "REASONS", Help: "jobs with these reasons"},
		{Long: "starttime", Short: 'S', Arity: required, Meta: "TIME", Help: "jobs since then"},
		{Long: "state", Short: 's', Arity: required, Meta: "STATES", Help: "jobs in these states at that time"},
		{Long: "timelimit-max", Short: 'K', Arity: required, Meta: "TIME", Help: "jobs with at most this limit"},
		{Long: "timelimit-min", Short: 'k', Arity: required, Meta: "TIME", Help: "jobs with at least this limit"},
		{Long: "truncate", Short: 'T', Arity: none, Help: "cut times to --starttime and --endtime"},
		{Long: "uid", Short: 'u', Arity: required, Meta: "USERS", Help: "jobs of these users"},
		{Long: "units", Arity: required, Meta: "K|M|G|T|P", Help: "unit of sizes"},
		{Long: "usage", Arity: none, Help: "a short list of options"},
		{Long: "use-local-uid", Arity: none, Help: "names of this host", Harmless: "names always come from the job or this host"},
		{Long: "user", Same: "uid", Arity: required, Meta: "USERS"},
		{Long: "verbose", Short: 'v', Arity: none, Help: "say more", Harmless: "there is nothing more to say"},
		{Long: "version", Short: 'V', Arity: none, Help: "the release of Slurm whose dialect is spoken"},
		{Long: "wckeys", Short: 'W', Arity: required, Meta: "KEYS", Help: "jobs with these keys"},
		{Long: "whole-hetjob", Arity: optional, Help: "all components of heterogeneous jobs", Harmless: "there are none yet", Meta: "yes|no"},
		{Long: "yaml", Arity: optional, Refused: "use --json"},
	}}
}

// Run is the command. It returns 0, also if nothing is found, or 1.
func Run(ctx context.Context, s *session.Session) int {
	table := Table()
	o, words, err := table.Parse(s.Args)
	if err == nil && len(words) > 0 {
		err = &option.UsageError{Text: "unknown argument " + words[0]}
	}
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
		fmt.Fprint(s.Stdout, table.Help(s.Program, "", "Lists jobs and their steps, also those that have ended."))
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
	env, err := table.Environment(s.Lookup)
	if err != nil {
		s.Errorf("%v", err)
		return 1
	}
	q, err := parse(s, o.Over(env))
	if err != nil {
		s.Errorf("%v", err)
		return 1
	}
	cluster, err := s.Cluster(ctx)
	if err != nil {
		fmt.Fprintln(s.Stderr, fetch.Error("slurmdb_jobs_get", err))
		return 1
	}
	if name := q.options.Text("clusters"); name != "" && !session.NamesCluster(name, cluster.ClusterName()) {
		s.Errorf("'%s' can't be reached now, or it is an invalid entry for --cluster: this is cluster %s", name, cluster.ClusterName())
		return 1
	}
	lines, view, err := q.lines(ctx, s, cluster)
	if err != nil {
		fmt.Fprintln(s.Stderr, fetch.Error("slurmdb_jobs_get", err))
		return 1
	}
	if q.options.Has("json") {
		return writeJSON(s, lines, view)
	}
	if err := q.layout.write(s.Stdout, lines); err != nil {
		return 1
	}
	return 0
}

// query is what a command line asks for.
type query struct {
	options *option.Set
	filter  *apiv1.JobFilter
	layout  layout
	steps   map[uint32][]uint32 // steps that were named, by job; a nil list asks for the whole job
	named   bool
	from    time.Time
	to      time.Time
	states  *value.StateFilter
	checks  []func(*record.Row) bool
	units   byte
}

func parse(s *session.Session, o *option.Set) (*query, error) {
	q := &query{options: o, filter: &apiv1.JobFilter{}}
	for _, read := range []func(*session.Session) error{q.readJobs, q.readWho, q.readNumbers, q.readTimes} {
		if err := read(s); err != nil {
			return nil, err
		}
	}
	if v, ok := o.Get("units"); ok {
		if len(v.Text) != 1 || !strings.Contains("KMGTP", strings.ToUpper(v.Text)) {
			return nil, fmt.Errorf("Invalid unit: %s", v.Text)
		}
		q.units = strings.ToUpper(v.Text)[0]
	}
	if v, ok := o.Get("json"); ok && v.Given && !document.Speaks(v.Text) {
		return nil, fmt.Errorf("--json=%s: only %s is spoken", v.Text, document.Parser)
	}
	var err error
	q.layout, err = parseLayout(o)
	return q, err
}

func (q *query) readJobs(*session.Session) error {
	v, ok := q.options.Get("jobs")
	if !ok {
		return nil
	}
	q.named, q.steps = true, map[uint32][]uint32{}
	for word := range strings.SplitSeq(v.Text, ",") {
		if word = strings.TrimSpace(word); word == "" {
			continue
		}
		head, _, _ := strings.Cut(word, ".")
		if _, known, err := fetch.JobID(head); err != nil {
			return err
		} else if !known {
			continue // an element of an array: there is none
		}
		job, step, dotted, err := fetch.Step(word)
		if err != nil {
			return err
		}
		have, seen := q.steps[job]
		switch {
		case !dotted:
			q.steps[job] = nil
		case !seen || have != nil:
			q.steps[job] = append(have, step)
		}
		if !seen {
			q.filter.JobIds = append(q.filter.JobIds, job)
		}
	}
	return nil
}

func (q *query) readWho(s *session.Session) error {
	o := q.options
	switch v, ok := o.Get("uid"); {
	case o.Has("allusers"):
	case ok:
		uids, err := s.UserIDs(v.Text)
		if err != nil {
			return err
		}
		q.filter.Uids = uids
	case s.UID != 0 && !q.named:
		q.filter.Uids = []uint32{s.UID}
	}
	for name, to := range map[string]*[]string{"accounts": &q.filter.Accounts, "name": &q.filter.Names, "partition": &q.filter.Partitions} {
		if v, ok := o.Get(name); ok && v.Text != "" {
			*to = strings.Split(v.Text, ",")
		}
	}
	if v, ok := o.Get("nodelist"); ok {
		hosts, err := notation.Expand(v.Text)
		if err != nil {
			return err
		}
		q.filter.Nodes = hosts
	}
	for name, of := range map[string]func(*record.Row) []string{
		"qos":    func(r *record.Row) []string { return []string{r.Job.GetSpec().GetQos()} },
		"wckeys": func(r *record.Row) []string { return []string{r.Job.GetSpec().GetWckey()} },
		"reason": func(r *record.Row) []string { return []string{r.Reason()} },
		"gid":    func(r *record.Row) []string { return []string{number(r.Job.GetOwner().GetGid()), r.Group()} },
	} {
		if v, ok := o.Get(name); ok && v.Text != "" {
			wanted := strings.Split(v.Text, ",")
			q.checks = append(q.checks, func(r *record.Row) bool {
				return slices.ContainsFunc(of(r), func(text string) bool { return slices.Contains(wanted, text) })
			})
		}
	}
	return nil
}

func (q *query) readNumbers(*session.Session) error {
	for name, of := range map[string]func(*record.Row) uint32{"ncpus": (*record.Row).CPUs, "nnodes": (*record.Row).Nodes} {
		if v, ok := q.options.Get(name); ok {
			low, high, err := value.NodeCount(v.Text)
			if err != nil {
				return fmt.Errorf("Invalid --%s specification: %s", name, v.Text)
			}
			q.checks = append(q.checks, func(r *record.Row) bool { return of(r) >= low && of(r) <= high })
		}
	}
	for name, good := range map[string]func(limit, bound int64) bool{
		"timelimit-min": func(limit, bound int64) bool { return limit >= bound },
		"timelimit-max": func(limit, bound int64) bool { return limit <= bound },
	} {
		if v, ok := q.options.Get(name); ok {
			bound, err := value.TimeLimit(v.Text)
			if err != nil {
				return fmt.Errorf("Invalid --%s specification: %s", name, v.Text)
			}
			q.checks = append(q.checks, func(r *record.Row) bool {
				limit, limited := r.LimitSeconds()
				if !limited {
					limit = value.Unlimited
				}
				return good(limit, int64(bound))
			})
		}
	}
	return nil
}

// readTimes reads the window. Without --starttime it begins at midnight; for jobs that are named it has no beginning; for
// states it is the present.
func (q *query) readTimes(s *session.Session) error {
	now := s.Now()
	moment := func(name string) (time.Time, bool, error) {
		v, ok := q.options.Get(name)
		if !ok {
			return time.Time{}, false, nil
		}
		at, err := value.Moment(v.Text, now, false)
		if err != nil {
			return at, true, fmt.Errorf("Invalid time specification (pos=0): %s", v.Text)
		}
		return at, true, nil
	}
	from, fromGiven, err := moment("starttime")
	if err != nil {
		return err
	}
	to, toGiven, err := moment("endtime")
	if err != nil {
		return err
	}
	if v, ok := q.options.Get("state"); ok && v.Text != "" && !strings.EqualFold(v.Text, "all") {
		states, err := value.ParseStates(v.Text)
		if err != nil {
			return err
		}
		q.states = &states
	}
	switch {
	case fromGiven:
		q.from = from
	case q.named:
	case q.states != nil:
		q.from = now
	default:
		q.from = time.Date(now.Year(), now.Month(), now.Day(), 0, 0, 0, 0, now.Location())
	}
	if q.to = now; toGiven {
		q.to = to
	}
	if q.to.Before(q.from) {
		return fmt.Errorf("the end (%s) is before the start (%s)", value.Stamp(q.to, ""), value.Stamp(q.from, ""))
	}
	if !q.from.IsZero() {
		q.filter.EndedSince = timestamppb.New(q.from)
	}
	if toGiven {
		q.filter.SubmittedBefore = timestamppb.New(q.to)
	}
	return nil
}

// inState tells whether a job was in one of the states within the window.
func (q *query) inState(r *record.Row) bool {
	if q.states == nil || q.states.All {
		return true
	}
	status := r.Job.GetStatus()
	start, end := record.At(status.GetStartTime()), record.At(status.GetEndTime())
	if end.IsZero() {
		end = q.to
	}
	windowed := !q.from.IsZero()
	for state := range q.states.States {
		switch state {
		case apiv1.JobState_JOB_STATE_PENDING:
			if r.Pending() || windowed && !start.IsZero() && !start.Before(q.from) {
				return true
			}
		case apiv1.JobState_JOB_STATE_RUNNING:
			running := status.GetState() == apiv1.JobState_JOB_STATE_RUNNING || status.GetState() == apiv1.JobState_JOB_STATE_CONFIGURING
			if running || windowed && !start.IsZero() && start.Before(q.to) && end.After(q.from) {
				return true
			}
		default:
			if status.GetState() == state && !end.After(q.to) {
				return true
			}
		}
	}
	return q.states.Completing && status.GetCompleting()
}

// lines asks for jobs and, unless only allocations are wanted, for their steps.
func (q *query) lines(ctx context.Context, s *session.Session, cluster session.Cluster) ([]*line, *record.View, error) {
	view := &record.View{Names: s, Now: s.Now(), Cluster: cluster.ClusterName(), Raw: q.options.Has("noconvert")}
	if q.named && len(q.filter.GetJobIds()) == 0 {
		return nil, view, nil
	}
	// Attempts before the last one are asked for job by job.
	each, listed := q.options.Has("duplicates"), !q.options.Has("duplicates") && !q.options.Has("allocations")
	var jobs []*apiv1.Job
	steps := map[uint32]*apiv1.GetJobResponse{}
	ids := q.filter.GetJobIds()
	for first := true; first || len(ids) > 0; first = false {
		n := min(len(ids), idsPerCall)
		q.filter.JobIds, ids = ids[:n], ids[n:]
		listing, err := fetch.Jobs(ctx, cluster, &apiv1.ListJobsRequest{Filter: q.filter, AllSteps: listed})
		if err != nil {
			return nil, nil, err
		}
		view.Now = listing.Now
		jobs = append(jobs, listing.Jobs...)
		for _, step := range listing.Steps {
			detail := steps[step.GetJobId()]
			if detail == nil {
				detail = &apiv1.GetJobResponse{}
				steps[step.GetJobId()] = detail
			}
			detail.Steps = append(detail.Steps, step)
		}
	}
	slices.SortFunc(jobs, func(a, b *apiv1.Job) int { return int(int64(a.GetId()) - int64(b.GetId())) })
	var rows []*record.Row
	for _, job := range jobs {
		r := &record.Row{Job: job, View: view}
		if q.inState(r) && !slices.ContainsFunc(q.checks, func(check func(*record.Row) bool) bool { return !check(r) }) {
			rows = append(rows, r)
		}
	}
	details := make([]*apiv1.GetJobResponse, len(rows))
	for i, r := range rows {
		details[i] = steps[r.Job.GetId()]
	}
	if each {
		if err := q.details(ctx, cluster, rows, details); err != nil {
			return nil, nil, err
		}
	}
	var lines []*line
	for i, r := range rows {
		lines = append(lines, q.expand(r, details[i])...)
	}
	return lines, view, nil
}

// details asks for attempts and steps of jobs that have had any.
func (q *query) details(ctx context.Context, cluster session.Cluster, rows []*record.Row, into []*apiv1.GetJobResponse) error {
	var group sync.WaitGroup
	slots := make(chan struct{}, parallel)
	errs := make([]error, len(rows))
	for i, r := range rows {
		if r.Job.GetStatus().GetAttempt() == 0 && r.Pending() {
			continue
		}
		slots <- struct{}{}
		group.Add(1)
		go func() {
			defer func() { <-slots; group.Done() }()
			answer, err := cluster.Jobs().GetJob(ctx, &apiv1.GetJobRequest{JobId: r.Job.GetId()})
			if err != nil && connect.CodeOf(err) != connect.CodeNotFound { // it may have left the hot state meanwhile
				errs[i] = err
			}
			into[i] = answer
		}()
	}
	group.Wait()
	return errors.Join(errs...)
}

// expand makes the lines of a job: earlier attempts if asked for, the allocation, and the steps of the last attempt.
func (q *query) expand(r *record.Row, detail *apiv1.GetJobResponse) []*line {
	var lines []*line
	add := func(l *line) {
		l.units, l.noconvert = q.units, q.options.Has("noconvert")
		if q.options.Has("truncate") {
			l.from, l.to = q.from, q.to
		}
		lines = append(lines, l)
	}
	only := q.steps[r.Job.GetId()]
	last := r.Job.GetStatus().GetAttempt()
	steps := func(attempt uint32) {
		if q.options.Has("allocations") {
			return
		}
		own := slices.Clone(detail.GetSteps())
		slices.SortStableFunc(own, func(a, b *apiv1.Step) int { return int(stepOrder(a) - stepOrder(b)) })
		for _, step := range own {
			if step.GetAttempt() == attempt && (only == nil || slices.Contains(only, step.GetId())) {
				add(&line{Row: &record.Row{Job: r.Job, Step: step, View: r.View}, used: step.GetUsage()})
			}
		}
	}
	if q.options.Has("duplicates") && only == nil {
		for _, attempt := range detail.GetAttempts() {
			// The last attempt of a job that waits again is an earlier one too.
			if attempt.GetNumber() < last || r.Pending() {
				add(&line{Row: r, attempt: attempt, used: together(detail.GetSteps(), attempt.GetNumber())})
				steps(attempt.GetNumber())
			}
		}
	}
	if only == nil {
		add(&line{Row: r, used: together(detail.GetSteps(), last)})
	}
	if !r.Pending() {
		steps(last)
	}
	return lines
}

// stepOrder puts the batch script first.
func stepOrder(s *apiv1.Step) int64 {
	if s.GetId() == record.BatchStep {
		return -1
	}
	return int64(s.GetId())
}
