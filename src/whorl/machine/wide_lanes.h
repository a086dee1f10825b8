// Vectors of sixteen numbers in one register of AVX-512, in the compiler's vector types.
#pragma once

#include "tile_registers.h"

#include <immintrin.h>

typedef float Lanes __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));

constexpr int HELD = 32;  // vectors that all registers hold

template <class V, class T>
INLINE V load(const T* from) {
    V v;
    memcpy(&v, from, sizeof v);
    return v;
}

template <class T, class V>
INLINE void store(T* to, V v) {
    memcpy(to, &v, sizeof v);
}

// Each number converted to the type To.
template <class To>
INLINE void store_as(To* to, Ints v) {
    typedef To Narrow __attribute__((vector_size(16 * sizeof(To))));
    store(to, __builtin_convertvector(v, Narrow));
}

template <class V>
INLINE void keep_in_registers(V& v) {  // as in split_lanes.h
    asm("" : "+v"(v));
}

INLINE Bits load_halves(const bf16* from) {  // otherwise the compiler splits and joins halves
    return (Bits)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
}
INLINE Lanes load_lanes(const int8_t* from) {
    return (Lanes)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
}

INLINE Lanes to_lanes(Ints v) { return __builtin_convertvector(v, Lanes); }
INLINE Ints to_ints(Lanes v) { return __builtin_convertvector(v, Ints); }  // truncated

INLINE Lanes choose(Ints mask, Lanes a, Lanes b) { return mask ? a : b; }
INLINE Ints choose(Ints mask, Ints a, Ints b) { return mask ? a : b; }
INLINE Lanes min_lanes(Lanes a, Lanes b) { return (Lanes)_mm512_min_ps((__m512)a, (__m512)b); }  // b if one is NaN
INLINE Lanes max_lanes(Lanes a, Lanes b) { return (Lanes)_mm512_max_ps((__m512)a, (__m512)b); }

INLINE float sum_lanes(Lanes v) { return _mm512_reduce_add_ps((__m512)v); }
INLINE float max_of(Lanes v) { return _mm512_reduce_max_ps((__m512)v); }

INLINE Ints lane_numbers() { return Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

// Eight numbers from each address.
INLINE Lanes join(const float* low, const float* high) {
    typedef float Half __attribute__((vector_size(32)));
    return __builtin_shufflevector(load<Half>(low), load<Half>(high), 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

// a0, a1, ... and b0, b1, ... -> a0, b0, a1, b1, ...
INLINE void interleave(Lanes& a, Lanes& b) {
    const Lanes even = a, odd = b;
    a = __builtin_shufflevector(even, odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    b = __builtin_shufflevector(even, odd, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
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

// Transpose: in 16 rows of 16 -> out, with distance `stride` between columns.
INLINE void transpose16(const Lanes* v, float* out, int64_t stride) {
    __m512i r[16], s[16];
    UNROLL for (int i = 0; i < 16; i += 2) {
        s[i] = _mm512_unpacklo_epi32((__m512i)v[i], (__m512i)v[i + 1]);
        s[i + 1] = _mm512_unpackhi_epi32((__m512i)v[i], (__m512i)v[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(s[i], s[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(s[i], s[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(s[i + 1], s[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(s[i + 1], s[i + 3]);
    }
    UNROLL for (int i = 0; i < 4; i++) {  // r[4 q + i] has column 4 l + i of rows 4 q to 4 q + 3 in its quarter l
        const __m512i a = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88), b = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
        const __m512i c = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
        const __m512i d = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
        store(out + i * stride, _mm512_shuffle_i32x4(a, c, 0x88));
        store(out + (8 + i) * stride, _mm512_shuffle_i32x4(a, c, 0xdd));
        store(out + (4 + i) * stride, _mm512_shuffle_i32x4(b, d, 0x88));
        store(out + (12 + i) * stride, _mm512_shuffle_i32x4(b, d, 0xdd));
    }
}
