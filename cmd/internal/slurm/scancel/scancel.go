package scancel

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/muster-hpc/muster/cmd/internal/slurm/fetch"
	"github.com/muster-hpc/muster/cmd/internal/slurm/option"
	"github.com/muster-hpc/muster/cmd/internal/slurm/record"
	"github.com/muster-hpc/muster/cmd/internal/slurm/session"
	"github.com/muster-hpc/muster/cmd/internal/slurm/submit"
	"github.com/muster-hpc/muster/cmd/internal/slurm/value"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/notation"
)

// longestRange bounds "FIRST-LAST"; a row of docs/limits.md.
const longestRange = 100_000

const operands = "[JOB_ID[.STEP_ID]...]"

// Table is the option table of scancel.
func Table() *option.Table {
	const none, required = option.None, option.Required
	return &option.Table{Options: []option.Option{
		{Long: "account", Short: 'A', Arity: required, Meta: "NAME", Help: "jobs of this account", Env: "SCANCEL_ACCOUNT"},
		{Long: "admin-comment", Arity: required, Refused: "jobs have no comment of an administrator"},
		{Long: "batch", Short: 'b', Arity: none, Help: "signal the batch shell only", Env: "SCANCEL_BATCH"},
		{Long: "clusters", Short: 'M', Arity: required, Meta: "NAMES", Help: "must name this cluster, or all", Env: "SLURM_CLUSTERS"},
		{Long: "cron", Arity: none, Help: "also jobs of scrontab", Harmless: "there is no scrontab", Env: "SCANCEL_CRON"},
		{Long: "ctld", Arity: none, Help: "ask a controller", Harmless: "a controller is always asked", Env: "SCANCEL_CTLD"},
		{Long: "full", Short: 'f', Arity: none, Help: "signal the batch shell and all steps", Env: "SCANCEL_FULL"},
		{Long: "help", Arity: none, Help: "this text"},
		{Long: "hurry", Short: 'H', Arity: none, Help: "stage nothing out", Harmless: "nothing is ever staged out", Env: "SCANCEL_HURRY"},
		{Long: "interactive", Short: 'i', Arity: none, Help: "ask before each job", Env: "SCANCEL_INTERACTIVE"},
		{Long: "jobname", Same: "name", Arity: required, Meta: "NAME"},
		{Long: "me", Arity: none, Help: "jobs of the caller"},
		{Long: "name", Short: 'n', Arity: required, Meta: "NAME", Help: "jobs of this name", Env: "SCANCEL_NAME"},
		{Long: "nodelist", Short: 'w', Arity: required, Meta: "HOSTS", Help: "jobs on these nodes"},
		{Long: "partition", Short: 'p', Arity: required, Meta: "NAME", Help: "jobs of this partition", Env: "SCANCEL_PARTITION"},
		{Long: "qos", Short: 'q', Arity: required, Meta: "NAME", Help: "jobs of this quality of service", Env: "SCANCEL_QOS"},
		{Long: "quiet", Short: 'Q', Arity: none, Help: "no messages"},
		{Long: "reservation", Short: 'R', Arity: required, Meta: "NAME", Help: "jobs in this reservation: none is"},
		{Long: "sibling", Arity: required, Refused: "there is one cluster here, and no federation"},
		{Long: "signal", Short: 's', Arity: required, Meta: "SIGNAL", Help: "send this signal instead of ending the job"},
		{Long: "state", Short: 't', Arity: required, Meta: "STATE", Help: "jobs in this state (PENDING, RUNNING)", Env: "SCANCEL_STATE"},
		{Long: "usage", Arity: none, Help: "a short list of options"},
		{Long: "user", Short: 'u', Arity: required, Meta: "USER", Help: "jobs of this user", Env: "SCANCEL_USER"},
		{Long: "verbose", Short: 'v', Arity: none, Help: "say what is done", Env: "SCANCEL_VERBOSE"},
		{Long: "version", Short: 'V', Arity: none, Help: "the release of Slurm whose dialect is spoken"},
		{Long: "wckey", Arity: required, Meta: "KEY", Help: "jobs with this key", Env: "SCANCEL_WCKEY"},
	}}
}

// target is a step that was named.
type target struct{ job, step uint32 }

// request is what a command line asks for.
type request struct {
	options *option.Set
	filter  *apiv1.JobFilter
	steps   []target
	states  *value.StateFilter
	signal  uint32
	filters bool
}

