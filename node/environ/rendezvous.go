package environ

import (
	"slices"
	"strings"

	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
)

// inheritedMark names the rendezvous variables that Muster set, so that a step started from within a step does not
// take the outer step's for the user's.
const inheritedMark = "MUSTER_RENDEZVOUS"

// rendezvous says which variables a step's tasks get.
type rendezvous struct {
	worldSize uint64
	ranks     bool
	touch     map[string]bool
}

// wantsRendezvous reports whether the tasks get MASTER_ADDR and MASTER_PORT: every step of several tasks does, unless
// job, step or cluster turned it off.
func wantsRendezvous(order *nodev1.DesiredAttempt, step *nodev1.DesiredStep) bool {
	s := step.GetStep()
	return s.GetId() != BatchStep && s.GetNumTasks() > 1 &&
		!order.GetNoRendezvousEnvironment() && !s.GetSpec().GetTaskOptions().GetNoRendezvousEnvironment()
}

// WantsPort reports whether the first node of the step must find a free port.
func WantsPort(order *nodev1.DesiredAttempt, step *nodev1.DesiredStep) bool {
	return step.GetNodeIndex() == 0 && wantsRendezvous(order, step)
}

// wantsRanks reports whether the tasks get RANK, WORLD_SIZE and LOCAL_RANK as well. Not with one task per node that has
// several GPUs: that is how torchrun and accelerate are started, which set them for their own children. Not with GPUs
// bound per task: the task sees a single device 0, and LOCAL_RANK would point at another.
func wantsRanks(order *nodev1.DesiredAttempt, step *nodev1.DesiredStep) bool {
	gpus := 0
	for _, p := range Portions(order, step) {
		if p.bindsGPUs() {
			return false
		}
		gpus += p.GPUs.Count()
	}
	onePerNode := !slices.ContainsFunc(step.GetTasksPerNode(), func(n uint32) bool { return n != 1 })
	return !onePerNode || gpus < 2
}

// planRendezvous looks at what the user set, drops what was inherited from an outer step, and marks what will be set.
func planRendezvous(r Request, user *vars) rendezvous {
	for name := range strings.FieldsSeq(user.get(inheritedMark)) {
		user.unset(name)
	}
	user.unset(inheritedMark)
	m := rendezvous{worldSize: uint64(r.Step.GetStep().GetNumTasks()), touch: map[string]bool{}}
	if !wantsRendezvous(r.Order, r.Step) {
		return m
	}
	names := []string{"MASTER_ADDR", "MASTER_PORT"}
	if m.ranks = wantsRanks(r.Order, r.Step); m.ranks {
		names = append(names, "RANK", "WORLD_SIZE", "LOCAL_RANK")
	}
	names = slices.DeleteFunc(names, user.has)
	for _, name := range names {
		m.touch[name] = true
	}
	if len(names) > 0 {
		user.set(inheritedMark, strings.Join(names, " "))
	}
	return m
}

// task sets the variables of the i-th task of the node.
func (m rendezvous) task(v *vars, rank uint32, i int) {
	if !m.ranks {
		return
	}
	set := func(name string, value uint64) {
		if m.touch[name] {
			v.setNumber(name, value)
		}
	}
	set("RANK", uint64(rank))
	set("WORLD_SIZE", m.worldSize)
	set("LOCAL_RANK", uint64(i))
}
