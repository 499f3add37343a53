package fsm

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

// twin is the state machine once more, as simple as it can be: maps, no indexes, no shared records, everything recomputed
// when it is asked for. It covers the life of jobs, attempts, first steps and nodes, ownership of devices, and request ids; it
// knows only what contracts.md says. Where it and the machine differ, one of them is wrong.
type twin struct {
	ms       int64
	jobs     map[uint32]*twinJob
	nodes    map[uint32]*twinNode
	requests map[string]twinRequest
	nextJob  uint32
	nextNode uint32
	drains   []int64 // by checks
}

type twinRequest struct {
	payload, who, answer string
	expires              int64
}

type twinJob struct {
	id, uid            uint32
	spec               *apiv1.JobSpec
	state              apiv1.JobState
	held               uint32
	restarts, failures uint32
	notBefore          int64 // milliseconds; 0 if none
	limit              uint32
	attempts           []*twinAttempt
	partition          string
}

type twinAttempt struct {
	number, placement uint32
	state             apiv1.AttemptState
	final             apiv1.JobState
	class             apiv1.FailureClass
	shares            map[uint32]twinShare // of every node not accounted for, leftovers too
	nodes             []uint32             // present placement
	started           bool
	step              *twinStep // first step
	unprepared        []uint32
	extras            []*twinExtra
}

type twinShare struct {
	cpus, gpus, memory uint64
	ib                 uint64
	epoch, placement   uint32
	leftover           bool
}

type twinStep struct {
	running, ending, ended bool
	nodes                  []uint32
	unreported             map[uint32]bool
	code, signal           uint32
	launch, memory         bool
	final                  apiv1.StepState
}

type twinNode struct {
	number, epoch, failures uint32
	spec                    *apiv1.NodeSpec
	boot, nonce             string
	up, drain, silent       bool
	conditions              map[string]twinCondition
	byHealth, withheld      bool
}

func newTwin() *twin {
	return &twin{
		jobs: make(map[uint32]*twinJob), nodes: make(map[uint32]*twinNode), requests: make(map[string]twinRequest),
		nextJob: 1, nextNode: 1,
	}
}

// apply returns the reason of the refusal, "" if there is none, and a word about the answer.
func (w *twin) apply(cmd *logv1.Command, ms, minted int64) (reason, answer string) {
	w.ms = max(w.ms, ms)
	if cmd.RequestId != "" {
		who := fmt.Sprint(cmd.Principal.Kind, cmd.Principal.Uid, cmd.Principal.Name)
		for id, r := range w.requests {
			if r.expires < w.ms {
				delete(w.requests, id)
			}
		}
		if r, known := w.requests[cmd.RequestId]; known {
			if r.payload != string(cmd.PayloadSha256) || r.who != who {
				return "REQUEST_ID_REUSED", ""
			}
			reason, answer, _ := strings.Cut(r.answer, "|")
			return reason, answer
		}
		if minted < w.ms-15*60*1000 {
			return "REQUEST_TOO_OLD", ""
		}
		defer func() {
			w.requests[cmd.RequestId] = twinRequest{string(cmd.PayloadSha256), who, reason + "|" + answer, max(w.ms, minted) + 15*60*1000}
		}()
	}
	switch op := cmd.Op.(type) {
	case *logv1.Command_SubmitJobs:
		for _, spec := range op.SubmitJobs.Specs {
			j := &twinJob{id: w.nextJob, uid: cmd.Principal.Uid, spec: spec, state: jobPending, limit: spec.TimeLimitS}
			if spec.Hold {
				j.held = 1
			}
			w.jobs[j.id] = j
			w.nextJob++
			answer += fmt.Sprint(j.id, ",")
		}
		return "", answer
	case *logv1.Command_CancelJobs:
		for _, id := range op.CancelJobs.JobIds {
			answer += w.cancel(id, cmd.Principal) + ","
		}
		return "", answer
	case *logv1.Command_UpdateJobs:
		return "", w.update(op.UpdateJobs.Request, cmd.Principal)
	case *logv1.Command_Place:
		return w.place(op.Place), ""
	case *logv1.Command_StartAttempt:
		return w.start(op.StartAttempt), ""
	case *logv1.Command_EndAttempt:
		return w.endAttempt(op.EndAttempt), ""
	case *logv1.Command_ReportTasks:
		w.report(op.ReportTasks)
		return "", ""
	case *logv1.Command_JoinNode:
		return w.join(op.JoinNode), ""
	case *logv1.Command_LoseNode:
		return w.lose(op.LoseNode), ""
	case *logv1.Command_FenceNode:
		return w.fence(op.FenceNode), ""
	case *logv1.Command_UpdateNodes:
		return "", w.updateNodes(op.UpdateNodes.Request)
	case *logv1.Command_Tick:
		for _, number := range slices.Sorted(maps.Keys(w.nodes)) {
			w.judge(w.nodes[number])
		}
		return "", ""
	case *logv1.Command_ReportHealth:
		w.health(op.ReportHealth)
		return "", ""
	case *logv1.Command_CreateStep:
		return w.createStep(op.CreateStep, cmd.Principal)
	case *logv1.Command_StartStep:
		return w.startStep(op.StartStep), ""
	}
	panic("the twin does not know this operation")
}

