// Package rpc holds what every caller and every answerer of Muster's calls has in common: errors and their codes, who
// a caller is, who may call what, and how much.
//
// Invariants:
//   - A refusal is an apiv1.ErrorDetail inside a connect error: a stable reason for programs, one sentence for people.
//   - A principal comes from a verified certificate or a verified token, never from a request.
//   - Every procedure has exactly one row in the authorisation table (authorize.go); a call without a row is refused,
//     and a test fails.
//   - A token is accepted only if a node of this cluster signed it, for its own name, and it has not expired.
//   - A panic in a handler becomes an internal error of that call and a line in the log; the process goes on.
//
// It is called by rpc/server, rpc/client, node/serve and the agent. It never stores anything, never dials, and knows
// nothing of jobs.
package rpc
