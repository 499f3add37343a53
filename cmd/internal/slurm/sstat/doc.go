// Package sstat is the command that says what running steps use: CPU time, memory, storage.
//
// Invariants: what no agent can tell is an empty field, never a guess; a node that does not answer is said on stderr, makes the exit code 1,
// and is in no figure.
//
// It is called by cmd/internal/slurm.
package sstat
