package server

import (
	"sync"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// schema is a type of message as requests of it are looked through: in their encoded form, which costs a tenth of doing so by reflection
// and is made anyway for the hash of the request.
type schema struct {
	name   string
	fields map[protowire.Number]*schemaField
}

type schemaField struct {
	name string
	wire protowire.Type // of its only encoding; another one is an unknown field
	text bool
	free bool    // it may have control characters
	sub  *schema // of a message
}

// schemas has those that were used, by full name.
var schemas struct {
	sync.RWMutex
	byName map[protoreflect.FullName]*schema
}

func schemaOf(m proto.Message) *schema {
	d := m.ProtoReflect().Descriptor()
	schemas.RLock()
	s := schemas.byName[d.FullName()]
	schemas.RUnlock()
	if s != nil {
		return s
	}
	schemas.Lock()
	defer schemas.Unlock()
	if schemas.byName == nil {
		schemas.byName = map[protoreflect.FullName]*schema{}
	}
	return learn(d)
}

// learn makes the schema of a type and of those inside it. The caller holds the lock until all of them are whole.
func learn(d protoreflect.MessageDescriptor) *schema {
	if s := schemas.byName[d.FullName()]; s != nil {
		return s
	}
	s := &schema{name: string(d.FullName()), fields: map[protowire.Number]*schemaField{}}
	schemas.byName[d.FullName()] = s
	for i := range d.Fields().Len() {
		field := d.Fields().Get(i)
		f := &schemaField{name: string(field.Name()), wire: wireType(field),
			text: field.Kind() == protoreflect.StringKind, free: mayControl[field.Name()]}
		if field.Message() != nil && !field.IsMap() { // no message that is proposed has a map
			f.sub = learn(field.Message())
		}
		s.fields[field.Number()] = f
	}
	return s
}

func wireType(field protoreflect.FieldDescriptor) protowire.Type {
	if field.IsPacked() {
		return protowire.BytesType
	}
	switch field.Kind() {
	case protoreflect.StringKind, protoreflect.BytesKind, protoreflect.MessageKind:
		return protowire.BytesType
	case protoreflect.GroupKind:
		return protowire.StartGroupType
	case protoreflect.Fixed32Kind, protoreflect.Sfixed32Kind, protoreflect.FloatKind:
		return protowire.Fixed32Type
	case protoreflect.Fixed64Kind, protoreflect.Sfixed64Kind, protoreflect.DoubleKind:
		return protowire.Fixed64Type
	case protoreflect.BoolKind, protoreflect.EnumKind, protoreflect.Int32Kind, protoreflect.Sint32Kind, protoreflect.Uint32Kind,
		protoreflect.Int64Kind, protoreflect.Sint64Kind, protoreflect.Uint64Kind:
		return protowire.VarintType
	}
	return -1 // a kind that this program does not know: every such field is refused as unknown
}

// walk visits the fields of an encoded message, without those inside the messages in it. A nil field is one that the type does not have, or
// what can't be read; value is the content of length-delimited fields. It ends when visit returns false.
func (s *schema) walk(encoded []byte, visit func(f *schemaField, value []byte) bool) {
	for len(encoded) > 0 {
		number, wire, n := protowire.ConsumeTag(encoded)
		if n < 0 {
			visit(nil, nil)
			return
		}
		f := s.fields[number]
		if f != nil && f.wire != wire {
			f = nil
		}
		encoded = encoded[n:]
		var value []byte
		if wire == protowire.BytesType {
			value, n = protowire.ConsumeBytes(encoded)
		} else {
			n = protowire.ConsumeFieldValue(number, wire, encoded)
		}
		if n < 0 {
			visit(nil, nil)
			return
		}
		if !visit(f, value) {
			return
		}
		encoded = encoded[n:]
	}
}

// unknown returns the name of a message in an encoded one that has fields unknown here, or "".
func (s *schema) unknown(encoded []byte) string {
	found := ""
	s.walk(encoded, func(f *schemaField, value []byte) bool {
		if f == nil {
			found = s.name
		} else if f.sub != nil {
			found = f.sub.unknown(value)
		}
		return found == ""
	})
	return found
}

// unprintable returns the name of a text field in an encoded message that contains a control character, or "".
func (s *schema) unprintable(encoded []byte) string {
	found := ""
	s.walk(encoded, func(f *schemaField, value []byte) bool {
		switch {
		case f == nil || f.free:
		case f.text && hasControl(value):
			found = f.name
		case f.sub != nil:
			found = f.sub.unprintable(value)
		}
		return found == ""
	})
	return found
}

// hasControl tells whether UTF-8 text has a character of Unicode's class Cc: U+0000 to U+001F, and U+007F to U+009F.
func hasControl(text []byte) bool {
	for i, b := range text {
		if b < 0x20 || b == 0x7f || b == 0xc2 && i+1 < len(text) && text[i+1] < 0xa0 {
			return true
		}
	}
	return false
}
