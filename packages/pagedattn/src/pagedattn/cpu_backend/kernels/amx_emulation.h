/* The instructions of amx_tiles.h in plain C, for tests on CPUs without them.
 *
 * What the CPU answers with a fault ends the process here. */

#pragma once

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TILES 8
#define TILE_ROWS 16
#define TILE_BYTES 64

static _Thread_local struct {
    TileConfig config; /* palette 0: none */
    uint8_t data[TILES][TILE_ROWS][TILE_BYTES];
} registers;

static void require(int holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "AMX emulation: %s\n", what);
    abort();
}

static void require_configured(int tile) {
    require(registers.config.palette == 1, "tiles are used without a configuration");
    require(registers.config.rows[tile] && registers.config.row_bytes[tile], "a tile of no size is used");
}

static void tile_configure(const TileConfig *config) {
    require(config->palette == 1, "the palette is not 1");
    require(config->start_row == 0, "the start row is not 0");
    for (int i = 0; i < 14; i++) require(config->reserved[i] == 0, "a reserved byte is not 0");
    for (int tile = 0; tile < 16; tile++) {
        int rows = config->rows[tile], bytes = config->row_bytes[tile];
        require(rows <= TILE_ROWS && bytes <= TILE_BYTES, "a tile is larger than its register");
        require((rows == 0) == (bytes == 0), "a tile has rows or bytes, but not both");
        require(tile < TILES || rows == 0, "there are 8 tiles");
    }
    memcpy(&registers.config, config, sizeof *config);
    memset(registers.data, 0, sizeof registers.data);
}

static void tile_release(void) { memset(&registers, 0, sizeof registers); }

static void tile_zero(int tile) {
    require_configured(tile);
    memset(registers.data[tile], 0, sizeof registers.data[tile]);
}

static void tile_load(int tile, const void *from, int64_t stride) {
    tile_zero(tile);
    for (int r = 0; r < registers.config.rows[tile]; r++)
        memcpy(registers.data[tile][r], (const uint8_t *)from + r * stride, registers.config.row_bytes[tile]);
}

static void tile_store(int tile, void *to, int64_t stride) {
    require_configured(tile);
    for (int r = 0; r < registers.config.rows[tile]; r++)
        memcpy((uint8_t *)to + r * stride, registers.data[tile][r], registers.config.row_bytes[tile]);
}

/* Words of a row of x, which are rows of the weights. */
static int inner_words(int sums, int x, int weights) {
    const TileConfig *config = &registers.config;
    require_configured(sums), require_configured(x), require_configured(weights);
    require(sums != x && sums != weights && x != weights, "a product needs three tiles");
    require(config->rows[sums] == config->rows[x], "sums and x differ in rows");
    require(config->row_bytes[sums] == config->row_bytes[weights], "sums and weights differ in columns");
    require(config->row_bytes[x] == 4 * config->rows[weights], "x and weights differ in inputs");
    require(config->row_bytes[sums] % 4 == 0, "columns are not whole words");
    return config->rows[weights];
}

static float flush(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }

/* Element `i` of a row of pairs. */
static float bfloat16_at(const uint8_t *row, int i) {
    uint32_t bits = (uint32_t)row[2 * i] << 16 | (uint32_t)row[2 * i + 1] << 24;
    float value;
    memcpy(&value, &bits, sizeof value);
    return flush(value);
}

/* A chain for the first of each pair and one for the second, added to the sum at the end, as the SDM's operation has
 * it. */
static void tile_dot_bfloat16(int sums, int x, int weights) {
    int words = inner_words(sums, x, weights);
    for (int m = 0; m < registers.config.rows[sums]; m++)
        for (int n = 0; n < registers.config.row_bytes[sums] / 4; n++) {
            float first = 0.0f, second = 0.0f, sum;
            for (int k = 0; k < words; k++) {
                const uint8_t *row = registers.data[x][m], *columns = registers.data[weights][k];
                first = flush(fmaf(bfloat16_at(row, 2 * k), bfloat16_at(columns, 2 * n), first));
                second = flush(fmaf(bfloat16_at(row, 2 * k + 1), bfloat16_at(columns, 2 * n + 1), second));
            }
            memcpy(&sum, registers.data[sums][m] + 4 * n, sizeof sum);
            sum = flush(flush(sum) + flush(first + second));
            memcpy(registers.data[sums][m] + 4 * n, &sum, sizeof sum);
        }
}

/* Sums wrap around. */
static void tile_dot_bytes(int sums, int x, int weights) {
    int words = inner_words(sums, x, weights);
    for (int m = 0; m < registers.config.rows[sums]; m++)
        for (int n = 0; n < registers.config.row_bytes[sums] / 4; n++) {
            uint32_t sum;
            memcpy(&sum, registers.data[sums][m] + 4 * n, sizeof sum);
            for (int k = 0; k < words; k++)
                for (int i = 0; i < 4; i++)
                    sum += (uint32_t)(registers.data[x][m][4 * k + i] * (int8_t)registers.data[weights][k][4 * n + i]);
            memcpy(registers.data[sums][m] + 4 * n, &sum, sizeof sum);
        }
}

#define TILE_CONFIGURE(config) tile_configure(config)
#define TILE_RELEASE() tile_release()
#define TILE_ZERO(tile) tile_zero(tile)
#define TILE_LOAD(tile, from, stride) tile_load(tile, from, stride)
#define TILE_STORE(tile, to, stride) tile_store(tile, to, stride)
#define TILE_DOT_BFLOAT16(sums, x, weights) tile_dot_bfloat16(sums, x, weights)
#define TILE_DOT_BYTES(sums, x, weights) tile_dot_bytes(sums, x, weights)
