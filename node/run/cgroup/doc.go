// Package cgroup keeps the processes of jobs in control groups, version 1 or 2, through the kernel's file system alone.
//
// The groups of a node's jobs, in every hierarchy:
//
//	ROOT/muster/NODE/job_JOB.ATTEMPT/step_STEP/task_RANK
//
// NODE is there because several agents may share a machine. Limits of memory, CPUs, processes and devices are on the
// step, those of memory and CPUs also on the job; a task's group counts what the task uses and who was killed for memory.
// In version 1 tasks have groups of their own only in memory and cpuacct, and are in the step's groups elsewhere.
//
// ROOT is, in this order: what the operator named; the group that systemd delegated to the agent (Delegate=yes, best in
// a slice of its own); for root the top of the hierarchy; for others their own group if they may write there. In
// version 2 a group with processes cannot have limited children, so an agent in a delegated group moves into a child,
// "agent", first.
//
// Invariants:
//   - A group is never entered by a process that is not of its step: Files and Descriptor are for the process that
//     will execute the task, before it does.
//   - Kill reaches every process in the group, also those that shed their environment, session and parents.
//   - Remove leaves nothing behind, or names who is in the way.
//   - What a kernel does not offer is returned as a sentence, never passed over in silence.
//
// Callers: package node (Detect, Clean, Remove of jobs) and package supervise (everything of one step). Both may work in
// the same job's groups at a time: making and removing tolerate that something exists, or is gone. The package has no
// goroutine, keeps no descriptor open but those it returns, and never decides that a process should end.
package cgroup
