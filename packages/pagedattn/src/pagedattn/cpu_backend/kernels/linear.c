/* Matrix products of rows with a weight that was packed for them, whatever the number of rows.
 *
 * A weight lies in panels of PANEL output columns, [panels, inputs, PANEL], so that one tile reads a single stream.
 * Rows go in tiles of up to TALLEST; those of a tile are packed [inputs, rows], which keeps rows whose distance is a
 * power of two out of each other's cache lines. */

#include "rows.h"

#define PANEL (2 * W)

/* Rows of the tallest tile: its sums, two vectors of weights and one of x fill the registers. */
#if W == 16
#define TALLEST 12
#else
#define TALLEST 6
#endif

/* Tiles that pass over a panel one after another: their rows stay in the second-level cache. */
#define TILES_PER_BLOCK 8

/* Pieces of work per thread, so that a thread whose core is taken away for a while holds nobody up for long. */
#define PIECES_PER_THREAD 8

/* Inputs by which weights are asked for before their use. */
#define AHEAD 64

/* Multiplications that a second thread is worth waking for. */
#define LEAST_PRODUCTS_PER_THREAD 65536

/* Laid out as LINEAR of cpu_backend/arguments.py. Strides count elements. */
typedef struct {
    const void *x, *weight, *bias; /* [rows, inputs], packed, [outputs]; bias may be NULL */
    void *out;                     /* [rows, outputs] */
    float *packed;                 /* [rows, inputs]; unused for a single row of float32 */
    int64_t x_stride, out_stride, rows, inputs, outputs;
    int32_t type, weight_type, bias_type, threads;
} LinearCall;

/* Pieces of work are blocks of tiles times groups of panels. */
typedef struct {
    const LinearCall *call;
    int64_t tiles, blocks, panels, groups;
} Grid;

/* The first row of a tile; tiles differ by one row at most. */
INLINE int64_t first_row(const Grid *grid, int64_t tile) { return grid->call->rows * tile / grid->tiles; }

INLINE int is_packed(const LinearCall *call) { return call->rows > 1 || call->type != FLOAT32; }

/* The weights of input k. BFLOAT16 columns c and W + c share a word: one load and one operation a vector. */
INLINE void load_weights(int type, const void *panel, int64_t k, vf *first, vf *second) {
    if (type == BFLOAT16) {
        vu both;
        memcpy(&both, (const uint16_t *)panel + k * PANEL, sizeof both);
        *first = (vf)(both << 16);
        *second = (vf)(both & 0xffff0000);
    } else {
        *first = load_as(type, panel, k * PANEL);
        *second = load_as(type, panel, k * PANEL + W);
    }
}

/* sums [rows, PANEL] of x [inputs, rows] times a panel.
 *
 * Each sum is one chain of multiply-adds from 0 over the inputs in order, so that its bits depend on its row and its
 * column alone. */
INLINE void multiply_tile(int type, int rows, const float *x, const void *panel, int64_t inputs, float *sums) {
    vf left[TALLEST], right[TALLEST];
    for (int r = 0; r < rows; r++) left[r] = right[r] = (vf){0};
    for (int64_t k = 0; k < inputs; k++) {
        __builtin_prefetch(at(type, panel, (k + AHEAD) * PANEL));
        if (type == FLOAT32) __builtin_prefetch(at(type, panel, (k + AHEAD) * PANEL + W));
        vf first, second;
        load_weights(type, panel, k, &first, &second);
        for (int r = 0; r < rows; r++) {
            vf one = splat(x[k * rows + r]);
            left[r] += one * first;
            right[r] += one * second;
        }
    }
    for (int r = 0; r < rows; r++) {
        store(sums + r * PANEL, left[r]);
        store(sums + r * PANEL + W, right[r]);
    }
}

#define MULTIPLY(TYPE, ROWS)                                \
    case 16 * TYPE + ROWS:                                  \
        multiply_tile(TYPE, ROWS, x, panel, inputs, sums);  \
        break;
#define MULTIPLY_ROWS(ROWS) MULTIPLY(FLOAT32, ROWS) MULTIPLY(FLOAT16, ROWS) MULTIPLY(BFLOAT16, ROWS)

static void multiply(int type, int rows, const float *x, const void *panel, int64_t inputs, float *sums) {
    switch (16 * type + rows) {
        MULTIPLY_ROWS(1) MULTIPLY_ROWS(2) MULTIPLY_ROWS(3) MULTIPLY_ROWS(4) MULTIPLY_ROWS(5) MULTIPLY_ROWS(6)
#if TALLEST > 6
        MULTIPLY_ROWS(7) MULTIPLY_ROWS(8) MULTIPLY_ROWS(9) MULTIPLY_ROWS(10) MULTIPLY_ROWS(11) MULTIPLY_ROWS(12)
#endif
    }
}

