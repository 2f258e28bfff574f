/* What one call of attention is given, and how its work is cut. */

#pragma once

#include "kernel.h"
#include "vectors.h"

/* Keys that are scored at a time: their scores, and what they are made of, stay in the first-level cache. */
#define KEYS 64

/* Laid out as AttendArguments of cpu_backend/arguments.py. Strides count elements. */
typedef struct {
    const void *query, *cache;
    void *out;
    const int32_t *query_starts, *lengths, *block_table;
    const float *slopes, *sinks, *kv_scales; /* each may be NULL */
    const struct Schedule *schedule;         /* set when the call is prepared */
    int64_t query_stride, query_head_stride, out_stride, out_head_stride, table_stride;
    int64_t num_blocks, table_columns;
    int32_t num_seqs, num_decodes, num_tokens, q_heads, kv_heads, head_dim, block_size;
    int32_t shared_prefix, given_window; /* a window of 0 is none */
    int32_t window;                      /* set when the call is prepared: none where nothing reaches beyond it */
    int32_t type, cache_type, threads;
    float scale, soft_cap; /* a cap of 0 is none */
} Call;

/* Some query tokens and heads of one KV head, and a range of key positions that they attend to. One token may do
 * so for several KV heads, which lie one after another in each block. */
typedef struct {
    int32_t seq; /* whose block table is followed */
    int32_t kv_head, kv_heads;
    int32_t token, tokens; /* rows are tokens x heads, token by token */
    int32_t head, heads;   /* within the group of the KV head */
    int32_t begin, end;
    int32_t position; /* of the first token; ALL_VISIBLE when every token sees every key of the range */
    int32_t part;     /* which of its tokens' partial results this yields; WHOLE if it is the only one */
} Work;

enum { WHOLE = -1, ALL_VISIBLE = -1 };

/* Partial results wait here for the merge; tokens with one part leave nothing. */
typedef struct {
    int32_t *starts; /* [tokens + 1]: a token's first part; NULL if nothing is cut */
    float *sums;     /* [parts, q_heads, head_dim] */
    float *logs;     /* [parts, q_heads, 2]: highest score, sum of weights */
} Parts;

INLINE int group_size(const Call *call) { return call->q_heads / call->kv_heads; }

/* The row [head_dim] of position `key` in the cache: of keys, or of values. */
INLINE const char *cache_row(const Call *call, const int32_t *table, int kv_head, int key, int values) {
    int64_t block = table[key / call->block_size];
    int64_t tile = (block * 2 + values) * call->kv_heads + kv_head;
    int64_t row = tile * call->block_size + key % call->block_size;
    return (const char *)call->cache + row * call->head_dim * size_of(call->cache_type);
}

INLINE const int32_t *table_of(const Call *call, int seq) { return call->block_table + seq * call->table_stride; }

/* How many positions from `key` on, below `end`, lie in its block. */
INLINE int run_length(const Call *call, int key, int end) {
    int left = call->block_size - key % call->block_size;
    return left < end - key ? left : end - key;
}

INLINE float value_scale(const Call *call, int kv_head) {
    if (call->cache_type != FLOAT8) return 1.0f;
    return FLOAT8_UNIT * (call->kv_scales ? call->kv_scales[call->kv_heads + kv_head] : 1.0f);
}

INLINE float query_scale(const Call *call, int kv_head) {
    if (call->cache_type != FLOAT8) return call->scale;
    return call->scale * FLOAT8_UNIT * (call->kv_scales ? call->kv_scales[kv_head] : 1.0f);
}

/* Position of a row's token minus that of a key, times the head's slope, is taken off its score. */
INLINE int position_of(const Call *call, const Work *work, int token) {
    /* A range that all see belongs to decodes, where token and sequence are numbered alike. */
    if (work->position == ALL_VISIBLE) return call->lengths[work->token + token] - 1;
    return work->position + token;
}

/* Writes a query head's result, or adds it to the parts. `sums` has elements `step` apart. */
INLINE void finish(const Call *call, const Parts *parts, const Work *work, int token, int head, float highest,
                   float total, const float *sums, int64_t step) {
    int dim = call->head_dim;
    if (work->part != WHOLE) {
        int64_t slot = (int64_t)(parts->starts[token] + work->part) * call->q_heads + head;
        parts->logs[2 * slot] = highest;
        parts->logs[2 * slot + 1] = total;
        for (int d = 0; d < dim; d++) parts->sums[slot * dim + d] = sums[d * step];
        return;
    }
    float factor = 1.0f;
    if (highest == -INFINITY) total = 0.0f; /* nothing was seen: 0, whatever the sink */
    if (call->sinks && total != 0.0f) {
        float sink = call->sinks[head], top = sink > highest ? sink : highest;
        factor = expf(highest - top);
        total = total * factor + expf(sink - top);
    }
    factor = total == 0.0f ? 0.0f : factor / total * value_scale(call, head / group_size(call));
    int64_t base = token * call->out_stride + head * call->out_head_stride;
    if (step == 1) {
        int d = 0;
        for (; d + W <= dim; d += W) store_as(call->type, call->out, base + d, load(sums + d) * splat(factor));
        for (; d < dim; d++) store_one(call->type, call->out, base + d, sums[d] * factor);
    } else {
        float line[W];
        int d = 0;
        for (; d + W <= dim; d += W) {
            for (int i = 0; i < W; i++) line[i] = sums[(d + i) * step];
            store_as(call->type, call->out, base + d, load(line) * splat(factor));
        }
        for (; d < dim; d++) store_one(call->type, call->out, base + d, sums[d * step] * factor);
    }
}
