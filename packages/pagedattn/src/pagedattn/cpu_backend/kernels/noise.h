/* The noise of draws: Philox4x32-10 (Salmon et al., SC11, https://doi.org/10.1145/2063384.2063405). */

#pragma once

#include <math.h>
#include <stdint.h>

/* A row's random stream. */
typedef struct {
    uint64_t seed, position;
} Stream;

/* The first word for each index; `stage` and `index` are those of pagedattn.sampling. */
static void random_words(Stream stream, uint32_t stage, const uint32_t *indices, int64_t count, uint32_t *words) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t c0 = indices[i], c1 = stage, c2 = stream.position, c3 = stream.position >> 32;
        uint32_t k0 = stream.seed, k1 = stream.seed >> 32;
        for (int round = 0; round < 10; round++) {
            uint64_t product0 = (uint64_t)0xD2511F53u * c0, product2 = (uint64_t)0xCD9E8D57u * c2;
            c0 = (uint32_t)(product2 >> 32) ^ c1 ^ k0;
            c2 = (uint32_t)(product0 >> 32) ^ c3 ^ k1;
            c1 = product2;
            c3 = product0;
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        words[i] = c0;
    }
}

/* -ln(u), exponentially distributed; the noise of pagedattn.sampling is its logarithm, negated. */
static inline double exponential(uint32_t word) { return -log((word + 0.5) * 0x1p-32); }
