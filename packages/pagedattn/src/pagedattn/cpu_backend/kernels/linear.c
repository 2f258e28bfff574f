/* Matrix products of rows with a weight that was packed for them, whatever the number of rows. */

#include "amx.h"
#include "linear.h"

/* Words of a column by which weights are asked for before their use, where nothing has asked for them earlier. */
#define AHEAD 64

/* Tiles that pass over a panel one after another: their rows stay in the second-level cache. */
#define TILES_PER_BLOCK 8

/* Pieces of work per thread, so that a thread whose core is taken away for a while holds nobody up for long. */
#define PIECES_PER_THREAD 8

/* Multiplications that a second thread is worth waking for. */
#define LEAST_PRODUCTS_PER_THREAD 65536

/* Pieces of work are blocks of tiles times groups of panels. */
typedef struct {
    const LinearCall *call;
    int kind, by_amx;
    int64_t words, packed_words; /* of a row, without and with what fills its last chunk up */
    int64_t tiles, blocks, panels, groups, threads;
} Grid;

/* Whether x is one row, laid out as if it were packed. */
INLINE int is_in_place(const LinearCall *call) {
    return call->rows == 1 && call->type == FLOAT32 && call->inputs % CHUNK == 0 &&
           call->weight_type != INT8_DYNAMIC;
}

/* The first row of a tile; tiles differ by one row at most, but that those of AMX are full as long as rows last. */
INLINE int64_t first_row(const Grid *grid, int64_t tile) {
    int64_t rows = grid->call->rows;
    if (!grid->by_amx) return rows * tile / grid->tiles;
    return tile < grid->tiles ? tile * AMX_ROWS : rows;
}

#define MULTIPLY(KIND, ROWS)                                     \
    case 16 * KIND + ROWS:                                       \
        multiply_tile(KIND, ROWS, x, words, panel, ahead, sums); \
        break;
#define MULTIPLY_3(KIND) MULTIPLY(KIND, 1) MULTIPLY(KIND, 2) MULTIPLY(KIND, 3)
#define MULTIPLY_6(KIND) MULTIPLY_3(KIND) MULTIPLY(KIND, 4) MULTIPLY(KIND, 5) MULTIPLY(KIND, 6)
#if TALLEST == 12
#define MULTIPLY_HALF MULTIPLY_6
#define MULTIPLY_ALL(KIND)                                                    \
    MULTIPLY_6(KIND) MULTIPLY(KIND, 7) MULTIPLY(KIND, 8) MULTIPLY(KIND, 9)    \
    MULTIPLY(KIND, 10) MULTIPLY(KIND, 11) MULTIPLY(KIND, 12)
#else
#define MULTIPLY_HALF MULTIPLY_3
#define MULTIPLY_ALL MULTIPLY_6
#endif

static void multiply(int kind, int rows, const uint32_t *x, int64_t words, const Panel *panel, const Ahead *ahead,
                     float *sums) {
    switch (16 * kind + rows) {
        MULTIPLY_ALL(FLOAT32)
        MULTIPLY_ALL(FLOAT16)
        MULTIPLY_ALL(BFLOAT16)
        MULTIPLY_ALL(INT8)
        MULTIPLY_ALL(INT8_DYNAMIC)
        MULTIPLY_HALF(INT4)
#if HAS_PAIRS
        MULTIPLY_ALL(BFLOAT16_PAIRS)
        MULTIPLY_ALL(INT8_PAIRS)
        MULTIPLY_HALF(INT4_PAIRS)
#endif
    }
}

/* Asks for where the sums go, lines that lie far from each other. */
static void ask_for_out(const LinearCall *call, int64_t row, int rows, int64_t column) {
    for (int r = 0; r < rows; r++) {
        const char *out = at(call->type, call->out, (row + r) * call->out_stride + column);
        __builtin_prefetch(out, 1);
        if (call->type == FLOAT32) __builtin_prefetch(out + 64, 1);
    }
}

/* The scales of rows of INT8_DYNAMIC, after the packed rows. */
INLINE float *row_scales(const Grid *grid) {
    return (float *)(grid->call->packed + grid->call->rows * grid->packed_words);
}

