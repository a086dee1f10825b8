// The largest logit of a row, its first index, and the log of the sum of exponentials, in two readings of the row.
#pragma once

#include "lanes.h"

#include <cmath>

constexpr int64_t SUM_PIECE = 4096;  // numbers that are summed in fp32 before they are added in fp64

// The first index of a NaN, or -1.
INLINE int64_t first_nan(const float* x, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (x[i] != x[i]) return i;
    return -1;
}

// As numpy's argmax: the first of equal numbers; with a NaN, the first one.
INLINE int64_t argmax(const float* x, int64_t n) {
    const Ints lane = lane_numbers();
    Lanes best = all(-INFINITY);
    Ints at = all_ints(INT32_MAX), unordered{};
    int64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) {
        const Lanes v = load_lanes(x + i);
        at = choose(v > best, lane + int32_t(i), at);
        best = max_lanes(best, v);
        unordered |= v != v;
    }
    float most = -INFINITY;
    int64_t found = n;
    for (int j = 0; j < WIDTH; j++) {
        if (unordered[j]) return first_nan(x, n);
        if (best[j] > most || (best[j] == most && at[j] < found)) most = best[j], found = at[j];
    }
    for (; i < n; i++) {
        if (x[i] != x[i]) return first_nan(x, n);
        if (x[i] > most) most = x[i], found = i;
    }
    return found < n ? found : 0;  // all are -inf
}

// log(sum(exp(x))), where `most` is the largest of x; NaN if that is not finite.
INLINE float log_sum_exp(const float* x, int64_t n, float most) {
    if (!std::isfinite(most)) return NAN;
    double total = 0;
    for (int64_t start = 0; start < n; start += SUM_PIECE) {
        const int64_t stop = start + SUM_PIECE < n ? start + SUM_PIECE : n;
        Lanes sums[4] = {};
        int64_t i = start;
        for (; i + 4 * WIDTH <= stop; i += 4 * WIDTH)
            UNROLL for (int j = 0; j < 4; j++) sums[j] += exp_lanes(load_lanes(x + i + j * WIDTH) - most);
        for (; i < stop; i++) total += std::exp(double(x[i]) - double(most));
        total += sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
    }
    return float(double(most) + std::log(total));
}
