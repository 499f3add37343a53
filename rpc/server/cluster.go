package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"connectrpc.com/connect/v2"
	"google.golang.org/protobuf/proto"

	"github.com/muster-hpc/muster/fsm"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
	peerv1 "github.com/muster-hpc/muster/proto/muster/peer/v1"
	"github.com/muster-hpc/muster/proto/notation"
	"github.com/muster-hpc/muster/rpc"
)

// clusterService is apiv1connect.ClusterServiceHandler.
type clusterService struct{ *Server }

// ListNodes returns nodes, in natural order of their names, and all partitions.
func (s clusterService) ListNodes(ctx context.Context, request *apiv1.ListNodesRequest) (*apiv1.ListNodesResponse, error) {
	if err := tooMany("node names", len(request.Names), maxNames); err != nil {
		return nil, err
	}
	view, err := s.view(ctx, request.Read)
	if err != nil {
		return nil, err
	}
	response := &apiv1.ListNodesResponse{Partitions: view.Configuration().GetPartitions(), Info: s.info(view)}
	if len(request.Names) == 0 {
		response.Nodes = slices.Collect(view.Nodes())
	}
	for _, name := range request.Names {
		node := view.NodeByName(name)
		if node == nil {
			return nil, rpc.Refuse(connect.CodeNotFound, "NODE_UNKNOWN", "node "+name,
				fmt.Sprintf("there is no node %s in this cluster; `sinfo -N` lists those that have joined", name))
		}
		response.Nodes = append(response.Nodes, node)
	}
	slices.SortFunc(response.Nodes, func(a, b *apiv1.Node) int {
		return notation.Compare(a.Spec.GetName(), b.Spec.GetName())
	})
	if request.Read.GetConsistency() != apiv1.ReadConsistency_READ_CONSISTENCY_STALE {
		response.Silent = s.silentOf(ctx, response.Nodes)
	}
	return response, nil
}

// UpdateNodes drains, resumes or declares nodes dead.
func (s clusterService) UpdateNodes(ctx context.Context, request *apiv1.UpdateNodesRequest) (*apiv1.UpdateNodesResponse, error) {
	if err := tooMany("node names", len(request.Names), maxNames); err != nil {
		return nil, err
	}
	if request.Change == nil {
		return nil, malformed("change", "the request does not say what to do with the nodes")
	}
	if err := known(request); err != nil {
		return nil, err
	}
	if err := printable(request); err != nil {
		return nil, err
	}
	command, err := stamp(ctx, request.RequestId, request)
	if err != nil {
		return nil, err
	}
	inner := proto.CloneOf(request)
	inner.RequestId = ""
	command.Op = &logv1.Command_UpdateNodes{UpdateNodes: &logv1.UpdateNodes{Request: inner}}
	result, err := s.propose(ctx, command, false)
	if err != nil {
		return nil, err
	}
	if result.Refusal != nil {
		return nil, rpc.FromDetail(result.Refusal)
	}
	return &apiv1.UpdateNodesResponse{Refusals: result.Refusals, Revision: result.Revision}, nil
}

// Configure replaces the configuration.
func (s clusterService) Configure(ctx context.Context, request *apiv1.ConfigureRequest) (*apiv1.ConfigureResponse, error) {
	if request.Configuration == nil {
		return nil, malformed("configuration", "the request has no configuration")
	}
	if err := known(request); err != nil {
		return nil, err
	}
	if err := printable(request); err != nil {
		return nil, err
	}
	command, err := stamp(ctx, request.RequestId, request)
	if err != nil {
		return nil, err
	}
	command.Op = &logv1.Command_Configure{Configure: &logv1.Configure{Configuration: request.Configuration, Expected: request.Expected}}
	result, err := s.propose(ctx, command, false)
	if err != nil {
		return nil, err
	}
	if result.Refusal != nil {
		return nil, rpc.FromDetail(result.Refusal)
	}
	return &apiv1.ConfigureResponse{Revision: result.Revision}, nil
}

