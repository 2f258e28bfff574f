/* What kernels over rows of elements share. */

#pragma once

#include "kernel.h"
#include "vectors.h"

/* Where row r lies: rows are counted in two levels (tokens and heads), each with its stride in elements. */
typedef struct {
    int64_t rows, inner, stride, inner_stride;
} Rows;

INLINE int64_t offset_of(const Rows *rows, int64_t row) {
    return row / rows->inner * rows->stride + row % rows->inner * rows->inner_stride;
}

INLINE const void *at(int type, const void *p, int64_t index) { return (const char *)p + index * size_of(type); }

/* The elements from `index` on, of which there are `left`; lanes beyond them are 0. */
INLINE vf load_upto(int type, const void *p, int64_t index, int64_t left) {
    if (left >= W) return load_as(type, p, index);
    float line[W] = {0};
    for (int64_t i = 0; i < left; i++) line[i] = load_one(type, p, index + i);
    return load(line);
}

INLINE void store_upto(int type, void *p, int64_t index, int64_t left, vf x) {
    if (left >= W) {
        store_as(type, p, index, x);
        return;
    }
    float line[W];
    store(line, x);
    for (int64_t i = 0; i < left; i++) store_one(type, p, index + i, line[i]);
}

/* How many threads rows are worth where each is worth waking for `least` elements. */
INLINE int64_t threads_for_rows(int64_t rows, int64_t elements_per_row, int64_t least, int64_t threads) {
    int64_t worth = 1 + rows * elements_per_row / least;
    if (worth < threads) threads = worth;
    return rows < threads ? rows : threads;
}

/* Elements that are worth a piece of their own where threads run anyway. */
#define LEAST_ELEMENTS_PER_PIECE 4096

/* Pieces of rows of about the same size. */
INLINE int64_t row_pieces(int64_t rows, int64_t elements_per_row, int64_t threads) {
    int64_t pieces = 1 + rows * elements_per_row / LEAST_ELEMENTS_PER_PIECE;
    if (pieces > 2 * threads) pieces = 2 * threads;
    return rows < pieces ? rows : pieces;
}

/* The first row of a piece, or the end of the last. */
INLINE int64_t first_of(int64_t rows, int64_t pieces, int64_t piece) { return rows * piece / pieces; }
