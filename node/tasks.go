package node

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"
	"github.com/muster-hpc/muster/proto/notation"

	"github.com/muster-hpc/muster/node/bind"
	"github.com/muster-hpc/muster/node/environ"
)

// layout is what each task of a step here runs and uses, by local id.
type layout struct {
	portions []environ.Portion
	// part is the index of each task's portion.
	part     []int
	args     [][]string
	bindings []environ.Binding
	masks    []notation.Mask
	// lines are for the tasks' standard error.
	lines [][]string
}

// layOut reads what the parts of a step ask for. script is the path of the batch script; empty for other steps.
func (a *Agent) layOut(order *nodev1.DesiredAttempt, step *nodev1.DesiredStep, script string) (*layout, error) {
	l := &layout{portions: environ.Portions(order, step)}
	for part, p := range l.portions {
		first := len(l.args)
		for _, rank := range p.Ranks {
			args, ok := p.Program(rank)
			if script != "" {
				args, ok = append([]string{script}, p.Args...), true
			}
			if !ok || len(args) == 0 || args[0] == "" {
				return nil, &prepareError{sentence: fmt.Sprintf("the step names no program to run for rank %d", rank), usersFault: true}
			}
			l.args, l.part, l.lines = append(l.args, args), append(l.part, part), append(l.lines, nil)
		}
		if script != "" { // it takes no devices of its own, and may use everything
			l.bindings, l.masks = append(l.bindings, environ.Binding{}), append(l.masks, p.CPUs)
			continue
		}
		if err := a.bindPart(l, p, first); err != nil {
			return nil, &prepareError{sentence: err.Error(), usersFault: true}
		}
	}
	return l, nil
}

// bindPart chooses the devices of the tasks of a part, of which the first has the given local id.
func (a *Agent) bindPart(l *layout, p environ.Portion, first int) error {
	cpu, err := bind.CPUs(bind.CPURequest{
		Topology: a.topology, CPUs: p.CPUs, Tasks: len(p.Ranks), PerTask: int(p.Resources.GetCpusPerTask()),
		Bind: p.Options.GetCpuBind(), Distribution: p.Options.GetDistribution(),
	})
	if err != nil {
		return err
	}
	each, loud, err := bind.GPUs(bind.GPURequest{
		Bind: p.Options.GetGpuBind(), GPUs: p.GPUs.Devices(), Tasks: len(p.Ranks), PerTask: p.GPUsPerTask(), Relative: a.keepsDevices(),
		Near: a.nearGPUs(), CPUs: cpu.Masks,
	})
	if err != nil {
		return err
	}
	for i, rank := range p.Ranks {
		mask := cpu.Masks[i]
		if mask == nil {
			mask = p.CPUs
		}
		l.bindings = append(l.bindings, environ.Binding{CPU: cpu, GPUs: each[i], Some: !slices.Equal(each[i], p.GPUs.Devices())})
		l.masks = append(l.masks, mask)
		who := fmt.Sprintf("%s, task %2d %2d [%%p]", a.cfg.Spec.GetName(), rank, first+i)
		if cpu.Problems[i] != "" {
			l.lines[first+i] = append(l.lines[first+i], "slurmstepd-"+who+": error: "+cpu.Problems[i])
		}
		if cpu.Verbose {
			done := ""
			if a.cfg.BindCPUs {
				done = " set"
			}
			l.lines[first+i] = append(l.lines[first+i], fmt.Sprintf("cpu-bind=%s - %s: mask %s%s", cpu.Word(), who, bind.Hex(mask), done))
		}
		if loud {
			l.lines[first+i] = append(l.lines[first+i], fmt.Sprintf("gpu-bind - %s: accelerators %s of %s", who,
				notation.MaskOf(each[i]...), notation.Mask(p.GPUs)))
		}
	}
	return nil
}

// own is what the step has on the node, of all parts; memory is that of the job if no part has its own.
func (l *layout) own(order *nodev1.DesiredAttempt) (cpus, gpus notation.Mask, memoryMB uint64) {
	var c, g []int
	whole := false
	for _, p := range l.portions {
		c, g = append(c, p.CPUs.Devices()...), append(g, p.GPUs.Devices()...)
		memoryMB += p.MemoryMB
		whole = whole || p.MemoryMB == 0
	}
	if whole {
		memoryMB = order.GetMemoryMb()
	}
	return notation.MaskOf(c...), notation.MaskOf(g...), memoryMB
}

// keepsDevices reports whether the accelerators that a step does not have are kept from its processes: libraries then count its own from 0.
func (a *Agent) keepsDevices() bool {
	return a.devicesKept && slices.ContainsFunc(a.cfg.Spec.GetGpus(), func(g *apiv1.Gpu) bool { return len(g.GetDeviceFiles()) > 0 })
}

// reachable are the accelerators that the processes of a step can open; nil if nothing is kept from them.
func (a *Agent) reachable(gpus notation.Mask) []int {
	if !a.keepsDevices() {
		return nil
	}
	return append([]int{}, gpus.Devices()...)
}

func (a *Agent) nearGPUs() map[int]notation.Mask {
	near := make(map[int]notation.Mask)
	for _, g := range a.cfg.Spec.GetGpus() {
		near[int(g.GetIndex())] = g.GetCpuMask()
	}
	return near
}

