package submit

import (
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"syscall"

	"github.com/muster-hpc/muster/cmd/internal/slurm/option"
	"github.com/muster-hpc/muster/cmd/internal/slurm/value"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// readSignal reads --signal and --no-kill.
func readSignal(o *option.Set, c Caller, spec *apiv1.JobSpec) error {
	if v, ok := o.Get("signal"); ok {
		w, err := value.WarnSignal(v.Text, c.Batch)
		if err != nil {
			return invalid("signal")
		}
		spec.WarnSignal = w
	}
	if v, ok := o.Get("no-kill"); ok {
		switch strings.ToLower(v.Text) {
		case "", "1", "yes":
			spec.NoKill = true
		case "off", "no", "0":
		default:
			return invalid("no-kill")
		}
	}
	return nil
}

// readTasks reads how tasks are laid out, bound and limited.
func readTasks(o *option.Set, c Caller, spec *apiv1.JobSpec) error {
	t := spec.TaskOptions
	t.BindGpusPerTask = spec.GetResources().GetGpusPerTask() > 0
	if v, ok := o.Get("distribution"); ok {
		text, _, err := value.Distribution(v.Text)
		if err := binding("distribution", v.Text, err); err != nil {
			return err
		}
		t.Distribution = text
	}
	switch r := spec.GetResources(); {
	case len(r.GetTaskNodes()) == 0:
	case c.Batch: // a script has no ranks: its steps read the list again
		r.NodeList, r.TaskNodes, t.Distribution = unique(r.TaskNodes), nil, ""
	case t.Distribution == "":
		t.Distribution = "arbitrary"
	}
	for _, field := range []struct {
		name string
		read func(string) (string, error)
		to   *string
	}{{"cpu-bind", value.CPUBind, &t.CpuBind}, {"gpu-bind", value.GPUBind, &t.GpuBind}} {
		v, ok := o.Get(field.name)
		if !ok {
			continue
		}
		text, err := field.read(v.Text)
		if err := binding(field.name, v.Text, err); err != nil {
			return err
		}
		*field.to = text
	}
	if t.GpuBind != "" {
		t.BindGpusPerTask = false // another binding was asked for
	}
	if v, ok := o.Get("propagate"); ok {
		var err error
		if t.Rlimits, err = SoftLimits(v.Text, c.SoftLimit); err != nil {
			return err
		}
	}
	return nil
}

// binding turns the error of a value into a refusal.
func binding(name, text string, err error) error {
	var known *value.BindError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &known):
		return refused("--%s=%s is not supported yet: %s", name, text, known)
	}
	return &Error{Text: fmt.Sprintf("unrecognized --%s argument \"%s\"\nInvalid --%s specification", name, text, name), Code: CodeUsage}
}

// SoftLimits are the soft limits of this process that --propagate names; soft tells one, nil asks the kernel.
func SoftLimits(list string, soft func(string) (uint64, error)) ([]*apiv1.ResourceLimit, error) {
	names, err := value.LimitNames(list)
	if err != nil {
		return nil, invalid("propagate")
	}
	if soft == nil {
		soft = softLimit
	}
	var out []*apiv1.ResourceLimit
	for _, name := range names {
		n, err := soft(name)
		if err != nil {
			return nil, refused("--propagate=%s: read the limit %s: %v", list, name, err)
		}
		out = append(out, &apiv1.ResourceLimit{Name: name, Soft: n})
	}
	return out, nil
}

// Numbers of setrlimit(2) that package syscall has no names for.
const (
	rlimitRSS     = 5
	rlimitNPROC   = 6
	rlimitMEMLOCK = 8
)

var limitNumbers = map[string]int{
	"AS": syscall.RLIMIT_AS, "CORE": syscall.RLIMIT_CORE, "CPU": syscall.RLIMIT_CPU, "DATA": syscall.RLIMIT_DATA,
	"FSIZE": syscall.RLIMIT_FSIZE, "MEMLOCK": rlimitMEMLOCK, "NPROC": rlimitNPROC, "RSS": rlimitRSS, "STACK": syscall.RLIMIT_STACK,
}

// softLimit asks the kernel. The number of open files is asked by a shell: a Go program raises its own when it starts, and gives its
// children the one it had.
func softLimit(name string) (uint64, error) {
	if name == "NOFILE" {
		out, err := exec.Command("/bin/sh", "-c", "ulimit -Sn").Output()
		if err != nil {
			return 0, err
		}
		text := strings.TrimSpace(string(out))
		if text == "unlimited" {
			return ^uint64(0), nil
		}
		return strconv.ParseUint(text, 10, 64)
	}
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(limitNumbers[name], &limit); err != nil {
		return 0, err
	}
	return limit.Cur, nil
}
