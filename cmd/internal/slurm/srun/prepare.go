package srun

import (
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/muster-hpc/muster/cmd/internal/slurm/fetch"
	"github.com/muster-hpc/muster/cmd/internal/slurm/option"
	"github.com/muster-hpc/muster/cmd/internal/slurm/session"
	"github.com/muster-hpc/muster/cmd/internal/slurm/submit"
	"github.com/muster-hpc/muster/cmd/internal/slurm/value"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

func refused(format string, args ...any) error {
	return &submit.Error{Text: fmt.Sprintf(format, args...), Code: submit.CodeRefused}
}

func fatal(format string, args ...any) error {
	return &submit.Error{Text: fmt.Sprintf(format, args...), Code: submit.CodeRefused, Fatal: true}
}

// prepare merges options and reads all values.
func prepare(s *session.Session, table *option.Table, line *option.Set, words []string) (*run, error) {
	pieces := split(words)
	if len(pieces[0]) == 0 {
		return nil, fatal("No command given to execute.")
	}
	r := &run{s: s, table: table}
	if err := r.enclosing(line); err != nil {
		return nil, err
	}
	var err error
	if r.options, r.spec, err = r.part(line, pieces[0]); err != nil {
		return nil, err
	}
	if !r.options.Has("job-name") {
		r.spec.Name = filepath.Base(pieces[0][0])
	}
	if err := r.readRun(pieces[0]); err != nil {
		return nil, err
	}
	if err := r.readStreams(); err != nil {
		return nil, err
	}
	set := map[string]string{}
	if r.job == 0 {
		set["SLURM_SUBMIT_DIR"], set["SLURM_SUBMIT_HOST"] = s.Dir, s.Host
	}
	if err := r.readMPI(set); err != nil {
		return nil, err
	}
	if err := r.readParts(pieces[1:]); err != nil {
		return nil, err
	}
	if r.job == 0 {
		if err := r.alone(); err != nil {
			return nil, err
		}
	}
	r.env, err = submit.Environment(s.Environ, r.options.Text("export"), set)
	return r, err
}

// split cuts the words at ":", which begins another part of the step. There is at least one piece.
func split(words []string) [][]string {
	pieces := [][]string{nil}
	for _, word := range words {
		if word == ":" {
			pieces = append(pieces, nil)
			continue
		}
		last := len(pieces) - 1
		pieces[last] = append(pieces[last], word)
	}
	return pieces
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
		return refused("Invalid job id specified: %s", word)
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

// part reads the options of one part of the step, and what variables add to them.
func (r *run) part(line *option.Set, words []string) (*option.Set, *apiv1.JobSpec, error) {
	env, err := r.table.Environment(r.s.Lookup)
	if err != nil {
		return nil, nil, err
	}
	for _, o := range []*option.Set{line, env} {
		if size := r.s.Get("SLURM_DIST_PLANESIZE"); size != "" && strings.EqualFold(o.Text("distribution"), "plane") {
			if err := o.Add(r.table, "distribution", "plane="+size); err != nil {
				return nil, nil, err
			}
		}
	}
	if r.job != 0 {
		if err := r.within(line, env); err != nil {
			return nil, nil, err
		}
	}
	s, options := r.s, submit.Merge(line, env, &option.Set{})
	spec, err := submit.Job(options, submit.Caller{
		Dir: s.Dir, Host: s.Host, Umask: s.Umask, UID: s.UID, UserID: s.UserID, Now: s.Now(), Hostfile: s.Get("SLURM_HOSTFILE"),
	})
	if err != nil {
		return nil, nil, err
	}
	spec.Kind, spec.Args, spec.CommandLine = apiv1.JobKind_JOB_KIND_RUN, words, words[0]
	spec.Requeue, spec.AutomaticRecovery = false, false // nobody would be there to see it start again
	if r.job != 0 && (submit.NoGres(line) || submit.NoGres(options)) {
		none := spec.Resources // none of what the job has; what the line says goes before what the job's variables say
		none.GpusPerNode, none.GpusTotal, none.GpusPerTask, none.GpusOption = 0, 0, 0, ""
		none.Gres = []*apiv1.GresRequest{{Name: "gpu"}}
	}
	return options, spec, r.readTaskOptions(options, spec.GetTaskOptions())
}

// readTaskOptions reads how tasks are started.
func (r *run) readTaskOptions(o *option.Set, t *apiv1.TaskOptions) error {
	t.Label = o.Has("label")
	if v, ok := o.Get("kill-on-bad-exit"); ok {
		switch v.Text {
		case "0":
		case "1", "":
			t.KillOnBadExit = true
		default:
			return &submit.Error{Text: fmt.Sprintf("Invalid --kill-on-bad-exit specification: %s", v.Text), Code: submit.CodeUsage}
		}
	}
	for _, p := range []struct {
		name string
		to   *string
	}{{"task-prolog", &t.TaskProlog}, {"task-epilog", &t.TaskEpilog}} {
		var err error
		if *p.to, err = r.program(o, p.name); err != nil {
			return err
		}
	}
	return nil
}

// readRun reads what concerns srun itself.
func (r *run) readRun(words []string) error {
	if v, ok := r.options.Get("wait"); ok {
		n, err := strconv.ParseUint(v.Text, 10, 31)
		if err != nil {
			return refused("Invalid numeric value \"%s\" for --wait.", v.Text)
		}
		r.wait = time.Duration(n) * time.Second
	}
	if v, ok := r.options.Get("immediate"); ok {
		n, err := value.Count(v.Text, 0)
		if err != nil {
			return &submit.Error{Text: "Invalid --immediate specification", Code: submit.CodeUsage}
		}
		limit := time.Duration(n) * time.Second
		r.immediate = &limit
	}
	var err error
	if r.prolog, err = r.program(r.options, "prolog"); err != nil {
		return err
	}
	if r.epilog, err = r.program(r.options, "epilog"); err != nil {
		return err
	}
	if r.options.Has("multi-prog") {
		if len(words) > 1 {
			return refused("--multi-prog takes one file with the programs and their arguments; %s is too much", words[1])
		}
		r.multiProg = submit.Absolute(r.s.Dir, words[0])
	}
	if v, ok := r.options.Get("pty"); ok {
		return r.readPty(v)
	}
	return nil
}

// readParts reads the further parts of the step. All parts share what is not about nodes, tasks and their devices.
func (r *run) readParts(pieces [][]string) error {
	if len(pieces) > 0 && r.job == 0 {
		return refused("Heterogeneous jobs are not supported yet: within one allocation (salloc, sbatch) a step can have several parts")
	}
	for i, piece := range pieces {
		line, words, err := r.table.Parse(piece)
		if err != nil {
			return err
		}
		if len(words) == 0 {
			return fatal("No command given to execute in part %d of the step.", i+2)
		}
		for _, name := range line.Names() {
			if !ofParts[name] {
				return refused("--%s is for the whole step: give it before the first program, not in part %d", name, i+2)
			}
		}
		_, spec, err := r.part(line, words)
		if err != nil {
			return err
		}
		spec.TaskOptions.Mpi = r.spec.GetTaskOptions().GetMpi()
		spec.TaskOptions.StdinRank, spec.TaskOptions.StdinAll = r.spec.GetTaskOptions().GetStdinRank(), r.spec.GetTaskOptions().GetStdinAll()
		r.parts = append(r.parts, &apiv1.StepSpec{Args: words, Resources: spec.GetResources(), TaskOptions: spec.GetTaskOptions()})
	}
	return nil
}

// ofParts are the options that each part of a step has for itself.
var ofParts = func() map[string]bool {
	names := map[string]bool{}
	for _, name := range strings.Fields(`nodes ntasks ntasks-per-node ntasks-per-gpu cpus-per-task cpus-per-gpu nodelist nodefile exclude
		relative gpus gpus-per-node gpus-per-task gres mem mem-per-cpu mem-per-gpu mem-bind overcommit overlap exact exclusive distribution cpu-bind
		gpu-bind kill-on-bad-exit label propagate task-prolog task-epilog unbuffered verbose quiet`) {
		names[name] = true
	}
	return names
}()

// alone checks and completes what is asked for outside of an allocation.
func (r *run) alone() error {
	ask := r.spec.GetResources()
	switch {
	case len(ask.GetTaskNodes()) > 0:
		return refused("Only a step in an allocation can say on which node each task is (--distribution=arbitrary, SLURM_HOSTFILE): make one with salloc or sbatch")
	case ask.GetExclusive() && ask.GetExact():
		return refused("--exact with --exclusive is for steps in an allocation: make one with salloc or sbatch")
	}
	ask.Exact, ask.Overlap = false, false // it is the only step
	r.killByDefault(r.options, r.spec.GetTaskOptions(), ask)
	if r.multiProg == "" {
		return nil
	}
	tasks := ask.GetNtasks()
	if tasks == 0 && ask.GetNodesMin() != ask.GetNodesMax() {
		return fatal("--multi-prog needs --ntasks, to say how many ranks there are")
	}
	if tasks == 0 {
		tasks = max(1, ask.GetNodesMin()) * max(1, ask.GetNtasksPerNode())
	}
	var err error
	r.spec.TaskOptions.Programs, err = submit.Programs(r.multiProg, tasks)
	return err
}

// killByDefault makes the first bad exit end a step with GPUs on several nodes, unless the user said what to do: its other tasks would wait
// for ever for the one that is gone.
func (r *run) killByDefault(o *option.Set, t *apiv1.TaskOptions, ask *apiv1.ResourceRequest) {
	if !o.Has("kill-on-bad-exit") && ask.GetNodesMin() > 1 && (asksGPUs(ask) || r.bindsGPUs && len(ask.GetGres()) == 0) {
		t.KillOnBadExit = true
	}
}

// asksGPUs tells whether a request asks for GPUs.
func asksGPUs(ask *apiv1.ResourceRequest) bool {
	n := ask.GetGpusPerNode() + ask.GetGpusTotal() + ask.GetGpusPerTask() + ask.GetNtasksPerGpu()
	for _, g := range ask.GetGres() {
		if g.GetName() == "gpu" {
			n += g.GetCount()
		}
	}
	return n > 0
}
