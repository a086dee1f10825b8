// A product over all threads, and the processing of its results while they are in the first-level cache.
#pragma once

#include "pack.h"
#include "room.h"
#include "team.h"

// Names as in nn/mlp.py; the gated ones last.
enum Activation : int32_t { NONE = 0, RELU2, GELU, GELU_TANH, QUICK_GELU, SWIGLU, GEGLU };
enum Use : int32_t { PUT, ADD, ACTIVATE };

INLINE Lanes gelu_tanh(Lanes x) {
    return 0.5f * x * (1.0f + tanh_lanes(0.797884561f * (x + 0.044715f * x * x * x)));
}

INLINE Lanes activated(Lanes x, Activation kind) {
    if (kind == RELU2) {
        const Lanes positive = max_lanes(x, Lanes{});
        return positive * positive;
    }
    if (kind == GELU) return 0.5f * x * (1.0f + erf_lanes(x * 0.707106781f));
    if (kind == GELU_TANH || kind == GEGLU) return gelu_tanh(x);
    if (kind == QUICK_GELU) return x * sigmoid_lanes(1.702f * x);
    if (kind == SWIGLU) return x * sigmoid_lanes(x);
    return x;
}

// Destination of y: PUT it, ADD it to y, or ACTIVATE it (a gated block gives 32 numbers).
struct Target {
    Use use;
    float* data;
    int64_t stride;
    Activation activation = NONE;
    float cap = 0;  // of logits: cap * tanh(y / cap)
};

// tile: [rows][64] of block `block`, from row `row`.
inline void finish(const Matrix& w, int64_t block, const float* tile, int64_t row, int rows, const Target& to) {
    const int width = w.gated ? BLOCK / 2 : BLOCK;
    const int64_t first = block * width, total = w.gated ? w.n / 2 : w.n;
    const int valid = int(total - first < width ? total - first : width);
    for (int m = 0; m < rows; m++, tile += BLOCK) {
        float* out = to.data + (row + m) * to.stride + first;
        for (int j = 0; j < width; j += WIDTH) {
            const int n = valid - j < WIDTH ? valid - j : WIDTH;
            if (n <= 0) break;
            Lanes y = load_lanes(tile + j);
            if (w.bias) y += load_some(w.bias + first + j, n);
            if (to.use == ACTIVATE) {
                y = activated(y, to.activation);
                if (w.gated) {
                    Lanes up = load_lanes(tile + j + BLOCK / 2);
                    if (w.bias) up += load_some(w.bias + total + first + j, n);
                    y *= up;
                }
            }
            if (to.cap != 0) y = to.cap * tanh_lanes(y / to.cap);
            if (n == WIDTH) {
                store(out + j, to.use == ADD ? load_lanes(out + j) + y : y);
            } else {
                for (int i = 0; i < n; i++) out[j + i] = to.use == ADD ? out[j + i] + y[i] : y[i];
            }
        }
    }
}

template <int M, bool FAR>
void tile_of(const Matrix& w, int64_t block, const Rows& x, int64_t row, Ahead ahead, float* out) {
    const char* data = (const char*)w.data + block * block_bytes(w);
    const int64_t scale = block * groups(w) * BLOCK;
    constexpr int SPAN = span_of(M);
    for (int p = 0; p < PANELS; p += SPAN, ahead.at += 64 * SPAN) {
        const int64_t at = scale + p * WIDTH;
        if (w.kind == FLOAT32)
            tile_float32<M, SPAN, FAR>(w, data + 4 * p * WIDTH, x, row, ahead, out + p * WIDTH);
        else if (w.kind == BFLOAT16)
            tile_bfloat16<M, SPAN, FAR>(w, data + 4 * p * WIDTH, x, row, ahead, out + p * WIDTH);
        else if (w.kind == INT8)
            tile_integer<M, SPAN, FAR, false>(w, data + 4 * p * WIDTH, at, x, row, ahead, out + p * WIDTH);
        else
            tile_integer<M, SPAN, FAR, true>(w, data + 4 * p * WIDTH, at, x, row, ahead, out + p * WIDTH);
    }
}

using TileOf = void (*)(const Matrix&, int64_t, const Rows&, int64_t, Ahead, float*);
template <bool FAR>
static const TileOf tiles[] = {tile_of<1, FAR>, tile_of<2, FAR>, tile_of<3, FAR>, tile_of<4, FAR>, tile_of<5, FAR>, tile_of<6, FAR>};

// The rows of a part by one block, in steps of TILE_ROWS.
template <class Tiles>
inline void part_by_tiles(const Matrix& w, int64_t block, const Rows& x, int64_t first, int64_t end, const Target& to) {
    [[maybe_unused]] const Tiles tiles;  // the registers are this thread's while it lives
    alignas(64) float tile[TILE_ROWS * BLOCK];
    const char* data = (const char*)w.data + block * block_bytes(w);
    if (w.kind == INT4) {
        static thread_local Room unpacked;
        char* to = unpacked.at_least(size_t(padded(w) * BLOCK));
        unpack_codes(w, data, to);
        data = to;
    }
    int shaped = 0;
    for (int64_t row = first; row < end; row += TILE_ROWS) {
        const int rows = int(end - row < TILE_ROWS ? end - row : TILE_ROWS);
        if (rows != shaped) set_shapes<Tiles>(w, shaped = rows);
        block_by_tiles<Tiles>(w, block, data, x, row, rows, tile);
        finish(w, block, tile, row, rows, to);
    }
}

