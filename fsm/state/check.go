package state

import (
	"cmp"
	"fmt"
	"slices"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// CheckIndexes compares every index and counter with the tables, and returns the first difference. It looks at everything, so it
// is for tests.
func (v *View) CheckIndexes() error {
	var pending []uint64
	var active []uint32
	var live []uint64
	var onNode []nodeAttempt
	var liveSteps []stepKey
	var ailing []uint32
	var counts [stateCount]int
	changes := make(map[changeKey]bool)
	for j := range v.Jobs(0) {
		counts[j.Status.State]++
		if j.Status.State == apiv1.JobState_JOB_STATE_PENDING {
			pending = append(pending, pendingKey(j))
		}
		if !Ended(j.Status.State) {
			active = append(active, j.Id)
		}
		changes[changeKey{rev: RevOf(j.Revision), kind: ChangeJob, a: PackAttempt(j.Id, 0)}] = true
	}
	for key, a := range v.attempts.All() {
		if a.State != apiv1.AttemptState_ATTEMPT_STATE_ENDED {
			live = append(live, key)
		}
		for _, n := range a.Unaccounted {
			onNode = append(onNode, nodeAttempt{n, key})
		}
		changes[changeKey{rev: RevOf(a.Revision), kind: ChangeAttempt, a: key}] = true
	}
	for key, s := range v.steps.All() {
		if !StepEnded(s.State) {
			liveSteps = append(liveSteps, key)
		}
		changes[changeKey{rev: RevOf(s.Revision), kind: ChangeStep, a: key.attempt, b: key.order}] = true
	}
	for n := range v.Nodes() {
		changes[changeKey{rev: RevOf(n.Revision), kind: ChangeNode, a: uint64(n.Number)}] = true
		if Ailing(n) {
			ailing = append(ailing, n.Number)
		}
		if v.NodeByName(n.Spec.Name) != n {
			return fmt.Errorf("node %s is not found by its name", n.Spec.Name)
		}
		if v.NodeTouched(n.Number) == nil {
			return fmt.Errorf("node %s was never touched", n.Spec.Name)
		}
	}
	for key := range v.tombstones.All() {
		changes[changeKey{rev: key.rev, kind: ChangeJob, removed: true, a: PackAttempt(key.job, 0)}] = true
	}
	slices.Sort(pending)
	slices.SortFunc(onNode, func(a, b nodeAttempt) int {
		return cmp.Or(cmp.Compare(a.node, b.node), cmp.Compare(a.attempt, b.attempt))
	})
	switch {
	case counts != v.byState:
		return fmt.Errorf("the counts of jobs by state are %v, there are %v", v.byState, counts)
	case !slices.Equal(pending, slices.Collect(v.pending.All())):
		return fmt.Errorf("the index of pending jobs differs: %d of %d", v.pending.Len(), len(pending))
	case !slices.Equal(active, slices.Collect(v.active.All())):
		return fmt.Errorf("the index of active jobs differs: %d of %d", v.active.Len(), len(active))
	case !slices.Equal(live, slices.Collect(v.live.All())):
		return fmt.Errorf("the index of live attempts is %v, there are %v", slices.Collect(v.live.All()), live)
	case !slices.Equal(onNode, slices.Collect(v.onNode.All())):
		return fmt.Errorf("the index of attempts by node is %v, there are %v", slices.Collect(v.onNode.All()), onNode)
	case !slices.Equal(liveSteps, slices.Collect(v.liveSteps.All())):
		return fmt.Errorf("the index of live steps is %v, there are %v", slices.Collect(v.liveSteps.All()), liveSteps)
	case !slices.Equal(ailing, slices.Collect(v.ailing.All())):
		return fmt.Errorf("the index of ailing nodes is %v, there are %v", slices.Collect(v.ailing.All()), ailing)
	case v.touched.Len() != v.nodes.Len() || v.touchedAt.Len() != v.nodes.Len() || v.nodeNames.Len() != v.nodes.Len():
		return fmt.Errorf("there are %d nodes, %d names and %d, %d touches", v.nodes.Len(), v.nodeNames.Len(), v.touched.Len(), v.touchedAt.Len())
	case v.expiry.Len() != v.requests.Len():
		return fmt.Errorf("%d answers are remembered, %d will expire", v.requests.Len(), v.expiry.Len())
	}
	return v.checkChanges(changes)
}

func (v *View) checkChanges(want map[changeKey]bool) error {
	found := 0
	for key := range v.changes.All() {
		if key.kind == ChangeCluster {
			if key.rev != v.clusterRev {
				return fmt.Errorf("the cluster changed at %v and at %v", key.rev, v.clusterRev)
			}
			continue
		}
		if !want[key] {
			return fmt.Errorf("the order of changes has %+v, which no record has", key)
		}
		found++
	}
	if found != len(want) {
		return fmt.Errorf("the order of changes has %d records of %d", found, len(want))
	}
	uploads, references := 0, make(map[string]uint32)
	for j := range v.Jobs(0) {
		references[j.Spec.ScriptBlob]++
		references[j.Spec.EnvironmentBlob]++
	}
	for _, s := range v.steps.All() {
		references[s.Spec.EnvironmentBlob]++
	}
	for b := range v.Blobs() {
		if !BlobComplete(b) {
			uploads++
		} else if b.References != references[b.Sha256] {
			return fmt.Errorf("blob %s counts %d references, there are %d", b.Sha256, b.References, references[b.Sha256])
		}
	}
	if uploads != v.uploads {
		return fmt.Errorf("%d uploads are counted, there are %d", v.uploads, uploads)
	}
	return nil
}
