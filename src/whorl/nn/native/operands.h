// Rows of bf16 as operands of `multiply` that read them along columns.
#pragma once
#include "tiles.h"
#include "vectors.h"

constexpr int64_t AREA = BLOCK * BLOCK;

// Two rows of 32 numbers side by side: number c of both in pair c.
static inline void interleave(const bf16* low, const bf16* high, pair* left, pair* right) {
    join(low, high, left);
    join(low + SIDE, high + SIDE, right);
}

// X [k][n] in bf16 as a right operand, in the order [n / 16][k / 32].
static void pack(const bf16* x, int64_t rows, int64_t columns, bf16* to) {
    const int64_t steps = rows / DEPTH;
    for (int64_t k = 0; k < rows; k += 2)
        for (int64_t n = 0; n < columns; n += BLOCK) {
            pair* at = (pair*)(to + (n / SIDE * steps + k / DEPTH) * TILE) + k % DEPTH / 2 * SIDE;
            interleave(x + k * columns + n, x + (k + 1) * columns + n, at, at + steps * TILE / 2);
        }
}

// 32 rows by 32 columns of X, rows `stride` apart, as two tiles of the left operand X^T.
static void turn(const bf16* x, int64_t stride, bf16* to) {
    alignas(64) pair pairs[2][SIDE * SIDE];
    for (int64_t p = 0; p < SIDE; p++)
        interleave(x + 2 * p * stride, x + (2 * p + 1) * stride, pairs[0] + p * SIDE, pairs[1] + p * SIDE);
    transpose(pairs[0], SIDE, (pair*)to, SIDE);
    transpose(pairs[1], SIDE, (pair*)(to + TILE), SIDE);
}
