// Package sbatch is the command that submits a batch script: it merges the options of the command line, the environment and
// the script, sends script, environment and specification in one call, and prints the job's id.
//
// Invariants: a mistake on the command line or in the script is reported before the cluster is asked; a job is submitted
// with one idempotency key however often the call is tried; what is printed as submitted is stored durably.
//
// It is called by cmd/internal/slurm. It never interprets the body of a script.
package sbatch
