package server

import (
	"context"
	"fmt"
	"strings"
	"time"

	"connectrpc.com/connect/v2"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/muster-hpc/muster/fsm"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	peerv1 "github.com/muster-hpc/muster/proto/muster/peer/v1"
	"github.com/muster-hpc/muster/rpc"
)

// agentService is nodev1connect.AgentServiceHandler.
type agentService struct{ *Server }

// Join introduces an agent to the leader. The agent repeats it until it is answered, so another try does no harm.
func (s agentService) Join(ctx context.Context, request *nodev1.JoinRequest) (*nodev1.JoinResponse, error) {
	principal := rpc.PrincipalOf(ctx)
	if name := request.GetSpec().GetName(); name != principal.Name {
		return nil, notYourNode(principal, "node "+name)
	}
	if request.Instance.GetBootId() == "" || request.Instance.GetNonce() == "" {
		return nil, malformed("instance", "the join of node %s has no boot id or no nonce", principal.Name)
	}
	if err := known(request); err != nil {
		return nil, err
	}
	if err := printable(request); err != nil {
		return nil, err
	}
	forward := &peerv1.JoinNodeRequest{Join: request, CertificateName: principal.Name}
	var response *nodev1.JoinResponse
	err := s.onLeader(ctx, "the join of node "+principal.Name,
		func(err error) bool { return s.unsent(err) || unclear(err) },
		func(ctx context.Context) (err error) {
			response, err = s.control.JoinNode(ctx, forward)
			return err
		},
		func(ctx context.Context, leader leaderClient) error {
			answer, err := leader.JoinNode(ctx, forward)
			response = answer.GetJoin()
			return err
		})
	if err != nil {
		return nil, err
	}
	return response, nil
}

func notYourNode(principal *apiv1.Principal, subject string) error {
	return rpc.Refuse(connect.CodePermissionDenied, rpc.ReasonNotYourNode, subject,
		fmt.Sprintf("%s may not speak for %s: the certificate has another name", rpc.Caller(principal), subject))
}

// Sync exchanges state with an agent. It is held until something is new for the node, a grant is due, a newer Sync comes,
// or the time is over.
func (s agentService) Sync(ctx context.Context, request *nodev1.SyncRequest) (*nodev1.SyncResponse, error) {
	view, err := s.seen(ctx, request.Seen)
	if err != nil {
		return nil, err
	}
	principal := rpc.PrincipalOf(ctx)
	if node := view.Node(request.Node); node != nil && node.Spec.GetName() != principal.Name {
		return nil, notYourNode(principal, "node "+node.Spec.GetName())
	}
	if err := tooMany("reports", len(request.Reports), maxReports); err != nil {
		return nil, err
	}
	if stranger(view, request) {
		return &nodev1.SyncResponse{Revision: view.Revision(), Rejoin: true}, nil
	}
	session := s.sessions.of(request)
	superseded, newer := session.begin(request.Sequence)
	if !newer {
		return &nodev1.SyncResponse{Revision: view.Revision(), Unchanged: true}, nil
	}
	s.liveness.add(request, session)
	h := &hold{server: s.Server, request: request, session: session, superseded: superseded}
	view = h.findings(ctx, view)
	if len(request.Reports) > 0 {
		if view, err = h.report(ctx, view); err != nil {
			return nil, err
		}
		return h.answer(view), nil
	}
	return h.wait(ctx)
}

// seen returns a view at or above what the agent has seen. A controller that lags says so: an answer from an older state
// could order what is over.
func (s *Server) seen(ctx context.Context, seen *apiv1.Revision) (*fsm.View, error) {
	if s.faults.AnswerBelowSeen {
		return s.replica.View(), nil
	}
	ctx, cancel := context.WithTimeout(ctx, behindWait)
	defer cancel()
	return s.viewAt(ctx, seen)
}

// stranger reports whether the agent must join again: its node is unknown or was lost, or it is another life than the one
// that joined last.
func stranger(view *fsm.View, request *nodev1.SyncRequest) bool {
	node := view.Node(request.Node)
	return node == nil || node.State == apiv1.NodeState_NODE_STATE_DOWN || node.Epoch != request.Epoch ||
		node.Instance.GetBootId() != request.Instance.GetBootId() || node.Instance.GetNonce() != request.Instance.GetNonce()
}

// hold is one Sync that is being answered.
type hold struct {
	server     *Server
	request    *nodev1.SyncRequest
	session    *session
	superseded <-chan struct{}
	// acknowledged is the journal line up to which reports are in the replicated state.
	acknowledged uint64
}

