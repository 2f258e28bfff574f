/* Products of a tile of rows with a panel of a weight, whose sums stay in registers.
 *
 * A panel is PANEL output columns of a weight in 32-bit words, [inputs / inputs of a word, PANEL, inputs of a word]:
 * one stream, whose words take no shuffles to split. Rows are words too, [words / CHUNK, rows, CHUNK]: a copy packs
 * them, rows whose distance is a power of two are kept out of each other's cache lines, and a single row is as it was.
 *
 * Each sum is one chain of multiply-adds over the inputs in order, so that its bits depend on its row and its column
 * alone. */

#pragma once

#include "rows.h"

#define PANEL (2 * W)
#define CHUNK 16

/* Rows of the tallest tile: its sums, two vectors of weights and one of x fill the registers. */
#if W == 16
#define TALLEST 12
#else
#define TALLEST 6
#endif

/* A weight of BFLOAT16 times rows of BFLOAT16, two inputs at a time; the other kinds are element types. */
enum { BFLOAT16_PAIRS = 4 };

#if defined(__AVX512BF16__)
#define HAS_PAIRS 1
#else
#define HAS_PAIRS 0
#endif

/* Inputs in a word of x. */
INLINE int inputs_per_word(int kind) { return kind == BFLOAT16_PAIRS ? 2 : 1; }

/* Words of x that a word of the weight meets. */
INLINE int words_per_weight(int kind) { return kind == BFLOAT16 ? 2 : 1; }

/* Bytes of so many inputs of a panel. */
INLINE int64_t panel_size(int kind, int64_t inputs) {
    return (kind == FLOAT32 ? inputs * 4 : kind == FLOAT16 ? inputs * 2 : (inputs + 1) / 2 * 4) * PANEL;
}

INLINE vu load_word(const uint32_t *p) {
    vu x;
    memcpy(&x, p, sizeof x);
    return x;
}

/* W columns of row `k` of a panel. */
INLINE vu load_weights(int kind, const void *panel, int64_t k, int column) {
    if (kind == FLOAT16) return (vu)load_as(FLOAT16, panel, k * PANEL + column);
    return load_word((const uint32_t *)panel + k * PANEL + column);
}

/* What word i of x is multiplied with, of the words that this one of the weight meets. */
INLINE vf factor(int kind, vu weights, int i) {
    if (kind == BFLOAT16) return (vf)(i ? weights & 0xffff0000 : weights << 16);
    return (vf)weights;
}

INLINE vf multiply_add(int kind, vf sum, uint32_t word, vf weights) {
    vf x = (vf)(word + (vu){0});
#if HAS_PAIRS
    if (kind == BFLOAT16_PAIRS) return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)weights);
#endif
    return sum + x * weights;
}

/* Weights to ask for meanwhile: `step` bytes, of up to two cache lines, with each word of a column; into the second
 * cache alone if `far`. */
typedef struct {
    const char *from;
    int64_t step;
    int far;
} Ahead;

INLINE void ask(const Ahead *ahead, int64_t k) {
    const char *line = ahead->from + k * ahead->step;
    if (ahead->far) {
        __builtin_prefetch(line, 0, 2);
        __builtin_prefetch(line + 64, 0, 2);
    } else {
        __builtin_prefetch(line);
        __builtin_prefetch(line + 64);
    }
}

/* sums [rows, PANEL] of x, so many words a row, times a panel. */
INLINE void multiply_tile(int kind, int rows, const uint32_t *x, int64_t words, const void *panel, Ahead ahead,
                          float *sums) {
    vf left[TALLEST], right[TALLEST];
    int step = words_per_weight(kind), asks = rows * step > 4; /* where reads are all the work, they do best alone */
    for (int r = 0; r < rows; r++) left[r] = right[r] = (vf){0};
    for (int64_t begin = 0; begin < words; begin += CHUNK, x += rows * CHUNK) {
        int count = words - begin < CHUNK ? words - begin : CHUNK;
        for (int word = 0; word < count; word += step) {
            int64_t k = (begin + word) / step;
            if (asks) ask(&ahead, k);
            vu first = load_weights(kind, panel, k, 0), second = load_weights(kind, panel, k, W);
#pragma GCC unroll 8
            for (int i = 0; i < step; i++) {
                vf a = factor(kind, first, i), b = factor(kind, second, i);
#pragma GCC unroll 16
                for (int r = 0; r < rows; r++) {
                    left[r] = multiply_add(kind, left[r], x[r * CHUNK + word + i], a);
                    right[r] = multiply_add(kind, right[r], x[r * CHUNK + word + i], b);
                }
            }
        }
    }
    for (int r = 0; r < rows; r++) {
        store(sums + r * PANEL, left[r]);
        store(sums + r * PANEL + W, right[r]);
    }
}
