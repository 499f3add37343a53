package server

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect/v2"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	peerv1 "github.com/muster-hpc/muster/proto/muster/peer/v1"
	"github.com/muster-hpc/muster/proto/notation"
	"github.com/muster-hpc/muster/rpc"
)

// watchQuorum finds out why there is no leader when there is none for longer than an election takes: it asks the other
// controllers whether they are there. While too few of them are, calls are told so instead of waiting for a leader.
func (s *Server) watchQuorum(ctx context.Context) {
	var since time.Time // when the leader was lost; zero while there is one
	for {
		changed := s.replica.LeaderChanged() // before Leader, so that no change is missed
		if s.replica.Leader().ID != "" || !s.belongs() {
			since = time.Time{}
			s.foundQuorum("")
		} else if since.IsZero() {
			since = time.Now()
		} else if time.Since(since) >= noQuorumAfter {
			s.foundQuorum(s.missing(ctx))
		}
		wait := quorumCheck
		if since.IsZero() {
			wait = time.Minute // it ends when the leader changes
		}
		if pause(ctx, wait, changed) != nil {
			return
		}
	}
}

// foundQuorum notes why there is no leader, and logs it when it changes; "" ends it.
func (s *Server) foundQuorum(sentence string) {
	var next *string
	if sentence != "" {
		next = &sentence
	}
	old := s.noQuorum.Swap(next)
	switch {
	case next != nil && (old == nil || *old != sentence):
		s.log.Error("there is no quorum", "reason", rpc.ReasonNoQuorum, "sentence", sentence)
	case next == nil && old != nil:
		s.log.Info("there is a quorum again, or a leader")
	}
}

// missing returns a sentence if too few voters answer for a leader, and "" otherwise. A controller that has been set aside
// answers, but does not vote.
func (s *Server) missing(ctx context.Context) string {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	names := map[string]string{}
	for member := range s.replica.View().Members() {
		names[member.Id] = member.Name
	}
	var mu sync.Mutex
	var silent []string
	voters, answering, led := 0, 0, false
	var group sync.WaitGroup
	for _, server := range s.replica.Servers() {
		if !server.Voter {
			continue
		}
		voters++
		if server.ID == s.replica.ID() {
			answering++
			continue
		}
		group.Go(func() {
			var status *peerv1.StatusResponse
			err := errors.New("its address is not known")
			if service := s.peers.of(ctx, server.ID); service != nil {
				status, err = service.Status(ctx, &peerv1.StatusRequest{})
			}
			mu.Lock()
			defer mu.Unlock()
			if err == nil && status.GetMember().GetId() == server.ID && status.Member.Quarantine == "" {
				answering++
				led = led || status.LeaderId != ""
				return
			}
			name := names[server.ID]
			if name == "" {
				name = server.Address
			}
			silent = append(silent, name)
		})
	}
	group.Wait()
	quorum := voters/2 + 1
	if led || answering >= quorum {
		return "" // it is an election, or this controller alone is cut off from the leader
	}
	return noQuorumSentence(answering, voters, quorum, silent)
}

// noQuorumSentence says how many controllers answer, who does not, and what that means.
func noQuorumSentence(answering, voters, quorum int, silent []string) string {
	notation.Sort(silent)
	verb, are, do := "answer", "are", "do"
	if answering == 1 {
		verb = "answers"
	}
	if len(silent) == 1 {
		are = "is"
	}
	if quorum == 1 {
		do = "does"
	}
	return fmt.Sprintf("%d of %d controllers %s (%s %s silent); no decisions are made until %d %s; running work goes on",
		answering, voters, verb, strings.Join(silent, ", "), are, quorum, do)
}

// withoutQuorum is the refusal while there is no quorum; nil if there is one as far as this controller knows.
func (s *Server) withoutQuorum() error {
	sentence := s.noQuorum.Load()
	if sentence == nil {
		return nil
	}
	return rpc.WithDetail(connect.CodeUnavailable, &apiv1.ErrorDetail{Reason: rpc.ReasonNoQuorum,
		Subject: "controller " + s.self.GetName(), Sentence: *sentence})
}
