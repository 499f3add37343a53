package fsm

import (
	"cmp"
	"fmt"
	"slices"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"

	"github.com/muster-hpc/muster/fsm/shape"
	"github.com/muster-hpc/muster/fsm/state"
)

const (
	conditionFailed = apiv1.ConditionSeverity_CONDITION_SEVERITY_FAILED
	// maxConditions bounds the conditions of a node, as the protocol says.
	maxConditions = 64
	// healthDrainWindowS is the time in which only so many nodes may be drained by checks, in seconds of state time.
	healthDrainWindowS = 3600
)

// reportHealth replaces the conditions of a node. What another instance or an earlier life of the node found is history.
func (m *Machine) reportHealth(r *logv1.ReportHealth) *logv1.Result {
	n := m.s.Node(r.Node)
	if n == nil || n.Epoch != r.Epoch || !sameInstance(n.Instance, r.Instance) {
		return &logv1.Result{}
	}
	if refusal := checkConditions(n, r.Conditions); refusal != nil {
		return refused(refusal)
	}
	found := slices.Clone(r.Conditions)
	slices.SortFunc(found, compareConditions)
	found = slices.DeleteFunc(found, func(c *apiv1.Condition) bool { return m.isOver(c) })
	for _, c := range found {
		// The entry was decoded a moment ago: its messages belong to nobody else.
		c.Waived = knownCondition(n, c).GetWaived()
	}
	before := n.Conditions
	if !slices.EqualFunc(before, found, func(a, b *apiv1.Condition) bool { return proto.Equal(a, b) }) {
		n = m.changeNode(n, func(n *apiv1.Node) { n.Conditions = found })
	}
	n = m.judge(n)
	for _, c := range found {
		m.endByCondition(n, c, before)
	}
	return &logv1.Result{NodeNumber: n.Number, NodeEpoch: n.Epoch}
}

func compareConditions(a, b *apiv1.Condition) int {
	return cmp.Or(cmp.Compare(a.Owner, b.Owner), cmp.Compare(a.Code, b.Code))
}

// knownCondition returns what a node's check found before under the same owner and code, or nil.
func knownCondition(n *apiv1.Node, c *apiv1.Condition) *apiv1.Condition {
	if i := slices.IndexFunc(n.Conditions, func(o *apiv1.Condition) bool { return compareConditions(o, c) == 0 }); i >= 0 {
		return n.Conditions[i]
	}
	return nil
}

func checkConditions(n *apiv1.Node, conditions []*apiv1.Condition) *apiv1.ErrorDetail {
	bad := func(sentence string, args ...any) *apiv1.ErrorDetail {
		return refuse("HEALTH_INVALID", "node "+n.Spec.Name, "node %s reports %s", n.Spec.Name, fmt.Sprintf(sentence, args...))
	}
	if len(conditions) > maxConditions {
		return bad("%d conditions; at most %d are kept", len(conditions), maxConditions)
	}
	seen := make(map[[2]string]bool, len(conditions))
	for _, c := range conditions {
		key := [2]string{c.Owner, c.Code}
		switch {
		case !validName(c.Owner) || !validCode(c.Code):
			return bad("a condition of the owner %q with the code %q; an owner is a name, a code has A to Z, 0 to 9 and '_'", c.Owner, c.Code)
		case seen[key]:
			return bad("the condition %s of %s twice; each is reported once, for all its devices", c.Code, c.Owner)
		case c.Severity == apiv1.ConditionSeverity_CONDITION_SEVERITY_UNSPECIFIED:
			return bad("the condition %s of %s without a severity", c.Code, c.Owner)
		case shape.Beyond(c.GpuMask, maxGPUs) || shape.Beyond(c.CpuMask, maxCPUs):
			return bad("the condition %s of %s for a device whose number is too high", c.Code, c.Owner)
		case c.Since != nil && c.Since.CheckValid() != nil, c.Expires != nil && c.Expires.CheckValid() != nil:
			return bad("the condition %s of %s with a time that is none", c.Code, c.Owner)
		}
		seen[key] = true
		for _, text := range []string{c.Reason, c.Clears} {
			if refusal := checkText("condition", text, maxNameBytes); refusal != nil {
				return refusal
			}
		}
	}
	return nil
}

