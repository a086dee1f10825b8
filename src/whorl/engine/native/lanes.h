// Vectors of sixteen numbers, in the compiler's vector types.
//
// Every kernel of this folder is written once, for vectors of 16 floats (`Lanes`) and of 16 integers (`Ints`). The compiler
// lowers them to the CPU's registers: one with AVX-512, two with AVX2, four with SSE or NEON. Intrinsics appear only for
// instructions that vector types cannot express (products of pairs of bf16, products of four bytes). Flags do not select the
// path; measurements do (engine/native/runner.py).
//
// Subtle: no -ffast-math. Sums keep their written order, so a row's result does not depend on the other rows. `exp_lanes`
// rounds by adding and subtracting 1.5 * 2^23, which fast-math would delete.
#pragma once

#include "tile_registers.h"

#include <cstddef>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define UNROLL _Pragma("GCC unroll 8")  // sums stay in registers only if every index is a constant
#define UNROLL16 _Pragma("GCC unroll 16")

typedef float Lanes __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef int8_t Bytes __attribute__((vector_size(16)));

constexpr int WIDTH = 16;

template <class V, class T>
INLINE V load(const T* from) {
    V v;
    memcpy(&v, from, sizeof v);
    return v;
}

template <class V, class T>
INLINE void store(T* to, V v) {
    memcpy(to, &v, sizeof v);
}

INLINE Lanes all(float x) { return Lanes{} + x; }
INLINE Ints all_ints(int32_t x) { return Ints{} + x; }
INLINE Lanes as_lanes(Bits b) { return (Lanes)b; }

// Round to nearest, ties to even; a NaN stays a NaN.
INLINE bf16 narrow(float x) { return x == x ? bf16(rounded(x)) : bf16(0x7fc0); }

INLINE Lanes load_lanes(const float* from) { return load<Lanes>(from); }
INLINE Lanes load_lanes(const bf16* from) {
#ifdef __AVX512F__  // otherwise the compiler splits and joins halves
    return (Lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
#endif
    return as_lanes(__builtin_convertvector(load<Halves>(from), Bits) << 16);
}

INLINE Lanes load_lanes(const int8_t* from) {
#ifdef __AVX512F__
    return (Lanes)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#endif
    return __builtin_convertvector(load<Bytes>(from), Lanes);
}

// The first n of 16, the others 0; nothing after them is read.
template <class T>
INLINE Lanes load_some(const T* from, int n) {
    T room[WIDTH] = {};
    memcpy(room, from, size_t(n) * sizeof(T));
    return load_lanes(room);
}

INLINE void put(float* to, float x) { *to = x; }
INLINE void put(bf16* to, float x) { *to = narrow(x); }

INLINE float get(const float* from) { return *from; }
INLINE float get(const bf16* from) { return widen(*from); }

INLINE Lanes min_lanes(Lanes a, Lanes b) { return a < b ? a : b; }
INLINE Lanes max_lanes(Lanes a, Lanes b) { return a > b ? a : b; }

INLINE float sum_lanes(Lanes v) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)v);
#else
    float s = 0;
    for (int i = 0; i < WIDTH; i++) s += v[i];
    return s;
#endif
}

INLINE float max_of(Lanes v) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)v);
#else
    float s = v[0];
    for (int i = 1; i < WIDTH; i++) s = v[i] > s ? v[i] : s;
    return s;
#endif
}

