/* Integers as pairs of bfloat16, which holds them exactly, for the instruction that multiplies two inputs at once. */

#pragma once

#include "rows.h"

#if defined(__AVX512BF16__)
#define HAS_PAIRS 1
#else
#define HAS_PAIRS 0
#endif

/* Bytes by look-ups take the least time for few rows; for more, arithmetic that needs no registers of tables. */
#if HAS_PAIRS && defined(__AVX512VBMI__)
#define HAS_BYTE_TABLES 1
#else
#define HAS_BYTE_TABLES 0
#endif
#define MOST_ROWS_OF_TABLES 4

#if HAS_PAIRS
typedef uint16_t ws __attribute__((vector_size(64)));

/* The bits of an integer from 0 to 127 in bfloat16. */
#define EXPONENT(m) (31 - __builtin_clz((m) | 1))
#define BITS(m) ((m) ? (127 + EXPONENT(m)) << 7 | ((m) << (7 - EXPONENT(m)) & 127) : 0)

/* The pair that the lowest four bits of both halves stand for; the fifth, which counts too, is another code's. */
INLINE vu pair_of_nibbles(vu codes) {
#define NEGATIVE(m) (BITS(m) | 0x8000)
#define VALUES                                                                                                 \
    BITS(0), BITS(1), BITS(2), BITS(3), BITS(4), BITS(5), BITS(6), BITS(7), NEGATIVE(8), NEGATIVE(7), NEGATIVE(6), \
        NEGATIVE(5), NEGATIVE(4), NEGATIVE(3), NEGATIVE(2), NEGATIVE(1)
    const ws values = {VALUES, VALUES};
    return (vu)_mm512_permutexvar_epi16((__m512i)codes, (__m512i)values);
}
#endif

#if HAS_BYTE_TABLES
#define LOW(m) BITS(m) & 255
#define HIGH(m) BITS(m) >> 8
#define FOUR(OF, m) OF(m), OF((m) + 1), OF((m) + 2), OF((m) + 3)
#define SIXTEEN(OF, m) FOUR(OF, m), FOUR(OF, (m) + 4), FOUR(OF, (m) + 8), FOUR(OF, (m) + 12)
#define TABLE(OF, m) SIXTEEN(OF, m), SIXTEEN(OF, (m) + 16), SIXTEEN(OF, (m) + 32), SIXTEEN(OF, (m) + 48)

/* Bytes 2 i and 2 i + 1 of each word, -127 to 127: magnitudes choose among two registers of 64 bytes. */
INLINE vu pair_of_bytes(vu weights, int i) {
    static const uint8_t low[128] = {TABLE(LOW, 0), TABLE(LOW, 64)}, high[128] = {TABLE(HIGH, 0), TABLE(HIGH, 64)};
#define PLACES(m) (m), (m) + 64, (m) + 1, (m) + 65
#define WORDS(m) PLACES(m), PLACES((m) + 4), PLACES((m) + 8), PLACES((m) + 12)
#define ALL_WORDS(m) WORDS(m), WORDS((m) + 16), WORDS((m) + 32), WORDS((m) + 48)
    static const uint8_t places[2][64] = {{ALL_WORDS(0)}, {ALL_WORDS(2)}};
    __m512i magnitudes = _mm512_abs_epi8((__m512i)weights);
    __m512i lows = _mm512_permutex2var_epi8(_mm512_loadu_si512(low), magnitudes, _mm512_loadu_si512(low + 64));
    __m512i highs = _mm512_permutex2var_epi8(_mm512_loadu_si512(high), magnitudes, _mm512_loadu_si512(high + 64));
    highs = (__m512i)((vu)highs | (weights & 0x80808080));
    return (vu)_mm512_permutex2var_epi8(lows, _mm512_loadu_si512(places[i]), highs);
}
#endif
