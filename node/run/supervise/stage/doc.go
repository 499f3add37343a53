// Package stage is the last thing that a task's process does before it executes the user's program: it enters the step's
// control groups and mount namespace, takes the user's identity, limits and priority, and executes. Some of that
// belongs to a process and not to a thread, so that it cannot be done by the supervisor before it forks.
//
// The supervisor executes itself again under the name Name. The package's init notices that before anything else of the
// program has begun (its import path sorts before those of the larger libraries, so that their initialisation is never
// paid for), does its work and does not return.
//
// Descriptors: 0 to 2 are the task's; PlanFD has the Plan; StatusFD takes one Started byte when the program is about to
// be executed, and then, only if that fails, or if something before it did, a Failure; NamespaceFD is the mount namespace,
// if the plan has one. Execution closes them.
//
// Invariants:
//   - No instruction of the user runs outside the groups, the namespace or the limits.
//   - The process dies with the thread that forked it, also between its steps.
//   - The environment that the program gets is exactly the plan's, and SLURM_TASK_PID.
//
// Caller: package supervise. The package never logs and never waits for anything but the kernel.
package stage
