// Pack weights into the order of tiles.h, once; convert activations to the type of a weight, at every product.
//
// A gated MLP's matrix is [gate; up], and its output is act(gate_i) * up_i. Its rows are packed 32 of the gate, then the
// matching 32 of up. So a block of 64 outputs gives 32 final numbers without an intermediate write.
//
// Rounding of weights. int8: scale = largest magnitude in the group / 127. int4: scale = the number of largest magnitude / -8,
// so that one side of the range is used in full (as Q4_0 of llama.cpp). The scale is rounded to bf16 first, and the weights
// are rounded with the rounded scale, so that its error is not added.
#pragma once

#include <cmath>

#include "amx.h"

// Row of the given matrix for a packed output; -1 for padding.
INLINE int64_t source_row(const Matrix& w, int64_t output) {
    if (!w.gated) return output < w.n ? output : -1;
    const int64_t hidden = w.n / 2, i = output / BLOCK * (BLOCK / 2) + output % (BLOCK / 2);
    if (i >= hidden) return -1;
    return output % BLOCK < BLOCK / 2 ? i : hidden + i;
}

inline void pack_floats(const Matrix& w, int64_t block, const float* weights) {
    for (int j = 0; j < BLOCK; j++) {
        const int64_t row = source_row(w, block * BLOCK + j);
        const float* from = weights + row * w.k;
        for (int64_t k = 0; k < padded(w); k++) {
            const float x = row < 0 || k >= w.k ? 0.0f : from[k];
            if (w.kind == FLOAT32)
                ((float*)w.data)[(block * padded(w) + k) * BLOCK + j] = x;
            else
                ((bf16*)w.data)[(block * padded(w) + k / 2 * 2) * BLOCK + 2 * j + k % 2] = narrow(x);
        }
    }
}

inline void pack_integers(const Matrix& w, int64_t block, const float* weights) {
    uint8_t* data = (uint8_t*)w.data + block * block_bytes(w);
    const int64_t n_groups = groups(w);
    const int half = w.group / 2;
    for (int j = 0; j < BLOCK; j++) {
        const int64_t row = source_row(w, block * BLOCK + j);
        for (int64_t g = 0; g < n_groups; g++) {
            const int64_t first = g * w.group;
            const int64_t size = row < 0 ? 0 : w.k - first < w.group ? w.k - first : w.group;
            const float* from = weights + row * w.k + first;
            float largest = 0;
            for (int64_t k = 0; k < size; k++)
                if (std::fabs(from[k]) > std::fabs(largest)) largest = from[k];
            const bf16 kept = narrow(w.kind == INT8 ? std::fabs(largest) / 127 : largest / -8);
            const float scale = widen(kept);
            const int low = w.kind == INT8 ? -127 : -8, high = w.kind == INT8 ? 127 : 7;
            int32_t sum = 0;
            for (int64_t k = 0; k < w.group; k++) {
                int q = k < size && scale != 0 ? int(std::lrintf(from[k] / scale)) : 0;
                q = q < low ? low : q > high ? high : q;
                sum += q;
                if (w.kind == INT8) {
                    data[(first + k) / 4 * 4 * BLOCK + 4 * j + k % 4] = uint8_t(q);
                } else {  // the group's second half in the upper nibbles
                    uint8_t& byte = data[(first / 2 + k % half) / 4 * 4 * BLOCK + 4 * j + k % half % 4];
                    byte = k < half ? uint8_t(q + 8) : uint8_t(byte | (q + 8) << 4);
                }
            }
            w.scales[(block * n_groups + g) * BLOCK + j] = kept;
            if (w.kind == INT8) w.moved[(block * n_groups + g) * BLOCK + j] = 128 * sum;
        }
    }
}

// Convert one row x[k] to the type of w; `scales` and `sums` [groups] for integers.
inline void ready_row(const Matrix& w, const float* x, char* to, float* scales, int32_t* sums) {
    const int64_t k_padded = padded(w);
    if (reads_floats(w)) {
        memcpy(to, x, size_t(w.k) * 4);
        for (int64_t k = w.k; k < k_padded; k++) ((float*)to)[k] = 0;
        return;
    }
    if (w.kind == BFLOAT16) {
        for (int64_t k = 0; k < w.k; k++) ((bf16*)to)[k] = narrow(x[k]);
        for (int64_t k = w.k; k < k_padded; k++) ((bf16*)to)[k] = 0;
        return;
    }
    for (int64_t g = 0; g < groups(w); g++) {
        const int64_t first = g * w.group, size = w.k - first < w.group ? w.k - first : w.group;
        const float* from = x + first;
        int8_t* out = (int8_t*)to + first;
        Lanes most{};
        float largest = 0;
        int64_t k = 0;
        for (; k + WIDTH <= size; k += WIDTH) {
            const Lanes v = load_lanes(from + k);
            most = max_lanes(most, max_lanes(v, -v));
        }
        largest = max_of(most);
        for (; k < size; k++) largest = std::fabs(from[k]) > largest ? std::fabs(from[k]) : largest;
        const float inverse = largest > 0 ? 127 / largest : 0;
        const float magic = 12582912.0f;  // its last bits are the rounded integer
        const uint8_t shift = w.kind == INT8 ? 0x80 : 0;
        int32_t sum = 0;
        for (k = 0; k < size; k++) {
            const float moved = from[k] * inverse + magic;
            int32_t q;
            memcpy(&q, &moved, 4);
            q -= 0x4b400000;
            sum += q;
            out[k] = int8_t(uint8_t(q) ^ shift);
        }
        for (; k < w.group; k++) out[k] = int8_t(shift);
        scales[g] = largest / 127;
        sums[g] = 8 * sum;
    }
}
