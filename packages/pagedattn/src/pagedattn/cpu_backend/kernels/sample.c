/* Drawing a token a row: pagedattn/sampling.py says which one. */

#include <float.h>
#include <stdlib.h>

#include "noise.h"
#include "rows.h"
#include "select.h"

/* Laid out as SAMPLE of cpu_backend/arguments.py; all columns are [rows]. */
typedef struct {
    const void *logits; /* [rows, vocab], rows `stride` elements apart */
    const float *temperature, *top_p, *min_p;
    const int32_t *top_k;
    const int64_t *seeds, *positions;
    int64_t *tokens;
    int64_t stride, rows, vocab;
    int32_t type, threads;
} SampleCall;

/* One thread's space. Bins are BLOCK ids each; the kept bins lie side by side in `values` and `weights`. */
typedef struct {
    float *maxima;           /* [bins], filled up with -inf */
    float *masses;           /* [bins]: of the kept ones */
    uint32_t *kept, *words;  /* [bins]: the kept ones' numbers, and their random words */
    float *values, *weights; /* [bins * BLOCK] */
    float *space, *weight_space;
} Space;

typedef struct {
    float highest, temperature, least; /* least: no logit below it is kept */
    int64_t kept;                      /* bins that may hold one */
} Row;

static int64_t space_elements(int64_t vocab) {
    int64_t bins = blocks_of(vocab);
    return 4 * blocks_of(bins) * BLOCK + 4 * (bins + 1) * BLOCK;
}

static Space divide(float *memory, int64_t vocab) {
    int64_t bins = blocks_of(vocab), column = blocks_of(bins) * BLOCK, row = (bins + 1) * BLOCK;
    float *rows = memory + 4 * column;
    return (Space){
        .maxima = memory,
        .masses = memory + column,
        .kept = (uint32_t *)(memory + 2 * column),
        .words = (uint32_t *)(memory + 3 * column),
        .values = rows,
        .weights = rows + row,
        .space = rows + 2 * row,
        .weight_space = rows + 3 * row,
    };
}

/* The largest of up to BLOCK logits as they are, NaN aside. */
INLINE float highest_of(int type, const void *logits, int64_t first, int64_t count) {
    vf best = splat(-INFINITY);
    if (count == BLOCK) {
        for (int64_t i = 0; i < BLOCK; i += W) {
            vf one = load_as(type, logits, first + i);
            best = choose(one > best, one, best);
        }
        return highest_lane(best);
    }
    float highest = -INFINITY;
    for (int64_t i = first; i < first + count; i++) {
        float one = load_one(type, logits, i);
        if (one > highest) highest = one;
    }
    return highest;
}

/* The highest logit of each bin, and of all: finite, whatever they are. */
INLINE float find_maxima(int type, const void *logits, int64_t vocab, float *maxima) {
    int64_t bins = blocks_of(vocab);
    float highest = -FLT_MAX;
    for (int64_t bin = 0; bin < bins; bin++) {
        int64_t first = bin * BLOCK, left = vocab - first;
        float best = highest_of(type, logits, first, left < BLOCK ? left : BLOCK);
        maxima[bin] = best > FLT_MAX ? FLT_MAX : best;
        if (maxima[bin] > highest) highest = maxima[bin];
    }
    for (int64_t bin = bins; bin < blocks_of(bins) * BLOCK; bin++) maxima[bin] = -INFINITY;
    return highest;
}

/* The lowest id of the highest logit; 0 when all are -inf. */
INLINE int64_t find_highest(int type, const void *logits, int64_t vocab, const float *maxima, float highest) {
    int64_t id = 0;
    while (id < vocab && maxima[id / BLOCK] < highest) id += BLOCK;
    while (id < vocab && !(load_one(type, logits, id) >= highest)) id++;
    return id < vocab ? id : 0;
}

/* Copies the bins that reach row->least, with NaN as -inf and +inf as the largest number. */
INLINE void gather(int type, const void *logits, int64_t vocab, const Space *space, Row *row) {
    row->kept = 0;
    for (int64_t bin = 0; bin < blocks_of(vocab); bin++) {
        if (!(space->maxima[bin] >= row->least)) continue;
        float *values = space->values + row->kept * BLOCK;
        int64_t first = bin * BLOCK, count = vocab - first < BLOCK ? vocab - first : BLOCK;
        for (int64_t i = 0; i < BLOCK; i += W) {
            int64_t left = count - i;
            vf one = left > 0 ? load_upto(type, logits, first + i, left) : splat(-INFINITY);
            one = choose(one == one, one, splat(-INFINITY));
            store(values + i, choose(one > splat(FLT_MAX), splat(FLT_MAX), one));
        }
        for (int64_t i = count; i < BLOCK; i++) values[i] = -INFINITY;
        space->kept[row->kept++] = bin;
    }
}

/* The k-th largest of `count` values in whole blocks, of those that are at least `least`; or -inf. */
static float kth_largest(const float *values, int64_t count, int64_t k, float least, const Space *space) {
    vf bound = splat(least);
    for (int64_t i = 0; i < blocks_of(count) * BLOCK; i += W)
        store(space->weights + i, (vf)((load(values + i) >= bound) & (vi)splat(1.0f)));
    return least_reaching(values, space->weights, count, k, -INFINITY, space->space, space->weight_space);
}

