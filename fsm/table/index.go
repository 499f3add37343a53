package table

import (
	"iter"

	"github.com/google/btree"
)

// Index is an ordered set of keys derived from tables: it has no part in the digest. The rules of Table about
// goroutines hold for it too.
type Index[K any] struct {
	tree *btree.BTreeG[K]
}

// NewIndex returns an empty index ordered by less.
func NewIndex[K any](less func(a, b K) bool) *Index[K] {
	return &Index[K]{tree: btree.NewG(degree, btree.LessFunc[K](less))}
}

// Put adds a key, replacing an equal one.
func (x *Index[K]) Put(key K) { x.tree.ReplaceOrInsert(key) }

// Delete removes a key.
func (x *Index[K]) Delete(key K) { x.tree.Delete(key) }

// Get returns the stored key that is equal to key.
func (x *Index[K]) Get(key K) (K, bool) { return x.tree.Get(key) }

// Len returns the number of keys.
func (x *Index[K]) Len() int { return x.tree.Len() }

// First returns the lowest key.
func (x *Index[K]) First() (K, bool) { return x.tree.Min() }

// Clone returns a copy that never changes, in constant time.
func (x *Index[K]) Clone() *Index[K] { return &Index[K]{tree: x.tree.Clone()} }

// From yields the keys not below from, ascending.
func (x *Index[K]) From(from K) iter.Seq[K] {
	return func(yield func(K) bool) { x.tree.AscendGreaterOrEqual(from, btree.ItemIteratorG[K](yield)) }
}

// All yields every key, ascending.
func (x *Index[K]) All() iter.Seq[K] {
	return func(yield func(K) bool) { x.tree.Ascend(btree.ItemIteratorG[K](yield)) }
}
