package fsm

import (
	"fmt"
	"slices"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"

	"github.com/muster-hpc/muster/fsm/state"
)

const (
	// maxSignals bounds the signals of one attempt.
	maxSignals = 1000
	// maxSignal is the highest signal number of Linux.
	maxSignal = 64
	// maxExitCode is the highest exit code of a process.
	maxExitCode = 255
	sigkill     = 9
	sigterm     = 15
	// launchSignal is what Slurm shows as the signal of a job that could not be launched: its own number, beyond the kernel's use of it.
	launchSignal = 53
)

func jobSubject(id uint32) string { return fmt.Sprintf("job %d", id) }

// ownedJob returns a job that the principal may change, or the refusal.
func (m *Machine) ownedJob(id uint32) (*apiv1.Job, *apiv1.ErrorDetail) {
	job := m.s.Job(id)
	if job == nil {
		return nil, refuse("JOB_UNKNOWN", jobSubject(id), "job %d does not exist", id)
	}
	if !mayChange(&m.s.View, m.cmd.Principal, job) {
		return nil, refuse("PERMISSION_DENIED", jobSubject(id), "job %d belongs to %s; only %s and operators may change it",
			id, job.Owner.User, job.Owner.User)
	}
	return job, nil
}

// cancelJobs ends or signals jobs, each by itself.
func (m *Machine) cancelJobs(c *logv1.CancelJobs) *logv1.Result {
	if c.Signal > maxSignal {
		return refused(refuse("SIGNAL_INVALID", "signal", "there is no signal %d", c.Signal))
	}
	if c.BatchOnly && c.Full {
		return refused(refuse("SIGNAL_INVALID", "signal", "only the batch shell and all steps exclude each other"))
	}
	if c.Complete && (c.Signal != 0 || c.Step != nil || c.ExitCode > maxExitCode || c.ExitSignal > maxSignal) {
		return refused(refuse("SIGNAL_INVALID", "complete", "an allocation is given back as a whole, with an exit code up to %d and a signal up to %d", maxExitCode, maxSignal))
	}
	result := &logv1.Result{}
	for _, id := range c.JobIds {
		job, refusal := m.ownedJob(id)
		if refusal == nil && state.Ended(job.Status.State) {
			refusal = refuse("JOB_ENDED", jobSubject(id), "job %d has ended already", id)
		}
		if refusal == nil {
			refusal = m.cancel(c, job)
		}
		if refusal != nil {
			result.Refusals = append(result.Refusals, refusal)
			continue
		}
		result.JobIds = append(result.JobIds, id)
	}
	return result
}

func (m *Machine) cancel(c *logv1.CancelJobs, job *apiv1.Job) *apiv1.ErrorDetail {
	switch {
	case c.Complete:
		return m.giveBack(c, job)
	case c.Step != nil && c.Signal == 0:
		return m.cancelStep(job, *c.Step)
	case c.Signal == 0, c.Signal == sigkill && c.Step == nil && !c.BatchOnly && !c.Full:
		m.cancelJob(job)
		return nil
	default:
		return m.signal(c, job)
	}
}

// giveBack ends an allocation whose user is done with it. One that does not run was not used: it is cancelled.
func (m *Machine) giveBack(c *logv1.CancelJobs, job *apiv1.Job) *apiv1.ErrorDetail {
	if job.Spec.Kind != apiv1.JobKind_JOB_KIND_ALLOCATION {
		return refuse("SPEC_INVALID", jobSubject(job.Id), "job %d ends with its program; only allocations (salloc) are given back: cancel it", job.Id)
	}
	attempt := m.s.Attempt(job.Id, job.Status.Attempt)
	if attempt == nil || attempt.State != attemptRunning {
		m.cancelJob(job)
		return nil
	}
	end := ending{sentence: "given back by " + m.cmd.Principal.Name, exit: exit{code: c.ExitCode, signal: c.ExitSignal}}
	if end.exit != (exit{}) {
		end.class = apiv1.FailureClass_FAILURE_CLASS_USER_CODE
	}
	m.finishAttempt(attempt, end)
	return nil
}

