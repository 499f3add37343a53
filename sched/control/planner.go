package control

import (
	"context"
	"slices"
	"sync"
	"time"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
	"github.com/muster-hpc/muster/sched"
)

const (
	// explainEvery is how often reasons are written at most.
	explainEvery = time.Second
	// explainMost is how many reasons one command carries.
	explainMost = 1000
	// staleFirst and staleMost bound the back-off of a job whose placement was refused.
	staleFirst, staleMost = 20 * time.Millisecond, 5 * time.Second
	// failedWait is the pause after a proposal failed with an error: leadership may be going.
	failedWait = 100 * time.Millisecond
	// resumeWait is the pause between passes of which each goes on where the last stopped at its limits.
	resumeWait = 10 * time.Millisecond
)

// planning is the memory of the planning duty.
type planning struct {
	r       *reign
	mirror  mirror
	refused map[sched.JobID]int // placements refused in a row
	// last is what the last pass decided: it holds as long as the view is not dirty. nil if there must be a pass.
	last     *sched.Decisions
	suspects map[uint32]bool
	// explained is when reasons were written last; explaining is raised when that proposal has ended.
	explained  time.Time
	explaining chan struct{}
	again      time.Time
}

// plan is the duty that places jobs and says why others wait.
func (r *reign) plan(ctx context.Context) error {
	p := &planning{r: r, refused: map[sched.JobID]int{}, explained: r.began.Add(-explainEvery)}
	for ctx.Err() == nil {
		changed := r.cfg.Replica.Changed()
		next := p.round(ctx)
		timer := time.NewTimer(next)
		select {
		case <-changed:
		case <-r.suspects:
		case <-timer.C:
		case <-ctx.Done():
		}
		timer.Stop()
	}
	return nil
}

// round takes in what changed, plans if it matters, and returns how long nothing is to be done unless something changes.
func (p *planning) round(ctx context.Context) time.Duration {
	v := p.r.cfg.Replica.View()
	if !v.Bootstrapped() {
		return time.Minute
	}
	if p.mirror.follow(v) {
		p.last, p.suspects = nil, nil
	}
	p.suspect()
	if p.r.isBlocked() {
		return failedWait
	}
	if wait := time.Until(p.again); wait > 0 {
		return wait
	}
	at := now(v)
	view := p.mirror.view
	if p.last == nil || !p.last.Complete || view.Dirty() || view.NextWake() <= sched.Time(at.UnixMilli()) {
		p.last = p.pass(ctx, sched.Time(at.UnixMilli()))
		if len(p.last.Placements) > 0 {
			p.last = nil // Look at what they left first.
			return 0
		}
	}
	wait := p.explain(ctx, p.last, at)
	if !p.last.Complete {
		return min(wait, resumeWait)
	}
	return wait
}

// suspect keeps new work off the nodes that are silent.
func (p *planning) suspect() {
	silent := p.r.nodes.suspects()
	for node := range p.suspects {
		if !silent[node] {
			p.mirror.view.SetSuspect(sched.NodeID(node), false)
		}
	}
	for node := range silent {
		p.mirror.view.SetSuspect(sched.NodeID(node), true)
	}
	p.suspects = silent
}

// pass plans once and proposes what was decided.
func (p *planning) pass(ctx context.Context, at sched.Time) *sched.Decisions {
	began := time.Now()
	d := p.mirror.view.Plan(at, p.r.c.limits)
	took := time.Since(began)
	placed := 0
	if len(d.Placements) > 0 {
		placed = p.place(ctx, d, at)
	}
	p.r.c.note(func(s *apiv1.SchedulerStatus) {
		s.Passes++
		s.LastPassUs, s.LastConsidered = uint64(took.Microseconds()), uint64(d.Considered)
		s.Placed += uint64(placed)
		s.LastPassTime = stamp(time.Now())
	})
	return d
}

