package server

import (
	"cmp"
	"context"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/muster-hpc/muster/fsm"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
	"github.com/muster-hpc/muster/rpc"
)

// findings has what the agent's checks find committed, if the state says something else, and returns a view that has it. What could not be
// committed is said again with the next Sync; what was refused is not tried again before the agent says something else. It costs the agent
// never more than a delay: a check that talks nonsense must not cost a node its lease.
func (h *hold) findings(ctx context.Context, view *fsm.View) *fsm.View {
	if !h.request.ConditionsKnown || sameConditions(view, h.request.Node, h.request.Conditions) {
		return view
	}
	command := &logv1.ReportHealth{
		Node: h.request.Node, Epoch: h.request.Epoch, Instance: h.request.Instance, Conditions: h.request.Conditions,
	}
	principal := rpc.PrincipalOf(ctx)
	encoded, err := encode(command)
	if err == nil && !h.session.mayReport(string(encoded)) {
		return view
	}
	for _, check := range []func() error{
		func() error { return err },
		func() error { return tooMany("conditions", len(h.request.Conditions), maxConditions) },
		func() error { return known(command) },
		func() error { return printable(command) },
	} {
		if err := check(); err != nil {
			h.session.refusedReport(string(encoded))
			h.server.log.Warn("what checks found was refused", "node", principal.Name, "error", err)
			return view
		}
	}
	ctx, cancel := context.WithTimeout(ctx, time.Duration(view.Settings().GetLeaseMs())*time.Millisecond/3)
	defer cancel()
	result, err := h.server.propose(ctx, &logv1.Command{Principal: principal, Op: &logv1.Command_ReportHealth{ReportHealth: command}}, true)
	switch {
	case err != nil:
		h.server.log.Debug("what checks found was not committed", "node", principal.Name, "error", err)
		return view
	case result.Refusal != nil:
		h.session.refusedReport(string(encoded))
		h.server.log.Warn("what checks found was refused", "node", principal.Name, "reason", result.Refusal.Reason, "sentence", result.Refusal.Sentence)
		return view
	}
	if after, err := h.server.viewAt(ctx, result.Revision); err == nil {
		view = after
	}
	return view
}

// sameConditions reports whether the state has what an agent says. What an operator waived, and what has expired, makes no difference.
func sameConditions(view *fsm.View, number uint32, said []*apiv1.Condition) bool {
	now := view.StateTime()
	lasting := func(list []*apiv1.Condition) []*apiv1.Condition {
		kept := make([]*apiv1.Condition, 0, len(list))
		for _, c := range list {
			if c.Expires != nil && !c.Expires.AsTime().After(now) {
				continue
			}
			if c.Waived {
				c = proto.CloneOf(c)
				c.Waived = false
			}
			kept = append(kept, c)
		}
		slices.SortFunc(kept, compareConditions)
		return kept
	}
	return slices.EqualFunc(lasting(view.Node(number).GetConditions()), lasting(said), func(a, b *apiv1.Condition) bool { return proto.Equal(a, b) })
}

func compareConditions(a, b *apiv1.Condition) int {
	return cmp.Or(cmp.Compare(a.Owner, b.Owner), cmp.Compare(a.Code, b.Code))
}
