package srun

import (
	"crypto/rand"
	"fmt"

	"github.com/muster-hpc/muster/cmd/internal/slurm/option"
	"github.com/muster-hpc/muster/cmd/internal/slurm/submit"
)

// mpiKinds is the answer to --mpi=list.
const mpiKinds = "MPI plugin types are...\n\tnone\n\tpmi2\n"

func listsMPI(line *option.Set) bool { return line.Text("mpi") == "list" }

// secretVariable carries what the nodes of an MPI step know each other by. It travels with the environment, which nobody
// but the step's owner and its nodes can read; the tasks do not get it.
const secretVariable = "MUSTER_PMI_SECRET"

// readMPI reads which process management interface the tasks want. set gets a new secret for each call.
func (r *run) readMPI(set map[string]string) error {
	switch kind := r.options.Text("mpi"); kind {
	case "", "none":
	case "pmi2":
		r.spec.TaskOptions.Mpi = kind
		set[secretVariable] = rand.Text()
	case "pmix", "pmix_v2", "pmix_v3", "pmix_v4", "pmix_v5", "openmpi":
		return &submit.Error{Code: submit.CodeRefused, Text: fmt.Sprintf("Invalid MPI type '%s', --mpi=list for acceptable types\n"+
			"There is no PMIx here: start Open MPI programs with mpirun in an allocation, others (MPICH, Intel MPI, MVAPICH) with --mpi=pmi2.", kind)}
	default:
		return &submit.Error{Code: submit.CodeRefused, Text: fmt.Sprintf("Invalid MPI type '%s', --mpi=list for acceptable types", kind)}
	}
	return nil
}
