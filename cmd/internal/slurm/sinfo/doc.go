// Package sinfo is the command that lists partitions and nodes.
//
// Invariants: rows are nodes that show the same in every column that tells nodes apart, as in Slurm; columns that count
// or measure are summed or written with their smallest value and "+".
//
// It is called by cmd/internal/slurm. It changes nothing.
package sinfo
