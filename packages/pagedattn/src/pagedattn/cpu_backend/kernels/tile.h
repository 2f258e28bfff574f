/* Many query rows over a range of keys: vectors run along the rows, keys and values are read as scalars.
 *
 * Scores lie as [keys, rows] and results as [head_dim, rows], so that softmax has no sums across lanes, and
 * neither keys nor values are ever transposed.
 */

#pragma once

#include "call.h"

/* Vectors of rows that a tile can have: as many as leave registers for four keys. */
#if defined(__AVX2__) && !defined(__AVX512F__)
#define MOST_VECTORS 2
#else
#define MOST_VECTORS 4
#endif
#define MOST_ROWS (MOST_VECTORS * W)

typedef struct {
    float *query, *scores, *sums;  /* [dim, rows], [KEYS, rows], [dim, rows] */
    float *highest, *total, *decay, *slopes; /* [rows] */
    int32_t *positions;            /* [rows] */
    float *widened;                /* [2, KEYS, dim], of caches that are not float32 */
    const float *keys[KEYS], *values[KEYS];
} Tile;

/* `count` x vectors products of scalars left[i][at] and row vectors, summed over `at`. */
INLINE void score_keys(int vectors, int count, const float *const *keys, const float *query, int dim, float *scores) {
    const int rows = vectors * W;
    vf acc[8][4];
    for (int k = 0; k < count; k++)
        for (int v = 0; v < vectors; v++) acc[k][v] = (vf){0};
    for (int d = 0; d < dim; d++) {
        vf q[4];
        for (int v = 0; v < vectors; v++) q[v] = load(query + d * rows + v * W);
        for (int k = 0; k < count; k++) {
            vf key = splat(keys[k][d]);
            for (int v = 0; v < vectors; v++) acc[k][v] += key * q[v];
        }
    }
    for (int k = 0; k < count; k++)
        for (int v = 0; v < vectors; v++) store(scores + k * rows + v * W, acc[k][v]);
}

INLINE void pv_dims(int vectors, int dims, const float *const *values, int d, const float *weights, int count,
                       const float *decay, float *sums) {
    const int rows = vectors * W;
    vf acc[8][4];
    for (int i = 0; i < dims; i++)
        for (int v = 0; v < vectors; v++) acc[i][v] = load(sums + i * rows + v * W) * load(decay + v * W);
    for (int k = 0; k < count; k++) {
        vf w[4];
        const float *value = values[k] + d;
        for (int v = 0; v < vectors; v++) w[v] = load(weights + k * rows + v * W);
        for (int i = 0; i < dims; i++) {
            vf x = splat(value[i]);
            for (int v = 0; v < vectors; v++) acc[i][v] += x * w[v];
        }
    }
    for (int i = 0; i < dims; i++)
        for (int v = 0; v < vectors; v++) store(sums + i * rows + v * W, acc[i][v]);
}

/* Options and mask on scores [count, W], then softmax's weights in their place. */
INLINE void softmax_rows(const Call *call, float *scores, int rows, int count, int first, int masked, vi positions,
                        vf slopes, float *highest, float *total, float *decay) {
    vf top = load(highest), before = top;
    vf cap = splat(call->soft_cap);
    for (int k = 0; k < count; k++) {
        vf x = load(scores + k * rows);
        if (call->soft_cap) x = cap * vtanh(x / cap);
        if (call->slopes) x += slopes * __builtin_convertvector(isplat(first + k) - positions, vf);
        if (masked) {
            vi hidden = positions < isplat(first + k);
            if (call->window) hidden |= positions - call->window >= isplat(first + k);
            x = choose(hidden, splat(-INFINITY), x);
        }
        store(scores + k * rows, x);
        top = vmax(x, top);
    }
    vf shift = choose(top == splat(-INFINITY), (vf){0}, top), sum = (vf){0};
    for (int k = 0; k < count; k++) {
        vf weight = vexp(load(scores + k * rows) - shift);
        store(scores + k * rows, weight);
        sum += weight;
    }
    vf fading = vexp(before - shift);
    store(highest, top);
    store(total, load(total) * fading + sum);
    store(decay, fading);
}

