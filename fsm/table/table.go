package table

import (
	"iter"

	"github.com/google/btree"
)

// degree is the branching of the trees: the measured compromise between the size of the nodes copied after a clone and
// the depth of the tree.
const degree = 32

// row is a record with its hash. It is shared by all clones; hash is written once, before the first clone sees it.
type row[V any] struct {
	value  V
	hash   uint64
	hashed bool
	dead   bool // replaced or deleted before it was hashed
}

type entry[K, V any] struct {
	key K
	row *row[V]
}

// Table maps keys to immutable records in key order. The zero value is not usable: see New.
type Table[K, V any] struct {
	tree  *btree.BTreeG[entry[K, V]]
	hash  func(V) uint64
	sum   uint64
	fresh []*row[V] // rows put since the last Seal
}

// New returns an empty table. less orders the keys; hash must depend on the whole record and on nothing else, and must
// differ between tables that are summed together.
func New[K, V any](less func(a, b K) bool, hash func(V) uint64) *Table[K, V] {
	return &Table[K, V]{
		tree: btree.NewG(degree, func(a, b entry[K, V]) bool { return less(a.key, b.key) }),
		hash: hash,
	}
}

// Put stores a record under a key, replacing the one that was there.
func (t *Table[K, V]) Put(key K, value V) {
	r := &row[V]{value: value}
	old, replaced := t.tree.ReplaceOrInsert(entry[K, V]{key, r})
	if replaced {
		t.drop(old.row)
	}
	t.fresh = append(t.fresh, r)
}

// Delete removes a record and reports whether there was one.
func (t *Table[K, V]) Delete(key K) bool {
	old, found := t.tree.Delete(entry[K, V]{key: key})
	if found {
		t.drop(old.row)
	}
	return found
}

// drop takes a row out of the sum. A row that clones can see has been hashed, and is not written here.
func (t *Table[K, V]) drop(r *row[V]) {
	if r.hashed {
		t.sum -= r.hash
		return
	}
	r.dead = true
}

// Seal hashes the rows put since the last Seal. Rows that were replaced meanwhile are never hashed: a record that
// changes many times between two clones costs one hash.
func (t *Table[K, V]) Seal() {
	for i, r := range t.fresh {
		if !r.dead {
			r.hash, r.hashed = t.hash(r.value), true
			t.sum += r.hash
		}
		t.fresh[i] = nil
	}
	t.fresh = t.fresh[:0]
}

// Digest returns the sum of the rows' hashes as of the last Seal.
func (t *Table[K, V]) Digest() uint64 { return t.sum }

// Rehash computes the digest from the records alone with the given hash, to check Digest.
func (t *Table[K, V]) Rehash(hash func(V) uint64) uint64 {
	var sum uint64
	t.tree.Ascend(func(e entry[K, V]) bool {
		sum += hash(e.row.value)
		return true
	})
	return sum
}

// Clone seals the table and returns a copy that never changes. It takes constant time after the sealing.
func (t *Table[K, V]) Clone() *Table[K, V] {
	t.Seal()
	return &Table[K, V]{tree: t.tree.Clone(), hash: t.hash, sum: t.sum}
}

// Get returns the record under a key.
func (t *Table[K, V]) Get(key K) (V, bool) {
	e, found := t.tree.Get(entry[K, V]{key: key})
	if !found {
		var none V
		return none, false
	}
	return e.row.value, true
}

// Len returns the number of records.
func (t *Table[K, V]) Len() int { return t.tree.Len() }

// First returns the lowest key with its record.
func (t *Table[K, V]) First() (K, V, bool) {
	e, found := t.tree.Min()
	if !found {
		var value V
		return e.key, value, false
	}
	return e.key, e.row.value, true
}

// From yields the records with keys not below from, ascending.
func (t *Table[K, V]) From(from K) iter.Seq2[K, V] {
	return func(yield func(K, V) bool) {
		t.tree.AscendGreaterOrEqual(entry[K, V]{key: from}, func(e entry[K, V]) bool { return yield(e.key, e.row.value) })
	}
}

// All yields every record, ascending.
func (t *Table[K, V]) All() iter.Seq2[K, V] {
	return func(yield func(K, V) bool) {
		t.tree.Ascend(func(e entry[K, V]) bool { return yield(e.key, e.row.value) })
	}
}

// Before returns the record with the highest key not above at.
func (t *Table[K, V]) Before(at K) (K, V, bool) {
	var (
		key   K
		value V
		found bool
	)
	t.tree.DescendLessOrEqual(entry[K, V]{key: at}, func(e entry[K, V]) bool {
		key, value, found = e.key, e.row.value, true
		return false
	})
	return key, value, found
}
