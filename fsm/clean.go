package fsm

import (
	"fmt"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

// messageFields maps every message that can be in the log or in a snapshot to its fields that hold messages or enums, so that
// the search for what this program does not know visits nothing else.
var messageFields = collectFields(make(map[protoreflect.FullName][]protoreflect.FieldDescriptor),
	(&logv1.Batch{}).ProtoReflect().Descriptor(), (&logv1.Record{}).ProtoReflect().Descriptor())

func collectFields(found map[protoreflect.FullName][]protoreflect.FieldDescriptor, messages ...protoreflect.MessageDescriptor) map[protoreflect.FullName][]protoreflect.FieldDescriptor {
	for _, d := range messages {
		if _, seen := found[d.FullName()]; seen {
			continue
		}
		found[d.FullName()] = nil
		var holding []protoreflect.FieldDescriptor
		for i := range d.Fields().Len() {
			f := d.Fields().Get(i)
			if f.IsMap() {
				panic("fsm: " + string(f.FullName()) + " is a map; records and commands have none, because their order is not defined")
			}
			if f.Enum() != nil {
				holding = append(holding, f)
			}
			if f.Message() != nil {
				holding = append(holding, f)
				collectFields(found, f.Message())
			}
		}
		found[d.FullName()] = holding
	}
	return found
}

// clean returns an error if a message or anything in it has a field or an enum value that this program does not know: it
// was made by one that knows more, and ignoring that would make replicas differ.
func clean(m proto.Message) error { return cleanMessage(m.ProtoReflect()) }

func cleanMessage(m protoreflect.Message) error {
	d := m.Descriptor()
	if unknown := m.GetUnknown(); len(unknown) > 0 {
		return fmt.Errorf("%s has a field that this program does not know (%d bytes)", d.FullName(), len(unknown))
	}
	for _, f := range messageFields[d.FullName()] {
		if !m.Has(f) {
			continue
		}
		value := m.Get(f)
		if f.Enum() != nil {
			if err := cleanEnum(f, value); err != nil {
				return err
			}
			continue
		}
		if !f.IsList() {
			if err := cleanMessage(value.Message()); err != nil {
				return err
			}
			continue
		}
		list := value.List()
		for i := range list.Len() {
			if err := cleanMessage(list.Get(i).Message()); err != nil {
				return err
			}
		}
	}
	return nil
}

func cleanEnum(f protoreflect.FieldDescriptor, value protoreflect.Value) error {
	if f.IsList() {
		list := value.List()
		for i := range list.Len() {
			if n := list.Get(i).Enum(); f.Enum().Values().ByNumber(n) == nil {
				return fmt.Errorf("%s has the value %d, which this program does not know", f.FullName(), n)
			}
		}
		return nil
	}
	if n := value.Enum(); f.Enum().Values().ByNumber(n) == nil {
		return fmt.Errorf("%s has the value %d, which this program does not know", f.FullName(), n)
	}
	return nil
}
