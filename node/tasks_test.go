package node

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"

	"github.com/muster-hpc/muster/node/environ"
	"github.com/muster-hpc/muster/node/run"
)

// parallel adds a job whose step 0 has these ranks here.
func (f *fake) parallel(id uint32, work string, spec *apiv1.StepSpec, ranks []uint32, change func(*nodev1.DesiredAttempt, *nodev1.DesiredStep)) {
	f.batch(id, work, "", func(d *nodev1.DesiredAttempt) {
		d.Job.Spec.Kind, d.Job.Spec.ScriptBlob = apiv1.JobKind_JOB_KIND_RUN, ""
		spec.WorkDir, spec.EnvironmentBlob = work, d.Job.Spec.EnvironmentBlob
		s := d.Steps[0]
		s.Step.Id, s.Step.Spec, s.Ranks, s.Step.NumTasks, s.TasksPerNode = 0, spec, ranks, uint32(len(ranks)), []uint32{uint32(len(ranks))}
		if change != nil {
			change(d, s)
		}
	})
}

// through runs a job that is there from its start to its end.
func (f *fake) through(id, step uint32) {
	f.t.Helper()
	f.eventually("prepared", func() bool { return f.state(id, step) == prepared })
	f.want(id, running)
	f.eventually("ended", func() bool { return f.ended(id, step) != nil })
}

func output(t *testing.T, a *Agent, job uint32, task int) (stdout, stderr string) {
	t.Helper()
	view, ok := a.Step(job, 0, 0)
	if !ok || task >= len(view.Tasks) {
		t.Fatalf("the step is seen as %+v", view)
	}
	return read(t, view.Tasks[task].Stdout.Path), read(t, view.Tasks[task].Stderr.Path)
}

func TestPartsAndRanksRunTheirOwnPrograms(t *testing.T) {
	f, work := newFake(t), t.TempDir()
	l := f.begin(filepath.Join(t.TempDir(), "agent"), nil)
	say := []string{"sh", "-c", "echo $0 $SLURM_PROCID $SLURM_LOCALID $SLURM_CPUS_ON_NODE $SLURM_CPU_BIND_LIST"}
	f.parallel(30, work, &apiv1.StepSpec{Args: append(slices.Clone(say), "first"), Parts: []*apiv1.StepSpec{{Args: append(slices.Clone(say), "second")}}}, []uint32{1, 3, 4},
		func(_ *nodev1.DesiredAttempt, s *nodev1.DesiredStep) {
			s.Step.PartRanks = []uint32{2}
			s.Step.Placement = &apiv1.Placement{Groups: []*apiv1.NodeGroup{
				{Nodes: []uint32{7}, CpuMask: []uint64{1}, Tasks: 1}, {Nodes: []uint32{7}, CpuMask: []uint64{6}, Tasks: 2}}}
		})
	f.through(30, 0)
	for i, want := range []string{"first 1 0 3 0x1\n", "second 3 1 3 0x2,0x4\n", "second 4 2 3 0x2,0x4\n"} {
		if got, errs := output(t, l.a, 30, i); got != want {
			t.Errorf("task %d wrote %q, want %q; errors %q", i, got, want, errs)
		}
	}
	f.parallel(31, work, &apiv1.StepSpec{Args: []string{"false"}, TaskOptions: &apiv1.TaskOptions{Programs: []*apiv1.RankProgram{
		{Ranks: "0,5", Args: []string{"echo", "a", "%t", "%o"}}, {Ranks: "1-4", Args: []string{"echo", "b", "%t", "%o"}}}}}, []uint32{1, 5}, nil)
	f.through(31, 0)
	for i, want := range []string{"b 1 0\n", "a 5 1\n"} {
		if got, _ := output(t, l.a, 31, i); got != want {
			t.Errorf("task %d wrote %q, want %q", i, got, want)
		}
	}
}

func TestABindingThatIsNoneFailsThePrepareOfItsUser(t *testing.T) {
	f := newFake(t)
	f.begin(filepath.Join(t.TempDir(), "agent"), nil)
	f.parallel(32, t.TempDir(), &apiv1.StepSpec{Args: []string{"true"}, TaskOptions: &apiv1.TaskOptions{CpuBind: "everywhere"}}, []uint32{0}, nil)
	f.eventually("prepare failed", func() bool { return f.failed(32) != nil })
	if p := f.failed(32); !p.GetUsersFault() || !strings.Contains(p.GetSentence(), "everywhere") {
		t.Errorf("it said %v", p)
	}
}

