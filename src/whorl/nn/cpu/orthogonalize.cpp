// The quintic iteration of Muon's orthogonalization (`train/optim/optimizers.py`): for each round (a, b, c)
//
//     G = X X^T,    P = b G + c G G,    X <- a X + P X
//
// G and P are symmetric, so only their blocks on and below the diagonal are computed: 13 instead of 18 units of products for
// a matrix of which one side is four times the other. Matrices stay in bf16 (fp32 with WHORL_FP32) between products;
// sums are fp32.
#include "operands.h"

#include <cmath>

struct Orthogonalize {
    int64_t rows, columns;
    const float* coefficients;
    int64_t rounds;

    size_t bytes() const { return sizeof(number) * (2 * rows * columns + 3 * rows * rows) + 4 * AREA + 1024; }

    // x: [rows][columns], overwritten with the result.
    void matrix(number* x, Room& scratch) const {
        const int64_t r = rows, c = columns;
        number *right = scratch.take<number>(r * c), *next = scratch.take<number>(r * c), *gram = scratch.take<number>(r * r);
        number *right_gram = scratch.take<number>(r * r), *polynomial = scratch.take<number>(r * r);
        float* sums = scratch.take<float>(AREA);
        float square = 0.0f;
#pragma omp simd reduction(+ : square)
        for (int64_t i = 0; i < r * c; i++) square += widen(x[i]) * widen(x[i]);
        const float scale = 1.0f / (sqrtf(square) * 1.01f + 1e-7f);
#pragma omp simd
        for (int64_t i = 0; i < r * c; i++) assign(x[i], widen(x[i]) * scale);
        number *from = x, *to = next;
        for (int64_t round = 0; round < rounds; round++) {
            const float *abc = coefficients + 3 * round, a = abc[0], b = abc[1], q = abc[2];
            pack_transposed(from, c, r, c, right);
            for (int64_t i = 0; i < r; i += BLOCK)
                for (int64_t j = 0; j <= i; j += BLOCK) {
                    multiply(from + i * c, c, DEPTH, SIDE * c, right + j * c, SIDE * c, c / DEPTH, sums, BLOCK, false);
                    write_symmetric(sums, i, j, gram);
                }
            pack_transposed(gram, r, r, r, right_gram);  // G is its own transpose
            for (int64_t i = 0; i < r; i += BLOCK)
                for (int64_t j = 0; j <= i; j += BLOCK) {
                    multiply(gram + i * r, r, DEPTH, SIDE * r, right_gram + j * r, SIDE * r, r / DEPTH, sums, BLOCK, false);
                    for (int64_t m = 0; m < BLOCK; m++)
#pragma omp simd
                        for (int64_t n = 0; n < BLOCK; n++)
                            sums[m * BLOCK + n] = b * widen(gram[(i + m) * r + j + n]) + q * sums[m * BLOCK + n];
                    write_symmetric(sums, i, j, polynomial);
                }
            pack(from, r, c, right);
            for (int64_t j = 0; j < c; j += BLOCK)
                for (int64_t i = 0; i < r; i += BLOCK) {
                    multiply(polynomial + i * r, r, DEPTH, SIDE * r, right + j * r, SIDE * r, r / DEPTH, sums, BLOCK, false);
                    for (int64_t m = 0; m < BLOCK; m++) {
                        const number* old = from + (i + m) * c + j;
                        number* out = to + (i + m) * c + j;
#pragma omp simd
                        for (int64_t n = 0; n < BLOCK; n++) assign(out[n], a * widen(old[n]) + sums[m * BLOCK + n]);
                    }
                }
            number* swap = from;
            from = to;
            to = swap;
        }
        if (from != x) memcpy(x, from, r * c * sizeof(number));
    }

    // A block of a symmetric matrix and its mirror image.
    void write_symmetric(const float* sums, int64_t i, int64_t j, number* to) const {
        number block[BLOCK][BLOCK];
        for (int64_t m = 0; m < BLOCK; m++) {
#pragma omp simd
            for (int64_t n = 0; n < BLOCK; n++) assign(block[m][n], sums[m * BLOCK + n]);
            memcpy(to + (i + m) * rows + j, block[m], sizeof block[m]);
        }
        if (i != j)
            for (int64_t n = 0; n < BLOCK; n++)
                for (int64_t m = 0; m < BLOCK; m++) to[(j + n) * rows + i + m] = block[m][n];
    }
};

extern "C" {

// matrices: [n][rows][columns], both multiples of 32, overwritten. coefficients: [rounds][3]. Returns 1 without memory.
int32_t whorl_orthogonalize(number* matrices, int64_t n, int64_t rows, int64_t columns, const float* coefficients, int64_t rounds,
                            int32_t threads) {
    const Orthogonalize job = {rows, columns, coefficients, rounds};
    return each_with_room(n, threads, job.bytes(), [&](int64_t i, Room& scratch) { job.matrix(matrices + i * rows * columns, scratch); });
}
}