func (j *twinJob) last() *twinAttempt {
	if len(j.attempts) == 0 {
		return nil
	}
	return j.attempts[len(j.attempts)-1]
}

func (a *twinAttempt) live() bool { return a.state == attemptPreparing || a.state == attemptRunning }

func mayTouch(p *apiv1.Principal, j *twinJob) bool {
	return p.Kind == memberKind || p.Uid == 0 || p.Uid == 7 || p.Uid == j.uid
}

func (w *twin) cancel(id uint32, p *apiv1.Principal) string {
	j := w.jobs[id]
	switch {
	case j == nil:
		return "JOB_UNKNOWN"
	case !mayTouch(p, j):
		return "PERMISSION_DENIED"
	case Ended(j.state):
		return "JOB_ENDED"
	case j.state == jobPending:
		j.state, j.held, j.notBefore = jobCancelled, 0, 0
	case j.last().live():
		w.end(j, apiv1.FailureClass_FAILURE_CLASS_CANCELLED, 0, false, false)
	case j.last().final == jobPending:
		j.last().final = jobCancelled
		j.held, j.notBefore = 0, 0
	}
	return ""
}

func (w *twin) update(r *apiv1.UpdateJobRequest, p *apiv1.Principal) string {
	answer := ""
	for _, id := range r.JobIds {
		answer += w.updateOne(r, w.jobs[id], p) + ","
	}
	return answer
}

func (w *twin) updateOne(r *apiv1.UpdateJobRequest, j *twinJob, p *apiv1.Principal) string {
	if j == nil {
		return "JOB_UNKNOWN"
	}
	if !mayTouch(p, j) {
		return "PERMISSION_DENIED"
	}
	operator := p.Uid != j.uid
	switch c := r.Change.(type) {
	case *apiv1.UpdateJobRequest_Requeue:
		switch {
		case j.state == jobPending:
			return "JOB_PENDING"
		case Ended(j.state):
			j.state, j.notBefore, j.failures = jobPending, 0, 0
			if len(j.attempts) > 0 {
				j.restarts++
			}
			if r.RequeueHold {
				j.held = 1
			}
		case j.last().live():
			w.end(j, classRequeued, 0, false, r.RequeueHold)
		default:
			j.last().final = jobPending
			if r.RequeueHold {
				j.held = 1
			}
		}
		return ""
	case *apiv1.UpdateJobRequest_Hold:
		switch {
		case Ended(j.state):
			return "JOB_ENDED"
		case j.state != jobPending:
			return "JOB_NOT_PENDING"
		case c.Hold && operator:
			j.held = 2
		case c.Hold:
			j.held = max(j.held, 1)
		case j.held == 2 && !operator:
			return "PERMISSION_DENIED"
		default:
			if j.held != 0 || j.notBefore != 0 {
				j.held, j.notBefore, j.failures = 0, 0, 0
			}
		}
		return ""
	}
	panic("the twin does not know this change")
}

// owners recomputes who has what on a node, besides one attempt.
func (w *twin) owners(node uint32, but *twinAttempt) (cpus, gpus, memory uint64, exclusive, any bool) {
	for _, j := range w.jobs {
		for _, a := range j.attempts {
			if s, has := a.shares[node]; has && a != but {
				cpus, gpus, memory, any = cpus|s.cpus, gpus|s.gpus, memory+s.memory, true
				exclusive = exclusive || j.spec.Resources.GetExclusive() || j.partition == "alone"
			}
		}
	}
	return cpus, gpus, memory, exclusive, any
}

