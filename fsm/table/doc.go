// Package table is an ordered table of immutable records with an incremental digest and copies that cost the same
// whatever their size.
//
// Invariants: a record is never changed after it was put; Digest is the sum, modulo 2^64, of the hashes of the rows, so
// it depends only on the contents and not on the order in which they came; a clone never changes.
//
// Only fsm/state uses it. Exactly one goroutine may change or clone a table; clones may be read by any number of
// goroutines meanwhile. It never does I/O and knows nothing of what the records mean.
package table