// GetCluster describes the cluster. Members that do not answer in time have no applied index.
func (s clusterService) GetCluster(ctx context.Context, request *apiv1.GetClusterRequest) (*apiv1.GetClusterResponse, error) {
	view, err := s.view(ctx, request.Read)
	if err != nil {
		return nil, err
	}
	response := &apiv1.GetClusterResponse{
		Configuration: view.Configuration(),
		Level:         view.Level(),
		Term:          s.replica.Leader().Term,
		Digest:        fmt.Sprintf("%016x", view.Digest()),
		Info:          s.info(view),
		AnsweredBy:    s.replica.ID(),
		JobsByState:   map[string]uint64{},
	}
	for state, n := range view.JobCounts() {
		response.JobsByState[strings.TrimPrefix(state.String(), "JOB_STATE_")] = uint64(n)
	}
	if s.replica.Leader().IsSelf {
		response.Scheduler = s.control.Status()
	}
	response.Members = s.members(view)
	s.askMembers(ctx, response.Members)
	return response, nil
}

// silentOf returns those of some nodes that are up but silent, as the leader says; none if it can't be asked.
func (s *Server) silentOf(ctx context.Context, nodes []*apiv1.Node) []*apiv1.SilentNode {
	var all []*apiv1.SilentNode
	leader, service := s.peers.leader(ctx)
	switch {
	case leader.IsSelf:
		all = s.control.Silent()
	case service != nil:
		ctx, cancel := context.WithTimeout(ctx, statusTimeout)
		defer cancel()
		status, err := service.Status(ctx, &peerv1.StatusRequest{SilentNodes: true})
		if err != nil {
			s.log.Debug("the leader did not say which nodes are silent", "error", err)
		}
		all = status.GetSilent()
	}
	up := map[uint32]bool{}
	for _, node := range nodes {
		up[node.Number] = node.State == apiv1.NodeState_NODE_STATE_UP
	}
	return slices.DeleteFunc(slices.Clone(all), func(n *apiv1.SilentNode) bool { return !up[n.Node] })
}

// members lists the controllers as Raft and the state know them: by name, then id.
func (s *Server) members(view *fsm.View) []*apiv1.Member {
	leader := s.replica.Leader()
	byID := map[string]*apiv1.Member{}
	for member := range view.Members() {
		byID[member.Id] = proto.CloneOf(member)
	}
	var list []*apiv1.Member
	for _, server := range s.replica.Servers() {
		member := byID[server.ID]
		if member == nil { // it has not announced itself yet
			member = &apiv1.Member{Id: server.ID, RaftAddress: server.Address}
		}
		member.Voter = server.Voter
		member.Leader = server.ID == leader.ID
		list = append(list, member)
	}
	slices.SortFunc(list, func(a, b *apiv1.Member) int {
		return cmp.Or(notation.Compare(a.Name, b.Name), cmp.Compare(a.Id, b.Id))
	})
	return list
}

