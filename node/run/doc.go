// Package run is the agent's side of a step's supervisor: it launches supervisors, speaks with them, adopts them after
// a restart of the agent, and finds out the true end of a step whose supervisor is gone.
//
// A supervisor (program muster-supervisor, package node/run/supervise) owns the processes of one step on one node. The
// two share a directory, which outlives both:
//
//	plan      what shall run (StepPlan); written by the agent before the supervisor starts
//	lock      held with flock by the supervisor for as long as it lives
//	socket    the supervisor's Unix socket
//	started   exists once tasks were, or may have been, executed; on disk before the first exec
//	out.RANK  spooled standard output, err.RANK standard error
//	result    the last StepState, on disk before anybody is told that the step ended
//	log       what the supervisor has to say, and its stack if it crashes
//
// A Pool has supervisors that were started ahead: what their process needs is behind them, and they wait at a socket for the
// directory of their step, with the descriptors that Launch would have handed down. Until then they end with their pool, also
// when the agent is killed; from then on nothing distinguishes them, not even their command line.
//
// Invariants:
//   - Tasks of a directory are executed at most once, however often supervisors are launched there.
//   - A state with phase ENDED or FAILED that was received, or is returned by ReadResult, is final and on disk.
//   - When Conclude returns without error no process of the step is left. A result that a supervisor wrote may name some
//     that nothing can end (StepState.stuck, Haunted): what they hold is not free.
//
// The agent's life with a step:
//
//	new step:       Launch → Events until PREPARED → Start → Events until ENDED → (journal) → Dismiss → remove the directory
//	agent restart:  for each directory: Attach; if ErrGone: Conclude
//	handle closes:  Attach again; if ErrGone: Conclude
//
// A supervisor that is just leaving is neither reached nor gone for some milliseconds: Attach (another error) and
// Conclude (ErrAlive) are then to be tried again.
//
// Callers: package node. The package never decides that a step should end, never removes a step's directory, and never
// kills anything but processes that carry the step's cookie or are in its control group.
package run
