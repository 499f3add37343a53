/* A ring, an allgather and a reduction over all ranks. It prints one line per rank, in any order. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    int rank, size, token = 0, sum = 0, i, wrong = 0;
    if (argc > 2 && strcmp(argv[1], "die") == 0 && getenv("PMI_RANK") && atoi(getenv("PMI_RANK")) == atoi(argv[2]))
        return 5; /* before MPI_Init, for which the others wait */
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (argc > 2 && strcmp(argv[1], "abort") == 0) {
        if (rank == atoi(argv[2]))
            MPI_Abort(MPI_COMM_WORLD, 7);
        MPI_Barrier(MPI_COMM_WORLD);
        sleep(600);
    }
    if (rank == 0) {
        token = 1;
        if (size > 1) {
            MPI_Send(&token, 1, MPI_INT, 1, 0, MPI_COMM_WORLD);
            MPI_Recv(&token, 1, MPI_INT, size - 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        }
    } else {
        MPI_Recv(&token, 1, MPI_INT, rank - 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        token++;
        MPI_Send(&token, 1, MPI_INT, (rank + 1) % size, 0, MPI_COMM_WORLD);
    }
    int *all = malloc(size * sizeof *all);
    MPI_Allgather(&rank, 1, MPI_INT, all, 1, MPI_INT, MPI_COMM_WORLD);
    for (i = 0; i < size; i++)
        wrong += all[i] != i;
    MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    MPI_Comm node;
    int local;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &node);
    MPI_Comm_size(node, &local);
    printf("rank %d of %d: token %d, wrong %d, sum %d, local %d\n", rank, size, token, wrong, sum, local);
    fflush(stdout);
    MPI_Finalize();
    return 0;
}
