package fsm

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"

	"github.com/muster-hpc/muster/fsm/shape"
)

const (
	// maxParts bounds the further parts of a step, as the protocol says.
	maxParts = 128
	// maxPrograms bounds the programs of a step.
	maxPrograms = 1024
	// maxWarnLeadS bounds the time between a warning and the time limit in seconds, as Slurm does.
	maxWarnLeadS = 65_535
	// maxTaskNice bounds what is added to the nice value of tasks, in both directions: Linux has 40 values.
	maxTaskNice = 39
	// maxTerminal bounds the lines and columns of a terminal.
	maxTerminal = 65_535
	// maxTasksPerGPU bounds the tasks for each GPU, and the CPUs for each.
	maxTasksPerGPU = 65_536
	// maxBindBytes bounds lists in a binding.
	maxBindBytes = 16 << 10
)

// limitNames are the limits of setrlimit(2) that are passed on.
var limitNames = []string{
	"AS", "CORE", "CPU", "DATA", "FSIZE", "LOCKS", "MEMLOCK", "MSGQUEUE", "NICE", "NOFILE", "NPROC", "RSS", "RTPRIO", "RTTIME", "SIGPENDING", "STACK",
}

// checkLaunch checks how tasks are to be started. Only operators may raise the priority of their tasks.
func checkLaunch(o *apiv1.TaskOptions, operator bool) *apiv1.ErrorDetail {
	bad := func(field, sentence string, args ...any) *apiv1.ErrorDetail {
		return refuse("OPTION_INVALID", field, sentence, args...)
	}
	if _, err := shape.ParseDistribution(o.GetDistribution()); err != nil {
		return bad("distribution", "%s", err.Error())
	}
	switch {
	case !slices.Contains([]string{"", "none", "pmi2"}, o.GetMpi()):
		return bad("mpi", "there is no process management interface %q; none and pmi2 are served", o.GetMpi())
	case !validBind(o.GetCpuBind(), []string{"none", "threads", "cores", "sockets", "rank"}, nil, []string{"map_cpu", "mask_cpu"}):
		return bad("cpu_bind", "%q binds to no CPUs: none, threads, cores, sockets, rank, map_cpu:LIST and mask_cpu:LIST do, with verbose, before them", o.GetCpuBind())
	case !validBind(o.GetGpuBind(), []string{"none", "closest"}, []string{"single", "per_task"}, []string{"map_gpu", "mask_gpu"}):
		return bad("gpu_bind", "%q binds to no GPUs: none, closest, single:N, per_task:N, map_gpu:LIST and mask_gpu:LIST do, with verbose, before them", o.GetGpuBind())
	case o.GetPtyRows() > maxTerminal || o.GetPtyColumns() > maxTerminal:
		return bad("pty", "a terminal has at most %d lines and columns, not %d and %d", maxTerminal, o.GetPtyRows(), o.GetPtyColumns())
	case o.GetNice() > maxTaskNice || o.GetNice() < -maxTaskNice:
		return bad("nice", "%d cannot be added to the nice value of tasks; -%d to %d can", o.GetNice(), maxTaskNice, maxTaskNice)
	case o.GetNice() < 0 && !operator:
		return refuse("PERMISSION_DENIED", "nice", "only an operator can raise the priority of tasks; leave the negative nice value out")
	case len(o.GetRlimits()) > len(limitNames):
		return bad("rlimits", "there are %d limits; at most %d are possible", len(o.GetRlimits()), len(limitNames))
	case len(o.GetPrograms()) > maxPrograms:
		return bad("programs", "there are %d programs; at most %d are possible", len(o.GetPrograms()), maxPrograms)
	}
	for i, l := range o.GetRlimits() {
		if !slices.Contains(limitNames, l.Name) || slices.ContainsFunc(o.Rlimits[:i], func(b *apiv1.ResourceLimit) bool { return b.Name == l.Name }) {
			return bad("rlimits", "%q is not a limit, or is there twice; the limits are %s", l.Name, strings.Join(limitNames, ", "))
		}
	}
	for _, p := range []struct{ name, path string }{{"task_prolog", o.GetTaskProlog()}, {"task_epilog", o.GetTaskEpilog()}} {
		if refusal := checkProgramPath(p.name, p.path); refusal != nil {
			return refusal
		}
	}
	for _, p := range o.GetPrograms() {
		if len(p.Args) == 0 {
			return bad("programs", "the ranks %q have no program", p.Ranks)
		}
		if refusal := checkArgs(p.Args); refusal != nil {
			return refusal
		}
	}
	return nil
}

