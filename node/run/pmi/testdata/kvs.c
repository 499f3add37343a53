/* What an MPI library does with PMI-2, through another implementation of its client. It prints one line per rank. */
#include <slurm/pmi2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(call) do { int rc = (call); if (rc != PMI2_SUCCESS) { printf("%s: %d\n", #call, rc); exit(1); } } while (0)

int main(void)
{
    int spawned, size, rank, appnum, found, length, i, round;
    char job[64], key[PMI2_MAX_KEYLEN], value[PMI2_MAX_VALLEN], want[PMI2_MAX_VALLEN], mapping[PMI2_MAX_ATTRVALUE], got[PMI2_MAX_VALLEN];
    CHECK(PMI2_Init(&spawned, &size, &rank, &appnum));
    CHECK(PMI2_Job_GetId(job, sizeof job));
    CHECK(PMI2_Info_GetJobAttr("PMI_process_mapping", mapping, sizeof mapping, &found));
    if (!found)
        strcpy(mapping, "none");
    for (round = 0; round < 3; round++) {
        snprintf(key, sizeof key, "card-%d-%d", round, rank);
        snprintf(value, sizeof value, "rank=%d;round=%d; with ;; and blanks", rank, round);
        CHECK(PMI2_KVS_Put(key, value));
        CHECK(PMI2_KVS_Fence());
        for (i = 0; i < size; i++) {
            snprintf(key, sizeof key, "card-%d-%d", round, i);
            snprintf(want, sizeof want, "rank=%d;round=%d; with ;; and blanks", i, round);
            CHECK(PMI2_KVS_Get(job, i, key, got, sizeof got, &length));
            if (strcmp(got, want) != 0 || length != (int) strlen(want)) {
                printf("rank %d: %s is %s, %d\n", rank, key, got, length);
                return 1;
            }
        }
    }
    snprintf(value, sizeof value, "first-%d", rank);
    CHECK(PMI2_Info_PutNodeAttr(value, "yes"));
    CHECK(PMI2_Info_GetNodeAttr(value, got, sizeof got, &found, 1));
    if (PMI2_Nameserv_publish("name", NULL, "port") == PMI2_SUCCESS)
        printf("a name was published\n");
    printf("rank %d of %d in %s: %s, %s\n", rank, size, job, mapping, got);
    fflush(stdout);
    CHECK(PMI2_Finalize());
    return 0;
}
