/* One token over a range of keys: rows are the few query heads of one KV head, vectors run along head_dim. */

#pragma once

#include "call.h"

/* Asks for the W elements at `index` of a row that is read AHEAD keys later: blocks lie anywhere, so the
 * hardware cannot guess. */
INLINE void prefetch(int type, const char *row, int64_t index) {
    if (index * size_of(type) % 64 == 0) __builtin_prefetch(row + index * size_of(type), 0, 3);
}

/* How many keys ahead memory is asked for: far enough for its latency, near enough to be still in the cache. */
#define AHEAD 32

/* Query rows that share one read of a KV head's keys and values; more rows read them again. */
#define MOST_DECODE_ROWS 8

/* Scores of `rows` queries against one key. Keys go one by one: several at a time would share the loads of queries,
 * but read memory in an order in which it comes at half the speed. */
INLINE void score_key(int type, int rows, const float *query, const char *key, const char *ahead, int dim,
                      float *scores) {
    vf sums[MOST_DECODE_ROWS];
    for (int r = 0; r < rows; r++) sums[r] = (vf){0};
    for (int d = 0; d < dim; d += W) {
        vf x = load_as(type, key, d);
        prefetch(type, ahead, d);
        for (int r = 0; r < rows; r++) sums[r] += load(query + r * dim + d) * x;
    }
    const int last = rows - 1;
    for (int r = 0; r < rows; r += 4) {
        v4 four = sum_four(sums[r], sums[r + 1 < last ? r + 1 : last], sums[r + 2 < last ? r + 2 : last],
                           sums[r + 3 < last ? r + 3 : last]);
        for (int i = 0; i < 4 && r + i < rows; i++) scores[(r + i) * KEYS] = four[i];
    }
}

/* Adds `count` values, times their weights [rows, KEYS], to `sums` [rows, dim] at `vectors` x W dims from d on. */
INLINE void add_values(int type, int rows, int vectors, const float *weights, const char *value, const char *ahead,
                       int count, int dim, int d, float *sums) {
    vf acc[MOST_DECODE_ROWS][4];
    int64_t size = size_of(type) * dim;
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) acc[r][v] = load(sums + r * dim + d + v * W);
    for (int k = 0; k < count; k++, value += size) {
        vf values[4];
        for (int v = 0; v < vectors; v++) {
            values[v] = load_as(type, value, d + v * W);
            prefetch(type, ahead + k * size, d + v * W);
        }
        for (int r = 0; r < rows; r++) {
            vf weight = splat(weights[r * KEYS + k]);
            for (int v = 0; v < vectors; v++) acc[r][v] += weight * values[v];
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) store(sums + r * dim + d + v * W, acc[r][v]);
}

/* Where the row of `key` lies, or that of a key that is there if it does not exist. */
INLINE const char *row_ahead(const Call *call, const int32_t *table, int kv_head, int key, int last, int values) {
    return cache_row(call, table, kv_head, key < last ? key : last - 1, values);
}

INLINE void score_rows(const Call *call, int type, int rows, const int32_t *table, int kv_head, int begin, int end,
                       int last, const float *query, float *scores) {
    int dim = call->head_dim;
    int64_t size = size_of(type) * dim;
    for (int key = begin; key < end;) {
        int run = run_length(call, key, end);
        const char *row = cache_row(call, table, kv_head, key, 0);
        const char *ahead = row_ahead(call, table, kv_head, key + AHEAD, last, 0);
        for (int k = 0; k < run; k++)
            score_key(type, rows, query, row + k * size, ahead + k * size, dim, scores + key - begin + k);
        key += run;
    }
}

INLINE void pv_rows(const Call *call, int type, int rows, const int32_t *table, int kv_head, int begin, int end,
                       int last, const float *weights, float *sums) {
    const int dim = call->head_dim, many = rows <= 4 ? 4 : 2; /* vectors whose sums fit into registers */
    for (int key = begin; key < end;) {
        int run = run_length(call, key, end), d = 0;
        const char *row = cache_row(call, table, kv_head, key, 1);
        const float *w = weights + key - begin;
        const char *ahead = row_ahead(call, table, kv_head, key + AHEAD, last, 1);
        for (; d + many * W <= dim; d += many * W) add_values(type, rows, many, w, row, ahead, run, dim, d, sums);
        for (; d < dim; d += W) add_values(type, rows, 1, w, row, ahead, run, dim, d, sums);
        key += run;
    }
}

/* The same with the type and the number of rows known to the compiler. */
#define FOR_ROWS(CALL, TYPE)      \
    switch (rows) {               \
    case 1: CALL(TYPE, 1); break; \
    case 2: CALL(TYPE, 2); break; \
    case 3: CALL(TYPE, 3); break; \
    case 4: CALL(TYPE, 4); break; \
    case 5: CALL(TYPE, 5); break; \
    case 6: CALL(TYPE, 6); break; \
    case 7: CALL(TYPE, 7); break; \
    default: CALL(TYPE, 8); break; \
    }
#define FOR_TYPE_AND_ROWS(CALL)                        \
    switch (call->cache_type) {                        \
    case FLOAT32: FOR_ROWS(CALL, FLOAT32) break;       \
    case FLOAT16: FOR_ROWS(CALL, FLOAT16) break;       \
    case BFLOAT16: FOR_ROWS(CALL, BFLOAT16) break;     \
    default: FOR_ROWS(CALL, FLOAT8) break;             \
    }

