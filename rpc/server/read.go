package server

import (
	"context"
	"fmt"
	"sync"
	"time"

	"connectrpc.com/connect/v2"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/muster-hpc/muster/fsm"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	peerv1 "github.com/muster-hpc/muster/proto/muster/peer/v1"
	"github.com/muster-hpc/muster/rpc"
)

// view returns a view that is as fresh as the options demand.
func (s *Server) view(ctx context.Context, options *apiv1.ReadOptions) (*fsm.View, error) {
	if after := options.GetAtLeast(); after != nil {
		ctx, cancel := deadline(ctx)
		defer cancel()
		return s.viewAt(ctx, after)
	}
	switch options.GetConsistency() {
	case apiv1.ReadConsistency_READ_CONSISTENCY_STALE:
		return s.replica.View(), nil
	case apiv1.ReadConsistency_READ_CONSISTENCY_UNSPECIFIED, apiv1.ReadConsistency_READ_CONSISTENCY_LINEARIZABLE:
		ctx, cancel := deadline(ctx)
		defer cancel()
		index, err := s.reads.index(ctx)
		if err != nil {
			return nil, err
		}
		view, err := s.replica.WaitIndex(ctx, index)
		if err != nil {
			return nil, s.behind(err, fmt.Sprintf("index %d", index))
		}
		return view, nil
	}
	return nil, rpc.Refuse(connect.CodeInvalidArgument, rpc.ReasonMalformed, "read.consistency",
		fmt.Sprintf("read consistency %d is not known", options.GetConsistency()))
}

// viewAt waits for a view at or after a revision.
func (s *Server) viewAt(ctx context.Context, after *apiv1.Revision) (*fsm.View, error) {
	for {
		changed := s.replica.Changed() // before View, so that no publication is missed
		view := s.replica.View()
		if fsm.CompareRevisions(view.Revision(), after) >= 0 {
			return view, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, s.behind(ctx.Err(), "revision "+formatRevision(after))
		case <-s.draining:
			return nil, s.leaving()
		}
	}
}

func (s *Server) behind(err error, what string) error {
	if !isContext(err) {
		return s.translate(err)
	}
	return rpc.Refuse(connect.CodeUnavailable, rpc.ReasonBehind, "controller "+s.self.GetName(), fmt.Sprintf(
		"controller %s has not applied %s yet; another controller may have", s.self.GetName(), what))
}

func (s *Server) leaving() error {
	return rpc.Refuse(connect.CodeUnavailable, rpc.ReasonShuttingDown, "controller "+s.self.GetName(),
		"controller "+s.self.GetName()+" is leaving; ask another one")
}

func formatRevision(r *apiv1.Revision) string {
	return fmt.Sprintf("%d.%d.%d", r.GetIncarnation(), r.GetIndex(), r.GetOrdinal())
}

// info says how fresh an answer from a view is.
func (s *Server) info(view *fsm.View) *apiv1.ReadInfo {
	info := &apiv1.ReadInfo{Revision: view.Revision(), StateTime: timestamppb.New(view.StateTime())}
	if leader := s.replica.Leader(); !leader.IsSelf {
		info.AgeMs = uint64(max(leader.LastContact, 0) / time.Millisecond)
	}
	return info
}

// readBatcher gets indexes for linearizable reads. Reads that come while a question to the leader is on its way share the
// next one, because the answer to the present one may be older than they are.
type readBatcher struct {
	server *Server

	mu      sync.Mutex
	running bool
	next    *readRound
}

type readRound struct {
	done  chan struct{}
	index uint64
	err   error
}

// index returns an index that includes everything acknowledged before the call.
func (b *readBatcher) index(ctx context.Context) (uint64, error) {
	b.mu.Lock()
	if b.next == nil {
		b.next = &readRound{done: make(chan struct{})}
	}
	round := b.next
	if !b.running {
		b.running = true
		b.server.background.Go(b.run)
	}
	b.mu.Unlock()
	select {
	case <-round.done:
		return round.index, round.err
	case <-ctx.Done():
		return 0, b.server.noLeader(aRead, nil, errNoLeader, ctx.Err())
	}
}

// run asks round after round until nobody waits.
func (b *readBatcher) run() {
	for {
		b.mu.Lock()
		round := b.next
		b.next = nil
		if round == nil {
			b.running = false
			b.mu.Unlock()
			return
		}
		b.mu.Unlock()
		round.index, round.err = b.server.readIndex(b.server.lifetime)
		close(round.done)
	}
}

// readIndex asks the leader, again and again until the default deadline. A question that is met with silence is asked
// anew, because the leader may be another by then.
func (s *Server) readIndex(ctx context.Context) (uint64, error) {
	var index uint64
	err := s.onLeader(ctx, aRead,
		func(error) bool { return true },
		func(ctx context.Context) (err error) {
			ctx, cancel := context.WithTimeout(ctx, silenceOfLeader)
			defer cancel()
			index, err = s.replica.ReadIndex(ctx)
			return err
		},
		func(ctx context.Context, leader leaderClient) error {
			ctx, cancel := context.WithTimeout(ctx, silenceOfLeader)
			defer cancel()
			answer, err := leader.ReadIndex(ctx, &peerv1.ReadIndexRequest{})
			index = answer.GetIndex()
			return err
		})
	return index, err
}
