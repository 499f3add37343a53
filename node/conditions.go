package node

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"

	"github.com/muster-hpc/muster/node/health"
)

// ownerAgent is the owner of what the agent itself finds.
const ownerAgent = "agent"

// Codes of what the agent itself finds.
const (
	codeStuck    = "TASK_STUCK"
	codeReadOnly = "DATA_DIR_READ_ONLY"
	codeFull     = "SPOOL_FULL"
	codeClock    = "CLOCK_OFF"
	codeNoGroups = "NO_CGROUPS"
)

const (
	severityInfo     = apiv1.ConditionSeverity_CONDITION_SEVERITY_INFO
	severityDegraded = apiv1.ConditionSeverity_CONDITION_SEVERITY_DEGRADED
	severityFailed   = apiv1.ConditionSeverity_CONDITION_SEVERITY_FAILED
)

// ailments are what is the case on the node, besides what site programs found: by owner, replaced as a whole.
type ailments struct {
	mu      sync.Mutex
	byOwner map[string][]*apiv1.Condition
	// judged are the owners that have had their first say.
	judged map[string]bool
	stuck  []stuckTask
	// offset is by how much the controllers' clock is ahead, strikes how often in a row it was too much.
	offset  time.Duration
	strikes int
	// drained: an operator keeps new work off the node. resumed is when that ended last.
	drained bool
	resumed time.Time
}

// drainedFile is there while an operator keeps new work off the node: who services a machine starts its agent again, too.
const drainedFile = "drained"

// drained takes in whether an operator keeps new work off the node, and reports whether that has just ended.
func (a *Agent) drained(now bool) bool {
	l := &a.ailments
	l.mu.Lock()
	defer l.mu.Unlock()
	if now == l.drained {
		return false
	}
	l.drained = now
	path := filepath.Join(a.cfg.Dir, drainedFile)
	if now {
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			a.log.Warn("after a restart of the agent, errors of GPUs will be remembered though the node is resumed", "err", err)
		}
		return false
	}
	_ = os.Remove(path) // left behind, it makes errors be forgotten once too often at the most
	l.resumed = time.Now()
	return true
}

func (l *ailments) lastResume() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.resumed
}

// say replaces what an owner found, and reports whether that is something else. Since stays.
func (l *ailments) say(owner string, found []*apiv1.Condition) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	old := l.byOwner[owner]
	for _, f := range found {
		for _, o := range old {
			if o.Code == f.Code && o.Severity == f.Severity && o.Since != nil {
				f.Since = o.Since
			}
		}
	}
	first := !l.judged[owner]
	l.judged[owner] = true
	if !first && slices.EqualFunc(old, found, func(a, b *apiv1.Condition) bool { return proto.Equal(a, b) }) {
		return false
	}
	l.byOwner[owner] = found
	return true
}

// all returns everything in the order of owners; false until the owners have had their first say.
func (l *ailments) all(owners ...string) ([]*apiv1.Condition, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	var list []*apiv1.Condition
	for _, owner := range slices.Sorted(maps.Keys(l.byOwner)) {
		for _, c := range l.byOwner[owner] {
			if c.Expires == nil || c.Expires.AsTime().After(now) {
				list = append(list, c)
			}
		}
	}
	for _, owner := range owners {
		if !l.judged[owner] {
			return list, false
		}
	}
	return list, true
}

// conditions is what a Sync says of the node's health: complete, or not known yet.
func (a *Agent) conditions() ([]*apiv1.Condition, bool) {
	owners := []string{ownerAgent}
	if a.cfg.Accelerators != nil {
		owners = append(owners, ownerGPU)
	}
	own, known := a.ailments.all(owners...)
	list := append(own, a.health.Conditions()...)
	return list[:min(len(list), maxConditions)], known
}

// found replaces what an owner found; the controllers are told at once of what is new.
func (a *Agent) found(owner string, conditions []*apiv1.Condition) {
	if !a.ailments.say(owner, conditions) {
		return
	}
	for _, c := range conditions {
		a.log.Info("the node has a condition", "owner", owner, "code", c.Code, "severity", c.Severity, "reason", c.Reason)
	}
	a.poke(a.news)
}

