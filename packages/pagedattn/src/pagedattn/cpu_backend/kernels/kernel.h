/* A kernel, as it is called alone or as one operation of a program; see program.c. */

#pragma once

#include <stddef.h>
#include <stdint.h>

/* What the operations of one run share. */
typedef struct {
    struct Chunk *chunks;       /* memory, freed when they have run */
    struct Schedule *attention; /* schedules of attention, which layers share; see attend.c */
} Scratch;

/* Memory until the end of the run; NULL when there is none. */
void *take(Scratch *scratch, size_t bytes);

enum { PREPARED = 0, NO_MEMORY = -1 }; /* of `prepare`; positive numbers are errors of the kernel's own */

#define MOST_STAGES 2

/* The work of a kernel is cut into pieces, which threads take as they come. They may be done in any order, but that
 * all of a stage are done before one of the next begins. */
typedef struct {
    int64_t bytes;                                    /* of its arguments */
    int64_t (*prepare)(void *call, Scratch *scratch); /* by one thread, before the first piece; may be NULL */
    int64_t (*threads)(const void *call);             /* worth waking for it, where it runs alone */
    int64_t (*pieces)(const void *call, int stage, int64_t threads);
    void (*run)(const void *call, int stage, int64_t piece, int64_t threads, int64_t thread);
    int stages;
} Kernel;

extern const Kernel norm_kernel, layer_norm_kernel, rotary_kernel, activation_kernel, write_kernel, attend_kernel,
    linear_kernel, top_k_kernel, group_kernel, grouped_linear_kernel, weighted_sum_kernel, embedding_kernel;
