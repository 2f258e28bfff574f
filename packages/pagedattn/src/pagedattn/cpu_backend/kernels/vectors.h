/* Vectors of floats as wide as the machine's registers, by the compiler's vector extension (GCC, Clang). */

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__AVX2__) || defined(__F16C__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define W 16
#elif defined(__AVX2__)
#define W 8
#else
#define W 4
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));
typedef uint8_t vb __attribute__((vector_size(W)));

#define INLINE static inline __attribute__((always_inline))

/* Element types of queries, results and caches; the numbers are those of cpu_backend/arguments.py. */
enum { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2, FLOAT8 = 3 };

/* A stored float8 is read as this fraction of its value; the rest is folded into scales. */
#define FLOAT8_UNIT 256.0f

INLINE int64_t size_of(int type) { return type == FLOAT32 ? 4 : type == FLOAT8 ? 1 : 2; }

INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vi isplat(int32_t x) { return x - (vi){0}; }

INLINE vf load(const float *p) {
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}

INLINE void store(float *p, vf x) { memcpy(p, &x, sizeof x); }

/* Where `mask` (-1 or 0 a lane) is set a, elsewhere b. */
INLINE vf choose(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
INLINE vf vmax(vf a, vf b) { return choose(a > b, a, b); }

/* Integers to wider ones; GCC takes 512-bit vectors apart for __builtin_convertvector. */
INLINE vu widen_short(vh x) {
#if defined(__AVX512F__)
    return (vu)_mm512_cvtepu16_epi32((__m256i)x);
#else
    return __builtin_convertvector(x, vu);
#endif
}

INLINE vu widen_byte(vb x) {
#if defined(__AVX512F__)
    return (vu)_mm512_cvtepu8_epi32((__m128i)x);
#else
    return __builtin_convertvector(x, vu);
#endif
}

INLINE vh cut_to_short(vu x) {
#if defined(__AVX512F__)
    return (vh)_mm512_cvtepi32_epi16((__m512i)x);
#else
    return __builtin_convertvector(x, vh);
#endif
}

INLINE vb cut_to_byte(vu x) {
#if defined(__AVX512F__)
    return (vb)_mm512_cvtepi32_epi8((__m512i)x);
#else
    return __builtin_convertvector(x, vb);
#endif
}

INLINE vf widen_half(vh x) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps((__m256i)x);
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps((__m128i)x);
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return (vf)vcvt_f32_f16((float16x4_t)x);
#else
    /* The exponent is rebiased by a multiplication, which also normalises subnormals. */
    vu bits = widen_short(x);
    vf magnitude = (vf)((bits & 0x7fff) << 13) * splat(0x1p112f);
    vu special = (vu)((bits & 0x7c00) == 0x7c00) & 0x7f800000;
    return (vf)((vu)magnitude | special | (bits & 0x8000) << 16);
#endif
}

INLINE vf widen_float8(vb x) {
    /* e4m3 is half precision with its exponent cut: the same bits one place up, times 2^-8. */
    vu bits = widen_byte(x);
    vf value = widen_half(cut_to_short((bits & 0x80) << 8 | (bits & 0x7f) << 7));
    return choose((bits & 0x7f) == 0x7f, splat(NAN), value);
}

/* W elements of `type` from p on, as floats (of FLOAT8: divided by FLOAT8_UNIT). */
INLINE vf load_as(int type, const void *p, int64_t index) {
    if (type == FLOAT32) return load((const float *)p + index);
    if (type == FLOAT8) {
        vb x;
        memcpy(&x, (const uint8_t *)p + index, sizeof x);
        return widen_float8(x);
    }
    vh x;
    memcpy(&x, (const uint16_t *)p + index, sizeof x);
    if (type == FLOAT16) return widen_half(x);
    return (vf)(widen_short(x) << 16);
}

INLINE float load_one(int type, const void *p, int64_t index) {
    if (type == FLOAT32) return ((const float *)p)[index];
    if (type == FLOAT8) return widen_float8((vb){0} + ((const uint8_t *)p)[index])[0];
    vh x = (vh){0} + ((const uint16_t *)p)[index];
    return (type == FLOAT16 ? widen_half(x) : (vf)(widen_short(x) << 16))[0];
}

/* `count` elements of `type` from p on, as floats at `out`. */
INLINE void widen(int type, const void *p, float *out, int64_t count) {
    int64_t i = 0;
    for (; i + W <= count; i += W) store(out + i, load_as(type, p, i));
    for (; i < count; i++) out[i] = load_one(type, p, i);
}

INLINE vh narrow_to_half(vf x) {
#if defined(__AVX512F__)
    return (vh)_mm512_cvtps_ph((__m512)x, 0);
#elif defined(__F16C__)
    return (vh)_mm256_cvtps_ph((__m256)x, 0);
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return (vh)vcvt_f16_f32((float32x4_t)x);
#else
    /* Subnormal halves by a sum that leaves their bits in place, normal ones by rounding to even. */
    vu bits = (vu)x & 0x7fffffff, sign = ((vu)x & 0x80000000) >> 16;
    vu small = (vu)((vf)bits + splat(0.5f)) - 0x3f000000;
    vu normal = (bits + 0xfff + (bits >> 13 & 1) - 0x38000000) >> 13;
    vu huge = (vu)choose(bits > 0x7f800000, (vf)(isplat(0x7e00)), (vf)(isplat(0x7c00)));
    vu half = (vu)choose(bits < 0x38800000, (vf)small, (vf)normal);
    half = (vu)choose(bits >= 0x477ff000, (vf)huge, (vf)half);
    return cut_to_short(half | sign);
#endif
}

