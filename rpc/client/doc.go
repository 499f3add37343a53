// Package client is how programs talk to a cluster: it learns who the user is and where the controllers are from the
// local agent, finds and follows the leader, and retries what is safe.
//
// Every unary call may be sent again, to the same or another controller, because mutations carry a request id whose
// answer the cluster remembers. So a call that finds no leader waits for the next one, a call that is met with silence
// is sent to another controller as well, and the first answer counts. Streams are not resumed here: the caller knows
// from which revision or offset to go on.
//
// Invariants:
//   - A refusal (the cluster understood and said no) is returned at once; only silence, connection failures and
//     "not now" are retried.
//   - A request is never changed between tries: the request id stays.
//   - When the deadline passes, the error names the controllers that were tried and what each of them said.
//   - Opening a client makes one round trip, to the local agent; it connects to a controller with the first call.
//
// It is called by all commands, by agents (with their certificate instead of a token) and by tests. It links neither a
// tracing nor a command-line library, because the Slurm-named commands must start in milliseconds.
package client
