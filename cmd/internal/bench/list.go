package bench

import (
	"context"
	"fmt"
	"strings"
	"time"
)

// list measures looking at a long queue, and what it costs the controllers in memory.
func list(ctx context.Context, r *run) error {
	api, err := r.client(ctx)
	if err != nil {
		return err
	}
	defer api.Close()
	r.say("submitting %d jobs that wait", r.Pending)
	const batch = 500
	calls := (r.Pending + batch - 1) / batch
	if _, err := parallel(ctx, 4, func(ctx context.Context, caller int) (int, error) {
		for i := caller; i < calls; i += 4 {
			if err := submitMany(ctx, api, min(batch, r.Pending-i*batch), "queued", true); err != nil {
				return 0, err
			}
		}
		return 0, nil
	}); err != nil {
		return err
	}
	_, text, err := r.command(ctx, "squeue", "-h", "-o", "%i")
	if err != nil {
		return err
	}
	if lines := strings.Count(text, "\n"); lines < r.Pending {
		return fmt.Errorf("squeue lists %d jobs of %d", lines, r.Pending)
	}
	id, _, _ := strings.Cut(text, "\n")
	for _, what := range []struct {
		name   string
		target float64
		runs   int
		args   []string
	}{
		{"squeue", 1500, 1, []string{"squeue"}},
		{"squeue_one_job", 30, 10, []string{"squeue", "-h", "-j", id, "-o", "%T"}},
		{"scontrol_show_job", 30, 10, []string{"scontrol", "show", "job", id}},
	} {
		var medians []float64
		for range r.Repeat {
			took, err := r.times(ctx, what.runs, what.args[0], what.args[1:]...)
			if err != nil {
				return err
			}
			medians = append(medians, took)
		}
		r.add(what.name, "ms", what.target, false, medians)
	}
	status, err := r.cluster.Status(ctx)
	if err != nil {
		return err
	}
	var sizes []float64
	for _, p := range status.Processes {
		if p.Role == "controller" && p.Alive {
			size, err := memoryMB(p.Pid, "VmRSS")
			if err != nil {
				return err
			}
			sizes = append(sizes, size)
		}
	}
	r.add("memory_per_controller", "MB", 600, false, sizes)
	return nil
}

// failover measures from SIGKILL of the leader to the next acknowledged submission, of a submitter that asks all the time.
func failover(ctx context.Context, r *run) error {
	api, err := r.client(ctx)
	if err != nil {
		return err
	}
	defer api.Close()
	var gaps []float64
	for i := range 3 * r.Repeat {
		leader, err := r.cluster.Leader(ctx)
		if err != nil {
			return err
		}
		r.say("kill %s, round %d of %d", leader, i+1, 3*r.Repeat)
		if err := submitMany(ctx, api, 1, "failover", true); err != nil {
			return err
		}
		begin := time.Now()
		if _, err := r.cluster.Kill(ctx, leader, false); err != nil {
			return err
		}
		if err := submitMany(ctx, api, 1, "failover", true); err != nil {
			return err
		}
		gaps = append(gaps, milliseconds(time.Since(begin)))
		if _, err := r.cluster.Start(ctx, leader, ""); err != nil {
			return err
		}
		if err := r.allVote(ctx); err != nil {
			return err
		}
	}
	r.add("leader_killed", "ms", 1000, false, gaps)
	return nil
}

// allVote waits until every controller answers and votes.
func (r *run) allVote(ctx context.Context) error {
	for {
		status, err := r.cluster.Status(ctx)
		if err != nil {
			return err
		}
		all := status.Leader != ""
		for _, p := range status.Processes {
			all = all && (p.Role != "controller" || p.Answers && p.Voter)
		}
		if all {
			return nil
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(50 * time.Millisecond):
		}
	}
}
