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

/* What codes of int4 stand for, as INT4_VALUES of quantized.py, from zero on. */
#define INT4_VALUES(OF)                                                                                            \
    OF(0), OF(13), OF(27), OF(41), OF(55), OF(71), OF(90), OF(112), OF(-127), OF(-101), OF(-82), OF(-65), OF(-50), \
        OF(-37), OF(-24), OF(-12)

/* What the lowest four bits of each word stand for. */
INLINE vf value_of_nibble(vu codes) {
#define FLOAT_OF(value) (float)(value)
#if defined(__AVX512F__)
    const vf values = {INT4_VALUES(FLOAT_OF)};
    return (vf)_mm512_permutexvar_ps((__m512i)codes, (__m512)values);
#elif defined(__AVX2__)
    static const float values[16] = {INT4_VALUES(FLOAT_OF)};
    __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(values), (__m256i)codes);
    __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(values + 8), (__m256i)codes);
    return (vf)_mm256_blendv_ps(low, high, (__m256)(codes << 28)); /* by the sign, the highest of the four bits */
#else
    static const float values[16] = {INT4_VALUES(FLOAT_OF)};
    vf found;
    for (int i = 0; i < W; i++) found[i] = values[codes[i] & 15];
    return found;
#endif
}

#if HAS_PAIRS
typedef uint16_t ws __attribute__((vector_size(64)));

/* The bits of an integer from 0 to 127 in bfloat16. */
#define EXPONENT(m) (31 - __builtin_clz((m) | 1))
#define BITS(m) ((m) ? (127 + EXPONENT(m)) << 7 | ((m) << (7 - EXPONENT(m)) & 127) : 0)

/* The pair that the lowest four bits of both halves stand for; the fifth, which counts too, is another code's. */
INLINE vu pair_of_nibbles(vu codes) {
#define BITS_OF(value) BITS((value) < 0 ? -(value) : (value)) | ((value) < 0 ? 0x8000 : 0)
    const ws values = {INT4_VALUES(BITS_OF), INT4_VALUES(BITS_OF)};
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
