// Package sattach is the command that attaches a terminal to a step that runs: its output, and its stdin.
//
// Invariants:
//   - Everything that the step has written is shown, from its beginning: it is in the spool of the nodes.
//   - Ctrl-C, SIGTERM and SIGHUP end sattach and leave the step alone. The end of sattach's stdin is not the end of the step's.
//   - The exit code is the highest of the tasks' as srun's; 128 and the signal's number after a signal to sattach.
//
// It is called by cmd/internal/slurm. It never changes the step.
package sattach
