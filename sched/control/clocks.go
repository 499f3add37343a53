package control

import (
	"context"
	"fmt"
	"slices"
	"time"
)

// clockOff is how far a leader's clock may be from the median of a quorum's before it hands over.
const clockOff = 2 * time.Second

// ahead returns how far a clock that was read while a question was on its way is ahead of ours, at least: the answer was made at some
// time between, and what that leaves open is not held against anybody.
func ahead(clock, sent time.Time, way time.Duration) time.Duration {
	off := clock.Round(0).Sub(sent.Round(0).Add(way / 2)) // Round(0): clocks are compared, not stopwatches.
	switch {
	case off > way/2:
		return off - way/2
	case off < -way/2:
		return off + way/2
	default:
		return 0
	}
}

// median returns the middle of the voters' clocks relative to ours, of two the one nearer to ours; false if no quorum is known.
func median(clocks map[string]time.Duration, voters map[string]bool) (time.Duration, bool) {
	var known []time.Duration
	votes := 0
	for id, voter := range voters {
		if !voter {
			continue
		}
		votes++
		if off, ok := clocks[id]; ok {
			known = append(known, off)
		}
	}
	if 2*len(known) <= votes {
		return 0, false
	}
	slices.Sort(known)
	low, high := known[(len(known)-1)/2], known[len(known)/2]
	if low.Abs() < high.Abs() {
		return low, true
	}
	return high, true
}

// keepTime hands leadership over if this controller's clock is wrong: state time never goes back, so that a clock that is ahead would make
// request ids too old and jobs begin too early, for good. wrong are members that must not lead either.
func (r *reign) keepTime(ctx context.Context, clocks map[string]time.Duration, voters map[string]bool, wrong []string) {
	off, known := median(clocks, voters)
	if !known || off.Abs() <= clockOff {
		r.alarm("clock", "")
		return
	}
	best := ""
	for id, other := range clocks {
		if !voters[id] || id == r.cfg.Replica.ID() || slices.Contains(wrong, id) {
			continue
		}
		if d := (other - off).Abs() - (clocks[best] - off).Abs(); best == "" || d < 0 || d == 0 && id < best {
			best = id
		}
	}
	direction := "behind"
	if off < 0 {
		direction = "ahead of"
	}
	r.alarm("clock", fmt.Sprintf("the clock of this controller is %v %s those of most controllers, more than the %v that a leader's may be: "+
		"it hands over; set its clock", off.Abs().Round(time.Millisecond), direction, clockOff))
	if best == "" {
		return
	}
	r.log.Error("this controller's clock is wrong: it hands over", "off", -off, "to", best)
	if err := r.cfg.Replica.Transfer(ctx, best); err != nil && ctx.Err() == nil {
		r.log.Warn("leadership could not be handed over", "to", best, "error", err)
	}
}
