package fsm

import (
	"slices"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
	"github.com/muster-hpc/muster/proto/notation"

	"github.com/muster-hpc/muster/fsm/shape"
	"github.com/muster-hpc/muster/fsm/state"
)

// maxSteps bounds the steps of one attempt, as Slurm does.
const maxSteps = 40_000

// createStep creates a step within the job's current attempt.
func (m *Machine) createStep(c *logv1.CreateStep) *logv1.Result {
	job, refusal := m.ownedJob(c.JobId)
	if refusal == nil {
		refusal = checkStepSpec(c.Spec)
	}
	if operator := IsOperator(&m.s.View, m.cmd.Principal); refusal == nil && m.s.Level() >= levelLaunch {
		if refusal = checkPart(c.Spec, operator); refusal == nil {
			refusal = checkParts(c.Spec, operator)
		}
		if refusal == nil {
			refusal = checkWarning(c.Spec.WarnSignal)
		}
	}
	if refusal != nil {
		return refused(refusal)
	}
	a := m.s.Attempt(job.Id, job.Status.Attempt)
	if refusal := checkStepTime(c, job, a); refusal != nil {
		return refused(refusal)
	}
	last := m.s.LastStep(job.Id, a.Number)
	id := uint32(0)
	if last != nil {
		id = last.Id + 1
	}
	if id >= maxSteps {
		return refused(refuse("STEPS_TOO_MANY", jobSubject(job.Id), "job %d has had %d steps; no more are possible", job.Id, maxSteps))
	}
	layout, refusal := m.layStep(c.Spec, a)
	if refusal != nil {
		return refused(refusal)
	}
	if refusal := m.storeBlobs(c.Blobs); refusal != nil {
		return refused(refusal)
	}
	if refusal := m.checkBlob(c.Spec.EnvironmentBlob, "environment", MaxEnvironmentBytes); refusal != nil {
		return refused(refusal)
	}
	step := &apiv1.Step{
		JobId: job.Id, Id: id, Attempt: a.Number, Revision: m.rev, Spec: c.Spec, State: apiv1.StepState_STEP_STATE_PREPARING,
		Placement: layout.Placement, Unreported: shape.Nodes(layout.Placement), CreateTime: m.now(), NumTasks: layout.Tasks,
		PartRanks: layout.PartRanks,
	}
	if refusal := checkPrograms(step.Spec.TaskOptions, uint64(step.NumTasks)); refusal != nil {
		return refused(refusal)
	}
	var names []string
	for _, n := range step.Unreported {
		names = append(names, m.s.Node(n).Spec.Name)
	}
	step.NodeList = notation.Fold(names)
	m.holdBlobs(c.Spec.EnvironmentBlob)
	m.s.PutStep(step)
	m.touchPlacement(layout.Placement)
	return &logv1.Result{StepId: id, Attempt: a.Number}
}

// checkStepTime checks that the job can take a step now, and that the caller belongs to what runs.
func checkStepTime(c *logv1.CreateStep, job *apiv1.Job, a *apiv1.Attempt) *apiv1.ErrorDetail {
	switch {
	case state.Ended(job.Status.State):
		return refuse("JOB_ENDED", jobSubject(job.Id), "job %d has ended already", job.Id)
	case a == nil || a.State != attemptRunning:
		return refuse("JOB_NOT_RUNNING", jobSubject(job.Id), "job %d does not run; steps can be created while it runs", job.Id)
	case c.Attempt != 0 && c.Attempt != a.Number:
		return refuse("ATTEMPT_STALE", jobSubject(job.Id),
			"this process belongs to attempt %d of job %d, which has ended; attempt %d runs now", c.Attempt, job.Id, a.Number)
	default:
		return nil
	}
}

func checkStepSpec(spec *apiv1.StepSpec) *apiv1.ErrorDetail {
	if len(spec.GetArgs()) == 0 {
		return refuse("COMMAND_MISSING", "args", "there is no command to run")
	}
	for _, f := range []struct {
		name, value string
		limit       int
	}{
		{"name", spec.Name, maxNameBytes}, {"submit_host", spec.SubmitHost, maxNameBytes}, {"work_dir", spec.WorkDir, maxPathBytes},
		{"stdin", spec.StdinPath, maxPathBytes}, {"stdout", spec.StdoutPath, maxPathBytes}, {"stderr", spec.StderrPath, maxPathBytes},
	} {
		if refusal := checkText(f.name, f.value, f.limit); refusal != nil {
			return refusal
		}
	}
	if spec.WorkDir == "" || spec.WorkDir[0] != '/' {
		return refuse("WORK_DIR_INVALID", "work_dir", "the working directory %q is not an absolute path", spec.WorkDir)
	}
	if refusal := checkArgs(spec.Args); refusal != nil {
		return refusal
	}
	return checkRequest(spec.Resources)
}

