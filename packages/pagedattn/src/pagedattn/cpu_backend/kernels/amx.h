/* Matrix products by the tile registers of AMX; see amx.c. */

#pragma once

#include "linear.h"

/* EMULATE_AMX puts plain C in the place of the instructions, NO_AMX leaves both out, and what follows with them. */
#if !defined(NO_AMX) && \
    (defined(EMULATE_AMX) || (defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)))
#define HAS_AMX 1
#else
#define HAS_AMX 0
#endif

/* Rows that are multiplied at a time: two tiles. */
#define AMX_ROWS 32

/* Groups of so many rows that pass over a panel one after another, as many rows as without AMX. */
#define AMX_GROUPS_PER_BLOCK 3

/* Whether a product goes by tiles. One of bfloat16 does by its types alone, as its sums are other ones; integers are
 * the same either way. */
int amx_serves(const LinearCall *call);

/* Turns tiles on or off for all products that begin after it. */
void amx_use(int in_use);

/* sums [rows, PANEL] as multiply_tile gives them, of BFLOAT16_PAIRS or INT8_DYNAMIC and up to AMX_ROWS rows.
 *
 * `configured` is how many rows this thread's tiles are laid out for; 0 before the first call and after the last
 * amx_release. */
void amx_multiply(int kind, int rows, const uint32_t *x, int64_t words, const Panel *panel, const Ahead *ahead,
                  float *sums, int *configured);

/* Gives up this thread's tiles, so that neither a switch of threads nor a signal has to save them. */
void amx_release(int *configured);
