// Products of bf16 matrices with fp32 sums, on AMX tiles, or by vectors of bf16 pairs (AVX512_BF16). A left tile has 16 rows of
// 32 numbers. A right tile has 16 pairs of rows by 16 columns: row 2p in the low half of each 32 bits, row 2p + 1 in the high
// half. So a line of it is also a vector. WHORL_VECTORS compiles without tiles. Without either instruction set, or with
// WHORL_PLAIN, the same products are plain loops: slow, for tests. So is WHORL_EMULATED: the code for tiles in plain C++.
//
// WHORL_FP32 compiles a source for matrices of fp32, by vectors that every CPU has. A right tile then has 32 rows by 16 columns.
// Both kinds of tiles have 512 numbers, and two rows of a right tile begin at the same number.
#pragma once
#include "numbers.h"
#include "vectors.h"

#include <cstdlib>
#ifdef __linux__
#include <sys/mman.h>
#endif

#ifdef WHORL_EMULATED
#include "emulated_tiles.h"
static thread_local EmulatedTiles emulated;
#define _tile_zero(t) emulated.clear<t>()
#define _tile_loadd(t, from, stride) emulated.load<t>(from, stride)
#define _tile_stored(t, to, stride) emulated.store<t>(to, stride)
#define _tile_dpbf16ps(c, a, b) emulated.add_pairs<c, a, b>()
#elif defined(__AVX512BF16__) && !defined(WHORL_AMX) && !defined(WHORL_PLAIN) && !defined(WHORL_FP32)
#define WHORL_PAIRS 1
#endif

#ifdef WHORL_FP32
typedef float number;
#else
typedef bf16 number;
#endif
typedef uint32_t pair;

constexpr int64_t SIDE = 16, DEPTH = 32, BLOCK = 32;
constexpr int64_t TILE = SIDE * DEPTH;  // numbers

