package sbatch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/muster-hpc/muster/cmd/internal/slurm/directive"
	"github.com/muster-hpc/muster/cmd/internal/slurm/option"
	"github.com/muster-hpc/muster/cmd/internal/slurm/session"
	"github.com/muster-hpc/muster/cmd/internal/slurm/submit"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// operands is the usage line after the options.
const operands = "[SCRIPT [ARGUMENTS...]]"

// Run is the command. It returns the exit code: 0 after submission, 255 for words that cannot be parsed, 1 for refusals,
// and the job's own with --wait.
func Run(ctx context.Context, s *session.Session) int {
	table := submit.Sbatch()
	line, words, err := table.Parse(s.Args)
	if err != nil {
		return fail(s, err)
	}
	switch {
	case line.Has("help"):
		fmt.Fprint(s.Stdout, table.Help(s.Program, operands, "Submits a batch script; without SCRIPT it is read from standard input."))
		return 0
	case line.Has("usage"):
		fmt.Fprint(s.Stdout, table.Usage(s.Program, operands))
		return 0
	case line.Has("version"):
		s.Version()
		return 0
	}
	job, err := prepare(s, table, line, words)
	if err != nil {
		return fail(s, err)
	}
	if job.options.Has("test-only") {
		return test(ctx, s, job)
	}
	return send(ctx, s, job)
}

// batch is a job ready to be sent.
type batch struct {
	options *option.Set
	spec    *apiv1.JobSpec
	script  []byte
	env     []byte
}

// prepare reads the script and merges all options.
func prepare(s *session.Session, table *option.Table, line *option.Set, words []string) (*batch, error) {
	environment, err := table.Environment(s.Lookup)
	if err != nil {
		return nil, err
	}
	source, err := load(s, line, words)
	if err != nil {
		return nil, err
	}
	if err := directive.Check(source.text); err != nil {
		return nil, err
	}
	ignorePBS := line.Has("ignore-pbs") || environment.Has("ignore-pbs")
	asked, err := directive.Parse(source.name, source.text, ignorePBS)
	if err != nil {
		return nil, err
	}
	directives := &option.Table{Options: table.Options}
	script, stray, err := directives.Parse(asked.Words)
	if err != nil {
		return nil, err
	}
	o := submit.Merge(line, environment, script)
	spec, err := submit.Job(o, submit.Caller{
		Dir: s.Dir, Host: s.Host, Umask: s.Umask, UID: s.UID, UserID: s.UserID, Now: s.Now(), Hostfile: s.Get("SLURM_HOSTFILE"), Batch: true,
	})
	if err != nil {
		return nil, err
	}
	if len(stray) > 0 {
		return nil, &submit.Error{Text: "Invalid directive found in batch script: " + stray[0], Code: submit.CodeUsage}
	}
	spec.Kind = apiv1.JobKind_JOB_KIND_BATCH
	if !o.Has("job-name") {
		spec.Name = source.jobName
	}
	spec.Args, spec.CommandLine = source.args, source.command
	spec.StdoutPath = submit.Pattern(spec.GetWorkDir(), o.Text("output"))
	spec.StderrPath = submit.Pattern(spec.GetWorkDir(), o.Text("error"))
	spec.StdinPath = submit.Pattern(spec.GetWorkDir(), o.Text("input"))
	set := map[string]string{"SLURM_SUBMIT_DIR": s.Dir, "SLURM_SUBMIT_HOST": s.Host}
	forSteps(o, spec, set)
	export := o.Text("export")
	if export != "" && !strings.EqualFold(export, "ALL") {
		set["SLURM_EXPORT_ENV"] = export
	}
	env, err := submit.Environment(s.Environ, export, set)
	if err != nil {
		return nil, err
	}
	return &batch{options: o, spec: spec, script: source.text, env: env}, nil
}

// forSteps adds the variables with which options of the job become defaults of the steps that its script starts, as far as the nodes do
// not set them.
func forSteps(o *option.Set, spec *apiv1.JobSpec, set map[string]string) {
	for name, option := range map[string]string{
		"SLURM_CPUS_PER_GPU": "cpus-per-gpu", "SLURM_NTASKS_PER_GPU": "ntasks-per-gpu", "SLURM_GPU_BIND": "gpu-bind", "SLURM_OPEN_MODE": "open-mode",
	} {
		if text := o.Text(option); text != "" {
			set[name] = text
		}
	}
	if spec.GetResources().GetOvercommit() {
		set["SLURM_OVERCOMMIT"] = "1"
	}
}

// source is a script and what is known of it.
type source struct {
	text    []byte
	name    string // in messages
	jobName string
	command string // as scontrol shows it
	args    []string
}

// load reads the script from --wrap, a file or standard input.
func load(s *session.Session, line *option.Set, words []string) (source, error) {
	if v, ok := line.Get("wrap"); ok {
		if len(words) > 0 {
			return source{}, &submit.Error{Text: "Script arguments not permitted with --wrap option", Code: submit.CodeRefused}
		}
		text := "#!/bin/sh\n# Made by sbatch --wrap.\n\n" + v.Text + "\n"
		return source{text: []byte(text), name: "wrap", jobName: "wrap", command: "(null)"}, nil
	}
	if len(words) == 0 {
		text, err := readAll(s.Stdin)
		if err != nil {
			return source{}, &submit.Error{Text: fmt.Sprintf("Unable to read the script from standard input: %v", err), Code: submit.CodeRefused}
		}
		return source{text: text, name: "stdin", jobName: "stdin", command: "(null)"}, nil
	}
	path, err := find(s, words[0])
	if err != nil {
		return source{}, err
	}
	file, err := os.Open(path)
	if err != nil {
		return source{}, &submit.Error{Text: "Unable to open file " + words[0], Code: submit.CodeRefused}
	}
	defer file.Close()
	text, err := readAll(file)
	if err != nil {
		return source{}, &submit.Error{Text: fmt.Sprintf("Unable to read file %s: %v", words[0], err), Code: submit.CodeRefused}
	}
	command := strings.Join(append([]string{path}, words[1:]...), " ")
	return source{text: text, name: words[0], jobName: filepath.Base(path), command: command, args: words[1:]}, nil
}

// find looks for a script in the working directory, and for a name without a slash then in PATH.
func find(s *session.Session, name string) (string, error) {
	path := submit.Absolute(s.Dir, name)
	if _, err := os.Stat(path); err == nil || strings.Contains(name, "/") {
		return path, nil
	}
	if found, err := exec.LookPath(name); err == nil {
		return found, nil
	}
	return "", &submit.Error{Text: "Unable to open file " + name, Code: submit.CodeRefused}
}

// readAll reads a script, but not much more than what is accepted.
func readAll(from io.Reader) ([]byte, error) {
	return io.ReadAll(io.LimitReader(from, directive.MaxBytes+1))
}

// fail prints an error and returns the exit code for it.
func fail(s *session.Session, err error) int {
	var usage *option.UsageError
	var script *directive.Error
	var bad *submit.Error
	switch {
	case errors.As(err, &usage):
		s.Usage(usage)
		return submit.CodeUsage
	case errors.As(err, &script):
		report(s, script.Error(), script.Fatal)
		return script.Code
	case errors.As(err, &bad):
		report(s, bad.Text, bad.Fatal)
		return bad.Code
	}
	s.Errorf("%v", err)
	return submit.CodeOf(err)
}

func report(s *session.Session, text string, fatal bool) {
	if fatal {
		fmt.Fprintf(s.Stderr, "%s: fatal: %s\n", s.Program, text)
		return
	}
	s.Errorf("%s", text)
}