// x[n] -> a row of a cache; `scale`: where that of an int8 row goes. Equal to `quantize_rows` in nn/quantized_linear.py to the
// bit, except that a NaN or infinity makes the scale NaN.
template <class T>
INLINE void put_row(T* to, float*, const float* x, int64_t n) {
    for (int64_t c = 0; c < n; c++) put(to + c, x[c]);
}
INLINE void put_row(int8_t* to, float* scale, const float* x, int64_t n) {
    Lanes largest{}, zeros{};
    const auto some = [&](int64_t c) { return c + WIDTH <= n ? load_lanes(x + c) : load_some(x + c, int(n - c)); };
    for (int64_t c = 0; c < n; c += WIDTH) {
        const Lanes v = some(c);
        largest = max_lanes(largest, max_lanes(v, -v));
        zeros += v - v;
    }
    const float unit = max_of(largest) / 127.0f, magic = 12582912.0f;  // 1.5 * 2^23: rounds, ties to even
    *scale = (unit > 1e-30f ? unit : 1e-30f) + sum_lanes(zeros);
    for (int64_t c = 0; c < n; c += WIDTH) {
        const Lanes rounded = some(c) / *scale + magic;
        const Bytes codes = __builtin_convertvector((Ints)rounded - (Ints)all(magic), Bytes);
        memcpy(to + c, &codes, size_t(n - c < WIDTH ? n - c : WIDTH));
    }
}

// The sums of sixteen vectors as one vector: a transpose with additions, 15 instead of 16 * 4. The first operand of each
// addition is a blend, which has more ports than a shuffle.
template <class V>
INLINE V sums16(V* v) {
    UNROLL for (int i = 0; i < 8; i++)
        v[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], 0, 17, 2, 19, 4, 21, 6, 23, 8, 25, 10, 27, 12, 29, 14, 31) +
               __builtin_shufflevector(v[2 * i], v[2 * i + 1], 1, 16, 3, 18, 5, 20, 7, 22, 9, 24, 11, 26, 13, 28, 15, 30);
    UNROLL for (int i = 0; i < 4; i++)
        v[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], 0, 1, 18, 19, 4, 5, 22, 23, 8, 9, 26, 27, 12, 13, 30, 31) +
               __builtin_shufflevector(v[2 * i], v[2 * i + 1], 2, 3, 16, 17, 6, 7, 20, 21, 10, 11, 24, 25, 14, 15, 28, 29);
    UNROLL for (int i = 0; i < 2; i++)
        v[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], 0, 1, 2, 3, 20, 21, 22, 23, 8, 9, 10, 11, 28, 29, 30, 31) +
               __builtin_shufflevector(v[2 * i], v[2 * i + 1], 4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27);
    return __builtin_shufflevector(v[0], v[1], 0, 1, 2, 3, 4, 5, 6, 7, 24, 25, 26, 27, 28, 29, 30, 31) +
           __builtin_shufflevector(v[0], v[1], 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23);
}

// e^x to about 2 units in the last place: x = n ln 2 + r with |r| <= ln 2 / 2, a polynomial in r, and n added to the
// exponent. Below -87 it is e^-87 (1e-38); the caller sets 0 where it needs 0.
INLINE Lanes exp_lanes(Lanes x) {
    x = min_lanes(max_lanes(x, all(-87.0f)), all(88.0f));
    const Lanes magic = all(12582912.0f);  // 1.5 * 2^23
    Lanes shifted = x * 1.44269504f + magic;
    Lanes n = shifted - magic;
    Lanes r = x - n * 0.693145752f;
    r = r - n * 1.42860677e-6f;
    Lanes p = all(1.98412698e-4f);
    p = p * r + 1.38888889e-3f;
    p = p * r + 8.33333333e-3f;
    p = p * r + 4.16666667e-2f;
    p = p * r + 1.66666667e-1f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return (Lanes)((Ints)p + (((Ints)shifted - (Ints)magic) << 23));
}

INLINE Lanes sigmoid_lanes(Lanes x) { return 1.0f / (1.0f + exp_lanes(-x)); }
INLINE Lanes tanh_lanes(Lanes x) { return 2.0f * sigmoid_lanes(2.0f * x) - 1.0f; }

// The error function to 1.5e-7 (Abramowitz & Stegun, Handbook of Mathematical Functions, 7.1.26).
INLINE Lanes erf_lanes(Lanes x) {
    Lanes a = x < 0.0f ? -x : x;
    Lanes t = 1.0f / (1.0f + 0.3275911f * a);
    Lanes p = all(1.061405429f);
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    Lanes y = 1.0f - p * t * exp_lanes(-a * a);
    return x < 0.0f ? -y : y;
}
