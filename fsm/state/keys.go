package state

import (
	"cmp"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
)

// BatchStep is the id of the step that runs a batch script.
const BatchStep uint32 = 4294967291

// Unlimited as a time limit in seconds means that there is none.
const Unlimited uint32 = 4294967295

// Rev is a revision as a comparable value.
type Rev struct {
	Incarnation, Index uint64
	Ordinal            uint32
}

// RevOf returns the value of a revision; nil is the lowest.
func RevOf(r *apiv1.Revision) Rev {
	return Rev{r.GetIncarnation(), r.GetIndex(), r.GetOrdinal()}
}

// Proto returns the revision as a new message.
func (r Rev) Proto() *apiv1.Revision {
	return &apiv1.Revision{Incarnation: r.Incarnation, Index: r.Index, Ordinal: r.Ordinal}
}

// Compare orders revisions: negative if r comes before o.
func (r Rev) Compare(o Rev) int {
	if c := cmp.Compare(r.Incarnation, o.Incarnation); c != 0 {
		return c
	}
	if c := cmp.Compare(r.Index, o.Index); c != 0 {
		return c
	}
	return cmp.Compare(r.Ordinal, o.Ordinal)
}

// RequestID is a request id in binary form: 16 bytes, of which the first 6 are the milliseconds at which it was minted.
type RequestID [16]byte

// MintedMillis returns when the id was minted, in milliseconds since 1970.
func (id RequestID) MintedMillis() int64 {
	var ms int64
	for _, b := range id[:6] {
		ms = ms<<8 | int64(b)
	}
	return ms
}

// Request is a remembered answer. It is kept compactly because there may be millions.
type Request struct {
	// ID is the request's id.
	ID RequestID
	// Payload is the SHA-256 of the request.
	Payload [32]byte
	// Principal asked; shared between records.
	Principal *apiv1.Principal
	// AnsweredNs is the state time of the answer in nanoseconds since 1970.
	AnsweredNs int64
	// Result is the encoded logv1.Result.
	Result []byte
}

// ExpiryNs returns the time in nanoseconds since 1970 from which the memory of the request is counted: the answer, or
// the minting if that lies in the future of the answer. An id is therefore never forgotten before it is too old.
func (r *Request) ExpiryNs() int64 { return max(r.AnsweredNs, r.ID.MintedMillis()*1e6) }

type expiryKey struct {
	ns int64
	id RequestID
}

// BlobKey names a complete blob (Upload 0), or the upload of one user (Upload = user id + 1).
type BlobKey struct {
	SHA256 string
	Upload uint64
}

// stepKey orders steps by job and attempt; within an attempt the batch step comes first, then the others by id.
type stepKey struct {
	attempt uint64
	order   uint32
}

// PackAttempt returns job<<32|attempt, the form in which Node.owners names attempts.
func PackAttempt(job, attempt uint32) uint64 { return uint64(job)<<32 | uint64(attempt) }

// UnpackAttempt inverts PackAttempt.
func UnpackAttempt(key uint64) (job, attempt uint32) { return uint32(key >> 32), uint32(key) }

// stepOrder turns ids so that the batch step, 2^32-5, becomes 0 and step 0 becomes 5.
func stepOrder(id uint32) uint32 { return id - BatchStep }

func stepKeyOf(job, attempt, id uint32) stepKey {
	return stepKey{PackAttempt(job, attempt), stepOrder(id)}
}

type nodeAttempt struct {
	node    uint32
	attempt uint64
}

type nodeName struct {
	name   string
	number uint32
}

type touch struct {
	node uint32
	rev  Rev
}

type tombKey struct {
	rev Rev
	job uint32
}

// ChangeKind is the kind of record that changed.
type ChangeKind uint8

const (
	// ChangeJob is a change of a job.
	ChangeJob ChangeKind = iota + 1
	// ChangeAttempt is a change of an attempt.
	ChangeAttempt
	// ChangeStep is a change of a step.
	ChangeStep
	// ChangeNode is a change of a node.
	ChangeNode
	// ChangeCluster is a change of the configuration, the members or the level.
	ChangeCluster
)

// Change says that a record changed, and when. Only the last change of a record is remembered.
type Change struct {
	// Kind says which of the following numbers are set.
	Kind ChangeKind
	// Job is set for jobs, attempts and steps.
	Job uint32
	// Attempt is set for attempts and steps.
	Attempt uint32
	// Step is set for steps.
	Step uint32
	// Node is set for nodes.
	Node uint32
	// Removed says that the record left the state; a job takes its attempts and steps with it.
	Removed bool
	// Revision of the change.
	Revision *apiv1.Revision
}

// changeKey identifies a change in the order of revisions.
type changeKey struct {
	rev     Rev
	kind    ChangeKind
	removed bool
	a       uint64 // job<<32|attempt, or node
	b       uint32 // step order
}

func lessChange(x, y changeKey) bool {
	if c := x.rev.Compare(y.rev); c != 0 {
		return c < 0
	}
	if x.kind != y.kind {
		return x.kind < y.kind
	}
	if x.a != y.a {
		return x.a < y.a
	}
	return x.b < y.b
}

func (k changeKey) change() Change {
	c := Change{Kind: k.kind, Removed: k.removed, Revision: k.rev.Proto()}
	switch k.kind {
	case ChangeNode:
		c.Node = uint32(k.a)
	case ChangeStep:
		c.Job, c.Attempt = UnpackAttempt(k.a)
		c.Step = k.b + BatchStep
	case ChangeJob, ChangeAttempt:
		c.Job, c.Attempt = UnpackAttempt(k.a)
	case ChangeCluster:
	}
	return c
}
