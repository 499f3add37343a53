package fsm

import (
	"fmt"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/proto/notation"

	"github.com/muster-hpc/muster/fsm/shape"
)

const (
	// maxGres bounds the entries of generic resources of a node or a request, as the protocol says.
	maxGres = 64
	// maxGresUnits bounds the units of one entry, and of a name on a node: a mask must stay small.
	maxGresUnits = 65_536
	// gpuName is the generic resource that accelerators are.
	gpuName = "gpu"
)

// checkGres checks that a node has the other devices that a placement takes there, each name once.
func checkGres(n *apiv1.Node, g *apiv1.NodeGroup) *apiv1.ErrorDetail {
	for i, s := range g.Gres {
		if shape.Trim(s.Mask) == nil || i > 0 && g.Gres[i-1].Name >= s.Name {
			return refuse("PLACEMENT_INVALID", "node "+n.Spec.Name, "the placement names the devices %q without taking any, twice or out of order", s.Name)
		}
		if shape.Without(s.Mask, shape.GresUnits(n.Spec, s.Name, "")) != nil {
			return refuse("PLACEMENT_INVALID", "node "+n.Spec.Name, "the placement takes %s devices that node %s does not have", s.Name, n.Spec.Name)
		}
	}
	return nil
}

// usable checks that nothing is taken that is out of use because of a condition.
func (c *placementCheck) usable(n *apiv1.Node, g *apiv1.NodeGroup) *apiv1.ErrorDetail {
	if c.m.faults.PlaceUnusable {
		return nil
	}
	for _, d := range []struct {
		what, reason string
		mask         []uint64
		of           func(*apiv1.Condition) []uint64
	}{
		{"CPU", "CPUS_UNUSABLE", shape.Common(g.CpuMask, n.CpusUnusableMask), (*apiv1.Condition).GetCpuMask},
		{"GPU", "GPUS_UNUSABLE", shape.Common(g.GpuMask, n.GpusUnusableMask), (*apiv1.Condition).GetGpuMask},
	} {
		if d.mask == nil {
			continue
		}
		for _, condition := range n.Conditions {
			if condition.Severity == conditionFailed && shape.Overlap(d.of(condition), d.mask) {
				return refuse(d.reason, "node "+n.Spec.Name, "%s %s of node %s gets no new work: %s", d.what, notation.Mask(d.mask), n.Spec.Name,
					conditionSentence(condition))
			}
		}
		return refuse(d.reason, "node "+n.Spec.Name, "%s %s of node %s gets no new work", d.what, notation.Mask(d.mask), n.Spec.Name)
	}
	return nil
}

// checkNodeDevices checks what an agent says of its accelerators and other devices.
func checkNodeDevices(s *apiv1.NodeSpec) *apiv1.ErrorDetail {
	bad := func(sentence string, args ...any) *apiv1.ErrorDetail {
		return refuse("NODE_INVALID", "node "+s.Name, "node %s %s", s.Name, fmt.Sprintf(sentence, args...))
	}
	for i, g := range s.Gpus {
		switch {
		case shape.Beyond(g.CpuMask, s.Cpus):
			return bad("says that GPU %d is close to a CPU that it does not have", i)
		case len(g.Nvlinks) > len(s.Gpus):
			return bad("says that GPU %d is linked to %d GPUs; it has %d", i, len(g.Nvlinks), len(s.Gpus))
		}
	}
	if len(s.Gres) > maxGres {
		return bad("has %d entries of other devices; at most %d are possible", len(s.Gres), maxGres)
	}
	units := make(map[string]uint64, len(s.Gres))
	for _, g := range s.Gres {
		units[g.Name] += uint64(g.Count)
		switch {
		case !validName(g.Name) || g.Type != "" && !validName(g.Type):
			return bad("has devices of the name %q and type %q: letters, digits, '_', '-' and '.' are allowed", g.Name, g.Type)
		case g.Name == gpuName:
			return bad("lists GPUs among other devices; they have an entry each under gpus")
		case units[g.Name] > maxGresUnits:
			return bad("has %d devices of the name %s; at most %d are possible", units[g.Name], g.Name, maxGresUnits)
		case len(g.DeviceFiles) != 0 && len(g.DeviceFiles) != int(g.Count):
			return bad("has %d devices of the name %s and %d files for them", g.Count, g.Name, len(g.DeviceFiles))
		}
	}
	return nil
}
