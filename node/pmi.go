package node

import (
	"crypto/hmac"
	"crypto/sha256"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"

	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	supervisorv1 "github.com/muster-hpc/muster/proto/muster/supervisor/v1"

	"github.com/muster-hpc/muster/node/environ"
	"github.com/muster-hpc/muster/node/run/pmi"
)

// secretVariable holds what only the owner of a step and its nodes know. It comes with the step's environment, which
// nobody else may read, and tasks do not get it: srun makes it.
const secretVariable = "MUSTER_PMI_SECRET"

// minSecret is its shortest length; a row of docs/limits.md.
const minSecret = 16

// manage adds to a plan the process manager that the step asks for. user is the environment that came with it.
func (a *Agent) manage(plan *supervisorv1.StepPlan, src source, order *nodev1.DesiredAttempt, user []string) error {
	step := order.GetSteps()[0]
	switch kind := src.options.GetMpi(); {
	case src.batch || kind == "" || kind == "none":
		return nil
	case kind != "pmi2":
		return &prepareError{usersFault: true, sentence: fmt.Sprintf(
			"the tasks ask for the process management interface %.40q; there is pmi2, which also serves PMI-1, and none", kind)}
	}
	m := &supervisorv1.ProcessManager{
		Size: step.GetStep().GetNumTasks(), UniverseSize: order.GetNumTasks(), Node: step.GetNodeIndex(),
		Nodes: uint32(len(step.GetTasksPerNode())), NodeList: step.GetStep().GetNodeList(), Mapping: mapping(src, step),
	}
	m.UniverseSize = max(m.UniverseSize, m.Size)
	if m.Nodes > 1 {
		secret := ""
		for _, v := range user {
			if value, ok := strings.CutPrefix(v, secretVariable+"="); ok {
				secret = value
			}
		}
		if len(secret) < minSecret {
			return &prepareError{usersFault: true, sentence: fmt.Sprintf(
				"MPI tasks on several nodes need %s with at least %d random characters in the step's environment, so that their nodes know each other; srun sets it",
				secretVariable, minSecret)}
		}
		m.Key = stepKey(secret, order)
	}
	if address, err := netip.ParseAddr(a.cfg.Spec.GetTaskAddress()); err == nil {
		m.Listen = address.String()
	}
	plan.ProcessManager = m
	return nil
}

// stepKey makes of a secret the key of one placement of one step: what was started earlier with the same secret has another.
func stepKey(secret string, order *nodev1.DesiredAttempt) []byte {
	f := order.GetFence()
	h := hmac.New(sha256.New, []byte(secret))
	_, _ = fmt.Fprintf(h, "process manager of %d.%d.%d.%d.%d", order.GetJob().GetId(), f.GetIncarnation(), f.GetAttempt(), f.GetPlacement(),
		order.GetSteps()[0].GetStep().GetId()) // a hash takes everything
	return h.Sum(nil)
}

// mapping says where the step's ranks are; empty for layouts that this node does not know in full.
func mapping(src source, step *nodev1.DesiredStep) string {
	counts := step.GetTasksPerNode()
	var nodeOf []uint32
	kind, _, _ := strings.Cut(src.options.GetDistribution(), ":") // what follows lays out CPUs
	switch kind {
	case "", "block":
		for node, n := range counts {
			for range n {
				nodeOf = append(nodeOf, uint32(node))
			}
		}
	case "cyclic":
		for round, more := uint32(0), true; more; round++ {
			more = false
			for node, n := range counts {
				if round < n {
					nodeOf, more = append(nodeOf, uint32(node)), true
				}
			}
		}
	default:
		return ""
	}
	if len(step.GetStep().GetSpec().GetResources().GetTaskNodes()) > 0 {
		return ""
	}
	for _, rank := range step.GetRanks() { // as the controllers see it
		if uint64(rank) >= uint64(len(nodeOf)) || nodeOf[rank] != step.GetNodeIndex() {
			return ""
		}
	}
	return pmi.Mapping(nodeOf)
}

// managerAddress is where the process manager of a step's first node serves the others; empty if it does not.
func managerAddress(step *nodev1.DesiredStep) string {
	if step.GetPmiPort() == 0 || step.GetMasterAddress() == "" || step.GetStep().GetId() == environ.BatchStep {
		return ""
	}
	return net.JoinHostPort(step.GetMasterAddress(), strconv.FormatUint(uint64(step.GetPmiPort()), 10))
}
