package replica

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"

	"github.com/hashicorp/raft"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// seal puts a checksum before payload. The key takes part in it, so that a record found under another key is noticed.
//
//	record = crc32c(key, payload) (4 bytes, big endian) ‖ payload
func seal(key, payload []byte) []byte {
	out := make([]byte, 4, 4+len(payload))
	out = append(out, payload...)
	binary.BigEndian.PutUint32(out, crc32.Update(crc32.Checksum(key, castagnoli), castagnoli, payload))
	return out
}

// unseal verifies a record and returns its payload, which shares the record's memory.
func unseal(key, record []byte) ([]byte, error) {
	if len(record) < 4 {
		return nil, fmt.Errorf("the record has %d bytes", len(record))
	}
	want := binary.BigEndian.Uint32(record)
	got := crc32.Update(crc32.Checksum(key, castagnoli), castagnoli, record[4:])
	if want != got {
		return nil, fmt.Errorf("checksum %08x, stored %08x", got, want)
	}
	return record[4:], nil
}

func indexKey(index uint64) []byte { return binary.BigEndian.AppendUint64(nil, index) }

// endsIndex is the index under which the ends of the log are kept among its entries, so that raft-boltdb writes them in the same
// transaction. No entry gets that far. Being the last key it lies in the page that every append writes anyway.
const endsIndex = math.MaxUint64

const (
	logRecordVersion = 1
	trailerSize      = 17
	endsSize         = 20
)

var errRecordShape = errors.New("the record ends early")

// seam is what an entry's record says beside the entry, so that the next one can refer to it.
type seam struct {
	sum    uint32 // checksum of the record
	before uint32 // checksum of the record before it; 0 for the first of an empty log
	bytes  uint64 // data and extensions of all entries since the log was empty, this one included
}

// sealLog makes what is stored for an entry that follows the one of seam last. The data stays where it is; the extensions become
//
//	version (1) ‖ crc32c (4) ‖ crc32c of the entry before (4) ‖ bytes so far (8) ‖ extensions
//
// all big endian. The checksum is over index (8), term (8), type (1), appended at in ns (8), len(data) (8), data, and the extensions as stored
// without the checksum.
func sealLog(l *raft.Log, last seam) (*raft.Log, seam) {
	s := seam{before: last.sum, bytes: last.bytes + uint64(len(l.Data)+len(l.Extensions))}
	x := make([]byte, trailerSize, trailerSize+len(l.Extensions))
	x[0] = logRecordVersion
	binary.BigEndian.PutUint32(x[5:], s.before)
	binary.BigEndian.PutUint64(x[9:], s.bytes)
	x = append(x, l.Extensions...)
	r := *l
	r.Extensions = x
	s.sum = sumOf(&r)
	binary.BigEndian.PutUint32(x[1:], s.sum)
	return &r, s
}

// sumOf is the checksum of a stored entry.
func sumOf(r *raft.Log) uint32 {
	h := make([]byte, 0, 34)
	h = binary.BigEndian.AppendUint64(h, r.Index)
	h = binary.BigEndian.AppendUint64(h, r.Term)
	h = append(h, byte(r.Type))
	at := int64(0)
	if !r.AppendedAt.IsZero() {
		at = r.AppendedAt.UnixNano()
	}
	h = binary.BigEndian.AppendUint64(h, uint64(at))
	h = binary.BigEndian.AppendUint64(h, uint64(len(r.Data)))
	h = append(h, r.Extensions[0])
	c := crc32.Update(crc32.Checksum(h, castagnoli), castagnoli, r.Data)
	return crc32.Update(c, castagnoli, r.Extensions[5:])
}

// unsealLog verifies what is stored under index and turns it into the entry again.
func unsealLog(index uint64, r *raft.Log) (seam, error) {
	x := r.Extensions
	if len(x) < trailerSize {
		return seam{}, errRecordShape
	}
	if x[0] != logRecordVersion {
		return seam{}, fmt.Errorf("record version %d is unknown to this program", x[0])
	}
	s := seam{sum: binary.BigEndian.Uint32(x[1:]), before: binary.BigEndian.Uint32(x[5:]), bytes: binary.BigEndian.Uint64(x[9:])}
	if got := sumOf(r); got != s.sum {
		return seam{}, fmt.Errorf("checksum %08x, stored %08x", got, s.sum)
	}
	if r.Index != index {
		return seam{}, fmt.Errorf("the record says index %d", r.Index)
	}
	if r.Extensions = nil; len(x) > trailerSize {
		r.Extensions = x[trailerSize:]
	}
	return s, nil
}

// logEnds are the indexes of the first and the last entry, 0 if there is none, and the checksum of the last one's record.
type logEnds struct {
	first, last uint64
	sum         uint32
}

// sealEnds makes the record of the log's ends: first (8) ‖ last (8) ‖ checksum of the last entry (4), sealed like an entry.
func sealEnds(e logEnds) *raft.Log {
	p := binary.BigEndian.AppendUint64(make([]byte, 0, endsSize), e.first)
	p = binary.BigEndian.AppendUint64(p, e.last)
	p = binary.BigEndian.AppendUint32(p, e.sum)
	r, _ := sealLog(&raft.Log{Index: endsIndex, Data: p}, seam{})
	return r
}

func decodeEnds(p []byte) (logEnds, error) {
	if len(p) != endsSize {
		return logEnds{}, errRecordShape
	}
	e := logEnds{first: binary.BigEndian.Uint64(p), last: binary.BigEndian.Uint64(p[8:]), sum: binary.BigEndian.Uint32(p[16:])}
	if (e.first == 0) != (e.last == 0) || e.first > e.last || e.last >= endsIndex {
		return logEnds{}, fmt.Errorf("the log goes from %d to %d", e.first, e.last)
	}
	return e, nil
}

// encodeStable makes the payload of the stable store's only record: a list of key and value, each with its length (4).
// One record for all keys, so that losing a key, for example a vote, can't go unnoticed.
func encodeStable(keys []string, values map[string][]byte) []byte {
	var p []byte
	for _, k := range keys {
		p = binary.BigEndian.AppendUint32(p, uint32(len(k)))
		p = append(p, k...)
		p = binary.BigEndian.AppendUint32(p, uint32(len(values[k])))
		p = append(p, values[k]...)
	}
	return p
}

func decodeStable(p []byte) (map[string][]byte, error) {
	next := func() ([]byte, error) {
		if len(p) < 4 {
			return nil, errRecordShape
		}
		n := binary.BigEndian.Uint32(p)
		if uint64(n) > uint64(len(p)-4) {
			return nil, errRecordShape
		}
		out := append([]byte(nil), p[4:4+n]...)
		p = p[4+n:]
		return out, nil
	}
	values := map[string][]byte{}
	for len(p) > 0 {
		k, err := next()
		if err != nil {
			return nil, err
		}
		if values[string(k)], err = next(); err != nil {
			return nil, err
		}
	}
	return values, nil
}
