/* Kernels run alone, or one after another by one team of threads. */

#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "kernel.h"

#ifdef _OPENMP
#include <omp.h>
static int64_t team_size(void) { return omp_get_num_threads(); }
static int64_t team_rank(void) { return omp_get_thread_num(); }
#else
static int64_t team_size(void) { return 1; }
static int64_t team_rank(void) { return 0; }
#endif

/* By the numbers of cpu_backend/arguments.py. */
static const Kernel *const KERNELS[] = {&norm_kernel,  &layer_norm_kernel, &rotary_kernel, &activation_kernel,
                                        &write_kernel, &attend_kernel,     &linear_kernel, &top_k_kernel,
                                        &group_kernel, &grouped_linear_kernel, &weighted_sum_kernel, &embedding_kernel};

/* Bytes that the arguments of every kernel fit in. */
#define MOST_BYTES 512

struct Chunk {
    struct Chunk *next;
    char memory[];
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

/* How far a stage is: pieces taken and pieces done. Each has a cache line of its own. */
typedef struct {
    _Atomic int64_t taken, done;
} __attribute__((aligned(64))) Progress;

/* Looks at a stage that others have pieces of before a waiting thread offers its core to other processes. */
#define LOOKS 200

static inline void pause_briefly(int looks) {
    if (looks >= LOOKS)
        sched_yield();
    else
#if defined(__x86_64__)
        __builtin_ia32_pause();
#else
        atomic_signal_fence(memory_order_seq_cst);
#endif
}

/* Takes pieces until there are none, then waits for those that others have taken.
 *
 * Nobody waits for a thread that has no piece, so that one whose core another process has at the moment holds up only
 * what it has begun. */
static void run_stage(const Kernel *kernel, const void *call, int stage, Progress *progress, int64_t threads,
                      int64_t thread) {
    int64_t count = kernel->pieces(call, stage, threads), mine = 0, piece;
    while ((piece = atomic_fetch_add_explicit(&progress->taken, 1, memory_order_relaxed)) < count) {
        kernel->run(call, stage, piece, threads, thread);
        mine++;
    }
    if (mine) atomic_fetch_add_explicit(&progress->done, mine, memory_order_release);
    for (int looks = 0; atomic_load_explicit(&progress->done, memory_order_acquire) < count; looks++)
        pause_briefly(looks);
}

static void run_by_one(const Kernel *kernel, const void *call) {
    for (int stage = 0; stage < kernel->stages; stage++)
        for (int64_t piece = 0, count = kernel->pieces(call, stage, 1); piece < count; piece++)
            kernel->run(call, stage, piece, 1, 0);
}

static void run_by_many(const Kernel *kernel, const void *call, Progress *progress, int64_t threads, int64_t thread) {
    for (int stage = 0; stage < kernel->stages; stage++)
        run_stage(kernel, call, stage, progress + stage, threads, thread);
}

/* Runs one kernel; returns PREPARED, or why it did not run. */
int64_t octavo_run(int32_t number, const void *arguments) {
    const Kernel *kernel = KERNELS[number];
    char call[MOST_BYTES] __attribute__((aligned(16)));
    memcpy(call, arguments, kernel->bytes);
    Scratch scratch = {0};
    int64_t error = prepare(kernel, call, &scratch);
    if (error == PREPARED) {
        int64_t threads = kernel->threads(call);
        Progress progress[MOST_STAGES] = {0};
        if (threads > 1) {
#pragma omp parallel num_threads(threads)
            run_by_many(kernel, call, progress, team_size(), team_rank());
        } else {
            run_by_one(kernel, call);
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
    Scratch scratch;    /* from octavo_begin to octavo_finish, as what follows */
    Progress *progress; /* [operations, MOST_STAGES] */
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

/* Operations `first` to `end`, as thread `thread` of so many. */
static void run_some(const Program *program, int64_t first, int64_t end, int64_t threads, int64_t thread) {
    for (int64_t i = first; i < end; i++) {
        const Operation *operation = program->operations + i;
        const Kernel *kernel = KERNELS[operation->kernel];
        const void *call = program->arguments + operation->arguments;
        if (threads == 1)
            run_by_one(kernel, call);
        else
            run_by_many(kernel, call, program->progress + MOST_STAGES * i, threads, thread);
    }
}

/* Prepares all operations; returns PREPARED, or why one cannot run: then `failed` is its number, and nothing has begun.
 */
int64_t octavo_begin(Program *program, const int64_t *bases, const int64_t *counts, int64_t *failed) {
    int64_t error = PREPARED;
    program->scratch = (Scratch){0};
    patch(program, bases, counts);
    for (*failed = 0; *failed < program->num_operations; ++*failed) {
        const Operation *operation = program->operations + *failed;
        error = prepare(KERNELS[operation->kernel], program->arguments + operation->arguments, &program->scratch);
        if (error != PREPARED) break;
    }
    size_t bytes = MOST_STAGES * sizeof(Progress) * program->num_operations;
    program->progress = error == PREPARED ? take(&program->scratch, bytes) : NULL;
    if (error == PREPARED && !program->progress) error = NO_MEMORY;
    if (error == PREPARED)
        memset(program->progress, 0, bytes);
    else
        give_back(&program->scratch);
    return error;
}

/* Runs operations `first` to `end` of what has begun; those before them have run. */
void octavo_run_segment(const Program *program, int64_t first, int64_t end) {
    if (first == end) return;
    if (program->threads > 1) {
#pragma omp parallel num_threads(program->threads)
        run_some(program, first, end, team_size(), team_rank());
    } else {
        run_some(program, first, end, 1, 0);
    }
}

/* Ends what has begun, whether all of it has run or not. */
void octavo_finish(Program *program) { give_back(&program->scratch); }
