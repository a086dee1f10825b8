// Products of activations with packed weights: y[m, n] = x[m, k] w[n, k]^T, from one row to thousands.
//
// A weight is packed once, in the order in which it is read: blocks of 64 outputs, with k outermost in a block. At m = 1 every
// weight is used once, and the product is one stream through memory that the prefetcher follows. With more rows, a tile of up
// to 6 rows by 64 outputs stays in registers (24 of 32 with AVX-512). A block fits the second-level cache and is read once per
// tile: each loaded weight serves 6 rows, each activation 64 outputs (Goto & van de Geijn 2008, Anatomy of high-performance
// matrix multiplication, ACM TOMS 34(3), sec. 4 and 5).
//
//     kind      a block in memory                                  sums
//     float32   [k][64] float                                      fused multiply-adds
//     bfloat16  [k / 2][64][2] bf16                                pairs (vdpbf16ps), else widened, two multiply-adds
//     int8      [k / 4][64][4] int8, scale per group and output    fours (vpdpbusd), exact in int32 within a group
//     int4      [k / 8][64][4] bytes of two, likewise              fours, a byte's halves half a group apart
//
// Integers: w = scale * q, with a scale per output and group of k: bf16 if pack.h rounds the weights, fp32 if codes and scales
// are given. A group is padded with 0 to whole lines. Activations are rounded to int8 with one scale per row and group.
// vpdpbusd multiplies unsigned by signed bytes, so for int8 the activations are shifted by 128 and for int4 the weights by 8.
// The offset is subtracted again: for int8, 128 times the sum of the weights (stored with them); for int4, 8 times the sum of
// the activations. AVX2 has pairs of bytes only (vpmaddubsw), in sums of 16 bits, so there int8 activations are not shifted.
//
// Subtle: a row is summed in the same order for any m and any tile, so its result does not depend on the other rows, to the
// bit. One accumulator per output is enough even at m = 1: four independent chains of 64 bytes per step are faster than any
// memory below the first-level cache.
#pragma once

#include "lanes.h"

enum Kind : int32_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT4 = 3 };

enum Method : int32_t { VECTORS = 0, TILES = 1, EMULATED_TILES = 2 };  // of a product; TILES: amx.h

constexpr int BLOCK = 64;  // outputs
constexpr int PANELS = BLOCK / WIDTH;
constexpr int TILE = HELD < 8 ? 2 : 6;  // rows of a tile at most: its sums stay in registers
// The same of bf16 and integers, which need more registers for a product.
constexpr int NARROW_TILE = HELD < 32 && TILE > 4 ? 4 : TILE;
// Panels of a tile of m rows.
constexpr int span_of(int m) { return HELD >= 32 || m == 1 ? 4 : HELD >= 8 && m <= 3 ? 2 : 1; }

struct Matrix {
    int32_t kind;
    int32_t inputs;  // of k, per scale; 0 for floats
    int32_t group;   // `inputs` with padding
    int32_t scale_kind;  // BFLOAT16 or FLOAT32
    int64_t n, k;
    int32_t gated;   // [gate; up] of a gated MLP, see pack.h
    int32_t method;  // Method
    void* data;
    void* scales;    // [n / 64][groups][64]
    int32_t* moved;  // int8: 128 times the sum of a group's weights, laid out as `scales`
    float* bias;     // [n] or null
};

INLINE int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }
INLINE int64_t blocks(const Matrix& w) {
    return w.gated ? (w.n / 2 + BLOCK / 2 - 1) / (BLOCK / 2) : (w.n + BLOCK - 1) / BLOCK;
}
INLINE int64_t groups(const Matrix& w) { return w.inputs ? (w.k + w.inputs - 1) / w.inputs : 0; }
INLINE int64_t padded(const Matrix& w) {
    return w.inputs ? groups(w) * w.group : round_up(w.k, w.kind == BFLOAT16 ? 32 : 1);
}
INLINE int64_t block_bytes(const Matrix& w) {
    const int64_t k = padded(w) * BLOCK;
    return w.kind == FLOAT32 ? 4 * k : w.kind == BFLOAT16 ? 2 * k : w.kind == INT8 ? k : k / 2;
}

INLINE Lanes load_scales(const Matrix& w, int64_t at) {
    return w.scale_kind == FLOAT32 ? load_lanes((const float*)w.scales + at) : load_lanes((const bf16*)w.scales + at);
}