// report has the agent's reports committed, in as many commands as their size demands, and returns a view that has them.
// What could not be committed is not acknowledged; the agent says it again.
func (h *hold) report(ctx context.Context, view *fsm.View) (*fsm.View, error) {
	ctx, cancel := context.WithTimeout(ctx, h.limit(view))
	defer cancel()
	if err := known(h.request); err != nil {
		return nil, err
	}
	for _, reports := range divide(atLevel(view.Level(), h.request.Reports)) {
		result, err := h.server.propose(ctx, &logv1.Command{
			Principal: rpc.PrincipalOf(ctx),
			Op: &logv1.Command_ReportTasks{ReportTasks: &logv1.ReportTasks{
				Node: h.request.Node, Epoch: h.request.Epoch, Instance: h.request.Instance, Reports: reports}},
		}, true)
		if err != nil {
			h.server.log.Debug("reports were not committed", "node", rpc.PrincipalOf(ctx).Name, "error", err)
			break
		}
		if result.Refusal != nil {
			h.server.log.Warn("reports were refused", "node", rpc.PrincipalOf(ctx).Name, "reason", result.Refusal.Reason,
				"sentence", result.Refusal.Sentence)
			break
		}
		h.acknowledged = reports[len(reports)-1].JournalId
		if after, err := h.server.viewAt(ctx, result.Revision); err == nil {
			view = after
		}
	}
	return view, nil
}

// atLevel leaves out of reports what the cluster's level does not know yet: an agent does not know it, and would report in vain.
func atLevel(level uint32, reports []*logv1.TaskReport) []*logv1.TaskReport {
	if level >= 2 {
		return reports
	}
	kept := make([]*logv1.TaskReport, len(reports))
	for i, report := range reports {
		if kept[i] = report; report.GetStepEnded() != nil {
			kept[i] = proto.CloneOf(report)
			ended := kept[i].GetStepEnded()
			ended.ElapsedMs, ended.ExecTime, ended.Usage = 0, nil, nil
		}
	}
	return kept
}

// divide cuts reports into parts that fit into a log entry.
func divide(reports []*logv1.TaskReport) [][]*logv1.TaskReport {
	var parts [][]*logv1.TaskReport
	begin, size := 0, 0
	for i, report := range reports {
		n := proto.Size(report) + 8
		if i > begin && size+n > maxReportBytes {
			parts = append(parts, reports[begin:i])
			begin, size = i, 0
		}
		size += n
	}
	return append(parts, reports[begin:])
}

// limit is how long the Sync may be held: what the agent asks for, but at most a third of the lease. Reports are given
// that third in any case.
func (h *hold) limit(view *fsm.View) time.Duration {
	third := time.Duration(view.Settings().GetLeaseMs()) * time.Millisecond / 3
	if asked := time.Duration(h.request.HoldMs) * time.Millisecond; len(h.request.Reports) == 0 && asked < third {
		return asked
	}
	return third
}

// wait holds the Sync.
func (h *hold) wait(ctx context.Context) (*nodev1.SyncResponse, error) {
	waiter, done := h.server.hub.node(h.request.Node)
	defer done()
	view := h.server.replica.View() // after the registration; never older than what the caller has checked
	timer := time.NewTimer(h.limit(view))
	defer timer.Stop()
	third := time.Duration(view.Settings().GetLeaseMs()) * time.Millisecond / 3
	for {
		if h.news(view) {
			return h.answer(view), nil
		}
		sequence, since := h.session.undelivered(time.Now())
		if sequence > 0 && (since >= third || h.request.LastGrant == 0) {
			return h.answer(view), nil // the agent has no lease, or waits for the next one already
		}
		select {
		case <-waiter.wake:
		case <-h.session.wake:
		case <-timer.C:
			return h.answer(h.server.replica.View()), nil
		case <-h.superseded:
			return &nodev1.SyncResponse{Revision: view.Revision(), Unchanged: true}, nil
		case <-h.server.draining:
			return nil, h.server.leaving()
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		view = h.server.replica.View()
		if err := h.server.refuse(""); err != nil {
			return nil, err
		}
	}
}

// news reports whether a view has something for the node that the agent does not hold.
func (h *hold) news(view *fsm.View) bool {
	return stranger(view, h.request) || h.request.Holds == nil ||
		fsm.CompareRevisions(view.NodeTouched(h.request.Node), h.request.Holds) > 0
}

// answer makes the response from a view.
func (h *hold) answer(view *fsm.View) *nodev1.SyncResponse {
	response := &nodev1.SyncResponse{Revision: view.Revision(), Acknowledged: h.acknowledged, ControllerTime: timestamppb.Now()}
	if stranger(view, h.request) {
		response.Rejoin = true
		return response
	}
	settings := view.Settings()
	if h.news(view) {
		response.Desired = desired(view, h.request.Node, h.server.gangs)
		response.Settings = settings
	} else {
		response.Unchanged = true
	}
	node := view.Node(h.request.Node)
	response.DrainedByOperator = node.GetDrain() && !node.GetDrainedByHealth()
	if sequence := h.session.deliver(time.Now()); sequence > 0 {
		response.Grant = &nodev1.Grant{Sequence: sequence, LeaseMs: settings.GetLeaseMs(), FenceWindowMs: settings.GetFenceWindowMs()}
	}
	members := h.server.members(view)
	if h.session.tell(fingerprint(members)) {
		response.Members = members
	}
	return response
}

func fingerprint(members []*apiv1.Member) string {
	var b strings.Builder
	for _, m := range members {
		fmt.Fprintf(&b, "%s %s %s %t;", m.Id, m.Name, m.ApiAddress, m.Leader)
	}
	return b.String()
}
