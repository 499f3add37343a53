package fsm

import (
	"math/rand"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

// scramble sets fields of a message at random: small numbers, a few known names and hashes, submessages that may be missing.
func scramble(rng *rand.Rand, m protoreflect.Message, depth int) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		if rng.Intn(100) < 35 || depth > 6 {
			continue
		}
		if f.ContainingOneof() != nil && !f.HasOptionalKeyword() && rng.Intn(f.ContainingOneof().Fields().Len()) > 0 {
			continue
		}
		switch {
		case f.IsList() && f.Message() != nil:
			for range rng.Intn(3) {
				scramble(rng, m.Mutable(f).List().AppendMutable().Message(), depth+1)
			}
		case f.IsList():
			for range rng.Intn(4) {
				m.Mutable(f).List().Append(scalar(rng, f))
			}
		case f.Message() != nil:
			scramble(rng, m.Mutable(f).Message(), depth+1)
		default:
			m.Set(f, scalar(rng, f))
		}
	}
}

var (
	someNumbers = []uint64{0, 1, 1, 1, 2, 2, 3, 4, 9, 17, 1000, 1001, uint64(BatchStep), 1<<32 - 1}
	someStrings = []string{"", "n1", "n2", "main", "alone", "ALL", "n[1-2]", "/", "boot-n1", "1", "x\x00", hashOf([]byte(script)), "m1"}
)

func scalar(rng *rand.Rand, f protoreflect.FieldDescriptor) protoreflect.Value {
	n := someNumbers[rng.Intn(len(someNumbers))]
	switch f.Kind() {
	case protoreflect.BoolKind:
		return protoreflect.ValueOfBool(n%2 == 0)
	case protoreflect.StringKind:
		return protoreflect.ValueOfString(someStrings[rng.Intn(len(someStrings))])
	case protoreflect.BytesKind:
		return protoreflect.ValueOfBytes([]byte(script[:rng.Intn(len(script)+1)]))
	case protoreflect.EnumKind:
		values := f.Enum().Values()
		return protoreflect.ValueOfEnum(values.Get(rng.Intn(values.Len())).Number())
	case protoreflect.Int32Kind:
		return protoreflect.ValueOfInt32(int32(uint32(n)))
	case protoreflect.Int64Kind:
		return protoreflect.ValueOfInt64(int64(n))
	case protoreflect.Uint64Kind:
		if rng.Intn(10) == 0 {
			n = 1<<64 - 1
		}
		return protoreflect.ValueOfUint64(n)
	default:
		return protoreflect.ValueOfUint32(uint32(n))
	}
}

// Whatever a command says, it is applied or refused: nothing panics, nothing breaks the invariants, nothing stops the replica. Among
// the senseless commands are sensible ones, so that there is something to break.
func TestSenselessCommandsAreRefused(t *testing.T) {
	arms := (&logv1.Command{}).ProtoReflect().Descriptor().Oneofs().ByName("op").Fields()
	accepted := make(map[protoreflect.Name]int)
	for seed := range int64(40) {
		w := newWalk(t, seed)
		w.join("n1", 8, 4)
		w.must(member, &logv1.AnnounceMember{Member: &apiv1.Member{Id: "m1", SupportedLevel: MaxLevel}})
		for i := range 400 {
			if i%3 == 0 {
				cmd, _ := w.next()
				w.entry(cmd)
				continue
			}
			arm := arms.Get(w.rng.Intn(arms.Len()))
			cmd := &logv1.Command{}
			scramble(w.rng, cmd.ProtoReflect().Mutable(arm).Message(), 0)
			cmd.Principal = pick(w, []*apiv1.Principal{member, member, alice, root, agentOf("n1"), {}})
			if b := cmd.GetBootstrap(); b != nil {
				b.Incarnation = 1 // another incarnation is another story
			}
			if a := cmd.GetAnnounceMember().GetMember(); a != nil {
				a.SupportedLevel = min(a.SupportedLevel, MaxLevel) // a level raised too high stops this program, as it must
			}
			results, err := w.try(cmd)
			if err != nil {
				t.Fatalf("seed %d: %s: %v", seed, text(cmd), err)
			}
			if results[0].Refusal == nil {
				accepted[arm.Name()]++
			}
			if i%10 == 0 {
				if err := CheckInvariants(w.m.Publish()); err != nil {
					t.Fatalf("seed %d: after %s: %v", seed, text(cmd), err)
				}
			}
		}
	}
	t.Logf("accepted: %v", accepted)
}

// A submission, a step or a node as empty as possible must not break anything either.
func TestEmptyCommandsAreRefused(t *testing.T) {
	arms := (&logv1.Command{}).ProtoReflect().Descriptor().Oneofs().ByName("op").Fields()
	for i := range arms.Len() {
		r := newRig(t)
		r.boot()
		cmd := &logv1.Command{}
		cmd.ProtoReflect().Mutable(arms.Get(i))
		for _, who := range []*apiv1.Principal{member, alice} {
			c := proto.Clone(cmd).(*logv1.Command)
			c.Principal = who
			if _, err := r.try(c); err != nil {
				t.Errorf("%s: %v", arms.Get(i).Name(), err)
			}
			r.check()
		}
	}
}
