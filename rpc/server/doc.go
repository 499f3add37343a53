// Package server answers the calls of a controller: the services of users (jobs, cluster), of agents, and of the other
// controllers, all on one port.
//
// Handlers are thin: find out who asks (package rpc), validate, stamp, propose or read, encode. Decisions belong to the
// state machine and to the scheduler.
//
// Invariants:
//   - A write is answered only with the result of Apply: after commit, by the leader. A follower passes it on; while no
//     leader is known it waits, until the caller's deadline.
//   - A command is proposed a second time only if it carries a request id, or does the same when applied twice.
//   - A linearizable read takes its index from the leader after the call came in, never from this controller's memory.
//     Concurrent reads share one question.
//   - A Sync is answered only from a state at or above what the agent has seen. A grant leaves only when the leader has
//     committed an entry after receiving the beat, and this controller has applied it.
//   - What an agent shall do (desired.go) is a pure function of a view and the node's number.
//   - A controller in quarantine answers nobody but its peers' questions about itself.
//   - A long poll wakes only when something of its own has changed, or the controller leaves.
//
// It is used by cmd/muster-controller and by tests. It never imports the scheduler or the agent, keeps no state that
// matters across a restart, and never decides where work runs.
package server
