// Package slurm is Slurm's dialect: the commands sbatch, srun, salloc, sattach, sbcast, sstat, squeue, scancel, sinfo, scontrol and sacct, with their
// own option tables, wording, layouts and exit codes, over Muster's API.
//
// Where Slurm's releases differ it speaks 24.11. The rooms:
//   - option: tables of options and getopt_long's way of parsing; help and usage come from the tables
//   - value: words for times, sizes, states, reasons, signals and exit codes
//   - directive: batch scripts and their #SBATCH lines
//   - format: layouts of rows
//   - record: what is known of jobs in Slurm's words
//   - document: the JSON of 24.11
//   - submit: options of sbatch, srun and salloc as specifications; wording of refusals
//   - follow: a job through everything that becomes of it
//   - session, fetch: what a command works with; reading listings
//   - one package for each command
//
// Invariants: no option of the real command is ignored silently; a mistake of the user costs no round trip; a command
// starts in a few milliseconds, so nothing here links a command-line or tracing library.
//
// It is called by cmd/muster-slurm only.
package slurm

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/muster-hpc/muster/cmd/internal/slurm/sacct"
	"github.com/muster-hpc/muster/cmd/internal/slurm/salloc"
	"github.com/muster-hpc/muster/cmd/internal/slurm/sattach"
	"github.com/muster-hpc/muster/cmd/internal/slurm/sbatch"
	"github.com/muster-hpc/muster/cmd/internal/slurm/sbcast"
	"github.com/muster-hpc/muster/cmd/internal/slurm/scancel"
	"github.com/muster-hpc/muster/cmd/internal/slurm/scontrol"
	"github.com/muster-hpc/muster/cmd/internal/slurm/session"
	"github.com/muster-hpc/muster/cmd/internal/slurm/sinfo"
	"github.com/muster-hpc/muster/cmd/internal/slurm/squeue"
	"github.com/muster-hpc/muster/cmd/internal/slurm/srun"
	"github.com/muster-hpc/muster/cmd/internal/slurm/sstat"
)

// commands are the names and what runs for each.
var commands = map[string]func(context.Context, *session.Session) int{
	"sacct": sacct.Run, "salloc": salloc.Run, "sattach": sattach.Run, "sbatch": sbatch.Run, "sbcast": sbcast.Run, "scancel": scancel.Run,
	"scontrol": scontrol.Run, "sinfo": sinfo.Run, "squeue": squeue.Run, "srun": srun.Run, "sstat": sstat.Run,
}

// gcPercent is how much a command's heap may grow between two collections; a row of docs/limits.md.
const gcPercent = 400

// Names lists the commands, sorted.
func Names() []string {
	var names []string
	for name := range commands {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// Main runs the command that the program was called as and returns its exit code.
func Main(args []string) int {
	name, rest := "", args
	if len(args) > 0 {
		name, rest = filepath.Base(args[0]), args[1:]
	}
	if commands[name] == nil && len(rest) > 0 {
		name, rest = rest[0], rest[1:]
	}
	run := commands[name]
	if run == nil {
		fmt.Fprintf(os.Stderr, "muster-slurm: call it by the name of a command, through a link or as the first argument: %s\n", strings.Join(Names(), " "))
		return 2
	}
	// A command lives for milliseconds, or holds one listing: collecting garbage early only costs time.
	debug.SetGCPercent(gcPercent)
	return run(context.Background(), session.Real(name, rest))
}
