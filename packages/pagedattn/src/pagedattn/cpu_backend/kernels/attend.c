/* Attention of a mixed batch, on any number of threads.
 *
 * Softmax is online (Milakov and Gimelshein, https://arxiv.org/abs/1805.02867; Dao et al.,
 * https://arxiv.org/abs/2205.14135). Long contexts are cut as in Flash-Decoding, and a prefix that decodes share
 * is read once for all of them (Juravsky et al., "Hydragen", https://arxiv.org/abs/2402.05099).
 */

#include "check.h"
#include "decode.h"
#include "plan.h"

/* Cost below which another thread takes longer to wake than it saves. */
#define LEAST_COST_PER_THREAD 20000

/* Merges a token's partial results for one query head, weighted by their softmax denominators. */
static void merge(const Call *call, const Parts *parts, int token, int head, float *sums) {
    int first = parts->starts[token], count = parts->starts[token + 1] - first, dim = call->head_dim;
    float highest = -INFINITY, total = 0.0f;
    if (token < call->num_decodes && call->lengths[token] == 0) count = 0; /* fills up the batch */
    for (int p = 0; p < count; p++) {
        float one = parts->logs[2 * ((int64_t)(first + p) * call->q_heads + head)];
        if (one > highest) highest = one;
    }
    memset(sums, 0, sizeof(float) * dim);
    for (int p = 0; p < count; p++) {
        int64_t slot = (int64_t)(first + p) * call->q_heads + head;
        float weight = highest == -INFINITY ? 0.0f : expf(parts->logs[2 * slot] - highest);
        total += weight * parts->logs[2 * slot + 1];
        for (int d = 0; d < dim; d++) sums[d] += weight * parts->sums[slot * dim + d];
    }
    Work whole = {.part = WHOLE};
    finish(call, parts, &whole, token, head, highest, total, sums, 1);
}

/* How a batch is cut, and the memory that this takes: the same for all layers whose attention has one shape. */
typedef struct Schedule {
    struct Schedule *next;
    Call of;
    Work *works;
    int64_t num_works;
    Parts parts;
    float *scratch; /* [threads, scratch_floats] */
    int64_t scratch_floats;
    int threads;
} Schedule;

INLINE int alike(const Call *a, const Call *b) {
    return a->query_starts == b->query_starts && a->lengths == b->lengths && a->block_table == b->block_table &&
           a->num_blocks == b->num_blocks && a->q_heads == b->q_heads && a->kv_heads == b->kv_heads &&
           a->head_dim == b->head_dim && a->block_size == b->block_size && a->shared_prefix == b->shared_prefix &&
           a->window == b->window && a->type == b->type && a->cache_type == b->cache_type;
}

/* Fills a schedule in; returns whether there was memory. */
static int fill(Schedule *schedule, const Call *call, Scratch *memory) {
    Plan plan = {.call = call};
    schedule->threads = call->threads;
    plan.part_counts = take(memory, sizeof(int32_t) * call->num_tokens);
    schedule->parts.starts = take(memory, sizeof(int32_t) * (call->num_tokens + 1));
    if (!plan.part_counts || !schedule->parts.starts) return 0;
    memset(plan.part_counts, 0, sizeof(int32_t) * call->num_tokens);
    make_plan(&plan);
    if (plan.cost / LEAST_COST_PER_THREAD < schedule->threads)
        schedule->threads = 1 + plan.cost / LEAST_COST_PER_THREAD;
    if (schedule->threads > 1) {
        plan.piece_cost = 1 + plan.cost / (schedule->threads * PIECES_PER_THREAD);
        make_plan(&plan);
    }
    plan.works = take(memory, sizeof(Work) * plan.num_works);
    if (!plan.works) return 0;
    make_plan(&plan);
    schedule->works = plan.works;
    schedule->num_works = plan.num_works;

    int64_t num_parts = 0, dim = call->head_dim;
    for (int t = 0; t < call->num_tokens; t++) {
        schedule->parts.starts[t] = num_parts;
        num_parts += plan.part_counts[t];
    }
    schedule->parts.starts[call->num_tokens] = num_parts;
    if (num_parts) {
        schedule->parts.sums = take(memory, sizeof(float) * num_parts * call->q_heads * dim);
        schedule->parts.logs = take(memory, sizeof(float) * num_parts * call->q_heads * 2);
        if (!schedule->parts.sums || !schedule->parts.logs) return 0;
    }
    int64_t by_rows = decode_scratch(MOST_DECODE_HEADS, dim), by_tile = tile_scratch(dim);
    schedule->scratch_floats = ((by_rows > by_tile ? by_rows : by_tile) + 15) / 16 * 16;
    schedule->scratch = take(memory, sizeof(float) * schedule->scratch_floats * call->threads);
    return schedule->scratch != NULL;
}

/* Returns 0, an error of check.h, or NO_MEMORY. */
static int64_t prepare_attend(void *arguments, Scratch *memory) {
    Call *call = arguments;
    int32_t longest = 0;
    for (int seq = 0; seq < call->num_seqs; seq++)
        if (call->lengths[seq] > longest) longest = call->lengths[seq];
    call->window = call->given_window < longest ? call->given_window : 0;
    for (Schedule *known = memory->attention; known; known = known->next)
        if (alike(&known->of, call)) {
            call->schedule = known;
            return PREPARED;
        }
    int64_t error = check_batch(call);
    if (error != PREPARED) return error;
    Schedule *schedule = take(memory, sizeof *schedule);
    if (!schedule) return NO_MEMORY;
    *schedule = (Schedule){.next = memory->attention, .of = *call};
    if (!fill(schedule, call, memory)) return NO_MEMORY;
    memory->attention = schedule;
    call->schedule = schedule;
    return PREPARED;
}

static int64_t attend_threads(const void *arguments) { return ((const Call *)arguments)->schedule->threads; }

/* First the pieces of the schedule, then the merging of tokens that have parts. */
static int64_t attend_pieces(const void *arguments, int stage, int64_t threads) {
    const Call *call = arguments;
    if (stage == 0) return call->schedule->num_works;
    int64_t results = call->schedule->parts.sums ? (int64_t)call->num_tokens * call->q_heads : 0;
    return results < 4 * threads ? results : 4 * threads;
}

static void merge_some(const Call *call, int64_t begin, int64_t end, float *scratch) {
    const Parts *parts = &call->schedule->parts;
    for (int64_t i = begin; i < end; i++) {
        int token = i / call->q_heads;
        if (parts->starts[token + 1] > parts->starts[token])
            merge(call, parts, token, i % call->q_heads, scratch);
    }
}

static void run_attend(const void *arguments, int stage, int64_t piece, int64_t threads, int64_t thread) {
    const Call *call = arguments;
    const Schedule *schedule = call->schedule;
    float *scratch = schedule->scratch + thread * schedule->scratch_floats;
    if (stage == 1) {
        int64_t results = (int64_t)call->num_tokens * call->q_heads, pieces = attend_pieces(call, stage, threads);
        merge_some(call, results * piece / pieces, results * (piece + 1) / pieces, scratch);
        return;
    }
    const Work *work = schedule->works + piece;
    if (by_rows_pays(call, work->tokens, slice_heads(call)))
        attend_decode(call, &schedule->parts, work, scratch);
    else
        attend_tile(call, &schedule->parts, work, scratch);
}

const Kernel attend_kernel = {sizeof(Call), prepare_attend, attend_threads, attend_pieces, run_attend, 2};
