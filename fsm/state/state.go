package state

import (
	"fmt"

	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"

	"github.com/muster-hpc/muster/fsm/table"
)

// MaxTombstones bounds the removals that are remembered for watches; see docs/limits.md.
const MaxTombstones = 65536

// State is the mutable state. Its View part reads the newest contents; other goroutines read views made by Publish.
type State struct {
	View
	hash *hasher
}

// New returns the empty state before Bootstrap.
func New() *State {
	h := &hasher{}
	s := &State{hash: h}
	s.nextJob, s.nextNode = 1, 1
	s.settings = Defaults(nil)

	less32 := func(a, b uint32) bool { return a < b }
	less64 := func(a, b uint64) bool { return a < b }
	s.jobs = table.New(less32, h.job)
	s.attempts = table.New(less64, h.attempt)
	s.steps = table.New(func(a, b stepKey) bool {
		return a.attempt < b.attempt || a.attempt == b.attempt && a.order < b.order
	}, h.step)
	s.nodes = table.New(less32, h.node)
	s.members = table.New(func(a, b string) bool { return a < b }, h.member)
	s.blobs = table.New(func(a, b BlobKey) bool {
		return a.SHA256 < b.SHA256 || a.SHA256 == b.SHA256 && a.Upload < b.Upload
	}, h.blob)
	s.requests = table.New(lessRequest, h.request)
	s.tombstones = table.New(func(a, b tombKey) bool {
		c := a.rev.Compare(b.rev)
		return c < 0 || c == 0 && a.job < b.job
	}, h.tombstone)

	s.pending = table.NewIndex(less64)
	s.active = table.NewIndex(less32)
	s.live = table.NewIndex(less64)
	s.onNode = table.NewIndex(func(a, b nodeAttempt) bool {
		return a.node < b.node || a.node == b.node && a.attempt < b.attempt
	})
	s.nodeNames = table.NewIndex(func(a, b nodeName) bool { return a.name < b.name })
	s.changes = table.NewIndex(lessChange)
	s.expiry = table.NewIndex(func(a, b expiryKey) bool { return a.ns < b.ns || a.ns == b.ns && lessRequest(a.id, b.id) })
	s.liveSteps = table.NewIndex(func(a, b stepKey) bool {
		return a.attempt < b.attempt || a.attempt == b.attempt && a.order < b.order
	})
	s.ailing = table.NewIndex(less32)
	s.touched = table.NewIndex(func(a, b touch) bool { return a.node < b.node })
	s.touchedAt = table.NewIndex(func(a, b touch) bool {
		c := a.rev.Compare(b.rev)
		return c < 0 || c == 0 && a.node < b.node
	})
	return s
}

func lessRequest(a, b RequestID) bool { return string(a[:]) < string(b[:]) }

// Publish returns a view of the present state that never changes. Only the owner of the state may call it.
func (s *State) Publish() *View {
	v := s.View
	v.jobs, v.attempts, v.steps, v.nodes = s.jobs.Clone(), s.attempts.Clone(), s.steps.Clone(), s.nodes.Clone()
	v.members, v.blobs = s.members.Clone(), s.blobs.Clone()
	v.requests, v.tombstones = s.requests.Clone(), s.tombstones.Clone()
	v.pending, v.active, v.live, v.onNode = s.pending.Clone(), s.active.Clone(), s.live.Clone(), s.onNode.Clone()
	v.nodeNames, v.changes, v.expiry = s.nodeNames.Clone(), s.changes.Clone(), s.expiry.Clone()
	v.liveSteps, v.ailing = s.liveSteps.Clone(), s.ailing.Clone()
	v.touched, v.touchedAt = s.touched.Clone(), s.touchedAt.Clone()
	v.digest = v.sum(s.hash)
	return &v
}

// Digest computes the digest of the present state.
func (s *State) Digest() uint64 {
	s.jobs.Seal()
	s.attempts.Seal()
	s.steps.Seal()
	s.nodes.Seal()
	s.members.Seal()
	s.blobs.Seal()
	s.requests.Seal()
	s.tombstones.Seal()
	return s.sum(s.hash)
}

// sum adds the tables' digests and the hash of the singleton part.
func (v *View) sum(h *hasher) uint64 {
	return v.jobs.Digest() + v.attempts.Digest() + v.steps.Digest() + v.nodes.Digest() + v.members.Digest() +
		v.blobs.Digest() + v.requests.Digest() + v.tombstones.Digest() + h.message(tagCluster, v.Cluster())
}

// Recompute computes the digest from the records alone, to check Digest.
func (v *View) Recompute() uint64 {
	h := &hasher{}
	return v.jobs.Rehash(h.job) + v.attempts.Rehash(h.attempt) + v.steps.Rehash(h.step) + v.nodes.Rehash(h.node) +
		v.members.Rehash(h.member) + v.blobs.Rehash(h.blob) + v.requests.Rehash(h.request) +
		v.tombstones.Rehash(h.tombstone) + h.message(tagCluster, v.Cluster())
}