func (w *twin) place(p *logv1.Place) string {
	j := w.jobs[p.JobId]
	if j == nil {
		return "JOB_UNKNOWN"
	}
	a := j.last()
	replacing := a != nil && p.Attempt == a.number && a.state == attemptPreparing
	switch {
	case replacing && p.PlacementNumber != a.placement+1:
		return "PLACEMENT_STALE"
	case replacing && slices.ContainsFunc(p.Unprepared, func(n uint32) bool {
		return !slices.Contains(a.nodes, n) || slices.Contains(p.Placement.Groups[0].Nodes, n)
	}):
		return "PLACEMENT_INVALID"
	case replacing:
	case j.state != jobPending:
		return "JOB_NOT_PENDING"
	case j.held != 0:
		return "JOB_HELD"
	case int(p.Attempt) != len(j.attempts)+1 || p.PlacementNumber != 1:
		return "ATTEMPT_STALE"
	case len(p.Unprepared) > 0:
		return "PLACEMENT_INVALID"
	}
	if !replacing {
		a = &twinAttempt{number: p.Attempt, state: attemptPreparing, shares: make(map[uint32]twinShare)}
	}
	g := p.Placement.Groups[0]
	for i, number := range g.Nodes {
		if reason := w.checkNode(p, j, a, g, number, p.Placement.Epochs[i]); reason != "" {
			return reason
		}
	}
	for _, n := range p.Unprepared {
		w.unprepared(a, n)
	}
	for number, s := range a.shares {
		if !slices.Contains(g.Nodes, number) {
			s.leftover = true
			a.shares[number] = s
		}
	}
	a.placement, a.nodes = p.PlacementNumber, g.Nodes
	for i, number := range g.Nodes {
		a.shares[number] = twinShare{cpus: g.CpuMask[0], gpus: g.GpuMask[0], memory: g.MemoryMb, ib: ibOfGroup(g), epoch: p.Placement.Epochs[i], placement: a.placement}
	}
	a.step = &twinStep{nodes: g.Nodes, unreported: make(map[uint32]bool)}
	if j.spec.Kind == apiv1.JobKind_JOB_KIND_BATCH {
		a.step.nodes = g.Nodes[:1]
	}
	for _, n := range a.step.nodes {
		a.step.unreported[n] = true
	}
	j.state, j.notBefore, j.partition = jobConfiguring, 0, p.Partition
	if !replacing {
		j.attempts = append(j.attempts, a)
	}
	return ""
}

func (w *twin) checkNode(p *logv1.Place, j *twinJob, a *twinAttempt, g *apiv1.NodeGroup, number, epoch uint32) string {
	n := w.nodes[number]
	cpus, gpus, memory, exclusive, any := w.owners(number, a)
	switch {
	case n == nil:
		return "NODE_UNKNOWN"
	case !n.up:
		return "NODE_DOWN"
	case n.drain && !slices.Contains(a.nodes, number):
		return "NODE_DRAINED"
	case slices.Contains(a.unprepared, number):
		return "NODE_UNPREPARED"
	case n.epoch != epoch:
		return "NODE_EPOCH"
	case p.Partition == "alone" && n.spec.Name != "n1" && n.spec.Name != "n2":
		return "NODE_NOT_IN_PARTITION"
	case n.out()&g.GpuMask[0] != 0:
		return "GPUS_UNUSABLE"
	case a.shares[number].leftover:
		return "NODE_UNACCOUNTED"
	case cpus&g.CpuMask[0] != 0:
		return "CPUS_TAKEN"
	case gpus&g.GpuMask[0] != 0:
		return "GPUS_TAKEN"
	case w.ibOf(number, a)&ibOfGroup(g) != 0:
		return "GRES_TAKEN"
	case memory+g.MemoryMb > n.spec.MemoryMb:
		return "MEMORY_TAKEN"
	case any && (j.spec.Resources.GetExclusive() || p.Partition == "alone"):
		return "NODE_SHARED"
	case exclusive:
		return "NODE_EXCLUSIVE"
	}
	return ""
}

// fenced returns the attempt whose present placement a fence names.
func (w *twin) fenced(job uint32, f *apiv1.Fence) (*twinJob, *twinAttempt) {
	j := w.jobs[job]
	if j == nil || f.Attempt == 0 || int(f.Attempt) > len(j.attempts) {
		return nil, nil
	}
	a := j.attempts[f.Attempt-1]
	if f.Incarnation != 1 || f.Placement != a.placement {
		return nil, nil
	}
	return j, a
}

