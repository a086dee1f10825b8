// Products of matrices in bf16 with fp32 sums, by tile registers (AMX) or by vectors of bf16 pairs (AVX512_BF16). A left tile has
// 16 rows of 32 numbers. A right tile has 16 pairs of rows by 16 columns: row 2p in the low half of each 32 bits, row 2p + 1 in
// the high half. WHORL_VECTORS compiles without tile registers. Without either instruction set, or with WHORL_EMULATED, plain
// C++ stands for the registers: slow, for tests.
//
// WHORL_FP32 compiles a source for matrices of fp32, by vectors that every CPU has. A right tile then has 32 rows by 16 columns.
// Both kinds of tiles have 512 numbers, and two rows of a right tile begin at the same number.
#pragma once
#include "numbers.h"
#include "room.h"
#include "threads.h"
#include "tile_products.h"

#ifdef WHORL_FP32
typedef float number;
typedef TileRegisters Tiles;
#else
typedef bf16 number;
#if defined(WHORL_AMX)
typedef TileRegisters Tiles;
#elif defined(__AVX512BF16__) && !defined(WHORL_EMULATED)
#define WHORL_PAIRS 1
typedef PairVectors Tiles;
#else
typedef EmulatedTiles Tiles;
#endif
#endif
typedef uint32_t pair;

constexpr int64_t SIDE = 16, DEPTH = 32, BLOCK = 32;
constexpr int64_t TILE = SIDE * DEPTH;  // numbers

static inline Lanes load(const float* from) { return load_lanes(from); }
static inline Lanes load(const bf16* from) { return load_lanes(from); }

// The transpose of 16 x 16 numbers of 32 bits.
static void transpose(const pair* in, int64_t stride, pair* out, int64_t out_stride) {
    Lanes rows[16];
    UNROLL16 for (int i = 0; i < 16; i++) rows[i] = load<Lanes>(in + i * stride);
    transpose16(rows, (float*)out, out_stride);
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
#else
    multiply_tiles<PAIRS, Tiles>({left, 2 * left_stride, 2 * second, 2 * left_step}, {right, TILE_BYTES, 2 * column, 2 * TILE}, steps,
                                 out, 4 * stride, add);
#endif
}

// This thread's tile registers, all whole, while the object lives.
struct WholeTiles : TileRegisters {
    WholeTiles() { Tiles::shape(TileShapes()); }
};

// Runs work(i, its memory of so many bytes) for each i below n on `threads` threads. Returns 1 without memory.
template <class F>
static int32_t each_with_room(int64_t n, int32_t threads, size_t bytes, F work) {
    return split(n, threads, [&](int64_t first, int64_t last, int64_t) {
        static thread_local Room room;
        const WholeTiles tiles;
        for (int64_t i = first; i < last; i++) {
            if (!room.reserve(bytes)) return 1;
            work(i, room);
        }
        return 0;
    });
}

// How products run here: 2 on tile registers, 1 by vectors, 0 on emulated registers or on those that are not permitted.
extern "C" inline __attribute__((used)) int32_t whorl_products() {
#if defined(WHORL_FP32) || defined(WHORL_PAIRS)
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
