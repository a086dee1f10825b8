// Exponentials in plain code that compilers turn into vector instructions, with fp32 and the bf16 of tile_registers.h.
#pragma once
#if defined(__AVX512F__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif
#include "tile_registers.h"

// x in the type of `to`.
INLINE void assign(float& to, float x) { to = x; }
INLINE void assign(bf16& to, float x) { to = bf16(rounded(x)); }

// exp(x) for x <= 0, with a relative error below 1e-6; 0 below -87.
static inline float exponential(float x) {
    const float scaled = (x < -87.0f ? -87.0f : x) * 1.44269504f;
    const float whole = (scaled + 12582912.0f) - 12582912.0f;  // the nearest integer
    const float f = scaled - whole;
    float y = 1.3333558e-3f;
    y = y * f + 9.6181291e-3f;
    y = y * f + 5.5504109e-2f;
    y = y * f + 2.4022651e-1f;
    y = y * f + 6.9314718e-1f;
    y = y * f + 1.0f;
    const int32_t bits = (int32_t(whole) + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return x < -87.0f ? 0.0f : y * power;
}
