// Package version knows which build this is. Every program imports it; it imports nothing.
package version

// Version is set by the build: a tag or a commit.
var Version = "unknown"

// Slurm is the release of Slurm whose words and output shapes the commands speak.
const Slurm = "24.11.0"