// tasks says what each task runs.
func (a *Agent) tasks(s *step, src source, l *layout, environments [][]string) []*supervisorv1.TaskPlan {
	order := s.record.GetOrder()
	var all []*supervisorv1.TaskPlan
	for i, rank := range order.GetSteps()[0].GetRanks() {
		files, options := s.record.GetFiles()[i], l.portions[l.part[i]].Options
		task := &supervisorv1.TaskPlan{
			Rank: rank, Args: l.args[i], Env: environments[i],
			StdinPath: a.stdin(order, src, rank), StdoutPath: files.GetStdoutPath(), StderrPath: files.GetStderrPath(),
			Append: src.openAppend || order.GetFence().GetAttempt() > 1, Lines: l.lines[i],
		}
		if a.cfg.BindCPUs {
			task.CpuMask = l.masks[i]
		}
		if hasTerminal(src, rank) {
			task.Terminal = &supervisorv1.Terminal{Rows: src.options.GetPtyRows(), Columns: src.options.GetPtyColumns()}
			task.Env = append(task.Env, environ.Terminal(src.options.GetPtyRows(), src.options.GetPtyColumns())...)
		}
		// The cluster's prolog comes first and its epilog last: what the user's does is within.
		task.Prologs = present(a.control.settings.GetTaskProlog(), options.GetTaskProlog())
		task.Epilogs = present(options.GetTaskEpilog(), a.control.settings.GetTaskEpilog())
		all = append(all, task)
	}
	return all
}

// present are the texts that are not empty.
func present(texts ...string) []string {
	return slices.DeleteFunc(texts, func(text string) bool { return text == "" })
}

// hasTerminal reports whether a task has a terminal: rank 0 of a step that asks for one.
func hasTerminal(src source, rank uint32) bool {
	return src.options.GetPty() && rank == 0 && !src.batch
}

// stdin is where a task's standard input comes from: its file, the client's input (empty), or nothing.
func (a *Agent) stdin(order *nodev1.DesiredAttempt, src source, rank uint32) string {
	if hasTerminal(src, rank) {
		return ""
	}
	if src.stdinPath != "" {
		return a.names(order, rank).Path(src.stdinPath, src.dir())
	}
	connected := src.options.GetStdinRank()
	if !src.options.GetPty() && (src.options.GetStdinAll() || connected < 0 || uint32(connected) == rank) {
		return ""
	}
	return os.DevNull
}

// newVersion is the version of the supervisors' protocol in which they learned what only some plans ask for.
const newVersion = 2

// needs is the version of supervisor that a plan needs, and what for.
func needs(plan *supervisorv1.StepPlan) (version uint32, what string) {
	var features []string
	add := func(has bool, feature string) {
		if has && !slices.Contains(features, feature) {
			features = append(features, feature)
		}
	}
	add(len(plan.GetWarnings()) > 0, "signals before the time limit")
	for _, t := range plan.GetTasks() {
		add(t.GetTerminal() != nil, "terminals")
		add(len(t.GetPrologs())+len(t.GetEpilogs()) > 0, "programs around tasks")
	}
	if len(features) == 0 {
		return 1, ""
	}
	return newVersion, strings.Join(features, " and ")
}

// Numbers of warnings.
const (
	jobsWarning  = 1
	stepsWarning = 2
)

// timing is the time limit of a step from its own start, 0 if it has none, and the signals before it: the job's counts to the end of the job,
// the step's to the end of the step. a.mu is held.
func (a *Agent) timing(s *step) (limit time.Duration, warnings []*supervisorv1.Warning) {
	order := s.record.GetOrder()
	spec, batch := order.GetSteps()[0].GetStep().GetSpec(), s.id == environ.BatchStep
	job := a.jobsRest(s)
	warn := func(number uint32, w *apiv1.WarnSignal, of time.Duration) {
		if w == nil || of == 0 || w.GetBatchOnly() != batch && number == jobsWarning {
			return
		}
		after := max(of-time.Duration(w.GetLeadS())*time.Second, time.Millisecond)
		warnings = append(warnings, &supervisorv1.Warning{Number: number, Signal: w.GetSignal(), AfterMs: uint64(after / time.Millisecond), Tree: !w.GetBatchOnly()})
	}
	limit = job
	if own := spec.GetTimeLimitS(); own != 0 && own != environ.Unlimited {
		if d := time.Duration(own) * time.Second; limit == 0 || d < limit {
			limit = d
		}
	}
	warn(jobsWarning, order.GetJob().GetSpec().GetWarnSignal(), job)
	if !batch {
		warn(stepsWarning, spec.GetWarnSignal(), limit)
	}
	return limit, warnings
}

// jobsRest is what is left of the attempt's time limit at the start of a step; 0 if it has none. a.mu is held.
func (a *Agent) jobsRest(s *step) time.Duration {
	if s.limitS == 0 || s.limitS == environ.Unlimited {
		return 0
	}
	limit := time.Duration(s.limitS) * time.Second
	at := a.attempts[s.key]
	if at == nil || at.record.GetStartBootNs() == 0 {
		return limit
	}
	from := s.startNS
	if from == 0 {
		from = int64(a.boot())
	}
	return max(limit-time.Duration(from-at.record.GetStartBootNs()), time.Millisecond)
}
