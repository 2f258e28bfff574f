/* Products of a tile of rows with a panel of a weight, whose sums stay in registers.
 *
 * A panel is PANEL output columns of a weight in 32-bit words, [inputs / inputs of a word, PANEL, inputs of a word]:
 * one stream, whose words take no shuffles to split. Rows are words too, [words / CHUNK, rows, CHUNK]: a copy packs
 * them, rows whose distance is a power of two are kept out of each other's cache lines, and a single row is as it was.
 *
 * Each sum is one chain of multiply-adds over the inputs in order (INT4: one for each group, and one of these), so that
 * its bits depend on its row and its column alone. */

#pragma once

#include "pairs.h"

#define PANEL (2 * W)
#define CHUNK 16

/* Rows of the tallest tile: its sums, two vectors of weights and one of x fill the registers. */
#if W == 16
#define TALLEST 12
#else
#define TALLEST 6
#endif

/* Sums of groups take as many registers as those of all inputs. */
#define TALLEST_INT4 (TALLEST / 2)

/* How a weight is stored and multiplied, after the element types. Those of pairs are for rows of BFLOAT16, of which two
 * inputs are multiplied at once; integers of eight bits are exact in it. */
enum { INT8 = 4, INT8_DYNAMIC = 5, INT4 = 6, BFLOAT16_PAIRS = 7, INT8_PAIRS = 8, INT4_PAIRS = 9 };

/* One panel, and what goes with it. */
typedef struct {
    const char *weights;
    const uint16_t *scales;     /* INT4: of BFLOAT16, [groups, PANEL] */
    const int32_t *column_sums; /* INT8_DYNAMIC: of the weights, [PANEL] */
    int64_t group;              /* INT4: inputs of a group, a multiple of CHUNK */
} Panel;

/* Weights to ask for meanwhile: `step` bytes, of up to two cache lines, with each word of a column; into the second
 * cache alone if `far`. */
typedef struct {
    const char *from;
    int64_t step;
    int far;
} Ahead;

INLINE int has_pairs(int kind) { return kind >= BFLOAT16_PAIRS; }
INLINE int in_pairs(int kind) {
    return kind == BFLOAT16 ? BFLOAT16_PAIRS : kind == INT8 ? INT8_PAIRS : kind == INT4 ? INT4_PAIRS : kind;
}
INLINE int has_column_scales(int kind) { return kind == INT8 || kind == INT8_PAIRS || kind == INT8_DYNAMIC; }
INLINE int is_int4(int kind) { return kind == INT4 || kind == INT4_PAIRS; }

/* Inputs in a word of x. */
INLINE int inputs_per_word(int kind) { return has_pairs(kind) ? 2 : kind == INT8_DYNAMIC ? 4 : 1; }

/* Words of x that a word of the weight meets. */
INLINE int words_per_weight(int kind) {
    int inputs = kind == BFLOAT16 || kind == BFLOAT16_PAIRS                      ? 2
                 : kind == INT8 || kind == INT8_DYNAMIC || kind == INT8_PAIRS ? 4
                 : is_int4(kind)                                              ? 8
                                                                              : 1;
    return inputs / inputs_per_word(kind);
}

/* Bytes of so many inputs of a panel. */
INLINE int64_t panel_size(int kind, int64_t inputs) {
    int per_weight = inputs_per_word(kind) * words_per_weight(kind);
    return (inputs + per_weight - 1) / per_weight * (kind == FLOAT16 ? 2 : 4) * PANEL;
}

INLINE vu load_word(const void *p) {
    vu x;
    memcpy(&x, p, sizeof x);
    return x;
}

/* W columns of row `k` of a panel. */
INLINE vu load_weights(int kind, const char *weights, int64_t k, int column) {
    if (kind == FLOAT16) return (vu)load_as(FLOAT16, weights, k * PANEL + column);
    return load_word(weights + 4 * (k * PANEL + column));
}

INLINE vf to_float(vi x) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtepi32_ps((__m512i)x);
#else
    return __builtin_convertvector(x, vf);
#endif
}

