package node

import (
	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// Place is where the files of a running attempt are, and whose they are.
type Place struct {
	// Attempt it is.
	Attempt uint32
	// Owner of the job.
	Owner *apiv1.JobOwner
	// UID, GID and Groups are those of its tasks.
	UID, GID uint32
	Groups   []uint32
	// Mounts are directories of the node that its tasks see at other paths ("/tmp").
	Mounts map[string]string
}

// Place returns where an attempt's files are; attempt 0 means the one that runs. false if the node has none that runs. Private
// directories are made if no step has made them before: they go with the attempt.
func (a *Agent) Place(job, attempt uint32) (Place, bool, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for key, at := range a.attempts {
		if key.job != job || attempt != 0 && key.attempt != attempt || at.record.GetStartBootNs() == 0 || at.ended || at.reaping || at.record.GetReaped() {
			continue
		}
		who, err := a.accounts.find(at.record.GetOwner())
		if err != nil {
			return Place{}, true, err
		}
		p := Place{Attempt: key.attempt, Owner: at.record.GetOwner(), UID: who.uid, GID: who.gid, Groups: who.groups, Mounts: map[string]string{}}
		if a.cfg.Private != nil {
			// Under the lock: whoever reaps the attempt has marked it before, or comes later and removes them.
			dirs, err := a.cfg.Private.Make(job, key.attempt)
			if err != nil {
				return Place{}, true, err
			}
			p.Mounts["/tmp"], p.Mounts["/dev/shm"] = dirs.Tmp, dirs.Shm
		}
		return p, true, nil
	}
	return Place{}, false, nil
}
