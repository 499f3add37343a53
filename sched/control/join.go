package control

import (
	"context"
	"fmt"
	"time"

	"github.com/muster-hpc/muster/fsm"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	peerv1 "github.com/muster-hpc/muster/proto/muster/peer/v1"
)

// JoinNode lets an agent join or return. An instance takes a name over if the one known before is the same, is lost, has not been heard
// of for a lease, or is overdue and of another boot. Errors: *RefusedError (NODE_NAME_TAKEN while another instance is alive,
// CERTIFICATE_NAME if the certificate is not the node's, and what the state machine refuses); ErrNotLeading; those of Propose.
func (c *Control) JoinNode(ctx context.Context, request *peerv1.JoinNodeRequest) (*nodev1.JoinResponse, error) {
	r, err := c.current()
	if err != nil {
		return nil, err
	}
	join := request.GetJoin()
	name := join.GetSpec().GetName()
	if name == "" || name != request.GetCertificateName() {
		return nil, &RefusedError{&apiv1.ErrorDetail{
			Reason: "CERTIFICATE_NAME", Subject: "node " + name,
			Sentence: fmt.Sprintf("an agent with the certificate of %q can't join as %q; start it with the name in its certificate",
				request.GetCertificateName(), name),
		}}
	}
	leave, err := r.enter(ctx, name)
	if err != nil {
		return nil, err
	}
	defer leave()
	v := c.cfg.Replica.View()
	takesOver, refusal := r.mayTakeOver(v, name, join.GetInstance(), time.Now())
	if refusal != nil {
		return nil, &RefusedError{refusal}
	}
	result, err := r.decide(ctx, &logv1.Command{Op: &logv1.Command_JoinNode{JoinNode: &logv1.JoinNode{
		Spec: join.Spec, Instance: join.Instance, TakesOver: takesOver, HighestJobId: join.HighestJobId,
	}}})
	if err != nil {
		return nil, fmt.Errorf("join of node %s: %w", name, err)
	}
	if result.GetRefusal() != nil {
		return nil, &RefusedError{result.Refusal}
	}
	r.nodes.joined(result.NodeNumber, result.NodeEpoch, join.Instance, time.Now())
	if v, err = c.cfg.Replica.WaitIndex(ctx, result.GetRevision().GetIndex()); err != nil {
		return nil, fmt.Errorf("join of node %s: read what was written: %w", name, err)
	}
	response := &nodev1.JoinResponse{
		Number: result.NodeNumber, Epoch: result.NodeEpoch, Settings: v.Settings(), Revision: result.Revision,
		ClusterName: v.Configuration().GetClusterName(),
	}
	for m := range v.Members() {
		response.Members = append(response.Members, m)
	}
	return response, nil
}

// enter lets one join of a name at a time in: the second must see what the first became.
func (r *reign) enter(ctx context.Context, name string) (leave func(), err error) {
	for {
		r.mu.Lock()
		busy := r.joining[name]
		if busy == nil {
			mine := make(chan struct{})
			r.joining[name] = mine
			r.mu.Unlock()
			return func() {
				r.mu.Lock()
				delete(r.joining, name)
				r.mu.Unlock()
				close(mine)
			}, nil
		}
		r.mu.Unlock()
		select {
		case <-busy:
		case <-r.ctx.Done():
			return nil, ErrNotLeading
		case <-ctx.Done():
			return nil, fmt.Errorf("join of node %s: wait for another join of the name: %w", name, ctx.Err())
		}
	}
}

// mayTakeOver decides whether an instance may have a name.
func (r *reign) mayTakeOver(v *fsm.View, name string, instance *apiv1.Instance, at time.Time) (bool, *apiv1.ErrorDetail) {
	n := v.NodeByName(name)
	if n == nil || sameInstance(n.Instance, instance) || n.State != apiv1.NodeState_NODE_STATE_UP {
		return true, nil
	}
	b := boundsOf(v)
	r.nodes.mu.Lock()
	silence := at.Sub(r.nodes.of(n).heard)
	r.nodes.mu.Unlock()
	rebooted := n.Instance.GetBootId() != instance.GetBootId()
	if silence >= b.lease || rebooted && silence > b.overdue() {
		return true, nil
	}
	return false, &apiv1.ErrorDetail{
		Reason: "NODE_NAME_TAKEN", Subject: "node " + name,
		Sentence: fmt.Sprintf("another agent joined as node %s and was heard of %v ago; stop it, or give this one another name. "+
			"If it is gone, this one is let in %v after its last sign of life", name, silence.Round(time.Millisecond), b.lease),
	}
}