// validBind reads a binding: a word, a word with a number, or a word with a list, each perhaps after "verbose,".
func validBind(text string, words, numbered, listed []string) bool {
	if text == "" {
		return true
	}
	if len(text) > maxBindBytes {
		return false
	}
	if text == "verbose" {
		return true // the default, said aloud
	}
	rest := text
	if bind, said := strings.CutPrefix(text, "verbose,"); said {
		if bind == "" {
			return true
		}
		rest = bind
	}
	word, value, hasValue := strings.Cut(rest, ":")
	switch {
	case slices.Contains(words, word):
		return !hasValue
	case slices.Contains(numbered, word):
		n, err := strconv.ParseUint(value, 10, 16)
		return err == nil && n > 0
	case slices.Contains(listed, word):
		return value != "" && strings.Trim(value, "0123456789abcdefABCDEFx,*-") == ""
	default:
		return false
	}
}

// checkProgramPath checks the absolute path of a program; none is fine.
func checkProgramPath(name, path string) *apiv1.ErrorDetail {
	if path != "" && path[0] != '/' {
		return refuse("OPTION_INVALID", name, "the %s %q is not an absolute path", name, path)
	}
	return checkText(name, path, maxPathBytes)
}

func checkWarning(w *apiv1.WarnSignal) *apiv1.ErrorDetail {
	switch {
	case w == nil:
		return nil
	case w.Signal == 0 || w.Signal > maxSignal:
		return refuse("SIGNAL_INVALID", "warn_signal", "there is no signal %d", w.Signal)
	case w.LeadS > maxWarnLeadS:
		return refuse("SIGNAL_INVALID", "warn_signal", "a warning comes at most %d s before the time limit, not %d", maxWarnLeadS, w.LeadS)
	default:
		return nil
	}
}

// span is a range of ranks, both ends included.
type rankSpan struct{ first, last uint64 }

// checkPrograms checks that the programs of a step cover each of its ranks exactly once.
func checkPrograms(o *apiv1.TaskOptions, tasks uint64) *apiv1.ErrorDetail {
	if len(o.GetPrograms()) == 0 {
		return nil
	}
	bad := func(sentence string, args ...any) *apiv1.ErrorDetail {
		return refuse("PROGRAMS_INVALID", "programs", sentence, args...)
	}
	var spans []rankSpan
	for _, p := range o.Programs {
		own, ok := parseRanks(p.Ranks)
		if !ok {
			return bad("%q is not a list of ranks, as 0-3,7 is", p.Ranks)
		}
		spans = append(spans, own...)
	}
	slices.SortFunc(spans, func(a, b rankSpan) int { return cmp.Compare(a.first, b.first) })
	next := uint64(0)
	for _, s := range spans {
		switch {
		case s.first < next:
			return bad("rank %d has two programs", s.first)
		case s.first > next:
			return bad("rank %d has no program", next)
		case s.last >= tasks:
			return bad("there is a program for rank %d; the step has %d tasks", s.last, tasks)
		}
		next = s.last + 1
	}
	if next < tasks {
		return bad("rank %d has no program", next)
	}
	return nil
}

// parseRanks reads a folded list of ranks.
func parseRanks(list string) ([]rankSpan, bool) {
	var spans []rankSpan
	for item := range strings.SplitSeq(list, ",") {
		low, high, isRange := strings.Cut(item, "-")
		first, err := strconv.ParseUint(low, 10, 32)
		if err != nil {
			return nil, false
		}
		last := first
		if isRange {
			if last, err = strconv.ParseUint(high, 10, 32); err != nil || last < first {
				return nil, false
			}
		}
		spans = append(spans, rankSpan{first, last})
	}
	return spans, true
}

// checkParts checks the further parts of a step.
func checkParts(spec *apiv1.StepSpec, operator bool) *apiv1.ErrorDetail {
	if len(spec.Parts) > maxParts {
		return refuse("TOO_MANY", "parts", "the step has %d further parts; at most %d are possible", len(spec.Parts), maxParts)
	}
	if len(spec.Parts) > 0 && len(spec.TaskOptions.GetPrograms()) > 0 {
		return refuse("PROGRAMS_INVALID", "programs", "a step of several parts has a program for each part, and no others")
	}
	for i, p := range spec.Parts {
		subject := fmt.Sprintf("part %d", i+1)
		switch {
		case len(p.Parts) > 0:
			return refuse("OPTION_INVALID", subject, "part %d of the step has parts itself", i+1)
		case len(p.Args) == 0:
			return refuse("COMMAND_MISSING", subject, "there is no command to run in part %d", i+1)
		case len(p.TaskOptions.GetPrograms()) > 0:
			return refuse("PROGRAMS_INVALID", subject, "a step of several parts has a program for each part, and no others")
		}
		if refusal := checkPart(p, operator); refusal != nil {
			return refusal
		}
	}
	return nil
}