/* Softmax weights of the logits that are at least row->least, and their sum in each bin. */
static void softmax_bins(const Space *space, const Row *row) {
    vf highest = splat(row->highest), temperature = splat(row->temperature), least = splat(row->least);
    for (int64_t bin = 0; bin < row->kept; bin++) {
        vf mass = splat(0.0f);
        for (int64_t i = bin * BLOCK; i < (bin + 1) * BLOCK; i += W) {
            vf value = load(space->values + i);
            vf weight = (vf)((value >= least) & (vi)vexp((value - highest) / temperature));
            store(space->weights + i, weight);
            mass += weight;
        }
        space->masses[bin] = sum_lanes(mass);
    }
}

/* The masses of bins after row->least has risen. */
static void cut_masses(const Space *space, const Row *row) {
    vf least = splat(row->least);
    for (int64_t bin = 0; bin < row->kept; bin++) {
        vf mass = splat(0.0f);
        for (int64_t i = bin * BLOCK; i < (bin + 1) * BLOCK; i += W)
            mass += (vf)((load(space->values + i) >= least) & (vi)load(space->weights + i));
        space->masses[bin] = sum_lanes(mass);
    }
}

/* A bin by its mass, then a token of it by its weight; 0 when all logits are -inf. */
static int64_t draw(const Space *space, const Row *row, Stream stream) {
    double best = 0.0;
    int64_t chosen = -1;
    random_words(stream, 0, space->kept, row->kept, space->words);
    for (int64_t bin = 0; bin < row->kept; bin++) {
        if (space->masses[bin] == 0.0f) continue;
        /* ln(mass) - ln(-ln u) is largest where mass / -ln u is. */
        double score = space->masses[bin] / exponential(space->words[bin]);
        if (score > best) {
            best = score;
            chosen = bin;
        }
    }
    if (chosen < 0) return 0;
    uint32_t ids[BLOCK], words[BLOCK];
    for (int i = 0; i < BLOCK; i++) ids[i] = space->kept[chosen] * BLOCK + i;
    random_words(stream, 1, ids, BLOCK, words);
    int64_t token = ids[0];
    best = -INFINITY;
    for (int i = 0; i < BLOCK; i++) {
        float value = space->values[chosen * BLOCK + i];
        if (!(value >= row->least)) continue;
        float scaled = (value - row->highest) / row->temperature;
        double score = scaled - log(exponential(words[i]));
        if (score > best) {
            best = score;
            token = ids[i];
        }
    }
    return token;
}

INLINE int64_t sample_row(const SampleCall *call, int type, int64_t index, const Space *space) {
    int64_t vocab = call->vocab, bins = blocks_of(vocab), top_k = call->top_k[index];
    const void *logits = at(type, call->logits, index * call->stride);
    Row row = {.temperature = call->temperature[index]};
    row.highest = find_maxima(type, logits, vocab, space->maxima);
    if (row.temperature < FLT_MIN) return find_highest(type, logits, vocab, space->maxima, row.highest);

    int limited = top_k > 0 && top_k < vocab;
    row.least = row.highest + row.temperature * logf(call->min_p[index]);
    if (limited && top_k <= bins) {
        /* As many logits as bins, and so the k-th of all, reach what the k-th of the bins' highest does. */
        float bound = kth_largest(space->maxima, bins, top_k, -INFINITY, space);
        if (bound > row.least) row.least = bound;
    }
    gather(type, logits, vocab, space, &row);
    if (limited) {
        float bound = kth_largest(space->values, row.kept * BLOCK, top_k, row.least, space);
        if (bound > row.least) row.least = bound;
    }
    softmax_bins(space, &row);
    if (call->top_p[index] < 1.0f) {
        int64_t count = row.kept * BLOCK;
        float total = sum_all(space->weights, count), goal = call->top_p[index] * total;
        row.least = least_reaching(space->values, space->weights, count, goal, row.least, space->space,
                                   space->weight_space);
        cut_masses(space, &row);
    }
    Stream stream = {.seed = call->seeds[index], .position = call->positions[index]};
    return draw(space, &row, stream);
}

/* The sampled id, or NOT_FINITE of sampling.py where its logit is NaN or infinite. */
INLINE int64_t sample_finite(const SampleCall *call, int type, int64_t index, const Space *space) {
    int64_t token = sample_row(call, type, index, space);
    float logit = load_one(type, at(type, call->logits, index * call->stride), token);
    return fabsf(logit) <= FLT_MAX ? token : -1;
}

/* Returns 0, or -1 when memory is short. */
int octavo_sample(const SampleCall *call) {
    int threads = call->rows < call->threads ? call->rows : call->threads, failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        float *memory = malloc(sizeof(float) * space_elements(call->vocab));
        if (!memory) {
#pragma omp atomic write
            failed = -1;
        }
        Space space = divide(memory, call->vocab);
#pragma omp for schedule(dynamic, 1)
        for (int64_t row = 0; row < call->rows; row++) {
            if (!memory) continue;
            if (call->type == FLOAT32)
                call->tokens[row] = sample_finite(call, FLOAT32, row, &space);
            else if (call->type == FLOAT16)
                call->tokens[row] = sample_finite(call, FLOAT16, row, &space);
            else
                call->tokens[row] = sample_finite(call, BFLOAT16, row, &space);
        }
        free(memory);
    }
    return failed;
}
