/* What a mixture of experts has around its products: the choice of experts, the order of rows, the sum of results. */

#include "rows.h"

/* Elements that a second thread is worth waking for. */
#define LEAST_ELEMENTS_PER_THREAD 32768

/* Laid out as TOP_K of cpu_backend/arguments.py. */
typedef struct {
    const void *logits; /* [tokens, experts], `stride` elements apart */
    float *weights;     /* [tokens, k] */
    int32_t *chosen;    /* [tokens, k] */
    int64_t tokens, experts, stride, k;
    int32_t normalise, type, threads;
} TopKCall;

/* What a logit is sorted by: NaN last. */
INLINE float order_of(float logit) { return logit == logit ? logit : -INFINITY; }

/* The highest logit of those that come after number `last`, in descending order and then in that of experts. */
static int64_t next_highest(const TopKCall *call, const void *logits, int64_t last) {
    float bound = last < 0 ? INFINITY : order_of(load_one(call->type, logits, last)), highest = -INFINITY;
    int64_t found = -1;
    for (int64_t expert = 0; expert < call->experts; expert++) {
        float value = order_of(load_one(call->type, logits, expert));
        if (last >= 0 && (value > bound || (value == bound && expert <= last))) continue;
        if (found < 0 || value > highest) highest = value, found = expert;
    }
    return found;
}

static void choose_experts(const TopKCall *call, int64_t token) {
    const void *logits = at(call->type, call->logits, token * call->stride);
    float *weights = call->weights + token * call->k, total = 0.0f, kept = 0.0f;
    int32_t *chosen = call->chosen + token * call->k;
    int64_t last = -1;
    for (int64_t i = 0; i < call->k; i++) chosen[i] = last = next_highest(call, logits, last);
    float highest = load_one(call->type, logits, chosen[0]);
    for (int64_t e = 0; e < call->experts; e++) total += expf(load_one(call->type, logits, e) - highest);
    for (int64_t i = 0; i < call->k; i++) {
        weights[i] = expf(load_one(call->type, logits, chosen[i]) - highest) / total;
        kept += weights[i];
    }
    if (call->normalise)
        for (int64_t i = 0; i < call->k; i++) weights[i] /= kept;
}

static int64_t top_k_threads(const void *arguments) {
    const TopKCall *call = arguments;
    return threads_for_rows(call->tokens, call->experts * call->k, LEAST_ELEMENTS_PER_THREAD, call->threads);
}

static int64_t top_k_pieces(const void *arguments, int stage, int64_t threads) {
    const TopKCall *call = arguments;
    (void)stage;
    return row_pieces(call->tokens, call->experts * call->k, threads);
}

static void run_top_k(const void *arguments, int stage, int64_t piece, int64_t threads, int64_t thread) {
    const TopKCall *call = arguments;
    int64_t pieces = top_k_pieces(call, stage, threads), end = first_of(call->tokens, pieces, piece + 1);
    (void)thread;
    for (int64_t token = first_of(call->tokens, pieces, piece); token < end; token++) choose_experts(call, token);
}

const Kernel top_k_kernel = {sizeof(TopKCall), NULL, top_k_threads, top_k_pieces, run_top_k, 1};

/* Laid out as GROUP of cpu_backend/arguments.py. */
typedef struct {
    const int32_t *chosen; /* [tokens, k] */
    int32_t *starts;       /* [experts + 1] */
    int32_t *index;        /* [tokens * k]: the token of each row, in the order of experts */
    int32_t *places;       /* [tokens, k]: the row of each token's choice */
    int64_t *loads;        /* [experts], which rows are added to, or NULL */
    int64_t tokens, k, experts;
} GroupCall;

/* The expert of a choice, within what there is. */
static int64_t expert_of(const GroupCall *call, int64_t choice) {
    int64_t expert = call->chosen[choice];
    return expert < 0 ? 0 : expert < call->experts ? expert : call->experts - 1;
}

/* A counting sort, which keeps the order of tokens: starts[e + 1] is where the next row of e goes, in the end e's end. */
static void run_group(const void *arguments, int stage, int64_t piece, int64_t threads, int64_t thread) {
    const GroupCall *call = arguments;
    int64_t choices = call->tokens * call->k, begin = 0;
    (void)stage, (void)piece, (void)threads, (void)thread;
    memset(call->starts, 0, sizeof(int32_t) * (call->experts + 1));
    for (int64_t i = 0; i < choices; i++) call->starts[expert_of(call, i) + 1]++;
    for (int64_t expert = 0; expert < call->experts; expert++) {
        int64_t count = call->starts[expert + 1];
        if (call->loads) call->loads[expert] += count;
        call->starts[expert + 1] = begin;
        begin += count;
    }
    for (int64_t i = 0; i < choices; i++) {
        int32_t row = call->starts[expert_of(call, i) + 1]++;
        call->index[row] = i / call->k;
        call->places[i] = row;
    }
}

static int64_t group_threads(const void *arguments) {
    (void)arguments;
    return 1;
}

static int64_t group_pieces(const void *arguments, int stage, int64_t threads) {
    (void)arguments, (void)stage, (void)threads;
    return 1;
}

const Kernel group_kernel = {sizeof(GroupCall), NULL, group_threads, group_pieces, run_group, 1};

/* Laid out as WEIGHTED_SUM of cpu_backend/arguments.py. */
typedef struct {
    const void *results;   /* [rows, width], `stride` elements apart */
    const int32_t *places; /* [tokens, k]: the row of each term */
    const float *weights;  /* [tokens, k] */
    void *out;             /* [tokens, width], `out_stride` elements apart */
    int64_t tokens, k, width, stride, out_stride;
    int32_t type, threads;
} SumCall;

/* W elements of a token's sum from i on, or the `left` that remain, in the order of k. */
INLINE void sum_some(const SumCall *call, int type, int64_t token, int64_t i, int64_t left) {
    vf total = {0};
    for (int64_t choice = token * call->k; choice < (token + 1) * call->k; choice++) {
        const void *result = at(type, call->results, call->places[choice] * call->stride);
        total += load_upto(type, result, i, left) * splat(call->weights[choice]);
    }
    store_upto(type, call->out, token * call->out_stride + i, left, total);
}

INLINE void sum_tokens(const SumCall *call, int type, int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; token++)
        for (int64_t i = 0; i < call->width; i += W) sum_some(call, type, token, i, call->width - i);
}

static int64_t sum_threads(const void *arguments) {
    const SumCall *call = arguments;
    return threads_for_rows(call->tokens, call->width * call->k, LEAST_ELEMENTS_PER_THREAD, call->threads);
}

static int64_t sum_pieces(const void *arguments, int stage, int64_t threads) {
    const SumCall *call = arguments;
    (void)stage;
    return row_pieces(call->tokens, call->width * call->k, threads);
}

static void run_sum(const void *arguments, int stage, int64_t piece, int64_t threads, int64_t thread) {
    const SumCall *call = arguments;
    int64_t pieces = sum_pieces(call, stage, threads);
    int64_t begin = first_of(call->tokens, pieces, piece), end = first_of(call->tokens, pieces, piece + 1);
    (void)thread;
    switch (call->type) {
    case FLOAT32: sum_tokens(call, FLOAT32, begin, end); break;
    case FLOAT16: sum_tokens(call, FLOAT16, begin, end); break;
    case BFLOAT16: sum_tokens(call, BFLOAT16, begin, end); break;
    }
}

const Kernel weighted_sum_kernel = {sizeof(SumCall), NULL, sum_threads, sum_pieces, run_sum, 1};