// Run is the command. It returns 0, also for ids that do not exist, or 1.
func Run(ctx context.Context, s *session.Session) int {
	table := Table()
	o, words, err := table.Parse(s.Args)
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
		fmt.Fprint(s.Stdout, table.Help(s.Program, operands, "Ends or signals jobs and steps."))
		return 0
	case o.Has("usage"):
		fmt.Fprint(s.Stdout, table.Usage(s.Program, operands))
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
	r, err := parse(s, o.Over(env), words)
	if err != nil {
		s.Errorf("%v", err)
		return 1
	}
	cluster, err := s.Cluster(ctx)
	if err != nil {
		s.Errorf("%s", s.Sentence(err))
		return 1
	}
	if name := r.options.Text("clusters"); name != "" && !session.NamesCluster(name, cluster.ClusterName()) {
		s.Errorf("'%s' can't be reached now, or it is an invalid entry for --cluster.\nThis is cluster %s; there is no other here.", name, cluster.ClusterName())
		return 1
	}
	return r.send(ctx, s, cluster)
}

func parse(s *session.Session, o *option.Set, words []string) (*request, error) {
	r := &request{options: o, filter: &apiv1.JobFilter{}}
	if err := r.readFilters(s); err != nil {
		return nil, err
	}
	for _, word := range words {
		for item := range strings.SplitSeq(word, ",") {
			if err := r.readID(strings.TrimSpace(item)); err != nil {
				return nil, err
			}
		}
	}
	if v, ok := o.Get("signal"); ok {
		n, err := value.Signal(v.Text)
		if err != nil {
			return nil, fmt.Errorf("Unknown job signal: %s", v.Text)
		}
		r.signal = uint32(n)
	}
	if len(words) == 0 && !r.filters {
		return nil, errors.New("No job identification provided")
	}
	return r, nil
}

func (r *request) readFilters(s *session.Session) error {
	o := r.options
	if v, ok := o.Get("user"); ok {
		uids, err := s.UserIDs(v.Text)
		if err != nil {
			return err
		}
		r.filter.Uids = uids
	}
	if o.Has("me") {
		r.filter.Uids = []uint32{s.UID}
	}
	if v, ok := o.Get("state"); ok {
		states, err := value.ParseStates(v.Text)
		if err != nil {
			return err
		}
		r.states = &states
	}
	for name, to := range map[string]*[]string{"account": &r.filter.Accounts, "name": &r.filter.Names, "partition": &r.filter.Partitions} {
		if v, ok := o.Get(name); ok && v.Text != "" {
			*to = strings.Split(v.Text, ",")
		}
	}
	if v, ok := o.Get("nodelist"); ok {
		hosts, err := notation.Expand(v.Text)
		if err != nil {
			return fmt.Errorf("Invalid node name specified: %w", err)
		}
		r.filter.Nodes = hosts
	}
	for _, name := range []string{"account", "name", "partition", "nodelist", "user", "me", "state", "qos", "wckey", "reservation"} {
		r.filters = r.filters || o.Has(name)
	}
	return nil
}

// readID reads "7", "7.0", "7.batch", "7-9" or "[7-9]".
func (r *request) readID(word string) error {
	if word == "" {
		return nil
	}
	bare := strings.TrimSuffix(strings.TrimPrefix(word, "["), "]")
	if first, last, ranged := strings.Cut(bare, "-"); ranged {
		from, err1 := strconv.ParseUint(first, 10, 32)
		to, err2 := strconv.ParseUint(last, 10, 32)
		if err1 != nil || err2 != nil || from == 0 || to < from || to-from >= longestRange {
			return fmt.Errorf("Invalid job id %s", word)
		}
		for id := from; id <= to; id++ {
			r.filter.JobIds = append(r.filter.JobIds, uint32(id))
		}
		return nil
	}
	if head, _, _ := strings.Cut(word, "."); strings.ContainsAny(head, "_+") {
		if _, _, err := fetch.JobID(head); err != nil {
			return fmt.Errorf("Invalid job id %s", word)
		}
		return nil // an element of an array: no such job, and that is no error
	}
	job, step, dotted, err := fetch.Step(word)
	if err != nil {
		return err
	}
	if dotted {
		r.steps = append(r.steps, target{job, step})
		return nil
	}
	r.filter.JobIds = append(r.filter.JobIds, job)
	return nil
}