/* Sums, times their scales, plus the bias, to the columns from `column` on of `rows` rows from `row` on. */
static void finish(const Grid *grid, int64_t row, int rows, int64_t column, const float *sums) {
    const LinearCall *call = grid->call;
    for (int c = 0; c < PANEL && column + c < call->outputs; c += W) {
        int64_t at = column + c, left = call->outputs - at;
        vf bias = call->bias ? load_upto(call->bias_type, call->bias, at, left) : (vf){0};
        vf scale = has_column_scales(grid->kind) ? load((const float *)call->scales + at) : (vf){0};
        for (int r = 0; r < rows; r++) {
            vf sum = load(sums + r * PANEL + c);
            if (grid->kind == INT8 || grid->kind == INT8_PAIRS) sum *= scale;
            if (grid->kind == INT8_DYNAMIC) sum = to_float((vi)sum) * (splat(row_scales(grid)[row + r]) * scale);
            if (call->bias) sum += bias; /* adding 0 would turn -0 into 0 */
            store_upto(call->type, call->out, (row + r) * call->out_stride + at, left, sum);
        }
    }
}

static Panel panel_at(const Grid *grid, int64_t index) {
    const LinearCall *call = grid->call;
    Panel panel = {.weights = (const char *)call->weight + index * panel_size(grid->kind, call->inputs)};
    if (grid->kind == INT8_DYNAMIC) panel.column_sums = call->column_sums + index * PANEL;
    if (is_int4(grid->kind)) {
        int64_t groups = (call->inputs + call->group - 1) / call->group;
        panel.scales = (const uint16_t *)call->scales + index * groups * PANEL;
        panel.group = call->group;
    }
    return panel;
}

/* What tile `index` of `tiles` over a panel asks for: its share of the panel that this thread goes on with, so that
 * memory is read while all of them compute. A single tile reads ahead in its own panel, as does the first of all. */
static Ahead look_ahead(const Grid *grid, const char *panel, int64_t to_next, int64_t index, int64_t tiles, int first) {
    int64_t size = panel_size(grid->kind, grid->call->inputs);
    int64_t line = panel_size(grid->kind, inputs_per_word(grid->kind) * words_per_weight(grid->kind));
    int far = tiles < 3;
    if (tiles == 1 || (first && index == 0)) return (Ahead){panel + AHEAD * line, line, far};
    return (Ahead){panel + to_next * size + size * index / tiles, line / tiles, far};
}

static void multiply_piece(const Grid *grid, int64_t piece) {
    const LinearCall *call = grid->call;
    int64_t block = piece / grid->groups, group = piece % grid->groups;
    int64_t first_tile = grid->tiles * block / grid->blocks, end_tile = grid->tiles * (block + 1) / grid->blocks;
    int64_t first_panel = grid->panels * group / grid->groups, end_panel = grid->panels * (group + 1) / grid->groups;
    const uint32_t *x = is_in_place(call) ? row_of(call, 0) : call->packed;
    float sums[(HAS_AMX ? AMX_ROWS : TALLEST) * PANEL] __attribute__((aligned(64)));
    int configured = 0;
    for (int64_t index = first_panel; index < end_panel; index++) {
        Panel panel = panel_at(grid, index);
        int64_t to_next = index + 1 < end_panel ? 1 : 1 + (grid->threads - 1) * (end_panel - first_panel);
        for (int64_t tile = first_tile; tile < end_tile; tile++) {
            int64_t row = first_row(grid, tile);
            int rows = first_row(grid, tile + 1) - row;
            Ahead ahead = look_ahead(grid, panel.weights, to_next, tile - first_tile, end_tile - first_tile,
                                     index == first_panel && piece < grid->threads);
            ask_for_out(call, row, rows, index * PANEL);
            const uint32_t *from = x + row * grid->packed_words;
            if (HAS_AMX && grid->by_amx)
                amx_multiply(grid->kind, rows, from, grid->words, &panel, &ahead, sums, &configured);
            else
                multiply(grid->kind, rows, from, grid->words, &panel, &ahead, sums);
            finish(grid, row, rows, index * PANEL, sums);
        }
    }
    if (HAS_AMX && grid->by_amx) amx_release(&configured);
}

/* The `left` elements of a row of x from `index` on, or as many as go in CHUNK words; the rest of the words is 0. */
INLINE void pack_chunk(int kind, int type, const void *x, int64_t index, int64_t left, uint32_t *to) {
    if (has_pairs(kind) && left >= 2 * CHUNK) {
        memcpy(to, (const uint16_t *)x + index, 4 * CHUNK);
    } else if (has_pairs(kind)) {
        memset(to, 0, 4 * CHUNK);
        memcpy(to, (const uint16_t *)x + index, 2 * left);
    } else {
        for (int i = 0; i < CHUNK; i += W)
            store((float *)to + i, i < left ? load_upto(type, x, index + i, left - i) : (vf){0});
    }
}

