package server

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"connectrpc.com/connect/v2"

	"github.com/muster-hpc/muster/fsm/replica"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
	peerv1 "github.com/muster-hpc/muster/proto/muster/peer/v1"
	"github.com/muster-hpc/muster/rpc"
)

// peerService is peerv1connect.PeerServiceHandler. All its callers are controllers; see the authorisation table.
type peerService struct{ *Server }

// Propose has the commands of a follower applied. It never passes them on: a chain of controllers that each take the
// next one for the leader would never end.
func (s peerService) Propose(ctx context.Context, request *peerv1.ProposeRequest) (*peerv1.ProposeResponse, error) {
	if err := known(request); err != nil {
		return nil, err
	}
	if err := tooMany("commands", len(request.Commands), rpc.MaxJobsPerSubmit); err != nil {
		return nil, err
	}
	for _, command := range request.Commands {
		if err := forwardable(rpc.PrincipalOf(ctx), command); err != nil {
			return nil, err
		}
	}
	response := &peerv1.ProposeResponse{Results: make([]*logv1.Result, len(request.Commands))}
	errs := make([]error, len(request.Commands))
	if len(request.Commands) == 1 {
		response.Results[0], errs[0] = s.apply(ctx, request.Commands[0])
	} else {
		var group sync.WaitGroup
		for i, command := range request.Commands {
			group.Go(func() { response.Results[i], errs[i] = s.apply(ctx, command) })
		}
		group.Wait()
	}
	if err := errors.Join(errs...); err != nil {
		return nil, s.translate(err)
	}
	return response, nil
}

// forwardable checks that a command is one that a follower may pass on, for the kind of principal that may ask for it.
func forwardable(sender *apiv1.Principal, command *logv1.Command) error {
	principal := command.GetPrincipal()
	allowed := false
	switch op := command.GetOp().(type) {
	case *logv1.Command_SubmitJobs, *logv1.Command_CancelJobs, *logv1.Command_UpdateJobs, *logv1.Command_CreateStep,
		*logv1.Command_PutBlob, *logv1.Command_UpdateNodes, *logv1.Command_Configure:
		allowed = principal.GetKind() == apiv1.PrincipalKind_PRINCIPAL_KIND_USER
	case *logv1.Command_RaiseLevel: // Apply checks that a user is an operator
		allowed = principal.GetKind() == apiv1.PrincipalKind_PRINCIPAL_KIND_USER ||
			principal.GetKind() == apiv1.PrincipalKind_PRINCIPAL_KIND_MEMBER
	case *logv1.Command_ReportTasks, *logv1.Command_ReportHealth:
		allowed = principal.GetKind() == apiv1.PrincipalKind_PRINCIPAL_KIND_NODE
	case *logv1.Command_AnnounceMember:
		allowed = principal.GetKind() == apiv1.PrincipalKind_PRINCIPAL_KIND_MEMBER &&
			principal.GetName() == sender.Name && op.AnnounceMember.GetMember().GetName() == sender.Name
	}
	if !allowed || command.DecidedInTerm != 0 {
		return rpc.Refuse(connect.CodePermissionDenied, rpc.ReasonNotAllowed, rpc.Caller(sender), fmt.Sprintf(
			"controller %s may not pass on a %T for %s", sender.Name, command.GetOp(), rpc.Caller(principal)))
	}
	return nil
}

// ReadIndex makes a read of a follower linearizable.
func (s peerService) ReadIndex(ctx context.Context, _ *peerv1.ReadIndexRequest) (*peerv1.ReadIndexResponse, error) {
	index, err := s.replica.ReadIndex(ctx)
	if err != nil {
		return nil, s.translate(err)
	}
	return &peerv1.ReadIndexResponse{Index: index}, nil
}

// ReportLiveness takes in the Syncs of a follower's agents.
func (s peerService) ReportLiveness(ctx context.Context, request *peerv1.ReportLivenessRequest) (*peerv1.ReportLivenessResponse, error) {
	response, err := s.control.ReportLiveness(ctx, request.Beats)
	if err != nil {
		return nil, s.translate(err)
	}
	return response, nil
}

