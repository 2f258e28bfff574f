/* Activations; gated ones are an activation of the first half of each row, times the second. */

#include "rows.h"

enum { SILU = 0, GELU_TANH = 1, GELU_ERF = 2, RELU = 3 };

/* Laid out as ACTIVATION of cpu_backend/arguments.py. */
typedef struct {
    const void *x; /* [rows, width], or [rows, 2 * width] if it is gated; rows `stride` elements apart */
    void *out;     /* [rows, width] */
    int64_t rows, width, stride;
    int32_t kind, gated, type, threads;
} ActivationCall;

/* Elements that a second thread is worth waking for. */
#define LEAST_ELEMENTS_PER_THREAD 32768

/* 1 / (1 + e^-x); 0 below -88, where e^-x overflows. */
INLINE vf sigmoid(vf x) { return choose(x < splat(-88.0f), (vf){0}, splat(1.0f) / (splat(1.0f) + vexp(-x))); }

/* The normal distribution up to x, to three units in the last place on both sides of 0.
 *
 * Below -z it is e^(-z²/2) P(t) for t = 1 / (1 + 0.4 z), the form of Hastings (Approximations for Digital
 * Computers, 1955). P was fitted for the least relative error over 0 <= z <= 10: 6.5e-8. */
INLINE vf normal_distribution(vf x) {
    vf z = choose(x < splat(0.0f), -x, x);
    vf t = splat(1.0f) / (splat(1.0f) + splat(0.4f) * z);
    vf p = splat(-0.03988615056f);
    p = p * t + splat(0.2017282589f);
    p = p * t + splat(-0.3754959271f);
    p = p * t + splat(0.2524848483f);
    p = p * t + splat(-0.01306495913f);
    p = p * t + splat(0.1585621673f);
    p = p * t + splat(0.155782709f);
    p = p * t + splat(0.1599005868f);
    p = p * t + splat(-1.156588575e-5f);
    vf beyond = p * vexp(splat(-0.5f) * z * z);
    return choose(x < splat(0.0f), beyond, splat(1.0f) - beyond);
}

INLINE vf activated(int kind, vf x) {
    if (kind == SILU) return x * sigmoid(x);
    if (kind == RELU) return choose(x < splat(0.0f), (vf){0}, x);
    if (kind == GELU_ERF) return x * normal_distribution(x);
    /* (1 + tanh u) / 2 is the sigmoid of 2 u, which loses nothing to cancellation. */
    vf u = splat(0.797884561f) * x * (splat(1.0f) + splat(0.044715f) * x * x);
    return x * sigmoid(u + u);
}

/* W elements of a row, or the `left` that remain of it. */
INLINE void activate_some(int kind, int type, const void *x, const void *up, void *out, int64_t i, int64_t left) {
    vf y = activated(kind, load_upto(type, x, i, left));
    store_upto(type, out, i, left, up ? y * load_upto(type, up, i, left) : y);
}

INLINE void activate_rows(const ActivationCall *call, int kind, int type, int64_t begin, int64_t end) {
    int64_t width = call->width, i;
    for (int64_t row = begin; row < end; row++) {
        const void *x = at(type, call->x, row * call->stride);
        const void *up = call->gated ? at(type, x, width) : NULL;
        void *out = (void *)at(type, call->out, row * width);
        for (i = 0; i + W <= width; i += W) activate_some(kind, type, x, up, out, i, W);
        if (i < width) activate_some(kind, type, x, up, out, i, width - i);
    }
}

#define ACTIVATE_ROW(KIND, TYPE)                      \
    case 4 * KIND + TYPE:                             \
        activate_rows(call, KIND, TYPE, begin, end);  \
        break;
#define ACTIVATE_ROWS(KIND) ACTIVATE_ROW(KIND, FLOAT32) ACTIVATE_ROW(KIND, FLOAT16) ACTIVATE_ROW(KIND, BFLOAT16)

static void activate_range(const void *arguments, int64_t begin, int64_t end) {
    const ActivationCall *call = arguments;
    switch (4 * call->kind + call->type) {
        ACTIVATE_ROWS(SILU)
        ACTIVATE_ROWS(GELU_TANH)
        ACTIVATE_ROWS(GELU_ERF)
        ACTIVATE_ROWS(RELU)
    }
}

static int64_t activation_threads(const void *arguments) {
    const ActivationCall *call = arguments;
    return threads_for_rows(call->rows, call->width, LEAST_ELEMENTS_PER_THREAD, call->threads);
}

static int64_t activation_pieces(const void *arguments, int stage, int64_t threads) {
    const ActivationCall *call = arguments;
    (void)stage;
    return row_pieces(call->rows, call->width, threads);
}

static void run_activation(const void *arguments, int stage, int64_t piece, int64_t threads, int64_t thread) {
    const ActivationCall *call = arguments;
    int64_t rows = call->rows, pieces = activation_pieces(call, stage, threads);
    (void)thread;
    activate_range(call, first_of(rows, pieces, piece), first_of(rows, pieces, piece + 1));
}

const Kernel activation_kernel = {sizeof(ActivationCall), NULL, activation_threads, activation_pieces, run_activation, 1};
