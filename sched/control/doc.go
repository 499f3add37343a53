// Package control is the leader's hands: while its controller leads, it plans and places jobs, starts gangs that are prepared, keeps
// track of which nodes are alive, declares the lost ones lost, prunes what is old, compares the controllers' digests and looks after
// the members.
//
// All its memory belongs to one term (a reign) and is gone with it: last-heard times, readiness, timers, back-offs. What a new leader
// needs, the next round of Syncs tells it. Every decision goes through the log with the term it was made in; the state machine
// checks it again and may refuse it.
//
// Invariants:
//   - A batch of liveness is acknowledged only when an entry that was proposed after the batch came in has committed: a paused or deposed
//     leader grants nothing (unless Faults plants that bug).
//   - A gang is started only when every node of it reports the current fence prepared.
//   - While more nodes than Settings.lost_limit_percent allows are overdue or deaf, no node is declared lost or fenced. A new leader treats
//     every lease as granted at the beginning of its term.
//   - The planner's view fed by changes equals one translated from scratch; one file translates.
//   - Every goroutine belongs to the scope of Lead, which waits for all of them.
//
// cmd/muster-controller passes Lead to the replica; rpc/server calls ReportLiveness, JoinNode and Status. It never talks to agents and
// keeps nothing on disk.
package control
