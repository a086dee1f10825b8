// Vectors of sixteen numbers for CPUs whose registers are narrower than AVX-512's: two registers of AVX2, four of SSE or NEON.
//
// Subtle: a compiler's own vector of 64 bytes would be kept in memory there, which makes a product eight times slower.
#pragma once

#include "tile_registers.h"

#ifdef __AVX2__
#include <immintrin.h>
constexpr int PART = 8, HELD = 8;  // numbers of a register; vectors of sixteen that all registers hold
#elif defined(__aarch64__)
constexpr int PART = 4, HELD = 8;
#else
constexpr int PART = 4, HELD = 4;
#endif
constexpr int PARTS = 16 / PART;

template <class T>
struct Split {
    typedef T Register __attribute__((vector_size(4 * PART)));
    typedef T Number;
    Register part[PARTS];

    INLINE T operator[](int i) const { return part[i / PART][i % PART]; }
    template <class U>
    INLINE explicit operator Split<U>() const {  // the same bits
        Split<U> v;
        UNROLL for (int i = 0; i < PARTS; i++) v.part[i] = (typename Split<U>::Register)part[i];
        return v;
    }
};
typedef Split<float> Lanes;
typedef Split<int32_t> Ints;
typedef Split<uint32_t> Bits;

#define OPERATOR(OP)                                                                    \
    template <class T>                                                                  \
    INLINE Split<T> operator OP(Split<T> a, Split<T> b) {                               \
        UNROLL for (int i = 0; i < PARTS; i++) a.part[i] = a.part[i] OP b.part[i];      \
        return a;                                                                       \
    }                                                                                   \
    template <class T>                                                                  \
    INLINE Split<T> operator OP(Split<T> a, typename Split<T>::Number b) {              \
        UNROLL for (int i = 0; i < PARTS; i++) a.part[i] = a.part[i] OP b;              \
        return a;                                                                       \
    }                                                                                   \
    template <class T>                                                                  \
    INLINE Split<T> operator OP(typename Split<T>::Number a, Split<T> b) {              \
        UNROLL for (int i = 0; i < PARTS; i++) b.part[i] = a OP b.part[i];              \
        return b;                                                                       \
    }                                                                                   \
    template <class T, class U>                                                         \
    INLINE Split<T>& operator OP##=(Split<T>& a, U b) { return a = a OP b; }
OPERATOR(+)
OPERATOR(-)
OPERATOR(*)
OPERATOR(/)
OPERATOR(&)
OPERATOR(|)
OPERATOR(^)
OPERATOR(<<)
OPERATOR(>>)
#undef OPERATOR

// All bits of a number are set where the comparison holds.
#define COMPARISON(OP)                                                                                     \
    template <class T>                                                                                     \
    INLINE Ints operator OP(Split<T> a, Split<T> b) {                                                      \
        Ints v;                                                                                            \
        UNROLL for (int i = 0; i < PARTS; i++) v.part[i] = (Ints::Register)(a.part[i] OP b.part[i]);       \
        return v;                                                                                          \
    }                                                                                                      \
    template <class T>                                                                                     \
    INLINE Ints operator OP(Split<T> a, typename Split<T>::Number b) { return a OP(Split<T>{} + b); }
COMPARISON(<)
COMPARISON(>)
COMPARISON(>=)
COMPARISON(!=)
#undef COMPARISON

template <class T>
INLINE Split<T> operator-(Split<T> a) {
    UNROLL for (int i = 0; i < PARTS; i++) a.part[i] = -a.part[i];
    return a;
}

// `work` for each register of a new vector.
template <class V, class F>
INLINE V by_parts(F work) {
    V v;
    UNROLL for (int i = 0; i < PARTS; i++) v.part[i] = work(i);
    return v;
}

// Without it, the compiler reads the vector from memory again for each product with it: two reads begin in a cycle, as
// many as products.
template <class T>
INLINE void keep_in_registers(Split<T>& v) {
#ifdef __x86_64__
    UNROLL for (int i = 0; i < PARTS; i++) asm("" : "+x"(v.part[i]));
#endif
}