constexpr int64_t NEAR_BYTES = 4096;  // of prefetches in the same block
constexpr int64_t FETCHING_TILES = 4;  // at most; each line is requested once for each of them

// The tiles of a block prefetch the next block, a slice each. A `cold` block has not been prefetched.
INLINE Ahead ahead_of(const Matrix& w, int64_t block, int64_t tile, int64_t n_tiles, bool cold) {
    const char* data = (const char*)w.data + block * block_bytes(w);
    if (n_tiles == 1 || (cold && tile == 0)) return {data + NEAR_BYTES, 4 * BLOCK, false};
    const int64_t left = n_tiles - cold, slices = left < FETCHING_TILES ? left : FETCHING_TILES, slice = tile - cold;
    if (slice >= slices) return {data, 0, true};
    return {data + block_bytes(w) + slice * (block_bytes(w) / slices), 4 * BLOCK / slices, true};
}

inline void part_by_vectors(const Matrix& w, int64_t block, const Rows& x, int64_t first, int64_t end, const Target& to) {
    alignas(64) float tile[TILE * BLOCK];
    const int64_t m = end - first, n_tiles = (m + tile_rows(w) - 1) / tile_rows(w);
    const bool cold = block == 0 || block == (blocks(w) + 1) / 2;  // where threads begin (team.h)
    for (int64_t t = 0; t < n_tiles; t++) {
        const int64_t row = m * t / n_tiles;
        const int rows = int(m * (t + 1) / n_tiles - row);
        const Ahead ahead = ahead_of(w, block, t, n_tiles, cold);
        (ahead.of_next ? tiles<true> : tiles<false>)[rows - 1](w, block, x, first + row, ahead, tile);
        finish(w, block, tile, first + row, rows, to);
    }
}

constexpr int64_t FEW_ROWS = 4, FEW_INT4_ROWS = 16;  // most rows for which vectors are faster than tiles, of integers
constexpr int64_t PART_ROWS = 256;                   // most rows of a part: they stay in the second-level cache while blocks pass by

// y = x w^T for m rows; all threads of the team call it.
inline void product(Team& team, const Matrix& w, const Rows& x, int64_t m, const Target& to) {
    // Sums of integers are exact, so few rows take the faster way without a change of bits.
    const int64_t few = w.kind == INT8 ? FEW_ROWS : w.kind == INT4 ? FEW_INT4_ROWS : 0;
    const Method method = !fits_tiles(w) || m <= few ? VECTORS : Method(w.method);
    const int64_t n_blocks = blocks(w), unit = method == VECTORS ? tile_rows(w) : TILE_ROWS, n_units = (m + unit - 1) / unit;
    // Rows are split too if there are fewer blocks than the threads need.
    int64_t parts = (4 * team.size + n_blocks - 1) / n_blocks;
    if (parts > n_units) parts = n_units;
    if (parts * PART_ROWS < m) parts = (m + PART_ROWS - 1) / PART_ROWS;
    team.share(n_blocks * parts, [&](int64_t task) {
        const int64_t block = task % n_blocks, part = task / n_blocks;
        const int64_t first = n_units * part / parts * unit, last = n_units * (part + 1) / parts * unit;
        const int64_t end = last < m ? last : m;
#ifdef WHORL_AMX
        if (method == TILES) return part_by_tiles<TileRegisters>(w, block, x, first, end, to);
#endif
        if (method == EMULATED_TILES) return part_by_tiles<EmulatedTiles>(w, block, x, first, end, to);
        part_by_vectors(w, block, x, first, end, to);
    });
}

INLINE int64_t ready_stride(const Matrix& w) { return round_up(padded(w) * activation_bytes(w), 64); }

// Buffer of converted rows, the input of a product.
struct Ready {
    char* data;
    float* scales;
    int32_t* sums;

    INLINE Rows rows(const Matrix& w) const { return {ready_stride(w), data, scales, sums}; }
};

struct ReadyRoom {
    Room data, scales, sums;

    // Called before the threads start.
    Ready reserve(const Matrix& w, int64_t m) {
        const size_t per_group = size_t(4 * m * groups(w));
        data.at_least(size_t(m * ready_stride(w)));
        scales.at_least(per_group);
        sums.at_least(per_group);
        return {(char*)data.data, (float*)scales.data, (int32_t*)sums.data};
    }
};

INLINE void ready_row(const Matrix& w, const Rows& rows, int64_t m, const float* x) {
    ready_row(w, x, (char*)rows.data + m * rows.stride, (float*)rows.scales + m * groups(w),
              (int32_t*)rows.sums + m * groups(w));
}
