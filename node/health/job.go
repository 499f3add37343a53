package health

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	"github.com/muster-hpc/muster/proto/notation"
)

// Owners of what prolog and epilog find.
const (
	ownerProlog = "prolog"
	ownerEpilog = "epilog"
)

// attemptKey names an attempt; its placements on a node share prolog and epilog.
type attemptKey struct {
	job         uint32
	incarnation uint64
	attempt     uint32
}

func keyOf(order *nodev1.DesiredAttempt) attemptKey {
	f := order.GetFence()
	return attemptKey{order.GetJob().GetId(), f.GetIncarnation(), f.GetAttempt()}
}

// prolog is one that runs, or has run with this result.
type prolog struct {
	over chan struct{}
	err  error
}

// ErrRefused is wrapped by the errors of BeforeJob when a program said that the node is not fit for the job.
var ErrRefused = errors.New("the node is not ready for the job")

// BeforeJob runs the prolog and the checks before a job, once for each attempt: further steps wait for the first, and get its result. It
// returns nil if the job may start here. The error says in a sentence why not; it wraps ErrRefused if a program said so, the context's
// error if that ended first, and something else if a program could not be run: then nothing is known of the node.
func (c *Checks) BeforeJob(ctx context.Context, order *nodev1.DesiredAttempt) error {
	key := keyOf(order)
	c.mu.Lock()
	p := c.prologs[key]
	if p == nil {
		if c.settings.Prolog == "" && c.settings.Epilog == "" && len(c.checksAt(apiv1.CheckTime_CHECK_TIME_BEFORE_JOB)) == 0 && c.endIdle == nil {
			c.mu.Unlock()
			return nil
		}
		p = &prolog{over: make(chan struct{})}
		c.prologs[key] = p
		c.mu.Unlock()
		p.err = c.prepare(ctx, key, order)
		c.mu.Lock()
		if p.err != nil { // another try of this attempt begins anew
			delete(c.prologs, key)
		}
		c.mu.Unlock()
		close(p.over)
		return p.err
	}
	c.mu.Unlock()
	select {
	case <-p.over:
		return p.err
	case <-ctx.Done():
		return fmt.Errorf("wait for the prolog: %w", ctx.Err())
	}
}

// checksAt are the checks of a time. c.mu is held.
func (c *Checks) checksAt(at apiv1.CheckTime) []*apiv1.HealthCheck {
	var some []*apiv1.HealthCheck
	for _, h := range c.settings.HealthChecks {
		if slices.Contains(h.Times, at) {
			some = append(some, h)
		}
	}
	return some
}

func (c *Checks) prepare(ctx context.Context, key attemptKey, order *nodev1.DesiredAttempt) error {
	c.alone(ctx)
	if c.prologOf(key) == prologDone {
		return nil // by an earlier life of the agent
	}
	if err := c.markProlog(key, "begun"); err != nil {
		return err
	}
	c.mu.Lock()
	program, timeout, checks := c.settings.Prolog, c.prologTimeout(), c.checksAt(apiv1.CheckTime_CHECK_TIME_BEFORE_JOB)
	c.mu.Unlock()
	env := jobEnvironment(order)
	if program != "" {
		if err := c.prolog(ctx, program, append(c.environment(), append(env, "SLURM_SCRIPT_CONTEXT=prolog_slurmd")...), timeout); err != nil {
			return err
		}
	}
	for _, h := range checks {
		if c.check(ctx, h, "before_job", env) {
			return fmt.Errorf("run the check %s before the job: %w", h.Name, ctx.Err())
		}
		if f := c.failure(h.Name, order.GetGpuMask()); f != nil {
			return fmt.Errorf("%w: check %s: %s", ErrRefused, h.Name, f.Reason)
		}
	}
	return c.markProlog(key, "done")
}

// failure is what a check found that keeps a job with these GPUs from the node; nil if nothing does.
func (c *Checks) failure(owner string, gpus []uint64) *apiv1.Condition {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, f := range c.found[owner] {
		if f.Severity != apiv1.ConditionSeverity_CONDITION_SEVERITY_FAILED {
			continue
		}
		concerned := len(f.GpuMask) == 0
		for i := range min(len(f.GpuMask), len(gpus)) {
			concerned = concerned || f.GpuMask[i]&gpus[i] != 0
		}
		if concerned {
			return f
		}
	}
	return nil
}

func (c *Checks) prologTimeout() time.Duration {
	if s := c.settings.PrologTimeoutS; s > 0 {
		return time.Duration(s) * time.Second
	}
	return defaultPrologTimeout
}

// prolog runs the prolog. Its failure is the node's; what else it says in JSON are conditions.
func (c *Checks) prolog(ctx context.Context, program string, env []string, timeout time.Duration) error {
	r := c.run.run(ctx, ownerProlog, []string{program}, env, timeout)
	switch {
	case r.cut:
		return fmt.Errorf("the prolog %s was not over in time: %w", program, ctx.Err())
	case r.why != nil:
		return fmt.Errorf("the prolog %s gave no verdict: %w", program, r.why)
	}
	d := Defaults{Owner: ownerProlog, Code: "PROLOG_FAILED", GPU: c.cfg.GPU, Clears: "a prolog that succeeds",
		Severity: apiv1.ConditionSeverity_CONDITION_SEVERITY_FAILED}
	found := Parse(r.code, r.output, time.Now(), d)
	if r.code == 0 {
		c.replaceFound(ownerProlog, found)
		return nil
	}
	// The failure itself counts against the node where it is prepared; only what it says beyond that lasts.
	reason := fmt.Sprintf("it ended with exit code %d and printed nothing", r.code)
	if len(found) > 0 {
		reason = found[len(found)-1].Reason
	}
	c.replaceFound(ownerProlog, slices.DeleteFunc(found, func(f *apiv1.Condition) bool { return f.Code == d.Code }))
	return fmt.Errorf("%w: the prolog failed: %s", ErrRefused, reason)
}