// selfLoop looks at the agent's own surroundings, now and then.
func (a *Agent) selfLoop(ctx context.Context) {
	a.ailments.loadStuck(a.stuckFile())
	for {
		a.found(ownerAgent, a.lookAround(time.Now()))
		wait := selfEvery
		if a.ailments.hasStuck() {
			wait = stuckEvery
		}
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-a.look:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// lookAround is what is wrong with the agent's own surroundings.
func (a *Agent) lookAround(now time.Time) []*apiv1.Condition {
	var list []*apiv1.Condition
	add := func(c *apiv1.Condition) {
		if c != nil {
			c.Owner, c.Since = ownerAgent, timestamppb.New(now)
			c.Reason = health.Line(c.Reason)
			list = append(list, c)
		}
	}
	add(spool(a.cfg.Dir))
	add(a.ailments.clock())
	if a.cfg.Groups == nil && !a.cfg.Spec.GetDeclared() {
		add(&apiv1.Condition{Code: codeNoGroups, Severity: severityInfo,
			Reason: "jobs are not kept in control groups, so that nothing keeps them to their memory, CPUs and devices",
			Clears: "start the agent with --cgroups=on, as root, where control groups can be written"})
	}
	add(a.ailments.stuckTasks())
	return list
}

// spool looks whether the agent's directory can be written, and how much room there is.
func spool(dir string) *apiv1.Condition {
	const clearsSpace = "free some space there"
	probe := filepath.Join(dir, "probe")
	err := os.WriteFile(probe, []byte("x\n"), 0o600)
	_ = os.Remove(probe) // it is written again, whatever became of it
	switch {
	case errors.Is(err, unix.EROFS), errors.Is(err, unix.EIO):
		return &apiv1.Condition{Code: codeReadOnly, Severity: severityFailed, Reason: "the agent's directory can't be written: " + err.Error(),
			Clears: "repair the file system, mount it writable, and start the agent again"}
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return &apiv1.Condition{Code: codeFull, Severity: severityFailed, Reason: "no space is left for the agent's directory " + dir, Clears: clearsSpace}
	}
	var fs unix.Statfs_t
	if unix.Statfs(dir, &fs) != nil {
		return nil // unknown
	}
	free := uint64(fs.Bavail) * uint64(fs.Bsize)
	switch {
	case free < spoolLeast:
		return &apiv1.Condition{Code: codeFull, Severity: severityFailed, Clears: clearsSpace,
			Reason: fmt.Sprintf("only %d MiB are left for the agent's directory %s", free>>20, dir)}
	case free < spoolLow:
		return &apiv1.Condition{Code: codeFull, Severity: severityDegraded, Clears: clearsSpace,
			Reason: fmt.Sprintf("the file system of the agent's directory %s is nearly full", dir)}
	}
	return nil
}

// told takes in a controller's clock, from an answer that came now.
func (l *ailments) told(controller, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.offset = controller.Sub(now)
	if l.offset.Abs() < clockFar {
		l.strikes = 0
		return
	}
	l.strikes++
}

// clock is whether the node's clock is wrong. A single answer that came late proves nothing.
func (l *ailments) clock() *apiv1.Condition {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.strikes < clockStrikes {
		return nil
	}
	return &apiv1.Condition{Code: codeClock, Severity: severityDegraded,
		Reason: fmt.Sprintf("the node's clock differs by more than %v from the controllers'", clockFar), Clears: "set the clock, and let NTP keep it"}
}

// busyNow tells the checks for idle nodes whether there is work. a.mu is held.
func (a *Agent) busyNow() {
	busy := false
	for _, at := range a.attempts {
		busy = busy || !at.record.GetReaped() && !a.settledAttempt(at)
	}
	a.health.Busy(busy)
}

// beforeJob runs what a site wants before the first step of an attempt.
func (a *Agent) beforeJob(ctx context.Context, order *nodev1.DesiredAttempt) error {
	err := a.health.BeforeJob(ctx, order)
	if errors.Is(err, health.ErrRefused) {
		return &prepareError{sentence: err.Error()}
	}
	return err
}

// afterJob runs what a site wants after the last step of an attempt; false if the agent ends. An attempt of which a later placement is
// here goes on.
func (a *Agent) afterJob(ctx context.Context, at *attempt, order *nodev1.DesiredAttempt) bool {
	if order.GetJob() == nil {
		return true
	}
	fence := at.record.GetFence()
	a.mu.Lock()
	goesOn := slices.ContainsFunc(a.control.desired, func(o *nodev1.DesiredAttempt) bool {
		f := o.GetFence()
		return o.GetJob().GetId() == at.record.GetJobId() && f.GetIncarnation() == fence.GetIncarnation() && f.GetAttempt() == fence.GetAttempt() &&
			f.GetPlacement() > fence.GetPlacement() && o.GetWant() != nodev1.WorkState_WORK_STATE_ENDED
	})
	failed := false
	for _, s := range at.steps {
		if s.final == nil {
			continue
		}
		for _, e := range s.exits() {
			failed = failed || (e.GetCode() != 0 || e.GetSignal() != 0 || e.GetLaunchError() != "") && !e.GetEndedBySupervisor()
		}
	}
	a.mu.Unlock()
	if goesOn {
		return true
	}
	over := a.health.AfterJob(ctx, order, failed)
	a.poke(a.used)
	return over
}
