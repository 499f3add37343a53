package fsm

import (
	"fmt"
	"math/bits"
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

// This file has what the walks and the twin know of steps with devices of their own, of other devices, of lost nodes and of health.

// twinExtra is a step besides the first. The walks only make steps on one node.
type twinExtra struct {
	id, node               uint32
	cpus, gpus, ib         uint64 // numbers
	overlap                bool
	running, ending, ended bool
}

type twinCondition struct {
	gpus                uint64
	whole, ends, waived bool
}

func ibOfGroup(g *apiv1.NodeGroup) uint64 {
	if len(g.Gres) == 0 {
		return 0
	}
	return g.Gres[0].Mask[0]
}

func (w *twin) ibOf(node uint32, but *twinAttempt) uint64 {
	var mask uint64
	for _, j := range w.jobs {
		for _, a := range j.attempts {
			if a != but {
				mask |= a.shares[node].ib
			}
		}
	}
	return mask
}

// has reports whether the attempt has a node that it has not lost.
func (a *twinAttempt) has(node uint32) bool {
	s, has := a.shares[node]
	return has && !s.leftover
}

// lost takes in that nothing of a live attempt is left on a node.
func (w *twin) lost(j *twinJob, a *twinAttempt, node uint32) {
	others := slices.ContainsFunc(a.nodes, func(n uint32) bool { return n != node && a.has(n) })
	script := j.spec.Kind == apiv1.JobKind_JOB_KIND_BATCH && a.nodes[0] == node
	if !j.spec.NoKill || a.state != attemptRunning || !others || script {
		w.end(j, classHardware, node, false, false)
		return
	}
	if a.step.unreported[node] && !a.step.ended && a.step.final == 0 {
		a.step.final = apiv1.StepState_STEP_STATE_NODE_FAIL
	}
	for _, x := range a.extras {
		if x.node == node && !x.ended {
			x.ending = true // none of them goes on without its node
		}
	}
}

func (n *twinNode) out() uint64 {
	var mask uint64
	for _, c := range n.conditions {
		mask |= c.gpus
	}
	return mask
}

// judge drains a node or puts it back to work.
func (w *twin) judge(n *twinNode) {
	wants := false
	for _, c := range n.conditions {
		wants = wants || c.whole && !c.waived
	}
	w.drains = slices.DeleteFunc(w.drains, func(ms int64) bool { return ms <= w.ms-3600_000 })
	switch {
	case !wants:
		n.drain = n.drain && !n.byHealth
		n.byHealth, n.withheld = false, false
	case n.byHealth:
	case n.drain:
		n.withheld = false
	case !n.up:
	case len(w.drains) >= 1: // of at most 20 nodes
		n.withheld = true
	default:
		w.drains = append(w.drains, w.ms)
		n.drain, n.byHealth, n.withheld = true, true, false
	}
}

func (w *twin) resume(n *twinNode) {
	if !n.drain && n.failures == 0 && !n.withheld {
		return
	}
	n.drain, n.failures, n.byHealth, n.withheld = false, 0, false, false
	for code, c := range n.conditions {
		if c.whole {
			c.waived = true
			n.conditions[code] = c
		}
	}
}

func (w *twin) health(r *logv1.ReportHealth) {
	n := w.nodes[r.Node]
	if n == nil || n.epoch != r.Epoch || n.boot != r.Instance.BootId || n.nonce != r.Instance.Nonce {
		return
	}
	before := n.conditions
	n.conditions = make(map[string]twinCondition)
	for _, c := range r.Conditions {
		now := twinCondition{whole: len(c.GpuMask) == 0, ends: c.EndsWork, waived: before[c.Code].waived}
		if !now.whole {
			now.gpus = c.GpuMask[0]
		}
		n.conditions[c.Code] = now
	}
	w.judge(n)
	for code, c := range n.conditions {
		old, known := before[code]
		if !c.ends || c.waived || known && old.ends && old.whole {
			continue
		}
		gpus := c.gpus
		if known && old.ends {
			gpus &^= old.gpus
		}
		for _, j := range w.jobs {
			if a := j.last(); a != nil && a.live() && a.has(n.number) && (c.whole || a.shares[n.number].gpus&gpus != 0) {
				w.end(j, classHardware, n.number, false, false)
			}
		}
	}
}

// held adds up what steps have for themselves on a node.
func (a *twinAttempt) held(node uint32, first uint32) (cpus, gpus, ib uint64) {
	for _, x := range a.extras {
		if !x.ended && !x.overlap && x.node == node {
			cpus, gpus, ib = cpus+x.cpus, gpus+x.gpus, ib+x.ib
		}
	}
	if first == 0 && !a.step.ended && a.step.unreported[node] {
		s := a.shares[node]
		cpus, gpus, ib = count(s.cpus), count(s.gpus), count(s.ib)
	}
	return cpus, gpus, ib
}

func count(mask uint64) uint64 { return uint64(bits.OnesCount64(mask)) }

func (w *twin) createStep(c *logv1.CreateStep, p *apiv1.Principal) (reason, answer string) {
	j := w.jobs[c.JobId]
	switch {
	case j == nil:
		return "JOB_UNKNOWN", ""
	case !mayTouch(p, j):
		return "PERMISSION_DENIED", ""
	case Ended(j.state):
		return "JOB_ENDED", ""
	case j.last() == nil || j.last().state != attemptRunning:
		return "JOB_NOT_RUNNING", ""
	}
	a, r := j.last(), c.Spec.Resources
	var node *twinNode
	for _, n := range w.nodes {
		if n.spec.Name == r.NodeList[0] {
			node = n
		}
	}
	if node == nil || !a.has(node.number) {
		return "STEP_IMPOSSIBLE", ""
	}
	s := a.shares[node.number]
	x := &twinExtra{node: node.number, overlap: r.Overlap, cpus: count(s.cpus), gpus: count(s.gpus), ib: count(s.ib)}
	if r.Exact {
		x.cpus = uint64(r.Ntasks)
	}
	if len(r.Gres) > 0 {
		x.gpus, x.ib = uint64(r.Gres[0].Count), 0
	}
	if uint64(r.Ntasks) > count(s.cpus) || x.gpus > count(s.gpus) {
		return "STEP_IMPOSSIBLE", ""
	}
	first, _ := firstStepID(j.spec.Kind)
	cpus, gpus, ib := a.held(node.number, first)
	if !x.overlap && (x.cpus+cpus > count(s.cpus) || x.gpus+gpus > count(s.gpus) || x.ib+ib > count(s.ib)) {
		return "STEP_BUSY", ""
	}
	if len(r.Gres) == 0 && !x.overlap && (gpus > 0 || ib > 0) {
		return "STEP_BUSY", "" // it takes all, and some are taken
	}
	x.id = uint32(len(a.extras))
	if first == 0 {
		x.id++
	}
	a.extras = append(a.extras, x)
	return "", ""
}

func (w *twin) startStep(c *logv1.StartStep) string {
	_, a := w.fenced(c.JobId, c.Fence)
	if a == nil {
		return "FENCE_STALE"
	}
	i := slices.IndexFunc(a.extras, func(x *twinExtra) bool { return x.id == c.StepId })
	if i < 0 {
		return "STEP_UNKNOWN"
	}
	x := a.extras[i]
	switch {
	case x.ended:
		return "STEP_ENDED"
	case x.running || x.ending:
		return "STEP_NOT_PREPARING"
	}
	x.running = true
	w.nodes[x.node].failures = 0
	return ""
}

// stepUnprepared charges a node that could not prepare a step with it.
func (w *twin) stepUnprepared(a *twinAttempt, node uint32, f *logv1.PrepareFailed) {
	for _, x := range a.extras {
		if x.id != *f.StepId || x.node != node || x.running || x.ended {
			continue
		}
		x.ending, x.ended = true, true
		if !f.UsersFault {
			n := w.nodes[node]
			n.failures++
			n.drain = n.drain || n.failures >= 3
		}
	}
}

// opOf returns a command's operation.
func opOf(cmd *logv1.Command) proto.Message {
	m := cmd.ProtoReflect()
	return m.Get(m.WhichOneof(m.Descriptor().Oneofs().ByName("op"))).Message().Interface()
}

// stepping creates a step on one node of a running attempt, starts one, or reports its end or that it could not be prepared.
func (w *walk) stepping() *logv1.Command {
	a := w.someAttempt()
	var running []*apiv1.Attempt
	for live := range w.m.s.LiveAttempts() {
		if live.State == attemptRunning {
			running = append(running, live)
		}
	}
	if len(running) > 0 && w.chance(95) {
		a = pick(w, running)
	}
	if a == nil {
		return nil
	}
	job := w.m.s.Job(a.JobId)
	first, _ := firstStepID(job.Spec.Kind)
	var steps []*apiv1.Step
	for s := range w.m.s.LiveSteps(a.JobId, a.Number) {
		if s.Id != first {
			steps = append(steps, s)
		}
	}
	if len(steps) == 0 || w.chance(40) {
		r := &apiv1.ResourceRequest{
			NodesMin: 1, NodeList: []string{w.m.s.Node(pick(w, nodesOf(a.Placement))).Spec.Name}, Ntasks: uint32(1 + w.rng.Intn(3)),
			Exact: w.chance(70), Overlap: w.chance(15),
		}
		if w.chance(70) {
			r.Gres = []*apiv1.GresRequest{{Name: "gpu", Count: uint32(w.rng.Intn(3))}}
		}
		cmd := command(&logv1.CreateStep{JobId: a.JobId, Spec: &apiv1.StepSpec{Name: "s", Args: []string{"s"}, WorkDir: "/", Resources: r}})
		cmd.Principal = &apiv1.Principal{Kind: userKind, Uid: job.Owner.Uid, Name: job.Owner.User, Gid: job.Owner.Gid}
		if w.chance(5) {
			cmd.Principal = bob
		}
		return cmd
	}
	s := pick(w, steps)
	var cmd *logv1.Command
	if s.State == apiv1.StepState_STEP_STATE_PREPARING && w.chance(70) {
		cmd = command(&logv1.StartStep{JobId: s.JobId, StepId: s.Id, Fence: w.fence(a), Prepared: prepared(s.Placement)})
	} else {
		cmd = command(w.stepReport(a, s))
	}
	cmd.Principal = member
	return cmd
}

func (w *walk) stepReport(a *apiv1.Attempt, s *apiv1.Step) *logv1.ReportTasks {
	node := w.m.s.Node(s.Placement.Groups[0].Nodes[0])
	line := &logv1.TaskReport{JobId: a.JobId, Fence: w.fence(a)}
	line.Event = &logv1.TaskReport_StepEnded{StepEnded: &logv1.StepEnded{
		StepId: s.Id, Exits: exits(0, s.NumTasks, uint32(w.rng.Intn(2)), 0), ElapsedMs: uint64(w.rng.Intn(5000)),
		Usage: &apiv1.StepUsage{Tasks: s.NumTasks, UserMs: 5, MaxRssKb: uint64(w.rng.Intn(100)), TotalRssKb: 100},
	}}
	if s.State == apiv1.StepState_STEP_STATE_PREPARING {
		line.Event = &logv1.TaskReport_PrepareFailed{PrepareFailed: &logv1.PrepareFailed{StepId: &s.Id, Sentence: "no disk", UsersFault: w.chance(30)}}
	}
	return &logv1.ReportTasks{Node: node.Number, Epoch: node.Epoch, Instance: node.Instance, Reports: []*logv1.TaskReport{line}}
}

// checking reports what the checks of a node find.
func (w *walk) checking() *logv1.ReportHealth {
	total := w.m.s.NodeCount()
	if total == 0 {
		return nil
	}
	n := w.m.s.Node(uint32(1 + w.rng.Intn(total)))
	r := &logv1.ReportHealth{Node: n.Number, Epoch: n.Epoch, Instance: n.Instance}
	if w.chance(10) {
		r.Epoch--
	}
	for _, code := range []string{"A", "B", "C"} {
		if w.chance(85) {
			continue
		}
		c := &apiv1.Condition{Owner: "gpu", Code: code, Severity: conditionFailed, Reason: fmt.Sprint("fault ", code), EndsWork: w.chance(30)}
		if code != "C" {
			c.GpuMask = []uint64{uint64(1 + w.rng.Intn(15))}
		}
		r.Conditions = append(r.Conditions, c)
	}
	return r
}

// launchCounts counts what walks came across.
type launchCounts map[string]int

func (c launchCounts) note(w *walk, cmd *logv1.Command, r *logv1.Result) {
	if cmd.GetCreateStep() != nil {
		c["create step "+r.Refusal.GetReason()]++
	}
	switch r.Refusal.GetReason() {
	case "GPUS_UNUSABLE", "GRES_TAKEN":
		c[r.Refusal.Reason]++
	}
	for n := range w.m.s.AilingNodes() {
		if n.DrainedByHealth {
			c["drained by checks"]++
		}
		if n.HealthDrainWithheld {
			c["drain withheld"]++
		}
		for _, condition := range n.Conditions {
			if condition.Waived {
				c["condition waived"]++
			}
		}
	}
	for a := range w.m.s.LiveAttempts() {
		if a.State == attemptRunning && len(a.Unaccounted)-len(a.Leftovers) < len(nodesOf(a.Placement)) {
			c["attempt goes on without a node"]++
		}
		for step := range w.m.s.LiveSteps(a.JobId, a.Number) {
			if first, _ := firstStepID(w.m.s.Job(a.JobId).Spec.Kind); step.Id != first && step.State == apiv1.StepState_STEP_STATE_RUNNING {
				c["step runs beside the first"]++
			}
		}
	}
}

func (c launchCounts) check(t *testing.T) {
	t.Logf("%v", c)
	for _, what := range []string{
		"create step ", "create step STEP_BUSY", "create step STEP_IMPOSSIBLE", "GPUS_UNUSABLE", "GRES_TAKEN", "drained by checks", "drain withheld",
		"condition waived", "attempt goes on without a node", "step runs beside the first",
	} {
		if c[what] == 0 {
			t.Errorf("no walk has seen: %s", what)
		}
	}
}
