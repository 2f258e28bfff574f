/* Matrix products of rows that are sorted by expert, each expert's with a weight of its own: see linear.c. */

#include "linear.h"

/* Laid out as GROUPED_LINEAR of cpu_backend/arguments.py. Strides count elements, those of experts bytes. */
typedef struct {
    const void *x;         /* [x_rows, inputs] */
    const void *weight;    /* [experts], each packed */
    const void *scales;    /* [experts], of each those of LinearCall */
    const void *sums;      /* [experts], of each the column sums of LinearCall */
    const int32_t *starts; /* [experts + 1]: rows starts[e] to starts[e + 1] are expert e's */
    const int32_t *index;  /* [rows]: which row of x each is; NULL where they are in order */
    void *out;             /* [rows, outputs] */
    uint32_t *packed;      /* rows * (inputs + CHUNK) words */
    int64_t x_stride, out_stride, weight_stride, scales_stride, sums_stride, rows, inputs, outputs, experts, group;
    int32_t type, weight_type, threads;
} GroupedCall;

/* Where an expert's rows begin, within what there is. */
static int64_t start_of(const GroupedCall *call, int64_t expert) {
    int64_t start = call->starts[expert];
    return start < 0 ? 0 : start > call->rows ? call->rows : start;
}

static const void *part_of(const void *all, int64_t stride, int64_t expert) {
    return all ? (const char *)all + expert * stride : NULL;
}

/* The product of an expert's rows. */
static LinearCall product_of(const GroupedCall *call, int64_t expert, int64_t begin, int64_t end) {
    LinearCall product = {.weight = part_of(call->weight, call->weight_stride, expert),
                          .scales = part_of(call->scales, call->scales_stride, expert),
                          .column_sums = part_of(call->sums, call->sums_stride, expert),
                          .out = (void *)at(call->type, call->out, begin * call->out_stride),
                          .packed = call->packed + begin * (call->inputs + CHUNK),
                          .x_stride = call->x_stride,
                          .out_stride = call->out_stride,
                          .rows = end - begin,
                          .inputs = call->inputs,
                          .outputs = call->outputs,
                          .group = call->group,
                          .type = call->type,
                          .weight_type = call->weight_type,
                          .threads = call->threads};
    product.x = call->index ? call->x : at(call->type, call->x, begin * call->x_stride);
    product.index = call->index ? call->index + begin : NULL;
    return product;
}

static int64_t grouped_threads(const void *arguments) {
    const GroupedCall *call = arguments;
    LinearCall all = product_of(call, 0, 0, call->rows);
    return linear_kernel.threads(&all);
}

/* The pieces of all experts that have rows, in order. The starts are there by now, whatever made them. */
static int64_t grouped_pieces(const void *arguments, int stage, int64_t threads) {
    const GroupedCall *call = arguments;
    int64_t pieces = 0;
    for (int64_t expert = 0; expert < call->experts; expert++) {
        int64_t begin = start_of(call, expert), end = start_of(call, expert + 1);
        if (begin >= end) continue;
        LinearCall product = product_of(call, expert, begin, end);
        pieces += linear_kernel.pieces(&product, stage, threads);
    }
    return pieces;
}

static void run_grouped(const void *arguments, int stage, int64_t piece, int64_t threads, int64_t thread) {
    const GroupedCall *call = arguments;
    for (int64_t expert = 0; expert < call->experts; expert++) {
        int64_t begin = start_of(call, expert), end = start_of(call, expert + 1);
        if (begin >= end) continue;
        LinearCall product = product_of(call, expert, begin, end);
        int64_t pieces = linear_kernel.pieces(&product, stage, threads);
        if (piece < pieces) {
            linear_kernel.run(&product, stage, piece, threads, thread);
            return;
        }
        piece -= pieces;
    }
}

const Kernel grouped_linear_kernel = {sizeof(GroupedCall), NULL, grouped_threads, grouped_pieces, run_grouped, 2};