INLINE void attend_keys(const Call *call, int vectors, Tile *tile, int first, int count, int masked) {
    const int rows = vectors * W, many = vectors == 1 ? 8 : 4;
    int dim = call->head_dim, k = 0, d = 0;
    for (; k + many <= count; k += many)
        score_keys(vectors, many, tile->keys + k, tile->query, dim, tile->scores + k * rows);
    for (; k < count; k++) score_keys(vectors, 1, tile->keys + k, tile->query, dim, tile->scores + k * rows);
    for (int v = 0; v < vectors; v++) {
        vi positions;
        memcpy(&positions, tile->positions + v * W, sizeof positions);
        softmax_rows(call, tile->scores + v * W, rows, count, first, masked, positions, load(tile->slopes + v * W),
                    tile->highest + v * W, tile->total + v * W, tile->decay + v * W);
    }
    for (; d + many <= dim; d += many)
        pv_dims(vectors, many, tile->values, d, tile->scores, count, tile->decay, tile->sums + d * rows);
    for (; d < dim; d++)
        pv_dims(vectors, 1, tile->values, d, tile->scores, count, tile->decay, tile->sums + d * rows);
}

/* Points keys and values at the rows of positions first ... first + count - 1, widened to floats. */
static void fetch_keys(const Call *call, const Work *work, Tile *tile, int first, int count) {
    const int32_t *table = table_of(call, work->seq);
    int dim = call->head_dim;
    for (int k = 0; k < count;) {
        int run = run_length(call, first + k, first + count);
        for (int values = 0; values < 2; values++) {
            const char *from = cache_row(call, table, work->kv_head, first + k, values);
            const float *rows = (const float *)from;
            if (call->cache_type != FLOAT32) {
                float *to = tile->widened + (values * KEYS + k) * dim;
                widen(call->cache_type, from, to, (int64_t)run * dim);
                rows = to;
            }
            const float **pointers = values ? tile->values : tile->keys;
            for (int i = 0; i < run; i++) pointers[k + i] = rows + i * dim;
        }
        k += run;
    }
}

INLINE int64_t tile_scratch(int dim) {
    return (int64_t)MOST_ROWS * (2 * dim + KEYS + 5) + 2 * KEYS * dim;
}

static void lay_out(Tile *tile, float *scratch, int dim, int rows) {
    tile->query = scratch;
    tile->sums = tile->query + dim * rows;
    tile->scores = tile->sums + dim * rows;
    tile->highest = tile->scores + KEYS * rows;
    tile->total = tile->highest + rows;
    tile->decay = tile->total + rows;
    tile->slopes = tile->decay + rows;
    tile->positions = (int32_t *)(tile->slopes + rows);
    tile->widened = tile->slopes + 2 * rows;
}

/* Fills in the queries, scaled and transposed, and where each row stands. */
static void open_rows(const Call *call, const Work *work, Tile *tile, int rows) {
    int used = work->tokens * work->heads, dim = call->head_dim;
    int first_head = work->kv_head * group_size(call) + work->head;
    float scale = query_scale(call, work->kv_head), line[dim];
    for (int r = 0; r < rows; r++) {
        int token = r < used ? r / work->heads : 0, head = first_head + (r < used ? r % work->heads : 0);
        int64_t from = (work->token + token) * call->query_stride + head * call->query_head_stride;
        int64_t bytes = from * size_of(call->type);
        widen(call->type, (const char *)call->query + bytes, line, dim);
        for (int d = 0; d < dim; d++) tile->query[d * rows + r] = line[d] * scale;
        tile->positions[r] = position_of(call, work, token);
        tile->slopes[r] = call->slopes ? call->slopes[head] : 0.0f;
        tile->highest[r] = -INFINITY;
        tile->total[r] = 0.0f;
    }
    memset(tile->sums, 0, sizeof(float) * dim * rows);
}

static void attend_tile(const Call *call, const Parts *parts, const Work *work, float *scratch) {
    int used = work->tokens * work->heads;
    int vectors = used <= W ? 1 : used <= 2 * W ? 2 : MOST_VECTORS;
    int rows = vectors * W;
    Tile tile;
    lay_out(&tile, scratch, call->head_dim, rows);
    open_rows(call, work, &tile, rows);
    int last = work->position + work->tokens - 1;
    for (int first = work->begin; first < work->end; first += KEYS) {
        int count = work->end - first < KEYS ? work->end - first : KEYS;
        fetch_keys(call, work, &tile, first, count);
        int masked = work->position != ALL_VISIBLE &&
                     (first + count - 1 > work->position || (call->window && first <= last - call->window));
        switch (vectors) {
        case 1: attend_keys(call, 1, &tile, first, count, masked); break;
        case 2: attend_keys(call, 2, &tile, first, count, masked); break;
        default: attend_keys(call, MOST_VECTORS, &tile, first, count, masked); break;
        }
    }
    int first_head = work->kv_head * group_size(call) + work->head;
    for (int r = 0; r < used; r++)
        finish(call, parts, work, work->token + r / work->heads, first_head + r % work->heads, tile.highest[r],
               tile.total[r], tile.sums + r, rows);
}
