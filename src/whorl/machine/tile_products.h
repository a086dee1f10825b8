// Sums of products of two left and two right tiles: 32 rows by 32 columns, by tile registers or by vectors of bf16 pairs.
//
// A line of a left tile has 64 bytes of a row. A line of a right tile has four bytes for each of 16 columns: two bf16, or four
// int8 of k. So it is also a vector.
#pragma once

#include "emulated_tiles.h"
#include "lanes.h"

enum Products { PAIRS, FOURS, SIGNED_FOURS };  // of bf16; of unsigned and signed bytes; of signed bytes

template <Products KIND, class Tiles, int C, int A, int B>
INLINE void add_products() {
    if constexpr (KIND == PAIRS)
        Tiles::template add_pairs<C, A, B>();
    else if constexpr (KIND == FOURS)
        Tiles::template add_fours<C, A, B>();
    else
        Tiles::template add_signed_fours<C, A, B>();
}

template <class Tiles>
INLINE void clear_sums() {
    Tiles::template clear<0>();
    Tiles::template clear<1>();
    Tiles::template clear<2>();
    Tiles::template clear<3>();
}

struct Operand {
    const char* data;
    int64_t line, second, step;  // bytes from line to line, to the second tile, and to the next tiles of k
    Operand(const void* data, int64_t line, int64_t second, int64_t step)
        : data((const char*)data), line(line), second(second), step(step) {}
};

// out = left right over `steps` tiles of k, or out + left right with `add`. out: fp32 or int32, lines `line` bytes apart.
template <Products KIND, class Tiles>
INLINE void multiply_tiles(Operand left, Operand right, int64_t steps, void* out, int64_t line, bool add) {
    char *to = (char*)out, *below = to + TILE_LINES * line;
    if (add) {
        Tiles::template load<0>(to, line);
        Tiles::template load<1>(to + TILE_BYTES, line);
        Tiles::template load<2>(below, line);
        Tiles::template load<3>(below + TILE_BYTES, line);
    } else {
        clear_sums<Tiles>();
    }
    for (; steps > 0; steps--, left.data += left.step, right.data += right.step) {
        Tiles::template load<4>(left.data, left.line);
        Tiles::template load<6>(right.data, right.line);
        add_products<KIND, Tiles, 0, 4, 6>();
        Tiles::template load<7>(right.data + right.second, right.line);
        add_products<KIND, Tiles, 1, 4, 7>();
        Tiles::template load<5>(left.data + left.second, left.line);
        add_products<KIND, Tiles, 2, 5, 6>();
        add_products<KIND, Tiles, 3, 5, 7>();
    }
    Tiles::template store<0>(to, line);
    Tiles::template store<1>(to + TILE_BYTES, line);
    Tiles::template store<2>(below, line);
    Tiles::template store<3>(below + TILE_BYTES, line);
}

#ifdef __AVX512BF16__
// Stands for the tile registers of a CPU that has only products of vectors of bf16 pairs.
struct PairVectors {
    static void shape(const TileShapes&) {}
};

template <>
INLINE void multiply_tiles<PAIRS, PairVectors>(Operand left, Operand right, int64_t steps, void* out, int64_t line, bool add) {
    constexpr int ROWS = 8;  // 16 sums: products have a latency of several cycles, and two begin in each
    for (int row = 0; row < 2 * TILE_LINES; row += ROWS) {
        const char *a = left.data + row / TILE_LINES * left.second + row % TILE_LINES * left.line, *b = right.data;
        char* to = (char*)out + row * line;
        Lanes low[ROWS], high[ROWS];
        UNROLL for (int i = 0; i < ROWS; i++) {
            low[i] = add ? load<Lanes>(to + i * line) : Lanes{};
            high[i] = add ? load<Lanes>(to + i * line + TILE_BYTES) : Lanes{};
        }
        for (int64_t s = 0; s < steps; s++, a += left.step, b += right.step)
            for (int k = 0; k < TILE_LINES; k++) {
                const char* pairs = b + k * right.line;
                const auto one = load<__m512bh>(pairs), other = load<__m512bh>(pairs + right.second);
                UNROLL for (int i = 0; i < ROWS; i++) {
                    const __m512bh both = (__m512bh)_mm512_set1_epi32(load<int32_t>(a + i * left.line + 4 * k));
                    low[i] = (Lanes)_mm512_dpbf16_ps((__m512)low[i], one, both);
                    high[i] = (Lanes)_mm512_dpbf16_ps((__m512)high[i], other, both);
                }
            }
        UNROLL for (int i = 0; i < ROWS; i++) {
            store(to + i * line, low[i]);
            store(to + i * line + TILE_BYTES, high[i]);
        }
    }
}
#endif