// askMembers fills in what only the members themselves know, and what is wrong with them.
func (s *Server) askMembers(ctx context.Context, members []*apiv1.Member) {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	reached := map[string]string{} // where Raft reaches each
	for _, server := range s.replica.Servers() {
		reached[server.ID] = server.Address
	}
	var group sync.WaitGroup
	for _, member := range members {
		if member.Id == s.replica.ID() {
			member.AppliedIndex = s.replica.View().Revision().GetIndex()
			member.Quarantine = s.replica.Quarantined()
			if s.replica.DiskFull() {
				member.Troubles = append(member.Troubles, diskFull)
			}
			group.Go(func() {
				if address := s.twin(ctx, []string{member.ApiAddress}); address != "" {
					member.Troubles = append(member.Troubles, "a copy of it answers at "+address)
				}
			})
			continue
		}
		if member.ApiAddress == "" {
			member.Troubles = append(member.Troubles, "has not announced itself yet")
			continue
		}
		group.Go(func() {
			status, err := s.peers.at(member.ApiAddress).Status(ctx, &peerv1.StatusRequest{})
			switch {
			case errors.Is(err, rpc.ErrWrongPeer):
				member.Troubles = append(member.Troubles, "its certificate is not accepted: "+rpc.Sentence(err))
			case err != nil:
				member.Troubles = append(member.Troubles, "does not answer")
			case status.GetMember().GetId() != member.Id:
				member.Troubles = append(member.Troubles, "another controller answers at its address: "+status.GetMember().GetId())
			default:
				member.AppliedIndex = status.Member.AppliedIndex
				member.Quarantine = status.Member.Quarantine
				if status.DiskFull {
					member.Troubles = append(member.Troubles, diskFull)
				}
				if at := reached[member.Id]; at != "" && at != status.Member.RaftAddress {
					member.Troubles = append(member.Troubles, fmt.Sprintf(
						"says that it is at %s, but the others reach it at %s: its data directory was moved or copied", status.Member.RaftAddress, at))
				}
			}
		})
	}
	group.Wait()
	newest := uint64(0)
	for _, member := range members {
		newest = max(newest, member.AppliedIndex)
	}
	for _, member := range members {
		if lacks := newest - member.AppliedIndex; member.AppliedIndex > 0 && lacks >= behindEntries {
			member.Troubles = append(member.Troubles, fmt.Sprintf("%d entries behind", lacks))
		}
	}
}

const diskFull = "disk full"

// changed lists the members after a change: with a leader, if one is found soon, and with what they say of themselves.
func (s *Server) changed(ctx context.Context) *apiv1.ChangeMemberResponse {
	waiting, cancel := context.WithTimeout(ctx, newLeaderWait)
	defer cancel()
	for {
		changed := s.replica.LeaderChanged() // before Leader, so that no change is missed
		if s.replica.Leader().ID != "" || pause(waiting, newLeaderWait, changed) != nil {
			break
		}
	}
	members := s.members(s.replica.View())
	s.askMembers(ctx, members)
	return &apiv1.ChangeMemberResponse{Members: members}
}

// ChangeMember adds, promotes or removes a controller, moves leadership or raises the level. Each of these may be asked
// for again without harm.
func (s clusterService) ChangeMember(ctx context.Context, request *apiv1.ChangeMemberRequest) (*apiv1.ChangeMemberResponse, error) {
	if err := known(request); err != nil {
		return nil, err
	}
	principal := rpc.PrincipalOf(ctx)
	if add, ok := request.Change.(*apiv1.ChangeMemberRequest_AddLearner); ok &&
		principal.Kind == apiv1.PrincipalKind_PRINCIPAL_KIND_MEMBER && add.AddLearner.GetName() != principal.Name {
		return nil, rpc.Refuse(connect.CodePermissionDenied, rpc.ReasonNotAllowed, rpc.Caller(principal), fmt.Sprintf(
			"controller %s may add only itself, not %q", principal.Name, add.AddLearner.GetName()))
	}
	if raise, ok := request.Change.(*apiv1.ChangeMemberRequest_RaiseLevel); ok {
		result, err := s.propose(ctx, &logv1.Command{Principal: principal,
			Op: &logv1.Command_RaiseLevel{RaiseLevel: &logv1.RaiseLevel{Level: raise.RaiseLevel}}}, true)
		if err != nil {
			return nil, err
		}
		if result.Refusal != nil {
			return nil, rpc.FromDetail(result.Refusal)
		}
		return s.changed(ctx), nil
	}
	// Moving leadership to "any other" must not be done again by the other: it is done once somebody else leads.
	change, isTransfer := request.Change.(*apiv1.ChangeMemberRequest_Transfer)
	first, toAny := s.replica.Leader().ID, isTransfer && change.Transfer == "-"
	moved := func() bool { now := s.replica.Leader().ID; return toAny && first != "" && now != "" && now != first }
	err := s.onLeader(ctx, "the change of members",
		func(err error) bool { return s.unsent(err) || unclear(err) },
		func(ctx context.Context) (err error) {
			if !moved() {
				_, err = s.changeMember(ctx, request)
			}
			return err
		},
		func(ctx context.Context, leader leaderClient) error {
			if moved() {
				return nil
			}
			_, err := leader.ChangeMember(ctx, &peerv1.ChangeMemberRequest{Change: request})
			return err
		})
	if err != nil {
		return nil, err
	}
	return s.changed(ctx), nil
}

