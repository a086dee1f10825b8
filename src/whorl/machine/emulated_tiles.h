// Tile registers (AMX) in plain C++, for tests of the code for tiles on any CPU.
#pragma once

#include "tile_registers.h"

// The registers of each thread in memory. Hidden: libraries of one process must not share them. Rounding as in the manual's pseudocode of TDPBF16PS; denormals are not flushed.
struct __attribute__((visibility("hidden"))) EmulatedTiles {
    static inline thread_local TileShapes shapes;
    alignas(64) static inline thread_local char tiles[8][TILE_LINES][TILE_BYTES];

    static void shape(const TileShapes& to) { shapes = to; }
    template <int T>
    static void clear() { memset(tiles[T], 0, sizeof tiles[T]); }
    template <int T>
    static void load(const void* from, int64_t stride) {
        for (int i = 0; i < shapes.lines[T]; i++) memcpy(tiles[T][i], (const char*)from + i * stride, shapes.bytes[T]);
    }
    template <int T>
    static void store(void* to, int64_t stride) {
        for (int i = 0; i < shapes.lines[T]; i++) memcpy((char*)to + i * stride, tiles[T][i], TILE_BYTES);
    }
    template <int C, int A, int B>
    static void add_pairs() {
        for (int i = 0; i < shapes.lines[A]; i++)
            for (int j = 0; j < TILE_LINES; j++) {
                float even = 0, odd = 0;
                for (int k = 0; k < shapes.lines[B]; k++) {
                    const bf16 *a = (const bf16*)tiles[A][i] + 2 * k, *b = (const bf16*)tiles[B][k] + 2 * j;
                    even = __builtin_fmaf(widen(a[0]), widen(b[0]), even);
                    odd = __builtin_fmaf(widen(a[1]), widen(b[1]), odd);
                }
                ((float*)tiles[C][i])[j] += even + odd;
            }
    }
    template <int C, int A, int B, class Byte = uint8_t>
    static void add_fours() {
        for (int i = 0; i < shapes.lines[A]; i++)
            for (int j = 0; j < TILE_LINES; j++)
                for (int k = 0; k < 4 * shapes.lines[B]; k++)
                    ((int32_t*)tiles[C][i])[j] += int32_t(((const Byte*)tiles[A][i])[k]) *
                                                  int32_t(((const int8_t*)tiles[B][k / 4])[4 * j + k % 4]);
    }
    template <int C, int A, int B>
    static void add_signed_fours() { add_fours<C, A, B, int8_t>(); }
};
