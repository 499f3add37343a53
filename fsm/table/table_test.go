package table

import (
	"hash/fnv"
	"maps"
	"math/rand"
	"slices"
	"testing"
)

func hash(s string) uint64 {
	h := fnv.New64a()
	h.Write([]byte(s))
	return h.Sum64()
}

// The table must agree with a map after every operation, the digest with one computed from scratch, and clones must not change.
func TestTableAgreesWithAMap(t *testing.T) {
	for seed := range int64(20) {
		rng := rand.New(rand.NewSource(seed))
		table, model := New(func(a, b int) bool { return a < b }, hash), make(map[int]string)
		type kept struct {
			clone *Table[int, string]
			model map[int]string
		}
		var clones []kept
		for range 500 {
			key := rng.Intn(50)
			if rng.Intn(3) > 0 {
				value := string(rune('a' + rng.Intn(26)))
				table.Put(key, value)
				model[key] = value
			} else if _, want := model[key]; table.Delete(key) != want {
				t.Fatalf("seed %d: delete of %d is not %t", seed, key, want)
			} else {
				delete(model, key)
			}
			if rng.Intn(10) == 0 {
				clones = append(clones, kept{table.Clone(), maps.Clone(model)})
			}
		}
		clones = append(clones, kept{table.Clone(), model})
		for _, c := range clones {
			if got := maps.Collect(c.clone.All()); !maps.Equal(got, c.model) {
				t.Fatalf("seed %d: %v, want %v", seed, got, c.model)
			}
			if c.clone.Digest() != c.clone.Rehash(hash) {
				t.Fatalf("seed %d: the digest is not that of the records", seed)
			}
			from := slices.Sorted(maps.Keys(c.model))
			for key := range c.clone.From(25) {
				i := slices.Index(from, key)
				if key < 25 || i < 0 {
					t.Fatalf("seed %d: From(25) has %d", seed, key)
				}
			}
		}
	}
}

// The digest must not depend on the order in which equal contents came about.
func TestDigestDependsOnContentsOnly(t *testing.T) {
	a, b := New(func(a, b int) bool { return a < b }, hash), New(func(a, b int) bool { return a < b }, hash)
	a.Put(1, "x")
	a.Put(2, "y")
	b.Put(2, "z")
	b.Seal()
	b.Put(3, "w")
	b.Put(2, "y")
	b.Put(1, "x")
	b.Delete(3)
	a.Seal()
	b.Seal()
	if a.Digest() != b.Digest() {
		t.Error("equal contents have different digests")
	}
}