// send cancels the steps, then the jobs.
func (r *request) send(ctx context.Context, s *session.Session, cluster session.Cluster) int {
	code := 0
	for _, step := range r.steps {
		if r.options.Has("interactive") && !r.ask(s, fmt.Sprintf("Cancel step_id=%d.%s", step.job, record.StepName(step.step))) {
			continue
		}
		id := step.step
		code = max(code, r.call(ctx, s, cluster, &apiv1.JobFilter{JobIds: []uint32{step.job}}, &id))
	}
	if len(r.filter.GetJobIds()) == 0 && !r.filters {
		return code
	}
	filter := r.filter
	if r.chooses() {
		ids, err := r.choose(ctx, s, cluster)
		if err != nil {
			s.Errorf("%s", s.Sentence(err))
			return 1
		}
		if len(ids) == 0 {
			return code
		}
		filter = &apiv1.JobFilter{JobIds: ids}
	} else if len(filter.GetJobIds()) == 0 {
		filter.Active = true
	}
	return max(code, r.call(ctx, s, cluster, filter, nil))
}

// chooses tells whether jobs must be listed before: to ask, or for filters that the API does not have.
func (r *request) chooses() bool {
	for _, name := range []string{"interactive", "qos", "wckey", "reservation", "state"} {
		if r.options.Has(name) {
			return true
		}
	}
	return false
}

func (r *request) choose(ctx context.Context, s *session.Session, cluster session.Cluster) ([]uint32, error) {
	if r.options.Text("reservation") != "" {
		return nil, nil
	}
	r.filter.Active = true
	listing, err := fetch.Jobs(ctx, cluster, &apiv1.ListJobsRequest{Filter: r.filter, Brief: true})
	if err != nil {
		return nil, err
	}
	var ids []uint32
	for _, job := range listing.Jobs {
		spec := job.GetSpec()
		if qos, ok := r.options.Get("qos"); ok && !slices.Contains(strings.Split(qos.Text, ","), spec.GetQos()) {
			continue
		}
		if key, ok := r.options.Get("wckey"); ok && key.Text != spec.GetWckey() {
			continue
		}
		if r.states != nil && !r.states.Match(job.GetStatus()) {
			continue
		}
		if r.options.Has("interactive") && !r.ask(s, fmt.Sprintf("Cancel job_id=%d name=%s partition=%s", job.GetId(), spec.GetName(), job.GetStatus().GetPartition())) {
			continue
		}
		ids = append(ids, job.GetId())
	}
	return ids, nil
}

// ask asks a question on the terminal; anything but "y" is no.
func (r *request) ask(s *session.Session, question string) bool {
	fmt.Fprintf(s.Stdout, "%s [y/n]? ", question)
	reader, ok := s.Stdin.(*bufio.Reader)
	if !ok {
		reader = bufio.NewReader(s.Stdin)
		s.Stdin = reader // what it has read ahead belongs to the next question
	}
	answer, err := reader.ReadString('\n')
	answer = strings.ToLower(strings.TrimSpace(answer))
	return (err == nil || answer != "") && strings.HasPrefix(answer, "y")
}

// call makes one request and says what was refused.
func (r *request) call(ctx context.Context, s *session.Session, cluster session.Cluster, filter *apiv1.JobFilter, step *uint32) int {
	verbose, quiet := r.options.Has("verbose"), r.options.Has("quiet")
	if verbose {
		for _, id := range filter.GetJobIds() {
			if r.signal != 0 {
				s.Line("Signal %d to job %d", r.signal, id)
			} else {
				s.Line("Terminating job %d", id)
			}
		}
	}
	answer, err := cluster.Jobs().CancelJobs(ctx, &apiv1.CancelJobsRequest{
		RequestId: s.RequestID(), Filter: filter, Signal: r.signal, Step: step,
		// Without a signal the whole job ends, whoever is told first.
		BatchOnly: r.signal != 0 && r.options.Has("batch"), Full: r.signal != 0 && r.options.Has("full"),
	})
	if err != nil {
		if !quiet {
			submit.Explain(s, "Kill job error", err)
		}
		return 1
	}
	code := 0
	for _, refusal := range answer.GetRefusals() {
		gone := harmless[refusal.GetReason()]
		if !gone {
			code = 1
		}
		// A step that its job does not have is said, as by Slurm, but is no failure either.
		noStep := step != nil && refusal.GetReason() == "STEP_UNKNOWN"
		if noStep && !quiet {
			s.Errorf("Kill job error on job step id %d.%s: %s", filter.GetJobIds()[0], record.StepName(*step), submit.Summary(refusal))
		} else if !quiet && (!gone || verbose) {
			s.Errorf("Kill job error on %s: %s", strings.Replace(refusal.GetSubject(), "job ", "job id ", 1), submit.Summary(refusal))
		}
	}
	return code
}

// harmless are refusals of jobs that are gone: cancelling them has nothing to do.
var harmless = map[string]bool{"JOB_UNKNOWN": true, "JOB_ENDED": true, "STEP_UNKNOWN": true, "STEP_ENDED": true, "ATTEMPT_ENDED": true}
