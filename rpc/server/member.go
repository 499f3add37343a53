package server

import (
	"context"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/muster-hpc/muster/fsm/replica"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
	"github.com/muster-hpc/muster/rpc"
	"github.com/muster-hpc/muster/rpc/client"
)

// announce lets the cluster know this controller's addresses and abilities, once it belongs to the cluster, and again
// when the state says something else.
func (s *Server) announce(ctx context.Context) {
	for ctx.Err() == nil {
		changed := s.replica.Changed() // before View, so that no publication is missed
		view := s.replica.View()
		if !s.belongs() || view.ClusterID() == "" || s.replica.Quarantined() != "" {
			if pause(ctx, announcePause, changed) != nil {
				return
			}
			continue
		}
		member := &apiv1.Member{Id: s.replica.ID(), Name: s.self.GetName(), RaftAddress: s.self.GetRaftAddress(),
			ApiAddress: s.self.GetApiAddress(), SupportedLevel: s.self.GetSupportedLevel(), Version: s.self.GetVersion()}
		if current := view.Member(s.replica.ID()); current != nil && proto.Equal(current, member) {
			if pause(ctx, time.Minute, nil) != nil {
				return
			}
			continue
		}
		if address := s.twin(ctx, []string{view.Member(s.replica.ID()).GetApiAddress()}); address != "" {
			s.log.Error("not announced: another process answers with this controller's id, so that one of the two has a copied data directory",
				"id", s.replica.ID(), "address", address)
			if pause(ctx, time.Minute, nil) != nil {
				return
			}
			continue
		}
		trying, cancel := context.WithTimeout(ctx, silenceOfLeader)
		result, err := s.propose(trying, &logv1.Command{Principal: s.principal(),
			Op: &logv1.Command_AnnounceMember{AnnounceMember: &logv1.AnnounceMember{Member: member}}}, true)
		cancel()
		switch {
		case err != nil:
			s.log.Debug("this controller could not announce itself yet", "error", err)
		case result.Refusal != nil:
			s.log.Error("the cluster refused the announcement of this controller", "reason", result.Refusal.Reason,
				"sentence", result.Refusal.Sentence)
		default:
			s.log.Info("announced", "id", member.Id, "address", member.ApiAddress)
			if _, err := s.viewAt(ctx, result.Revision); err != nil {
				return
			}
			continue
		}
		if pause(ctx, announcePause, nil) != nil {
			return
		}
	}
}

// belongs reports whether this controller is a member of the cluster, as far as it knows.
func (s *Server) belongs() bool {
	return slices.ContainsFunc(s.replica.Servers(), func(server replica.Server) bool { return server.ID == s.replica.ID() })
}

// JoinCluster asks the controllers that c knows to add this one as a learner, again and again, until this controller has
// heard of it through Raft or ctx ends. It returns at once if this controller is a member already.
func (s *Server) JoinCluster(ctx context.Context, c *client.Client) error {
	for !s.belongs() {
		trying, cancel := context.WithTimeout(ctx, client.DefaultTimeout)
		_, err := c.Cluster().ChangeMember(trying, &apiv1.ChangeMemberRequest{Change: &apiv1.ChangeMemberRequest_AddLearner{
			AddLearner: &apiv1.Member{Id: s.replica.ID(), Name: s.self.GetName(), RaftAddress: s.self.GetRaftAddress(),
				ApiAddress: s.self.GetApiAddress(), SupportedLevel: s.self.GetSupportedLevel(), Version: s.self.GetVersion()}}})
		cancel()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			s.log.Warn("joining the cluster failed; trying again", "error", rpc.Sentence(err))
			if pause(ctx, joinPause, nil) != nil {
				return ctx.Err()
			}
			continue
		}
		for deadline := time.Now().Add(silenceOfLeader); !s.belongs() && time.Now().Before(deadline); {
			if pause(ctx, catchUpCheck, s.replica.Changed()) != nil {
				return ctx.Err()
			}
		}
	}
	return nil
}
