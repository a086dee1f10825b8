// Matrices as operands of `multiply` that read them along columns.
#pragma once
#include "tiles.h"

constexpr int64_t AREA = BLOCK * BLOCK;

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

// 16 rows by 32 columns of X, rows `stride` apart, as a right tile of X^T.
static inline void turn_right(const number* x, int64_t stride, number* to) {
#ifdef WHORL_FP32
    for (int64_t c = 0; c < DEPTH; c += SIDE) transpose((const pair*)(x + c), stride, (pair*)(to + c * SIDE), SIDE);
#else
    transpose((const pair*)x, stride / 2, (pair*)to, SIDE);
#endif
}

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

// X [k][n] as a right operand, in the order [n / 16][k / 32].
static void pack(const number* x, int64_t rows, int64_t columns, number* to) {
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
