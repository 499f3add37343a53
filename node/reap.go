package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"

	"github.com/muster-hpc/muster/node/run"
)

// reap makes sure that nothing of an attempt is left, and reports it. Steps that were followed to their end have left
// nothing: their supervisors, or run.Conclude, made sure. Of others only the cookie is known.
func (a *Agent) reap(ctx context.Context, at *attempt, order *nodev1.DesiredAttempt) {
	for _, cookie := range a.unknownCookies(at, order) {
		for {
			huntCtx, cancel := context.WithTimeout(ctx, leftoverTimeout)
			killed, err := run.KillLeftovers(huntCtx, cookie)
			cancel()
			if ctx.Err() != nil {
				return
			}
			if killed > 0 {
				a.log.Warn("leftovers of an attempt were killed", "job", at.record.GetJobId(), "processes", killed)
			}
			if err == nil {
				break
			}
			a.log.Error("leftovers of an attempt cannot be killed; it is not reported as reaped, and tried again",
				"job", at.record.GetJobId(), "err", err)
			if !sleep(ctx, attachRetry) {
				return
			}
		}
	}
	if !a.reapGroups(ctx, at) || !a.afterJob(ctx, at, order) {
		return
	}
	a.fault("reaped")
	a.reportReaped(ctx, at)
}

// unknownCookies are those of steps that the order names and of which the node has no directory.
func (a *Agent) unknownCookies(at *attempt, order *nodev1.DesiredAttempt) []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	var cookies []string
	for _, want := range order.GetSteps() {
		if s := at.steps[want.GetStep().GetId()]; s != nil && s.dir != "" {
			continue
		}
		one := proto.Clone(order).(*nodev1.DesiredAttempt)
		one.Steps = []*nodev1.DesiredStep{want}
		cookies = append(cookies, a.cookie(one))
	}
	return cookies
}

// reportReaped puts the report into the journal and remembers that nothing is left.
func (a *Agent) reportReaped(ctx context.Context, at *attempt) {
	if ctx.Err() != nil {
		return
	}
	id, ok := a.append(ctx, &logv1.TaskReport{
		JobId: at.record.GetJobId(), Fence: at.record.GetFence(),
		Event: &logv1.TaskReport_AttemptReaped{AttemptReaped: &logv1.AttemptReaped{}},
	})
	if !ok {
		return
	}
	a.fault("reaped journaled")
	a.mu.Lock()
	defer a.mu.Unlock()
	at.report, at.reaping, at.ended = id, false, true
	at.record.Reaped, at.record.ReapedTime = true, timestamppb.Now()
	at.record.Acknowledged = !a.journal.IsWaiting(id) // the controllers may have been faster
	a.save(at)
	a.announce()
}

// planSweep arranges a look at finished attempts, if there may be any, and takes it if it is due. a.mu is held.
func (a *Agent) planSweep() {
	if len(a.attempts) == 0 {
		return
	}
	if a.sweep == nil {
		a.sweep = time.AfterFunc(sweepEvery, func() {
			a.mu.Lock()
			a.sweepDue = true
			a.mu.Unlock()
			a.poke(a.work)
		})
	}
	if !a.sweepDue && len(a.attempts) < a.sweepAt {
		return
	}
	if a.sweepDue {
		a.sweepDue, a.sweep = false, nil
	}
	gone := a.sweepNow()
	a.sweepAt = max(keepCount, len(a.attempts)) + keepCount/10
	if len(gone) > 0 {
		highest := a.highest
		a.wg.Go(func() { a.remove(gone, highest) })
	}
	if a.sweep == nil && len(a.attempts) > 0 {
		a.planSweep()
	}
}

// finished are the attempts that are over, acknowledged and no longer spoken of by the controllers; the oldest first.
// a.mu is held.
func (a *Agent) finished() []attemptKey {
	if len(a.attempts) == 0 {
		return nil
	}
	spoken := make(map[attemptKey]bool, len(a.control.desired))
	for _, order := range a.control.desired {
		spoken[keyOf(order.GetJob().GetId(), order.GetFence())] = true
	}
	var keys []attemptKey
	for key, at := range a.attempts {
		if !spoken[key] && a.settledAttempt(at) {
			keys = append(keys, key)
		}
	}
	slices.SortFunc(keys, func(x, y attemptKey) int {
		return cmp.Or(a.attempts[x].overSince().Compare(a.attempts[y].overSince()), cmp.Compare(x.job, y.job), cmp.Compare(x.attempt, y.attempt))
	})
	return keys
}

// settledAttempt reports whether nothing of the attempt runs and nothing waits to be reported. a.mu is held.
func (a *Agent) settledAttempt(at *attempt) bool {
	if at.reaping || at.record.GetReaped() && !at.record.GetAcknowledged() {
		return false
	}
	for _, s := range at.steps {
		if !s.phase.over() || !s.reported || a.journal.IsWaiting(s.report) {
			return false
		}
	}
	return at.record.GetReaped() || len(at.steps) > 0
}

// overSince is when the attempt was found reaped, or its record's age where it never was.
func (at *attempt) overSince() time.Time { return at.record.GetReapedTime().AsTime() }

// sweepNow forgets what is kept too long or too much, and returns it. a.mu is held.
func (a *Agent) sweepNow() []*attempt {
	keys := a.finished()
	var total int64
	for _, key := range keys {
		at := a.attempts[key]
		if at.record.GetReapedTime() == nil { // never ordered to end, and no longer spoken of: counted from now
			at.record.ReapedTime = timestamppb.Now()
			a.save(at)
		}
		if at.bytes == 0 {
			at.bytes = at.measure()
		}
		total += at.bytes
	}
	var gone []*attempt
	for i, key := range keys {
		at := a.attempts[key]
		if len(keys)-i <= keepCount && total <= keepBytes && age(at.overSince()) < keepFinished {
			break
		}
		total -= at.bytes
		gone = append(gone, at)
		a.highest = max(a.highest, key.job)
		delete(a.attempts, key)
	}
	return gone
}

func (at *attempt) measure() int64 {
	total := int64(1)
	for _, s := range at.steps {
		if s.dir == "" {
			continue
		}
		_ = filepath.WalkDir(s.dir, func(_ string, d fs.DirEntry, err error) error {
			if err == nil && d.Type().IsRegular() {
				if info, err := d.Info(); err == nil {
					total += info.Size()
				}
			}
			return nil // what can't be read is not counted
		})
	}
	return total
}

// remove deletes the files of attempts that were forgotten, once the highest of their job ids is on disk.
func (a *Agent) remove(gone []*attempt, highest uint32) {
	if err := replaceFile(filepath.Join(a.cfg.Dir, highestFile), fmt.Appendln(nil, highest), true); err != nil {
		a.log.Error("the highest job id could not be written", "err", err)
	}
	for _, at := range gone {
		for _, s := range at.steps {
			if s.dir == "" {
				continue
			}
			if err := os.RemoveAll(s.dir); err != nil {
				a.log.Error("the directory of a finished step could not be removed", "dir", s.dir, "err", err)
			}
		}
		if err := os.Remove(filepath.Join(a.attemptsDir(), attemptFile(at.record))); err != nil && !errors.Is(err, fs.ErrNotExist) {
			a.log.Error("the record of a finished attempt could not be removed", "job", at.record.GetJobId(), "err", err)
		}
	}
}
