package pmi

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
)

// Bounds; each is a row of docs/limits.md.
const (
	// MaxKey and MaxValue are the longest key and value in bytes, those of the PMI-2 library.
	MaxKey   = 64
	MaxValue = 1024
	// maxValue1 is the longest value that PMI-1 tasks are told of: put into one of their lines of 1,024 bytes.
	maxValue1 = 896
	// maxStore is the size of all pairs of a step.
	maxStore = 64 << 20
	// maxPart is the size of what one node contributes to one fence.
	maxPart = 8 << 20
	// maxAttributes is the size of one node's attributes.
	maxAttributes = 1 << 20
	// pairOverhead is what a pair costs beside its bytes.
	pairOverhead = 64
)

// ErrFull says that a store has no room for a pair.
var ErrFull = errors.New("the key-value space is full")

// Pair is a key with its value; both without NUL, at most MaxKey and MaxValue bytes.
type Pair struct{ Key, Value string }

func (p Pair) cost() int { return len(p.Key) + len(p.Value) + pairOverhead }

// check refuses pairs that are no pairs.
func (p Pair) check() error {
	switch {
	case p.Key == "":
		return errors.New("a pair has no key")
	case len(p.Key) > MaxKey:
		return fmt.Errorf("a key has %d bytes; the limit is %d", len(p.Key), MaxKey)
	case len(p.Value) > MaxValue:
		return fmt.Errorf("the value of key %.64q has %d bytes; the limit is %d", p.Key, len(p.Value), MaxValue)
	case strings.ContainsRune(p.Key, 0) || strings.ContainsRune(p.Value, 0):
		return fmt.Errorf("the pair of key %.64q contains NUL", p.Key)
	}
	return nil
}

// store is a bounded map that remembers the order in which its keys came. A later value replaces an earlier one.
type store struct {
	max, size int
	values    map[string]string
	order     []string
}

func newStore(max int) *store { return &store{max: max, values: make(map[string]string)} }

// put takes a pair; ErrFull if there is no room, and nothing has changed then.
func (s *store) put(p Pair) error {
	size := s.size + p.cost()
	old, had := s.values[p.Key]
	if had {
		size -= Pair{p.Key, old}.cost()
	}
	if size > s.max {
		return fmt.Errorf("%w: it has %d bytes", ErrFull, s.max)
	}
	s.size = size
	if !had {
		s.order = append(s.order, p.Key)
	}
	s.values[p.Key] = p.Value
	return nil
}

func (s *store) get(key string) (string, bool) {
	value, ok := s.values[key]
	return value, ok
}

// pairs returns all pairs in the order of their keys' first coming.
func (s *store) pairs() []Pair {
	all := make([]Pair, 0, len(s.order))
	for _, key := range s.order {
		all = append(all, Pair{key, s.values[key]})
	}
	return all
}

// encodePairs puts pairs one behind the other, each string behind its length as a varint.
func encodePairs(pairs []Pair) []byte {
	size := 0
	for _, p := range pairs {
		size += len(p.Key) + len(p.Value) + 4
	}
	b := make([]byte, 0, size)
	for _, p := range pairs {
		b = binary.AppendUvarint(b, uint64(len(p.Key)))
		b = append(b, p.Key...)
		b = binary.AppendUvarint(b, uint64(len(p.Value)))
		b = append(b, p.Value...)
	}
	return b
}

// decodePairs reads what encodePairs wrote. It refuses everything that is not exactly that, and pairs beyond the bounds.
func decodePairs(b []byte) ([]Pair, error) {
	text := string(b) // one copy, of which all strings are parts
	at := 0
	next := func(limit int) (string, error) {
		n, width := binary.Uvarint(b[at:])
		if width <= 0 || n > uint64(limit) || n > uint64(len(b)-at-width) {
			return "", fmt.Errorf("pairs are malformed at byte %d of %d", at, len(b))
		}
		at += width + int(n)
		return text[at-int(n) : at], nil
	}
	var pairs []Pair
	for at < len(b) {
		key, err := next(MaxKey)
		if err != nil {
			return nil, err
		}
		value, err := next(MaxValue)
		if err != nil {
			return nil, err
		}
		p := Pair{key, value}
		if err := p.check(); err != nil {
			return nil, err
		}
		pairs = append(pairs, p)
	}
	return pairs, nil
}
