package control

import (
	"context"
	"fmt"
	"time"

	"github.com/muster-hpc/muster/fsm"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

// limitsEvery is how often allocations are looked at that may have reached their time limit.
const limitsEvery = time.Second

// limits is the duty that ends allocations at their time limit. Other work is ended by its supervisors, which measure the time; an
// allocation has none of its own.
func (r *reign) limits(ctx context.Context) error {
	for pause(ctx, limitsEvery) {
		v := r.cfg.Replica.View()
		if !v.Bootstrapped() {
			continue
		}
		for _, cmd := range overLimit(v, now(v)) {
			result, err := r.decide(ctx, cmd)
			switch job := cmd.GetEndAttempt().GetJobId(); {
			case ctx.Err() != nil:
				return nil
			case err != nil:
				r.log.Warn("an allocation was not ended at its time limit; tried again", "job", job, "error", err)
			case result.GetRefusal() != nil && result.Refusal.Reason != "ATTEMPT_ENDED":
				r.log.Warn("ending an allocation at its time limit was refused", "job", job, "sentence", result.Refusal.Sentence)
			}
		}
	}
	return nil
}

// overLimit are the commands that end allocations which have run for their time limit at a time.
func overLimit(v *fsm.View, at time.Time) []*logv1.Command {
	var commands []*logv1.Command
	for a := range v.LiveAttempts() {
		if a.State != apiv1.AttemptState_ATTEMPT_STATE_RUNNING || a.TimeLimitS == 0 || a.TimeLimitS == fsm.Unlimited ||
			v.Job(a.JobId).GetSpec().GetKind() != apiv1.JobKind_JOB_KIND_ALLOCATION {
			continue
		}
		limit := time.Duration(a.TimeLimitS) * time.Second
		if at.Before(a.StartTime.AsTime().Add(limit)) {
			continue
		}
		commands = append(commands, &logv1.Command{Op: &logv1.Command_EndAttempt{EndAttempt: &logv1.EndAttempt{
			JobId: a.JobId, Fence: a.Fence, Failure: apiv1.FailureClass_FAILURE_CLASS_TIME_LIMIT,
			Sentence: fmt.Sprintf("reached its time limit of %v", limit),
		}}})
	}
	return commands
}
