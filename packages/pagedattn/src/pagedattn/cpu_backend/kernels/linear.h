/* The arguments of a matrix product, of a layer or of one of its experts. */

#pragma once

#include "product.h"

/* Laid out as LINEAR of cpu_backend/arguments.py. Strides count elements. */
typedef struct {
    const void *x, *weight;     /* [rows, inputs], packed */
    const void *scales;         /* INT8, INT8_DYNAMIC: FLOAT32 [panels, PANEL]; INT4: BFLOAT16 [panels, groups, PANEL] */
    const int32_t *column_sums; /* INT8_DYNAMIC: [panels, PANEL] */
    const void *bias;           /* [outputs], or NULL */
    void *out;                  /* [rows, outputs] */
    uint32_t *packed;           /* rows * (inputs + CHUNK) words; unused for what is read in place */
    const int32_t *index;       /* [rows]: which row of x each is; NULL where they are in order */
    int64_t x_stride, out_stride, rows, inputs, outputs, group; /* inputs of a group, for INT4 */
    int32_t type, weight_type, bias_type, threads;
} LinearCall;

/* Row r of x. */
INLINE const void *row_of(const LinearCall *call, int64_t r) {
    return at(call->type, call->x, (call->index ? call->index[r] : r) * call->x_stride);
}