// JoinNode takes in the join of an agent that asked a follower.
func (s peerService) JoinNode(ctx context.Context, request *peerv1.JoinNodeRequest) (*peerv1.JoinNodeResponse, error) {
	if err := known(request); err != nil {
		return nil, err
	}
	response, err := s.control.JoinNode(ctx, request)
	if err != nil {
		return nil, s.translate(err)
	}
	return &peerv1.JoinNodeResponse{Join: response}, nil
}

// Digest returns the digest at a marked entry, if it is remembered.
func (s peerService) Digest(_ context.Context, request *peerv1.DigestRequest) (*peerv1.DigestResponse, error) {
	response := &peerv1.DigestResponse{
		AppliedIndex:   s.replica.View().Revision().GetIndex(),
		SupportedLevel: s.self.GetSupportedLevel(),
		ClockNs:        time.Now().UnixNano(),
	}
	if digest, ok := s.replica.DigestAt(request.Index); ok {
		response.Digest = &digest
	}
	return response, nil
}

// Quarantine stops this controller from serving, if its digest at the index is not the majority's indeed: a leader that
// is mistaken about it must not be obeyed.
func (s peerService) Quarantine(ctx context.Context, request *peerv1.QuarantineRequest) (*peerv1.QuarantineResponse, error) {
	if own, ok := s.replica.DigestAt(request.Index); ok && own == request.Digest {
		return nil, rpc.Refuse(connect.CodeFailedPrecondition, "DIGEST_EQUAL", fmt.Sprintf("index %d", request.Index), fmt.Sprintf(
			"controller %s has the majority's digest %016x at index %d and goes on serving", s.self.GetName(), own, request.Index))
	}
	s.log.Error("quarantined", "by", rpc.PrincipalOf(ctx).Name, "index", request.Index, "reason", request.Sentence)
	s.replica.Quarantine(request.Sentence)
	return &peerv1.QuarantineResponse{}, nil
}

// ChangeMember changes the members for a follower's caller.
func (s peerService) ChangeMember(ctx context.Context, request *peerv1.ChangeMemberRequest) (*peerv1.ChangeMemberResponse, error) {
	response, err := s.changeMember(ctx, request.GetChange())
	if err != nil {
		return nil, s.translate(err)
	}
	return &peerv1.ChangeMemberResponse{Change: response}, nil
}

// changeMember changes the members on the leader. It returns replica.ErrNotLeader elsewhere.
func (s *Server) changeMember(ctx context.Context, request *apiv1.ChangeMemberRequest) (*apiv1.ChangeMemberResponse, error) {
	if !s.replica.Leader().IsSelf {
		return nil, replica.ErrNotLeader
	}
	var err error
	switch change := request.GetChange().(type) {
	case *apiv1.ChangeMemberRequest_AddLearner:
		m := change.AddLearner
		if m.GetId() == "" || m.GetRaftAddress() == "" {
			return nil, malformed("add_learner", "a new controller needs an id and the address of its Raft port")
		}
		if err = s.replica.AddLearner(ctx, m.Id, m.RaftAddress); err == nil {
			err = s.forgetRemoved(ctx) // it may have come back under a new id
		}
	case *apiv1.ChangeMemberRequest_Promote:
		err = s.replica.Promote(ctx, change.Promote)
	case *apiv1.ChangeMemberRequest_Remove:
		if err = s.replica.Remove(ctx, change.Remove); err == nil {
			err = s.forgetRemoved(ctx)
		}
	case *apiv1.ChangeMemberRequest_Transfer:
		if change.Transfer != s.replica.ID() {
			if err := s.mayLead(ctx, change.Transfer); err != nil {
				return nil, err
			}
			err = s.replica.Transfer(ctx, change.Transfer)
		}
	case *apiv1.ChangeMemberRequest_RaiseLevel:
		return nil, malformed("change", "raising the level is a command of its own")
	case nil:
		return nil, malformed("change", "the request does not say what to change")
	default:
		return nil, malformed("change", "a change of kind %T is not known here: upgrade this controller", change)
	}
	if err != nil {
		return nil, s.memberError(err)
	}
	return &apiv1.ChangeMemberResponse{Members: s.members(s.replica.View())}, nil
}

