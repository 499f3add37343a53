package fsm

import (
	"fmt"
	"slices"

	"google.golang.org/protobuf/proto"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

const (
	// maxNodes bounds the nodes of a cluster.
	maxNodes = 100_000
	// maxCPUs and maxGPUs bound the devices of a node: a mask must stay small.
	maxCPUs = 65_536
	maxGPUs = 1_024
	// maxMemoryMB bounds a node's memory so that sums cannot overflow: 2^40 MiB.
	maxMemoryMB = 1 << 40
	// maxFormerBoots bounds the boot ids that are remembered of a node. A join is late by minutes, a boot takes one at least.
	maxFormerBoots = 16
	// maxJobIDJump bounds how far an agent's work moves the job ids: the word of one node must not use them up.
	maxJobIDJump = 1_000_000
)

// joinNode lets a node join, or an agent return.
func (m *Machine) joinNode(j *logv1.JoinNode) *logv1.Result {
	if refusal := checkNodeSpec(j.Spec); refusal != nil {
		return refused(refusal)
	}
	subject := "node " + j.Spec.Name
	if j.Instance.GetBootId() == "" || j.Instance.GetNonce() == "" {
		return refused(refuse("NODE_INVALID", subject, "the agent of node %s does not say which instance it is", j.Spec.Name))
	}
	n := m.s.NodeByName(j.Spec.Name)
	if n != nil && !sameInstance(n.Instance, j.Instance) && !j.TakesOver {
		return refused(refuse("NODE_NAME_TAKEN", subject,
			"another agent with the name %s is alive or has not been silent for long enough; stop it, or give this one another name", j.Spec.Name))
	}
	if n == nil && m.s.NodeCount() >= maxNodes {
		return refused(refuse("NODES_TOO_MANY", subject, "the cluster has %d nodes, which is the most it can have", maxNodes))
	}
	if m.s.Level() >= levelLaunch {
		if refusal := m.refuseJoin(n, j); refusal != nil {
			return refused(refusal)
		}
	}
	if j.HighestJobId < maxJobID {
		m.s.ReserveJobIDs(j.HighestJobId)
	}
	switch {
	case n == nil:
		n = &apiv1.Node{
			Number: m.s.TakeNodeNumber(), Revision: m.rev, Spec: j.Spec, Epoch: 1, Instance: j.Instance, State: nodeUp, JoinTime: m.now(),
		}
		m.s.PutNode(n)
		m.s.Touch(n.Number)
	case sameInstance(n.Instance, j.Instance):
		n = m.returnNode(n, j)
	default:
		n = m.replaceInstance(n, j)
	}
	return &logv1.Result{NodeNumber: n.Number, NodeEpoch: n.Epoch}
}

// refuseJoin refuses a join that came late, from a boot that is over, and one that would use job ids up.
func (m *Machine) refuseJoin(n *apiv1.Node, j *logv1.JoinNode) *apiv1.ErrorDetail {
	subject := "node " + j.Spec.Name
	if boot := j.Instance.BootId; n != nil && boot != n.Instance.BootId && slices.Contains(n.FormerBootIds, boot) {
		return refuse("NODE_BOOT_OVER", subject, "boot %s of node %s is over: it has joined with boot %s since; start its agent with the boot id that "+
			"the machine has now", boot, j.Spec.Name, n.Instance.BootId)
	}
	if next := m.s.NextJobID(); uint64(j.HighestJobId) >= uint64(next)+maxJobIDJump {
		return refuse("JOB_IDS_JUMP", subject, "node %s says that it has work of job %d, and the next job here is %d; at most %d ids are skipped on the "+
			"word of one node. If this cluster was restored from an older state, restore it again with job ids above %d; otherwise its records are wrong: when nothing runs there, remove its directory",
			j.Spec.Name, j.HighestJobId, next, maxJobIDJump, j.HighestJobId)
	}
	return nil
}

func checkNodeSpec(s *apiv1.NodeSpec) *apiv1.ErrorDetail {
	bad := func(sentence string, args ...any) *apiv1.ErrorDetail {
		return refuse("NODE_INVALID", "node "+s.GetName(), sentence, args...)
	}
	switch {
	case !validName(s.GetName()):
		return bad("the node's name %q is not a name: letters, digits, '_', '-' and '.' are allowed", s.GetName())
	case s.Cpus == 0 || s.Cpus > maxCPUs:
		return bad("node %s has %d CPUs; 1 to %d are possible", s.Name, s.Cpus, maxCPUs)
	case len(s.Gpus) > maxGPUs:
		return bad("node %s has %d GPUs; at most %d are possible", s.Name, len(s.Gpus), maxGPUs)
	case s.MemoryMb > maxMemoryMB:
		return bad("node %s has %d MiB of memory; at most %d are possible", s.Name, s.MemoryMb, uint64(maxMemoryMB))
	case proto.Size(s) > 64<<10:
		return bad("the description of node %s has %d bytes; at most %d are allowed", s.Name, proto.Size(s), 64<<10)
	}
	if refusal := checkNodeDevices(s); refusal != nil {
		return refusal
	}
	for i, g := range s.Gpus {
		if g.Index != uint32(i) {
			return bad("the GPUs of node %s are not numbered from 0 in order", s.Name)
		}
	}
	return nil
}

// returnNode takes the same instance back: the epoch stays. Whatever it had is still there.
func (m *Machine) returnNode(n *apiv1.Node, j *logv1.JoinNode) *apiv1.Node {
	sameSpec := proto.Equal(n.Spec, j.Spec)
	if n.State == nodeUp && sameSpec {
		return n
	}
	m.s.Touch(n.Number)
	return m.judge(m.changeNode(n, func(n *apiv1.Node) {
		if !sameSpec {
			n.Spec = j.Spec
		}
		m.comeUp(n)
	}))
}

// comeUp marks a node as joined.
func (m *Machine) comeUp(n *apiv1.Node) {
	if n.State == nodeUp {
		return
	}
	n.State, n.JoinTime, n.LostOnSilence = nodeUp, m.now(), false
	if !n.Drain {
		n.Reason, n.ReasonBy, n.ReasonTime = "", "", nil
	}
}

// replaceInstance lets another instance take a node's name over. Its epoch rises and what ran there ends. On another boot nothing
// can be left of it; on the same boot the new agent must look for it and report it reaped.
func (m *Machine) replaceInstance(n *apiv1.Node, j *logv1.JoinNode) *apiv1.Node {
	rebooted := n.Instance.BootId != j.Instance.BootId
	sentence := fmt.Sprintf("the agent of node %s was replaced by one that knows nothing of it", n.Spec.Name)
	if rebooted {
		sentence = fmt.Sprintf("node %s was booted anew", n.Spec.Name)
	}
	n = m.changeNode(n, func(n *apiv1.Node) {
		n.Epoch++
		if rebooted && m.s.Level() >= levelLaunch {
			boots := append(slices.Clone(n.FormerBootIds), n.Instance.BootId)
			n.FormerBootIds = boots[max(0, len(boots)-maxFormerBoots):]
		}
		n.Spec, n.Instance = j.Spec, j.Instance
		m.comeUp(n)
	})
	gone := uint32(0)
	if rebooted {
		gone = n.Epoch
	}
	m.endOnNode(n, sentence, gone)
	if rebooted {
		for _, a := range slices.Collect(m.s.NodeAttempts(n.Number)) {
			m.account(a, n.Number)
		}
	}
	m.s.Touch(n.Number)
	return m.judge(m.s.Node(n.Number))
}

// liveOn returns the live attempts that have a node. An attempt of which only a leftover is there does not count.
func (m *Machine) liveOn(number uint32) []*apiv1.Attempt {
	return slices.DeleteFunc(slices.Collect(m.s.NodeAttempts(number)), func(a *apiv1.Attempt) bool {
		_, index := holding(a, number)
		return index < 0 || a.State != attemptPreparing && a.State != attemptRunning
	})
}

// endOnNode ends every live attempt that has the node. Of those placed there in an epoch up to gone nothing is left for sure: they go on elsewhere
// if their jobs go on without lost nodes.
func (m *Machine) endOnNode(n *apiv1.Node, sentence string, gone uint32) {
	for _, a := range m.liveOn(n.Number) {
		if h, _ := holding(a, n.Number); h.epoch > gone {
			m.finishAttempt(a, ending{class: classHardware, sentence: sentence, fault: n.Number})
			continue
		}
		if a = m.loseFrom(a, n, sentence); a.State == attemptRunning {
			m.account(a, n.Number)
		}
	}
}

// endOnSilence ends what a node that is not heard of would end by itself, and what has executed nothing yet. Whatever else runs there goes on
// for as long as nothing says that it does not: silence is no evidence.
func (m *Machine) endOnSilence(n *apiv1.Node, sentence string) {
	for _, a := range m.liveOn(n.Number) {
		switch {
		case m.s.Job(a.JobId).Spec.AutomaticRecovery || m.faults.EndOnSilence:
			m.finishAttempt(a, ending{class: classHardware, sentence: sentence, fault: n.Number})
		case a.State == attemptPreparing:
			// A launch that failed is tried again also for a job that may not be repeated. The node is not charged: it is down already.
			m.finishAttempt(a, ending{class: classLaunch, sentence: sentence})
		}
	}
}

// loseNode declares a node lost.
func (m *Machine) loseNode(l *logv1.LoseNode) *logv1.Result {
	n := m.s.Node(l.Node)
	if n == nil {
		return refused(refuse("NODE_UNKNOWN", fmt.Sprintf("node %d", l.Node), "there is no node with the number %d", l.Node))
	}
	subject := "node " + n.Spec.Name
	switch {
	case n.Epoch != l.Epoch:
		return refused(refuse("NODE_EPOCH", subject, "node %s is in epoch %d, not %d", n.Spec.Name, n.Epoch, l.Epoch))
	case n.State != nodeUp:
		return refused(refuse("NODE_DOWN", subject, "node %s is lost already", n.Spec.Name))
	}
	n = m.takeDown(n, l.Sentence, "muster", true)
	m.endOnSilence(n, lostSentence(n, l.Sentence))
	return &logv1.Result{NodeNumber: n.Number, NodeEpoch: n.Epoch}
}

// takeDown takes a node down: its epoch rises, so that nothing that was decided for it before is placed there.
func (m *Machine) takeDown(n *apiv1.Node, sentence, by string, silent bool) *apiv1.Node {
	m.s.Touch(n.Number)
	return m.changeNode(n, func(n *apiv1.Node) {
		n.State, n.Epoch, n.LostOnSilence = nodeDown, n.Epoch+1, silent
		if !n.Drain || by != "muster" {
			n.Reason, n.ReasonBy, n.ReasonTime = sentence, by, m.now()
		}
	})
}

func lostSentence(n *apiv1.Node, why string) string {
	return fmt.Sprintf("node %s was lost: %s", n.Spec.Name, why)
}

// fenceNode accounts for the ended attempts of a lost node that stop themselves, or for all if it is powered off.
func (m *Machine) fenceNode(f *logv1.FenceNode) *logv1.Result {
	n := m.s.Node(f.Node)
	if n == nil {
		return refused(refuse("NODE_UNKNOWN", fmt.Sprintf("node %d", f.Node), "there is no node with the number %d", f.Node))
	}
	subject := "node " + n.Spec.Name
	if f.JobId != 0 {
		return m.fenceAttempt(f, n)
	}
	switch {
	case f.Epoch == 0 || f.Epoch > n.Epoch:
		return refused(refuse("NODE_EPOCH", subject, "node %s is in epoch %d; %d cannot be fenced", n.Spec.Name, n.Epoch, f.Epoch))
	case f.Epoch == n.Epoch && n.State == nodeUp:
		return refused(refuse("NODE_NOT_LOST", subject, "node %s is up in epoch %d; declare it lost first", n.Spec.Name, n.Epoch))
	}
	if f.PoweredOff && n.State == nodeDown { // Also what went on through its silence is over.
		n = m.provedDead(n)
		m.endOnNode(n, fmt.Sprintf("node %s was powered off", n.Spec.Name), f.Epoch)
	}
	n = m.fence(n, f.Epoch, f.PoweredOff)
	return &logv1.Result{NodeNumber: n.Number, NodeEpoch: n.Epoch}
}

// fenceAttempt accounts for one attempt on a node where it has stopped itself. The node's own state does not matter.
func (m *Machine) fenceAttempt(f *logv1.FenceNode, n *apiv1.Node) *logv1.Result {
	subject := jobSubject(f.JobId)
	a := m.s.Attempt(f.JobId, f.Attempt)
	if a == nil {
		return refused(refuse("ATTEMPT_UNKNOWN", subject, "job %d has no attempt %d", f.JobId, f.Attempt))
	}
	if slices.Contains(a.Unaccounted, n.Number) {
		h, index := holding(a, n.Number)
		switch {
		case f.PoweredOff || !m.s.Job(f.JobId).Spec.AutomaticRecovery:
			return refused(refuse("ATTEMPT_GOES_ON", subject, "job %d does not stop itself without a lease: node %s must account for it", f.JobId, n.Spec.Name))
		case index >= 0 && (a.State == attemptPreparing || a.State == attemptRunning):
			return refused(refuse("ATTEMPT_LIVE", subject, "attempt %d of job %d has not ended; it is ended before it is accounted for", a.Number, f.JobId))
		case h.epoch > f.Epoch:
			return refused(refuse("NODE_EPOCH", subject, "attempt %d of job %d was placed on node %s in epoch %d, not by %d", a.Number, f.JobId,
				n.Spec.Name, h.epoch, f.Epoch))
		}
		m.account(a, n.Number)
	}
	return &logv1.Result{NodeNumber: n.Number, NodeEpoch: n.Epoch}
}

func (m *Machine) fence(n *apiv1.Node, epoch uint32, poweredOff bool) *apiv1.Node {
	for _, a := range slices.Collect(m.s.NodeAttempts(n.Number)) {
		h, index := holding(a, n.Number)
		live := index >= 0 && (a.State == attemptPreparing || a.State == attemptRunning)
		if h == nil || live || h.epoch > epoch {
			continue
		}
		if poweredOff || m.s.Job(a.JobId).Spec.AutomaticRecovery {
			m.account(a, n.Number)
		}
	}
	n = m.s.Node(n.Number)
	if epoch <= n.FencedEpoch {
		return n
	}
	return m.changeNode(n, func(n *apiv1.Node) { n.FencedEpoch = epoch })
}

// updateNodes drains, resumes, or declares nodes dead, each by itself.
func (m *Machine) updateNodes(r *apiv1.UpdateNodesRequest) *logv1.Result {
	var change func(*apiv1.Node)
	needsReason, on := false, false
	switch c := r.GetChange().(type) {
	case *apiv1.UpdateNodesRequest_Drain:
		change, needsReason, on = func(n *apiv1.Node) { m.drain(n, r.Reason) }, true, c.Drain
	case *apiv1.UpdateNodesRequest_Resume:
		change, on = m.resume, c.Resume
	case *apiv1.UpdateNodesRequest_Down:
		change, needsReason, on = func(n *apiv1.Node) { m.declareDown(n, r.Reason, 0) }, true, c.Down
	case *apiv1.UpdateNodesRequest_Fenced:
		change, on = func(n *apiv1.Node) { m.declareFenced(n, r.Reason) }, c.Fenced
	}
	if !on {
		return refused(refuse("CHANGE_MISSING", "change", "the request does not say what to do with the nodes"))
	}
	if needsReason && r.Reason == "" {
		return refused(refuse("REASON_MISSING", "reason", "say why: a reason is shown to everybody who asks about the node"))
	}
	if refusal := checkText("reason", r.Reason, maxNameBytes); refusal != nil {
		return refused(refusal)
	}
	result := &logv1.Result{}
	for _, name := range r.Names {
		n := m.s.NodeByName(name)
		if n == nil {
			result.Refusals = append(result.Refusals, refuse("NODE_UNKNOWN", "node "+name, "node %s does not exist", name))
			continue
		}
		change(n)
	}
	return result
}

func (m *Machine) drain(n *apiv1.Node, reason string) *apiv1.Node {
	return m.changeNode(n, func(n *apiv1.Node) {
		n.Drain, n.Reason, n.ReasonBy, n.ReasonTime = true, reason, m.cmd.Principal.Name, m.now()
		n.DrainedByHealth, n.HealthDrainWithheld = false, false
	})
}

func (m *Machine) resume(n *apiv1.Node) {
	if !n.Drain && n.LaunchFailures == 0 && !n.HealthDrainWithheld {
		return
	}
	m.changeNode(n, func(n *apiv1.Node) {
		n.Drain, n.LaunchFailures = false, 0
		waive(n)
		if n.State == nodeUp {
			n.Reason, n.ReasonBy, n.ReasonTime = "", "", nil
		}
	})
}

// declareDown ends what runs on the node, also what goes on there though the node is lost, and drains it so that it stays without work though its agent may come back.
func (m *Machine) declareDown(n *apiv1.Node, reason string, gone uint32) {
	n = m.provedDead(m.drain(n, reason))
	if n.State == nodeUp {
		n = m.takeDown(n, reason, m.cmd.Principal.Name, false)
	}
	m.endOnNode(n, lostSentence(n, reason), gone)
}

// provedDead notes that a lost node is known to be dead, or that an operator answers for it.
func (m *Machine) provedDead(n *apiv1.Node) *apiv1.Node {
	if !n.LostOnSilence {
		return n
	}
	return m.changeNode(n, func(n *apiv1.Node) { n.LostOnSilence = false })
}

func (m *Machine) declareFenced(n *apiv1.Node, reason string) {
	if reason == "" {
		reason = "powered off, says " + m.cmd.Principal.Name
	}
	m.declareDown(n, reason, n.Epoch)
	n = m.s.Node(n.Number)
	m.fence(n, n.Epoch, true)
}
