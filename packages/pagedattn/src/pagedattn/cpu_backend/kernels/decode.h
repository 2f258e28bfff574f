/* One token over a range of keys: rows are the few query heads of one KV head, vectors run along head_dim. */

#pragma once

#include "call.h"

/* Asks for the W elements at `index` of a row that is read one step of KEYS later: blocks lie anywhere, so the
 * hardware cannot guess. */
INLINE void prefetch(int type, const char *row, int64_t index) {
    if (index * size_of(type) % 64 == 0) __builtin_prefetch(row + index * size_of(type), 0, 3);
}

/* How many keys ahead memory is asked for: far enough for its latency, near enough to be still in the cache. */
#define AHEAD 32

/* Scores of `rows` queries against four keys that lie one after another. */
INLINE void score_four(int type, int rows, const float *query, const char *key, const char *ahead, int dim, float *scores) {
    vf sums[4][4];
    int64_t size = size_of(type) * dim;
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < 4; k++) sums[r][k] = (vf){0};
    for (int d = 0; d < dim; d += W) {
        vf keys[4];
        for (int k = 0; k < 4; k++) {
            keys[k] = load_as(type, key + k * size, d);
            prefetch(type, ahead + k * size, d);
        }
        for (int r = 0; r < rows; r++) {
            vf q = load(query + r * dim + d);
            for (int k = 0; k < 4; k++) sums[r][k] += q * keys[k];
        }
    }
    for (int r = 0; r < rows; r++) {
        v4 four = sum_four(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
        memcpy(scores + r * KEYS, &four, sizeof four);
    }
}

INLINE void score_one(int type, int rows, const float *query, const char *key, int dim, float *scores) {
    vf sums[4];
    for (int r = 0; r < rows; r++) sums[r] = (vf){0};
    for (int d = 0; d < dim; d += W) {
        vf keys = load_as(type, key, d);
        for (int r = 0; r < rows; r++) sums[r] += load(query + r * dim + d) * keys;
    }
    for (int r = 0; r < rows; r++) scores[r * KEYS] = sum_lanes(sums[r]);
}

/* Adds `count` values, times their weights [rows, KEYS], to `sums` [rows, dim] at `vectors` x W dims from d on. */
INLINE void add_values(int type, int rows, int vectors, const float *weights, const char *value, const char *ahead,
                       int count, int dim, int d, float *sums) {
    vf acc[4][4];
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
        int run = run_length(call, key, end), k = 0;
        const char *row = cache_row(call, table, kv_head, key, 0);
        const char *ahead = row_ahead(call, table, kv_head, key + AHEAD, last, 0);
        for (; k + 4 <= run; k += 4) {
            float *to = scores + key - begin + k;
            score_four(type, rows, query, row + k * size, ahead + k * size, dim, to);
        }
        for (; k < run; k++) score_one(type, rows, query, row + k * size, dim, scores + key - begin + k);
        key += run;
    }
}

INLINE void weigh_rows(const Call *call, int type, int rows, const int32_t *table, int kv_head, int begin, int end,
                       int last, const float *weights, float *sums) {
    int dim = call->head_dim;
    for (int key = begin; key < end;) {
        int run = run_length(call, key, end), d = 0;
        const char *row = cache_row(call, table, kv_head, key, 1);
        const float *w = weights + key - begin;
        const char *ahead = row_ahead(call, table, kv_head, key + AHEAD, last, 1);
        for (; d + 4 * W <= dim; d += 4 * W) add_values(type, rows, 4, w, row, ahead, run, dim, d, sums);
        for (; d < dim; d += W) add_values(type, rows, 1, w, row, ahead, run, dim, d, sums);
        key += run;
    }
}

/* The same with the type and the number of rows known to the compiler. */
#define FOR_ROWS(CALL, TYPE)                    \
    switch (rows) {                             \
    case 1: CALL(TYPE, 1); break;               \
    case 2: CALL(TYPE, 2); break;               \
    case 3: CALL(TYPE, 3); break;               \
    default: CALL(TYPE, 4); break;              \
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

static void weigh(const Call *call, int rows, const int32_t *table, int kv_head, int begin, int end, int last,
                  const float *weights, float *sums) {
#define WEIGH(TYPE, ROWS) weigh_rows(call, TYPE, ROWS, table, kv_head, begin, end, last, weights, sums)
    FOR_TYPE_AND_ROWS(WEIGH)
#undef WEIGH
}

/* Scores [count] of one row to weights; the running highest score, sum of weights and sums [dim] follow. */
static void soften(const Call *call, float *scores, int count, int first, int position, float slope, float *highest,
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

/* Scratch floats that `attend_decode` needs for a group of heads. */
INLINE int64_t decode_scratch(int heads, int dim) { return (int64_t)heads * (2 * dim + KEYS + 2); }

static void attend_decode(const Call *call, const Parts *parts, const Work *work, float *scratch) {
    int heads = work->heads, dim = call->head_dim;
    int first_head = work->kv_head * group_size(call) + work->head;
    const int32_t *table = table_of(call, work->seq);
    float *query = scratch, *sums = query + heads * dim, *scores = sums + heads * dim;
    float *highest = scores + heads * KEYS, *total = highest + heads;
    vf scale = splat(query_scale(call, work->kv_head));
    for (int h = 0; h < heads; h++) {
        int64_t from = work->token * call->query_stride + (first_head + h) * call->query_head_stride;
        for (int d = 0; d < dim; d += W) {
            store(query + h * dim + d, load_as(call->type, call->query, from + d) * scale);
            store(sums + h * dim + d, (vf){0});
        }
        highest[h] = -INFINITY;
        total[h] = 0.0f;
    }
    for (int begin = work->begin; begin < work->end; begin += KEYS) {
        int end = begin + KEYS < work->end ? begin + KEYS : work->end;
        for (int h = 0; h < heads; h += 4) {
            int rows = heads - h < 4 ? heads - h : 4;
            score(call, rows, table, work->kv_head, begin, end, work->end, query + h * dim, scores + h * KEYS);
        }
        for (int h = 0; h < heads; h++)
            soften(call, scores + h * KEYS, end - begin, begin, position_of(call, work, 0),
                   call->slopes ? call->slopes[first_head + h] : 0.0f, highest + h, total + h, sums + h * dim);
        for (int h = 0; h < heads; h += 4) {
            int rows = heads - h < 4 ? heads - h : 4;
            weigh(call, rows, table, work->kv_head, begin, end, work->end, scores + h * KEYS, sums + h * dim);
        }
    }
    for (int h = 0; h < heads; h++) finish(call, parts, work, h, highest[h], total[h], sums + h * dim, 1);
}
