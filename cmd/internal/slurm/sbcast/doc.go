// Package sbcast is the command that sends a file to all nodes of a job.
//
// Invariants:
//   - On each node the file appears whole and checked (SHA-256) or not at all, written with the rights of the job's user.
//   - A transfer that breaks goes on where it broke; one that makes no progress for --timeout seconds is given up, and what was sent of it
//     is removed as far as its node answers.
//   - The exit code is 0 only if every node has the file.
//
// It is called by cmd/internal/slurm.
package sbcast
