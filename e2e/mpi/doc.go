// Package mpi runs real MPI programs on a real local cluster: MPICH with srun as its process manager, and the launchers
// of MPICH and Open MPI within an allocation. What is not installed is skipped with the names of Debian's packages.
package mpi
