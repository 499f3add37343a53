package client

import (
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"time"
)

// NewRequestID returns a fresh idempotency key: a UUID of version 7, whose first 48 bits are the milliseconds since
// 1970 and whose other bits are random. Mint it once for each thing a user asks for, and keep it over retries.
func NewRequestID() string {
	var id [16]byte
	if _, err := rand.Read(id[6:]); err != nil {
		panic("client: no randomness: " + err.Error()) // crypto/rand ends the process itself by now
	}
	var ms [8]byte
	binary.BigEndian.PutUint64(ms[:], uint64(time.Now().UnixMilli()))
	copy(id[:6], ms[2:])
	id[6] = 0x70 | id[6]&0x0f
	id[8] = 0x80 | id[8]&0x3f
	var text [36]byte
	hex.Encode(text[0:8], id[0:4])
	hex.Encode(text[9:13], id[4:6])
	hex.Encode(text[14:18], id[6:8])
	hex.Encode(text[19:23], id[8:10])
	hex.Encode(text[24:36], id[10:16])
	text[8], text[13], text[18], text[23] = '-', '-', '-', '-'
	return string(text[:])
}