// The transpose of 16 x 16 numbers of 32 bits.
static void transpose(const pair* in, int64_t stride, pair* out, int64_t out_stride) {
#ifdef __AVX512F__
    __m512i r[16], s[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(in + i * stride);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        s[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        s[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(s[i], s[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(s[i], s[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(s[i + 1], s[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(s[i + 1], s[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {  // r[4 q + i] has column 4 l + i of rows 4 q to 4 q + 3 in its quarter l
        const __m512i a = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88), b = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
        const __m512i c = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
        const __m512i d = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
        _mm512_storeu_si512(out + i * out_stride, _mm512_shuffle_i32x4(a, c, 0x88));
        _mm512_storeu_si512(out + (8 + i) * out_stride, _mm512_shuffle_i32x4(a, c, 0xdd));
        _mm512_storeu_si512(out + (4 + i) * out_stride, _mm512_shuffle_i32x4(b, d, 0x88));
        _mm512_storeu_si512(out + (12 + i) * out_stride, _mm512_shuffle_i32x4(b, d, 0xdd));
    }
#else
    Lanes rows[16];
    for (int i = 0; i < 16; i++) rows[i] = load<Lanes>(in + i * stride);
    transpose16(rows, (float*)out, out_stride);
#endif
}

#ifdef WHORL_FP32
// At least eight registers of sums: products have a latency of four or more cycles, and two begin in each.
constexpr int64_t ROWS_AT_ONCE = HELD == 32 ? 8 : HELD == 8 ? 4 : 2, COLUMNS_AT_ONCE = HELD == 32 ? 2 : 1;

// `multiply` of ROWS_AT_ONCE rows of one left tile and COLUMNS_AT_ONCE right tiles.
static inline void multiply_rows(const float* left, int64_t left_stride, int64_t left_step, const float* right, int64_t column,
                                 int64_t steps, float* out, int64_t stride, bool add) {
    Lanes sums[ROWS_AT_ONCE][COLUMNS_AT_ONCE];
    UNROLL for (int64_t m = 0; m < ROWS_AT_ONCE; m++)
        UNROLL for (int64_t h = 0; h < COLUMNS_AT_ONCE; h++) sums[m][h] = add ? load(out + m * stride + h * SIDE) : all(0.0f);
    for (int64_t k = 0; k < steps; k++, left += left_step, right += TILE)
        for (int64_t p = 0; p < DEPTH; p++) {
            Lanes lines[COLUMNS_AT_ONCE];
            UNROLL for (int64_t h = 0; h < COLUMNS_AT_ONCE; h++)
                keep_in_registers(lines[h] = load(right + h * column + p * SIDE));
            UNROLL for (int64_t m = 0; m < ROWS_AT_ONCE; m++)
                UNROLL for (int64_t h = 0; h < COLUMNS_AT_ONCE; h++) sums[m][h] += left[m * left_stride + p] * lines[h];
        }
    UNROLL for (int64_t m = 0; m < ROWS_AT_ONCE; m++)
        UNROLL for (int64_t h = 0; h < COLUMNS_AT_ONCE; h++) store(out + m * stride + h * SIDE, sums[m][h]);
}
#elif defined(WHORL_PAIRS)
constexpr int64_t ROWS_AT_ONCE = 8;  // 16 sums: products have a latency of several cycles, and two begin in each

// `multiply` of ROWS_AT_ONCE rows of one left tile.
static inline void multiply_rows(const bf16* left, int64_t left_stride, int64_t left_step, const bf16* right, int64_t column,
                                 int64_t steps, float* out, int64_t stride, bool add) {
    __m512 sums[ROWS_AT_ONCE][2];
#pragma GCC unroll 8
    for (int64_t m = 0; m < ROWS_AT_ONCE; m++)
        for (int64_t h = 0; h < 2; h++) sums[m][h] = add ? _mm512_loadu_ps(out + m * stride + h * SIDE) : _mm512_setzero_ps();
    for (int64_t k = 0; k < steps; k++, left += left_step, right += TILE)
        for (int64_t p = 0; p < SIDE; p++) {
            const __m512bh low = (__m512bh)_mm512_loadu_si512(right + p * DEPTH);
            const __m512bh high = (__m512bh)_mm512_loadu_si512(right + column + p * DEPTH);
#pragma GCC unroll 8
            for (int64_t m = 0; m < ROWS_AT_ONCE; m++) {
                int32_t both;
                memcpy(&both, left + m * left_stride + 2 * p, sizeof both);
                const __m512bh of_row = (__m512bh)_mm512_set1_epi32(both);
                sums[m][0] = _mm512_dpbf16_ps(sums[m][0], of_row, low);
                sums[m][1] = _mm512_dpbf16_ps(sums[m][1], of_row, high);
            }
        }
#pragma GCC unroll 8
    for (int64_t m = 0; m < ROWS_AT_ONCE; m++)
        for (int64_t h = 0; h < 2; h++) _mm512_storeu_ps(out + m * stride + h * SIDE, sums[m][h]);
}
#endif

// Sums of `steps` products of two left and two right tiles: out [32][32], rows `stride` apart. Left rows are `left_stride`
// numbers apart; consecutive right tiles follow each other, and the second column of them is `column` numbers away.
static void multiply(const number* left, int64_t left_stride, int64_t left_step, int64_t second, const number* right,
                     int64_t column, int64_t steps, float* out, int64_t stride, bool add) {
#ifdef WHORL_FP32
    for (int64_t m = 0; m < BLOCK; m += ROWS_AT_ONCE)
        for (int64_t h = 0; h < BLOCK / SIDE; h += COLUMNS_AT_ONCE)
            multiply_rows(left + (m / SIDE) * second + (m % SIDE) * left_stride, left_stride, left_step, right + h * column, column,
                          steps, out + m * stride + h * SIDE, stride, add);
#elif defined(WHORL_AMX) || defined(WHORL_EMULATED)
    const int64_t bytes = 4 * stride, left_bytes = 2 * left_stride;
    float* below = out + SIDE * stride;
    if (add) {
        _tile_loadd(0, out, bytes);
        _tile_loadd(1, out + SIDE, bytes);
        _tile_loadd(2, below, bytes);
        _tile_loadd(3, below + SIDE, bytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < steps; k++, left += left_step, right += TILE) {
        _tile_loadd(4, left, left_bytes);
        _tile_loadd(6, right, 64);
        _tile_loadd(5, left + second, left_bytes);
        _tile_loadd(7, right + column, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out, bytes);
    _tile_stored(1, out + SIDE, bytes);
    _tile_stored(2, below, bytes);
    _tile_stored(3, below + SIDE, bytes);
#elif defined(WHORL_PAIRS)
    for (int64_t m = 0; m < BLOCK; m += ROWS_AT_ONCE)
        multiply_rows(left + (m / SIDE) * second + (m % SIDE) * left_stride, left_stride, left_step, right, column, steps,
                      out + m * stride, stride, add);
#else
    for (int64_t m = 0; m < BLOCK; m++)
        for (int64_t n = 0; n < BLOCK; n++) {
            float sum = add ? out[m * stride + n] : 0.0f;
            const bf16* a = left + (m / SIDE) * second + (m % SIDE) * left_stride;
            const bf16* b = right + (n / SIDE) * column + (n % SIDE) * 2;
            for (int64_t k = 0; k < steps; k++)
                for (int64_t c = 0; c < DEPTH; c++)
                    sum += widen(a[k * left_step + c]) * widen(b[k * TILE + c / 2 * 2 * SIDE + c % 2]);
            out[m * stride + n] = sum;
        }
#endif
}

constexpr size_t HUGE_PAGE = 1 << 21;

// One thread's memory, kept between calls.
struct Scratch {
    char* data = nullptr;
    size_t size = 0, used = 0;
    bool reserve(size_t bytes) {
        used = 0;
        if (size >= bytes) return true;
        free(data);
        const size_t unit = bytes < HUGE_PAGE ? 64 : HUGE_PAGE;
        const size_t whole = (bytes + unit - 1) / unit * unit;
        data = (char*)aligned_alloc(unit, whole);
#ifdef MADV_HUGEPAGE
        if (data && unit == HUGE_PAGE) madvise(data, whole, MADV_HUGEPAGE);
#endif
        size = data ? bytes : 0;
        return data != nullptr;
    }
    template <class T> T* take(int64_t count) {
        T* found = (T*)(data + used);
        used += (size_t(count) * sizeof(T) + 63) / 64 * 64;
        return found;
    }
    ~Scratch() { free(data); }
};

// This thread's tile registers, all whole, while the object lives.
struct WholeTiles : TileRegisters {
    WholeTiles() { shape(TileShapes()); }
};

// How products run here: 2 on tiles, 1 by vectors, 0 by plain loops, or on tiles that are not permitted.
extern "C" inline __attribute__((used)) int32_t whorl_products() {
#if defined(WHORL_PAIRS) || defined(WHORL_FP32)
    return 1;
#else
    return tiles_permitted() ? 2 : 0;
#endif
}

// Uses the instructions of this file once, for a trial in a child process.
extern "C" inline __attribute__((used)) void whorl_try() {
    alignas(64) static number operands[4 * TILE];
    alignas(64) static float sums[BLOCK * BLOCK];
#ifdef WHORL_AMX
    if (!tiles_permitted()) return;
#endif
    const WholeTiles tiles;
    multiply(operands, DEPTH, TILE, TILE, operands + 2 * TILE, TILE, 1, sums, BLOCK, false);
}
