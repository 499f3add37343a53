// Package scancel is the command that ends or signals jobs and steps.
//
// Invariants: nothing is cancelled without an id or a filter; ids and filters are combined with AND; an id that does not
// exist, or whose job has ended, is no error, as in Slurm.
//
// It is called by cmd/internal/slurm.
package scancel