// checkPart checks what counts of each part of a step.
func checkPart(p *apiv1.StepSpec, operator bool) *apiv1.ErrorDetail {
	if refusal := checkArgs(p.Args); refusal != nil {
		return refusal
	}
	if refusal := checkLaunch(p.TaskOptions, operator); refusal != nil {
		return refusal
	}
	d, _ := shape.ParseDistribution(p.TaskOptions.GetDistribution())
	if r := p.Resources; d.Arbitrary != (len(r.GetTaskNodes()) > 0) {
		return refuse("REQUEST_INVALID", "task_nodes", "the distribution arbitrary and a list of the nodes of all ranks go together; one of them is missing")
	}
	return checkRequest(p.Resources)
}

// checkJobLaunch checks the launch options of a job.
func checkJobLaunch(spec *apiv1.JobSpec, operator bool) *apiv1.ErrorDetail {
	if refusal := checkLaunch(spec.TaskOptions, operator); refusal != nil {
		return refusal
	}
	if refusal := checkWarning(spec.WarnSignal); refusal != nil {
		return refusal
	}
	r := spec.Resources
	switch {
	case spec.NoKill && spec.AutomaticRecovery:
		return refuse("SPEC_INVALID", "no_kill", "a job that goes on without lost nodes (no_kill) cannot begin again elsewhere without them (automatic_recovery); choose one")
	case r != nil && r.Relative != nil:
		return refuse("REQUEST_INVALID", "relative", "only a step in an allocation can begin at a node of it; a job names nodes with a node list")
	case len(r.GetTaskNodes()) > 0:
		return refuse("REQUEST_INVALID", "task_nodes", "only a step in an allocation can say on which node each rank is; ask for the nodes with a node list")
	case len(spec.TaskOptions.GetPrograms()) == 0 || spec.Kind != apiv1.JobKind_JOB_KIND_RUN:
		return nil
	}
	need := shape.Of(r)
	if r.GetNtasks() == 0 && need.NodesMin != need.NodesMax {
		return refuse("PROGRAMS_INVALID", "programs", "the number of tasks is open, so that nobody can tell which ranks need a program; give the number of tasks")
	}
	return checkPrograms(spec.TaskOptions, need.Tasks)
}

// checkByDevice checks requests by accelerator and generic resource.
func checkByDevice(r *apiv1.ResourceRequest) *apiv1.ErrorDetail {
	bad := func(sentence string, args ...any) *apiv1.ErrorDetail {
		return refuse("REQUEST_INVALID", "resources", sentence, args...)
	}
	if len(r.GetGres()) > maxGres || len(r.GetTaskNodes()) > maxListed || r.GetRelative() > maxListed {
		return refuse("TOO_MANY", "resources", "has %d requests of devices and %d names of ranks' nodes; at most %d and %d are possible",
			len(r.GetGres()), len(r.GetTaskNodes()), maxGres, maxListed)
	}
	typed, untyped := make(map[string]bool), make(map[string]bool)
	for _, g := range r.GetGres() {
		kinds := untyped
		if g.Type != "" {
			kinds = typed
		}
		switch {
		case !validName(g.Name) || g.Type != "" && !validName(g.Type):
			return bad("asks for devices of the name %q and type %q: letters, digits, '_', '-' and '.' are allowed", g.Name, g.Type)
		case g.Count > maxGresUnits:
			return bad("asks for %d %s per node; at most %d are possible", g.Count, g.Name, maxGresUnits)
		case kinds[g.Name+":"+g.Type]:
			return bad("asks for %s%s twice", g.Name, typeSuffix(g.Type))
		case g.Name == gpuName && (r.GetGpusPerNode() > 0 || r.GetGpusTotal() > 0 || r.GetGpusPerTask() > 0):
			return bad("asks for GPUs as generic resources and in another way; one of them is enough")
		}
		kinds[g.Name+":"+g.Type] = true
		if g.Type != "" {
			typed[g.Name] = true
		} else {
			untyped[g.Name] = true
		}
		if typed[g.Name] && untyped[g.Name] {
			return bad("asks for %s with a type and without one; give a type for all of them or for none", g.Name)
		}
	}
	switch {
	case r.GetNtasksPerGpu() > maxTasksPerGPU || r.GetCpusPerGpu() > maxTasksPerGPU:
		return bad("asks for %d tasks and %d CPUs per GPU; at most %d are possible", r.GetNtasksPerGpu(), r.GetCpusPerGpu(), maxTasksPerGPU)
	case r.GetNtasksPerGpu() > 0 && r.GetGpusPerTask() > 0:
		return bad("asks for %d tasks per GPU and %d GPUs per task; one excludes the other", r.GetNtasksPerGpu(), r.GetGpusPerTask())
	case r.GetCpusPerGpu() > 0 && r.GetCpusPerTask() > 0:
		return bad("asks for %d CPUs per GPU and %d per task; one excludes the other", r.GetCpusPerGpu(), r.GetCpusPerTask())
	case r.GetNtasksPerGpu() > 0 && r.GetNtasks() == 0 && r.GetGpusTotal() == 0 && r.GetGpusPerNode() == 0 && !typed[gpuName] && !untyped[gpuName]:
		return bad("asks for %d tasks per GPU without a number of tasks or of GPUs; give one of them", r.GetNtasksPerGpu())
	case len(r.GetTaskNodes()) > 0 && r.GetNtasks() > 0 && int(r.GetNtasks()) != len(r.GetTaskNodes()):
		return bad("asks for %d tasks and names the nodes of %d", r.GetNtasks(), len(r.GetTaskNodes()))
	case r != nil && r.Relative != nil && (len(r.NodeList) > 0 || len(r.Exclude) > 0):
		return bad("begins at a node of the allocation and names nodes; one excludes the other")
	default:
		return nil
	}
}

