package control

import (
	"fmt"

	"github.com/muster-hpc/muster/fsm"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/notation"
	"github.com/muster-hpc/muster/proto/wiring"
	"github.com/muster-hpc/muster/sched"
)

// noDevice is the type of the entry of a number that no device has any more.
const noDevice = "none"

// hardware is what a node's specification says of its devices, for the planner. Specifications are immutable: who has the same has the same.
type hardware struct {
	spec   *apiv1.NodeSpec
	gpus   []string
	wiring wiring.Topology
	near   []sched.Mask
	gres   []sched.Gres
}

func hardwareOf(s *apiv1.NodeSpec) hardware {
	h := hardware{spec: s}
	wired := false
	for _, g := range s.Gpus {
		for int(g.Index) >= len(h.gpus) {
			h.gpus = append(h.gpus, "")
			h.wiring = append(h.wiring, wiring.Device{NUMA: wiring.Unknown, Board: wiring.Unknown})
			h.near = append(h.near, nil)
		}
		switch g.Type {
		case noDevice:
		case "":
			h.gpus[g.Index] = "gpu"
		default:
			h.gpus[g.Index] = g.Type
		}
		// A declared GPU has no id, and nothing is known of its place.
		if g.Uuid == "" {
			continue
		}
		wired = true
		d := &h.wiring[g.Index]
		d.NUMA = int(g.Numa)
		if g.MigParent != nil {
			d.Board = int(*g.MigParent)
		}
		for _, n := range g.Nvlinks {
			d.Links = append(d.Links, int(n))
		}
		h.near[g.Index] = g.CpuMask
	}
	if !wired {
		h.wiring, h.near = nil, nil
	}
	for _, g := range s.Gres {
		h.gres = append(h.gres, sched.Gres{Name: g.Name, Type: g.Type, Count: g.Count})
	}
	return h
}

// ailments takes in what a node's conditions mean for choices: what of it is not usable is known from its masks.
func ailments(n *apiv1.Node, to *sched.Node) {
	for _, c := range n.Conditions {
		whole := sched.Mask(c.GpuMask).Count() == 0 && sched.Mask(c.CpuMask).Count() == 0
		switch c.Severity {
		case apiv1.ConditionSeverity_CONDITION_SEVERITY_DEGRADED:
			to.Degraded = to.Degraded || len(c.GpuMask) == 0
			to.DegradedGPUs = union(to.DegradedGPUs, c.GpuMask)
		case apiv1.ConditionSeverity_CONDITION_SEVERITY_FAILED:
			if whole { // It is drained, or would be if not too many were: then others are preferred.
				to.Degraded = true
			} else if to.Faults == "" {
				to.Faults = c.Owner + ": " + c.Reason
			}
		case apiv1.ConditionSeverity_CONDITION_SEVERITY_INFO, apiv1.ConditionSeverity_CONDITION_SEVERITY_UNSPECIFIED:
		}
	}
}

// withheld says which nodes checks would drain if not too many were drained within the hour; empty if there are none.
func withheld(v *fsm.View) string {
	var names []string
	for n := range v.AilingNodes() {
		if n.HealthDrainWithheld {
			names = append(names, n.Spec.Name)
		}
	}
	if len(names) == 0 {
		return ""
	}
	return fmt.Sprintf("checks would drain %d more nodes (%s), and have drained as many within the hour as they may (%d%% of the nodes): look whether the "+
		"nodes or the checks are at fault; drain them with scontrol update nodename=… state=drain, or raise health_drain_percent",
		len(names), notation.Fold(names), v.Settings().GetHealthDrainPercent())
}

func union(a sched.Mask, b []uint64) sched.Mask {
	sum := make(sched.Mask, max(len(a), len(b)))
	copy(sum, a)
	for i, w := range b {
		sum[i] |= w
	}
	return sum
}

func shares(list []*apiv1.GresShare) []sched.GresShare {
	var out []sched.GresShare
	for _, s := range list {
		out = append(out, sched.GresShare{Name: s.Name, Units: s.Mask})
	}
	return out
}
