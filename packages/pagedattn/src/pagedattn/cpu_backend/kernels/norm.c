/* RMS normalisation (Zhang and Sennrich, https://arxiv.org/abs/1910.07467), with the residual added on the way. */

#include "rows.h"

/* Laid out as NORM of cpu_backend/arguments.py. */
typedef struct {
    const void *x, *residual, *weight; /* residual may be NULL; it lies as x does */
    void *out, *total;                 /* [rows, hidden] */
    Rows rows;
    int64_t hidden;
    int32_t type, weight_type, threads;
    float eps;
} NormCall;

/* Elements that a second thread is worth waking for. */
#define LEAST_ELEMENTS_PER_THREAD 65536

/* W elements of a row, or the `left` that remain of it: their squares; x + residual, rounded, goes to `total`. */
INLINE vf square_some(int type, const void *x, const void *residual, void *total, int64_t i, int64_t left) {
    vf one = load_upto(type, x, i, left);
    if (residual) {
        one += load_upto(type, residual, i, left);
        store_upto(type, total, i, left, one);
        if (type != FLOAT32) one = load_upto(type, total, i, left);
    }
    return one * one;
}

INLINE void scale_some(int type, int weight_type, const void *x, const void *weight, void *out, vf scale, int64_t i,
                       int64_t left) {
    vf scaled = load_upto(type, x, i, left) * scale;
    store_upto(type, out, i, left, scaled * load_upto(weight_type, weight, i, left));
}

/* The two passes over a row find it in the first-level cache the second time. */
INLINE void norm_row(const NormCall *call, int type, int weight_type, const void *x, const void *residual,
                     void *total, void *out) {
    int64_t hidden = call->hidden, i = 0;
    vf sums[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
    for (; i + 4 * W <= hidden; i += 4 * W)
        for (int k = 0; k < 4; k++) sums[k] += square_some(type, x, residual, total, i + k * W, W);
    for (; i + W <= hidden; i += W) sums[0] += square_some(type, x, residual, total, i, W);
    if (i < hidden) sums[1] += square_some(type, x, residual, total, i, hidden - i);
    float sum = sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
    vf scale = splat(1.0f / sqrtf(sum / hidden + call->eps));
    if (residual) x = total;
    for (i = 0; i + W <= hidden; i += W) scale_some(type, weight_type, x, call->weight, out, scale, i, W);
    if (i < hidden) scale_some(type, weight_type, x, call->weight, out, scale, i, hidden - i);
}

INLINE void norm_rows(const NormCall *call, int type, int weight_type, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
        int64_t from = offset_of(&call->rows, row), to = row * call->hidden;
        const void *x = at(type, call->x, from);
        void *out = (void *)at(type, call->out, to);
        if (call->residual)
            norm_row(call, type, weight_type, x, at(type, call->residual, from), (void *)at(type, call->total, to),
                     out);
        else
            norm_row(call, type, weight_type, x, NULL, NULL, out);
    }
}

#define NORM_ROWS(TYPE, WEIGHT_TYPE)                         \
    case 4 * TYPE + WEIGHT_TYPE:                             \
        norm_rows(call, TYPE, WEIGHT_TYPE, begin, end);      \
        break;

static void norm_range(const void *arguments, int64_t begin, int64_t end) {
    const NormCall *call = arguments;
    switch (4 * call->type + call->weight_type) {
        NORM_ROWS(FLOAT32, FLOAT32)
        NORM_ROWS(FLOAT16, FLOAT32)
        NORM_ROWS(FLOAT16, FLOAT16)
        NORM_ROWS(BFLOAT16, FLOAT32)
        NORM_ROWS(BFLOAT16, BFLOAT16)
    }
}

static int64_t norm_threads(const void *arguments) {
    const NormCall *call = arguments;
    return threads_for_rows(call->rows.rows, call->hidden, LEAST_ELEMENTS_PER_THREAD, call->threads);
}

static int64_t norm_pieces(const void *arguments, int stage, int64_t threads) {
    const NormCall *call = arguments;
    (void)stage;
    return row_pieces(call->rows.rows, call->hidden, threads);
}

static void run_norm(const void *arguments, int stage, int64_t piece, int64_t threads, int64_t thread) {
    const NormCall *call = arguments;
    int64_t rows = call->rows.rows, pieces = norm_pieces(call, stage, threads);
    (void)thread;
    norm_range(call, first_of(rows, pieces, piece), first_of(rows, pieces, piece + 1));
}

const Kernel norm_kernel = {sizeof(NormCall), NULL, norm_threads, norm_pieces, run_norm, 1};
