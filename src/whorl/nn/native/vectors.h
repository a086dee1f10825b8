// Vectors of 16 numbers of 32 bits, in the compilers' own extension: AVX-512 where the CPU has it, else several narrower ones.
#pragma once
#include "numbers.h"

#if defined(__AVX512F__) && !defined(WHORL_PLAIN)
#define WIDE
#include <immintrin.h>
#endif

typedef float floats __attribute__((vector_size(64)));
typedef int32_t ints __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));
typedef bf16 halves __attribute__((vector_size(32)));

constexpr int64_t LANES = 16;
static const ints LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

static inline floats load(const float* from) {
    floats x;
    memcpy(&x, from, sizeof x);
    return x;
}

static inline floats load(const bf16* from) {
    halves x;
    memcpy(&x, from, sizeof x);
#ifdef WIDE
    return (floats)((words)_mm512_cvtepu16_epi32((__m256i)x) << 16);
#else
    return (floats)(__builtin_convertvector(x, words) << 16);
#endif
}

static inline void store(float* to, floats x) { memcpy(to, &x, sizeof x); }

static inline words rounded(floats x) {
    const words bits = (words)x;
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

static inline void store(bf16* to, floats x) {
#if defined(WIDE) && defined(__AVX512BF16__)
    const __m256bh narrow = _mm512_cvtneps_pbh((__m512)x);
#else
    const halves narrow = __builtin_convertvector(rounded(x), halves);
#endif
    memcpy(to, &narrow, sizeof narrow);
}

// Number c of both in bf16, `low` in the low half of 32 bits.
static inline void store_pairs(uint32_t* to, floats low, floats high) {
    const words both = rounded(low) | rounded(high) << 16;
    memcpy(to, &both, sizeof both);
}

// Number c of both side by side, as of `store_pairs`.
static inline void join(const bf16* low, const bf16* high, uint32_t* to) {
    const words both = (words)load(low) >> 16 | (words)load(high);
    memcpy(to, &both, sizeof both);
}

static inline floats maximum(floats a, floats b) {
#ifdef WIDE
    return (floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

static inline float sum(floats x) {
#ifdef WIDE
    return _mm512_reduce_add_ps((__m512)x);
#else
    float total = 0.0f;
    for (int64_t c = 0; c < LANES; c++) total += x[c];
    return total;
#endif
}

// exp(x) for x <= 0, with a relative error below 3e-6; 0 below -87.
static inline floats exponential(floats x) {
    const floats none = {}, y = maximum(x, none - 87.0f) * 1.44269504f, shifted = y + 12582912.0f;
    const floats f = y - (shifted - 12582912.0f);  // the last bits of `shifted` are the nearest integer
    const floats power = (((f * 9.56056e-3f + 5.591746e-2f) * f + 0.24024984f) * f + 0.69312192f) * f + 0.99999919f;
    const floats e = (floats)((words)power + ((words)shifted << 23));
    return x < -87.0f ? none : e;
}