// Rows converted for a matrix.
struct Rows {
    int64_t stride;   // bytes from row to row
    const char* data; // float, bf16 or int8, padded with 0
    const float* scales;   // [m][groups]
    const int32_t* sums;   // [m][groups], int4: 8 times the sum of a group
};

#ifdef __AVX512BF16__
typedef bf16 BfActivation;
#else
typedef float BfActivation;  // no instruction for pairs: activations are not rounded
#endif

// Whether activations stay fp32 for this matrix.
INLINE bool reads_floats(const Matrix& w) {
    return w.kind == FLOAT32 || (w.kind == BFLOAT16 && w.method == VECTORS && sizeof(BfActivation) == 4);
}
INLINE int tile_rows(const Matrix& w) { return w.kind == FLOAT32 ? TILE : NARROW_TILE; }
INLINE int64_t activation_bytes(const Matrix& w) { return reads_floats(w) ? 4 : w.kind == BFLOAT16 ? 2 : 1; }

// Four products of unsigned and signed bytes, added to each of 16 sums.
INLINE Ints dot4(Ints sum, Ints u, Ints s) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)u, (__m512i)s);
#else
    for (int i = 0; i < 4; i++)
        sum += (Ints)(((Bits)u >> (8 * i)) & 0xffu) * ((s << (24 - 8 * i)) >> 24);
    return sum;
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr bool SHIFTED = false;  // whether int8 activations are shifted by 128

// The same where the sum of two products is below 2^15.
INLINE Ints dot4_small(Ints sum, Ints u, Ints s) {
    return by_parts<Ints>([&](int i) __attribute__((always_inline)) {
        const __m256i pairs = _mm256_maddubs_epi16((__m256i)u.part[i], (__m256i)s.part[i]);
        return sum.part[i] + (Ints::Register)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    });
}

// The same of activations and weights in int8, above -128: |w| times x with the sign of w.
INLINE Ints dot4_int8(Ints sum, Ints x, Ints w) {
    const Ints size = by_parts<Ints>([&](int i) __attribute__((always_inline)) {
        return (Ints::Register)_mm256_abs_epi8((__m256i)w.part[i]);
    });
    const Ints signed_x = by_parts<Ints>([&](int i) __attribute__((always_inline)) {
        return (Ints::Register)_mm256_sign_epi8((__m256i)x.part[i], (__m256i)w.part[i]);
    });
    return dot4_small(sum, size, signed_x);
}
#else
constexpr bool SHIFTED = true;
INLINE Ints dot4_small(Ints sum, Ints u, Ints s) { return dot4(sum, u, s); }
INLINE Ints dot4_int8(Ints sum, Ints x, Ints w) { return dot4(sum, x, w); }
#endif

template <int M, int P>
INLINE void clear(Lanes (&acc)[M][P]) {
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int p = 0; p < P; p++) acc[m][p] = Lanes{};
}

// Prefetches of a tile: a line of 64 bytes for each panel from `at`, which moves by `step` bytes for each 256 bytes of weights.
struct Ahead {
    const char* at;
    int64_t step;
    bool of_next;  // of the next block

    // The next block is larger than the first-level cache, which can wait for few lines at a time. So FAR goes to the second.
    template <int LINES, bool FAR>
    INLINE void next() {
        UNROLL for (int line = 0; line < LINES; line++) __builtin_prefetch(at + 64 * line, 0, FAR ? 2 : 3);
        at += step;
    }
};

// M rows by P panels of a block -> out[M][64].
template <int M, int P, bool FAR>
INLINE void tile_float32(const Matrix& w, const char* block, const Rows& x, int64_t row, Ahead ahead, float* out) {
    const float* weights = (const float*)block;
    const float* rows[M];
    UNROLL for (int m = 0; m < M; m++) rows[m] = (const float*)(x.data + (row + m) * x.stride);
    Lanes acc[M][P];
    clear(acc);
    for (int64_t k = 0; k < padded(w); k++, weights += BLOCK) {
        ahead.next<P, FAR>();
        Lanes wide[P];
        UNROLL for (int p = 0; p < P; p++) {
            wide[p] = load_lanes(weights + p * WIDTH);
            if (M > 1 && M < TILE) keep_in_registers(wide[p]);  // in the largest tile the compiler does it
        }
        UNROLL for (int m = 0; m < M; m++)
            UNROLL for (int p = 0; p < P; p++) acc[m][p] += wide[p] * rows[m][k];
    }
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int p = 0; p < P; p++) store(out + m * BLOCK + p * WIDTH, acc[m][p]);
}

