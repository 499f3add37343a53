package salloc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/muster-hpc/muster/cmd/internal/slurm/option"
	"github.com/muster-hpc/muster/cmd/internal/slurm/session"
	"github.com/muster-hpc/muster/cmd/internal/slurm/submit"
	"github.com/muster-hpc/muster/cmd/internal/slurm/value"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

const operands = "[COMMAND [ARGUMENTS...]]"

// run is one call of salloc.
type run struct {
	s         *session.Session
	options   *option.Set
	spec      *apiv1.JobSpec
	words     []string
	immediate time.Duration // 0: wait as long as it takes
	kill      killing
	heard     <-chan os.Signal // nil hears nothing
}

// killing is what --kill-command asks for; signal 0 means the usual one.
type killing struct {
	asked  bool
	signal syscall.Signal
}

// Run is the command; its exit code is in the package's documentation.
func Run(ctx context.Context, s *session.Session) int {
	table := submit.Salloc()
	line, words, err := table.Parse(s.Args)
	if err != nil {
		return fail(s, err)
	}
	switch {
	case line.Has("help"):
		fmt.Fprint(s.Stdout, table.Help(s.Program, operands, "Allocates nodes and runs a command (or a shell) on this host while it has them."))
		return 0
	case line.Has("usage"):
		fmt.Fprint(s.Stdout, table.Usage(s.Program, operands))
		return 0
	case line.Has("version"):
		s.Version()
		return 0
	}
	r, err := prepare(s, table, line, words)
	if err != nil {
		return fail(s, err)
	}
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
	if name := r.options.Text("clusters"); name != "" && !session.NamesCluster(name, cluster.ClusterName()) {
		s.Errorf("'%s' can't be reached now, or it is an invalid entry for --cluster.\nThis is cluster %s; there is no other here.", name, cluster.ClusterName())
		return submit.CodeRefused
	}
	return r.allocate(ctx, cluster)
}

// signalsHeard are the signals that salloc handles; others act as usual.
var signalsHeard = []os.Signal{
	syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2,
}

// prepare merges options and reads all values.
func prepare(s *session.Session, table *option.Table, line *option.Set, words []string) (*run, error) {
	env, err := table.Environment(s.Lookup)
	if err != nil {
		return nil, err
	}
	r := &run{s: s, options: submit.Merge(line, env, &option.Set{}), words: words}
	r.spec, err = submit.Job(r.options, submit.Caller{
		Dir: s.Dir, Host: s.Host, Umask: s.Umask, UID: s.UID, UserID: s.UserID, Now: s.Now(), Hostfile: s.Get("SLURM_HOSTFILE"),
	})
	if err != nil {
		return nil, err
	}
	r.spec.Kind, r.spec.Requeue, r.spec.AutomaticRecovery = apiv1.JobKind_JOB_KIND_ALLOCATION, false, false
	if r.options.Has("no-shell") && len(words) > 0 {
		return nil, &submit.Error{Text: "--no-shell starts no command, and " + words[0] + " was given", Code: submit.CodeRefused}
	}
	switch {
	case len(words) > 0:
		r.spec.CommandLine = strings.Join(words, " ")
	case !r.options.Has("no-shell"):
		r.words = []string{shell(s)}
	}
	if !r.options.Has("job-name") {
		if r.spec.Name = "interactive"; len(words) > 0 {
			r.spec.Name = filepath.Base(words[0])
		}
	}
	if v, ok := r.options.Get("immediate"); ok {
		n, err := strconv.ParseUint(v.Text, 10, 31)
		if err != nil {
			return nil, &submit.Error{Text: fmt.Sprintf("Invalid --immediate specification: %s", v.Text), Code: submit.CodeUsage}
		}
		r.immediate = max(1, time.Duration(n)) * time.Second
	}
	if v, ok := r.options.Get("kill-command"); ok {
		r.kill.asked = true
		if v.Given {
			n, err := value.Signal(v.Text)
			if err != nil {
				return nil, &submit.Error{Text: fmt.Sprintf("Invalid --kill-command specification: %s", v.Text), Code: submit.CodeUsage}
			}
			r.kill.signal = syscall.Signal(n)
		}
	}
	return r, nil
}

// shell is the user's.
func shell(s *session.Session) string {
	if path := s.Get("SHELL"); path != "" {
		return path
	}
	return "/bin/sh"
}

// say prints a line about the allocation, unless --quiet.
func (r *run) say(format string, args ...any) {
	if !r.options.Has("quiet") {
		r.s.Line(format, args...)
	}
}

// fail prints an error and returns its exit code.
func fail(s *session.Session, err error) int {
	var usage *option.UsageError
	if errors.As(err, &usage) {
		s.Usage(usage)
		return submit.CodeUsage
	}
	s.Errorf("%s", strings.Replace(err.Error(), "Batch job submission failed: ", "Unable to allocate resources: ", 1))
	return submit.CodeOf(err)
}