// startStep starts a prepared step everywhere.
func (m *Machine) startStep(c *logv1.StartStep) *logv1.Result {
	step, refusal := m.liveStep(c.JobId, c.StepId, c.Fence)
	if refusal != nil {
		return refused(refusal)
	}
	subject := stepSubject(c.JobId, c.StepId)
	switch {
	case step.State != apiv1.StepState_STEP_STATE_PREPARING || step.Ending:
		return refused(refuse("STEP_NOT_PREPARING", subject, "%s is not preparing any more", subject))
	case m.s.Attempt(c.JobId, step.Attempt).State != attemptRunning:
		return refused(refuse("JOB_NOT_RUNNING", subject, "job %d does not run; its first step starts with it", c.JobId))
	}
	if refusal := m.checkPrepared(subject, step.Placement, c.Prepared); refusal != nil {
		return refused(refusal)
	}
	m.runStep(step, c.Prepared)
	if m.s.Level() >= levelLaunch {
		m.forgiveNodes(step.Unreported)
	}
	m.touchPlacement(step.Placement)
	return &logv1.Result{StepId: step.Id, Attempt: step.Attempt}
}

// liveStep returns a step of the attempt that a fence names, if it has not ended.
func (m *Machine) liveStep(job, id uint32, fence *apiv1.Fence) (*apiv1.Step, *apiv1.ErrorDetail) {
	a := m.attemptOf(job, fence)
	if a == nil {
		return nil, staleFence(job, fence)
	}
	step := m.s.Step(job, a.Number, id)
	if step == nil {
		return nil, refuse("STEP_UNKNOWN", stepSubject(job, id), "attempt %d of job %d has no %s", a.Number, job, stepSubject(job, id))
	}
	if state.StepEnded(step.State) {
		return nil, refuse("STEP_ENDED", stepSubject(job, id), "%s has ended already", stepSubject(job, id))
	}
	return step, nil
}

func (m *Machine) runStep(step *apiv1.Step, prepared []*apiv1.PreparedNode) {
	next := state.CopyStep(step)
	next.State, next.StartTime, next.Prepared, next.Revision = apiv1.StepState_STEP_STATE_RUNNING, m.now(), prepared, m.rev
	m.s.PutStep(next)
}

// endStep ends a step for a reason that the leader found.
func (m *Machine) endStep(c *logv1.EndStep) *logv1.Result {
	step, refusal := m.liveStep(c.JobId, c.StepId, c.Fence)
	if refusal != nil {
		return refused(refusal)
	}
	if !state.StepEnded(c.State) {
		return refused(refuse("STATE_INVALID", stepSubject(c.JobId, c.StepId), "%s is not a state in which a step ends", c.State))
	}
	m.orderStepEnd(step, c.State, c.Sentence)
	return &logv1.Result{StepId: step.Id, Attempt: step.Attempt}
}

// stepStateFor returns the state of steps that end with their attempt.
func stepStateFor(class apiv1.FailureClass) apiv1.StepState {
	switch class {
	case apiv1.FailureClass_FAILURE_CLASS_TIME_LIMIT:
		return apiv1.StepState_STEP_STATE_TIMEOUT
	case classHardware:
		return apiv1.StepState_STEP_STATE_NODE_FAIL
	case classLaunch:
		return apiv1.StepState_STEP_STATE_FAILED
	default:
		return apiv1.StepState_STEP_STATE_CANCELLED
	}
}

// orderStepEnd tells a step's nodes to end it. The first order's state and sentence stay.
func (m *Machine) orderStepEnd(step *apiv1.Step, final apiv1.StepState, sentence string) *apiv1.Step {
	next := state.CopyStep(step)
	next.Ending, next.Revision = true, m.rev
	if next.FinalState == apiv1.StepState_STEP_STATE_UNSPECIFIED {
		next.FinalState = final
	}
	if next.EndSentence == "" {
		next.EndSentence = sentence
	}
	m.s.PutStep(next)
	m.touchPlacement(next.Placement)
	return next
}

// abandonSteps takes a node that has nothing left of an attempt out of the attempt's steps.
func (m *Machine) abandonSteps(a *apiv1.Attempt, node uint32) {
	for _, step := range slices.Collect(m.s.LiveSteps(a.JobId, a.Number)) {
		if slices.Contains(step.Unreported, node) {
			step = state.CopyStep(step)
			m.unmeasured(step)
			m.leaveStep(step, node)
		}
	}
}

