package fsm

import (
	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"

	"github.com/muster-hpc/muster/fsm/state"
)

const (
	// basePriority is the priority of a job whose user asked for nothing: the middle, so that nice values go both ways.
	basePriority = int64(1) << 31
	// maxJobsPerCommand bounds the jobs of one submission, as the protocol says.
	maxJobsPerCommand = 1000
	// heldByUser and heldByOperator are the values of JobStatus.held.
	heldByUser, heldByOperator = 1, 2
)

const (
	jobPending     = apiv1.JobState_JOB_STATE_PENDING
	jobConfiguring = apiv1.JobState_JOB_STATE_CONFIGURING
	jobRunning     = apiv1.JobState_JOB_STATE_RUNNING
	jobCancelled   = apiv1.JobState_JOB_STATE_CANCELLED
)

// priorityOf returns the priority by which a job is ordered.
func priorityOf(spec *apiv1.JobSpec) uint32 {
	if spec.Priority != 0 {
		return spec.Priority
	}
	return uint32(min(max(1, basePriority-int64(spec.Nice)), int64(^uint32(0))-1))
}

// changeJob stores a job with a changed status.
func (m *Machine) changeJob(job *apiv1.Job, change func(*apiv1.JobStatus)) *apiv1.Job {
	next := state.CopyJob(job)
	next.Status = state.CopyJobStatus(job.Status)
	next.Revision = m.rev
	change(next.Status)
	m.s.PutJob(next)
	return next
}

// submitJobs stores jobs; each is accepted or refused by itself.
func (m *Machine) submitJobs(c *logv1.SubmitJobs) *logv1.Result {
	if len(c.Specs) == 0 || len(c.Specs) > maxJobsPerCommand {
		return refused(refuse("TOO_MANY", "jobs", "a submission has 1 to %d jobs, this one has %d", maxJobsPerCommand, len(c.Specs)))
	}
	if refusal := m.storeBlobs(c.Blobs); refusal != nil {
		return refused(refusal)
	}
	p := m.cmd.Principal
	owner := &apiv1.JobOwner{Uid: p.Uid, Gid: p.Gid, User: p.Name}
	result := &logv1.Result{Submitted: make([]*apiv1.SubmitResult, len(c.Specs))}
	for i, spec := range c.Specs {
		result.Submitted[i] = m.submit(spec, owner)
	}
	return result
}

func (m *Machine) submit(spec *apiv1.JobSpec, owner *apiv1.JobOwner) *apiv1.SubmitResult {
	refusal, warnings := ValidateSpec(&m.s.View, spec, m.cmd.Principal)
	if refusal == nil {
		refusal = m.checkBlobs(spec)
	}
	if limit := m.s.Settings().MaxActiveJobs; refusal == nil && m.s.ActiveJobCount() >= int(limit) {
		refusal = refuse("JOBS_TOO_MANY", "jobs", "%d jobs wait or run, which is the limit of this cluster; submit again when some have ended", limit)
	}
	if refusal != nil {
		return &apiv1.SubmitResult{Refusal: refusal}
	}
	id := m.s.TakeJobID()
	if id == 0 {
		return &apiv1.SubmitResult{Refusal: refuse("JOB_IDS_EXHAUSTED", "jobs", "all job ids have been used")}
	}
	if spec.Nice < 0 && !IsOperator(&m.s.View, m.cmd.Principal) {
		spec.Nice = 0 // the specification was decoded from the entry a moment ago and belongs to nobody else
	}
	job := &apiv1.Job{Id: id, Revision: m.rev, Spec: spec, Owner: owner, Status: m.firstStatus(spec)}
	m.holdBlobs(spec.ScriptBlob, spec.EnvironmentBlob)
	m.s.PutJob(job)
	return &apiv1.SubmitResult{JobId: id, Warnings: warnings}
}

func (m *Machine) firstStatus(spec *apiv1.JobSpec) *apiv1.JobStatus {
	partition := m.s.DefaultPartition()
	if len(spec.Partitions) > 0 {
		partition = m.s.Partition(spec.Partitions[0])
	}
	s := &apiv1.JobStatus{
		State: jobPending, SubmitTime: m.now(), EligibleTime: m.now(), Partition: partition.Name,
		Priority: priorityOf(spec), TimeLimitS: timeLimit(spec.TimeLimitS, partition),
	}
	if spec.BeginTime != nil && later(spec.BeginTime, m.now()) {
		s.EligibleTime, s.Reason = spec.BeginTime, apiv1.WaitReason_WAIT_REASON_BEGIN_TIME
	}
	if spec.Hold {
		s.Held, s.Reason, s.EligibleTime = heldByUser, apiv1.WaitReason_WAIT_REASON_JOB_HELD_USER, nil
	}
	return s
}

// timeLimit returns the limit in force for one asked for, in seconds.
func timeLimit(asked uint32, p *apiv1.Partition) uint32 {
	switch {
	case asked != 0:
		return asked
	case p.DefaultTimeS != 0:
		return p.DefaultTimeS
	case p.MaxTimeS != 0:
		return p.MaxTimeS
	default:
		return Unlimited
	}
}

func later(a, b *timestamppb.Timestamp) bool {
	return a.GetSeconds() > b.GetSeconds() || a.GetSeconds() == b.GetSeconds() && a.GetNanos() > b.GetNanos()
}

// checkBlobs checks that the contents a job refers to are there, small enough, and its user's.
func (m *Machine) checkBlobs(spec *apiv1.JobSpec) *apiv1.ErrorDetail {
	if refusal := m.checkBlob(spec.ScriptBlob, "script", MaxBlobBytes); refusal != nil {
		return refusal
	}
	return m.checkBlob(spec.EnvironmentBlob, "environment", MaxEnvironmentBytes)
}

func (m *Machine) checkBlob(sha, what string, limit uint64) *apiv1.ErrorDetail {
	if sha == "" {
		return nil
	}
	b := m.s.Blob(sha)
	if b == nil || !mayUse(b, m.cmd.Principal.Uid, IsOperator(&m.s.View, m.cmd.Principal)) {
		return refuse("BLOB_UNKNOWN", "blob "+sha, "the contents of the %s are not stored; upload them first", what)
	}
	if b.Size > limit {
		return refuse("BLOB_TOO_LARGE", "blob "+sha, "the %s has %d bytes; at most %d are allowed", what, b.Size, limit)
	}
	return nil
}