/* Sums, plus the bias, to the columns from `column` on of `rows` rows from `row` on. */
static void finish(const LinearCall *call, int64_t row, int rows, int64_t column, const float *sums) {
    for (int c = 0; c < PANEL && column + c < call->outputs; c += W) {
        int64_t at = column + c, left = call->outputs - at;
        vf bias = call->bias ? load_upto(call->bias_type, call->bias, at, left) : (vf){0};
        for (int r = 0; r < rows; r++) {
            vf sum = load(sums + r * PANEL + c);
            if (call->bias) sum += bias; /* adding 0 would turn -0 into 0 */
            store_upto(call->type, call->out, (row + r) * call->out_stride + at, left, sum);
        }
    }
}

static void multiply_piece(const Grid *grid, int64_t piece) {
    const LinearCall *call = grid->call;
    int64_t block = piece / grid->groups, group = piece % grid->groups;
    int64_t end_tile = grid->tiles * (block + 1) / grid->blocks;
    int64_t end_panel = grid->panels * (group + 1) / grid->groups;
    const float *x = is_packed(call) ? call->packed : call->x;
    float sums[TALLEST * PANEL] __attribute__((aligned(64)));
    for (int64_t panel = grid->panels * group / grid->groups; panel < end_panel; panel++) {
        const void *weights = at(call->weight_type, call->weight, panel * call->inputs * PANEL);
        for (int64_t tile = grid->tiles * block / grid->blocks; tile < end_tile; tile++) {
            int64_t row = first_row(grid, tile);
            int rows = first_row(grid, tile + 1) - row;
            multiply(call->weight_type, rows, x + row * call->inputs, weights, call->inputs, sums);
            finish(call, row, rows, panel * PANEL, sums);
        }
    }
}

/* The rows of a tile as floats [inputs, rows]. */
INLINE void pack_tile(const Grid *grid, int type, int64_t tile) {
    const LinearCall *call = grid->call;
    int64_t row = first_row(grid, tile), rows = first_row(grid, tile + 1) - row;
    float *to = call->packed + row * call->inputs;
    for (int64_t r = 0; r < rows; r++) {
        const void *x = at(type, call->x, (row + r) * call->x_stride);
        int64_t k = 0;
        for (; k + W <= call->inputs; k += W) {
            vf some = load_as(type, x, k);
            for (int i = 0; i < W; i++) to[(k + i) * rows + r] = some[i];
        }
        for (; k < call->inputs; k++) to[k * rows + r] = load_one(type, x, k);
    }
}

static void pack(const Grid *grid, int64_t tile) {
    switch (grid->call->type) {
    case FLOAT32: pack_tile(grid, FLOAT32, tile); break;
    case FLOAT16: pack_tile(grid, FLOAT16, tile); break;
    case BFLOAT16: pack_tile(grid, BFLOAT16, tile); break;
    }
}

static Grid grid_of(const LinearCall *call, int64_t threads) {
    Grid grid = {.call = call};
    grid.tiles = (call->rows + TALLEST - 1) / TALLEST;
    grid.blocks = (grid.tiles + TILES_PER_BLOCK - 1) / TILES_PER_BLOCK;
    grid.panels = (call->outputs + PANEL - 1) / PANEL;
    grid.groups = 1 + threads * PIECES_PER_THREAD / grid.blocks;
    if (grid.groups > grid.panels) grid.groups = grid.panels;
    return grid;
}

static int64_t linear_threads(const void *arguments) {
    const LinearCall *call = arguments;
    int64_t worth = 1 + call->rows * call->inputs * call->outputs / LEAST_PRODUCTS_PER_THREAD;
    return worth < call->threads ? worth : call->threads;
}

/* First the tiles of x that are packed, then the products. */
static int64_t linear_pieces(const void *arguments, int stage, int64_t threads) {
    const LinearCall *call = arguments;
    Grid grid = grid_of(call, threads);
    if (stage == 0) return is_packed(call) ? grid.tiles : 0;
    return grid.blocks * grid.groups;
}

static void run_linear(const void *arguments, int stage, int64_t piece, int64_t threads, int64_t thread) {
    const LinearCall *call = arguments;
    Grid grid = grid_of(call, threads);
    (void)thread;
    if (stage == 0)
        pack(&grid, piece);
    else
        multiply_piece(&grid, piece);
}

const Kernel linear_kernel = {sizeof(LinearCall), NULL, linear_threads, linear_pieces, run_linear, 2};

/* Output columns of a panel, which the packed weight is laid out by. */
int32_t octavo_linear_panel(void) { return PANEL; }