func (w *twin) start(c *logv1.StartAttempt) string {
	j, a := w.fenced(c.JobId, c.Fence)
	switch {
	case a == nil:
		return "FENCE_STALE"
	case a.state != attemptPreparing:
		return "ATTEMPT_NOT_PREPARING"
	case len(c.Prepared) != len(a.nodes):
		return "NOT_PREPARED"
	}
	for _, p := range c.Prepared {
		if !slices.Contains(a.nodes, p.Node) || slices.Contains(a.unprepared, p.Node) {
			return "NOT_PREPARED"
		}
	}
	a.state, a.started, a.step.running = attemptRunning, true, true
	j.state, j.failures = jobRunning, 0
	for _, n := range a.nodes {
		w.nodes[n].failures = 0
	}
	return ""
}

func (w *twin) endAttempt(c *logv1.EndAttempt) string {
	j, a := w.fenced(c.JobId, c.Fence)
	switch {
	case a == nil:
		return "FENCE_STALE"
	case !a.live():
		return "ATTEMPT_ENDED"
	}
	w.end(j, c.Failure, c.FaultNode, false, false)
	return ""
}

// end ends the last attempt of a job.
func (w *twin) end(j *twinJob, class apiv1.FailureClass, fault uint32, users, hold bool) {
	a := j.last()
	a.state, a.class = attemptEnding, class
	requeue := class == classRequeued || class == classLaunch && !users || (class == classHardware || class == classPreemption) && j.spec.Requeue
	final := map[apiv1.FailureClass]apiv1.JobState{
		0: 4, classHardware: 8, classLaunch: 5, classPreemption: 11, 4: 5, 5: 9, 6: 7, 7: 5, 8: 6,
	}
	a.final = final[class]
	if requeue {
		a.final = jobPending
		if hold {
			j.held = 1
		}
	}
	if class == classLaunch && !users {
		j.failures++
		if j.failures >= 3 {
			j.held, j.notBefore = 2, 0
		} else {
			j.notBefore = w.ms + 1000<<(j.failures-1)
		}
		if w.nodes[fault] != nil {
			w.unprepared(a, fault)
		}
	}
	for _, x := range a.extras {
		x.ending = x.ending || !x.ended
	}
	if !a.step.ended {
		a.step.ending = true
		if a.step.final == 0 {
			a.step.final = apiv1.StepState_STEP_STATE_CANCELLED
		}
	}
}

// unprepared charges a node that could not prepare an attempt, once.
func (w *twin) unprepared(a *twinAttempt, node uint32) {
	if slices.Contains(a.unprepared, node) {
		return
	}
	a.unprepared = append(a.unprepared, node)
	n := w.nodes[node]
	n.failures++
	n.drain = n.drain || n.failures >= 3
}

// account gives a node's devices back.
func (w *twin) account(j *twinJob, a *twinAttempt, node uint32) {
	delete(a.shares, node)
	for _, x := range a.extras {
		x.ended = x.ended || x.node == node
	}
	w.leave(j, a, node)
	if len(a.shares) > 0 || a.state != attemptEnding {
		return
	}
	a.state, j.state = attemptEnded, a.final
	if j.state == jobPending && a.started {
		j.restarts++
	}
}

// leave takes a node out of the first step; the last one ends it, and with it a running attempt.
func (w *twin) leave(j *twinJob, a *twinAttempt, node uint32) {
	s := a.step
	if s.ended || !s.unreported[node] {
		return
	}
	delete(s.unreported, node)
	if len(s.unreported) > 0 {
		return
	}
	s.ended = true
	if a.state != attemptRunning {
		return
	}
	class := apiv1.FailureClass_FAILURE_CLASS_UNSPECIFIED
	switch {
	case s.final == apiv1.StepState_STEP_STATE_TIMEOUT:
		class = apiv1.FailureClass_FAILURE_CLASS_TIME_LIMIT
	case s.final == apiv1.StepState_STEP_STATE_NODE_FAIL:
		class = classHardware
	case s.memory:
		class = apiv1.FailureClass_FAILURE_CLASS_OUT_OF_MEMORY
	case s.code != 0 || s.signal != 0 || s.launch:
		class = apiv1.FailureClass_FAILURE_CLASS_USER_CODE
	}
	w.end(j, class, 0, false, false)
	if j.spec.NoKill && class == classHardware && j.spec.Kind == apiv1.JobKind_JOB_KIND_RUN {
		a.final = apiv1.JobState_JOB_STATE_NODE_FAIL // it survived to its end
	}
}