// PutBlob stores a piece of a blob.
func (s clusterService) PutBlob(ctx context.Context, request *apiv1.PutBlobRequest) (*apiv1.PutBlobResponse, error) {
	if err := known(request); err != nil {
		return nil, err
	}
	if len(request.Data) > rpc.MaxBlobPieceBytes {
		return nil, rpc.Refuse(connect.CodeInvalidArgument, rpc.ReasonTooLarge, "data", fmt.Sprintf(
			"the piece has %d bytes; the limit is %d", len(request.Data), rpc.MaxBlobPieceBytes))
	}
	stored, err := s.putPiece(ctx, rpc.PrincipalOf(ctx), request)
	if err != nil {
		return nil, err
	}
	return &apiv1.PutBlobResponse{Stored: stored}, nil
}

// GetBlob returns a blob to those who may read it. What this controller already has is answered at once: blobs never
// change.
func (s clusterService) GetBlob(ctx context.Context, request *apiv1.GetBlobRequest) (*apiv1.GetBlobResponse, error) {
	principal := rpc.PrincipalOf(ctx)
	blob, err := readable(s.replica.View(), principal, request)
	if err != nil {
		view, readErr := s.view(ctx, nil)
		if readErr != nil {
			return nil, readErr
		}
		if blob, err = readable(view, principal, request); err != nil {
			return nil, err
		}
	}
	return &apiv1.GetBlobResponse{Data: blob.Data}, nil
}

// readable returns a blob that the principal may read: operators all, users those of their jobs, nodes those of the jobs
// that have not been accounted for there.
func readable(view *fsm.View, principal *apiv1.Principal, request *apiv1.GetBlobRequest) (*logv1.BlobRecord, error) {
	blob := view.Blob(request.Sha256)
	if !rpc.IsOperator(principal, view.Settings()) {
		job := view.Job(request.JobId)
		// One answer for "no such job", "not yours" and "no such blob": contents must not be guessed by their hash.
		if job == nil || !refersTo(view, job, request.Sha256) || !mayRead(view, principal, job) {
			return nil, rpc.Refuse(connect.CodePermissionDenied, rpc.ReasonNotAllowed, fmt.Sprintf("job %d", request.JobId),
				fmt.Sprintf("%s may not read this script or environment: job %d is not theirs, does not run there, or does not refer to it",
					rpc.Caller(principal), request.JobId))
		}
	}
	if blob == nil {
		return nil, rpc.Refuse(connect.CodeNotFound, "BLOB_UNKNOWN", "blob "+request.Sha256,
			"there is no script or environment with this SHA-256")
	}
	return blob, nil
}

func refersTo(view *fsm.View, job *apiv1.Job, sha256 string) bool {
	if sha256 == "" {
		return false
	}
	if job.Spec.GetScriptBlob() == sha256 || job.Spec.GetEnvironmentBlob() == sha256 {
		return true
	}
	for step := range view.Steps(job.Id) {
		if step.Spec.GetEnvironmentBlob() == sha256 {
			return true
		}
	}
	return false
}

func mayRead(view *fsm.View, principal *apiv1.Principal, job *apiv1.Job) bool {
	switch principal.Kind {
	case apiv1.PrincipalKind_PRINCIPAL_KIND_USER:
		return principal.Uid == job.Owner.GetUid()
	case apiv1.PrincipalKind_PRINCIPAL_KIND_NODE:
		node := view.NodeByName(principal.Name)
		if node == nil {
			return false
		}
		for attempt := range view.NodeAttempts(node.Number) {
			if attempt.JobId == job.Id {
				return true
			}
		}
	case apiv1.PrincipalKind_PRINCIPAL_KIND_MEMBER, apiv1.PrincipalKind_PRINCIPAL_KIND_UNSPECIFIED:
	}
	return false
}