// Cluster returns the singleton part as a record.
func (v *View) Cluster() *logv1.Cluster {
	return &logv1.Cluster{
		ClusterId: v.clusterID, Level: v.level, Configuration: v.configuration, ConfigurationRevision: v.configuredAt,
		NextJobId: v.nextJob, NextNodeNumber: v.nextNode, StateTime: v.now, Revision: v.revision,
		HealthDrains: v.healthDrains,
	}
}

// Advance moves the state to a command's revision and time. Time never goes back.
func (s *State) Advance(revision *apiv1.Revision, proposed *timestamppb.Timestamp) {
	s.revision = revision
	if s.now == nil || proposed.Seconds > s.now.Seconds || proposed.Seconds == s.now.Seconds && proposed.Nanos > s.now.Nanos {
		s.now = proposed
	}
}

// Begin starts the cluster's life, or a new incarnation of it.
func (s *State) Begin(clusterID string, level, jobIDsAbove uint32, revision *apiv1.Revision) {
	s.clusterID, s.level = clusterID, max(s.level, level)
	s.ReserveJobIDs(jobIDsAbove)
	s.revision = revision
	s.horizon = RevOf(revision)
	s.touchAll()
	s.clusterChanged()
}

// ReserveJobIDs makes job ids begin above a given one.
func (s *State) ReserveJobIDs(above uint32) {
	if above != ^uint32(0) {
		s.nextJob = max(s.nextJob, above+1)
	}
}

// SetLevel raises the feature level.
func (s *State) SetLevel(level uint32) {
	s.level = level
	s.clusterChanged()
}

// SetHealthDrains replaces the times of the drains by checks. The list belongs to the state from then on.
func (s *State) SetHealthDrains(times []*timestamppb.Timestamp) { s.healthDrains = times }

// Configure replaces the configuration. It fails without effect if a partition's nodes cannot be read.
func (s *State) Configure(c *apiv1.Configuration, revision *apiv1.Revision) error {
	partitions := make([]*partition, 0, len(c.Partitions))
	for _, config := range c.Partitions {
		p, err := newPartition(config)
		if err != nil {
			return err
		}
		partitions = append(partitions, p)
	}
	s.configuration, s.configuredAt, s.partitions = c, revision, partitions
	s.settings = Defaults(c.Settings)
	for n := range s.Nodes() {
		s.admit(n, nil)
	}
	s.touchAll()
	s.clusterChanged()
	return nil
}

// admit puts a node into its partitions; before is its old specification, nil if it is new there. Published views keep the old
// partitions.
func (s *State) admit(n *apiv1.Node, before *apiv1.NodeSpec) {
	partitions := make([]*partition, len(s.partitions))
	for i, p := range s.partitions {
		partitions[i] = p
		if !p.admits(n.Spec.Name) {
			continue
		}
		classes := p.classes
		if before != nil {
			classes = Count(classes, ClassOf(before), -1)
		}
		classes = Count(classes, ClassOf(n.Spec), 1)
		partitions[i] = &partition{config: p.config, names: p.names, nodes: p.nodes.with(n.Number), classes: classes}
	}
	s.partitions = partitions
}

// clusterChanged records a change of kind ChangeCluster at the present revision.
func (s *State) clusterChanged() {
	if s.clusterRev != (Rev{}) {
		s.changes.Delete(changeKey{rev: s.clusterRev, kind: ChangeCluster})
	}
	s.clusterRev = RevOf(s.revision)
	s.changes.Put(changeKey{rev: s.clusterRev, kind: ChangeCluster})
}

// Touch records that something that a node's desired set is made of changed at the present revision.
func (s *State) Touch(node uint32) { s.touch(node, RevOf(s.revision)) }

func (s *State) touch(node uint32, rev Rev) {
	old, found := s.touched.Get(touch{node: node})
	if found {
		if old.rev == rev {
			return
		}
		s.touchedAt.Delete(old)
	}
	s.touched.Put(touch{node, rev})
	s.touchedAt.Put(touch{node, rev})
}

func (s *State) touchAll() {
	rev := RevOf(s.revision)
	for n := range s.Nodes() {
		s.touch(n.Number, rev)
	}
}

// changed moves a record's entry in the order of changes.
func (s *State) changed(kind ChangeKind, a uint64, b uint32, before, now *apiv1.Revision) {
	if before != nil {
		s.changes.Delete(changeKey{rev: RevOf(before), kind: kind, a: a, b: b})
	}
	s.changes.Put(changeKey{rev: RevOf(now), kind: kind, a: a, b: b})
}

// TakeJobID returns the next job id; 0 if they are used up.
func (s *State) TakeJobID() uint32 {
	if s.nextJob == ^uint32(0) {
		return 0
	}
	s.nextJob++
	return s.nextJob - 1
}

// TakeNodeNumber returns the next node number.
func (s *State) TakeNodeNumber() uint32 {
	s.nextNode++
	return s.nextNode - 1
}

// errDuplicate is what a snapshot with a record twice gives.
func errDuplicate(what string, key any) error { return fmt.Errorf("%s %v is there twice", what, key) }
