// The weight gradient of a linear layer,  dW = dY^T X  in fp32. Rows are bf16, or fp32 (WHORL_FP32). oneDNN multiplies a
// transposed left operand of bf16 at a third of its speed, and its result is bf16.
//
// By sections of rows, whose X stays in the second-level cache as a right operand; in them by panels of outputs, whose dY
// is turned once. One thread. Rows and both widths are multiples of 32.
#include "operands.h"

#include <algorithm>

static thread_local Room scratch;
constexpr int64_t SECTION_BYTES = 1 << 18, SECTION_ROWS = 256;
constexpr int64_t PANEL = 128;  // outputs whose dY is turned together: adjacent lines of a row

extern "C" {

// dy [rows][outer], x [rows][inner], dw [outer][inner]; all contiguous. Returns 1 without memory.
int32_t whorl_weight_gradient(const number* dy, const number* x, float* dw, int64_t rows, int64_t inner, int64_t outer) {
    const int64_t most = std::max(SECTION_ROWS, SECTION_BYTES / int64_t(sizeof(number) * inner)), parts = (rows + most - 1) / most;
    const int64_t section = ((rows + parts - 1) / parts + BLOCK - 1) / BLOCK * BLOCK;
    if (!scratch.reserve(sizeof(number) * section * (inner + PANEL) + 128)) return 1;
    number *right = scratch.take<number>(section * inner), *left = scratch.take<number>(section * PANEL);
    const WholeTiles tiles;
    for (int64_t start = 0; start < rows; start += section) {
        const int64_t count = std::min(section, rows - start), steps = count / DEPTH;
        pack(x + start * inner, count, inner, right);
        for (int64_t first = 0; first < outer; first += PANEL) {
            const int64_t last = std::min(outer, first + PANEL);
            for (int64_t k = 0; k < steps; k++)
                for (int64_t m = first; m < last; m += BLOCK)
                    turn(dy + (start + k * DEPTH) * outer + m, outer, left + (m - first) * count + 2 * k * TILE);
            for (int64_t m = first; m < last; m += BLOCK)
                for (int64_t n = 0; n < inner; n += BLOCK)
                    multiply(left + (m - first) * count, DEPTH, 2 * TILE, TILE, right + n * count, steps * TILE, steps,
                             dw + m * inner + n, inner, start > 0);
        }
    }
    return 0;
}
}
