package srun

import (
	"context"
	"errors"
	"os/exec"
	"strconv"
	"strings"

	"github.com/muster-hpc/muster/cmd/internal/slurm/option"
	"github.com/muster-hpc/muster/cmd/internal/slurm/submit"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// program is the absolute path of the program that an option names; empty for "none". A name without a slash is looked for in PATH.
func (r *run) program(o *option.Set, name string) (string, error) {
	text := o.Text(name)
	switch {
	case text == "" || strings.EqualFold(text, "none"):
		return "", nil
	case strings.Contains(text, "/"):
		return submit.Absolute(r.s.Dir, text), nil
	}
	path, err := exec.LookPath(text)
	if err != nil && !errors.Is(err, exec.ErrDot) {
		return "", refused("--%s=%s: there is no such program in PATH; give its path, as in ./%s", name, text, text)
	}
	return submit.Absolute(r.s.Dir, path), nil
}

// runProgram runs --prolog or --epilog on this host, with the command as its arguments. A failure is said, and changes nothing.
func (r *run) runProgram(ctx context.Context, what, path string, step *apiv1.Step) {
	if path == "" {
		return
	}
	cmd := exec.CommandContext(ctx, path, r.spec.GetArgs()...)
	cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr = r.s.Dir, r.s.Environ, r.s.Stdout, r.s.Stderr
	if r.job != 0 {
		cmd.Env = append(cmd.Env, "SLURM_JOB_ID="+strconv.FormatUint(uint64(r.job), 10))
	}
	if step != nil {
		cmd.Env = append(cmd.Env, "SLURM_JOB_ID="+strconv.FormatUint(uint64(step.GetJobId()), 10), "SLURM_STEP_ID="+strconv.FormatUint(uint64(step.GetId()), 10))
	}
	if err := cmd.Run(); err != nil {
		r.s.Errorf("--%s=%s: %v", what, path, err)
	}
}
