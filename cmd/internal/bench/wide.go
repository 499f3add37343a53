package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/muster-hpc/muster/cmd/internal/dev"
	"github.com/muster-hpc/muster/cmd/internal/launch"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/rpc/client"
)

// nodesPerProcess is how many declared nodes share an agent process where there are many.
const nodesPerProcess = 100

// wideCluster has the declared nodes. Its controllers have the calmer timeouts, because a thousand nodes and their tasks share the
// machine with them.
func wideCluster(o Options) dev.Options {
	return dev.Options{Nodes: o.Nodes, AgentsPerProcess: nodesPerProcess, CPUs: 8, Timing: "production"}
}

// wide measures one task on each of many declared nodes: srun alone, and srun within a batch script.
func wide(ctx context.Context, r *run) error {
	api, err := r.client(ctx)
	if err != nil {
		return err
	}
	defer api.Close()
	var runs []wideRun
	for i := range r.Repeat {
		w, err := r.wideSrun(ctx, api, fmt.Sprintf("wide-%d", i))
		if err != nil {
			return err
		}
		runs = append(runs, w)
		r.say("srun over %d nodes, run %d of %d: last exec after %.2f s, exit after %.2f s, skew %.0f ms, %.1f CPU s; stages:\n%s", r.Nodes, i+1, r.Repeat,
			w.lastExec, w.exit, w.skew, w.controllers+w.agents+w.supervisors+w.srun, strings.Join(w.stages, "\n"))
	}
	of := func(value func(wideRun) float64) []float64 {
		var values []float64
		for _, w := range runs {
			values = append(values, value(w))
		}
		return values
	}
	r.add("srun_last_exec", "s", 15, false, of(func(w wideRun) float64 { return w.lastExec }))
	r.tell("srun_exit", "s", of(func(w wideRun) float64 { return w.exit })...)
	r.tell("srun_start_skew", "ms", of(func(w wideRun) float64 { return w.skew })...)
	r.tell("cpu_controllers", "CPU s", of(func(w wideRun) float64 { return w.controllers })...)
	r.tell("cpu_agents", "CPU s", of(func(w wideRun) float64 { return w.agents })...)
	r.tell("cpu_supervisors_and_tasks", "CPU s", of(func(w wideRun) float64 { return w.supervisors })...)
	r.tell("cpu_srun", "CPU s", of(func(w wideRun) float64 { return w.srun })...)
	r.tell("memory_of_srun", "MB", of(func(w wideRun) float64 { return w.srunMB })...)
	return r.wideBatch(ctx, api)
}

// wideRun is one srun over all nodes. Times are seconds from before its exec, the skew is milliseconds.
type wideRun struct {
	lastExec, exit, skew             float64
	controllers, agents, supervisors float64
	srun, srunMB                     float64
	stages                           []string
}

// wideSrun runs one task on each node and checks that all exit codes were collected.
func (r *run) wideSrun(ctx context.Context, api *client.Client, name string) (w wideRun, err error) {
	path, err := r.find("srun")
	if err != nil {
		return w, err
	}
	before, err := r.usages(ctx)
	if err != nil {
		return w, err
	}
	nodes := strconv.Itoa(r.Nodes)
	cmd := exec.CommandContext(ctx, path, "-J", name, "-N", nodes, "-n", nodes, "true")
	var text strings.Builder
	cmd.Dir, cmd.Stdout, cmd.Stderr = r.dir, &text, &text
	begin := time.Now()
	cmd.Env = append(r.env, launch.TraceVariable+"="+strconv.FormatInt(begin.UnixNano(), 10))
	if err := cmd.Run(); err != nil {
		return w, fmt.Errorf("srun over %s nodes: %w: %s", nodes, err, lastOf(text.String()))
	}
	w.exit = time.Since(begin).Seconds()
	w.stages = stagesOf(text.String())
	w.srun = (cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()).Seconds()
	w.srunMB = peakOf(cmd.ProcessState)
	step, err := r.stepOf(ctx, api, name, 0)
	if err != nil {
		return w, err
	}
	if n := collected(step); n != r.Nodes {
		return w, fmt.Errorf("srun over %s nodes: the exits of %d tasks were collected", nodes, n)
	}
	w.lastExec, w.skew = step.GetLastExecTime().AsTime().Sub(begin).Seconds(), float64(step.GetStartSkewUs())/1000
	after, err := r.usages(ctx)
	w.controllers, _ = spent(before, after, isController)
	w.agents, w.supervisors = spent(before, after, isAgent)
	return w, err
}

