// Package dev runs a real Muster cluster on one machine: real controllers, real agents, real processes on loopback
// addresses. Only the hardware of its nodes is declared rather than detected. The commands `muster dev …`, the demo and,
// through the binary, every whole-system test use it.
//
// Invariants:
//   - A process is signalled only if its pid, its start time and the machine's boot are those that were recorded: a pid
//     that was given to somebody else is never touched. The caller and its ancestors are never touched either.
//   - Addresses are chosen once and kept over restarts of processes.
//   - Killing a node takes its agent, its supervisors and their tasks; its next start is a new boot (another declared
//     boot id), as after a power loss. Killing only the agent is no power loss.
//   - Down leaves no process behind, also none of jobs, and may be repeated.
//   - dev.json is replaced atomically, by one command at a time (dev.lock).
//
// It never parses what its processes log, except for the ready line of their contract.
package dev
