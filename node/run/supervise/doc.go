// Package supervise is the program that owns the processes of one step on one node: it prepares them, executes them
// once, passes signals and input, measures the time limit, holds the lease deadline, reaps everything, and puts the
// outcome on disk. Its files and protocol are described in package node/run and in muster.supervisor.v1.
//
// One goroutine, bound to the process's main thread, owns all state (supervisor.loop). Everything that may block on
// somebody else runs beside it and reports through a channel: preparing (file systems of the user), connections, writing
// to stdin pipes, notices in the user's output. Only the two fsyncs of "started" and "result" happen in the loop: at those
// times no process of the step exists.
//
// Invariants:
//   - No task is executed before "started" is on disk, nor if it was there before.
//   - All processes of the step are descendants of the supervisor, because it is a child subreaper. So the kernel's
//     "no children" is the proof that the tree is gone, for daemons too; a step ends on nothing less, except that
//     processes which sleep in the kernel long after KILL are told by name in its result (StepState.stuck).
//   - The result is on disk before anybody is told ENDED or FAILED.
//   - Deadlines are compared with CLOCK_BOOTTIME before anything else whenever the loop wakes, so a supervisor that was
//     stopped, or a machine that slept, acts on them first.
//   - A slow or silent client costs at most its bounded buffers.
//   - When the supervisor is killed, the kernel kills the tasks' first processes (parent-death signal); what is left
//     carries the cookie and is found by run.KillLeftovers.
//
// Caller: cmd/muster-supervisor. The package never ends a step because nobody speaks with it, never interprets
// SIGTERM or SIGHUP as an order to end the step, and never runs as a library inside the agent: it changes the process
// (working directory, umask, subreaper, signal dispositions).
//
// Control groups, the private /tmp and /dev/shm: the preparing thread makes the step's groups with their limits (confine) and
// the job's mount namespace (separate); standard input and output are opened before, in the node's own view, because they
// outlive the job; programs and the working directory are looked up in the job's. Tasks of a step with groups,
// a namespace or lines before their own output are executed by a stage (package stage), which costs another start of this program; others
// directly, and limits of resources and nice values are set while they are stopped before their first instruction (taskpid).
//
// Programs around tasks (around): each task has at most one at a time; while one runs before it the task counts as running, and after it
// the step is not over. A terminal (terminal) is the task's own session's; input is typed, what it shows goes to the file of its standard
// output, completely before the end is told. Signals before the limit (warn) are due on the same clock as the limit.
//
// KILL goes to the tree and to the group. At the end the step's groups are removed; the job's are the agent's.
package supervise
