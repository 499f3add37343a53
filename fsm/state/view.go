package state

import (
	"iter"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"

	"github.com/muster-hpc/muster/fsm/table"
)

// stateCount is the number of job states; a test compares it with the enum.
const stateCount = int(apiv1.JobState_JOB_STATE_BOOT_FAIL) + 1

// View is the state at one revision. Everything it returns is immutable and shared: callers never modify it.
type View struct {
	// singleton part
	clusterID     string
	level         uint32
	configuration *apiv1.Configuration
	settings      *apiv1.Settings
	configuredAt  *apiv1.Revision
	nextJob       uint32
	nextNode      uint32
	now           *timestamppb.Timestamp
	revision      *apiv1.Revision
	healthDrains  []*timestamppb.Timestamp // oldest first; replaced, never changed in place

	// tables; what is in them is the state, with the singleton part
	jobs       *table.Table[uint32, *apiv1.Job]
	attempts   *table.Table[uint64, *apiv1.Attempt]
	steps      *table.Table[stepKey, *apiv1.Step]
	nodes      *table.Table[uint32, *apiv1.Node]
	members    *table.Table[string, *apiv1.Member]
	blobs      *table.Table[BlobKey, *logv1.BlobRecord]
	requests   *table.Table[RequestID, *Request]
	tombstones *table.Table[tombKey, *logv1.Tombstone]

	// indexes, derived
	pending   *table.Index[uint64] // inverted priority<<32 | job
	active    *table.Index[uint32]
	live      *table.Index[uint64]
	onNode    *table.Index[nodeAttempt]
	nodeNames *table.Index[nodeName]
	changes   *table.Index[changeKey]
	expiry    *table.Index[expiryKey]
	liveSteps *table.Index[stepKey] // of steps that have not ended
	ailing    *table.Index[uint32]  // nodes with conditions or a drain by them
	touched   *table.Index[touch]   // by node
	touchedAt *table.Index[touch]   // by revision
	byState   [stateCount]int
	uploads   int

	// horizon is the newest revision at which removals have been forgotten: changes are complete only after it.
	horizon    Rev
	clusterRev Rev // last ChangeCluster
	partitions []*partition
	digest     uint64
}

// Revision returns the revision of the last command applied; nil before the first.
func (v *View) Revision() *apiv1.Revision { return v.revision }

// Level returns the feature level in force; 0 before Bootstrap.
func (v *View) Level() uint32 { return v.level }

// StateTime returns the state's time; the zero time before the first command.
func (v *View) StateTime() time.Time {
	if v.now == nil {
		return time.Time{}
	}
	return v.now.AsTime()
}

// Now returns the state's time as a message; nil before the first command.
func (v *View) Now() *timestamppb.Timestamp { return v.now }

// ClusterID returns the random id of the cluster; empty before Bootstrap.
func (v *View) ClusterID() string { return v.clusterID }

// Bootstrapped reports whether the cluster's life has begun.
func (v *View) Bootstrapped() bool { return v.level > 0 }

// Incarnation returns the incarnation in force; 0 before Bootstrap.
func (v *View) Incarnation() uint64 { return v.revision.GetIncarnation() }

// Configuration returns the configuration as it was set; nil before Bootstrap.
func (v *View) Configuration() *apiv1.Configuration { return v.configuration }

// ConfigurationRevision returns when the configuration was set.
func (v *View) ConfigurationRevision() *apiv1.Revision { return v.configuredAt }

// Settings returns the settings with every 0 replaced by its default.
func (v *View) Settings() *apiv1.Settings { return v.settings }

// NextJobID returns the id that the next job will get.
func (v *View) NextJobID() uint32 { return v.nextJob }

// NextNodeNumber returns the number that the next new node will get.
func (v *View) NextNodeNumber() uint32 { return v.nextNode }

// Digest returns the digest of the state: the sum over all records, equal on every replica at the same revision.
func (v *View) Digest() uint64 { return v.digest }

// Job returns a job, or nil.
func (v *View) Job(id uint32) *apiv1.Job {
	j, _ := v.jobs.Get(id)
	return j
}

// Jobs yields the jobs with ids from the given one, ascending.
func (v *View) Jobs(from uint32) iter.Seq[*apiv1.Job] { return values(v.jobs.From(from)) }

// JobCount returns the number of jobs in the hot state.
func (v *View) JobCount() int { return v.jobs.Len() }

