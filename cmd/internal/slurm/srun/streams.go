package srun

import (
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/muster-hpc/muster/cmd/internal/launch"
	"github.com/muster-hpc/muster/cmd/internal/slurm/option"
	"github.com/muster-hpc/muster/cmd/internal/slurm/submit"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// streams says what of the tasks' streams is on the terminal, and what in files that srun reads and writes: those that are one file
// for all tasks. Files of each task or node are the nodes' affair.
type streams struct {
	stdin                  bool   // srun's stdin, or stdinFile, is sent
	stdinRank              int    // to this rank; negative: to all
	stdinFile              string // pattern
	stdoutFile, stderrFile string // patterns
	noStdout, noStderr     bool   // nobody reads them here
	onlyStdout, onlyStderr *uint32
}

// target is where one stream goes.
type target struct {
	rank *uint32
	file string // pattern, absolute
	none bool
}

// readStreams reads --input, --output and --error: "all", "none", a rank, or a file.
func (r *run) readStreams() error {
	st := &r.streams
	st.stdinRank = -1
	if err := r.readStdin(); err != nil {
		return err
	}
	if r.spec.TaskOptions.GetPty() {
		return r.ptyStreams()
	}
	r.spec.TaskOptions.StdinAll = st.stdinRank < 0
	r.spec.TaskOptions.StdinRank = int32(st.stdinRank)
	out, err := r.stream("output")
	if err != nil {
		return err
	}
	errs, err := r.stream("error")
	if err != nil {
		return err
	}
	if !r.options.Has("error") {
		errs = out // stderr follows stdout
	}
	return r.direct(out, errs)
}

func (r *run) readStdin() error {
	st, spec := &r.streams, r.spec
	in, err := r.stream("input")
	switch {
	case err != nil:
		return err
	case in.none:
		spec.StdinPath = os.DevNull
	case submit.OfTasks(in.file):
		spec.StdinPath = in.file
	case in.file != "":
		st.stdin, st.stdinFile = true, in.file
		if !strings.Contains(in.file, "%") { // nothing to wait for
			if f, err := os.Open(in.file); err != nil {
				return refused("Could not open stdin file: %v", err)
			} else if err := f.Close(); err != nil {
				return refused("Could not close stdin file: %v", err)
			}
		}
	case in.rank != nil:
		st.stdin, st.stdinRank = true, int(*in.rank)
	case isNull(r.s.Stdin):
		spec.StdinPath = os.DevNull // there is nothing to send: tasks read the same from their own
	default:
		st.stdin = true
	}
	return nil
}

// direct decides who writes what tasks say.
func (r *run) direct(out, errs target) error {
	st, spec := &r.streams, r.spec
	byNodes := submit.OfTasks(out.file)
	if byNodes && errs.file == "" && !errs.none {
		return refused("--error=%s is not supported yet when --output is a file of each task or node: name a file for --error too", r.options.Text("error"))
	}
	if out.none && errs.none {
		spec.StdoutPath, spec.StderrPath = os.DevNull, os.DevNull
	}
	if byNodes {
		spec.StdoutPath = out.file
		if errs.none {
			spec.StderrPath = os.DevNull
		}
	} else {
		st.stdoutFile = out.file
	}
	if submit.OfTasks(errs.file) {
		if spec.StderrPath = errs.file; !byNodes && out.none {
			spec.StdoutPath = os.DevNull
		}
	} else {
		st.stderrFile = errs.file
	}
	if byNodes && st.stderrFile != "" {
		spec.StderrPath, st.stderrFile = st.stderrFile, "" // a node that writes stdout writes stderr
	}
	if r.options.Has("label") {
		for _, f := range []struct{ name, path string }{{"output", spec.GetStdoutPath()}, {"error", spec.GetStderrPath()}} {
			if f.path != "" && f.path != os.DevNull {
				return refused("--label is not supported yet with --%s=%s: tasks write that file themselves, without labels; leave --label out, or name one file for all", f.name, f.path)
			}
		}
	}
	st.onlyStdout, st.onlyStderr = out.rank, errs.rank
	st.noStdout, st.noStderr = out.none || spec.GetStdoutPath() != "", errs.none || spec.GetStderrPath() != ""
	return nil
}

// isNull tells whether a stream is /dev/null.
func isNull(stream io.Reader) bool {
	f, ok := stream.(*os.File)
	if !ok {
		return false
	}
	own, err := f.Stat()
	if err != nil {
		return false
	}
	null, err := os.Stat(os.DevNull)
	return err == nil && os.SameFile(own, null)
}

// stream reads one of the three options.
func (r *run) stream(name string) (target, error) {
	v, ok := r.options.Get(name)
	switch {
	case !ok || strings.EqualFold(v.Text, "all"):
		return target{}, nil
	case strings.EqualFold(v.Text, "none"):
		return target{none: true}, nil
	case v.Text == "":
		return target{}, &submit.Error{Text: "Invalid --" + name + " specification", Code: submit.CodeUsage}
	}
	if n, err := strconv.ParseUint(v.Text, 10, 32); err == nil {
		if total := r.spec.GetResources().GetNtasks(); total > 0 && n >= uint64(total) {
			return target{}, refused("--%s=%d: there are only %d tasks, from 0", name, n, total)
		}
		only := uint32(n)
		return target{rank: &only}, nil
	}
	return target{file: submit.Pattern(r.spec.GetWorkDir(), v.Text)}, nil
}

// readPty reads --pty: rank 0 gets a terminal of the size of this one.
func (r *run) readPty(v option.Value) error {
	if v.Given && v.Text != "" {
		return refused("--pty=%s is not supported yet: the terminal of task 0 is shown on that of srun (--pty)", v.Text)
	}
	t := r.spec.GetTaskOptions()
	t.Pty, t.Label = true, false
	r.terminal = launch.OpenTerminal(r.s.Stdin)
	size := r.terminal
	if size == nil {
		size = launch.OpenTerminal(r.s.Stdout) // its input comes from elsewhere
	}
	t.PtyRows, t.PtyColumns = size.Size()
	return nil
}

// ptyStreams shows task 0 alone: its stdout and stderr are one stream.
func (r *run) ptyStreams() error {
	for _, name := range []string{"output", "error", "input"} {
		if v, ok := r.options.Get(name); ok && !(name == "input" && strings.EqualFold(v.Text, "none")) {
			return refused("--%s=%s with --pty: the terminal is the input and output of task 0; leave one of them out", name, v.Text)
		}
	}
	st, first := &r.streams, uint32(0)
	st.stdinRank, st.onlyStdout, st.onlyStderr = 0, &first, &first
	r.spec.TaskOptions.StdinAll, r.spec.TaskOptions.StdinRank = false, 0
	if r.terminal != nil {
		r.s.Stderr = &rawWriter{to: r.s.Stderr, terminal: r.terminal}
	}
	return nil
}

// rawWriter begins every line in the first column while the terminal is raw. Only messages of srun go through it.
type rawWriter struct {
	to       io.Writer
	terminal *launch.Terminal
}

// Write writes all of p.
func (w *rawWriter) Write(p []byte) (int, error) {
	if !w.terminal.IsRaw() {
		return w.to.Write(p)
	}
	if _, err := w.to.Write([]byte(strings.ReplaceAll(string(p), "\n", "\r\n"))); err != nil {
		return 0, err
	}
	return len(p), nil
}

// files are what srun itself reads and writes for a step.
type files struct {
	stdin          io.Reader
	stdout, stderr io.Writer
	open           []*os.File
}

// close closes all files. The error is that of a file that was written.
func (f *files) close() error {
	var first error
	for _, file := range f.open {
		if err := file.Close(); err != nil && first == nil {
			first = err
		}
	}
	f.open = nil
	return first
}

// openFiles opens the files that --input, --output and --error name. appendTo keeps what is there: an earlier attempt wrote it.
func (r *run) openFiles(step *apiv1.Step, appendTo bool) (*files, error) {
	f := &files{stdin: r.s.Stdin, stdout: r.s.Stdout, stderr: r.s.Stderr}
	names := r.fileNames(step)
	if r.streams.stdinFile != "" {
		in, err := os.Open(names.Expand(r.streams.stdinFile))
		if err != nil {
			return nil, fmt.Errorf("Could not open stdin file: %w", err)
		}
		f.open, f.stdin = append(f.open, in), in
	}
	mode := os.O_WRONLY | os.O_CREATE | os.O_TRUNC
	if r.spec.GetOpenAppend() || appendTo {
		mode = os.O_WRONLY | os.O_CREATE | os.O_APPEND
	}
	opened := map[string]*os.File{}
	for _, s := range []struct {
		name, pattern string
		to            *io.Writer
	}{{"stdout", r.streams.stdoutFile, &f.stdout}, {"stderr", r.streams.stderrFile, &f.stderr}} {
		if s.pattern == "" {
			continue
		}
		path := names.Expand(s.pattern)
		if opened[path] == nil {
			out, err := os.OpenFile(path, mode, 0o666)
			if err != nil {
				_ = f.close() // nothing was written
				return nil, fmt.Errorf("Could not open %s file: %w", s.name, err)
			}
			opened[path] = out
			f.open = append(f.open, out)
		}
		*s.to = opened[path]
	}
	return f, nil
}

func (r *run) fileNames(step *apiv1.Step) submit.FileNames {
	number := func(variable string) uint32 { return uint32(max(0, count(r.s.Get(variable)))) }
	name := r.s.Get("SLURM_JOB_NAME")
	if r.job == 0 || name == "" {
		name = r.spec.GetName()
	}
	return submit.FileNames{
		Job: step.GetJobId(), Step: step.GetId(), ArrayJob: number("SLURM_ARRAY_JOB_ID"), ArrayTask: r.s.Get("SLURM_ARRAY_TASK_ID"),
		Name: name, User: r.s.UserName(r.s.UID), Restarts: number("SLURM_RESTART_COUNT"),
	}
}
