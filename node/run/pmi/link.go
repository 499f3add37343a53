package pmi

import (
	"bytes"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

const (
	// MinKey is the shortest key of a step in bytes.
	MinKey = 16
	// maxQueue bounds the frames that wait to be sent to one node; a connection that has more is given up.
	maxQueue = 64
	// flushTime bounds the sending of what waits when a connection is to end.
	flushTime = time.Second
	// nonceSize is the size of the random numbers with which a connection begins.
	nonceSize = 32

	magic = "MUSTPMI1"
)

// kind is what a frame says.
type kind byte

const (
	kindPart   kind = 1 // leaf: fence number, pairs
	kindResult kind = 2 // root: fence number, pairs
	kindLeft   kind = 3 // leaf: rank
	kindFail   kind = 4 // both: rank, code, sentence
	kindBye    kind = 5 // both: nothing follows, and the node has ended
)

// keyed returns the code of the parts with a key. Each is preceded by its length, so that no two lists of parts agree.
func keyed(key []byte, parts ...[]byte) []byte {
	h := hmac.New(sha256.New, key)
	for _, part := range parts {
		_, _ = h.Write(binary.BigEndian.AppendUint64(nil, uint64(len(part)))) // a hash takes everything
		_, _ = h.Write(part)
	}
	return h.Sum(nil)
}

// link is a connection between two nodes that have proved to each other that they know the key. Frames are
//
//	length (4 bytes, of the rest) | code (32) | kind (1) | payload
//
// where the code is over direction, number, kind and payload. One goroutine sends, one receives.
type link struct {
	conn             net.Conn
	sendKey, recvKey []byte
	received         uint64

	mu     sync.Mutex
	out    chan []byte // kind and payload
	closed bool
	sent   chan struct{} // closed when the sender has ended
}

// newLink derives the keys of both directions from the step's and both nonces.
func newLink(conn net.Conn, key, rootNonce, leafNonce, index []byte, root bool) *link {
	session := keyed(key, []byte("session"), rootNonce, leafNonce, index)
	l := &link{
		conn: conn, sendKey: keyed(session, []byte("to leaf")), recvKey: keyed(session, []byte("to root")),
		out: make(chan []byte, maxQueue), sent: make(chan struct{}),
	}
	if !root {
		l.sendKey, l.recvKey = l.recvKey, l.sendKey
	}
	return l
}

// welcome is the root's side of the handshake:
//
//	root: magic, nonce    leaf: node index (4), nonce, code    root: code
//
// It returns the node's index. The caller has set a deadline.
func welcome(conn net.Conn, key []byte, nodes int) (int, *link, error) {
	mine := make([]byte, nonceSize)
	_, _ = rand.Read(mine) // never fails
	if _, err := conn.Write(append([]byte(magic), mine...)); err != nil {
		return 0, nil, err
	}
	hello := make([]byte, 4+nonceSize+sha256.Size)
	if _, err := io.ReadFull(conn, hello); err != nil {
		return 0, nil, err
	}
	index, theirs, code := hello[:4], hello[4:4+nonceSize], hello[4+nonceSize:]
	if !hmac.Equal(code, keyed(key, []byte("leaf"), mine, theirs, index)) {
		return 0, nil, errors.New("the other side does not know the step's key")
	}
	n := binary.BigEndian.Uint32(index)
	if n == 0 || uint64(n) >= uint64(nodes) {
		return 0, nil, fmt.Errorf("the step has no node of index %d that could call", n)
	}
	if _, err := conn.Write(keyed(key, []byte("root"), mine, theirs, index)); err != nil {
		return 0, nil, err
	}
	return int(n), newLink(conn, key, mine, theirs, index, true), nil
}

// greet is the leaf's side of the handshake. The caller has set a deadline.
func greet(conn net.Conn, key []byte, index int) (*link, error) {
	hello := make([]byte, len(magic)+nonceSize)
	if _, err := io.ReadFull(conn, hello); err != nil {
		return nil, err
	}
	if string(hello[:len(magic)]) != magic {
		return nil, errors.New("there is no process manager of a step at the other side")
	}
	theirs, mine := hello[len(magic):], make([]byte, nonceSize)
	_, _ = rand.Read(mine) // never fails
	number := binary.BigEndian.AppendUint32(nil, uint32(index))
	answer := append(append(bytes.Clone(number), mine...), keyed(key, []byte("leaf"), theirs, mine, number)...)
	if _, err := conn.Write(answer); err != nil {
		return nil, err
	}
	code := make([]byte, sha256.Size)
	if _, err := io.ReadFull(conn, code); err != nil {
		return nil, fmt.Errorf("the other side did not accept this node: %w", err)
	}
	if !hmac.Equal(code, keyed(key, []byte("root"), theirs, mine, number)) {
		return nil, errors.New("the other side does not know the step's key")
	}
	return newLink(conn, key, theirs, mine, number, false), nil
}

// send queues a frame; false if the connection has ended or is given up because too many frames wait.
func (l *link) send(k kind, payload []byte) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false
	}
	select {
	case l.out <- append([]byte{byte(k)}, payload...):
		return true
	default:
		_ = l.conn.Close() // its receiver finds out
		return false
	}
}

