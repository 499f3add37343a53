package state

import (
	"slices"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

// Ended reports whether a job state is final.
func Ended(state apiv1.JobState) bool {
	switch state {
	case apiv1.JobState_JOB_STATE_UNSPECIFIED, apiv1.JobState_JOB_STATE_PENDING,
		apiv1.JobState_JOB_STATE_CONFIGURING, apiv1.JobState_JOB_STATE_RUNNING:
		return false
	default:
		return true
	}
}

// StepEnded reports whether a step state is final.
func StepEnded(state apiv1.StepState) bool {
	switch state {
	case apiv1.StepState_STEP_STATE_UNSPECIFIED, apiv1.StepState_STEP_STATE_PREPARING, apiv1.StepState_STEP_STATE_RUNNING:
		return false
	default:
		return true
	}
}

// pendingKey orders pending jobs: higher priority first, then in the order of submission.
func pendingKey(j *apiv1.Job) uint64 { return uint64(^j.Status.Priority)<<32 | uint64(j.Id) }

// PutJob stores a job. Its revision must be set.
func (s *State) PutJob(j *apiv1.Job) {
	old := s.Job(j.Id)
	if old != nil {
		s.unindexJob(old)
	}
	s.jobs.Put(j.Id, j)
	s.byState[j.Status.State]++
	if j.Status.State == apiv1.JobState_JOB_STATE_PENDING {
		s.pending.Put(pendingKey(j))
	}
	if !Ended(j.Status.State) {
		s.active.Put(j.Id)
	}
	s.changed(ChangeJob, PackAttempt(j.Id, 0), 0, old.GetRevision(), j.Revision)
}

func (s *State) unindexJob(j *apiv1.Job) {
	s.byState[j.Status.State]--
	if j.Status.State == apiv1.JobState_JOB_STATE_PENDING {
		s.pending.Delete(pendingKey(j))
	}
	if !Ended(j.Status.State) {
		s.active.Delete(j.Id)
	}
}

// RemoveJob removes a job with its attempts and steps, and remembers that for watches. The job must have ended, and be
// accounted for on every node.
func (s *State) RemoveJob(id uint32) {
	j := s.Job(id)
	if j == nil {
		return
	}
	for _, step := range slices.Collect(s.Steps(id)) {
		key := stepKeyOf(id, step.Attempt, step.Id)
		s.steps.Delete(key)
		s.liveSteps.Delete(key)
		s.changes.Delete(changeKey{rev: RevOf(step.Revision), kind: ChangeStep, a: key.attempt, b: key.order})
	}
	for _, a := range slices.Collect(s.Attempts(id)) {
		key := PackAttempt(id, a.Number)
		s.attempts.Delete(key)
		s.changes.Delete(changeKey{rev: RevOf(a.Revision), kind: ChangeAttempt, a: key})
	}
	s.unindexJob(j)
	s.jobs.Delete(id)
	s.changes.Delete(changeKey{rev: RevOf(j.Revision), kind: ChangeJob, a: PackAttempt(id, 0)})
	s.bury(&logv1.Tombstone{Kind: "job", Key: uint64(id), Revision: s.revision})
}

// bury stores a tombstone and forgets the oldest beyond the bound.
func (s *State) bury(t *logv1.Tombstone) {
	rev, job := RevOf(t.Revision), uint32(t.Key)
	s.tombstones.Put(tombKey{rev, job}, t)
	s.changes.Put(changeKey{rev: rev, kind: ChangeJob, removed: true, a: PackAttempt(job, 0)})
	for s.tombstones.Len() > MaxTombstones {
		key, _, _ := s.tombstones.First()
		s.tombstones.Delete(key)
		s.changes.Delete(changeKey{rev: key.rev, kind: ChangeJob, a: PackAttempt(key.job, 0)})
		s.horizon = key.rev
	}
}

// PutAttempt stores an attempt. Its revision must be set.
func (s *State) PutAttempt(a *apiv1.Attempt) {
	key := PackAttempt(a.JobId, a.Number)
	old := s.Attempt(a.JobId, a.Number)
	s.attempts.Put(key, a)
	if a.State != apiv1.AttemptState_ATTEMPT_STATE_ENDED {
		s.live.Put(key)
	} else {
		s.live.Delete(key)
	}
	if old == nil || !slices.Equal(old.Unaccounted, a.Unaccounted) {
		for _, n := range old.GetUnaccounted() {
			s.onNode.Delete(nodeAttempt{n, key})
		}
		for _, n := range a.Unaccounted {
			s.onNode.Put(nodeAttempt{n, key})
		}
	}
	s.changed(ChangeAttempt, key, 0, old.GetRevision(), a.Revision)
}

// PutAccounted stores an attempt from whose unaccounted nodes one was taken out. It costs the same for any number of nodes.
func (s *State) PutAccounted(a *apiv1.Attempt, node uint32) {
	key := PackAttempt(a.JobId, a.Number)
	old := s.Attempt(a.JobId, a.Number)
	s.attempts.Put(key, a)
	s.onNode.Delete(nodeAttempt{node, key})
	s.changed(ChangeAttempt, key, 0, old.GetRevision(), a.Revision)
}

// PutStep stores a step. Its revision must be set.
func (s *State) PutStep(step *apiv1.Step) {
	key := stepKeyOf(step.JobId, step.Attempt, step.Id)
	old, _ := s.steps.Get(key)
	s.steps.Put(key, step)
	if StepEnded(step.State) {
		s.liveSteps.Delete(key)
	} else {
		s.liveSteps.Put(key)
	}
	s.changed(ChangeStep, key.attempt, key.order, old.GetRevision(), step.Revision)
}

// Ailing reports whether checks found something on a node, or drained it.
func Ailing(n *apiv1.Node) bool {
	return len(n.Conditions) > 0 || n.DrainedByHealth || n.HealthDrainWithheld
}

// PutNode stores a node. Its revision must be set. It does not touch the node: see Touch.
func (s *State) PutNode(n *apiv1.Node) {
	old := s.Node(n.Number)
	s.nodes.Put(n.Number, n)
	if old == nil {
		s.nodeNames.Put(nodeName{n.Spec.Name, n.Number})
		s.admit(n, nil)
	} else if old.Spec != n.Spec {
		s.admit(n, old.Spec)
	}
	if Ailing(n) {
		s.ailing.Put(n.Number)
	} else if old != nil && Ailing(old) {
		s.ailing.Delete(n.Number)
	}
	s.changed(ChangeNode, uint64(n.Number), 0, old.GetRevision(), n.Revision)
}

// PutMember stores an announced controller.
func (s *State) PutMember(m *apiv1.Member) {
	s.members.Put(m.Id, m)
	s.clusterChanged()
}

// RemoveMember forgets a controller and reports whether it was known.
func (s *State) RemoveMember(id string) bool {
	if !s.members.Delete(id) {
		return false
	}
	s.clusterChanged()
	return true
}

// PutBlob stores a complete blob or an upload.
func (s *State) PutBlob(key BlobKey, b *logv1.BlobRecord) {
	if _, found := s.blobs.Get(key); !found && key.Upload != 0 {
		s.uploads++
	}
	s.blobs.Put(key, b)
}

// RemoveBlob removes a complete blob or an upload.
func (s *State) RemoveBlob(key BlobKey) {
	if s.blobs.Delete(key) && key.Upload != 0 {
		s.uploads--
	}
}

// PutRequest remembers an answer.
func (s *State) PutRequest(r *Request) {
	s.requests.Put(r.ID, r)
	s.expiry.Put(expiryKey{r.ExpiryNs(), r.ID})
}

// RemoveRequest forgets an answer.
func (s *State) RemoveRequest(r *Request) {
	s.requests.Delete(r.ID)
	s.expiry.Delete(expiryKey{r.ExpiryNs(), r.ID})
}
