package control

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
	peerv1 "github.com/muster-hpc/muster/proto/muster/peer/v1"
)

const (
	// digestEvery is how often the controllers' states are compared.
	digestEvery = 10 * time.Second
	// digestAsk bounds one question to a member; digestTries is how often one that has not come so far is asked, with digestRetry between.
	digestAsk, digestTries, digestRetry = 2 * time.Second, 5, time.Second
)

// digests is the duty that compares the controllers' states at a marked entry.
func (r *reign) digests(ctx context.Context) error {
	for pause(ctx, digestEvery) {
		if !r.cfg.Replica.View().Bootstrapped() {
			continue
		}
		var index uint64
		if r.isBlocked() {
			index = r.blockedAt // The states still differ there: ask those who did not answer.
		} else {
			result, err := r.decide(ctx, &logv1.Command{Op: &logv1.Command_Tick{Tick: &logv1.Tick{MarkDigest: true}}})
			if err != nil {
				if ctx.Err() == nil {
					r.log.Warn("the states could not be marked for comparison", "error", err)
				}
				continue
			}
			index = result.GetRevision().GetIndex()
		}
		r.compare(ctx, index)
	}
	return nil
}

// compare asks all members for their digests and acts on them.
func (r *reign) compare(ctx context.Context, index uint64) {
	var mu sync.Mutex
	found := map[string]uint64{}
	voters := map[string]bool{}
	clocks := map[string]time.Duration{r.cfg.Replica.ID(): 0}
	var wg sync.WaitGroup
	for _, s := range r.cfg.Replica.Servers() {
		voters[s.ID] = s.Voter
		wg.Go(func() {
			a := r.ask(ctx, s.ID, index)
			mu.Lock()
			defer mu.Unlock()
			if a.hasDigest {
				found[s.ID] = a.digest
			}
			if a.hasClock {
				clocks[s.ID] = a.clock
			}
		})
	}
	wg.Wait()
	if ctx.Err() != nil {
		return
	}
	v := judge(found, voters)
	if v.undecided {
		r.blockedAt = index
		r.block(fmt.Sprintf("at index %d the controllers' states differ and no majority agrees (%s): nothing is decided; "+
			"compare backups, and rejoin the wrong ones", index, v.describe(found)))
		return
	}
	r.block("")
	for _, id := range v.wrong {
		r.quarantine(ctx, id, index, v.majority, found[id])
	}
	r.keepTime(ctx, clocks, voters, v.wrong)
}

// answer is what a member says of itself.
type answer struct {
	digest    uint64
	hasDigest bool
	// clock is how far its clock is ahead of this one's, the way there and back taken into account.
	clock    time.Duration
	hasClock bool
}

// ask asks one member, again while it has not applied the entry.
func (r *reign) ask(ctx context.Context, id string, index uint64) (a answer) {
	if id == r.cfg.Replica.ID() {
		a.digest, a.hasDigest = r.cfg.Replica.DigestAt(index)
		return a
	}
	if r.cfg.Peers == nil {
		return a
	}
	for try := range digestTries {
		if try > 0 && !pause(ctx, digestRetry) {
			return a
		}
		asked, cancel := context.WithTimeout(ctx, digestAsk)
		sent := time.Now()
		response, err := r.cfg.Peers.Digest(asked, id, index)
		way := time.Since(sent)
		cancel()
		if err != nil {
			r.log.Debug("a member's digest is not known", "member", id, "index", index, "error", err)
			continue
		}
		if response.ClockNs != 0 {
			a.clock, a.hasClock = ahead(time.Unix(0, response.ClockNs), sent, way), true
		}
		if response.Digest != nil {
			a.digest, a.hasDigest = *response.Digest, true
			return a
		}
	}
	return a
}

func (r *reign) quarantine(ctx context.Context, id string, index, majority, digest uint64) {
	sentence := fmt.Sprintf("its state at index %d has digest %016x, the majority's is %016x: wipe it and let it rejoin", index, digest, majority)
	r.log.Error("a member's state differs from the majority's", "member", id, "index", index, "sentence", sentence)
	if id == r.cfg.Replica.ID() {
		r.cfg.Replica.Quarantine(sentence)
		return
	}
	asked, cancel := context.WithTimeout(ctx, digestAsk)
	defer cancel()
	if err := r.cfg.Peers.Quarantine(asked, id, &peerv1.QuarantineRequest{Index: index, Digest: majority, Sentence: sentence}); err != nil {
		r.log.Error("a member could not be told that it is wrong", "member", id, "error", err)
	}
}

// judgement is what digests say.
type judgement struct {
	majority uint64
	// wrong are the members that differ from the majority, sorted.
	wrong []string
	// undecided: they differ, and no majority of the voters agrees.
	undecided bool
}

// judge finds the majority of the voters and who differs from it. Learners can be wrong but have no vote. Members that did not
// answer have no say.
func judge(found map[string]uint64, voters map[string]bool) judgement {
	count, votes := map[uint64]int{}, 0
	for id, voter := range voters {
		if !voter {
			continue
		}
		votes++
		if digest, ok := found[id]; ok {
			count[digest]++
		}
	}
	for digest, n := range count {
		if 2*n > votes {
			j := judgement{majority: digest}
			for id, other := range found {
				if other != digest {
					j.wrong = append(j.wrong, id)
				}
			}
			slices.Sort(j.wrong)
			return j
		}
	}
	return judgement{undecided: len(count) > 1}
}

func (judgement) describe(found map[string]uint64) string {
	var parts []string
	for id, digest := range found {
		parts = append(parts, fmt.Sprintf("%s: %016x", id, digest))
	}
	slices.Sort(parts)
	return strings.Join(parts, ", ")
}
