/* The instructions of AMX, on tiles 0 to 7 given as literals (Intel SDM, volume 2, and volume 1, chapter 18). */

#pragma once

#include <stdint.h>

/* What LDTILECFG reads. A tile has up to 16 rows of up to 64 bytes. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileConfig;

_Static_assert(sizeof(TileConfig) == 64, "the size that the instruction reads");

#if defined(EMULATE_AMX)
#include "amx_emulation.h"
#else

/* Written out, since compilers disagree on whether their own intrinsics read and write memory. */
#define TILE_CONFIGURE(config) __asm__ volatile("ldtilecfg %0" ::"m"(*(config)) : "memory")
#define TILE_RELEASE() __asm__ volatile("tilerelease" ::: "memory")
#define TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile ::)

/* Rows are `stride` bytes apart, 0 included. */
#define TILE_LOAD(tile, from, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"((int64_t)(stride)) : "memory")
#define TILE_STORE(tile, to, stride) \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"((int64_t)(stride)) : "memory")

/* sums [m, n] += x [m, k] * weights [k, n, a word's elements]: pairs of bfloat16, or four bytes, of x without sign. */
#define TILE_DOT_BFLOAT16(sums, x, weights) \
    __asm__ volatile("tdpbf16ps %%tmm" #weights ", %%tmm" #x ", %%tmm" #sums ::)
#define TILE_DOT_BYTES(sums, x, weights) \
    __asm__ volatile("tdpbusd %%tmm" #weights ", %%tmm" #x ", %%tmm" #sums ::)

#endif
