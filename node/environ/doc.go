// Package environ says in which environment a task runs: Slurm's variables, Muster's own, the accelerators', what
// training frameworks read for their rendezvous, and the filename patterns of its output. All functions are pure: an
// order of the controllers and facts about the node in, strings out.
//
// Invariants:
//   - A rendezvous variable (MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE, LOCAL_RANK) that the user set is never touched.
//   - Variables that describe another job or step, inherited because the user submitted from within it, never leak
//     into this one.
//   - Names and values are those of Slurm 24.11 where releases differ.
//
// It is called by package node when it prepares and starts a step. It never reads the process's environment, files or
// clocks.
package environ
