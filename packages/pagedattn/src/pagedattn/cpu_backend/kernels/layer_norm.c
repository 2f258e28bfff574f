/* Layer normalisation (Ba et al., https://arxiv.org/abs/1607.06450), with the residual added on the way. */

#include "rows.h"

/* Laid out as LAYER_NORM of cpu_backend/arguments.py. All are contiguous. */
typedef struct {
    const void *x, *residual, *weight, *bias; /* residual may be NULL */
    void *out, *total;                        /* [rows, hidden] */
    int64_t rows, hidden;
    int32_t type, threads;
    float eps;
} LayerNormCall;

/* Elements that a second thread is worth waking for. */
#define LEAST_ELEMENTS_PER_THREAD 65536

/* Lanes beyond the `left` that a row has are 0. */
INLINE vf keep(vf x, int64_t left) {
    float line[W];
    if (left >= W) return x;
    store(line, x);
    for (int64_t i = left; i < W; i++) line[i] = 0.0f;
    return load(line);
}

/* The passes over a row find it in the first-level cache after the first. */
INLINE void normalise(const LayerNormCall *call, int type, int64_t row) {
    int64_t hidden = call->hidden, from = row * hidden;
    const void *x = at(type, call->x, from);
    void *out = (void *)at(type, call->out, from);
    if (call->residual) {
        const void *residual = at(type, call->residual, from);
        void *total = (void *)at(type, call->total, from);
        for (int64_t i = 0; i < hidden; i += W)
            store_upto(type, total, i, hidden - i,
                       load_upto(type, x, i, hidden - i) + load_upto(type, residual, i, hidden - i));
        x = total;
    }
    vf sum = {0}, squares = {0};
    for (int64_t i = 0; i < hidden; i += W) sum += load_upto(type, x, i, hidden - i);
    vf mean = splat(sum_lanes(sum) / hidden);
    for (int64_t i = 0; i < hidden; i += W) {
        vf off = keep(load_upto(type, x, i, hidden - i) - mean, hidden - i);
        squares += off * off;
    }
    vf scale = splat(1.0f / sqrtf(sum_lanes(squares) / hidden + call->eps));
    for (int64_t i = 0; i < hidden; i += W) {
        int64_t left = hidden - i;
        vf normal = (load_upto(type, x, i, left) - mean) * scale;
        store_upto(type, out, i, left,
                   normal * load_upto(type, call->weight, i, left) + load_upto(type, call->bias, i, left));
    }
}

static void normalise_range(const void *arguments, int64_t begin, int64_t end) {
    const LayerNormCall *call = arguments;
    for (int64_t row = begin; row < end; row++) {
        if (call->type == FLOAT32)
            normalise(call, FLOAT32, row);
        else if (call->type == FLOAT16)
            normalise(call, FLOAT16, row);
        else
            normalise(call, BFLOAT16, row);
    }
}

static int64_t layer_norm_threads(const void *arguments) {
    const LayerNormCall *call = arguments;
    return threads_for_rows(call->rows, call->hidden, LEAST_ELEMENTS_PER_THREAD, call->threads);
}

static int64_t layer_norm_pieces(const void *arguments, int stage, int64_t threads) {
    const LayerNormCall *call = arguments;
    (void)stage;
    return row_pieces(call->rows, call->hidden, threads);
}

static void run_layer_norm(const void *arguments, int stage, int64_t piece, int64_t threads, int64_t thread) {
    const LayerNormCall *call = arguments;
    int64_t rows = call->rows, pieces = layer_norm_pieces(call, stage, threads);
    (void)thread;
    normalise_range(call, first_of(rows, pieces, piece), first_of(rows, pieces, piece + 1));
}

const Kernel layer_norm_kernel = {sizeof(LayerNormCall), NULL, layer_norm_threads, layer_norm_pieces, run_layer_norm, 1};
