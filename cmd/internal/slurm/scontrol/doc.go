// Package scontrol is the command that shows and changes jobs, nodes and partitions, and unfolds host lists.
//
// Invariants: what is shown has the shape that scripts parse; a change is one call for each key, refused by name if
// Muster does not have it; host lists are handled without asking the cluster.
//
// It is called by cmd/internal/slurm.
package scontrol
