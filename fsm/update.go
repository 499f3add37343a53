package fsm

import (
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"

	"github.com/muster-hpc/muster/fsm/state"
)

// updateJobs changes jobs, each by itself.
func (m *Machine) updateJobs(r *apiv1.UpdateJobRequest) *logv1.Result {
	if r.GetChange() == nil {
		return refused(refuse("CHANGE_MISSING", "change", "the request does not say what to change"))
	}
	result := &logv1.Result{}
	for _, id := range r.JobIds {
		job, refusal := m.ownedJob(id)
		if refusal == nil {
			refusal = m.update(r, job)
		}
		if refusal != nil {
			result.Refusals = append(result.Refusals, refusal)
			continue
		}
		result.JobIds = append(result.JobIds, id)
	}
	return result
}

func (m *Machine) update(r *apiv1.UpdateJobRequest, job *apiv1.Job) *apiv1.ErrorDetail {
	if change, isRequeue := r.Change.(*apiv1.UpdateJobRequest_Requeue); isRequeue {
		if !change.Requeue {
			return refuse("CHANGE_MISSING", jobSubject(job.Id), "requeue is false: there is nothing to do")
		}
		return m.requeue(job, r.RequeueHold)
	}
	if state.Ended(job.Status.State) {
		return refuse("JOB_ENDED", jobSubject(job.Id), "job %d has ended already", job.Id)
	}
	switch change := r.Change.(type) {
	case *apiv1.UpdateJobRequest_Hold:
		if change.Hold {
			return m.hold(job)
		}
		return m.release(job)
	case *apiv1.UpdateJobRequest_TimeLimitS:
		return m.setTimeLimit(job, change.TimeLimitS)
	case *apiv1.UpdateJobRequest_Priority:
		return m.setPriority(job, change.Priority)
	case *apiv1.UpdateJobRequest_Comment:
		return m.setText(job, "comment", change.Comment, func(s *apiv1.JobSpec) { s.Comment = change.Comment })
	case *apiv1.UpdateJobRequest_Name:
		return m.setText(job, "name", change.Name, func(s *apiv1.JobSpec) { s.Name = change.Name })
	case *apiv1.UpdateJobRequest_Partition:
		return m.setPartition(job, change.Partition)
	case *apiv1.UpdateJobRequest_Nice:
		return m.setNice(job, change.Nice)
	default:
		return refuse("CHANGE_MISSING", jobSubject(job.Id), "the request does not say what to change")
	}
}

// changeSpec stores a job with a changed specification and status.
func (m *Machine) changeSpec(job *apiv1.Job, change func(*apiv1.JobSpec, *apiv1.JobStatus)) {
	next := state.CopyJob(job)
	next.Spec, next.Status = state.CopyJobSpec(job.Spec), state.CopyJobStatus(job.Status)
	next.Revision = m.rev
	change(next.Spec, next.Status)
	m.s.PutJob(next)
	if a := m.s.Attempt(job.Id, job.Status.Attempt); a != nil && a.State != apiv1.AttemptState_ATTEMPT_STATE_ENDED {
		m.touchAttempt(a)
	}
}

func (m *Machine) hold(job *apiv1.Job) *apiv1.ErrorDetail {
	if job.Status.State != jobPending {
		return refuse("JOB_NOT_PENDING", jobSubject(job.Id), "job %d does not wait any more; it cannot be held", job.Id)
	}
	held, reason := uint32(heldByUser), apiv1.WaitReason_WAIT_REASON_JOB_HELD_USER
	if m.cmd.Principal.Kind != userKind || m.cmd.Principal.Uid != job.Owner.Uid {
		held, reason = heldByOperator, apiv1.WaitReason_WAIT_REASON_JOB_HELD_ADMIN
	}
	if job.Status.Held >= held {
		return nil
	}
	m.changeJob(job, func(s *apiv1.JobStatus) { s.Held, s.Reason, s.Sentence, s.EligibleTime = held, reason, "", nil })
	return nil
}

func (m *Machine) release(job *apiv1.Job) *apiv1.ErrorDetail {
	if job.Status.State != jobPending {
		return refuse("JOB_NOT_PENDING", jobSubject(job.Id), "job %d does not wait; there is nothing to release", job.Id)
	}
	if job.Status.Held == heldByOperator && !IsOperator(&m.s.View, m.cmd.Principal) {
		return refuse("PERMISSION_DENIED", jobSubject(job.Id), "job %d is held by an operator; ask one to release it", job.Id)
	}
	if job.Status.Held == 0 && job.Status.NotBefore == nil {
		return nil
	}
	m.changeJob(job, func(s *apiv1.JobStatus) {
		s.Held, s.Reason, s.Sentence = 0, apiv1.WaitReason_WAIT_REASON_UNSPECIFIED, ""
		s.NotBefore, s.LaunchFailures, s.EligibleTime = nil, 0, m.now()
	})
	return nil
}

