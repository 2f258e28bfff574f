/* Attention of a mixed batch, on any number of threads.
 *
 * Softmax is online (Milakov and Gimelshein, https://arxiv.org/abs/1805.02867; Dao et al.,
 * https://arxiv.org/abs/2205.14135). Long contexts are cut as in Flash-Decoding, and a prefix that decodes share
 * is read once for all of them (Juravsky et al., "Hydragen", https://arxiv.org/abs/2402.05099).
 */

#include <stdlib.h>

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

/* Runs the plan; returns -1 when a thread finds no memory. */
static int run(const Plan *plan, const Parts *parts, int threads) {
    const Call *call = plan->call;
    int failed = 0, dim = call->head_dim;
    int64_t by_rows = decode_scratch(MOST_DECODE_HEADS, dim), by_tile = tile_scratch(dim);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        float *scratch = malloc(sizeof(float) * (by_rows > by_tile ? by_rows : by_tile));
        if (!scratch) {
#pragma omp atomic write
            failed = -1;
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < plan->num_works; i++) {
            if (!scratch) continue;
            const Work *work = plan->works + i;
            if (by_rows_pays(call, work->tokens, slice_heads(call)))
                attend_decode(call, parts, work, scratch);
            else
                attend_tile(call, parts, work, scratch);
        }
        if (parts->sums) {
#pragma omp for schedule(dynamic, 16)
            for (int64_t i = 0; i < (int64_t)call->num_tokens * call->q_heads; i++) {
                int token = i / call->q_heads;
                if (scratch && parts->starts[token + 1] > parts->starts[token])
                    merge(call, parts, token, i % call->q_heads, scratch);
            }
        }
        free(scratch);
    }
    return failed;
}

int octavo_check_batch(const Call *call, int64_t num_blocks, int64_t table_columns, int32_t *which) {
    return check_batch(call, num_blocks, table_columns, which);
}

/* Returns 0, or -1 when memory is short. */
int octavo_attend(const Call *call) {
    int threads = call->threads, failed = -1;
    Plan plan = {.call = call};
    Parts parts = {0};
    plan.part_counts = calloc(call->num_tokens, sizeof(int32_t));
    parts.starts = malloc(sizeof(int32_t) * (call->num_tokens + 1));
    if (!plan.part_counts || !parts.starts) goto done;
    make_plan(&plan);
    if (plan.cost / LEAST_COST_PER_THREAD < threads) threads = 1 + plan.cost / LEAST_COST_PER_THREAD;
    if (threads > 1) {
        plan.piece_cost = 1 + plan.cost / (threads * PIECES_PER_THREAD);
        make_plan(&plan);
    }
    plan.works = malloc(sizeof(Work) * plan.num_works);
    if (!plan.works) goto done;
    make_plan(&plan);

    int64_t num_parts = 0;
    for (int t = 0; t < call->num_tokens; t++) {
        parts.starts[t] = num_parts;
        num_parts += plan.part_counts[t];
    }
    parts.starts[call->num_tokens] = num_parts;
    if (num_parts) {
        parts.sums = malloc(sizeof(float) * num_parts * call->q_heads * call->head_dim);
        parts.logs = malloc(sizeof(float) * num_parts * call->q_heads * 2);
        if (!parts.sums || !parts.logs) goto done;
    }
    failed = run(&plan, &parts, threads);
done:
    free(parts.logs);
    free(parts.sums);
    free(plan.works);
    free(parts.starts);
    free(plan.part_counts);
    return failed;
}
