package state

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"

	"github.com/google/uuid"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"

	"github.com/muster-hpc/muster/fsm/snapshot"
)

// WriteSnapshot writes the view. It may run while the state goes on. The same view always gives the same bytes.
func (v *View) WriteSnapshot(w io.Writer) error {
	sw := snapshot.NewWriter(w)
	for record := range v.records {
		if err := sw.Write(record); err != nil {
			return err
		}
	}
	return sw.Close()
}

// records yields everything that a snapshot has, the header first.
func (v *View) records(yield func(*logv1.Record) bool) {
	ok := yield(&logv1.Record{Item: &logv1.Record_Header{Header: &logv1.SnapshotHeader{
		Format: snapshot.Format, Level: v.level, Revision: v.revision, Digest: v.digest,
	}}}) && yield(&logv1.Record{Item: &logv1.Record_Cluster{Cluster: v.Cluster()}})
	for _, n := range v.nodes.All() {
		ok = ok && yield(&logv1.Record{Item: &logv1.Record_Node{Node: n}})
	}
	for _, m := range v.members.All() {
		ok = ok && yield(&logv1.Record{Item: &logv1.Record_Member{Member: m}})
	}
	for _, b := range v.blobs.All() {
		ok = ok && yield(&logv1.Record{Item: &logv1.Record_Blob{Blob: b}})
	}
	for j := range v.Jobs(0) {
		ok = ok && yield(&logv1.Record{Item: &logv1.Record_Job{Job: j}})
		if !ok {
			return
		}
	}
	for _, a := range v.attempts.All() {
		ok = ok && yield(&logv1.Record{Item: &logv1.Record_Attempt{Attempt: a}})
	}
	for _, s := range v.steps.All() {
		ok = ok && yield(&logv1.Record{Item: &logv1.Record_Step{Step: s}})
	}
	for _, r := range v.requests.All() {
		ok = ok && yield(&logv1.Record{Item: &logv1.Record_Request{Request: r.record()}})
		if !ok {
			return
		}
	}
	for _, t := range v.tombstones.All() {
		ok = ok && yield(&logv1.Record{Item: &logv1.Record_Tombstone{Tombstone: t}})
	}
}

func (r *Request) record() *logv1.RequestRecord {
	result := &logv1.Result{}
	if err := proto.Unmarshal(r.Result, result); err != nil {
		panic("fsm/state: remembered answer cannot be decoded: " + err.Error()) // we encoded it
	}
	return &logv1.RequestRecord{
		RequestId: uuid.UUID(r.ID).String(), Principal: r.Principal, PayloadSha256: r.Payload[:], Result: result,
		AnsweredAt: &timestamppb.Timestamp{Seconds: r.AnsweredNs / 1e9, Nanos: int32(r.AnsweredNs % 1e9)},
	}
}

// EncodeResult returns the canonical encoding of an answer, as remembered in Request.Result.
func EncodeResult(r *logv1.Result) ([]byte, error) { return canonical.Marshal(r) }

func requestOf(r *logv1.RequestRecord) (*Request, error) {
	id, err := uuid.Parse(r.RequestId)
	if err != nil {
		return nil, fmt.Errorf("request id %q: %w", r.RequestId, err)
	}
	if len(r.PayloadSha256) != sha256.Size || r.AnsweredAt.CheckValid() != nil || r.Result == nil || r.Principal == nil {
		return nil, fmt.Errorf("request %s is incomplete", r.RequestId)
	}
	result, err := EncodeResult(r.Result)
	if err != nil {
		return nil, fmt.Errorf("request %s: %w", r.RequestId, err)
	}
	return &Request{
		ID: RequestID(id), Payload: [32]byte(r.PayloadSha256), Principal: r.Principal,
		AnsweredNs: r.AnsweredAt.Seconds*1e9 + int64(r.AnsweredAt.Nanos), Result: result,
	}, nil
}

// Restore reads a snapshot into a new state. It verifies the checksums, that every record is whole and there once, the
// contents of blobs, the trailer, and that the digest of what was read is the header's. clean must report messages with
// unknown fields. Nothing is returned unless everything is right.
func Restore(r io.Reader, clean func(proto.Message) error) (*State, error) {
	reader := snapshot.NewReader(r)
	first, err := reader.Read()
	if err != nil {
		if errors.Is(err, io.EOF) {
			return nil, errors.New("the snapshot is empty")
		}
		return nil, err
	}
	header := first.GetHeader()
	if header == nil {
		return nil, errors.New("the snapshot does not begin with a header")
	}
	if header.Format != snapshot.Format {
		return nil, fmt.Errorf("the snapshot has format %d; this program reads %d", header.Format, snapshot.Format)
	}
	l := loader{State: New(), principals: make(map[string]*apiv1.Principal)}
	for {
		record, err := reader.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		if err := clean(record); err != nil {
			return nil, fmt.Errorf("snapshot: %w", err)
		}
		if err := l.load(record); err != nil {
			return nil, fmt.Errorf("snapshot: %w", err)
		}
	}
	return l.finish(header)
}