// mayLead refuses to hand over to a member that says that its disk is full: it could store nothing. Who does not answer the question
// may still take over.
func (s *Server) mayLead(ctx context.Context, id string) error {
	address := s.peers.announced(id)
	if address == "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	status, err := s.peers.at(address).Status(ctx, &peerv1.StatusRequest{})
	if err != nil || status.GetMember().GetId() != id || !status.DiskFull {
		return nil
	}
	name := status.Member.GetName()
	return rpc.Refuse(connect.CodeFailedPrecondition, rpc.ReasonMemberFull, "controller "+name, fmt.Sprintf(
		"the disk of controller %s is full, so that it can't lead: make room there first, or choose another one", name))
}

// memberError turns what the replica says of members into refusals.
func (s *Server) memberError(err error) error {
	switch {
	case errors.Is(err, replica.ErrUnknownMember):
		return rpc.Refuse(connect.CodeNotFound, "MEMBER_UNKNOWN", "", err.Error()+"; `muster cluster` lists the members with their ids")
	case errors.Is(err, replica.ErrNotCaughtUp):
		return rpc.Refuse(connect.CodeFailedPrecondition, "NOT_CAUGHT_UP", "", err.Error()+"; try again when it has")
	}
	return err
}

// forgetRemoved removes the announcements of controllers that are members no more: they would keep the feature level
// down for ever.
func (s *Server) forgetRemoved(ctx context.Context) error {
	members := map[string]bool{}
	for _, server := range s.replica.Servers() {
		members[server.ID] = true
	}
	for member := range s.replica.View().Members() {
		if members[member.Id] {
			continue
		}
		result, err := s.replica.Propose(ctx, &logv1.Command{Principal: s.principal(), Op: &logv1.Command_AnnounceMember{
			AnnounceMember: &logv1.AnnounceMember{Member: &apiv1.Member{Id: member.Id, Name: member.Name}, Remove: true}}})
		if err != nil {
			return err
		}
		if result.Refusal != nil {
			return rpc.FromDetail(result.Refusal)
		}
	}
	return nil
}

// TransferLeadership hands over to another controller if this one leads. It is called before a controller leaves.
func (s *Server) TransferLeadership(ctx context.Context) error {
	if !s.replica.Leader().IsSelf {
		return nil
	}
	return s.replica.Transfer(ctx, "-")
}

func (s *Server) principal() *apiv1.Principal {
	return &apiv1.Principal{Kind: apiv1.PrincipalKind_PRINCIPAL_KIND_MEMBER, Name: s.self.GetName()}
}

// Status tells how this controller is.
func (s peerService) Status(_ context.Context, request *peerv1.StatusRequest) (*peerv1.StatusResponse, error) {
	view, leader := s.replica.View(), s.replica.Leader()
	response := &peerv1.StatusResponse{
		Member: &apiv1.Member{
			Id:             s.replica.ID(),
			Name:           s.self.GetName(),
			RaftAddress:    s.self.GetRaftAddress(),
			ApiAddress:     s.self.GetApiAddress(),
			SupportedLevel: s.self.GetSupportedLevel(),
			Version:        s.self.GetVersion(),
			Leader:         leader.IsSelf,
			AppliedIndex:   view.Revision().GetIndex(),
			Quarantine:     s.replica.Quarantined(),
		},
		Term:     leader.Term,
		Revision: view.Revision(),
		DiskFull: s.replica.DiskFull(),
		LeaderId: leader.ID,
	}
	for _, server := range s.replica.Servers() {
		response.Member.Voter = response.Member.Voter || server.ID == s.replica.ID() && server.Voter
	}
	if leader.IsSelf {
		response.Scheduler = s.control.Status()
		if request.GetSilentNodes() {
			response.Silent = s.control.Silent()
		}
	}
	return response, nil
}
