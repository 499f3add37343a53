// Package fsm is the replicated state machine: Apply is the only thing that changes the state, and gives the same state and the
// same answers on every replica.
//
// What commands mean is written in docs/design/contracts.md and beside the messages in proto/muster/log/v1. The state itself,
// with its tables, indexes and snapshots, is fsm/state; reads go through View. fsm/level is the ladder of features, fsm/shape
// the arithmetic of resource requests, fsm/snapshot the container of snapshots, fsm/table the tables.
//
// Invariants, checked by CheckInvariants:
//   - a device of a node belongs to at most one attempt, and stays with it until the node has accounted for the attempt;
//   - a job has at most one attempt that is not ENDED, and none begins before the one before is accounted for everywhere;
//   - every command changes the state as a whole or not at all; a refusal is data, with a reason and a sentence;
//   - an entry that cannot be understood completely changes nothing and stops the replica;
//   - state time and revisions never go back.
//
// fsm/replica owns the Machine and calls Apply, Publish and Restore from one goroutine; everybody else has Views. The
// package never reads a clock, never draws random numbers, never ranges over a map where the order could matter, starts no
// goroutine, does no I/O besides snapshots' readers and writers, does not log, and has no floating point.
package fsm