// ActiveJobs yields the jobs that have not ended for good, by id.
func (v *View) ActiveJobs() iter.Seq[*apiv1.Job] {
	return func(yield func(*apiv1.Job) bool) {
		for id := range v.active.All() {
			if !yield(v.Job(id)) {
				return
			}
		}
	}
}

// ActiveJobCount returns the number of jobs that have not ended for good.
func (v *View) ActiveJobCount() int { return v.active.Len() }

// PendingJobs yields the pending jobs, held ones too, by descending priority and then in the order of submission.
func (v *View) PendingJobs() iter.Seq[*apiv1.Job] {
	return func(yield func(*apiv1.Job) bool) {
		for key := range v.pending.All() {
			if !yield(v.Job(uint32(key))) {
				return
			}
		}
	}
}

// JobCounts returns how many jobs there are in each state that has any.
func (v *View) JobCounts() map[apiv1.JobState]int {
	counts := make(map[apiv1.JobState]int)
	for state, n := range v.byState {
		if n > 0 {
			counts[apiv1.JobState(state)] = n
		}
	}
	return counts
}

// Attempt returns attempt n of a job, or nil.
func (v *View) Attempt(job, n uint32) *apiv1.Attempt {
	a, _ := v.attempts.Get(PackAttempt(job, n))
	return a
}

// Attempts yields the attempts of a job, oldest first.
func (v *View) Attempts(job uint32) iter.Seq[*apiv1.Attempt] {
	return func(yield func(*apiv1.Attempt) bool) {
		for _, a := range v.attempts.From(PackAttempt(job, 0)) {
			if a.JobId != job || !yield(a) {
				return
			}
		}
	}
}

// LiveAttempts yields the attempts that are not ENDED, by job and number.
func (v *View) LiveAttempts() iter.Seq[*apiv1.Attempt] {
	return func(yield func(*apiv1.Attempt) bool) {
		for key := range v.live.All() {
			if !yield(v.Attempt(UnpackAttempt(key))) {
				return
			}
		}
	}
}

// Step returns a step of an attempt, or nil.
func (v *View) Step(job, attempt, step uint32) *apiv1.Step {
	s, _ := v.steps.Get(stepKeyOf(job, attempt, step))
	return s
}

// Steps yields the steps of a job, by attempt; the batch step comes before the others.
func (v *View) Steps(job uint32) iter.Seq[*apiv1.Step] {
	return func(yield func(*apiv1.Step) bool) {
		for _, s := range v.steps.From(stepKey{PackAttempt(job, 0), 0}) {
			if s.JobId != job || !yield(s) {
				return
			}
		}
	}
}

// AttemptSteps yields the steps of one attempt; the batch step comes before the others.
func (v *View) AttemptSteps(job, attempt uint32) iter.Seq[*apiv1.Step] {
	return func(yield func(*apiv1.Step) bool) {
		for _, s := range v.steps.From(stepKey{PackAttempt(job, attempt), 0}) {
			if s.JobId != job || s.Attempt != attempt || !yield(s) {
				return
			}
		}
	}
}

// LiveSteps yields the steps of one attempt that have not ended; the batch step comes before the others.
func (v *View) LiveSteps(job, attempt uint32) iter.Seq[*apiv1.Step] {
	of := PackAttempt(job, attempt)
	return func(yield func(*apiv1.Step) bool) {
		for key := range v.liveSteps.From(stepKey{of, 0}) {
			if key.attempt != of {
				return
			}
			if s, _ := v.steps.Get(key); !yield(s) {
				return
			}
		}
	}
}

// LastStep returns the step with the highest id of an attempt, the batch step not counted, or nil.
func (v *View) LastStep(job, attempt uint32) *apiv1.Step {
	key, s, found := v.steps.Before(stepKey{PackAttempt(job, attempt), ^uint32(0)})
	if !found || key.attempt != PackAttempt(job, attempt) || s.Id == BatchStep {
		return nil
	}
	return s
}

// Node returns a node, or nil.
func (v *View) Node(number uint32) *apiv1.Node {
	n, _ := v.nodes.Get(number)
	return n
}

// NodeByName returns a node, or nil.
func (v *View) NodeByName(name string) *apiv1.Node {
	key, found := v.nodeNames.Get(nodeName{name: name})
	if !found {
		return nil
	}
	return v.Node(key.number)
}

// Nodes yields the nodes by number.
func (v *View) Nodes() iter.Seq[*apiv1.Node] { return values(v.nodes.All()) }