// leaveStep records that a node has no task of a step left; the last one ends the step.
func (m *Machine) leaveStep(step *apiv1.Step, node uint32) {
	next := state.CopyStep(step)
	next.Revision = m.rev
	next.Unreported = slices.DeleteFunc(slices.Clone(step.Unreported), func(n uint32) bool { return n == node })
	if len(next.Unreported) > 0 {
		m.s.PutStep(next)
		return
	}
	result := resultOf(next)
	next.State, next.EndTime = result.state, m.endOf(next)
	if next.EndSentence == "" {
		next.EndSentence = result.sentence
	}
	m.s.PutStep(next)
	m.touchPlacement(next.Placement)
	m.stepOver(next, result)
}

// stepOver draws the job's conclusions from the end of a step.
func (m *Machine) stepOver(step *apiv1.Step, r stepResult) {
	job := m.s.Job(step.JobId)
	if job.Status.Attempt != step.Attempt {
		return
	}
	if s := job.Status; step.Id != BatchStep && (r.exit.code > s.DerivedExitCode || r.exit.signal > s.DerivedExitSignal) {
		job = m.changeJob(job, func(s *apiv1.JobStatus) {
			s.DerivedExitCode = max(s.DerivedExitCode, r.exit.code)
			s.DerivedExitSignal = max(s.DerivedExitSignal, r.exit.signal)
		})
	}
	first, has := firstStepID(job.Spec.Kind)
	a := m.s.Attempt(step.JobId, step.Attempt)
	if !has || step.Id != first || a.State != attemptRunning {
		return
	}
	end := ending{class: classOf(step.State), sentence: step.EndSentence, exit: r.exit, survived: job.Spec.NoKill && step.Id != BatchStep}
	if m.s.Level() >= levelLaunch {
		end.at = step.EndTime
	}
	m.finishAttempt(a, end)
}

// classOf returns what the end of the first step means for the attempt.
func classOf(s apiv1.StepState) apiv1.FailureClass {
	switch s {
	case apiv1.StepState_STEP_STATE_COMPLETED:
		return apiv1.FailureClass_FAILURE_CLASS_UNSPECIFIED
	case apiv1.StepState_STEP_STATE_CANCELLED:
		return apiv1.FailureClass_FAILURE_CLASS_CANCELLED
	case apiv1.StepState_STEP_STATE_TIMEOUT:
		return apiv1.FailureClass_FAILURE_CLASS_TIME_LIMIT
	case apiv1.StepState_STEP_STATE_NODE_FAIL:
		return classHardware
	case apiv1.StepState_STEP_STATE_OUT_OF_MEMORY:
		return apiv1.FailureClass_FAILURE_CLASS_OUT_OF_MEMORY
	case apiv1.StepState_STEP_STATE_FAILED:
		return apiv1.FailureClass_FAILURE_CLASS_USER_CODE
	default:
		panic("fsm: step state " + s.String() + " is not final")
	}
}

// stepResult is what a step's exits come to.
type stepResult struct {
	state    apiv1.StepState
	exit     exit
	sentence string
}

// endedByItself reports whether every task of a step that was to end with its job had ended already, of its own: then
// the order came too late and the exits say how it ended. (A script's srun may hear of the exits before they are committed, and the
// script's own end may then overtake them.)
func endedByItself(step *apiv1.Step) bool {
	if step.FinalState != apiv1.StepState_STEP_STATE_CANCELLED {
		return false
	}
	var known uint32
	for _, x := range step.Exits {
		if x.EndedBySupervisor {
			return false
		}
		known += x.Count
	}
	return known == step.NumTasks
}

// resultOf computes a step's end from its exits: the highest code, and the highest signal if no task returned a code. Tasks that
// a supervisor ended count only if there are no others: they died of somebody else's fault.
func resultOf(step *apiv1.Step) stepResult {
	own := slices.ContainsFunc(step.Exits, func(x *apiv1.TaskExit) bool { return !x.EndedBySupervisor })
	r := stepResult{state: apiv1.StepState_STEP_STATE_COMPLETED}
	memory := false
	for _, x := range step.Exits {
		memory = memory || x.OutOfMemory
		if own && x.EndedBySupervisor {
			continue
		}
		code := x.Code
		if x.LaunchError != "" {
			code = max(code, 1)
			if r.sentence == "" {
				r.sentence = x.LaunchError
			}
		}
		r.exit.code, r.exit.signal = max(r.exit.code, code), max(r.exit.signal, x.Signal)
	}
	if r.exit.code != 0 {
		r.exit.signal = 0
	}
	switch {
	case step.FinalState != apiv1.StepState_STEP_STATE_UNSPECIFIED && !endedByItself(step):
		r.state = step.FinalState
	case memory:
		r.state = apiv1.StepState_STEP_STATE_OUT_OF_MEMORY
	case r.exit != exit{}:
		r.state = apiv1.StepState_STEP_STATE_FAILED
	case len(step.Exits) == 0:
		// No node said how its tasks ended: they are gone with their nodes.
		r.state = apiv1.StepState_STEP_STATE_NODE_FAIL
	}
	return r
}
