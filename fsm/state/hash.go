package state

import (
	"encoding/binary"

	"github.com/cespare/xxhash/v2"
	"google.golang.org/protobuf/proto"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

// Tags keep equal records of different tables apart in the digest. They are the numbers of logv1.Record's fields.
const (
	tagCluster byte = iota + 2
	tagJob
	tagAttempt
	tagStep
	tagNode
	tagMember
	tagBlob
	tagRequest
	_
	tagTombstone
)

// canonical is the encoding that digests are made of. protobuf promises the same bytes for the same message only within
// one version of the library; ours encodes fields by number since its first release, and a change would show as replicas of
// different versions whose digests differ, which is noticed and harms nothing but the upgrade.
var canonical = proto.MarshalOptions{Deterministic: true}

// hasher hashes records; it reuses its buffer and belongs to one goroutine.
type hasher struct{ buf []byte }

func (h *hasher) message(tag byte, m proto.Message) uint64 {
	buf, err := canonical.MarshalAppend(append(h.buf[:0], tag), m)
	if err != nil {
		// Only invalid UTF-8 makes this fail, and nothing gets into the state without having been decoded from valid UTF-8.
		panic("fsm/state: record cannot be encoded: " + err.Error())
	}
	h.buf = buf
	return xxhash.Sum64(buf)
}

func (h *hasher) job(j *apiv1.Job) uint64         { return h.message(tagJob, j) }
func (h *hasher) attempt(a *apiv1.Attempt) uint64 { return h.message(tagAttempt, a) }
func (h *hasher) step(s *apiv1.Step) uint64       { return h.message(tagStep, s) }
func (h *hasher) node(n *apiv1.Node) uint64       { return h.message(tagNode, n) }
func (h *hasher) member(m *apiv1.Member) uint64   { return h.message(tagMember, m) }
func (h *hasher) tombstone(t *logv1.Tombstone) uint64 {
	return h.message(tagTombstone, t)
}

// blob leaves the contents of a complete blob out: they were verified against the SHA-256 when they came, and are
// verified again on restore, while the count of references changes with every job.
func (h *hasher) blob(b *logv1.BlobRecord) uint64 {
	bare := CopyBlob(b)
	bare.Data = nil
	sum := h.message(tagBlob, bare)
	if !BlobComplete(b) {
		sum ^= xxhash.Sum64(b.Data)
	}
	return sum
}

// request hashes the compact form; the snapshot's form carries the same.
func (h *hasher) request(r *Request) uint64 {
	buf := append(h.buf[:0], tagRequest)
	buf = append(buf, r.ID[:]...)
	buf = append(buf, r.Payload[:]...)
	buf = binary.LittleEndian.AppendUint64(buf, uint64(r.AnsweredNs))
	buf = binary.LittleEndian.AppendUint64(buf, uint64(len(r.Result)))
	buf = append(buf, r.Result...)
	buf, err := canonical.MarshalAppend(buf, r.Principal)
	if err != nil {
		panic("fsm/state: principal cannot be encoded: " + err.Error())
	}
	h.buf = buf
	return xxhash.Sum64(buf)
}
