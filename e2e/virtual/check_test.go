package virtual

import (
	"fmt"
	"hash/fnv"
	"slices"

	"github.com/muster-hpc/muster/fsm"
	"github.com/muster-hpc/muster/node"
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

// checkEvery is how many entries there are between two looks at everything.
const checkEvery = 200

type attemptKey struct{ job, attempt uint32 }

type gangKey struct{ job, attempt, placement, step uint32 }

type processKey struct {
	job, attempt, placement, step uint32
	machine                       int
}

// stepName names what a request for a step makes.
type stepName struct {
	job  uint32
	name string
}

// facts are what the checks know without asking the state machine: what ran, what was asked for, what was acknowledged.
type facts struct {
	// canon is the newest view of any controller, and what follows from the changes up to it.
	canon     *fsm.View
	canonAt   uint64
	digests   map[uint64]uint64
	entries   map[uint64]uint64 // hash of each committed entry
	jobNamed  map[string]uint32
	stepNamed map[stepName][2]uint32 // attempt and id + 1
	last      map[uint32]*apiv1.Job
	attempts  map[uint32]*apiv1.Attempt // the last of each job
	requeued  map[attemptKey]bool

	plans      map[string]*plan
	names      int
	acked      map[string]uint32
	ackedSteps map[stepName]uint32
	// requeues counts the distinct requests to requeue a job that have had no effect yet; cancelled has the attempt at which a job's cancellation was acknowledged.
	requeues  map[uint32]int
	everAsked map[uint32]bool // to requeue it
	cancelled map[uint32]uint32

	admittedOn map[gangKey]map[int]bool // step 0 here: the whole attempt
	preparedOn map[gangKey]map[int]bool
	executedOn map[processKey]bool
	live       map[uint32][]*supervisor
	truth      map[processKey]*apiv1.TaskExit
	execFailed map[attemptKey]bool
	timedOut   map[attemptKey]bool
	// jobs, starts, faults count what happened, so that a test can see that enough did.
	starts, acks, faults int
}

func newFacts() facts {
	return facts{
		digests: map[uint64]uint64{}, entries: map[uint64]uint64{}, jobNamed: map[string]uint32{}, stepNamed: map[stepName][2]uint32{},
		last: map[uint32]*apiv1.Job{}, attempts: map[uint32]*apiv1.Attempt{}, requeued: map[attemptKey]bool{}, plans: map[string]*plan{},
		acked: map[string]uint32{}, ackedSteps: map[stepName]uint32{}, requeues: map[uint32]int{}, everAsked: map[uint32]bool{}, cancelled: map[uint32]uint32{},
		admittedOn: map[gangKey]map[int]bool{}, preparedOn: map[gangKey]map[int]bool{}, executedOn: map[processKey]bool{},
		live: map[uint32][]*supervisor{}, truth: map[processKey]*apiv1.TaskExit{}, execFailed: map[attemptKey]bool{}, timedOut: map[attemptKey]bool{},
	}
}

func compareRevisions(a, b *apiv1.Revision) int { return fsm.CompareRevisions(a, b) }

// fail records the first violation; the simulation stops there.
func (s *sim) fail(format string, args ...any) {
	if s.failure == nil {
		s.failure = fmt.Errorf(format, args...)
		s.trace("FAILURE " + s.failure.Error())
	}
}

func (s *sim) fails() bool { return s.failure != nil }

// committed checks the model of the log: what is committed at an index stays.
func (s *sim) committed(index uint64, e entry) {
	h := fnv.New64a()
	fmt.Fprint(h, e.term)
	h.Write(e.data)
	sum := h.Sum64()
	if known, ok := s.entries[index]; ok && known != sum {
		s.fail("the model of the log commits two entries at index %d", index)
	}
	s.entries[index] = sum
}

// checkDigest compares a controller's state with the others' at the same index (G8).
func (s *sim) checkDigest(c *controller, index uint64, v *fsm.View) {
	digest := v.Digest()
	if known, ok := s.digests[index]; !ok {
		s.digests[index] = digest
		s.trace("entry", index, digest)
	} else if known != digest {
		s.fail("G8: at index %d controller %d has digest %016x, another %016x", index, c.id, digest, known)
		return
	}
	if s.canon == nil || index > s.canonAt {
		s.observe(index, v)
	}
}

func (s *sim) checkInvariants(v *fsm.View, when string) {
	if !v.Bootstrapped() {
		return
	}
	if err := fsm.CheckInvariants(v); err != nil {
		s.fail("the state machine's invariants, %s: %v", when, err)
	}
}

// observe takes in the changes of the newest view.
func (s *sim) observe(index uint64, v *fsm.View) {
	var before *apiv1.Revision
	if s.canon != nil {
		before = s.canon.Revision()
	}
	s.canon, s.canonAt = v, index
	changes, ok := v.ChangedSince(before)
	if !ok {
		for j := range v.Jobs(0) {
			s.observeJob(v, j.Id, false)
		}
		return
	}
	for c := range changes {
		switch c.Kind {
		case fsm.ChangeJob:
			s.observeJob(v, c.Job, c.Removed)
		case fsm.ChangeAttempt:
			s.observeAttempt(v.Attempt(c.Job, c.Attempt))
		case fsm.ChangeStep:
			s.observeStep(v.Step(c.Job, c.Attempt, c.Step))
		}
	}
	if index%checkEvery == 0 {
		s.checkInvariants(v, fmt.Sprintf("at index %d", index))
	}
}

func (s *sim) observeJob(v *fsm.View, id uint32, removed bool) {
	if removed {
		if j := s.last[id]; j == nil || !fsm.Ended(j.Status.State) {
			s.fail("G1: job %d was removed and had not ended", id)
		}
		return
	}
	j := v.Job(id)
	if j == nil {
		return
	}
	if other, ok := s.jobNamed[j.Spec.Name]; ok && other != id {
		s.fail("G1: one request (%s) made jobs %d and %d", j.Spec.Name, other, id)
	}
	s.jobNamed[j.Spec.Name] = id
	s.last[id] = j
}

func (s *sim) observeAttempt(a *apiv1.Attempt) {
	if a == nil {
		return
	}
	if old := s.attempts[a.JobId]; old == nil || old.Number <= a.Number {
		s.attempts[a.JobId] = a
	}
	if a.State == apiv1.AttemptState_ATTEMPT_STATE_ENDED {
		s.checkAccounted(a)
	}
	if a.Failure == apiv1.FailureClass_FAILURE_CLASS_REQUEUED && !s.requeued[attemptKey{a.JobId, a.Number}] {
		s.requeued[attemptKey{a.JobId, a.Number}] = true
		if s.requeues[a.JobId]--; s.requeues[a.JobId] < 0 {
			s.fail("G1: job %d was requeued more often than was asked for", a.JobId)
		}
	}
}

// checkAccounted checks that nothing of an attempt is left where it is accounted for. A step that stops itself and never had a lease
// can't run, and may wait on a node that was fenced.
func (s *sim) checkAccounted(a *apiv1.Attempt) {
	for _, m := range s.machines {
		for _, p := range m.supervisors {
			if p.job == a.JobId && p.fence.Attempt == a.Number && (p.started || p.deadline > 0 || !p.step.order.StopsItself) {
				s.fail("G2: attempt %d of job %d is accounted for everywhere, and its step %d is still on node %d (started %t)", a.Number, a.JobId,
					p.step.id, m.idx, p.started)
			}
		}
	}
}

func (s *sim) observeStep(step *apiv1.Step) {
	if step == nil || step.Id == fsm.BatchStep || s.last[step.JobId].GetSpec().GetKind() != apiv1.JobKind_JOB_KIND_BATCH {
		return
	}
	key, is := stepName{step.JobId, step.Spec.Name}, [2]uint32{step.Attempt, step.Id + 1}
	if other, ok := s.stepNamed[key]; ok && other != is {
		s.fail("G1: one request (%s) made steps %v and %v of job %d", step.Spec.Name, other, is, step.JobId)
	}
	s.stepNamed[key] = is
}

// asked notes a new request.
func (s *sim) asked(r *request) {
	if r.cmd.GetUpdateJobs().GetRequest().GetRequeue() {
		s.requeues[r.job]++
		s.everAsked[r.job] = true
		delete(s.cancelled, r.job)
	}
}

// acknowledged checks that what was acknowledged is there, once.
func (s *sim) acknowledged(r *request, result *logv1.Result) {
	s.acks++
	if result.Refusal != nil {
		switch op := r.cmd.Op.(type) {
		case *logv1.Command_SubmitJobs:
			s.fail("a submission was refused: %v", result.Refusal)
		case *logv1.Command_CreateStep, *logv1.Command_CancelJobs, *logv1.Command_UpdateJobs:
		default:
			s.fail("%T was refused: %v", op, result.Refusal)
		}
		return
	}
	switch r.cmd.Op.(type) {
	case *logv1.Command_SubmitJobs:
		id := result.Submitted[0].JobId
		if id == 0 {
			s.fail("submission %s was refused: %v", r.name, result.Submitted[0].Refusal)
		} else if s.jobNamed[r.name] != id {
			s.fail("G1: submission %s was acknowledged as job %d, and is job %d", r.name, id, s.jobNamed[r.name])
		}
		s.acked[r.name] = id
	case *logv1.Command_CreateStep:
		key := stepName{r.job, r.name}
		if s.stepNamed[key][1] != result.StepId+1 {
			s.fail("G1: step %s was acknowledged as step %d of job %d, and is %v", r.name, result.StepId, r.job, s.stepNamed[key])
		}
		s.ackedSteps[key] = result.StepId
	case *logv1.Command_CancelJobs:
		if slices.Contains(result.JobIds, r.job) {
			if !s.everAsked[r.job] {
				s.cancelled[r.job] = s.attempts[r.job].GetNumber()
			}
		}
	}
}

// sameAnswer checks that a repeated request has the answer that it had before.
func (s *sim) sameAnswer(r *request, result *logv1.Result) {
	if r.first == nil {
		return
	}
	if len(result.Submitted) > 0 && result.Submitted[0].JobId != r.first.Submitted[0].JobId {
		s.fail("G1: one request was answered with jobs %d and %d", r.first.Submitted[0].JobId, result.Submitted[0].JobId)
	}
	if r.cmd.GetCreateStep() != nil && result.StepId != r.first.StepId {
		s.fail("G1: one request was answered with steps %d and %d", r.first.StepId, result.StepId)
	}
}

// nameIn looks up whether what a request makes is there.
func (s *sim) nameIn(v *fsm.View, r *request) bool {
	if r.cmd.GetCreateStep() != nil {
		for step := range v.Steps(r.job) {
			if step.Spec.Name == r.name {
				return true
			}
		}
		return false
	}
	for j := range v.Jobs(0) {
		if j.Spec.Name == r.name {
			return true
		}
	}
	return s.jobNamed[r.name] != 0 // it ended and was removed
}

// admitted notes that a node knows of an attempt.
func (s *sim) admitted(m *machine, a node.Action) {
	key := gangKey{a.Job, a.Fence.Attempt, a.Fence.Placement, 0}
	if s.admittedOn[key] == nil {
		s.admittedOn[key] = map[int]bool{}
	}
	s.admittedOn[key][m.idx] = true
}

// prepared notes that a node is ready to start a step.
func (s *sim) prepared(p *supervisor) {
	key := gangKey{p.job, p.fence.Attempt, p.fence.Placement, p.step.id}
	if s.preparedOn[key] == nil {
		s.preparedOn[key] = map[int]bool{}
	}
	s.preparedOn[key][p.m.idx] = true
}

func (s *sim) machineOf(number uint32) int {
	name := s.canon.Node(number).Spec.Name
	return slices.IndexFunc(s.machines, func(m *machine) bool { return m.name == name })
}

// executed checks what must hold when a user's process starts: on the node, not in the state.
func (s *sim) executed(p *supervisor) {
	s.starts++
	s.trace("exec", uint64(p.job), uint64(p.fence.Attempt), uint64(p.fence.Placement), uint64(p.step.id), uint64(p.m.idx))
	if s.executedOn[p.key()] {
		s.fail("G1: step %d of job %d, attempt %d was executed twice on node %d", p.step.id, p.job, p.fence.Attempt, p.m.idx)
	}
	s.executedOn[p.key()] = true
	for _, o := range s.live[p.job] {
		if o.fence.Attempt != p.fence.Attempt || o.fence.Placement != p.fence.Placement {
			s.fail("G2: job %d starts in attempt %d on node %d while attempt %d runs on node %d", p.job, p.fence.Attempt, p.m.idx,
				o.fence.Attempt, o.m.idx)
		}
	}
	for _, o := range p.m.supervisors {
		if o.running() && o != p && o.job != p.job &&
			(overlap(o.step.order.CpuMask, p.step.order.CpuMask) || overlap(o.step.order.GpuMask, p.step.order.GpuMask)) {
			s.fail("G2: jobs %d and %d run on the same devices of node %d", o.job, p.job, p.m.idx)
		}
	}
	s.live[p.job] = append(s.live[p.job], p)
	s.checkGang(p)
}

func overlap(a, b []uint64) bool {
	for i := range min(len(a), len(b)) {
		if a[i]&b[i] != 0 {
			return true
		}
	}
	return false
}

// checkGang checks that every node of the gang was prepared before the first process starts (G5).
func (s *sim) checkGang(p *supervisor) {
	step, a := s.canon.Step(p.job, p.fence.Attempt, p.step.id), s.canon.Attempt(p.job, p.fence.Attempt)
	if step == nil || a == nil {
		s.fail("G5: a process of job %d runs of which the state knows nothing", p.job)
		return
	}
	ready := s.preparedOn[gangKey{p.job, p.fence.Attempt, p.fence.Placement, p.step.id}]
	for _, g := range step.Placement.Groups {
		for _, n := range g.Nodes {
			if !ready[s.machineOf(n)] {
				s.fail("G5: step %d of job %d starts on node %d and node %d has not prepared it", p.step.id, p.job, p.m.idx, s.machineOf(n))
			}
		}
	}
	known := s.admittedOn[gangKey{p.job, p.fence.Attempt, p.fence.Placement, 0}]
	for _, g := range a.Placement.Groups {
		for _, n := range g.Nodes {
			if !known[s.machineOf(n)] {
				s.fail("G5: job %d starts on node %d and node %d knows nothing of it", p.job, p.m.idx, s.machineOf(n))
			}
		}
	}
}

func (s *sim) processGone(p *supervisor) {
	s.live[p.job] = slices.DeleteFunc(s.live[p.job], func(o *supervisor) bool { return o == p })
}

// checkReaped checks that a node that says so has nothing left of an attempt.
func (s *sim) checkReaped(m *machine, a *attempt) {
	for _, p := range m.supervisors {
		if p.job == a.job && node.CompareFences(p.fence, a.fence) == 0 && p.running() {
			s.fail("G2: node %d says that nothing is left of job %d, attempt %d, and a process runs", m.idx, a.job, a.fence.Attempt)
		}
	}
}