func (w *twin) report(r *logv1.ReportTasks) {
	n := w.nodes[r.Node]
	if n == nil || n.epoch < r.Epoch || n.boot != r.Instance.BootId || n.nonce != r.Instance.Nonce {
		return
	}
	for _, line := range r.Reports {
		j, a := w.fenced(line.JobId, line.Fence)
		switch e := line.Event.(type) {
		case *logv1.TaskReport_AttemptReaped:
			if a == nil {
				w.leftover(r.Node, line)
			} else if s, has := a.shares[r.Node]; has && !s.leftover {
				if a.live() {
					w.lost(j, a, r.Node)
				}
				w.account(j, a, r.Node)
			}
		case *logv1.TaskReport_PrepareFailed:
			if a != nil && a.state == attemptRunning && e.PrepareFailed.StepId != nil {
				w.stepUnprepared(a, r.Node, e.PrepareFailed)
			}
			if a != nil && a.state == attemptPreparing && slices.Contains(a.nodes, r.Node) {
				if e.PrepareFailed.UsersFault {
					w.end(j, classLaunch, r.Node, true, false)
				} else {
					w.unprepared(a, r.Node)
				}
			}
		case *logv1.TaskReport_StepEnded:
			if a != nil {
				w.stepEnded(j, a, r.Node, e.StepEnded)
			}
		}
	}
}

func (w *twin) leftover(node uint32, line *logv1.TaskReport) {
	j := w.jobs[line.JobId]
	if j == nil || line.Fence.Incarnation != 1 || line.Fence.Attempt == 0 || int(line.Fence.Attempt) > len(j.attempts) {
		return
	}
	a := j.attempts[line.Fence.Attempt-1]
	if s, has := a.shares[node]; has && s.leftover && s.placement == line.Fence.Placement {
		w.account(j, a, node)
	}
}

func (w *twin) stepEnded(j *twinJob, a *twinAttempt, node uint32, e *logv1.StepEnded) {
	s := a.step
	for _, x := range a.extras {
		if x.id == e.StepId && x.node == node && (x.running || x.ending) {
			x.ended = true
		}
	}
	if first, _ := firstStepID(j.spec.Kind); first != e.StepId || s.ended || !s.unreported[node] || !s.running && !s.ending {
		return
	}
	for _, x := range e.Exits {
		s.code, s.signal = max(s.code, x.Code), max(s.signal, x.Signal)
		s.launch, s.memory = s.launch || x.LaunchError != "", s.memory || x.OutOfMemory
	}
	if e.TimeLimit && s.final == 0 {
		s.final = apiv1.StepState_STEP_STATE_TIMEOUT
	}
	if e.Deadline && s.final == 0 {
		s.final = apiv1.StepState_STEP_STATE_NODE_FAIL
	}
	s.ending = s.ending || len(s.unreported) > 1 && (e.Deadline || s.launch)
	w.leave(j, a, node)
}

func (w *twin) join(c *logv1.JoinNode) string {
	for _, n := range w.nodes {
		if n.spec.Name != c.Spec.Name {
			continue
		}
		if n.boot == c.Instance.BootId && n.nonce == c.Instance.Nonce {
			if !n.up {
				n.up, n.silent = true, false
				w.judge(n)
			}
			return ""
		}
		if !c.TakesOver {
			return "NODE_NAME_TAKEN"
		}
		reboot := n.boot != c.Instance.BootId
		n.epoch++
		n.up, n.silent, n.boot, n.nonce = true, false, c.Instance.BootId, c.Instance.Nonce
		gone := uint32(0)
		if reboot {
			gone = n.epoch
		}
		w.endOn(n.number, gone)
		if reboot {
			w.accountAll(n.number, func(*twinJob, twinShare) bool { return true })
		}
		w.judge(n)
		return ""
	}
	w.nodes[w.nextNode] = &twinNode{number: w.nextNode, epoch: 1, spec: c.Spec, boot: c.Instance.BootId, nonce: c.Instance.Nonce, up: true}
	w.nextNode++
	return ""
}