// requeue ends the current attempt, or takes up an ended job again.
func (m *Machine) requeue(job *apiv1.Job, hold bool) *apiv1.ErrorDetail {
	if job.Spec.Kind == apiv1.JobKind_JOB_KIND_ALLOCATION {
		return refuse("JOB_NOT_REQUEUEABLE", jobSubject(job.Id), "job %d is an interactive allocation; it cannot be queued again", job.Id)
	}
	if job.Status.State == jobPending {
		return refuse("JOB_PENDING", jobSubject(job.Id), "job %d waits already", job.Id)
	}
	sentence := "requeued by " + m.cmd.Principal.Name
	if state.Ended(job.Status.State) {
		if limit := m.s.Settings().MaxActiveJobs; m.s.ActiveJobCount() >= int(limit) {
			return refuse("JOBS_TOO_MANY", jobSubject(job.Id), "%d jobs wait or run, which is the limit of this cluster", limit)
		}
		m.changeJob(job, func(s *apiv1.JobStatus) { m.queueAgain(s, sentence, hold) })
		return nil
	}
	attempt := m.s.Attempt(job.Id, job.Status.Attempt)
	if attempt.State != apiv1.AttemptState_ATTEMPT_STATE_ENDING {
		m.finishAttempt(attempt, ending{class: apiv1.FailureClass_FAILURE_CLASS_REQUEUED, sentence: sentence, hold: hold})
		return nil
	}
	if attempt.FinalState == jobPending && !hold {
		return nil
	}
	next := state.CopyAttempt(attempt)
	next.FinalState, next.Revision = jobPending, m.rev
	m.s.PutAttempt(next)
	m.changeJob(job, func(s *apiv1.JobStatus) {
		s.EndTime, s.CancelledBy, s.Sentence, s.Reason = nil, 0, sentence, apiv1.WaitReason_WAIT_REASON_CLEANING
		if hold {
			s.Held = heldByUser
		}
	})
	return nil
}

func (m *Machine) setTimeLimit(job *apiv1.Job, limit uint32) *apiv1.ErrorDetail {
	operator := IsOperator(&m.s.View, m.cmd.Principal)
	switch p := m.s.Partition(job.Status.Partition); {
	case limit == 0:
		return refuse("TIME_LIMIT_INVALID", jobSubject(job.Id), "a time limit of 0 seconds is none; to remove the limit use unlimited")
	case limit > job.Status.TimeLimitS && !operator:
		return refuse("PERMISSION_DENIED", jobSubject(job.Id), "only an operator can raise the time limit of job %d", job.Id)
	case p != nil && p.MaxTimeS != 0 && limit > p.MaxTimeS && !operator:
		return refuse("TIME_LIMIT_INVALID", jobSubject(job.Id), "partition %s allows %s", p.Name, duration(p.MaxTimeS))
	}
	if a := m.s.Attempt(job.Id, job.Status.Attempt); a != nil && a.State != apiv1.AttemptState_ATTEMPT_STATE_ENDED {
		next := state.CopyAttempt(a)
		next.TimeLimitS, next.Revision = limit, m.rev
		m.s.PutAttempt(next)
	}
	m.changeSpec(job, func(spec *apiv1.JobSpec, s *apiv1.JobStatus) { spec.TimeLimitS, s.TimeLimitS = limit, limit })
	return nil
}

func (m *Machine) setPriority(job *apiv1.Job, priority uint32) *apiv1.ErrorDetail {
	if !IsOperator(&m.s.View, m.cmd.Principal) {
		return refuse("PERMISSION_DENIED", jobSubject(job.Id), "only an operator can set the priority of job %d", job.Id)
	}
	if job.Status.State != jobPending {
		return refuse("JOB_NOT_PENDING", jobSubject(job.Id), "job %d does not wait any more; its priority means nothing", job.Id)
	}
	// As in Slurm, priority 0 holds a job, and any other releases it.
	if priority == 0 {
		return m.hold(job)
	}
	if refusal := m.release(job); refusal != nil {
		return refusal
	}
	m.changeSpec(m.s.Job(job.Id), func(spec *apiv1.JobSpec, s *apiv1.JobStatus) {
		spec.Priority = priority
		s.Priority = priorityOf(spec)
	})
	return nil
}

func (m *Machine) setNice(job *apiv1.Job, nice int32) *apiv1.ErrorDetail {
	if nice < job.Spec.Nice && !IsOperator(&m.s.View, m.cmd.Principal) {
		return refuse("PERMISSION_DENIED", jobSubject(job.Id), "only an operator can lower the nice value of job %d", job.Id)
	}
	m.changeSpec(job, func(spec *apiv1.JobSpec, s *apiv1.JobStatus) {
		spec.Nice = nice
		s.Priority = priorityOf(spec)
	})
	return nil
}

func (m *Machine) setText(job *apiv1.Job, what, text string, set func(*apiv1.JobSpec)) *apiv1.ErrorDetail {
	if refusal := checkText(what, text, maxNameBytes); refusal != nil {
		return refusal
	}
	m.changeSpec(job, func(spec *apiv1.JobSpec, _ *apiv1.JobStatus) { set(spec) })
	return nil
}

func (m *Machine) setPartition(job *apiv1.Job, name string) *apiv1.ErrorDetail {
	if job.Status.State != jobPending {
		return refuse("JOB_NOT_PENDING", jobSubject(job.Id), "job %d does not wait any more; it stays in its partition", job.Id)
	}
	moved := state.CopyJobSpec(job.Spec)
	moved.Partitions = []string{name}
	// The owner's right to set a priority was checked when it was set.
	if refusal, _ := ValidateSpec(&m.s.View, moved, &apiv1.Principal{Kind: memberKind}); refusal != nil {
		return refusal
	}
	m.changeSpec(job, func(spec *apiv1.JobSpec, s *apiv1.JobStatus) {
		spec.Partitions, s.Partition = moved.Partitions, name
		s.TimeLimitS = timeLimit(spec.TimeLimitS, m.s.Partition(name))
		s.Reason, s.Sentence = apiv1.WaitReason_WAIT_REASON_UNSPECIFIED, ""
		if s.Held == heldByUser {
			s.Reason = apiv1.WaitReason_WAIT_REASON_JOB_HELD_USER
		} else if s.Held == heldByOperator {
			s.Reason = apiv1.WaitReason_WAIT_REASON_JOB_HELD_ADMIN
		}
	})
	return nil
}