func typeSuffix(kind string) string {
	if kind == "" {
		return ""
	}
	return ":" + kind
}

// checkSiteSettings checks the site's programs and checks of the nodes.
func checkSiteSettings(s *apiv1.Settings) *apiv1.ErrorDetail {
	bad := func(field, sentence string, args ...any) *apiv1.ErrorDetail {
		return refuse("CONFIGURATION_INVALID", "settings."+field, sentence, args...)
	}
	for _, p := range []struct{ name, path string }{
		{"prolog", s.GetProlog()}, {"epilog", s.GetEpilog()}, {"task_prolog", s.GetTaskProlog()}, {"task_epilog", s.GetTaskEpilog()},
	} {
		if p.path != "" && p.path[0] != '/' || len(p.path) > maxPathBytes {
			return bad(p.name, "%s is %q; it must be an absolute path of at most %d bytes", p.name, p.path, maxPathBytes)
		}
	}
	switch {
	case s.GetPrologTimeoutS() > 3600:
		return bad("prolog_timeout_s", "prolog_timeout_s is %d; at most 3600 s are sensible", s.GetPrologTimeoutS())
	case s.GetHealthDrainPercent() > 100:
		return bad("health_drain_percent", "health_drain_percent is %d; there are 100 percent", s.GetHealthDrainPercent())
	case len(s.GetHealthChecks()) > maxHealthChecks:
		return bad("health_checks", "there are %d health checks; at most %d are possible", len(s.GetHealthChecks()), maxHealthChecks)
	}
	seen := make(map[string]bool)
	for _, c := range s.GetHealthChecks() {
		field := "health_checks." + c.Name
		switch {
		case !validName(c.Name) || seen[c.Name]:
			return bad("health_checks", "the health check's name %q is not a name, or is there twice", c.Name)
		case len(c.Command) == 0 || !strings.HasPrefix(c.Command[0], "/"):
			return bad(field, "the health check %s has no program with an absolute path", c.Name)
		case len(c.Times) == 0 || slices.Contains(c.Times, apiv1.CheckTime_CHECK_TIME_UNSPECIFIED):
			return bad(field, "the health check %s does not say when it runs", c.Name)
		case c.IntervalS > 0 && c.IntervalS < 5 || c.IntervalS > 7*86_400:
			return bad(field, "the health check %s runs every %d s; 5 s to a week are possible", c.Name, c.IntervalS)
		case c.TimeoutS > 86_400:
			return bad(field, "the health check %s may take %d s; at most a day is possible", c.Name, c.TimeoutS)
		case c.EndsWork && c.Severity != apiv1.ConditionSeverity_CONDITION_SEVERITY_UNSPECIFIED && c.Severity != conditionFailed:
			return bad(field, "the health check %s ends work, which only a failure can", c.Name)
		}
		if refusal := checkArgs(c.Command); refusal != nil {
			return refusal
		}
		seen[c.Name] = true
	}
	return nil
}

// maxHealthChecks bounds the health checks of a configuration, as the protocol says.
const maxHealthChecks = 32
