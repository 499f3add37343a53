package server

import (
	"strings"
	"testing"
	"unicode"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	nodev1 "github.com/muster-hpc/muster/proto/muster/node/v1"
	peerv1 "github.com/muster-hpc/muster/proto/muster/peer/v1"
)

// unprintableIn returns the name of a text field in m that contains a control character, or "".
func unprintableIn(m protoreflect.Message) string {
	found := ""
	check := func(field protoreflect.FieldDescriptor, value protoreflect.Value) {
		switch {
		case field.Message() != nil:
			found = unprintableIn(value.Message())
		case field.Kind() == protoreflect.StringKind && strings.ContainsFunc(value.String(), unicode.IsControl):
			found = string(field.Name())
		}
	}
	m.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		if field.IsMap() || mayControl[field.Name()] {
			return true // no message that is proposed has a map
		}
		if !field.IsList() {
			check(field, value)
			return found == ""
		}
		for i := range value.List().Len() {
			if check(field, value.List().Get(i)); found != "" {
				return false
			}
		}
		return true
	})
	return found
}

// unknownIn returns the name of a message in m that has unknown fields, or "".
func unknownIn(m protoreflect.Message) string {
	if len(m.GetUnknown()) > 0 {
		return string(m.Descriptor().FullName())
	}
	found := ""
	m.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		if field.Message() == nil || field.IsMap() {
			return true // no message that is proposed has a map
		}
		if !field.IsList() {
			found = unknownIn(value.Message())
			return found == ""
		}
		for i := range value.List().Len() {
			if found = unknownIn(value.List().Get(i).Message()); found != "" {
				return false
			}
		}
		return true
	})
	return found
}

// looked compares what is found in an encoded message with what reflection finds in the decoded one.
func looked(t *testing.T, empty proto.Message, encoded []byte) {
	message := empty.ProtoReflect().New().Interface()
	if proto.Unmarshal(encoded, message) != nil {
		return
	}
	again, err := encode(message)
	if err != nil {
		t.Fatal(err)
	}
	s := schemaOf(message)
	if got, want := s.unknown(again), unknownIn(message.ProtoReflect()); (got == "") != (want == "") {
		t.Errorf("%x: unknown fields in %q, by reflection in %q", encoded, got, want)
	}
	if got, want := s.unprintable(again), unprintableIn(message.ProtoReflect()); (got == "") != (want == "") {
		t.Errorf("%x: a control character in %q, by reflection in %q", encoded, got, want)
	}
}

func fullRequest() *apiv1.SubmitJobsRequest {
	request := &apiv1.SubmitJobsRequest{RequestId: "id", Jobs: []*apiv1.JobSubmission{batch("one"), batch("two")}}
	request.Jobs[1].Spec.Partitions = []string{"a", "b"}
	request.Jobs[1].Spec.Args = []string{"line\nbreak"}
	request.Jobs[1].Spec.Resources = &apiv1.ResourceRequest{NodesMin: 3, NodeList: []string{"n1", "n2"}}
	return request
}

// FuzzEncodedMessagesAreLookedThroughLikeDecodedOnes has the types that come from outside and are proposed.
func FuzzEncodedMessagesAreLookedThroughLikeDecodedOnes(f *testing.F) {
	full, err := encode(fullRequest())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(full)
	f.Add(append(full, 0xfa, 0x7f, 1, 7))
	f.Add(protowire.AppendVarint(protowire.AppendTag(full, 1, protowire.VarintType), 7)) // a known number, encoded as another type
	f.Fuzz(func(t *testing.T, encoded []byte) {
		for _, empty := range []proto.Message{&apiv1.SubmitJobsRequest{}, &apiv1.UpdateJobRequest{}, &apiv1.CreateStepRequest{},
			&apiv1.ConfigureRequest{}, &nodev1.JoinRequest{}, &nodev1.SyncRequest{}, &peerv1.ProposeRequest{}} {
			looked(t, empty, encoded)
		}
	})
}

func TestEveryTextFieldOfASpecificationIsLookedThrough(t *testing.T) {
	fields := (&apiv1.JobSpec{}).ProtoReflect().Descriptor().Fields()
	texts := 0
	for i := range fields.Len() {
		field := fields.Get(i)
		if field.Kind() != protoreflect.StringKind || field.IsMap() {
			continue
		}
		texts++
		for _, text := range []string{"a\nb", "\x1b[2J", "\x7f", "\u0085", "é\u009f", "plain é ÿ \u00a0"} {
			spec := &apiv1.JobSpec{}
			if field.IsList() {
				spec.ProtoReflect().Mutable(field).List().Append(protoreflect.ValueOfString(text))
			} else {
				spec.ProtoReflect().Set(field, protoreflect.ValueOfString(text))
			}
			want := strings.ContainsFunc(text, unicode.IsControl) && !mayControl[field.Name()]
			if got := printable(spec) != nil; got != want {
				t.Errorf("%s is %q: refused %v, want %v", field.Name(), text, got, want)
			}
		}
	}
	if texts < 5 {
		t.Errorf("only %d text fields", texts)
	}
}

func TestUnknownFieldsAreFoundAtEveryDepth(t *testing.T) {
	for depth, spoil := range []func(*apiv1.SubmitJobsRequest) proto.Message{
		func(r *apiv1.SubmitJobsRequest) proto.Message { return r },
		func(r *apiv1.SubmitJobsRequest) proto.Message { return r.Jobs[1] },
		func(r *apiv1.SubmitJobsRequest) proto.Message { return r.Jobs[1].Spec },
		func(r *apiv1.SubmitJobsRequest) proto.Message { return r.Jobs[1].Spec.Resources },
	} {
		request := fullRequest()
		if err := known(request); err != nil {
			t.Fatal(err)
		}
		inside := spoil(request).ProtoReflect()
		inside.SetUnknown([]byte{0xfa, 0x7f, 1, 7})
		if err := known(request); err == nil || !strings.Contains(err.Error(), string(inside.Descriptor().FullName())) {
			t.Errorf("depth %d: %v", depth, err)
		}
	}
}

// BenchmarkLook looks through a request of one job as its submission does.
func BenchmarkLook(b *testing.B) {
	request := fullRequest()
	request.Jobs = request.Jobs[:1]
	b.Run("encoded", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			encoded, _ := encode(request)
			if knownIn(request, encoded) != nil || schemaOf(request).unprintable(encoded) != "" {
				b.Fatal()
			}
		}
	})
	b.Run("reflection", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := encode(request); err != nil || unknownIn(request.ProtoReflect())+unprintableIn(request.ProtoReflect()) != "" {
				b.Fatal()
			}
		}
	})
}