// stepOf returns a step of the job with this name, once the controllers know its end.
func (r *run) stepOf(ctx context.Context, api *client.Client, name string, step uint32) (*apiv1.Step, error) {
	answer, err := api.Jobs().ListJobs(ctx, &apiv1.ListJobsRequest{Filter: &apiv1.JobFilter{Names: []string{name}}, Brief: true})
	if err != nil {
		return nil, err
	}
	if len(answer.Jobs) != 1 {
		return nil, fmt.Errorf("there are %d jobs called %s", len(answer.Jobs), name)
	}
	for {
		found, err := api.Jobs().GetStep(ctx, &apiv1.GetStepRequest{JobId: answer.Jobs[0].Id, StepId: step, WaitEndMs: 1000})
		if err != nil {
			return nil, err
		}
		if found.Step.GetEndTime() != nil {
			return found.Step, nil
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
	}
}

// collected is how many tasks of a step are known to have exited with 0.
func collected(step *apiv1.Step) int {
	n := 0
	for _, exit := range step.GetExits() {
		if exit.Code == 0 && exit.Signal == 0 && exit.LaunchError == "" {
			n += int(exit.Count)
		}
	}
	return n
}

// wideBatch submits a script for many nodes that calls srun once.
func (r *run) wideBatch(ctx context.Context, api *client.Client) error {
	nodes := min(r.BatchNodes, r.Nodes)
	script, out := filepath.Join(r.dir, "wide.sh"), filepath.Join(r.dir, "wide.out")
	text := "#!/bin/sh\ndate +%s.%N\nsrun true && echo done\ndate +%s.%N\n"
	if err := os.WriteFile(script, []byte(text), 0o755); err != nil {
		return err
	}
	var submitted, began, ended, total []float64
	for i := range r.Repeat {
		name := fmt.Sprintf("wide-batch-%d", i)
		begin := time.Now()
		took, _, err := r.command(ctx, "sbatch", "-W", "-J", name, "-N", strconv.Itoa(nodes), "--ntasks-per-node=1", "-o", out, script)
		if err != nil {
			text, readErr := os.ReadFile(out)
			return errors.Join(fmt.Errorf("%w: the script wrote %q", err, lastOf(string(text))), readErr)
		}
		step, err := r.stepOf(ctx, api, name, 0)
		if err != nil {
			return err
		}
		if n := collected(step); n != nodes {
			return fmt.Errorf("srun in a script over %d nodes: the exits of %d tasks were collected", nodes, n)
		}
		first, last, err := datesOf(out)
		if err != nil {
			return err
		}
		from := float64(begin.UnixNano()) / 1e9
		began, ended = append(began, first-from), append(ended, last-from)
		submitted = append(submitted, step.GetLastExecTime().AsTime().Sub(begin).Seconds())
		total = append(total, took.Seconds())
		r.say("sbatch for %d nodes, run %d of %d: script began after %.2f s, last exec of its srun after %.2f s, its exit after %.2f s, job over after %.2f s, skew %.0f ms",
			nodes, i+1, r.Repeat, first-from, submitted[i], last-from, total[i], float64(step.GetStartSkewUs())/1000)
	}
	r.tell("sbatch_script_began", "s", began...)
	r.add("sbatch_srun_last_exec", "s", 15, false, submitted)
	r.tell("sbatch_srun_exit", "s", ended...)
	r.tell("sbatch_job_over", "s", total...)
	return nil
}

// datesOf reads what the script of wideBatch wrote: when it began and ended, in seconds of Unix time.
func datesOf(path string) (first, last float64, err error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, 0, err
	}
	lines := strings.Fields(string(text))
	if len(lines) != 3 || lines[1] != "done" {
		return 0, 0, fmt.Errorf("the script wrote %q", lastOf(string(text)))
	}
	if first, err = strconv.ParseFloat(lines[0], 64); err == nil {
		last, err = strconv.ParseFloat(lines[2], 64)
	}
	return first, last, err
}

// perNode are the stages of a trace that every node has.
var perNode = regexp.MustCompile(`(started|ended) on `)

// stagesOf picks the stages out of what srun wrote; of those that each node has, the first and the last.
func stagesOf(text string) []string {
	var stages []string
	last := map[string]string{}
	for line := range strings.Lines(text) {
		if !strings.Contains(line, ": trace: ") {
			continue
		}
		line = strings.TrimRight(line, "\n")
		kind := perNode.FindString(line)
		if _, seen := last[kind]; kind == "" || !seen {
			stages = append(stages, line)
		}
		if kind != "" {
			last[kind] = line
		}
	}
	for _, kind := range []string{"started on ", "ended on "} {
		if line := last[kind]; line != "" {
			stages = append(stages, line+" (the last)")
		}
	}
	return stages
}

// lastOf is the end of a long text.
func lastOf(text string) string { return text[max(0, len(text)-2000):] }
