package control

import (
	"context"
	"time"

	"github.com/muster-hpc/muster/fsm"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

const (
	// expireEvery is how often old records are looked for.
	expireEvery = 10 * time.Second
	// expireScan is how many jobs a look covers, and pruneMost how many records one command removes.
	expireScan, pruneMost = 50_000, 1000
	// uploadAge is how long an unfinished upload, or a blob to which nothing refers yet, is kept.
	uploadAge = time.Hour
)

// expire is the duty that removes finished jobs, unused blobs and unfinished uploads from the hot state.
func (r *reign) expire(ctx context.Context) error {
	from := uint32(0)
	for pause(ctx, expireEvery) {
		v := r.cfg.Replica.View()
		if !v.Bootstrapped() {
			continue
		}
		var prune *logv1.Prune
		prune, from = expired(v, now(v), from)
		if prune == nil {
			continue
		}
		result, err := r.decide(ctx, &logv1.Command{Op: &logv1.Command_Prune{Prune: prune}})
		switch {
		case ctx.Err() != nil:
		case err != nil:
			r.log.Warn("old records were not removed", "jobs", len(prune.JobIds), "blobs", len(prune.Blobs), "error", err)
		case result.GetRefusal() != nil:
			r.log.Warn("removing old records was refused", "sentence", result.Refusal.Sentence)
		}
	}
	return nil
}

// expired finds what may be removed at a time, among jobs from an id on, and where to go on; nil if nothing may.
func expired(v *fsm.View, at time.Time, from uint32) (*logv1.Prune, uint32) {
	p := &logv1.Prune{}
	oldest := at.Add(-time.Duration(v.Settings().GetFinishedJobRetentionS()) * time.Second)
	scanned, next := 0, uint32(0)
	for j := range v.Jobs(from) {
		if scanned++; scanned > expireScan || len(p.JobIds) == pruneMost {
			next = j.Id
			break
		}
		if finished(j) && j.Status.EndTime.AsTime().Before(oldest) {
			p.JobIds = append(p.JobIds, j.Id)
		}
	}
	begun := at.Add(-uploadAge)
	for b := range v.Blobs() {
		if len(p.Blobs) == pruneMost {
			break
		}
		if b.References > 0 || !b.BeginTime.AsTime().Before(begun) {
			continue
		}
		if uint64(len(b.Data)) < b.Size {
			p.UploadsBefore = stamp(begun)
		} else {
			p.Blobs = append(p.Blobs, b.Sha256)
		}
	}
	if len(p.JobIds) == 0 && len(p.Blobs) == 0 && p.UploadsBefore == nil {
		return nil, next
	}
	return p, next
}

func finished(j *apiv1.Job) bool {
	return fsm.Ended(j.Status.State) && !j.Status.Completing && j.Status.EndTime != nil
}
