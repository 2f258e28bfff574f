/* Finding a threshold among weighted values without sorting them. */

#pragma once

#include "vectors.h"

/* Values come in whole blocks of this many, the last filled up with -inf. */
#define BLOCK 128

/* So few are sorted. */
#define FEW 32

/* So many are drawn to choose pivots from. */
#define SAMPLE 19
#define PIVOTS 4

INLINE int64_t blocks_of(int64_t count) { return (count + BLOCK - 1) / BLOCK; }

/* Insertion sort, the largest first; `weights` may be NULL. */
static void sort_few(float *values, float *weights, int count) {
    for (int i = 1; i < count; i++) {
        float value = values[i], weight = weights ? weights[i] : 0.0f;
        int place = i;
        for (; place > 0 && values[place - 1] < value; place--) {
            values[place] = values[place - 1];
            if (weights) weights[place] = weights[place - 1];
        }
        values[place] = value;
        if (weights) weights[place] = weight;
    }
}

/* PIVOTS of the values in descending order, which cut them into about equal parts. */
static void choose_pivots(const float *values, int64_t count, uint64_t *random, float *pivots) {
    float sample[SAMPLE];
    for (int i = 0; i < SAMPLE; i++) {
        *random = *random * 6364136223846793005u + 1442695040888963407u; /* Knuth, MMIX */
        sample[i] = values[(*random >> 32) * (uint64_t)count >> 32];
    }
    sort_few(sample, NULL, SAMPLE);
    for (int i = 0; i < PIVOTS; i++) pivots[i] = sample[(i + 1) * (SAMPLE + 1) / (PIVOTS + 1) - 1];
}

/* For each pivot, what the weights of all values from it up add up to. */
static void add_up(const float *values, const float *weights, int64_t count, const float *pivots, double *sums) {
    double lanes[PIVOTS][W] = {{0}};
    for (int64_t block = 0; block < blocks_of(count); block++) {
        vf parts[PIVOTS] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
        for (int64_t i = block * BLOCK; i < (block + 1) * BLOCK; i += W) {
            vf value = load(values + i);
            vi weight = (vi)load(weights + i);
            for (int p = 0; p < PIVOTS; p++) parts[p] += (vf)((value >= splat(pivots[p])) & weight);
        }
        for (int p = 0; p < PIVOTS; p++)
            for (int i = 0; i < W; i++) lanes[p][i] += parts[p][i];
    }
    for (int p = 0; p < PIVOTS; p++) {
        sums[p] = 0.0;
        for (int i = 0; i < W; i++) sums[p] += lanes[p][i];
    }
}

/* Values above `least` and below `bound` (no bound: INFINITY), and their weights; returns how many they are.
 * They may be kept where they lie. */
static int64_t keep_between(const float *values, const float *weights, int64_t count, float least, float bound,
                            float *kept_values, float *kept_weights) {
    int64_t kept = 0;
#if defined(__AVX512F__)
    for (int64_t i = 0; i < count; i += W) {
        __m512 value = _mm512_loadu_ps(values + i), weight = _mm512_loadu_ps(weights + i);
        __mmask16 inside = _mm512_cmp_ps_mask(value, _mm512_set1_ps(least), _CMP_GT_OQ) &
                           _mm512_cmp_ps_mask(value, _mm512_set1_ps(bound), _CMP_LT_OQ);
        _mm512_storeu_ps(kept_values + kept, _mm512_maskz_compress_ps(inside, value));
        _mm512_storeu_ps(kept_weights + kept, _mm512_maskz_compress_ps(inside, weight));
        kept += __builtin_popcount(inside);
    }
#else
    for (int64_t i = 0; i < count; i++) {
        float value = values[i], weight = weights[i];
        kept_values[kept] = value;
        kept_weights[kept] = weight;
        kept += (value > least) & (value < bound);
    }
#endif
    for (int64_t i = kept; i < blocks_of(kept) * BLOCK; i++) {
        kept_values[i] = -INFINITY;
        kept_weights[i] = 0.0f;
    }
    return kept;
}

static double sum_all(const float *weights, int64_t count) {
    double lanes[W] = {0}, sum = 0.0;
    for (int64_t block = 0; block < blocks_of(count); block++) {
        vf part = splat(0.0f);
        for (int64_t i = block * BLOCK; i < (block + 1) * BLOCK; i += W) part += load(weights + i);
        for (int i = 0; i < W; i++) lanes[i] += part[i];
    }
    for (int i = 0; i < W; i++) sum += lanes[i];
    return sum;
}

/* The largest value for which the weights of all values from it up add up to `goal`; `otherwise` if none does.
 *
 * Quickselect with four pivots: each pass leaves about a fifth of the values, whatever their distribution.
 * `count` values lie in whole blocks, none is NaN or INFINITY; the spaces hold as many, and one block. */
static float least_reaching(const float *values, const float *weights, int64_t count, double goal, float otherwise,
                            float *space, float *weight_space) {
    double sums[PIVOTS], above = 0.0;
    float pivots[PIVOTS], best = otherwise;
    uint64_t random = 1;
    do {
        float least = -INFINITY, bound = INFINITY;
        int reaching = 0;
        if (count > FEW) {
            choose_pivots(values, count, &random, pivots);
            add_up(values, weights, count, pivots, sums);
            while (reaching < PIVOTS && above + sums[reaching] < goal) reaching++;
            if (reaching < PIVOTS) best = least = pivots[reaching];
            if (reaching) {
                bound = pivots[reaching - 1];
                above += sums[reaching - 1];
            }
        }
        count = keep_between(values, weights, count, least, bound, space, weight_space);
        if (least > -INFINITY && above + sum_all(weight_space, count) < goal) return best;
        values = space;
        weights = weight_space;
    } while (count > FEW);
    sort_few(space, weight_space, count);
    for (int i = 0; i < count; i++) {
        above += weight_space[i];
        if (above >= goal) return space[i];
    }
    return best;
}
