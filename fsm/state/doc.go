// Package state holds the replicated state: the tables, the indexes derived from them, the reads over both, the digest
// and the codec of snapshots. It knows how records hang together, not what commands mean: that is fsm.
//
// Invariants: records are immutable once they are put; an index can always be rebuilt from the tables; the digest
// depends on the tables alone, so a replica restored from a snapshot has the same; a View never changes.
//
// Only fsm uses State; everybody reads through View (as fsm.View). One goroutine owns a State; Views are read by any number
// of goroutines while the State goes on. The package reads no clock, does no I/O besides the reader and writer it is given, and
// starts no goroutine.
package state