// A vector of this file, or one of the compiler's.
template <class V, class T>
INLINE V load(const T* from) {
    V v;
    if constexpr (sizeof(V) == 64)
        UNROLL for (int i = 0; i < PARTS; i++) memcpy(&v.part[i], (const char*)from + 4 * PART * i, 4 * PART);
    else
        memcpy(&v, from, sizeof v);
    return v;
}

template <class T, class U>
INLINE void store(U* to, Split<T> v) {
    UNROLL for (int i = 0; i < PARTS; i++) memcpy((char*)to + 4 * PART * i, &v.part[i], 4 * PART);
}

// Each number converted to the type To.
template <class To>
INLINE void store_as(To* to, Ints v) {
    typedef To Narrow __attribute__((vector_size(PART * sizeof(To))));
    UNROLL for (int i = 0; i < PARTS; i++) {
        const Narrow narrow = __builtin_convertvector(v.part[i], Narrow);
        memcpy(to + PART * i, &narrow, sizeof narrow);
    }
}

INLINE Bits load_halves(const bf16* from) {
    return by_parts<Bits>([&](int i) __attribute__((always_inline)) {
#ifdef __AVX2__
        return (Bits::Register)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(from + PART * i)));
#else
        typedef uint16_t Narrow __attribute__((vector_size(2 * PART)));
        return __builtin_convertvector(load<Narrow>(from + PART * i), Bits::Register);
#endif
    });
}
INLINE Lanes load_lanes(const int8_t* from) {
    return by_parts<Lanes>([&](int i) __attribute__((always_inline)) {
#ifdef __AVX2__
        return (Lanes::Register)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(from + PART * i))));
#else
        typedef int8_t Narrow __attribute__((vector_size(PART)));
        return __builtin_convertvector(load<Narrow>(from + PART * i), Lanes::Register);
#endif
    });
}

INLINE Lanes to_lanes(Ints v) {
    return by_parts<Lanes>([&](int i) __attribute__((always_inline)) { return __builtin_convertvector(v.part[i], Lanes::Register); });
}
INLINE Ints to_ints(Lanes v) {  // truncated
    return by_parts<Ints>([&](int i) __attribute__((always_inline)) { return __builtin_convertvector(v.part[i], Ints::Register); });
}

template <class T>
INLINE Split<T> choose(Ints mask, Split<T> a, Split<T> b) {
    return by_parts<Split<T>>([&](int i) __attribute__((always_inline)) { return mask.part[i] ? a.part[i] : b.part[i]; });
}
INLINE Lanes min_lanes(Lanes a, Lanes b) {
    return by_parts<Lanes>([&](int i) __attribute__((always_inline)) { return a.part[i] < b.part[i] ? a.part[i] : b.part[i]; });
}
INLINE Lanes max_lanes(Lanes a, Lanes b) {
    return by_parts<Lanes>([&](int i) __attribute__((always_inline)) { return a.part[i] > b.part[i] ? a.part[i] : b.part[i]; });
}

INLINE float sum_lanes(Lanes v) {
    UNROLL for (int n = PARTS / 2; n > 0; n /= 2)
        UNROLL for (int i = 0; i < n; i++) v.part[i] += v.part[i + n];
    float s = 0;
    UNROLL for (int i = 0; i < PART; i++) s += v.part[0][i];
    return s;
}
INLINE float max_of(Lanes v) {
    UNROLL for (int i = 1; i < PARTS; i++) v.part[0] = v.part[i] > v.part[0] ? v.part[i] : v.part[0];
    float s = v.part[0][0];
    UNROLL for (int i = 1; i < PART; i++) s = v.part[0][i] > s ? v.part[0][i] : s;
    return s;
}

INLINE Ints lane_numbers() {
    static const int32_t numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load<Ints>(numbers);
}

// Eight numbers from each address.
INLINE Lanes join(const float* low, const float* high) {
    return by_parts<Lanes>([&](int i) __attribute__((always_inline)) {
        return load<Lanes::Register>((i < PARTS / 2 ? low : high) + i * PART % 8);
    });
}