func TestAVerboseBindingIsSaidBeforeTheTaskSpeaks(t *testing.T) {
	f, work := newFake(t), t.TempDir()
	l := f.begin(filepath.Join(t.TempDir(), "agent"), func(c *Config) { c.BindCPUs = true; c.Spec.Cpus = 1 })
	f.parallel(33, work, &apiv1.StepSpec{Args: []string{"sh", "-c", "echo $$; grep Cpus_allowed_list /proc/self/status >&2"},
		TaskOptions: &apiv1.TaskOptions{CpuBind: "verbose,map_cpu:0"}}, []uint32{0}, nil)
	f.through(33, 0)
	out, errs := output(t, l.a, 33, 0)
	if want := "cpu-bind=MAP - n1, task  0  0 [" + strings.TrimSpace(out) + "]: mask 0x1 set\nCpus_allowed_list:\t0\n"; errs != want {
		t.Errorf("stderr %q, want %q", errs, want)
	}
}

func TestATerminalIsSizedTypedAndHeardAlone(t *testing.T) {
	f, work := newFake(t), t.TempDir()
	l := f.begin(filepath.Join(t.TempDir(), "agent"), nil)
	f.parallel(34, work, &apiv1.StepSpec{Args: []string{"sh", "-c", "test -t 0 || exit 3; stty size; trap 'stty size' WINCH; echo ready; until read line; do :; done; echo got $line"},
		TaskOptions: &apiv1.TaskOptions{Pty: true, PtyRows: 10, PtyColumns: 20}}, []uint32{0, 1}, nil)
	f.eventually("prepared", func() bool { return f.state(34, 0) == prepared })
	f.want(34, running)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	view, _ := l.a.Step(34, 0, 0)
	waitFor(t, func() bool {
		b, _ := os.ReadFile(view.Tasks[0].Stdout.Path)
		return strings.Contains(string(b), "ready")
	})
	if err := l.a.ResizeTerminal(ctx, 34, 0, 0, 30, 40); err != nil {
		t.Fatal(err)
	}
	waitFor(t, func() bool {
		b, _ := os.ReadFile(view.Tasks[0].Stdout.Path)
		return strings.Contains(string(b), "30 40")
	})
	if _, err := l.a.Input(ctx, 34, 0, 0, 0, []byte("words\n"), false); err != nil {
		t.Fatal(err)
	}
	f.eventually("ended", func() bool { return f.ended(34, 0) != nil })
	out, _ := output(t, l.a, 34, 0)
	if got := strings.ReplaceAll(out, "\r", ""); !strings.HasPrefix(got, "10 20\nready\n") || !strings.Contains(got, "got words") {
		t.Errorf("the terminal showed %q", got)
	}
	if view.Tasks[1].Stdout.Path != os.DevNull || view.Tasks[0].Stdout.Path == os.DevNull {
		t.Errorf("output goes to %+v", view.Tasks)
	}
	if err := l.a.ResizeTerminal(ctx, 34, 0, 0, 30, 40); err != ErrStepOver {
		t.Errorf("after the end: %v", err)
	}
	if err := l.a.ResizeTerminal(ctx, 99, 0, 0, 30, 40); err != ErrNoStep {
		t.Errorf("of no step: %v", err)
	}
}

