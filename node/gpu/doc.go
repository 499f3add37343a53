// Package gpu knows a node's accelerators: which there are, how they are connected, how they are, and who uses them. It
// asks a separate program, cmd/muster-gpu, which alone loads the vendor's library, under a time limit.
//
// A Monitor keeps one probe running that reports readings and errors, starts it again when it dies or is silent too long, and
// remembers what it said. Everything else is pure: Merge gives devices their numbers, Judge turns readings and errors
// into findings, Left finds processes that no job owns, and the rest says how tasks are shown their devices.
//
// Invariants:
//   - Silence, a missing library and a dead probe mean unknown, and unknown is never failed: what was known before stays, with its age.
//   - At most one probe that can't be killed is answered by starting another; with two of them no more are started until one is gone.
//   - A device's number (its bit in masks) is never given to another device while the first may come back. GPUs that
//     the driver no longer lists keep theirs and are lost.
//   - Thresholds are the device's own; an error's meaning comes from one table (xid.go) that names its source.
//
// It is called by package node. It never changes a device, never ends a process but its own probes, and never decides what becomes of
// work: it says what it found, whose matter that is and what would clear it.
package gpu
