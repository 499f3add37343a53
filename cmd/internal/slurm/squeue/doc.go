// Package squeue is the command that lists jobs and steps.
//
// Invariants: layouts, headers, the default order and exit codes are Slurm's; a listing of any length is read a page at
// a time and formatted without a copy of each field; jobs that ended more than MinJobAge ago are shown only when asked
// for by id, as with Slurm.
//
// It is called by cmd/internal/slurm. It changes nothing.
package squeue
