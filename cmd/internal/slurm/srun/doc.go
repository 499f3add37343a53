// Package srun is the command that runs a program on all nodes of an allocation, with its output on the terminal: as a step
// of the job in which it is called, or as a job of its own.
//
// Invariants:
//   - Its exit code is the highest of its tasks' exit codes, a signal counting as 128 plus its number.
//   - A mistake on the command line costs no round trip.
//   - Losing controllers, agents or connections does not end it.
//   - When it is interrupted twice, terminated or hung up on, it ends its step (or its job), and waits for that end
//     for a bounded time: nodes that do not answer are named and left. When it is killed with SIGKILL it cannot: the step goes on
//     and ends with its job.
//   - A step that has to wait for other steps of its job is not there until it has its devices: giving up leaves nothing behind.
//   - The terminal is as it was when srun ends, however it ends, but for SIGKILL.
//
// Options that describe an allocation (--account, --partition, …) are without effect within one, as in Slurm.
//
// It is called by cmd/internal/slurm. It starts no processes but those of --prolog and --epilog.
package srun