// loader fills a state. Equal small messages of neighbouring records are shared, as they were when they were made.
type loader struct {
	*State
	seen       bool // cluster record
	revision   *apiv1.Revision
	time       *timestamppb.Timestamp
	owner      *apiv1.JobOwner
	principals map[string]*apiv1.Principal
}

func (l *loader) load(record *logv1.Record) error {
	if c, isCluster := record.Item.(*logv1.Record_Cluster); isCluster {
		return l.cluster(c.Cluster)
	}
	if !l.seen {
		return errors.New("a record comes before the cluster's")
	}
	switch item := record.Item.(type) {
	case *logv1.Record_Node:
		return l.node(item.Node)
	case *logv1.Record_Member:
		if l.Member(item.Member.GetId()) != nil {
			return errDuplicate("member", item.Member.GetId())
		}
		l.members.Put(item.Member.GetId(), item.Member)
		return nil
	case *logv1.Record_Blob:
		return l.blob(item.Blob)
	case *logv1.Record_Job:
		return l.job(item.Job)
	case *logv1.Record_Attempt:
		return l.attempt(item.Attempt)
	case *logv1.Record_Step:
		return l.step(item.Step)
	case *logv1.Record_Request:
		return l.request(item.Request)
	case *logv1.Record_Tombstone:
		t := item.Tombstone
		if t.GetKind() != "job" || t.GetKey() > uint64(^uint32(0)) || t.GetRevision() == nil {
			return fmt.Errorf("tombstone of %q %d is not one that this program knows", t.GetKind(), t.GetKey())
		}
		if _, twice := l.tombstones.Get(tombKey{RevOf(t.Revision), uint32(t.Key)}); twice {
			return errDuplicate("tombstone of job", t.Key)
		}
		l.bury(t)
		return nil
	default:
		return fmt.Errorf("a record of kind %T does not belong here", record.Item)
	}
}

func (l *loader) cluster(c *logv1.Cluster) error {
	if l.seen || c == nil {
		return errDuplicate("the record of the cluster", c.GetClusterId())
	}
	l.seen = true
	s := l.State
	s.clusterID, s.level, s.now, s.View.revision = c.ClusterId, c.Level, c.StateTime, c.Revision
	s.nextJob, s.nextNode, s.healthDrains = c.NextJobId, c.NextNodeNumber, c.HealthDrains
	if c.Configuration != nil {
		if err := s.Configure(c.Configuration, c.ConfigurationRevision); err != nil {
			return err
		}
	}
	if s.nextJob == 0 || s.nextNode == 0 || s.level > 0 && (s.configuration == nil || s.now.CheckValid() != nil || c.Revision == nil) {
		return errors.New("the record of the cluster is incomplete")
	}
	return nil
}

// share returns the last equal revision instead of a new one.
func (l *loader) share(r *apiv1.Revision) *apiv1.Revision {
	if l.revision == nil || RevOf(r) != RevOf(l.revision) {
		l.revision = r
	}
	return l.revision
}

func (l *loader) shareTime(t *timestamppb.Timestamp) *timestamppb.Timestamp {
	if t == nil {
		return nil
	}
	if l.time == nil || l.time.Seconds != t.Seconds || l.time.Nanos != t.Nanos {
		l.time = t
	}
	return l.time
}

func (l *loader) job(j *apiv1.Job) error {
	if j.GetId() == 0 || j.Spec == nil || j.Status == nil || j.Owner == nil || j.Revision == nil {
		return fmt.Errorf("job %d is incomplete", j.GetId())
	}
	if s := j.Status.State; s <= apiv1.JobState_JOB_STATE_UNSPECIFIED || int(s) >= stateCount {
		return fmt.Errorf("job %d has the unknown state %d", j.Id, s)
	}
	if l.Job(j.Id) != nil {
		return errDuplicate("job", j.Id)
	}
	j.Revision = l.share(j.Revision)
	j.Status.SubmitTime, j.Status.EligibleTime = l.shareTime(j.Status.SubmitTime), l.shareTime(j.Status.EligibleTime)
	if l.owner == nil || !proto.Equal(l.owner, j.Owner) {
		l.owner = j.Owner
	}
	j.Owner = l.owner
	l.PutJob(j)
	return nil
}