/* What word i of x is multiplied with, of the words that this one of the weight meets. */
INLINE vf factor(int kind, int rows, vu weights, int i) {
    (void)rows;
    if (kind == BFLOAT16) return (vf)(i ? weights & 0xffff0000 : weights << 16);
    if (kind == INT8) {
        /* Under the exponent for which its lowest bit counts 1, a byte plus 128 is added to that power of two. */
        int place = 8 * (i % 2);
        vu byte = (i < 2 ? weights : weights >> 16) & (0xffu << place);
        return (vf)(byte ^ ((150u - place) << 23 | 0x80u << place)) - splat((1 << (23 - place)) + 128);
    }
    if (kind == INT4) return value_of_nibble(weights >> (4 * (i / 2) + 16 * (i % 2)));
#if HAS_PAIRS
    if (kind == INT8_PAIRS) {
#if HAS_BYTE_TABLES
        if (rows <= MOST_ROWS_OF_TABLES) return (vf)pair_of_bytes(weights, i);
#endif
        /* As floats both have zeros in their lower halves. */
        return (vf)((vu)factor(INT8, rows, weights, 2 * i) >> 16 | (vu)factor(INT8, rows, weights, 2 * i + 1));
    }
    if (kind == INT4_PAIRS) return (vf)pair_of_nibbles(weights >> (4 * i));
#endif
    return (vf)weights;
}

INLINE vf multiply_add(int kind, vf sum, uint32_t word, vf weights) {
    vu x = word + (vu){0};
    if (kind == INT8_DYNAMIC) {
#if defined(__AVX512VNNI__)
        /* As an intrinsic it takes integers, and sums that are cast go through memory (GCC 12). */
        __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(weights));
        return sum;
#elif defined(__AVXVNNI__) && W == 8
        __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(x), "x"(weights));
        return sum;
#else
        vi total = (vi)sum;
        for (int i = 0; i < 4; i++) total += (vi)(x >> (8 * i) & 0xff) * ((vi)((vu)weights << (24 - 8 * i)) >> 24);
        return (vf)total;
#endif
    }
#if HAS_PAIRS
    if (has_pairs(kind)) return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)weights);
#endif
    return sum + (vf)x * weights;
}

/* What sums start from. Bytes of x are 128 too high, which makes them unsigned. */
INLINE vf start(int kind, const Panel *panel, int column) {
    if (kind != INT8_DYNAMIC) return (vf){0};
    return (vf)(load_word(panel->column_sums + column) * -128u);
}

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

/* sums [rows, PANEL] of x, so many words a row, times a panel; of INT8_DYNAMIC, integers. */
INLINE void multiply_tile(int kind, int rows, const uint32_t *x, int64_t words, const Panel *panel, const Ahead *ahead,
                          float *sums) {
    vf left[TALLEST], right[TALLEST], left_total[TALLEST_INT4], right_total[TALLEST_INT4];
    int step = words_per_weight(kind), asks = rows * step > 4 || kind >= INT8_PAIRS; /* where reads are all the work, they do best alone */
    int64_t group = panel->group / inputs_per_word(kind), group_end = group; /* in words */
    const uint16_t *scales = panel->scales;
    for (int r = 0; r < rows; r++) left[r] = start(kind, panel, 0), right[r] = start(kind, panel, W);
    if (is_int4(kind))
        for (int r = 0; r < rows; r++) left_total[r] = right_total[r] = (vf){0};
    for (int64_t begin = 0; begin < words; begin += CHUNK, x += rows * CHUNK) {
        int count = words - begin < CHUNK ? words - begin : CHUNK;
        for (int word = 0; word < count; word += step) {
            int64_t k = (begin + word) / step;
            if (asks) ask(ahead, k);
            vu first = load_weights(kind, panel->weights, k, 0), second = load_weights(kind, panel->weights, k, W);
#pragma GCC unroll 8
            for (int i = 0; i < step; i++) {
                vf a = factor(kind, rows, first, i), b = factor(kind, rows, second, i);
#pragma GCC unroll 16
                for (int r = 0; r < rows; r++) {
                    left[r] = multiply_add(kind, left[r], x[r * CHUNK + word + i], a);
                    right[r] = multiply_add(kind, right[r], x[r * CHUNK + word + i], b);
                }
            }
        }
        if (is_int4(kind) && (begin + CHUNK == group_end || begin + CHUNK >= words)) {
            vf a = load_as(BFLOAT16, scales, 0), b = load_as(BFLOAT16, scales, W);
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                left_total[r] += left[r] * a;
                right_total[r] += right[r] * b;
                left[r] = right[r] = (vf){0};
            }
            scales += PANEL;
            group_end += group;
        }
    }
    for (int r = 0; r < rows; r++) {
        store(sums + r * PANEL, is_int4(kind) ? left_total[r] : left[r]);
        store(sums + r * PANEL + W, is_int4(kind) ? right_total[r] : right[r]);
    }
}
