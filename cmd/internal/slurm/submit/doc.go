// Package submit turns the options of sbatch and srun into what the API takes: a job's or a step's specification and
// its environment. It also has the two commands' option tables, and Slurm's wording of refusals.
//
// Invariants: every option of a table is read here or by its command, refused with a sentence, or harmless with a
// reason; a value that Slurm refuses on the client is refused here with Slurm's words and exit code; what a directive,
// a variable and the command line say is merged in that order, the later winning.
//
// It is called by sbatch and srun. It never talks to the cluster.
package submit
