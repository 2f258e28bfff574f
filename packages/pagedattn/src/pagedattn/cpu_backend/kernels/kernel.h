/* A kernel, as it is called alone or as one operation of a program; see program.c. */

#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef _OPENMP
#include <omp.h>
static inline int team_size(void) { return omp_get_num_threads(); }
static inline int team_rank(void) { return omp_get_thread_num(); }
#else
static inline int team_size(void) { return 1; }
static inline int team_rank(void) { return 0; }
#endif

/* What the operations of one run share. */
typedef struct {
    struct Chunk *chunks;    /* memory, freed when they have run */
    struct Schedule *attention; /* schedules of attention, which layers share; see attend.c */
} Scratch;

/* Memory until the end of the run; NULL when there is none. */
void *take(Scratch *scratch, size_t bytes);

enum { PREPARED = 0, NO_MEMORY = -1 }; /* of `prepare`; positive numbers are errors of the kernel's own */

typedef struct {
    int64_t bytes;                                 /* of its arguments */
    int64_t (*prepare)(void *call, Scratch *scratch); /* by one thread, before the first operation runs; may be NULL */
    int64_t (*threads)(const void *call);          /* worth waking for it, where it runs alone */
    void (*run)(const void *call);                 /* by every thread of a team, which then waits for all of it */
} Kernel;

extern const Kernel norm_kernel, layer_norm_kernel, rotary_kernel, activation_kernel, write_kernel, attend_kernel,
    linear_kernel;