// AfterJob runs the epilog and the checks after a job, if the prolog was begun here, and after a failure those for that. It returns false if
// the context ended it: then it is to be called again.
func (c *Checks) AfterJob(ctx context.Context, order *nodev1.DesiredAttempt, failed bool) bool {
	key := keyOf(order)
	c.mu.Lock()
	p := c.prologs[key]
	program, timeout := c.settings.Epilog, c.prologTimeout()
	checks := c.checksAt(apiv1.CheckTime_CHECK_TIME_AFTER_JOB)
	if failed {
		for _, h := range c.checksAt(apiv1.CheckTime_CHECK_TIME_ON_FAILURE) {
			if !slices.Contains(checks, h) {
				checks = append(checks, h)
			}
		}
	}
	c.mu.Unlock()
	if p != nil {
		select {
		case <-p.over:
		case <-ctx.Done():
			return false
		}
	}
	env := jobEnvironment(order)
	if c.prologOf(key) != prologNever {
		if program != "" && !c.epilog(ctx, program, append(c.environment(), append(env, "SLURM_SCRIPT_CONTEXT=epilog_slurmd")...), timeout) {
			return false
		}
		c.forgetProlog(key)
	}
	for _, h := range checks {
		word := "after_job"
		if failed {
			word = "on_failure"
		}
		if c.check(ctx, h, word, env) {
			return false
		}
	}
	c.mu.Lock()
	delete(c.prologs, key)
	c.mu.Unlock()
	return true
}

// epilog runs the epilog; false if the context ended it.
func (c *Checks) epilog(ctx context.Context, program string, env []string, timeout time.Duration) bool {
	r := c.run.run(ctx, ownerEpilog, []string{program}, env, timeout)
	if r.cut {
		return false
	}
	const clears = "an epilog that succeeds; an operator may resume the node before"
	if r.why != nil { // An epilog cleans up: one that did not come to its end may have left something, but nobody knows.
		c.replaceFound(ownerEpilog, []*apiv1.Condition{{Owner: ownerEpilog, Code: "EPILOG_UNKNOWN", Reason: Line("the epilog gave no verdict: " + r.why.Error()),
			Severity: apiv1.ConditionSeverity_CONDITION_SEVERITY_INFO, Clears: clears, Since: timestamppb.Now()}})
		return true
	}
	c.replaceFound(ownerEpilog, Parse(r.code, r.output, time.Now(), Defaults{Owner: ownerEpilog, Code: "EPILOG_FAILED", GPU: c.cfg.GPU,
		Severity: apiv1.ConditionSeverity_CONDITION_SEVERITY_FAILED, Clears: clears}))
	return true
}

// jobEnvironment is what programs around a job know of it.
func jobEnvironment(order *nodev1.DesiredAttempt) []string {
	job := order.GetJob()
	spec, owner := job.GetSpec(), job.GetOwner()
	gpus := notation.FoldIndexes(notation.Mask(order.GetGpuMask()).Devices())
	list := make([]string, 0, 8)
	for _, d := range notation.Mask(order.GetGpuMask()).Devices() {
		list = append(list, strconv.Itoa(d))
	}
	f := order.GetFence()
	env := []string{
		"SLURM_JOB_ID=" + number(job.GetId()), "SLURM_JOBID=" + number(job.GetId()), "SLURM_JOB_UID=" + number(owner.GetUid()),
		"SLURM_JOB_GID=" + number(owner.GetGid()), "SLURM_JOB_USER=" + owner.GetUser(), "SLURM_JOB_NAME=" + spec.GetName(),
		"SLURM_JOB_NODELIST=" + order.GetNodeList(), "SLURM_JOB_PARTITION=" + job.GetStatus().GetPartition(), "SLURM_JOB_ACCOUNT=" + spec.GetAccount(),
		"SLURM_JOB_COMMENT=" + spec.GetComment(), "SLURM_JOB_WORK_DIR=" + spec.GetWorkDir(), "SLURM_NODEID=" + number(order.GetNodeIndex()),
		"SLURM_RESTART_COUNT=" + number(job.GetStatus().GetRestarts()), "SLURM_JOB_GPUS=" + strings.Join(list, ","), "MUSTER_JOB_GPUS=" + gpus,
		"MUSTER_JOB_ID=" + number(job.GetId()), "MUSTER_ATTEMPT=" + number(f.GetAttempt()), "MUSTER_PLACEMENT=" + number(f.GetPlacement()),
	}
	if len(list) > 0 { // in the order of the bus, as the numbers are
		env = append(env, "CUDA_VISIBLE_DEVICES="+strings.Join(list, ","), "CUDA_DEVICE_ORDER=PCI_BUS_ID")
	}
	return env
}

func number(n uint32) string { return strconv.FormatUint(uint64(n), 10) }