// AilingNodes yields the nodes that checks found something on, or that are drained because of that, by number.
func (v *View) AilingNodes() iter.Seq[*apiv1.Node] {
	return func(yield func(*apiv1.Node) bool) {
		for number := range v.ailing.All() {
			if !yield(v.Node(number)) {
				return
			}
		}
	}
}

// HealthDrains returns the state times of the drains by checks within the last hour before the last of them, oldest first.
func (v *View) HealthDrains() []*timestamppb.Timestamp { return v.healthDrains }

// NodeCount returns the number of nodes that ever joined.
func (v *View) NodeCount() int { return v.nodes.Len() }

// NodeAttempts yields the attempts that are not accounted for on a node, by job and number.
func (v *View) NodeAttempts(number uint32) iter.Seq[*apiv1.Attempt] {
	return func(yield func(*apiv1.Attempt) bool) {
		for key := range v.onNode.From(nodeAttempt{node: number}) {
			if key.node != number || !yield(v.Attempt(UnpackAttempt(key.attempt))) {
				return
			}
		}
	}
}

// NodeTouched returns when anything last changed that the node's desired set is made of: its own record, the attempts not
// accounted for there, their steps and jobs, and the settings. It may be later than necessary (after a restore), never earlier.
// nil if there is no such node.
func (v *View) NodeTouched(number uint32) *apiv1.Revision {
	t, found := v.touched.Get(touch{node: number})
	if !found {
		return nil
	}
	return t.rev.Proto()
}

// NodesTouchedSince yields the numbers of the nodes touched after a revision, oldest touch first.
func (v *View) NodesTouchedSince(after *apiv1.Revision) iter.Seq[uint32] {
	since := RevOf(after)
	return func(yield func(uint32) bool) {
		for t := range v.touchedAt.From(touch{rev: since, node: ^uint32(0)}) {
			if !yield(t.node) {
				return
			}
		}
	}
}

// Members yields the announced controllers by id. Only id, name, addresses, supported level and version are stored.
func (v *View) Members() iter.Seq[*apiv1.Member] { return values(v.members.All()) }

// Member returns an announced controller, or nil.
func (v *View) Member(id string) *apiv1.Member {
	m, _ := v.members.Get(id)
	return m
}

// Blob returns a complete blob, or nil.
func (v *View) Blob(sha256 string) *logv1.BlobRecord {
	b, _ := v.blobs.Get(BlobKey{SHA256: sha256})
	return b
}

// Blobs yields the complete blobs and the unfinished uploads; BlobComplete tells which.
func (v *View) Blobs() iter.Seq[*logv1.BlobRecord] { return values(v.blobs.All()) }

// BlobAt returns the complete blob or the upload under a key, or nil.
func (v *View) BlobAt(key BlobKey) *logv1.BlobRecord {
	b, _ := v.blobs.Get(key)
	return b
}

// Uploads returns the number of unfinished uploads.
func (v *View) Uploads() int { return v.uploads }

// BlobComplete reports whether all of a blob's contents are there.
func BlobComplete(b *logv1.BlobRecord) bool { return uint64(len(b.Data)) == b.Size }

// Request returns a remembered answer, or nil.
func (v *View) Request(id RequestID) *Request {
	r, _ := v.requests.Get(id)
	return r
}

// RequestCount returns the number of remembered answers.
func (v *View) RequestCount() int { return v.requests.Len() }

// OldestRequest returns the remembered answer that expires first, or nil.
func (v *View) OldestRequest() *Request {
	key, found := v.expiry.First()
	if !found {
		return nil
	}
	return v.Request(key.id)
}

// ChangedSince yields what changed after a revision, in order; each record once, with its last change. It returns false
// if that is not known any more, or the revision is of another incarnation: then list again.
func (v *View) ChangedSince(after *apiv1.Revision) (iter.Seq[Change], bool) {
	since := RevOf(after)
	if since.Compare(v.horizon) < 0 || after == nil || since.Incarnation != v.Incarnation() {
		return nil, false
	}
	return func(yield func(Change) bool) {
		for key := range v.changes.From(changeKey{rev: since, kind: ^ChangeKind(0)}) {
			if !yield(key.change()) {
				return
			}
		}
	}, true
}

func values[K, V any](pairs iter.Seq2[K, V]) iter.Seq[V] {
	return func(yield func(V) bool) {
		for _, value := range pairs {
			if !yield(value) {
				return
			}
		}
	}
}
