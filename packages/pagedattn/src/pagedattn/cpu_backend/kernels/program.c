/* Kernels run alone, or one after another by one team of threads. */

#include <stdlib.h>
#include <string.h>

#include "kernel.h"

/* By the numbers of cpu_backend/arguments.py. */
static const Kernel *const KERNELS[] = {&norm_kernel,  &layer_norm_kernel, &rotary_kernel, &activation_kernel,
                                        &write_kernel, &attend_kernel,     &linear_kernel};

/* Bytes that the arguments of every kernel fit in. */
#define MOST_BYTES 512

struct Chunk {
    struct Chunk *next;
    char memory[] __attribute__((aligned(64)));
};

void *take(Scratch *scratch, size_t bytes) {
    struct Chunk *chunk = malloc(sizeof *chunk + 64 + bytes);
    if (!chunk) return NULL;
    chunk->next = scratch->chunks;
    scratch->chunks = chunk;
    return (void *)(((uintptr_t)chunk->memory + 63) / 64 * 64);
}

static void give_back(Scratch *scratch) {
    while (scratch->chunks) {
        struct Chunk *next = scratch->chunks->next;
        free(scratch->chunks);
        scratch->chunks = next;
    }
}

static int64_t prepare(const Kernel *kernel, void *call, Scratch *scratch) {
    return kernel->prepare ? kernel->prepare(call, scratch) : PREPARED;
}

/* Runs one kernel; returns PREPARED, or why it did not run. */
int64_t octavo_run(int32_t number, const void *arguments) {
    const Kernel *kernel = KERNELS[number];
    char call[MOST_BYTES] __attribute__((aligned(16)));
    memcpy(call, arguments, kernel->bytes);
    Scratch scratch = {0};
    int64_t error = prepare(kernel, call, &scratch);
    if (error == PREPARED) {
        int threads = kernel->threads(call);
        if (threads > 1) {
#pragma omp parallel num_threads(threads)
            kernel->run(call);
        } else {
            kernel->run(call);
        }
    }
    give_back(&scratch);
    return error;
}

/* A kernel and where its arguments begin. */
typedef struct {
    int32_t kernel, arguments;
} Operation;

/* An argument that a run decides: bases[base] + factor * counts[count] + constant, of so many bytes. */
typedef struct {
    int64_t constant, factor;
    int32_t at, bytes, base, count;
} Patch;

/* Laid out as PROGRAM of cpu_backend/program.py. */
typedef struct {
    const Operation *operations;
    const Patch *patches;
    char *arguments;
    int64_t num_operations, num_patches, threads;
} Program;

static void patch(const Program *program, const int64_t *bases, const int64_t *counts) {
    for (int64_t i = 0; i < program->num_patches; i++) {
        const Patch *one = program->patches + i;
        int64_t value = bases[one->base] + one->factor * counts[one->count] + one->constant;
        int32_t narrow = value;
        char *to = program->arguments + one->at;
        if (one->bytes == 8)
            memcpy(to, &value, sizeof value);
        else
            memcpy(to, &narrow, sizeof narrow);
    }
}

static void run_all(const Program *program) {
    for (int64_t i = 0; i < program->num_operations; i++) {
        const Operation *operation = program->operations + i;
        KERNELS[operation->kernel]->run(program->arguments + operation->arguments);
#pragma omp barrier
    }
}

/* Runs all operations, or none: then it returns why, and `failed` is the operation that cannot run. */
int64_t octavo_replay(const Program *program, const int64_t *bases, const int64_t *counts, int64_t *failed) {
    Scratch scratch = {0};
    int64_t error = PREPARED;
    patch(program, bases, counts);
    for (*failed = 0; *failed < program->num_operations; ++*failed) {
        const Operation *operation = program->operations + *failed;
        error = prepare(KERNELS[operation->kernel], program->arguments + operation->arguments, &scratch);
        if (error != PREPARED) break;
    }
    if (error == PREPARED) {
        if (program->threads > 1) {
#pragma omp parallel num_threads(program->threads)
            run_all(program);
        } else {
            run_all(program);
        }
    }
    give_back(&scratch);
    return error;
}
