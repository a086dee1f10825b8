// The MLP  y = relu(x U^T)^2 D^T  of a transformer block (`nn/mlp.py`) and its gradients, in bf16 or fp32 (WHORL_FP32). The activation
// runs on each block of sums while it is in cache. Weights and their gradients are fp32, without copies in bf16.
//
// Forward, by blocks of rows: r = relu(x U^T), which the backward reads, a = r^2, y = a D^T. Backward, by sections of rows
// whose operands stay in the second-level cache, and in them by blocks of 32 hidden units:
//
//     dh = 2 r (dy D),    dU (+)= dh^T x,    dD (+)= dy^T a;    after all units    dx = dh U
//
// One thread. Rows and both widths are multiples of 32. All matrices are contiguous; r, a and dh are stored as blocks of
// 32 x 32 numbers, [row / 32][unit / 32], so that blocks are written and read without strides.
#include "operands.h"

#include <algorithm>

static thread_local Room scratch;
constexpr int64_t FORWARD_ROWS = 64;
constexpr int64_t SECTION_BYTES = 3 << 18;

// to [rows][columns] = from [rows][depth], in blocks, times a packed right operand.
static void product(const number* from, int64_t depth, const number* right, int64_t rows, int64_t columns, float* sums,
                    number* to) {
    const int64_t steps = depth / DEPTH;
    for (int64_t m = 0; m < rows; m += BLOCK)
        for (int64_t n = 0; n < columns; n += BLOCK) {
            multiply(from + m * depth, BLOCK, AREA, TILE, right + n * depth, steps * TILE, steps, sums, BLOCK, false);
            for (int64_t i = 0; i < BLOCK; i++) narrow(sums + i * BLOCK, to + (m + i) * columns + n, BLOCK);
        }
}

extern "C" {

// x, y [rows][width]; up [hidden][width]; down [width][hidden]; r: rows * hidden numbers. Returns 1 without memory.
int32_t whorl_mlp(const number* x, const float* up, const float* down, number* r, number* y, int64_t rows, int64_t width,
                  int64_t hidden) {
    if (!scratch.reserve(sizeof(number) * (2 * width + FORWARD_ROWS) * hidden + 4 * AREA + 256)) return 1;
    number *right_up = scratch.take<number>(width * hidden), *right_down = scratch.take<number>(width * hidden);
    number* a = scratch.take<number>(FORWARD_ROWS * hidden);
    float* sums = scratch.take<float>(AREA);
    pack_transposed(up, width, hidden, width, right_up);
    pack_transposed(down, hidden, width, hidden, right_down);
    const int64_t steps = width / DEPTH;
    const WholeTiles tiles;
    for (int64_t start = 0; start < rows; start += FORWARD_ROWS) {
        const int64_t count = std::min(FORWARD_ROWS, rows - start);
        for (int64_t h = 0; h < hidden; h += BLOCK)
            for (int64_t m = 0; m < count; m += BLOCK) {
                const number* left = x + (start + m) * width;
                multiply(left, width, DEPTH, SIDE * width, right_up + h * width, steps * TILE, steps, sums, BLOCK, false);
                number *kept = r + (start + m) * hidden + h * BLOCK, *square = a + m * hidden + h * BLOCK;
                for (int64_t c = 0; c < AREA; c += SIDE) {
                    store(kept + c, max_lanes(all(0.0f), load(sums + c)));
                    store(square + c, load(kept + c) * load(kept + c));
                }
            }
        product(a, hidden, right_down, count, width, sums, y + start * width);
    }
    return 0;
}

// dy, x, dx [rows][width]; r of `whorl_mlp`; up, d_up [hidden][width]; down, d_down [width][hidden].
// Returns 1 without memory.
int32_t whorl_mlp_backward(const number* dy, const number* x, const number* r, const float* up, const float* down, number* dx,
                           float* d_up, float* d_down, int64_t rows, int64_t width, int64_t hidden) {
    const int64_t most = std::max(BLOCK, SECTION_BYTES / int64_t(3 * sizeof(number) * width)), parts = (rows + most - 1) / most;
    const int64_t section = ((rows + parts - 1) / parts + BLOCK - 1) / BLOCK * BLOCK;
    const int64_t numbers = 2 * width * hidden + section * (2 * width + hidden + 2 * BLOCK);
    if (!scratch.reserve(sizeof(number) * (numbers + AREA) + 4 * AREA + 1024)) return 1;
    number *right_up = scratch.take<number>(width * hidden), *right_down = scratch.take<number>(width * hidden);
    number *right_x = scratch.take<number>(section * width), *left_dy = scratch.take<number>(section * width);
    number *dh = scratch.take<number>(section * hidden), *left_dh = scratch.take<number>(section * BLOCK);
    number *right_a = scratch.take<number>(section * BLOCK), *a = scratch.take<number>(AREA);
    float* sums = scratch.take<float>(AREA);
    pack(up, hidden, width, right_up);
    pack(down, width, hidden, right_down);
    const WholeTiles tiles;
    for (int64_t start = 0; start < rows; start += section) {
        const int64_t count = std::min(section, rows - start), steps = count / DEPTH;
        pack(x + start * width, count, width, right_x);
        for (int64_t m = 0; m < width; m += BLOCK)
            for (int64_t k = 0; k < steps; k++)
                turn(dy + (start + k * DEPTH) * width + m, width, left_dy + (m / SIDE * steps + 2 * k) * TILE);
        for (int64_t h = 0; h < hidden; h += BLOCK) {
            for (int64_t i = 0; i < width; i++) {  // lines that are written below
                __builtin_prefetch(d_up + h * width + i * BLOCK, 1);
                __builtin_prefetch(d_up + h * width + i * BLOCK + SIDE, 1);
                __builtin_prefetch(d_down + i * hidden + h, 1);
                __builtin_prefetch(d_down + i * hidden + h + SIDE, 1);
            }
            for (int64_t k = 0; k < steps; k++) {
                const number* left = dy + (start + k * DEPTH) * width;
                multiply(left, width, DEPTH, SIDE * width, right_down + h * width, width * SIDE, width / DEPTH, sums, BLOCK, false);
                const number* kept = r + (start + k * DEPTH) * hidden + h * BLOCK;
                number* to = dh + k * DEPTH * hidden + h * BLOCK;
                for (int64_t c = 0; c < AREA; c += SIDE) {
                    const Lanes value = load(kept + c);
                    store(to + c, 2.0f * value * load(sums + c));
                    store(a + c, value * value);
                }
                turn(to, BLOCK, left_dh + 2 * k * TILE);
                for (int64_t p = 0; p < SIDE; p++) {
                    number* at = right_a + k * TILE + p * DEPTH;
                    interleave(a + 2 * p * BLOCK, a + (2 * p + 1) * BLOCK, at, at + steps * TILE);
                }
            }
            for (int64_t n = 0; n < width; n += BLOCK) {
                multiply(left_dh, DEPTH, 2 * TILE, TILE, right_x + n * count, steps * TILE, steps, d_up + h * width + n, width, start > 0);
                multiply(left_dy + n * count, DEPTH, 2 * TILE, TILE, right_a, steps * TILE, steps, d_down + n * hidden + h, hidden, start > 0);
            }
        }
        product(dh, hidden, right_up, count, width, sums, dx + start * width);
    }
    return 0;
}
}
