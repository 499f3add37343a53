package srun

import (
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/muster-hpc/muster/cmd/internal/slurm/submit"
)

// streams says what of the tasks' streams is on the terminal.
type streams struct {
	stdin                  bool // srun's stdin is sent
	stdinRank              int  // to this rank; negative: to all
	noStdout, noStderr     bool // files take them
	onlyStdout, onlyStderr *uint32
}

// readStreams reads --input, --output and --error: "all", "none", a rank, or a file.
func (r *run) readStreams() error {
	st, spec := &r.streams, r.spec
	st.stdinRank = -1
	rank, file, none, err := r.stream("input")
	switch {
	case err != nil:
		return err
	case none:
		spec.StdinPath = "/dev/null"
	case file != "":
		spec.StdinPath = file
	case rank != nil:
		st.stdin, st.stdinRank = true, int(*rank)
	case isNull(r.s.Stdin):
		spec.StdinPath = os.DevNull // there is nothing to send: tasks read the same from their own
	default:
		st.stdin = true
	}
	spec.TaskOptions.StdinAll = st.stdinRank < 0
	spec.TaskOptions.StdinRank = int32(st.stdinRank)

	if st.onlyStdout, spec.StdoutPath, none, err = r.stream("output"); err != nil {
		return err
	}
	if none {
		spec.StdoutPath = "/dev/null"
	}
	given := r.options.Has("error")
	if st.onlyStderr, spec.StderrPath, none, err = r.stream("error"); err != nil {
		return err
	}
	switch {
	case none:
		spec.StderrPath = "/dev/null"
	case !given:
		spec.StderrPath, st.onlyStderr = spec.StdoutPath, st.onlyStdout // stderr follows stdout
	case spec.StderrPath == "" && spec.StdoutPath != "":
		return &submit.Error{Code: submit.CodeRefused, Text: fmt.Sprintf(
			"--error=%s is not supported yet when --output is a file: name a file for --error too", r.options.Text("error"))}
	}
	if r.options.Has("label") {
		for _, f := range []struct{ name, path string }{{"output", spec.GetStdoutPath()}, {"error", spec.GetStderrPath()}} {
			if f.path != "" && f.path != "/dev/null" {
				return &submit.Error{Code: submit.CodeRefused, Text: fmt.Sprintf(
					"--label is not supported yet with --%s=%s: tasks write that file themselves, without labels; leave --label out, or redirect srun's own output", f.name, f.path)}
			}
		}
	}
	st.noStdout, st.noStderr = spec.GetStdoutPath() != "", spec.GetStderrPath() != ""
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
func (r *run) stream(name string) (rank *uint32, file string, none bool, err error) {
	v, ok := r.options.Get(name)
	switch {
	case !ok || strings.EqualFold(v.Text, "all"):
		return nil, "", false, nil
	case strings.EqualFold(v.Text, "none"):
		return nil, "", true, nil
	case v.Text == "":
		return nil, "", false, &submit.Error{Text: "Invalid --" + name + " specification", Code: submit.CodeUsage}
	}
	if n, err := strconv.ParseUint(v.Text, 10, 32); err == nil {
		if total := r.spec.GetResources().GetNtasks(); total > 0 && n >= uint64(total) {
			return nil, "", false, &submit.Error{Code: submit.CodeRefused, Text: fmt.Sprintf("--%s=%d: there are only %d tasks, from 0", name, n, total)}
		}
		only := uint32(n)
		return &only, "", false, nil
	}
	return nil, submit.Pattern(r.spec.GetWorkDir(), v.Text), false, nil
}