template <int M, int P, bool FAR>
INLINE void tile_bfloat16(const Matrix& w, const char* block, const Rows& x, int64_t row, Ahead ahead, float* out) {
    const char* weights = block;
    const BfActivation* rows[M];
    UNROLL for (int m = 0; m < M; m++) rows[m] = (const BfActivation*)(x.data + (row + m) * x.stride);
    Lanes acc[M][P];
    clear(acc);
    for (int64_t k = 0; k < padded(w); k += 2, weights += 4 * BLOCK) {
        ahead.next<P, FAR>();
        Bits pairs[P];
        UNROLL for (int p = 0; p < P; p++) pairs[p] = load<Bits>(weights + 64 * p);
        UNROLL for (int m = 0; m < M; m++) {
#ifdef __AVX512BF16__
            int32_t pair;
            memcpy(&pair, rows[m] + k, 4);
            const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            UNROLL for (int p = 0; p < P; p++)
                acc[m][p] = (Lanes)_mm512_dpbf16_ps((__m512)acc[m][p], (__m512bh)pairs[p], both);
#else
            UNROLL for (int p = 0; p < P; p++) {
                acc[m][p] += as_lanes(pairs[p] << 16) * rows[m][k];
                acc[m][p] += as_lanes(pairs[p] & 0xffff0000u) * rows[m][k + 1];
            }
#endif
        }
    }
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int p = 0; p < P; p++) store(out + m * BLOCK + p * WIDTH, acc[m][p]);
}

// at: of this block's first scale, in the first panel.
template <int M, int P, bool FAR, bool HALF>
INLINE void tile_integer(const Matrix& w, const char* block, int64_t at, const Rows& x, int64_t row, Ahead ahead, float* out) {
    const int64_t n_groups = groups(w);
    const char* weights = block;
    const char* rows[M];
    UNROLL for (int m = 0; m < M; m++) rows[m] = x.data + (row + m) * x.stride;
    Lanes acc[M][P];
    clear(acc);
    for (int64_t g = 0; g < n_groups; g++) {
        Ints sum[M][P];
        UNROLL for (int m = 0; m < M; m++)
            UNROLL for (int p = 0; p < P; p++)
                sum[m][p] = HALF      ? all_ints(-x.sums[(row + m) * n_groups + g])
                            : SHIFTED ? -load<Ints>(w.moved + at + g * BLOCK + p * WIDTH)
                                      : Ints{};
        const int64_t first = g * w.group, half = w.group / 2;
        for (int64_t k = 0; k < (HALF ? half : int64_t(w.group)); k += 4, weights += 4 * BLOCK) {
            ahead.next<P, FAR>();
            Ints bytes[P];
            UNROLL for (int p = 0; p < P; p++) bytes[p] = load<Ints>(weights + 64 * p);
            UNROLL for (int m = 0; m < M; m++) {
                int32_t four;
                memcpy(&four, rows[m] + first + k, 4);
                if (HALF) {
                    int32_t later;
                    memcpy(&later, rows[m] + first + half + k, 4);
                    UNROLL for (int p = 0; p < P; p++) {
                        sum[m][p] = dot4_small(sum[m][p], bytes[p] & 0x0f0f0f0f, all_ints(four));
                        sum[m][p] = dot4_small(sum[m][p], (bytes[p] >> 4) & 0x0f0f0f0f, all_ints(later));
                    }
                } else {
                    UNROLL for (int p = 0; p < P; p++) sum[m][p] = dot4_int8(sum[m][p], all_ints(four), bytes[p]);
                }
            }
        }
        UNROLL for (int p = 0; p < P; p++) {
            const Lanes scale = load_scales(w, at + g * BLOCK + p * WIDTH);
            UNROLL for (int m = 0; m < M; m++)
                acc[m][p] += to_lanes(sum[m][p]) * (scale * x.scales[(row + m) * n_groups + g]);
        }
    }
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int p = 0; p < P; p++) store(out + m * BLOCK + p * WIDTH, acc[m][p]);
}
