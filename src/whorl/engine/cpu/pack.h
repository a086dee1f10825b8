// Pack weights into the order of packed.h, once; convert activations to the type of a weight, at every product.
//
// A gated MLP's matrix is [gate; up], and its output is act(gate_i) * up_i. Its rows are packed 32 of the gate, then the
// matching 32 of up. So a block of 64 outputs gives 32 final numbers without an intermediate write.
//
// Rounding of weights. int8: scale = largest magnitude in the group / 127. int4: scale = the number of largest magnitude / -8,
// so that one side of the range is used in full (as Q4_0 of llama.cpp). The scale is rounded to bf16 first, and the weights
// are rounded with the rounded scale, so that its error is not added. Given codes are packed unchanged, with fp32 scales.
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

// Codes [n][k] with scales [n][groups], of a quantized model.
struct Codes {
    const int8_t* codes;
    const float* scales;
};

// A piece of 16 inputs is one cache line of each row, and what it fills stays in the first cache.
inline void pack_floats(const Matrix& w, int64_t block, const float* weights, const Codes&) {
    const int64_t piece = 16, k_padded = padded(w);
    for (int64_t first = 0; first < k_padded; first += piece) {
        const int64_t last = first + piece < k_padded ? first + piece : k_padded;
        for (int j = 0; j < BLOCK; j++) {
            const int64_t row = source_row(w, block * BLOCK + j);
            const float* from = weights + row * w.k;
            const int64_t stop = row < 0 ? first : w.k < last ? w.k : last;
            float x[piece] = {};
            for (int64_t k = first; k < stop; k++) x[k - first] = from[k];
            for (int64_t k = first; k < last; k++) {
                if (w.kind == FLOAT32)
                    ((float*)w.data)[(block * k_padded + k) * BLOCK + j] = x[k - first];
                else
                    ((bf16*)w.data)[(block * k_padded + k / 2 * 2) * BLOCK + 2 * j + k % 2] = narrow(x[k - first]);
            }
        }
    }
}

// Largest magnitude of n numbers.
inline float largest_magnitude(const float* from, int64_t n) {
    Lanes most{};
    int64_t k = 0;
    for (; k + WIDTH <= n; k += WIDTH) {
        const Lanes v = load_lanes(from + k);
        most = max_lanes(most, max_lanes(v, -v));
    }
    float largest = max_of(most);
    for (; k < n; k++) largest = std::fabs(from[k]) > largest ? std::fabs(from[k]) : largest;
    return largest;
}

// x rounded to the nearest integer, ties to even, for |x| < 2^22; in a loop the compiler makes vectors of it.
INLINE int32_t nearest(float x) {
    const float moved = x + 12582912.0f;  // its last bits are the rounded integer
    int32_t q;
    memcpy(&q, &moved, 4);
    return q - 0x4b400000;
}

// The scale of n weights that are rounded here.
INLINE float rounded_scale(const Matrix& w, const float* weights, int64_t n) {
    if (w.kind == INT8) return widen(narrow(largest_magnitude(weights, n) / 127));
    float largest = 0;
    for (int64_t k = 0; k < n; k++)
        if (std::fabs(weights[k]) > std::fabs(largest)) largest = weights[k];
    return widen(narrow(largest / -8));
}

// `weights` are rounded, if there are no `given` codes.
template <bool BYTES, bool GIVEN>
inline void pack_integers(const Matrix& w, int64_t block, const float* weights, const Codes& given) {
    uint8_t* data = (uint8_t*)w.data + block * block_bytes(w);
    const int64_t n_groups = groups(w);
    constexpr int LOW = BYTES ? -127 : -8, HIGH = BYTES ? 127 : 7;
    const int half = w.group / 2;
    for (int j = 0; j < BLOCK; j++) {
        const int64_t row = source_row(w, block * BLOCK + j);
        for (int64_t g = 0; g < n_groups; g++) {
            const int64_t first = g * w.inputs, left = w.k - first, at = row * w.k + first, to = g * w.group;
            const int64_t size = row < 0 ? 0 : left < w.inputs ? left : w.inputs;
            const int64_t place = (block * n_groups + g) * BLOCK + j;
            float scale = 0;
            if (size) scale = GIVEN ? given.scales[row * n_groups + g] : rounded_scale(w, weights + at, size);
            if (w.scale_kind == FLOAT32)
                ((float*)w.scales)[place] = scale;
            else
                ((bf16*)w.scales)[place] = narrow(scale);
            const float divisor = scale != 0 ? scale : 1;
            int32_t sum = 0;
            const auto code = [&](int64_t k) {
                if (k >= size) return 0;
                int32_t q = GIVEN ? given.codes[at + k] : scale != 0 ? nearest(weights[at + k] / divisor) : 0;
                q = q < LOW ? LOW : q > HIGH ? HIGH : q;
                sum += q;
                return q;
            };
            uint8_t* quads = data + (BYTES ? to : to / 2) * BLOCK + 4 * j;  // int4: the group's second half in the upper nibbles
            for (int64_t k = 0; k < (BYTES ? w.group : half); k += 4) {
                uint8_t quad[4];
                for (int i = 0; i < 4; i++)
                    quad[i] = uint8_t(BYTES ? code(k + i) : (code(k + i) + 8) | (code(half + k + i) + 8) << 4);
                memcpy(quads + k * BLOCK, quad, 4);
            }
            if (BYTES) w.moved[place] = 128 * sum;
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
        const int64_t first = g * w.inputs, size = w.k - first < w.inputs ? w.k - first : w.inputs;
        const float* from = x + first;
        int8_t* out = (int8_t*)to + g * w.group;
        const float largest = largest_magnitude(from, size);
        const float inverse = largest > 0 ? 127 / largest : 0;
        const uint8_t shift = w.kind == INT8 && SHIFTED ? 0x80 : 0;
        int32_t sum = 0;
        for (int64_t k = 0; k < size; k++) {
            const int32_t q = nearest(from[k] * inverse);
            sum += q;
            out[k] = int8_t(uint8_t(q) ^ shift);
        }
        for (int64_t k = size; k < w.group; k++) out[k] = int8_t(shift);
        scales[g] = largest / 127;
        sums[g] = 8 * sum;
    }
}
