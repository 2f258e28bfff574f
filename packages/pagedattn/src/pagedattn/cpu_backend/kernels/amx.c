/* Products of rows with a panel by AMX: a tile of rows is a chunk of up to 16 of them, a tile of weights the words of a
 * chunk of inputs by 16 columns, both as they lie for the vector kernels.
 *
 *            weights  6   7
 *       x 4:    sums  0   1     rows 0 to 15
 *       x 5:    sums  2   3     rows 16 to 31
 *
 * A row's sums depend on that row and the weights alone, in whatever company it comes: that is what TDPBF16PS is
 * described to do, and octavo_start_amx tries it. In which order it adds is not told the same way everywhere (Intel's
 * SDM: a chain for the first input of each pair and one for the second, over the tile; its Intrinsics Guide: one chain),
 * and by neither are its bits known to be those of vdpbf16ps. So one row goes by tiles where many do.
 *
 * Tiles are configured when a thread begins a piece of work and released at its end: other code on the thread finds
 * them as if nobody had used them, and threads that wait have no state of 8 KiB to be saved. */

#include "amx.h"

#if HAS_AMX

#include "amx_tiles.h"

/* Rows from which integers go by tiles: below, vectors are as fast as weights are read. */
#define FEWEST_ROWS 5

/* Columns of a tile, and tiles of a panel. */
#define COLUMNS (PANEL < 16 ? PANEL : 16)
#define ACROSS (PANEL / COLUMNS)

static int amx_in_use;

int amx_serves(const LinearCall *call) {
    if (!amx_in_use) return 0;
    if (call->weight_type == BFLOAT16) return call->type == BFLOAT16;
    return call->weight_type == INT8_DYNAMIC && call->rows >= FEWEST_ROWS;
}

void amx_use(int in_use) { amx_in_use = in_use; }

static void shape_tile(TileConfig *config, int tile, int rows, int row_bytes) {
    if (!rows) return;
    config->rows[tile] = rows;
    config->row_bytes[tile] = row_bytes;
}

static void configure(int rows) {
    TileConfig config = {.palette = 1};
    int upper = rows < 16 ? rows : 16, lower = rows - upper;
    for (int c = 0; c < ACROSS; c++) {
        shape_tile(&config, c, upper, 4 * COLUMNS);
        shape_tile(&config, 2 + c, lower, 4 * COLUMNS);
        shape_tile(&config, 6 + c, CHUNK, 4 * COLUMNS);
    }
    shape_tile(&config, 4, upper, 4 * CHUNK);
    shape_tile(&config, 5, lower, 4 * CHUNK);
    TILE_CONFIGURE(&config);
}

#define DOT(kind, sums, x, weights)              \
    do {                                         \
        if (kind == INT8_DYNAMIC)                \
            TILE_DOT_BYTES(sums, x, weights);    \
        else                                     \
            TILE_DOT_BFLOAT16(sums, x, weights); \
    } while (0)

/* What sums begin with: integers with those of a row that stands for all, see `start` of product.h. */
INLINE void begin_sums(int kind, int down, const Panel *panel) {
    if (kind == INT8_DYNAMIC) {
        int32_t row[PANEL];
        for (int c = 0; c < PANEL; c++) row[c] = (uint32_t)panel->column_sums[c] * -128u;
        TILE_LOAD(0, row, 0);
        if (ACROSS > 1) TILE_LOAD(1, row + COLUMNS, 0);
        if (down > 1) TILE_LOAD(2, row, 0);
        if (ACROSS > 1 && down > 1) TILE_LOAD(3, row + COLUMNS, 0);
    } else {
        TILE_ZERO(0);
        if (ACROSS > 1) TILE_ZERO(1);
        if (down > 1) TILE_ZERO(2);
        if (ACROSS > 1 && down > 1) TILE_ZERO(3);
    }
}

/* Adds the products of a chunk of all rows. */
INLINE void add_chunk(int kind, int down, const uint32_t *x, const char *weights) {
    TILE_LOAD(6, weights, 4 * PANEL);
    if (ACROSS > 1) TILE_LOAD(7, weights + 4 * COLUMNS, 4 * PANEL);
    TILE_LOAD(4, x, 4 * CHUNK);
    DOT(kind, 0, 4, 6);
    if (ACROSS > 1) DOT(kind, 1, 4, 7);
    if (down > 1) {
        TILE_LOAD(5, x + 16 * CHUNK, 4 * CHUNK);
        DOT(kind, 2, 5, 6);
        if (ACROSS > 1) DOT(kind, 3, 5, 7);
    }
}

INLINE void store_sums(int down, float *sums) {
    TILE_STORE(0, sums, 4 * PANEL);
    if (ACROSS > 1) TILE_STORE(1, sums + COLUMNS, 4 * PANEL);
    if (down > 1) TILE_STORE(2, sums + 16 * PANEL, 4 * PANEL);
    if (ACROSS > 1 && down > 1) TILE_STORE(3, sums + 16 * PANEL + COLUMNS, 4 * PANEL);
}

INLINE void multiply_as(int kind, int down, int rows, const uint32_t *x, int64_t words, const Panel *panel,
                        const Ahead *ahead, float *sums) {
    const char *weights = panel->weights;
    uint32_t filled[CHUNK * PANEL];
    begin_sums(kind, down, panel);
    for (int64_t begin = 0; begin < words; begin += CHUNK, x += rows * CHUNK, weights += sizeof filled) {
        int64_t left = words - begin;
        if (left < CHUNK) { /* what lies behind the panel may be no number, and times 0 still none */
            memcpy(filled, weights, 4 * PANEL * left);
            memset(filled + PANEL * left, 0, 4 * PANEL * (CHUNK - left));
            weights = (const char *)filled;
        }
        if (rows > 4) /* as the vector kernels do */
            for (int k = 0; k < CHUNK; k++) ask(ahead, begin + k);
        add_chunk(kind, down, x, weights);
    }
    store_sums(down, sums);
}

void amx_multiply(int kind, int rows, const uint32_t *x, int64_t words, const Panel *panel, const Ahead *ahead,
                  float *sums, int *configured) {
    if (*configured != rows) configure(rows);
    *configured = rows;
    int down = rows > 16 ? 2 : 1;
    if (kind == INT8_DYNAMIC && down == 1)
        multiply_as(INT8_DYNAMIC, 1, rows, x, words, panel, ahead, sums);
    else if (kind == INT8_DYNAMIC)
        multiply_as(INT8_DYNAMIC, 2, rows, x, words, panel, ahead, sums);
    else if (down == 1)
        multiply_as(BFLOAT16_PAIRS, 1, rows, x, words, panel, ahead, sums);
    else
        multiply_as(BFLOAT16_PAIRS, 2, rows, x, words, panel, ahead, sums);
}

void amx_release(int *configured) {
    if (*configured) TILE_RELEASE();
    *configured = 0;
}

#endif
