package replica

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"runtime/debug"
	"sync"
	"sync/atomic"

	"github.com/hashicorp/raft"
	"github.com/klauspost/compress/zstd"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	logv1 "github.com/muster-hpc/muster/proto/muster/log/v1"
)

// publication is a published view. A new one is made once per batch of entries that hashicorp/raft hands over.
type publication[V View] struct {
	view  V
	index uint64        // last command entry applied
	next  chan struct{} // closed when the next one is there
}

// machine is the state machine as hashicorp/raft wants it. Only its FSM goroutine calls the methods, except those that say so.
type machine[V View] struct {
	sm       StateMachine[V]
	onHalt   func(error)
	snapshot func() error // why no snapshot may be taken now; nil if it may
	applied  uint64
	halted   error // nothing is applied any more
	current  atomic.Pointer[publication[V]]
	digests  digests
}

func newMachine[V View](sm StateMachine[V], onHalt func(error), snapshot func() error) *machine[V] {
	m := &machine[V]{sm: sm, onHalt: onHalt, snapshot: snapshot}
	m.current.Store(&publication[V]{view: sm.Publish(), next: make(chan struct{})})
	return m
}

func (m *machine[V]) publish() {
	old := m.current.Load()
	m.current.Store(&publication[V]{view: m.sm.Publish(), index: m.applied, next: make(chan struct{})})
	close(old.next)
}

// Apply applies one entry.
func (m *machine[V]) Apply(l *raft.Log) any { return m.ApplyBatch([]*raft.Log{l})[0] }

// ApplyBatch applies committed entries and publishes once. The answer to a command entry is []*logv1.Result, or an error.
func (m *machine[V]) ApplyBatch(logs []*raft.Log) []any {
	out := make([]any, len(logs))
	before := m.applied
	for i, l := range logs {
		if l.Type != raft.LogCommand {
			continue
		}
		if m.halted == nil {
			results, err := m.apply(l)
			if err == nil {
				out[i] = results
				continue
			}
			m.halt(fmt.Errorf("log entry %d of term %d can't be applied: %w", l.Index, l.Term, err))
		}
		out[i] = m.halted
	}
	if m.applied != before {
		m.publish()
	}
	return out
}

func (m *machine[V]) apply(l *raft.Log) (results []*logv1.Result, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	if results, err = m.sm.Apply(l.Index, l.Term, l.Data); err != nil {
		return nil, err
	}
	m.applied = l.Index
	if marksDigest(l.Data) {
		m.digests.put(l.Index, m.sm.Publish().Digest())
	}
	return results, nil
}

func (m *machine[V]) halt(err error) {
	m.halted = err
	m.onHalt(err)
}

// Snapshot captures the published state.
func (m *machine[V]) Snapshot() (raft.FSMSnapshot, error) {
	if m.halted != nil {
		return nil, m.halted
	}
	if err := m.snapshot(); err != nil {
		return nil, err
	}
	p := m.current.Load()
	return &capture{view: p.view, index: p.index}, nil
}

// The state in a snapshot begins with a header: "MUSTATE1", the index of the last command entry (8), the digest (8). The rest is
// zstd of what View.WriteSnapshot writes.
const (
	stateMagic  = "MUSTATE1"
	stateHeader = len(stateMagic) + 16
	zstdWindow  = 1 << 30
)

type capture struct {
	view  View
	index uint64
}

// Persist writes the snapshot.
func (c *capture) Persist(sink raft.SnapshotSink) error {
	h := append([]byte(stateMagic), indexKey(c.index)...)
	h = binary.BigEndian.AppendUint64(h, c.view.Digest())
	if _, err := sink.Write(h); err != nil {
		return err
	}
	z, err := zstd.NewWriter(sink, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1), zstd.WithEncoderCRC(true))
	if err != nil {
		return err
	}
	if err := c.view.WriteSnapshot(z); err != nil {
		return errors.Join(fmt.Errorf("write the state: %w", err), z.Close())
	}
	return z.Close()
}

// Release has nothing to do: views are garbage collected.
func (c *capture) Release() {}

type stateDescription struct{ index, digest uint64 }

func readStateHeader(r io.Reader) (stateDescription, error) {
	h := make([]byte, stateHeader)
	if _, err := io.ReadFull(r, h); err != nil {
		return stateDescription{}, fmt.Errorf("the state's header: %w", err)
	}
	if string(h[:len(stateMagic)]) != stateMagic {
		return stateDescription{}, errors.New("the state's header is not known to this program")
	}
	h = h[len(stateMagic):]
	return stateDescription{index: binary.BigEndian.Uint64(h), digest: binary.BigEndian.Uint64(h[8:])}, nil
}

// Restore replaces the state by that of a snapshot. If it fails the state is unknown, and the member halts.
func (m *machine[V]) Restore(r io.ReadCloser) error {
	if m.halted != nil {
		return m.halted
	}
	if err := m.restore(r); err != nil {
		m.halt(fmt.Errorf("a snapshot can't be restored: %w", err))
		return m.halted
	}
	return nil
}

func (m *machine[V]) restore(r io.Reader) error {
	d, err := readStateHeader(r)
	if err != nil {
		return err
	}
	z, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(zstdWindow))
	if err != nil {
		return err
	}
	defer z.Close()
	if err := m.sm.Restore(z); err != nil {
		return err
	}
	if n, err := io.Copy(io.Discard, z); err != nil { // the checksum is at the end
		return err
	} else if n > 0 {
		return fmt.Errorf("%d bytes follow the state", n)
	}
	m.applied = d.index
	m.publish()
	if got := m.current.Load().view.Digest(); got != d.digest {
		return fmt.Errorf("the digest of the restored state is %016x, the snapshot says %016x", got, d.digest)
	}
	return nil
}

// marksDigest tells whether an encoded logv1.Batch has a Tick that asks for a digest. It looks at tags only, so that not every
// entry is decoded twice.
func marksDigest(entry []byte) bool {
	found := false
	eachField(entry, func(n protowire.Number, command []byte) {
		if n != 1 {
			return
		}
		eachField(command, func(n protowire.Number, op []byte) {
			if n == tickField {
				var t logv1.Tick
				found = found || (proto.Unmarshal(op, &t) == nil && t.GetMarkDigest())
			}
		})
	})
	return found
}

// tickField is the number of the field tick in logv1.Command.
const tickField = 34

// eachField visits the length-delimited fields of an encoded message.
func eachField(b []byte, visit func(protowire.Number, []byte)) {
	for len(b) > 0 {
		num, typ, n := protowire.ConsumeTag(b)
		if n < 0 {
			return
		}
		b = b[n:]
		if typ == protowire.BytesType {
			v, n := protowire.ConsumeBytes(b)
			if n < 0 {
				return
			}
			visit(num, v)
			b = b[n:]
			continue
		}
		if n = protowire.ConsumeFieldValue(num, typ, b); n < 0 {
			return
		}
		b = b[n:]
	}
}

// digests keeps the digests at the last marked entries. Safe for concurrent use.
type digests struct {
	mu   sync.Mutex
	ring []markedDigest
}

type markedDigest struct{ index, digest uint64 }

func (d *digests) put(index, digest uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.ring) == keptDigests {
		d.ring = append(d.ring[:0], d.ring[1:]...)
	}
	d.ring = append(d.ring, markedDigest{index, digest})
}

func (d *digests) get(index uint64) (uint64, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, m := range d.ring {
		if m.index == index {
			return m.digest, true
		}
	}
	return 0, false
}
