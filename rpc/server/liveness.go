package server

import (
	"context"
	"sync"
	"time"

	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	peerv1 "github.com/muster-hpc/muster/proto/muster/peer/v1"
)

// livenessBatcher passes Syncs to the leader in batches that form by themselves: what comes while a batch is on its way
// goes with the next. Readiness and agents without a lease do not wait for that, up to urgentInFlight messages: a gang starts
// when its last node is ready, and nothing starts on a node without a lease. Of each node only the newest beat waits.
type livenessBatcher struct {
	server *Server

	mu       sync.Mutex
	queue    []*queuedBeat
	byNode   map[uint32]*queuedBeat
	urgent   bool // the queue holds readiness, or an agent without a lease
	inFlight int
	next     time.Time // before this no batch is taken
}

// urgentInFlight bounds the messages on their way to the leader while one of them is urgent.
const urgentInFlight = 4

// Between two batches there is beatSpacing for each agent that syncs here, at most beatSpacingMost: each batch costs the controllers a log
// entry, and what many agents say within moments is to share it. With few agents nothing waits.
const (
	beatSpacing     = 20 * time.Microsecond
	beatSpacingMost = 10 * time.Millisecond
)

type queuedBeat struct {
	beat    *peerv1.Beat
	session *session
}

// add queues the beat of a Sync.
func (b *livenessBatcher) add(request *nodev1.SyncRequest, session *session) {
	beat := &peerv1.Beat{Node: request.Node, Epoch: request.Epoch, Instance: request.Instance, Sequence: request.Sequence,
		LastGrant: request.LastGrant, Actual: preparing(request.Actual)}
	urgent := beat.LastGrant == 0
	for _, attempt := range beat.Actual {
		urgent = urgent || attempt.State == nodev1.WorkState_WORK_STATE_PREPARED
		for _, step := range attempt.Steps {
			urgent = urgent || step.State == nodev1.WorkState_WORK_STATE_PREPARED
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.byNode == nil {
		b.byNode = map[uint32]*queuedBeat{}
	}
	if waiting := b.byNode[beat.Node]; waiting != nil && (waiting.session != session || waiting.beat.Sequence < beat.Sequence) {
		waiting.beat, waiting.session = beat, session
	} else if waiting == nil {
		queued := &queuedBeat{beat, session}
		b.byNode[beat.Node] = queued
		b.queue = append(b.queue, queued)
	}
	b.urgent = b.urgent || urgent
	if b.inFlight == 0 || b.urgent && b.inFlight < urgentInFlight {
		b.inFlight++
		b.server.background.Go(b.run)
	}
}

// preparing is what the leader needs to know: the attempts that prepare, or have steps that do.
func preparing(actual []*nodev1.ActualAttempt) []*nodev1.ActualAttempt {
	var list []*nodev1.ActualAttempt
	for _, attempt := range actual {
		relevant := unstarted(attempt.State)
		for _, step := range attempt.Steps {
			relevant = relevant || unstarted(step.State)
		}
		if relevant {
			list = append(list, attempt)
		}
	}
	return list
}

func unstarted(state nodev1.WorkState) bool {
	return state == nodev1.WorkState_WORK_STATE_PREPARING || state == nodev1.WorkState_WORK_STATE_PREPARED
}

// run sends batches until nothing waits.
func (b *livenessBatcher) run() {
	for {
		b.turn()
		batch := b.queue[:min(len(b.queue), beatBatch)]
		b.queue = b.queue[len(batch):]
		if len(b.queue) == 0 {
			b.queue, b.urgent = nil, false
		}
		for _, queued := range batch {
			delete(b.byNode, queued.beat.Node)
		}
		if len(batch) == 0 || b.server.lifetime.Err() != nil {
			b.inFlight--
			b.mu.Unlock()
			return
		}
		b.next = time.Now().Add(min(time.Duration(b.server.sessions.count())*beatSpacing, beatSpacingMost))
		b.mu.Unlock()
		b.server.reportLiveness(batch)
	}
}

// turn returns with mu held when the next batch may be taken, or when there is none.
func (b *livenessBatcher) turn() {
	for {
		b.mu.Lock()
		wait := time.Until(b.next)
		if wait <= 0 || len(b.queue) == 0 || b.server.lifetime.Err() != nil {
			return
		}
		b.mu.Unlock()
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-b.server.lifetime.Done():
		}
		timer.Stop()
	}
}

// reportLiveness passes one batch to the leader and notes the grants once its entry is applied here. A batch that finds
// no leader in time is dropped: the agents' next Syncs say the same again.
func (s *Server) reportLiveness(batch []*queuedBeat) {
	ctx, cancel := context.WithTimeout(s.lifetime, silenceOfLeader)
	defer cancel()
	beats := make([]*peerv1.Beat, len(batch))
	for i, queued := range batch {
		beats[i] = queued.beat
	}
	var response *peerv1.ReportLivenessResponse
	err := s.onLeader(ctx, "a batch of liveness",
		func(err error) bool { return s.unsent(err) || unclear(err) },
		func(ctx context.Context) (err error) {
			response, err = s.control.ReportLiveness(ctx, beats)
			return err
		},
		func(ctx context.Context, leader leaderClient) (err error) {
			response, err = leader.ReportLiveness(ctx, &peerv1.ReportLivenessRequest{Beats: beats})
			return err
		})
	if err != nil {
		s.log.Debug("liveness was not acknowledged", "beats", len(beats), "error", err)
		return
	}
	if !s.faults.GrantUncommitted {
		if _, err := s.replica.WaitIndex(ctx, response.Index); err != nil {
			s.log.Debug("the entry of a liveness batch was not applied in time", "index", response.Index, "error", err)
			return
		}
	}
	refused := set(response.Refused)
	for _, queued := range batch {
		if !refused[queued.beat.Node] {
			queued.session.grant(queued.beat.Sequence)
		}
	}
}