// sendAll sends what is queued until finish or an error. It is to run in a goroutine of its own.
func (l *link) sendAll() {
	defer close(l.sent)
	number, failed := uint64(0), false
	for body := range l.out {
		if failed {
			continue
		}
		head := binary.BigEndian.AppendUint32(nil, uint32(sha256.Size+len(body)))
		head = append(head, keyed(l.sendKey, binary.BigEndian.AppendUint64(nil, number), body)...)
		number++
		buffers := net.Buffers{head, body}
		if _, err := buffers.WriteTo(l.conn); err != nil {
			failed = true
			_ = l.conn.Close() // its receiver finds out
		}
	}
}

// finish sends what waits, for a bounded time, and ends the connection. It may be called again.
func (l *link) finish() {
	l.mu.Lock()
	if !l.closed {
		l.closed = true
		_ = l.conn.SetWriteDeadline(time.Now().Add(flushTime)) // one that has ended needs none
		close(l.out)
	}
	l.mu.Unlock()
	<-l.sent
	_ = l.conn.Close() // everything was sent, or cannot be
}

// receive waits for a frame of at most max bytes.
func (l *link) receive(max int) (kind, []byte, error) {
	var head [4]byte
	if _, err := io.ReadFull(l.conn, head[:]); err != nil {
		return 0, nil, err
	}
	n := binary.BigEndian.Uint32(head[:])
	if n < sha256.Size+1 || uint64(n) > uint64(max)+sha256.Size+1 {
		return 0, nil, fmt.Errorf("a frame of %d bytes", n)
	}
	var b bytes.Buffer // grows with what comes, not with what is announced
	if _, err := io.CopyN(&b, l.conn, int64(n)); err != nil {
		return 0, nil, err
	}
	code, body := b.Bytes()[:sha256.Size], b.Bytes()[sha256.Size:]
	if !hmac.Equal(code, keyed(l.recvKey, binary.BigEndian.AppendUint64(nil, l.received), body)) {
		return 0, nil, errors.New("a frame was changed on its way")
	}
	l.received++
	return kind(body[0]), body[1:], nil
}

// numbered puts a fence's number before its pairs, and unnumbered takes it off.
func numbered(fence uint64, pairs []byte) []byte {
	return append(binary.BigEndian.AppendUint64(make([]byte, 0, 8+len(pairs)), fence), pairs...)
}

func unnumbered(payload []byte) (fence uint64, pairs []byte, err error) {
	if len(payload) < 8 {
		return 0, nil, fmt.Errorf("a frame of %d bytes has no fence", len(payload))
	}
	return binary.BigEndian.Uint64(payload), payload[8:], nil
}

// maxSentence bounds the sentence of a failure in bytes.
const maxSentence = 1000

func encodeFailure(f Failure) []byte {
	b := binary.BigEndian.AppendUint32(nil, uint32(int32(f.Rank)))
	b = binary.BigEndian.AppendUint32(b, uint32(f.Code))
	return append(b, f.Sentence[:min(len(f.Sentence), maxSentence)]...)
}

func decodeFailure(payload []byte) (Failure, error) {
	if len(payload) < 8 || len(payload) > 8+maxSentence {
		return Failure{}, fmt.Errorf("a failure of %d bytes", len(payload))
	}
	return Failure{
		Rank: int(int32(binary.BigEndian.Uint32(payload))), Code: int(binary.BigEndian.Uint32(payload[4:]) & 0xff),
		Sentence: string(payload[8:]), Remote: true,
	}, nil
}
