package bench

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/rpc/client"
)

// command runs one of the cluster's commands and returns how long it took from exec to exit.
func (r *run) command(ctx context.Context, name string, args ...string) (time.Duration, string, error) {
	path, err := r.find(name)
	if err != nil {
		return 0, "", err
	}
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env, cmd.Dir = r.env, r.dir
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	begin := time.Now()
	err = cmd.Run()
	took := time.Since(begin)
	if err != nil {
		return took, stdout.String(), fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, stderr.String())
	}
	return took, stdout.String(), nil
}

// find looks a command up in the cluster's PATH.
func (r *run) find(name string) (string, error) {
	for _, v := range r.env {
		path, ok := strings.CutPrefix(v, "PATH=")
		if !ok {
			continue
		}
		for _, dir := range filepath.SplitList(path) {
			if info, err := os.Stat(filepath.Join(dir, name)); err == nil && info.Mode().IsRegular() {
				return filepath.Join(dir, name), nil
			}
		}
	}
	return "", fmt.Errorf("the local cluster's PATH has no %s", name)
}

// times runs a command n times and returns the median in milliseconds.
func (r *run) times(ctx context.Context, n int, name string, args ...string) (float64, error) {
	var took []float64
	for range n {
		d, _, err := r.command(ctx, name, args...)
		if err != nil {
			return 0, err
		}
		took = append(took, milliseconds(d))
	}
	return median(took), nil
}

// launches measures commands from exec to exit on an idle cluster.
func launches(ctx context.Context, r *run) error {
	script := filepath.Join(r.dir, "true.sh")
	if err := os.WriteFile(script, []byte("#!/bin/sh\nexec true\n"), 0o755); err != nil {
		return err
	}
	for _, what := range []struct {
		name   string
		target float64
		args   []string
	}{
		{"sbatch", 20, []string{"sbatch", "--hold", "-o", "/dev/null", script}},
		{"srun_4_nodes", 130, []string{"srun", "-N4", "-n4", "hostname"}},
		{"srun_1_task", 130, []string{"srun", "-n1", "true"}},
	} {
		var medians []float64
		for i := range r.Repeat {
			r.say("%s, run %d of %d", what.name, i+1, r.Repeat)
			took, err := r.times(ctx, 20, what.args[0], what.args[1:]...)
			if err != nil {
				return err
			}
			medians = append(medians, took)
		}
		r.add(what.name, "ms", what.target, false, medians)
	}
	return nil
}

// throughput measures 1,000 jobs of one `true` each from the first submission to the last end.
func throughput(ctx context.Context, r *run) error {
	api, err := r.client(ctx)
	if err != nil {
		return err
	}
	defer api.Close()
	const jobs = 1000
	var rates []float64
	for i := range r.Repeat {
		r.say("%d jobs, run %d of %d", jobs, i+1, r.Repeat)
		name := fmt.Sprintf("throughput-%d", i)
		begin := time.Now()
		for range jobs / 100 {
			if err := submitMany(ctx, api, 100, name, false); err != nil {
				return err
			}
		}
		if err := r.ended(ctx, api, name, jobs); err != nil {
			return err
		}
		rates = append(rates, jobs/time.Since(begin).Seconds())
	}
	r.add("true_jobs", "1/s", 40, true, rates)
	return nil
}

// ended waits until all jobs of a name have ended, and checks that they did so well.
func (r *run) ended(ctx context.Context, api *client.Client, name string, jobs int) error {
	filter := &apiv1.JobFilter{Names: []string{name}, Active: true}
	for {
		answer, err := api.Jobs().ListJobs(ctx, &apiv1.ListJobsRequest{Filter: filter, Brief: true, Page: &apiv1.Page{Size: 1}})
		if err != nil {
			return err
		}
		if len(answer.Jobs) == 0 {
			break
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(50 * time.Millisecond):
		}
	}
	answer, err := api.Jobs().ListJobs(ctx, &apiv1.ListJobsRequest{Brief: true, Filter: &apiv1.JobFilter{
		Names: []string{name}, States: []apiv1.JobState{apiv1.JobState_JOB_STATE_COMPLETED},
	}})
	if err != nil {
		return err
	}
	if len(answer.Jobs) != jobs {
		return fmt.Errorf("%d of %d jobs completed", len(answer.Jobs), jobs)
	}
	return nil
}