/* The rows of a tile as words [packed_words / CHUNK, rows, CHUNK]. */
INLINE void pack_tile(const Grid *grid, int kind, int type, int64_t tile) {
    const LinearCall *call = grid->call;
    int64_t row = first_row(grid, tile), rows = first_row(grid, tile + 1) - row;
    uint32_t *to = call->packed + row * grid->packed_words;
    for (int64_t k = 0; k < call->inputs; k += CHUNK * inputs_per_word(kind))
        for (int64_t r = 0; r < rows; r++, to += CHUNK)
            pack_chunk(kind, type, row_of(call, row + r), k, call->inputs - k, to);
}

/* The least magnitude of a row that is told from 0: 127 / it is finite. */
#define LEAST_MAGNITUDE 1e-36f

/* The bits of magnitudes are ordered as they are, and those of what is not finite are the highest. */
INLINE float highest_magnitude(int type, const void *x, int64_t count) {
    vi highest = {0};
    for (int64_t k = 0; k < count; k += W) {
        vi bits = (vi)load_upto(type, x, k, count - k) & 0x7fffffff;
        highest = (vi)choose(bits > highest, (vf)bits, (vf)highest);
    }
    for (int i = 1; i < W; i++) highest[0] = highest[i] > highest[0] ? highest[i] : highest[0];
    return ((vf)highest)[0];
}

/* The rows of a tile as bytes, 127 for the highest magnitude of a row, plus 128. */
INLINE void quantize_tile(const Grid *grid, int type, int64_t tile) {
    const LinearCall *call = grid->call;
    int64_t row = first_row(grid, tile), rows = first_row(grid, tile + 1) - row;
    for (int64_t r = 0; r < rows; r++) {
        const void *x = row_of(call, row + r);
        float highest = highest_magnitude(type, x, call->inputs);
        float factor = highest >= LEAST_MAGNITUDE ? 127.0f / highest : 0.0f;
        row_scales(grid)[row + r] = !(highest < INFINITY) ? NAN : factor ? highest / 127.0f : 0.0f;
        uint8_t *to = (uint8_t *)(call->packed + row * grid->packed_words + r * CHUNK);
        for (int64_t k = 0; k < call->inputs; k += W) {
            /* Adding 1.5 * 2^23 rounds to even and leaves the integer in the lowest bits. */
            vf value = load_upto(type, x, k, call->inputs - k) * splat(factor) + splat(12582912.0f);
            vb bytes = cut_to_byte((vu)value ^ 0x80);
            memcpy(to + k / (4 * CHUNK) * rows * (4 * CHUNK) + k % (4 * CHUNK), &bytes, sizeof bytes);
        }
    }
}

INLINE void pack_as(const Grid *grid, int type, int64_t tile) {
    if (grid->kind == INT8_DYNAMIC)
        quantize_tile(grid, type, tile);
    else
        pack_tile(grid, FLOAT32, type, tile);
}

static void pack(const Grid *grid, int64_t tile) {
    if (has_pairs(grid->kind)) {
        pack_tile(grid, BFLOAT16_PAIRS, BFLOAT16, tile);
        return;
    }
    switch (grid->call->type) {
    case FLOAT32: pack_as(grid, FLOAT32, tile); break;
    case FLOAT16: pack_as(grid, FLOAT16, tile); break;
    case BFLOAT16: pack_as(grid, BFLOAT16, tile); break;
    }
}

static Grid grid_of(const LinearCall *call, int64_t threads) {
    Grid grid = {.call = call, .kind = call->weight_type, .threads = threads};
    if (HAS_AMX) grid.by_amx = amx_serves(call);
    if ((HAS_PAIRS || grid.by_amx) && call->type == BFLOAT16) grid.kind = in_pairs(call->weight_type);
    int per_word = inputs_per_word(grid.kind);
    grid.words = (call->inputs + per_word - 1) / per_word;
    grid.packed_words = (grid.words + CHUNK - 1) / CHUNK * CHUNK;
    int tallest = grid.by_amx ? AMX_ROWS : is_int4(grid.kind) ? TALLEST_INT4 : TALLEST;
    int per_block = grid.by_amx ? AMX_GROUPS_PER_BLOCK : TILES_PER_BLOCK;
    grid.tiles = (call->rows + tallest - 1) / tallest;
    grid.blocks = (grid.tiles + per_block - 1) / per_block;
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
    if (stage == 0) return is_in_place(call) ? 0 : grid.tiles;
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
