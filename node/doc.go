// Package node is the agent: it carries out on one node what the controllers desire, reports what happened, and proves
// that the node is alive.
//
// One loop exchanges state with any controller (Sync), one compares what is desired with what is there (Reconcile) and
// begins what must be done; each step has a goroutine that prepares it and then follows its supervisor (package
// node/run). Everything that matters is in files, so that an agent may be killed at any moment: the journal, a record
// for each attempt and step, and what the supervisors write.
//
// Invariants:
//   - Tasks are executed at most once for a fence: the record of a step is on disk before its supervisor is launched, and
//     the supervisor's mark before the first exec. What is desired but was started before is never started again.
//   - What is on the node and not desired is reported, never ended. An attempt is ended only by an order that names its
//     fence, or by the preparation of a later placement of the same job.
//   - Nothing starts without a valid lease; the lease runs on CLOCK_BOOTTIME from the sending of the Sync that won it.
//   - The end of a step is in the journal before it is reported, and is reported until it is acknowledged.
//   - An attempt is reported as reaped only when no process of it is left.
//   - Nothing waits for ever: a supervisor that does not answer is continued and then killed (pulse.go), and processes that nothing ends
//     keep only their devices, once the controllers know (confine.go).
//   - Two agents never share a directory.
//
// It is called by cmd/muster-agent and read by node/serve. It never decides where work runs, and never imports the
// state machine or the planner. (Asking peers whether a silence is everybody's, and relaying their Syncs, will stand
// between the lease and the supervisors' deadline: see lease.go and sync.go.)
package node
