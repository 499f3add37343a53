package state

import (
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

// fill sets every field of a message.
func fill(m protoreflect.Message) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		switch {
		case f.IsList() && f.Message() != nil:
			m.Mutable(f).List().AppendMutable()
		case f.IsList():
			m.Mutable(f).List().Append(value(f))
		case f.Message() != nil:
			m.Mutable(f)
		default:
			m.Set(f, value(f))
		}
	}
}

func value(f protoreflect.FieldDescriptor) protoreflect.Value {
	switch f.Kind() {
	case protoreflect.BoolKind:
		return protoreflect.ValueOfBool(true)
	case protoreflect.StringKind:
		return protoreflect.ValueOfString("x")
	case protoreflect.BytesKind:
		return protoreflect.ValueOfBytes([]byte("x"))
	case protoreflect.EnumKind:
		return protoreflect.ValueOfEnum(1)
	case protoreflect.Int32Kind:
		return protoreflect.ValueOfInt32(1)
	case protoreflect.Int64Kind:
		return protoreflect.ValueOfInt64(1)
	case protoreflect.Uint32Kind:
		return protoreflect.ValueOfUint32(1)
	case protoreflect.Uint64Kind:
		return protoreflect.ValueOfUint64(1)
	default:
		panic("no value for " + f.Kind().String())
	}
}

func TestCopiesForgetNoField(t *testing.T) {
	check := func(m, c proto.Message) {
		if !proto.Equal(m, c) {
			t.Errorf("the copy of %s lacks a field", m.ProtoReflect().Descriptor().Name())
		}
	}
	job, status, spec, attempt := &apiv1.Job{}, &apiv1.JobStatus{}, &apiv1.JobSpec{}, &apiv1.Attempt{}
	step, node, blob := &apiv1.Step{}, &apiv1.Node{}, &logv1.BlobRecord{}
	for _, m := range []proto.Message{job, status, spec, attempt, step, node, blob} {
		fill(m.ProtoReflect())
	}
	check(job, CopyJob(job))
	check(status, CopyJobStatus(status))
	check(spec, CopyJobSpec(spec))
	check(attempt, CopyAttempt(attempt))
	check(step, CopyStep(step))
	check(node, CopyNode(node))
	check(blob, CopyBlob(blob))
}

func TestEveryJobStateIsCounted(t *testing.T) {
	if len(apiv1.JobState_name) != stateCount {
		t.Errorf("there are %d job states and room for %d", len(apiv1.JobState_name), stateCount)
	}
}

// Watches that lag behind more removals than are remembered must be told to list again.
func TestForgottenRemovalsMakeWatchesListAgain(t *testing.T) {
	s := New()
	revision := func(i int) *apiv1.Revision { return Rev{Incarnation: 1, Index: uint64(i)}.Proto() }
	for i := 1; i <= MaxTombstones+10; i++ {
		s.revision = revision(i)
		s.PutJob(&apiv1.Job{Id: uint32(i), Revision: s.revision, Spec: &apiv1.JobSpec{}, Owner: &apiv1.JobOwner{},
			Status: &apiv1.JobStatus{State: apiv1.JobState_JOB_STATE_COMPLETED}})
		s.RemoveJob(uint32(i))
	}
	v := s.Publish()
	if _, ok := v.ChangedSince(revision(9)); ok {
		t.Error("the removal of job 10 is forgotten; who saw revision 9 was not told")
	}
	changes, ok := v.ChangedSince(revision(10))
	if !ok {
		t.Fatal("revision 10 is the horizon; it must still do")
	}
	n := 0
	for c := range changes {
		if !c.Removed {
			t.Fatalf("change %+v", c)
		}
		n++
	}
	if n != MaxTombstones {
		t.Errorf("%d removals, want %d", n, MaxTombstones)
	}
	if err := v.CheckIndexes(); err != nil {
		t.Error(err)
	}
}