// place proposes placements side by side, so that they share entries, and waits until what was accepted can be seen.
func (p *planning) place(ctx context.Context, d *sched.Decisions, at sched.Time) (placed int) {
	results := make([]*logv1.Result, len(d.Placements))
	errs := make([]error, len(d.Placements))
	var wg sync.WaitGroup
	for i := range d.Placements {
		w := &d.Placements[i]
		cmd := placing(w)
		wg.Go(func() { results[i], errs[i] = p.r.decide(ctx, cmd) })
	}
	wg.Wait()
	index := uint64(0)
	for i, w := range d.Placements {
		switch {
		case errs[i] != nil:
			if ctx.Err() == nil {
				p.r.log.Warn("a placement was not written", "job", w.Job, "error", errs[i])
			}
			p.again = time.Now().Add(failedWait)
			p.mirror.view.Defer(w.Job, at+sched.Time(failedWait.Milliseconds()))
		case results[i].GetRefusal() != nil:
			wait := p.refuse(w.Job, at)
			p.r.log.Info("a placement was refused", "job", w.Job, "attempt", w.Attempt,
				"reason", results[i].Refusal.Reason, "sentence", results[i].Refusal.Sentence, "retry_in", wait)
			index = max(index, results[i].GetRevision().GetIndex())
		default:
			placed++
			delete(p.refused, w.Job)
			index = max(index, results[i].GetRevision().GetIndex())
		}
	}
	if index > 0 {
		if _, err := p.r.cfg.Replica.WaitIndex(ctx, index); err != nil && ctx.Err() == nil {
			p.r.log.Warn("a placement can't be seen yet", "index", index, "error", err)
		}
	}
	return placed
}

// placing is the command that carries a placement out.
func placing(w *sched.Placement) *logv1.Command {
	return &logv1.Command{Op: &logv1.Command_Place{Place: &logv1.Place{
		JobId: uint32(w.Job), Attempt: w.Attempt, PlacementNumber: 1, Placement: placement(w), Partition: w.Partition,
	}}}
}

// refuse keeps a job whose placement was refused from being considered for a while, which it returns.
func (p *planning) refuse(id sched.JobID, at sched.Time) time.Duration {
	p.refused[id]++
	wait := backoff(p.refused[id], staleFirst, staleMost)
	p.mirror.view.Defer(id, at+sched.Time(wait.Milliseconds()))
	return wait
}

// explanation is the command with the reasons that changed, nil if none did, and whether there are more.
func explanation(d *sched.Decisions) (*logv1.ExplainJobs, bool) {
	reasons, more := d.Changes(explainMost)
	if len(reasons) == 0 {
		return nil, false
	}
	cmd := &logv1.ExplainJobs{}
	for id, reason := range reasons {
		cmd.Reasons = append(cmd.Reasons, &logv1.JobReason{JobId: uint32(id), Reason: reasonOf[reason.Code], Sentence: reason.Sentence})
	}
	slices.SortFunc(cmd.Reasons, func(a, b *logv1.JobReason) int { return int(a.JobId) - int(b.JobId) })
	return cmd, more
}

// explain writes the reasons that changed, if it is time, and returns when the planner is to look again.
func (p *planning) explain(ctx context.Context, d *sched.Decisions, at time.Time) time.Duration {
	view := p.mirror.view
	wait := time.Minute
	if next := view.NextWake(); next != sched.Never {
		wait = min(wait, max(0, time.UnixMilli(int64(next)).Sub(at)))
	}
	if p.explaining != nil {
		select {
		case <-p.explaining:
			p.explaining = nil
		default:
			return min(wait, explainEvery)
		}
	}
	due := time.Until(p.explained.Add(explainEvery))
	if due > 0 {
		return min(wait, due)
	}
	cmd, more := explanation(d)
	if cmd == nil {
		return wait
	}
	p.explained = time.Now()
	done := make(chan struct{})
	p.explaining = done
	p.r.scope.start(func() error {
		defer close(done)
		if _, err := p.r.decide(ctx, &logv1.Command{Op: &logv1.Command_ExplainJobs{ExplainJobs: cmd}}); err != nil && ctx.Err() == nil {
			p.r.log.Warn("reasons were not written", "jobs", len(cmd.Reasons), "error", err)
		}
		return nil
	})
	if more {
		return min(wait, explainEvery)
	}
	return wait
}
