package replica

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"time"

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

const logRecordVersion = 1

var errRecordShape = errors.New("the record ends early")

// encodeLog makes the sealed record of a log entry:
//
//	version (1) ‖ index (8) ‖ term (8) ‖ type (1) ‖ appended at, ns (8) ‖ len(data) (4) ‖ data ‖ extensions
func encodeLog(l *raft.Log) []byte {
	p := make([]byte, 0, 30+len(l.Data)+len(l.Extensions))
	p = append(p, logRecordVersion)
	p = binary.BigEndian.AppendUint64(p, l.Index)
	p = binary.BigEndian.AppendUint64(p, l.Term)
	p = append(p, byte(l.Type))
	at := int64(0)
	if !l.AppendedAt.IsZero() {
		at = l.AppendedAt.UnixNano()
	}
	p = binary.BigEndian.AppendUint64(p, uint64(at))
	p = binary.BigEndian.AppendUint32(p, uint32(len(l.Data)))
	p = append(p, l.Data...)
	p = append(p, l.Extensions...)
	return seal(indexKey(l.Index), p)
}

// decodeLog verifies and reads the record stored under index. What it fills in does not share the record's memory.
func decodeLog(index uint64, record []byte, l *raft.Log) error {
	p, err := unseal(indexKey(index), record)
	if err != nil {
		return err
	}
	if len(p) < 30 {
		return errRecordShape
	}
	if p[0] != logRecordVersion {
		return fmt.Errorf("record version %d is unknown to this program", p[0])
	}
	*l = raft.Log{Index: binary.BigEndian.Uint64(p[1:]), Term: binary.BigEndian.Uint64(p[9:]), Type: raft.LogType(p[17])}
	if at := int64(binary.BigEndian.Uint64(p[18:])); at != 0 {
		l.AppendedAt = time.Unix(0, at)
	}
	if l.Index != index {
		return fmt.Errorf("the record says index %d", l.Index)
	}
	n := int(binary.BigEndian.Uint32(p[26:]))
	if n > len(p)-30 {
		return errRecordShape
	}
	l.Data = append([]byte(nil), p[30:30+n]...)
	if ext := p[30+n:]; len(ext) > 0 {
		l.Extensions = append([]byte(nil), ext...)
	}
	return nil
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
