// Numbers of training in the vectors of lanes.h, sixteen at a time.
#pragma once
#include "lanes.h"

static inline Lanes load(const float* from) { return load_lanes(from); }
static inline Lanes load(const bf16* from) { return load_lanes(from); }

static inline Bits rounded(Lanes x) {
    const Bits bits = (Bits)x;
    return (bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u;
}

static inline void store(bf16* to, Lanes x) {
#if defined(__AVX512F__) && defined(__AVX512BF16__) && !defined(WHORL_PLAIN)
    const __m256bh narrow = _mm512_cvtneps_pbh((__m512)x);
    memcpy(to, &narrow, sizeof narrow);
#else
    store_as(to, (Ints)rounded(x));
#endif
}

// Number c of both in bf16, `low` in the low half of 32 bits.
static inline void store_pairs(uint32_t* to, Lanes low, Lanes high) { store(to, rounded(low) | rounded(high) << 16u); }

// Number c of both side by side, as of `store_pairs`.
static inline void join(const bf16* low, const bf16* high, uint32_t* to) {
    store(to, (Bits)load(low) >> 16u | (Bits)load(high));
}

// exp(x) for x <= 0, 0 below -87. For bf16 the relative error is below 3e-6, for fp32 two units in the last place.
static inline Lanes exponential(Lanes x) {
#ifdef WHORL_FP32
    return choose(x < -87.0f, all(0.0f), exp_lanes(x));
#else
    const Lanes y = max_lanes(x, all(-87.0f)) * 1.44269504f, shifted = y + 12582912.0f;
    const Lanes f = y - (shifted - 12582912.0f);  // the last bits of `shifted` are the nearest integer
    const Lanes power = (((f * 9.56056e-3f + 5.591746e-2f) * f + 0.24024984f) * f + 0.69312192f) * f + 0.99999919f;
    const Lanes e = (Lanes)((Bits)power + ((Bits)shifted << 23u));
    return choose(x < -87.0f, all(0.0f), e);
#endif
}