func (l *loader) attempt(a *apiv1.Attempt) error {
	if a.GetJobId() == 0 || a.Number == 0 || a.Fence == nil || a.Placement == nil || a.Revision == nil {
		return fmt.Errorf("attempt %d.%d is incomplete", a.GetJobId(), a.GetNumber())
	}
	if l.Job(a.JobId) == nil {
		return fmt.Errorf("attempt %d.%d belongs to no job", a.JobId, a.Number)
	}
	if l.Attempt(a.JobId, a.Number) != nil {
		return errDuplicate("attempt", fmt.Sprintf("%d.%d", a.JobId, a.Number))
	}
	a.Revision = l.share(a.Revision)
	l.PutAttempt(a)
	return nil
}

func (l *loader) step(s *apiv1.Step) error {
	if s.GetJobId() == 0 || s.Attempt == 0 || s.Spec == nil || s.Placement == nil || s.Revision == nil {
		return fmt.Errorf("step %d.%d.%d is incomplete", s.GetJobId(), s.GetAttempt(), s.GetId())
	}
	if l.Attempt(s.JobId, s.Attempt) == nil {
		return fmt.Errorf("step %d.%d.%d belongs to no attempt", s.JobId, s.Attempt, s.Id)
	}
	if l.Step(s.JobId, s.Attempt, s.Id) != nil {
		return errDuplicate("step", fmt.Sprintf("%d.%d.%d", s.JobId, s.Attempt, s.Id))
	}
	s.Revision = l.share(s.Revision)
	l.PutStep(s)
	return nil
}

func (l *loader) node(n *apiv1.Node) error {
	if n.GetNumber() == 0 || n.Spec == nil || n.Instance == nil || n.Revision == nil {
		return fmt.Errorf("node %d is incomplete", n.GetNumber())
	}
	if l.Node(n.Number) != nil || l.NodeByName(n.Spec.Name) != nil {
		return errDuplicate("node", n.Spec.Name)
	}
	l.PutNode(n)
	return nil
}

func (l *loader) blob(b *logv1.BlobRecord) error {
	key := BlobKey{SHA256: b.GetSha256()}
	switch {
	case BlobComplete(b):
		if sum := sha256.Sum256(b.Data); hex.EncodeToString(sum[:]) != b.Sha256 {
			return fmt.Errorf("the contents of blob %s are damaged", b.Sha256)
		}
	case len(b.Uids) != 1:
		return fmt.Errorf("upload of blob %s is not by one user", b.Sha256)
	default:
		key.Upload = uint64(b.Uids[0]) + 1
	}
	if l.BlobAt(key) != nil {
		return errDuplicate("blob", b.Sha256)
	}
	l.PutBlob(key, b)
	return nil
}

func (l *loader) request(record *logv1.RequestRecord) error {
	r, err := requestOf(record)
	if err != nil {
		return err
	}
	if l.Request(r.ID) != nil {
		return errDuplicate("request", record.RequestId)
	}
	name := r.Principal.String()
	if shared := l.principals[name]; shared != nil {
		r.Principal = shared
	} else {
		l.principals[name] = r.Principal
	}
	l.PutRequest(r)
	return nil
}

// finish sets what is not in records and compares the digests.
func (l *loader) finish(header *logv1.SnapshotHeader) (*State, error) {
	s := l.State
	if !l.seen {
		return nil, errors.New("the snapshot has no record of the cluster")
	}
	if s.level != header.Level || RevOf(s.View.revision) != RevOf(header.Revision) {
		return nil, errors.New("the snapshot's header and its record of the cluster differ")
	}
	if digest := s.Digest(); digest != header.Digest {
		return nil, fmt.Errorf("the snapshot's contents have digest %016x, its header says %016x", digest, header.Digest)
	}
	// What was forgotten before is not known any more; and nodes are asked to look once more.
	switch {
	case s.tombstones.Len() >= MaxTombstones:
		key, _, _ := s.tombstones.First()
		s.horizon = key.rev
	default:
		s.horizon = Rev{Incarnation: s.Incarnation()}
	}
	s.clusterChanged()
	s.touchAll()
	return s, nil
}
