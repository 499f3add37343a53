// muster-slurm is all of Slurm's commands that Muster speaks, in one small program: it goes by the name with which it is
// called (sbatch, srun, salloc, squeue, …), or by its first argument.
package main

import (
	"os"

	"github.com/muster-hpc/muster/cmd/internal/slurm"
)

func main() { os.Exit(slurm.Main(os.Args)) }