// cancelJob ends a job that has not ended. Repeating it changes nothing.
func (m *Machine) cancelJob(job *apiv1.Job) {
	sentence := fmt.Sprintf("cancelled by %s", m.cmd.Principal.Name)
	if job.Status.State == jobPending {
		m.changeJob(job, func(s *apiv1.JobStatus) {
			s.State, s.Reason, s.Sentence = jobCancelled, apiv1.WaitReason_WAIT_REASON_UNSPECIFIED, sentence
			s.CancelledBy, s.EndTime, s.Held, s.NotBefore = m.cmd.Principal.Uid, m.now(), 0, nil
		})
		return
	}
	attempt := m.s.Attempt(job.Id, job.Status.Attempt)
	if attempt.State != apiv1.AttemptState_ATTEMPT_STATE_ENDING {
		end := ending{class: apiv1.FailureClass_FAILURE_CLASS_CANCELLED, sentence: sentence}
		if attempt.State == attemptRunning {
			end.exit.signal = sigterm // What is ordered for its processes, as Slurm shows it.
		}
		m.finishAttempt(attempt, end)
		return
	}
	if attempt.FinalState != jobPending {
		return
	}
	// It would have been queued again: now it will not.
	next := state.CopyAttempt(attempt)
	next.FinalState, next.Revision = jobCancelled, m.rev
	m.s.PutAttempt(next)
	m.changeJob(m.s.Job(job.Id), func(s *apiv1.JobStatus) {
		s.Reason, s.Sentence = apiv1.WaitReason_WAIT_REASON_UNSPECIFIED, sentence
		s.CancelledBy, s.EndTime, s.Held, s.NotBefore = m.cmd.Principal.Uid, attempt.EndTime, 0, nil
	})
}

func stepSubject(job, step uint32) string {
	if step == BatchStep {
		return fmt.Sprintf("step %d.batch", job)
	}
	return fmt.Sprintf("step %d.%d", job, step)
}

// currentStep returns a step of the job's current attempt that has not ended.
func (m *Machine) currentStep(job *apiv1.Job, id uint32) (*apiv1.Step, *apiv1.ErrorDetail) {
	step := m.s.Step(job.Id, job.Status.Attempt, id)
	if step == nil {
		return nil, refuse("STEP_UNKNOWN", stepSubject(job.Id, id), "job %d has no %s now", job.Id, stepSubject(job.Id, id))
	}
	if state.StepEnded(step.State) {
		return nil, refuse("STEP_ENDED", stepSubject(job.Id, id), "%s has ended already", stepSubject(job.Id, id))
	}
	return step, nil
}

func (m *Machine) cancelStep(job *apiv1.Job, id uint32) *apiv1.ErrorDetail {
	step, refusal := m.currentStep(job, id)
	if refusal != nil {
		return refusal
	}
	m.orderStepEnd(step, apiv1.StepState_STEP_STATE_CANCELLED, fmt.Sprintf("cancelled by %s", m.cmd.Principal.Name))
	return nil
}

// signal orders a signal on every node of the running attempt.
func (m *Machine) signal(c *logv1.CancelJobs, job *apiv1.Job) *apiv1.ErrorDetail {
	attempt := m.s.Attempt(job.Id, job.Status.Attempt)
	if attempt == nil || attempt.State != apiv1.AttemptState_ATTEMPT_STATE_RUNNING {
		return refuse("JOB_NOT_RUNNING", jobSubject(job.Id), "job %d does not run; only running jobs can be signalled", job.Id)
	}
	if c.BatchOnly && job.Spec.Kind != apiv1.JobKind_JOB_KIND_BATCH {
		return refuse("JOB_NOT_BATCH", jobSubject(job.Id), "job %d has no batch script to signal", job.Id)
	}
	if c.Step != nil {
		if _, refusal := m.currentStep(job, *c.Step); refusal != nil {
			return refusal
		}
	}
	if len(attempt.Signals) >= maxSignals {
		return refuse("SIGNALS_TOO_MANY", jobSubject(job.Id), "job %d has been sent %d signals in this attempt; no more are kept", job.Id, maxSignals)
	}
	next := state.CopyAttempt(attempt)
	next.Revision = m.rev
	next.Signals = append(slices.Clone(attempt.Signals), &apiv1.SignalOrder{
		Ordinal: uint32(len(attempt.Signals)) + 1, Signal: c.Signal, Step: c.Step, BatchOnly: c.BatchOnly, Full: c.Full,
	})
	m.s.PutAttempt(next)
	m.touchPlacement(next.Placement)
	return nil
}
