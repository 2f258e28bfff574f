/* Rotary position embedding (Su et al., https://arxiv.org/abs/2104.09864). */

#include "rows.h"

/* Laid out as ROTARY of cpu_backend/arguments.py. Strides count elements. */
typedef struct {
    const void *query, *key; /* [tokens, heads, head_dim] */
    void *query_out, *key_out;
    const float *cos_sin;     /* rows of rotary_dim / 2 cosines, then as many sines */
    const int64_t *positions; /* [tokens]; NULL when row i of cos_sin is token i's */
    int64_t query_stride, query_head_stride, key_stride, key_head_stride, cos_sin_stride;
    int64_t tokens, max_position;
    int32_t q_heads, kv_heads, head_dim, rotary_dim, interleaved, type, threads;
} RotaryCall;

/* Elements that a second thread is worth waking for. */
#define LEAST_ELEMENTS_PER_THREAD 65536

/* Pairs of adjacent elements that are rotated at a time. */
#define PAIRS 32

/* W elements of the first half and of the second, or the `left` that remain of them. */
INLINE void turn_some(int type, const void *x, void *out, const float *cosines, const float *sines, int64_t half,
                      int64_t i, int64_t left) {
    vf c = load_upto(FLOAT32, cosines, i, left), s = load_upto(FLOAT32, sines, i, left);
    vf first = load_upto(type, x, i, left), second = load_upto(type, x, half + i, left);
    store_upto(type, out, i, left, first * c - second * s);
    store_upto(type, out, half + i, left, second * c + first * s);
}

/* Elements i and i + half. */
INLINE void turn_halves(int type, const void *x, void *out, const float *cosines, const float *sines, int64_t half) {
    int64_t i = 0;
    for (; i + W <= half; i += W) turn_some(type, x, out, cosines, sines, half, i, W);
    if (i < half) turn_some(type, x, out, cosines, sines, half, i, half - i);
}

/* Elements 2 i and 2 i + 1. */
INLINE void turn_pairs(int type, const void *x, void *out, const float *cosines, const float *sines, int64_t half) {
    float line[2 * PAIRS], turned[2 * PAIRS];
    for (int64_t first = 0; first < half; first += PAIRS) {
        int64_t count = half - first < PAIRS ? half - first : PAIRS;
        widen(type, at(type, x, 2 * first), line, 2 * count);
        for (int64_t i = 0; i < count; i++) {
            float c = cosines[first + i], s = sines[first + i], one = line[2 * i], other = line[2 * i + 1];
            turned[2 * i] = one * c - other * s;
            turned[2 * i + 1] = other * c + one * s;
        }
        for (int64_t i = 0; i < 2 * count; i += W)
            store_upto(type, out, 2 * first + i, 2 * count - i, load_upto(FLOAT32, turned, i, 2 * count - i));
    }
}

/* One token's heads; `out` is contiguous. */
INLINE void turn_heads(const RotaryCall *call, int type, const void *x, int64_t head_stride, int heads, void *out,
                       const float *cosines) {
    int64_t half = call->rotary_dim / 2, rest = call->head_dim - call->rotary_dim;
    for (int head = 0; head < heads; head++) {
        const void *from = at(type, x, head * head_stride);
        void *to = (void *)at(type, out, (int64_t)head * call->head_dim);
        if (call->interleaved)
            turn_pairs(type, from, to, cosines, cosines + half, half);
        else
            turn_halves(type, from, to, cosines, cosines + half, half);
        if (rest)
            memcpy((void *)at(type, to, call->rotary_dim), at(type, from, call->rotary_dim), rest * size_of(type));
    }
}

INLINE void turn_token(const RotaryCall *call, int type, int64_t token) {
    int64_t row = call->positions ? call->positions[token] : token, head_dim = call->head_dim;
    const float *cosines = call->cos_sin + row * call->cos_sin_stride;
    turn_heads(call, type, at(type, call->query, token * call->query_stride), call->query_head_stride,
               call->q_heads, (void *)at(type, call->query_out, token * call->q_heads * head_dim), cosines);
    turn_heads(call, type, at(type, call->key, token * call->key_stride), call->key_head_stride, call->kv_heads,
               (void *)at(type, call->key_out, token * call->kv_heads * head_dim), cosines);
}

static void turn_range(const void *arguments, int64_t begin, int64_t end) {
    const RotaryCall *call = arguments;
    for (int64_t token = begin; token < end; token++) {
        if (call->type == FLOAT32)
            turn_token(call, FLOAT32, token);
        else if (call->type == FLOAT16)
            turn_token(call, FLOAT16, token);
        else
            turn_token(call, BFLOAT16, token);
    }
}

/* Returns 0, or 1 plus the first token whose position lies outside of cos_sin. */
static int64_t check_positions(void *arguments, Scratch *scratch) {
    const RotaryCall *call = arguments;
    (void)scratch;
    for (int64_t token = 0; call->positions && token < call->tokens; token++)
        if (call->positions[token] < 0 || call->positions[token] >= call->max_position) return 1 + token;
    return PREPARED;
}

INLINE int64_t elements_per_token(const RotaryCall *call) {
    return (int64_t)(call->q_heads + call->kv_heads) * call->head_dim;
}

static int64_t rotary_threads(const void *arguments) {
    const RotaryCall *call = arguments;
    return threads_for_rows(call->tokens, elements_per_token(call), LEAST_ELEMENTS_PER_THREAD, call->threads);
}

static int64_t rotary_pieces(const void *arguments, int stage, int64_t threads) {
    const RotaryCall *call = arguments;
    (void)stage;
    return row_pieces(call->tokens, elements_per_token(call), threads);
}

static void run_rotary(const void *arguments, int stage, int64_t piece, int64_t threads, int64_t thread) {
    const RotaryCall *call = arguments;
    int64_t rows = call->tokens, pieces = rotary_pieces(call, stage, threads);
    (void)thread;
    turn_range(call, first_of(rows, pieces, piece), first_of(rows, pieces, piece + 1));
}

const Kernel rotary_kernel = {sizeof(RotaryCall), check_positions, rotary_threads, rotary_pieces, run_rotary, 1};