func TestTheSignalBeforeTheLimitFindsItsStepAlsoAfterARestartAndAChange(t *testing.T) {
	const script = "#!/bin/sh\ntrap 'echo usr1 $(cut -d\" \" -f1 /proc/uptime) >> signals' USR1\ntouch up\nwhile [ ! -e go ]; do sleep 0.02; done\n"
	f, work, dir := newFake(t), t.TempDir(), filepath.Join(t.TempDir(), "agent")
	l := f.begin(dir, nil)
	f.batch(35, work, script, func(d *nodev1.DesiredAttempt) {
		d.TimeLimitS = 3600
		d.Job.Spec.WarnSignal = &apiv1.WarnSignal{Signal: uint32(syscall.SIGUSR1), LeadS: 60, BatchOnly: true}
	})
	f.eventually("prepared", func() bool { return f.state(35, environ.BatchStep) == prepared })
	f.want(35, running)
	waitFor(t, func() bool { _, err := os.Stat(filepath.Join(work, "up")); return err == nil })
	if err := l.end(); err != nil {
		t.Fatal(err)
	}
	l = f.begin(dir, nil)
	f.eventually("adopted", func() bool { return f.state(35, environ.BatchStep) == running })
	l.a.mu.Lock()
	start := l.a.attempts[keyOf(35, f.desired[0].Fence)].record.GetStartBootNs()
	l.a.mu.Unlock()
	limit := uint32((time.Duration(run.BootNow()-start))/time.Second) + 63 // due in two to three seconds
	f.update(func() { f.desired[0].TimeLimitS = limit })
	waitFor(t, func() bool { _, err := os.Stat(filepath.Join(work, "signals")); return err == nil })
	late := time.Duration(run.BootNow()-start) - time.Duration(limit-60)*time.Second
	if late < 0 || late > time.Second {
		t.Errorf("it came %v after its time", late)
	}
	if err := os.WriteFile(filepath.Join(work, "go"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	f.finish(35)
	if got := read(t, filepath.Join(work, "signals")); strings.Count(got, "usr1") != 1 {
		t.Errorf("signals %q", got)
	}
}

func TestWhichStepsAreWarned(t *testing.T) {
	jobs, steps := &apiv1.WarnSignal{Signal: 10, LeadS: 60}, &apiv1.WarnSignal{Signal: 12, LeadS: 5}
	shell := &apiv1.WarnSignal{Signal: 10, LeadS: 60, BatchOnly: true}
	for _, c := range []struct {
		name      string
		job, step *apiv1.WarnSignal
		id        uint32
		limit     uint32
		own       uint32
		want      []supervisorv1.Warning
	}{
		{"the script, for steps", jobs, nil, environ.BatchStep, 100, 0, nil},
		{"the script, for it", shell, nil, environ.BatchStep, 100, 0, []supervisorv1.Warning{{Number: 1, Signal: 10, AfterMs: 40_000}}},
		{"a step, for the script", shell, nil, 0, 100, 0, nil},
		{"a step, by the job's limit", jobs, nil, 0, 100, 30, []supervisorv1.Warning{{Number: 1, Signal: 10, AfterMs: 40_000, Tree: true}}},
		{"a step, by its own", nil, steps, 0, 100, 30, []supervisorv1.Warning{{Number: 2, Signal: 12, AfterMs: 25_000, Tree: true}}},
		{"a step, by both", jobs, steps, 0, 100, 0, []supervisorv1.Warning{{Number: 1, Signal: 10, AfterMs: 40_000, Tree: true}, {Number: 2, Signal: 12, AfterMs: 95_000, Tree: true}}},
		{"a limit shorter than the lead", jobs, nil, 0, 10, 0, []supervisorv1.Warning{{Number: 1, Signal: 10, AfterMs: 1, Tree: true}}},
		{"no limit", jobs, steps, 0, environ.Unlimited, 0, nil},
	} {
		order := &nodev1.DesiredAttempt{TimeLimitS: c.limit, Job: &apiv1.Job{Id: 1, Spec: &apiv1.JobSpec{WarnSignal: c.job}}, Fence: &apiv1.Fence{},
			Steps: []*nodev1.DesiredStep{{Step: &apiv1.Step{Id: c.id, Spec: &apiv1.StepSpec{WarnSignal: c.step, TimeLimitS: c.own}}}}}
		a := &Agent{}
		_, got := a.timing(newStep(attemptKey{}, &nodev1.StepRecord{Order: order}, ""))
		ok := len(got) == len(c.want)
		for i := range min(len(got), len(c.want)) {
			w := &c.want[i]
			ok = ok && got[i].Number == w.Number && got[i].Signal == w.Signal && got[i].AfterMs == w.AfterMs && got[i].Tree == w.Tree
		}
		if !ok {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}

func TestWhatAStepUsedAndWhenItRanIsReported(t *testing.T) {
	f, work := newFake(t), t.TempDir()
	f.begin(filepath.Join(t.TempDir(), "agent"), nil)
	before := time.Now()
	f.parallel(36, work, &apiv1.StepSpec{Args: []string{"sh", "-c", "sleep 0.2"}}, []uint32{0, 4}, nil)
	f.through(36, 0)
	e := f.ended(36, 0)
	if at := e.GetExecTime().AsTime(); at.Before(before) || at.After(time.Now()) || e.GetElapsedMs() < 200 || e.GetElapsedMs() > 10_000 {
		t.Errorf("executed at %v, for %d ms", at, e.GetElapsedMs())
	}
	u := e.GetUsage()
	if u.GetTasks() != 2 || u.GetMaxRssKb() == 0 || u.GetTotalRssKb() < u.GetMaxRssKb() || u.GetMaxRssRank() != 0 && u.GetMaxRssRank() != 4 {
		t.Errorf("it used %v", u)
	}
}

func TestProgramsAroundTasksAreTheClustersAndTheSteps(t *testing.T) {
	dir, work := t.TempDir(), t.TempDir()
	program := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte("#!/bin/sh\n"+text+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		return path
	}
	f := newFake(t)
	f.around = [2]string{program("a", "echo export A=cluster"), program("d", "echo after of the cluster")}
	l := f.begin(filepath.Join(t.TempDir(), "agent"), nil)
	f.parallel(37, work, &apiv1.StepSpec{Args: []string{"sh", "-c", "echo $A $B"}, TaskOptions: &apiv1.TaskOptions{
		TaskProlog: program("b", "echo export B=$A+step"), TaskEpilog: program("c", "echo after of the step")}}, []uint32{0}, nil)
	f.through(37, 0)
	if out, errs := output(t, l.a, 37, 0); out != "cluster cluster+step\nafter of the step\nafter of the cluster\n" {
		t.Errorf("output %q, errors %q", out, errs)
	}
}
