// Package private gives each job a /tmp and a /dev/shm of its own on a node, shared by its steps there.
//
// The directories are ordinary ones, of the agent: BASE/JOB.ATTEMPT below two places that only root may enter, one on the
// disk and one in the node's /dev/shm (shared memory must be memory). The tasks see them at the usual names because
// they live in a mount namespace in which the directories are bound there.
//
// Invariants:
//   - Nothing is ever mounted in the node's own namespace, so that no mount can be left behind: the job's namespace and
//     its mounts go with the last process and descriptor that hold it, whoever was killed.
//   - What the node mounts later is seen by jobs (their mounts are slaves); what happens in a job is not seen outside.
//   - Files of a job that ended are gone with Remove; what its processes still hold open lives until they end.
//
// Callers: package node makes and removes the directories; package supervise enters, on a thread that then prepares the
// step, and passes the namespace on to the stage of each task. Needs root.
package private
