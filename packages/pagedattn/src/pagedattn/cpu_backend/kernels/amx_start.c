/* Whether products may go by AMX: asked of the system, and tried, when the kernels are loaded. */

#include <stdlib.h>

#include "amx.h"

#if defined(__linux__) && !defined(EMULATE_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* The numbers of cpu_backend/instructions.py. */
enum { AMX_ABSENT = 0, AMX_IN_USE, AMX_REFUSED, AMX_NO_MEMORY, AMX_WRONG_SUMS, AMX_WRONG_INTEGERS, AMX_MIXES_ROWS };

#if HAS_AMX

/* Linux keeps the 8 KiB of tiles from processes that have not asked for them, since they may have signal stacks that
 * are too small to save them on: the answer counts for all threads of the process and for those it forks
 * (Documentation/arch/x86/xstate.rst). */
static int is_permitted(void) {
#if defined(EMULATE_AMX)
    return 1;
#elif defined(__linux__)
    const long request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return 0;
#endif
}

/* Two groups of rows of different heights, two panels, and a last chunk that is not full. */
#define TRIED_ROWS (AMX_ROWS + 5)
#define TRIED_OUTPUTS (PANEL + 3)
#define TRIED_WORDS (2 * CHUNK + 6)
#define MOST_INPUTS (4 * TRIED_WORDS)

typedef struct {
    LinearCall call;
    uint16_t x[TRIED_ROWS * MOST_INPUTS];
    uint16_t by_vectors[TRIED_ROWS * TRIED_OUTPUTS], by_tiles[TRIED_ROWS * TRIED_OUTPUTS];
    uint16_t one_by_one[TRIED_ROWS * TRIED_OUTPUTS];
    union {
        uint16_t pairs[2 * TRIED_WORDS * PANEL * 2];
        int8_t codes[2 * TRIED_WORDS * PANEL * 4];
    } weight;
    float scales[2 * PANEL];
    int32_t column_sums[2 * PANEL];
    uint32_t packed[TRIED_ROWS * (MOST_INPUTS + CHUNK)];
} Trial;

/* A sequence of integers from -32768 to 32767 (Numerical Recipes' generator). */
static int next(uint32_t *state) {
    *state = *state * 1664525 + 1013904223;
    return (int)(*state >> 16) - 32768;
}

/* A number without what does not fit in a bfloat16. */
static uint16_t to_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits >> 16;
}

/* Fills in a product of BFLOAT16 or INT8_DYNAMIC, of numbers nearer to 0 than these. */
static void fill(Trial *trial, int weight_type, int x_bound, int weight_bound) {
    int per_word = weight_type == BFLOAT16 ? 2 : 4, inputs = TRIED_WORDS * per_word;
    uint32_t state = 1;
    trial->call = (LinearCall){.x = trial->x,
                               .weight = &trial->weight,
                               .packed = trial->packed,
                               .x_stride = inputs,
                               .out_stride = TRIED_OUTPUTS,
                               .rows = TRIED_ROWS,
                               .inputs = inputs,
                               .outputs = TRIED_OUTPUTS,
                               .type = BFLOAT16,
                               .weight_type = weight_type,
                               .threads = 1};
    for (int i = 0; i < TRIED_ROWS * inputs; i++) trial->x[i] = to_bfloat16(next(&state) % x_bound);
    if (weight_type == BFLOAT16) {
        for (int i = 0; i < 4 * TRIED_WORDS * PANEL; i++)
            trial->weight.pairs[i] = to_bfloat16(next(&state) % weight_bound);
        return;
    }
    trial->call.scales = trial->scales;
    trial->call.column_sums = trial->column_sums;
    for (int c = 0; c < 2 * PANEL; c++) trial->scales[c] = 1.0f, trial->column_sums[c] = 0;
    for (int i = 0; i < 8 * TRIED_WORDS * PANEL; i++) {
        int code = next(&state) % weight_bound;
        trial->weight.codes[i] = code;
        trial->column_sums[i / (4 * TRIED_WORDS * PANEL) * PANEL + i / 4 % PANEL] += code;
    }
}

/* Has the second half of the inputs undo the first: what is left is what rounding made of the sums, in all its bits. */
static void cancel(Trial *trial) {
    const int half = TRIED_WORDS / 2, panel_half = 2 * half * PANEL;
    for (int row = 0; row < TRIED_ROWS; row++) {
        uint16_t *x = trial->x + row * trial->call.x_stride;
        memcpy(x + 2 * half, x, 4 * half);
    }
    for (int panel = 0; panel < 2; panel++) {
        uint16_t *first = trial->weight.pairs + panel * 2 * panel_half;
        for (int i = 0; i < panel_half; i++) first[panel_half + i] = first[i] ^ 0x8000;
    }
}

static void multiply_rows(const Trial *trial, int first, int rows, int by_amx, uint16_t *out) {
    LinearCall call = trial->call;
    call.x = trial->x + first * call.x_stride;
    call.out = out + first * call.out_stride;
    call.rows = rows;
    amx_use(by_amx);
    for (int stage = 0; stage < linear_kernel.stages; stage++)
        for (int64_t piece = 0, pieces = linear_kernel.pieces(&call, stage, 1); piece < pieces; piece++)
            linear_kernel.run(&call, stage, piece, 1, 0);
    amx_use(0);
}

/* Whether tiles give the bits of vectors. */
static int agrees(Trial *trial) {
    multiply_rows(trial, 0, TRIED_ROWS, 0, trial->by_vectors);
    multiply_rows(trial, 0, TRIED_ROWS, 1, trial->by_tiles);
    return memcmp(trial->by_tiles, trial->by_vectors, sizeof trial->by_tiles) == 0;
}

/* Whether each row has the bits among others that it has alone. */
static int keeps_rows_apart(Trial *trial) {
    multiply_rows(trial, 0, TRIED_ROWS, 1, trial->by_tiles);
    for (int row = 0; row < TRIED_ROWS; row++) multiply_rows(trial, row, 1, 1, trial->one_by_one);
    return memcmp(trial->by_tiles, trial->one_by_one, sizeof trial->by_tiles) == 0;
}

static int try_products(Trial *trial) {
    fill(trial, BFLOAT16, 2, 3); /* sums of whole numbers up to 256 are the same in any order, in bfloat16 too */
    if (!agrees(trial)) return AMX_WRONG_SUMS;
    fill(trial, INT8_DYNAMIC, 32768, 128);
    if (!agrees(trial)) return AMX_WRONG_INTEGERS;
    fill(trial, BFLOAT16, 32768, 32768);
    cancel(trial);
    return keeps_rows_apart(trial) ? AMX_IN_USE : AMX_MIXES_ROWS;
}

/* Puts products on tiles if they may be used and give the right sums; says why not, if not. */
int32_t octavo_start_amx(void) {
    if (!is_permitted()) return AMX_REFUSED;
    Trial *trial = malloc(sizeof *trial);
    if (!trial) return AMX_NO_MEMORY;
    int outcome = try_products(trial);
    free(trial);
    amx_use(outcome == AMX_IN_USE);
    return outcome;
}

#else

int32_t octavo_start_amx(void) { return AMX_ABSENT; }

#endif
