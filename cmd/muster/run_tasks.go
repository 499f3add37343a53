package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/pflag"

	"github.com/muster-hpc/muster/cmd/internal/launch"
	"github.com/muster-hpc/muster/cmd/internal/slurm/submit"
	"github.com/muster-hpc/muster/cmd/internal/slurm/value"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/rpc/client"
)

// launchFlags say how tasks are laid out, bound, limited and warned. They are named as srun's options.
type launchFlags struct {
	distribution, cpuBind, gpuBind, warn string
	propagate, prolog, epilog            string
	noKill                               bool
	nice                                 int32
}

func (l *launchFlags) flags(f *pflag.FlagSet) {
	f.StringVarP(&l.distribution, "distribution", "m", "", "how ranks are laid out over nodes: `block`, cyclic or plane=N")
	f.StringVar(&l.cpuBind, "cpu-bind", "", "bind tasks to CPUs: none, threads, cores, sockets, rank, map_cpu:LIST, mask_cpu:LIST `TYPE`")
	f.StringVar(&l.gpuBind, "gpu-bind", "", "GPUs that each task sees: none, closest, single:N, per_task:N, map:LIST, mask:LIST `TYPE`")
	f.StringVar(&l.warn, "signal", "", "send `[B:]SIGNAL[@SECONDS]` that long before the time limit (60); B: to the batch shell alone")
	f.StringVar(&l.propagate, "propagate", "NONE", "soft limits of this process for the tasks: ALL, NONE or `LIMITS` (NOFILE,STACK)")
	f.StringVar(&l.prolog, "task-prolog", "", "`program` to run before each task; it can set variables for it")
	f.StringVar(&l.epilog, "task-epilog", "", "`program` to run after each task")
	f.BoolVarP(&l.noKill, "no-kill", "k", false, "losing nodes does not end the job: the tasks on the others go on")
	f.Int32Var(&l.nice, "task-nice", 0, "added to the nice `value` of tasks")
}

// fill reads the flags into a specification.
func (l *launchFlags) fill(spec *apiv1.JobSpec) error {
	t := spec.TaskOptions
	t.Nice, spec.NoKill = l.nice, l.noKill
	for _, f := range []struct {
		name, text string
		to         *string
		read       func(string) (string, error)
	}{
		{"--distribution", l.distribution, &t.Distribution, func(s string) (string, error) {
			text, arbitrary, err := value.Distribution(s)
			if arbitrary {
				err = errors.New("ranks go where a list says only within an allocation (SLURM_HOSTFILE and srun)")
			}
			return text, err
		}},
		{"--cpu-bind", l.cpuBind, &t.CpuBind, value.CPUBind},
		{"--gpu-bind", l.gpuBind, &t.GpuBind, value.GPUBind},
	} {
		if f.text == "" {
			continue
		}
		var err error
		if *f.to, err = f.read(f.text); err != nil {
			return usagef("%s %q: %v", f.name, f.text, err)
		}
	}
	if l.gpuBind != "" {
		t.BindGpusPerTask = false // another binding was asked for
	}
	if l.warn != "" {
		var err error
		if spec.WarnSignal, err = value.WarnSignal(l.warn, true); err != nil {
			return usagef("--signal %q: write a signal and seconds, for example USR1@120 or B:TERM@60; at most 65535 s", l.warn)
		}
	}
	var err error
	if t.Rlimits, err = submit.SoftLimits(l.propagate, nil); err != nil {
		return usagef("--propagate %q: %v", l.propagate, err)
	}
	for _, p := range []struct {
		path string
		to   *string
	}{{l.prolog, &t.TaskProlog}, {l.epilog, &t.TaskEpilog}} {
		if p.path == "" {
			continue
		}
		if *p.to, err = filepath.Abs(p.path); err != nil {
			return fmt.Errorf("find %s: %w", p.path, err)
		}
	}
	return nil
}

// killByDefault makes the first bad exit end a job with GPUs on several nodes: its other tasks would wait for ever for the one that is gone.
func killByDefault(spec *apiv1.JobSpec) {
	q := spec.Resources
	gpus := q.GpusPerNode + q.GpusTotal + q.GpusPerTask
	for _, g := range q.Gres {
		if g.Name == "gpu" {
			gpus += g.Count
		}
	}
	spec.TaskOptions.KillOnBadExit = gpus > 0 && q.NodesMin > 1
}

// programs reads the programs of the ranks from a file.
func programs(spec *apiv1.JobSpec, path string) error {
	q := spec.Resources
	tasks := q.Ntasks
	if tasks == 0 {
		if q.NodesMin != q.NodesMax {
			return usagef("--multi-prog needs --tasks, to say how many ranks there are")
		}
		tasks = max(1, q.NodesMin) * max(1, q.NtasksPerNode)
	}
	list, err := submit.Programs(path, tasks)
	if err != nil {
		return usagef("--multi-prog: %s", strings.TrimSuffix(err.Error(), "\n"))
	}
	spec.TaskOptions.Programs = list
	return nil
}

// terminal gives rank 0 the user's terminal. Call stop at the end, whatever happens.
func (a *app) terminal(spec *apiv1.JobSpec, o *launch.Options) (stop func()) {
	first := uint32(0)
	o.Terminal = launch.OpenTerminal(a.in)
	o.StdinRank, o.OnlyStdout, o.OnlyStderr, o.Label = 0, &first, &first, false
	t := spec.TaskOptions
	t.Pty, t.StdinAll, t.StdinRank, t.Label = true, false, 0, false
	t.PtyRows, t.PtyColumns = o.Terminal.Size()
	resized := make(chan os.Signal, 1) // the last size counts
	signal.Notify(resized, syscall.SIGWINCH)
	o.Resized = resized
	o.Started = func() {
		if err := o.Terminal.Raw(); err != nil {
			fmt.Fprintln(a.errOut, "muster run:", err)
		}
	}
	return func() { signal.Stop(resized); o.Terminal.Restore() }
}

// impatient makes the job end some time after its first task has.
func (a *app) impatient(ctx context.Context, c *client.Client, o *launch.Options, limit time.Duration) (stop func()) {
	if limit <= 0 {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	first := make(chan struct{}, 1)
	o.FirstEnd = func() {
		select {
		case first <- struct{}{}:
		default: // the time runs already
		}
	}
	go func() {
		defer close(done)
		for {
			select {
			case <-first:
			case <-ctx.Done():
				return
			}
			timer := time.NewTimer(limit)
			select {
			case <-timer.C:
				fmt.Fprintf(a.errOut, "muster run: the first task ended %v ago: ending the others\n", limit)
				_, err := c.Jobs().CancelJobs(ctx, &apiv1.CancelJobsRequest{RequestId: client.NewRequestID(), Filter: &apiv1.JobFilter{JobIds: []uint32{o.Job}}})
				if err != nil && ctx.Err() == nil {
					fmt.Fprintf(a.errOut, "muster run: end job %d: %v\n", o.Job, err)
				}
			case <-ctx.Done():
			}
			timer.Stop()
		}
	}()
	return func() { cancel(); <-done }
}
