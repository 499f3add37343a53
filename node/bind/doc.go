// Package bind decides which of a step's CPUs and accelerators each of its tasks uses on a node. All functions are pure: what
// was asked, what the step has, and how the machine is built go in; a mask or a list for each task comes out.
//
// Invariants:
//   - A task never gets a device that its step does not have there.
//   - The same question has the same answer: a step that is started again finds its tasks on the same devices.
//   - What cannot be honoured is said, and then the task gets everything of the step rather than nothing.
//
// It is called by package node when it prepares a step. It binds nothing itself, and reads neither files nor the process.
package bind
