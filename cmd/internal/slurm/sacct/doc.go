// Package sacct is the command that lists jobs and their steps from accounting: the same state as squeue's, so that a
// job is there as soon as sbatch has returned.
//
// Invariants: which jobs are shown when no time is given, the layouts, the way wide values are cut with "+", and exit
// codes are Slurm's; what Muster does not measure is empty.
//
// It is called by cmd/internal/slurm. It changes nothing.
package sacct
