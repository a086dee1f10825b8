// Matrices as operands of `multiply` that read them along columns.
#pragma once
#include "tiles.h"

constexpr int64_t AREA = BLOCK * BLOCK;

static inline void narrow(const float* from, number* to, int64_t n) {
    for (int64_t c = 0; c < n; c += SIDE) store(to + c, load(from + c));
}

// Number c of both in bf16, `low` in the low half of 32 bits.
static inline void store_pairs(pair* to, Lanes low, Lanes high) { store(to, rounded(low) | rounded(high) << 16u); }

// Number c of both side by side, as of `store_pairs`.
static inline void join(const bf16* low, const bf16* high, pair* to) {
    store(to, (Bits)load(low) >> 16u | (Bits)load(high));
}

// Two rows of 32 numbers as two rows of adjacent right tiles, `left` and `right`.
static inline void interleave(const number* low, const number* high, number* left, number* right) {
#ifdef WHORL_FP32
    store(left, load(low));
    store(left + SIDE, load(high));
    store(right, load(low + SIDE));
    store(right + SIDE, load(high + SIDE));
#else
    join(low, high, (pair*)left);
    join(low + SIDE, high + SIDE, (pair*)right);
#endif
}

#ifndef WHORL_FP32
static inline void interleave(const float* low, const float* high, number* left, number* right) {
    alignas(64) number rows[2][BLOCK];
    narrow(low, rows[0], BLOCK);
    narrow(high, rows[1], BLOCK);
    interleave(rows[0], rows[1], left, right);
}
#endif

// 16 rows by 32 columns of X, rows `stride` apart, as a right tile of X^T.
static inline void turn_right(const number* x, int64_t stride, number* to) {
#ifdef WHORL_FP32
    for (int64_t c = 0; c < DEPTH; c += SIDE) transpose((const pair*)(x + c), stride, (pair*)(to + c * SIDE), SIDE);
#else
    transpose((const pair*)x, stride / 2, (pair*)to, SIDE);
#endif
}

#ifndef WHORL_FP32
static inline void turn_right(const float* x, int64_t stride, number* to) {
    alignas(64) number block[TILE];
    for (int64_t i = 0; i < SIDE; i++) narrow(x + i * stride, block + i * DEPTH, DEPTH);
    turn_right(block, DEPTH, to);
}
#endif

// 32 rows by 16 columns of X as a right tile.
static inline void copy_right(const number* x, int64_t stride, number* to) {
    for (int64_t k = 0; k < DEPTH; k += 2) {
        const number *low = x + k * stride, *high = low + stride;
#ifdef WHORL_FP32
        store(to + k * SIDE, load(low));
        store(to + (k + 1) * SIDE, load(high));
#else
        join(low, high, (pair*)(to + k * SIDE));
#endif
    }
}

// 32 rows by 16 columns of X as a left tile of X^T.
static inline void turn_left(const number* x, int64_t stride, number* to) {
#ifdef WHORL_FP32
    for (int64_t k = 0; k < DEPTH; k += SIDE) transpose((const pair*)(x + k * stride), stride, (pair*)(to + k), DEPTH);
#else
    alignas(64) number tile[TILE];
    copy_right(x, stride, tile);
    transpose((const pair*)tile, SIDE, (pair*)to, SIDE);
#endif
}

// Rows k and k + 1 of a right tile, for an even k.
static inline void put_rows(number* tile, int64_t k, Lanes low, Lanes high) {
#ifdef WHORL_FP32
    store(tile + k * SIDE, low);
    store(tile + (k + 1) * SIDE, high);
#else
    store_pairs((pair*)(tile + k * SIDE), low, high);
#endif
}

// X [n][k], rows `stride` apart, as the right operand X^T, in the order [n / 16][k / 32].
template <class T>
static void pack_transposed(const T* x, int64_t stride, int64_t rows, int64_t columns, number* to) {
    for (int64_t n = 0; n < rows; n += SIDE)
        for (int64_t k = 0; k < columns; k += DEPTH, to += TILE) turn_right(x + n * stride + k, stride, to);
}

// X [k][n] as a right operand, in the order [n / 16][k / 32].
template <class T>
static void pack(const T* x, int64_t rows, int64_t columns, number* to) {
    const int64_t steps = rows / DEPTH;
    for (int64_t k = 0; k < rows; k += 2)
        for (int64_t n = 0; n < columns; n += BLOCK) {
            number* at = to + (n / SIDE * steps + k / DEPTH) * TILE + k % DEPTH * SIDE;
            interleave(x + k * columns + n, x + (k + 1) * columns + n, at, at + steps * TILE);
        }
}

// 32 rows by 32 columns of X, rows `stride` apart, as two tiles of the left operand X^T.
static void turn(const number* x, int64_t stride, number* to) {
    turn_left(x, stride, to);
    turn_left(x + SIDE, stride, to + TILE);
}