// validCode allows upper snake case.
func validCode(code string) bool {
	if code == "" || len(code) > 64 {
		return false
	}
	for _, c := range []byte(code) {
		if (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '_' {
			return false
		}
	}
	return true
}

func conditionSentence(c *apiv1.Condition) string {
	if c.Reason == "" {
		return c.Owner + ": " + c.Code
	}
	return c.Owner + ": " + c.Reason
}

// isOver reports whether a condition is forgotten by itself.
func (m *Machine) isOver(c *apiv1.Condition) bool {
	return c.Expires != nil && !later(c.Expires, m.now())
}

// ofNode reports whether a condition is about the whole node.
func ofNode(c *apiv1.Condition) bool {
	return shape.Trim(c.GpuMask) == nil && shape.Trim(c.CpuMask) == nil
}

// judge draws a node's conclusions from its conditions: expired ones go, devices become unusable, the node is drained or put back to work.
func (m *Machine) judge(n *apiv1.Node) *apiv1.Node {
	next := m.judged(n)
	if proto.Equal(n, next) {
		return n
	}
	next.Revision = m.rev
	m.s.PutNode(next)
	return next
}

// judged returns a changed copy of a node.
func (m *Machine) judged(n *apiv1.Node) *apiv1.Node {
	next := state.CopyNode(n)
	next.Conditions = slices.DeleteFunc(slices.Clone(n.Conditions), m.isOver)
	next.GpusUnusableMask, next.CpusUnusableMask = nil, nil
	var drains *apiv1.Condition
	for _, c := range next.Conditions {
		if c.Severity != conditionFailed {
			continue
		}
		next.GpusUnusableMask = shape.Union(next.GpusUnusableMask, c.GpuMask)
		next.CpusUnusableMask = shape.Union(next.CpusUnusableMask, c.CpuMask)
		if drains == nil && ofNode(c) && !c.Waived {
			drains = c
		}
	}
	switch {
	case drains == nil:
		next.HealthDrainWithheld = false
		if next.DrainedByHealth {
			next.Drain, next.DrainedByHealth = false, false
			if next.State == nodeUp {
				next.Reason, next.ReasonBy, next.ReasonTime = "", "", nil
			}
		}
	case next.DrainedByHealth:
		next.Reason = conditionSentence(drains)
	case next.Drain: // by somebody else: it stays theirs
		next.HealthDrainWithheld = false
	case next.State != nodeUp: // nothing is placed there; it is judged again when it joins
	case !m.mayDrainByHealth():
		next.HealthDrainWithheld = true
	default:
		m.s.SetHealthDrains(append(m.recentHealthDrains(), m.now()))
		next.Drain, next.DrainedByHealth, next.HealthDrainWithheld = true, true, false
		next.Reason, next.ReasonBy, next.ReasonTime = conditionSentence(drains), "muster", m.now()
	}
	return next
}

// recentHealthDrains returns the drains by checks within the last hour of state time, in a new list.
func (m *Machine) recentHealthDrains() []*timestamppb.Timestamp {
	since := &timestamppb.Timestamp{Seconds: m.now().Seconds - healthDrainWindowS, Nanos: m.now().Nanos}
	return slices.DeleteFunc(slices.Clone(m.s.HealthDrains()), func(t *timestamppb.Timestamp) bool { return !later(t, since) })
}

// mayDrainByHealth reports whether checks may drain one more node within this hour: a check that goes mad must not empty the cluster.
func (m *Machine) mayDrainByHealth() bool {
	most := max(1, uint64(m.s.NodeCount())*uint64(m.s.Settings().HealthDrainPercent)/100)
	return uint64(len(m.recentHealthDrains())) < most || m.faults.DrainWithoutLimit
}

// endByCondition ends the work that a new condition is about. A condition that lasts ended it when it came; and what an operator lets run in
// spite of it is left alone.
func (m *Machine) endByCondition(n *apiv1.Node, c *apiv1.Condition, before []*apiv1.Condition) {
	if !c.EndsWork || c.Severity != conditionFailed || c.Waived {
		return
	}
	gpus, cpus, whole := c.GpuMask, c.CpuMask, ofNode(c)
	if i := slices.IndexFunc(before, func(o *apiv1.Condition) bool { return compareConditions(o, c) == 0 }); i >= 0 {
		if old := before[i]; old.EndsWork && old.Severity == conditionFailed {
			if ofNode(old) {
				return
			}
			gpus, cpus = shape.Without(gpus, old.GpuMask), shape.Without(cpus, old.CpuMask)
		}
	}
	sentence := fmt.Sprintf("node %s: %s", n.Spec.Name, conditionSentence(c))
	for _, a := range m.liveOn(n.Number) {
		if h, _ := holding(a, n.Number); whole || shape.Overlap(h.gpus, gpus) || shape.Overlap(h.cpus, cpus) {
			m.finishAttempt(a, ending{class: classHardware, sentence: sentence, fault: n.Number})
		}
	}
}

// waive notes that an operator puts a node back to work in spite of what its checks found.
func waive(n *apiv1.Node) {
	n.DrainedByHealth, n.HealthDrainWithheld = false, false
	n.Conditions = slices.Clone(n.Conditions)
	for i, c := range n.Conditions {
		if c.Severity == conditionFailed && ofNode(c) && !c.Waived {
			c = proto.Clone(c).(*apiv1.Condition)
			c.Waived = true
			n.Conditions[i] = c
		}
	}
}

// tick lets state time pass: conditions expire, and drains that were withheld happen when the hour allows.
func (m *Machine) tick() *logv1.Result {
	for _, n := range slices.Collect(m.s.AilingNodes()) {
		m.judge(n)
	}
	return &logv1.Result{}
}
