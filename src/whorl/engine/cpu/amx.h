// Products by tile registers (AMX): up to 32 rows by 64 outputs of a packed matrix at a time, in bf16, int8 or int4.
//
// The packing of packed.h is also that of a tile register: 16 lines of 64 bytes, a line with 16 outputs times two bf16 (or four
// int8) of k. So both ways to multiply read the same packed weights:
//
//     rows       accumulators                  registers                 loads for four products
//     17 to 32   2 x 16 rows by 2 x 16 outputs 4 sums, 2 of x, 2 of w    4
//     1 to 16    16 rows by 4 x 16 outputs     4 sums, 1 of x, 3 of w    5
//
// int4 codes of a block are unpacked to int8 first, once for all rows of a part. A group of fewer than 64 inputs is a tile with
// fewer columns of x and lines of w.
//
// Subtle: a sum of bf16 products has another order than in packed.h (32 of k at a time, even and odd ones apart), so bits
// differ between the two ways. They do not depend on the number of rows: one matrix is always multiplied in one way. Sums of
// integer products are exact in int32 and equal in both ways.
//
// `EmulatedTiles` computes the same in plain C++, for tests on any CPU.
#pragma once

#include "tile_products.h"
#include "packed.h"

constexpr int TILE_ROWS = 2 * TILE_LINES;            // rows of x at a time
constexpr int64_t BLOCK_LINE = 4 * BLOCK;            // bytes of a line of a packed block
constexpr int64_t TILE_STEP = TILE_LINES * BLOCK_LINE;

// Which ways multiply this matrix: a group of integers must be whole tiles, or a part of one.
INLINE bool fits_tiles(const Matrix& w) { return w.kind == BFLOAT16 || (w.inputs && (w.group % 64 == 0 || w.group < 64)); }

// Bytes of x in a tile, for this matrix.
INLINE int tile_columns(const Matrix& w) { return w.inputs && w.group < TILE_BYTES ? w.group : TILE_BYTES; }

template <class Tiles>
INLINE void set_shapes(const Matrix& w, int rows) {
    TileShapes shapes;
    const int columns = tile_columns(w);
    for (int t : {4, 5, 6, 7})
        if (t == 4 || (t == 5 && rows > TILE_LINES))
            shapes.bytes[t] = uint16_t(columns);
        else
            shapes.lines[t] = uint8_t(columns / 4);
    if (rows <= TILE_LINES)
        for (int t : {0, 1, 2, 3, 4}) shapes.lines[t] = uint8_t(rows);
    else
        for (int t : {2, 3, 5}) shapes.lines[t] = uint8_t(rows - TILE_LINES);
    Tiles::shape(shapes);
}

// int4 codes of a block -> int8 [padded k / 4][64][4].
INLINE void unpack_codes(const Matrix& w, const char* from, char* to) {
    typedef uint8_t Bytes __attribute__((vector_size(64)));
    const int64_t half = w.group / 2 * BLOCK, n_groups = groups(w);  // half: bytes
    for (int64_t g = 0; g < n_groups; g++, to += 2 * half)
        for (int64_t i = 0; i < half; i += 64, from += 64) {
            Bytes pairs;
            memcpy(&pairs, from, 64);
            const Bytes low = (pairs & 15) - 8, high = (pairs >> 4) - 8;
            memcpy(to + i, &low, 64);
            memcpy(to + half + i, &high, 64);
        }
}

// Sums over `steps` tiles of k -> out [rows][64], fp32 or int32. x and w point to the first byte of k.
template <Products KIND, class Tiles>
INLINE void multiply(const char* x, int64_t stride, int rows, const char* w, int64_t steps, void* out) {
    char* to = (char*)out;
    const int64_t line = 4 * BLOCK;  // bytes of a line of `out`
    if (rows > TILE_LINES) {
        const Operand left(x, stride, TILE_LINES * stride, TILE_BYTES);
        for (int at : {0, 2 * TILE_BYTES})
            multiply_tiles<KIND, Tiles>(left, {w + at, BLOCK_LINE, TILE_BYTES, TILE_STEP}, steps, to + at, line, false);
        return;
    }
    clear_sums<Tiles>();
    for (int64_t s = 0; s < steps; s++, x += TILE_BYTES, w += TILE_STEP) {
        Tiles::template load<4>(x, stride);
        Tiles::template load<5>(w, BLOCK_LINE);
        add_products<KIND, Tiles, 0, 4, 5>();
        Tiles::template load<6>(w + 64, BLOCK_LINE);
        add_products<KIND, Tiles, 1, 4, 6>();
        Tiles::template load<7>(w + 128, BLOCK_LINE);
        add_products<KIND, Tiles, 2, 4, 7>();
        Tiles::template load<5>(w + 192, BLOCK_LINE);
        add_products<KIND, Tiles, 3, 4, 5>();
    }
    Tiles::template store<0>(to, line);
    Tiles::template store<1>(to + 64, line);
    Tiles::template store<2>(to + 128, line);
    Tiles::template store<3>(to + 192, line);
}

// Rows [row, row + rows) by a block -> out [rows][64]; the shapes are set. data: the block, of int4 unpacked.
template <class Tiles>
INLINE void block_by_tiles(const Matrix& w, int64_t block, const char* data, const Rows& x, int64_t row, int rows, float* out) {
    const char* from = x.data + row * x.stride;
    if (w.kind == BFLOAT16) return multiply<PAIRS, Tiles>(from, x.stride, rows, data, padded(w) / 32, out);
    const int64_t n_groups = groups(w), steps = w.group / tile_columns(w);
    alignas(64) int32_t sums[TILE_ROWS * BLOCK];
    for (int64_t g = 0; g < n_groups; g++, from += w.group, data += w.group * BLOCK) {
        if (w.kind == INT8)
            multiply<SHIFTED ? FOURS : SIGNED_FOURS, Tiles>(from, x.stride, rows, data, steps, sums);
        else
            multiply<SIGNED_FOURS, Tiles>(from, x.stride, rows, data, steps, sums);
        const int64_t at = (block * n_groups + g) * BLOCK;
        for (int p = 0; p < BLOCK; p += WIDTH) {
            const Lanes scale = load_scales(w, at + p);
            const Ints moved = w.kind == INT8 && SHIFTED ? load<Ints>(w.moved + at + p) : Ints{};
            for (int m = 0; m < rows; m++) {
                Lanes acc = g ? load_lanes(out + m * BLOCK + p) : Lanes{};
                acc += to_lanes(load<Ints>(sums + m * BLOCK + p) - moved) *
                       (scale * x.scales[(row + m) * n_groups + g]);
                store(out + m * BLOCK + p, acc);
            }
        }
    }
}
