// Vectors of sixteen numbers, in the compiler's vector types.
//
// Kernels of the engine and of training are written once, for vectors of 16 floats (`Lanes`) and of 16 integers (`Ints`): a
// register of AVX-512 (wide_lanes.h), or several narrower ones (split_lanes.h). Intrinsics appear only for instructions that vector types
// cannot express (products of pairs of bf16, products of four bytes, shuffles). Flags do not select the path; measurements do
// (engine/cpu/runner.py).
//
// Subtle: no -ffast-math. Sums keep their written order, so a row's result does not depend on the other rows. `exp_lanes`
// rounds by adding and subtracting 1.5 * 2^23, which fast-math would delete.
#pragma once

#include "tile_registers.h"

#include <cstddef>

#define UNROLL _Pragma("GCC unroll 8")  // sums stay in registers only if every index is a constant
#define UNROLL16 _Pragma("GCC unroll 16")

#ifdef __AVX512F__
#include "wide_lanes.h"
#else
#include "split_lanes.h"
#endif

constexpr int WIDTH = 16;

INLINE Lanes all(float x) { return Lanes{} + x; }
INLINE Ints all_ints(int32_t x) { return Ints{} + x; }
INLINE Lanes as_lanes(Bits b) { return (Lanes)b; }

// Round to nearest, ties to even; a NaN stays a NaN.
INLINE bf16 narrow(float x) { return x == x ? bf16(rounded(x)) : bf16(0x7fc0); }

INLINE Bits rounded(Lanes x) {
    const Bits bits = (Bits)x;
    return (bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u;
}

INLINE Lanes load_lanes(const float* from) { return load<Lanes>(from); }
INLINE Lanes load_lanes(const bf16* from) { return as_lanes(load_halves(from) << 16); }

// The first n of 16, the others 0; nothing after them is read.
template <class T>
INLINE Lanes load_some(const T* from, int n) {
    T room[WIDTH] = {};
    memcpy(room, from, size_t(n) * sizeof(T));
    return load_lanes(room);
}

INLINE void store(bf16* to, Lanes x) {
#ifdef __AVX512BF16__
    const __m256bh narrow = _mm512_cvtneps_pbh((__m512)x);
    memcpy(to, &narrow, sizeof narrow);
#else
    store_as(to, (Ints)rounded(x));
#endif
}

INLINE void put(float* to, float x) { *to = x; }
INLINE void put(bf16* to, float x) { *to = narrow(x); }

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
        int8_t codes[WIDTH];
        store_as(codes, (Ints)rounded - (Ints)all(magic));
        memcpy(to + c, codes, size_t(n - c < WIDTH ? n - c : WIDTH));
    }
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
    Lanes a = choose(x < 0.0f, -x, x);
    Lanes t = 1.0f / (1.0f + 0.3275911f * a);
    Lanes p = all(1.061405429f);
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    Lanes y = 1.0f - p * t * exp_lanes(-a * a);
    return choose(x < 0.0f, -y, y);
}
