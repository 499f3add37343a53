// Package level is the ladder: the one table that says which feature level an operation or a field of a command needs.
//
// Invariants: every operation of logv1.Command has a row; a field without a row needs no more than its operation; levels only
// rise. A changed outcome of an old operation is a new level: Apply then asks the state for its level. The log in
// fsm/testdata/levelN is replayed for ever, so that a change that forgot the ladder is noticed.
//
// fsm and the replica (to fill Command.level) call it. It never looks at the state.
package level
