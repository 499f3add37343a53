package control

import (
	"cmp"
	"slices"
	"time"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// Silent returns the nodes that are up but were not heard of for a whole lease, by number: they have stopped what stops itself, and what
// runs there is not known. Nothing on a controller that does not lead. The time counts from the beginning of the term for nodes not heard
// of in it.
func (c *Control) Silent() []*apiv1.SilentNode {
	r, err := c.current()
	if err != nil {
		return nil
	}
	v, now := c.cfg.Replica.View(), time.Now()
	lease := boundsOf(v).lease
	var list []*apiv1.SilentNode
	r.nodes.mu.Lock()
	defer r.nodes.mu.Unlock()
	for n := range v.Nodes() {
		if n.State != apiv1.NodeState_NODE_STATE_UP {
			continue
		}
		if silence := now.Sub(r.nodes.of(n).heard); silence >= lease {
			list = append(list, &apiv1.SilentNode{Node: n.Number, SilentMs: uint64(silence.Milliseconds())})
		}
	}
	slices.SortFunc(list, func(a, b *apiv1.SilentNode) int { return cmp.Compare(a.Node, b.Node) })
	return list
}