// accountAll accounts for everything on a node that does not live there any more.
func (w *twin) accountAll(node uint32, which func(*twinJob, twinShare) bool) {
	for _, id := range slices.Sorted(maps.Keys(w.jobs)) {
		j := w.jobs[id]
		for _, a := range j.attempts {
			if s, has := a.shares[node]; has && (s.leftover || !a.live()) && which(j, s) {
				w.account(j, a, node)
			}
		}
	}
}

// endOn ends what lives on a node. Of what was placed up to an epoch nothing is left there.
func (w *twin) endOn(node, gone uint32) {
	for _, j := range w.jobs {
		a := j.last()
		if a == nil || !a.live() {
			continue
		}
		if s, has := a.shares[node]; !has || s.leftover {
			continue
		} else if s.epoch > gone {
			w.end(j, classHardware, node, false, false)
		} else if w.lost(j, a, node); a.state == attemptRunning {
			w.account(j, a, node)
		}
	}
}

func (w *twin) lose(c *logv1.LoseNode) string {
	n := w.nodes[c.Node]
	switch {
	case n == nil:
		return "NODE_UNKNOWN"
	case n.epoch != c.Epoch:
		return "NODE_EPOCH"
	case !n.up:
		return "NODE_DOWN"
	}
	n.up, n.silent = false, true
	n.epoch++
	for _, j := range w.jobs {
		switch a := j.last(); {
		case a == nil || !a.live() || !a.has(n.number):
		case j.spec.AutomaticRecovery:
			w.end(j, classHardware, n.number, false, false)
		case a.state == attemptPreparing:
			w.end(j, classLaunch, 0, false, false)
		}
	}
	return ""
}

func (w *twin) fence(c *logv1.FenceNode) string {
	n := w.nodes[c.Node]
	switch {
	case n == nil:
		return "NODE_UNKNOWN"
	case c.JobId != 0:
		return w.fenceAttempt(c)
	case c.Epoch == 0 || c.Epoch > n.epoch:
		return "NODE_EPOCH"
	case c.Epoch == n.epoch && n.up:
		return "NODE_NOT_LOST"
	}
	if c.PoweredOff && !n.up {
		n.silent = false
		w.endOn(n.number, c.Epoch)
	}
	w.accountAll(c.Node, func(j *twinJob, s twinShare) bool {
		return s.epoch <= c.Epoch && (c.PoweredOff || j.spec.AutomaticRecovery)
	})
	return ""
}

func (w *twin) fenceAttempt(c *logv1.FenceNode) string {
	j := w.jobs[c.JobId]
	if j == nil || c.Attempt == 0 || int(c.Attempt) > len(j.attempts) {
		return "ATTEMPT_UNKNOWN"
	}
	a := j.attempts[c.Attempt-1]
	s, has := a.shares[c.Node]
	switch {
	case !has:
		return ""
	case c.PoweredOff || !j.spec.AutomaticRecovery:
		return "ATTEMPT_GOES_ON"
	case a.live() && !s.leftover:
		return "ATTEMPT_LIVE"
	case s.epoch > c.Epoch:
		return "NODE_EPOCH"
	}
	w.account(j, a, c.Node)
	return ""
}

func (w *twin) updateNodes(r *apiv1.UpdateNodesRequest) string {
	answer := ""
	for _, name := range r.Names {
		var n *twinNode
		for _, other := range w.nodes {
			if other.spec.Name == name {
				n = other
			}
		}
		if n == nil {
			answer += "NODE_UNKNOWN,"
			continue
		}
		switch r.Change.(type) {
		case *apiv1.UpdateNodesRequest_Drain:
			n.drain, n.byHealth, n.withheld = true, false, false
		case *apiv1.UpdateNodesRequest_Resume:
			w.resume(n)
		case *apiv1.UpdateNodesRequest_Down, *apiv1.UpdateNodesRequest_Fenced:
			n.drain, n.byHealth, n.withheld = true, false, false
			before := n.epoch
			if n.up {
				n.up = false
				n.epoch++
			}
			n.silent = false
			_, fenced := r.Change.(*apiv1.UpdateNodesRequest_Fenced)
			if !fenced {
				before = 0
			}
			w.endOn(n.number, before)
			if fenced {
				w.accountAll(n.number, func(*twinJob, twinShare) bool { return true })
			}
		}
		answer += ","
	}
	return answer
}
