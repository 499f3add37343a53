package run

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"google.golang.org/protobuf/proto"
)

// MaxFrame is the longest message of the protocol in bytes, without its length.
const MaxFrame = 1 << 20

// MaxInput is the longest piece of stdin that Handle.Input puts into one message, in bytes.
const MaxInput = 256 << 10

// ErrFrame means that the peer sent something that is not a message of the protocol. The connection must be closed.
var ErrFrame = errors.New("malformed message")

// ReadFrame reads one message: four bytes of length, big endian, then the message. io.EOF if the peer closed between
// messages; ErrFrame if the message is too long or does not decode.
func ReadFrame(r io.Reader, m proto.Message) error {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return err
	}
	n := binary.BigEndian.Uint32(head[:])
	if n > MaxFrame {
		return fmt.Errorf("%w: %d bytes, at most %d are allowed", ErrFrame, n, MaxFrame)
	}
	b := make([]byte, n)
	if _, err := io.ReadFull(r, b); err != nil {
		return fmt.Errorf("%w: cut short: %w", ErrFrame, err)
	}
	if err := proto.Unmarshal(b, m); err != nil {
		return fmt.Errorf("%w: %w", ErrFrame, err)
	}
	return nil
}

// WriteFrame writes one message in one call of Write. ErrFrame if it is too long.
func WriteFrame(w io.Writer, m proto.Message) error {
	b, err := proto.MarshalOptions{}.MarshalAppend(make([]byte, 4, 256), m)
	if err != nil {
		return fmt.Errorf("encoding a message: %w", err)
	}
	if len(b)-4 > MaxFrame {
		return fmt.Errorf("%w: %d bytes, at most %d are allowed", ErrFrame, len(b)-4, MaxFrame)
	}
	binary.BigEndian.PutUint32(b, uint32(len(b)-4))
	_, err = w.Write(b)
	return err
}
