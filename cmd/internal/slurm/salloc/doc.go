// Package salloc is the command that allocates nodes, runs a command or a shell on this host while it has them, and gives them back.
//
// Invariants:
//   - The command starts when every node is ready, with the variables of the job; srun in it makes steps there.
//   - The exit code is the command's; 0 if SIGHUP, SIGINT, SIGQUIT or SIGKILL ended it and 1 for other signals, as Slurm says; 1 if there
//     was no allocation.
//   - However the command ends, the allocation is given back, and the job ends as the command did. When salloc is killed with SIGKILL it
//     cannot: the job goes on until its time limit or scancel.
//   - On a terminal the command has the foreground, and can be stopped and continued with salloc.
//   - Losing controllers or connections does not end it.
//
// It is called by cmd/internal/slurm. It starts one process, on this host.
package salloc