#ifdef __AVX2__
// a0, a1, ... and b0, b1, ... -> a0, b0, a1, b1, ...
INLINE void interleave(Lanes& a, Lanes& b) {
    Lanes v[2];
    UNROLL for (int i = 0; i < 2; i++) {
        const __m256 x = (__m256)a.part[i], y = (__m256)b.part[i];
        const __m256 low = _mm256_unpacklo_ps(x, y), high = _mm256_unpackhi_ps(x, y);
        v[i].part[0] = (Lanes::Register)_mm256_permute2f128_ps(low, high, 0x20);
        v[i].part[1] = (Lanes::Register)_mm256_permute2f128_ps(low, high, 0x31);
    }
    a = v[0], b = v[1];
}

// The sums of sixteen vectors as one vector.
INLINE Lanes sums16(const Lanes* v) {
    return by_parts<Lanes>([&](int side) __attribute__((always_inline)) {
        __m256 sums[8];
        UNROLL for (int i = 0; i < 8; i++) sums[i] = (__m256)(v[8 * side + i].part[0] + v[8 * side + i].part[1]);
        UNROLL for (int n = 4; n > 1; n /= 2)
            UNROLL for (int i = 0; i < n; i++) sums[i] = _mm256_hadd_ps(sums[2 * i], sums[2 * i + 1]);
        return (Lanes::Register)_mm256_add_ps(_mm256_permute2f128_ps(sums[0], sums[1], 0x20),
                                              _mm256_permute2f128_ps(sums[0], sums[1], 0x31));
    });
}

INLINE void transpose8(__m256 (&v)[8]) {
    __m256 w[8];
    UNROLL for (int i = 0; i < 8; i += 2) {
        w[i] = _mm256_unpacklo_ps(v[i], v[i + 1]);
        w[i + 1] = _mm256_unpackhi_ps(v[i], v[i + 1]);
    }
    UNROLL for (int i = 0; i < 8; i += 4)
        UNROLL for (int j = 0; j < 2; j++) {
            v[i + 2 * j] = _mm256_shuffle_ps(w[i + j], w[i + j + 2], 0x44);
            v[i + 2 * j + 1] = _mm256_shuffle_ps(w[i + j], w[i + j + 2], 0xee);
        }
    UNROLL for (int i = 0; i < 4; i++) {
        w[i] = _mm256_permute2f128_ps(v[i], v[i + 4], 0x20);
        w[i + 4] = _mm256_permute2f128_ps(v[i], v[i + 4], 0x31);
    }
    UNROLL for (int i = 0; i < 8; i++) v[i] = w[i];
}

// Transpose: in 16 rows of 16 -> out, with distance `stride` between columns.
INLINE void transpose16(const Lanes* v, float* out, int64_t stride) {
    for (int side = 0; side < 2; side++)
        UNROLL for (int part = 0; part < 2; part++) {
            __m256 square[8];
            UNROLL for (int i = 0; i < 8; i++) square[i] = (__m256)v[8 * side + i].part[part];
            transpose8(square);
            UNROLL for (int i = 0; i < 8; i++) _mm256_storeu_ps(out + (8 * part + i) * stride + 8 * side, square[i]);
        }
}
#else
INLINE void interleave(Lanes& a, Lanes& b) {
    float numbers[32];
    for (int i = 0; i < 16; i++) numbers[2 * i] = a[i], numbers[2 * i + 1] = b[i];
    a = load<Lanes>(numbers), b = load<Lanes>(numbers + 16);
}
INLINE Lanes sums16(const Lanes* v) {
    float sums[16];
    for (int i = 0; i < 16; i++) sums[i] = sum_lanes(v[i]);
    return load<Lanes>(sums);
}
INLINE void transpose16(const Lanes* v, float* out, int64_t stride) {
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) {
            const float number = v[i][j];  // `out` may hold numbers of another type
            memcpy(out + j * stride + i, &number, sizeof number);
        }
}
#endif
