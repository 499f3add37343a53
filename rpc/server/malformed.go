package server

import (
	"fmt"

	"connectrpc.com/connect/v2"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	apiv1 "github.com/muster-hpc/muster/proto/muster/api/v1"
	"github.com/muster-hpc/muster/rpc"
)

// malformed makes a refusal for a request that cannot be understood.
func malformed(subject, format string, args ...any) error {
	return rpc.Refuse(connect.CodeInvalidArgument, rpc.ReasonMalformed, subject, fmt.Sprintf(format, args...))
}

// tooMany refuses more items than a bound.
func tooMany(subject string, n, limit int) error {
	if n <= limit {
		return nil
	}
	return rpc.Refuse(connect.CodeInvalidArgument, rpc.ReasonTooMany, subject,
		fmt.Sprintf("the request has %d %s; the limit is %d: split it", n, subject, limit))
}

// encode returns the encoding by which repetitions of a request are recognised.
func encode(message proto.Message) ([]byte, error) {
	encoded, err := proto.MarshalOptions{Deterministic: true}.Marshal(message)
	if err != nil {
		return nil, malformed("", "the request cannot be encoded: %v", err)
	}
	return encoded, nil
}

// known refuses messages with fields that this program does not know. What is proposed is stored and applied by every
// controller, and a controller that meets an unknown field in an entry has to stop: so it must not get that far.
func known(message proto.Message) error {
	encoded, err := encode(message)
	if err != nil {
		return err
	}
	return knownIn(message, encoded)
}

// knownIn is known for a message whose encoding is at hand.
func knownIn(message proto.Message, encoded []byte) error {
	if name := schemaOf(message).unknown(encoded); name != "" {
		return rpc.Refuse(connect.CodeInvalidArgument, "UNKNOWN_FIELD", name, fmt.Sprintf(
			"the request has a field in %s that this controller does not know: the client is newer than the cluster; upgrade the controllers first", name))
	}
	return nil
}

// printable refuses text with control characters: job names, reasons and paths are shown to others, whose terminals must
// not obey them, and a line break would forge lines of output that programs read. Arguments and command lines may contain
// anything; who shows them quotes them.
func printable(message proto.Message) error {
	encoded, err := encode(message)
	if err != nil {
		return err
	}
	if name := schemaOf(message).unprintable(encoded); name != "" {
		return malformed(name, "the %s contains a control character, such as a line break or an escape: leave it out", name)
	}
	return nil
}

// mayControl are the fields that programs take as they are.
var mayControl = map[protoreflect.Name]bool{"args": true, "command_line": true}

// detailOf returns the detail in an error, or one made of it.
func detailOf(err error, subject string) *apiv1.ErrorDetail {
	if detail := rpc.Detail(err); detail != nil {
		return detail
	}
	return &apiv1.ErrorDetail{Reason: rpc.ReasonInternal, Subject: subject, Sentence: rpc.Sentence(err)}
}