INLINE vh narrow_to_bfloat(vf x) {
    vu bits = (vu)x;
    vu rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return cut_to_short((vu)choose(x == x, (vf)rounded, (vf)isplat(0x7fc0)));
}

INLINE vb narrow_to_float8(vf x) {
    vu bits = (vu)x & 0x7fffffff, sign = ((vu)x & 0x80000000) >> 24;
    vf magnitude = choose((vf)bits > splat(448.0f), splat(448.0f), (vf)bits);
    vu cut = (vu)magnitude;
    /* Below 2^-6 steps are 2^-9: a sum with 2^14 leaves that many of them in the low bits. */
    vu small = (vu)(magnitude + splat(0x1p14f)) - 0x46800000;
    vu normal = (cut + 0x7ffff + (cut >> 20 & 1) - 0x3c000000) >> 20;
    vu code = (vu)choose(magnitude < splat(0x1p-6f), (vf)small, (vf)normal);
    code = (vu)choose(x == x, (vf)code, (vf)isplat(0x7f));
    return cut_to_byte(code | sign);
}

/* W floats to W elements of `type`, rounded to nearest even; FLOAT8 is cut to +-448. */
INLINE void store_as(int type, void *p, int64_t index, vf x) {
    if (type == FLOAT32) {
        store((float *)p + index, x);
    } else if (type == FLOAT8) {
        vb code = narrow_to_float8(x);
        memcpy((uint8_t *)p + index, &code, sizeof code);
    } else {
        vh half = type == FLOAT16 ? narrow_to_half(x) : narrow_to_bfloat(x);
        memcpy((uint16_t *)p + index, &half, sizeof half);
    }
}

INLINE void store_one(int type, void *p, int64_t index, float x) {
    if (type == FLOAT32)
        ((float *)p)[index] = x;
    else if (type == FLOAT8)
        ((uint8_t *)p)[index] = narrow_to_float8(splat(x))[0];
    else
        ((uint16_t *)p)[index] = (type == FLOAT16 ? narrow_to_half(splat(x)) : narrow_to_bfloat(splat(x)))[0];
}

/* e^x to two units in the last place; 0 below e^-87. */
INLINE vf vexp(vf x) {
    const float round = 0x1.8p23f; /* leaves the nearest integer in the low bits */
    vf shifted = x * splat(1.44269504f) + splat(round);
    vf n = shifted - splat(round);
    vf r = x - n * splat(0.693359375f) + n * splat(2.12194440e-4f);
    vf p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * r * r + r + splat(1.0f);
    vf power = (vf)(((vu)shifted << 23) + (vu)p);
    return choose(x < splat(-87.0f), (vf){0}, choose(x == x, power, x));
}

/* tanh to some units in the last place: its series where 1 - 2 / (e^2x + 1) would cancel. */
INLINE vf vtanh(vf x) {
    vf cut = choose(x > splat(15.0f), splat(15.0f), x), y = x * x;
    vf large = splat(1.0f) - splat(2.0f) / (vexp(cut + cut) + splat(1.0f));
    vf small = splat(62.0f / 2835.0f);
    small = small * y - splat(17.0f / 315.0f);
    small = small * y + splat(2.0f / 15.0f);
    small = small * y - splat(1.0f / 3.0f);
    small = small * y * x + x;
    return choose(y < splat(0.0625f), small, large);
}

#if defined(__clang__) || (defined(__GNUC__) && __GNUC__ >= 12)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif

#if W == 16
#define LANES(x0, x1, x2, x3) \
    x0, x1, x2, x3, x0 + 4, x1 + 4, x2 + 4, x3 + 4, x0 + 8, x1 + 8, x2 + 8, x3 + 8, x0 + 12, x1 + 12, x2 + 12, x3 + 12
#elif W == 8
#define LANES(x0, x1, x2, x3) x0, x1, x2, x3, x0 + 4, x1 + 4, x2 + 4, x3 + 4
#else
#define LANES(x0, x1, x2, x3) x0, x1, x2, x3
#endif

typedef float v4 __attribute__((vector_size(16)));

/* The sums over all lanes of a, b, c and d, side by side. */
INLINE v4 sum_four(vf a, vf b, vf c, vf d) {
    vf ab = SHUFFLE(a, b, LANES(0, 1, W, W + 1)) + SHUFFLE(a, b, LANES(2, 3, W + 2, W + 3));
    vf cd = SHUFFLE(c, d, LANES(0, 1, W, W + 1)) + SHUFFLE(c, d, LANES(2, 3, W + 2, W + 3));
    vf sums = SHUFFLE(ab, cd, LANES(0, 2, W, W + 2)) + SHUFFLE(ab, cd, LANES(1, 3, W + 1, W + 3));
    v4 parts[W / 4];
    memcpy(parts, &sums, sizeof sums);
#if W == 16
    return (parts[0] + parts[1]) + (parts[2] + parts[3]);
#elif W == 8
    return parts[0] + parts[1];
#else
    return parts[0];
#endif
}

INLINE float highest_lane(vf x) {
    float best = x[0];
    for (int i = 1; i < W; i++) best = x[i] > best ? x[i] : best;
    return best;
}

INLINE float sum_lanes(vf x) {
    float sum = x[0];
    for (int i = 1; i < W; i++) sum += x[i];
    return sum;
}