static void score(const Call *call, int rows, const int32_t *table, int kv_head, int begin, int end, int last,
                  const float *query, float *scores) {
#define SCORE(TYPE, ROWS) score_rows(call, TYPE, ROWS, table, kv_head, begin, end, last, query, scores)
    FOR_TYPE_AND_ROWS(SCORE)
#undef SCORE
}

static void pv(const Call *call, int rows, const int32_t *table, int kv_head, int begin, int end, int last,
                  const float *weights, float *sums) {
#define PV(TYPE, ROWS) pv_rows(call, TYPE, ROWS, table, kv_head, begin, end, last, weights, sums)
    FOR_TYPE_AND_ROWS(PV)
#undef PV
}

/* Online softmax of one row: scores [count] become weights; rescales the running maximum, total and sums [dim]. */
static void softmax(const Call *call, float *scores, int count, int first, int position, float slope, float *highest,
                   float *total, float *sums) {
    vi lanes;
    for (int i = 0; i < W; i++) lanes[i] = i;
    int padded = (count + W - 1) / W * W;
    for (int i = count; i < padded; i++) scores[i] = 0.0f;
    vf top = splat(-INFINITY);
    for (int i = 0; i < padded; i += W) {
        vf x = load(scores + i);
        if (call->soft_cap) x = splat(call->soft_cap) * vtanh(x / splat(call->soft_cap));
        if (slope) x += splat(slope) * __builtin_convertvector(lanes + (first + i - position), vf);
        x = choose(lanes < count - i, x, splat(-INFINITY));
        store(scores + i, x);
        top = vmax(x, top);
    }
    float before = *highest, now = highest_lane(top);
    if (before > now) now = before;
    vf shift = splat(now == -INFINITY ? 0.0f : now), sum = (vf){0};
    for (int i = 0; i < padded; i += W) {
        vf weight = vexp(load(scores + i) - shift);
        store(scores + i, weight);
        sum += weight;
    }
    float decay = before == -INFINITY ? 0.0f : expf(before - now);
    *highest = now;
    *total = *total * decay + sum_lanes(sum);
    if (decay != 1.0f)
        for (int d = 0; d < call->head_dim; d += W) store(sums + d, load(sums + d) * splat(decay));
}

/* Scratch floats that `attend_decode` needs for so many query heads. */
INLINE int64_t decode_scratch(int heads, int dim) { return (int64_t)heads * (2 * dim + KEYS + 2); }

/* QK (with `query`) or PV (without) for positions begin ... end - 1, block by block: all KV heads of a block before
 * the next block. */
static void pass_blocks(const Call *call, const Work *work, int begin, int end, const float *query, float *scores,
                        float *sums) {
    const int32_t *table = table_of(call, work->seq);
    int dim = call->head_dim;
    for (int key = begin; key < end;) {
        int stop = key + run_length(call, key, end);
        for (int e = 0; e < work->kv_heads; e++) {
            for (int h = 0, rows; h < work->heads; h += rows) {
                rows = work->heads - h < MOST_DECODE_ROWS ? work->heads - h : MOST_DECODE_ROWS;
                int row = e * work->heads + h;
                float *to = scores + row * KEYS + key - begin;
                if (query)
                    score(call, rows, table, work->kv_head + e, key, stop, work->end, query + row * dim, to);
                else
                    pv(call, rows, table, work->kv_head + e, key, stop, work->end, to, sums + row * dim);
            }
        }
        key = stop;
    }
}

static void attend_decode(const Call *call, const Parts *parts, const Work *work, float *scratch) {
    int rows = work->heads * work->kv_heads, dim = call->head_dim;
    float *query = scratch, *sums = query + rows * dim, *scores = sums + rows * dim;
    float *highest = scores + rows * KEYS, *total = highest + rows;
    int heads[rows], position = position_of(call, work, 0);
    for (int r = 0; r < rows; r++) {
        int kv_head = work->kv_head + r / work->heads;
        heads[r] = kv_head * group_size(call) + work->head + r % work->heads;
        int64_t from = work->token * call->query_stride + heads[r] * call->query_head_stride;
        vf scale = splat(query_scale(call, kv_head));
        for (int d = 0; d < dim; d += W) {
            store(query + r * dim + d, load_as(call->type, call->query, from + d) * scale);
            store(sums + r * dim + d, (vf){0});
        }
        highest[r] = -INFINITY;
        total[r] = 0.0f;
    }
    for (int begin = work->begin; begin < work->end; begin += KEYS) {
        int end = begin + KEYS < work->end ? begin + KEYS : work->end;
        pass_blocks(call, work, begin, end, query, scores, NULL);
        for (int r = 0; r < rows; r++) {
            float slope = call->slopes ? call->slopes[heads[r]] : 0.0f;
            softmax(call, scores + r * KEYS, end - begin, begin, position, slope, highest + r, total + r,
                   sums + r * dim);
        }
        pass_blocks(call, work, begin, end, NULL, scores, sums);
    }
    for (int r = 0; r < rows; r++)
        finish(call, parts, work, work->token, heads[r], highest[r], total[r], sums + r * dim, 1);
}
