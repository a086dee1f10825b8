// The attention of attention.h for many queries of one key head over a bf16 or int8 cache, for prefill chunks: by tile
// registers, or by vectors of bf16 pairs, for which the same layout serves.
//
// A step reads 64 keys. Keys are transposed in pairs of features and values are interleaved in pairs of positions, as a right
// operand needs; up to 64 queries share that work. Scores of 32 queries are two rows of tiles, their running softmax is as in
// attention.h, and the probabilities, rounded to bf16, multiply the values. Sums and the running output are fp32.
//
// Keys and values in int8 are converted to bf16 first, 16 rows at a time.
//
// Subtle: values outside of the row are set to 0, since a probability of 0 times NaN is NaN. Keys need no such care: their
// scores are replaced before use.
#pragma once

#include "amx.h"
#include "attention.h"

constexpr int MIN_TILE_QUERIES = 8, TILE_QUERIES = 64, TILE_KEYS = 64, GROUP = 2 * TILE_LINES;

// Whether a layer with this input matrix rounds its attention to bf16: its method has products of pairs, and the heads fit.
INLINE bool attends_by_tiles(const Heads& h, const Matrix& qkv) {
    if (qkv.kind == FLOAT32) return false;
#ifndef __AVX512BF16__
    if (qkv.method == VECTORS) return false;
#endif
    return h.head_dim % 32 == 0 && h.page_size % TILE_LINES == 0;
}

// Scratch size, in floats.
INLINE int64_t tile_attention_room(const Heads& h, int64_t queries) {
    const int64_t n = round_up(queries, GROUP), d = h.head_dim;
    return n * d / 2 + n * d + GROUP * TILE_KEYS * 3 / 2 + TILE_KEYS * d + (1 + WIDTH) * n + TILE_LINES * d + 64;
}

// 2^x to 4e-5 of its value, for x <= 0; for x below -126 it is at most 2^-126.
INLINE Lanes power_of_two(Lanes x) {
#ifdef __AVX512F__
    const Lanes whole = (Lanes)_mm512_roundscale_ps((__m512)x, 8), r = x - whole;
#else
    const Lanes magic = all(12582912.0f);  // 1.5 * 2^23
    x = max_lanes(x, all(-126.0f));
    const Lanes shifted = x + magic, r = x - (shifted - magic);
#endif
    Lanes p = all(9.61812911e-3f);
    p = p * r + 5.55041087e-2f;
    p = p * r + 2.40226507e-1f;
    p = p * r + 6.93147181e-1f;
    p = p * r + 1.0f;
#ifdef __AVX512F__
    return (Lanes)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
    return (Lanes)((Ints)p + (((Ints)shifted - (Ints)magic) << 23));
#endif
}

// As `soften`, for 64 scores -> probabilities in bf16. Scores and `most` are in units of log2, unless they are capped here.
// Sums of 16 lanes are added at the end.
INLINE float soften64(const float* scores, bf16* probabilities, int from, int to, float softcap, float& most, Lanes& sum) {
    const float log2e = 1.44269504f;
    if (to <= from) {
        memset(probabilities, 0, TILE_KEYS * sizeof(bf16));
        return 1.0f;
    }
    const bool partly = from > 0 || to < TILE_KEYS;
    Lanes s[4], highest = all(LOWEST);
    UNROLL for (int h = 0; h < 4; h++) {
        s[h] = load_lanes(scores + h * WIDTH);
        if (softcap != 0) s[h] = log2e * softcap * tanh_lanes(s[h] / softcap);
        if (partly) s[h] = choose(seen_lanes(h * WIDTH, from, to), s[h], all(LOWEST));
        highest = max_lanes(highest, s[h]);
    }
    const float here = max_of(highest), now = here > most ? here : most;
    Lanes total{};
    UNROLL for (int h = 0; h < 4; h++) {
        Lanes p = power_of_two(s[h] - now);
        if (partly) p = (Lanes)((Ints)p & seen_lanes(h * WIDTH, from, to));
        store(probabilities + h * WIDTH, p);
        total += p;
    }
    const float correction = now == most ? 1.0f : power_of_two(all(most - now))[0];
    sum = sum * correction + total;
    most = now;
    return correction;
}

// Keys [start, start + 64) -> [4][d / 32] tiles of feature pairs by keys, values -> [2][d / 16] tiles of position pairs by
// features. Tiles without a position in [first, last] are 0, and so are values outside.
// short_rows: room for 2 * 16 rows.
template <class T>
INLINE void turn_tiles(const Heads& h, const Cache<T>& cache, const int32_t* pages, int64_t kv, int64_t start, int64_t first,
                       int64_t last, bf16* short_rows, float* keys, float* values) {
    const int64_t d = h.head_dim, tile = TILE_LINES * WIDTH;
    for (int side = 0; side < TILE_KEYS / TILE_LINES; side++) {
        const int64_t p0 = start + side * TILE_LINES;
        float* to = keys + side * (d / 32) * tile;
        // lines of this side: half of the tiles of 32 positions
        float* into = values + side / 2 * (d / 16) * tile + side % 2 * (TILE_LINES / 2) * WIDTH;
        if (p0 > last || p0 + TILE_LINES <= first) {
            memset(to, 0, size_t(d / 32 * tile) * 4);
            for (int64_t c = 0; c < d / 16; c++) memset(into + c * tile, 0, size_t(tile / 2) * 4);
            continue;
        }
        const int64_t at = cache.at(h, pages, kv, p0), stride = cache.position;
        const bf16 *k = short_rows, *v = k + TILE_LINES * d;
        if constexpr (sizeof(T) == 2) {
            k = cache.k + at;
            v = cache.v + at;
        } else {
            for (int j = 0; j < TILE_LINES; j++)
                for (int64_t c = 0; c < d; c += WIDTH) {
                    const int64_t from = at + j * stride + c, row = at / d + j;
                    store(short_rows + j * d + c, load_lanes(cache.k + from) * cache.k_scale[row]);
                    store(short_rows + (TILE_LINES + j) * d + c, load_lanes(cache.v + from) * cache.v_scale[row]);
                }
        }
        for (int64_t c = 0; c < d / 32; c++) {
            Lanes rows[WIDTH];
            UNROLL16 for (int j = 0; j < WIDTH; j++) rows[j] = load<Lanes>(k + j * stride + c * 32);
            transpose16(rows, to + c * tile, WIDTH);
        }
        for (int j = 0; j < TILE_LINES; j += 2) {
            const bf16 *even = v + j * stride, *odd = even + stride;
            const bool has_even = p0 + j >= first && p0 + j <= last, has_odd = p0 + j + 1 >= first && p0 + j + 1 <= last;
            for (int64_t c = 0; c < d / 16; c++) {
                Bits pair{};
                if (has_even) pair = load_halves(even + c * WIDTH);
                if (has_odd) pair |= load_halves(odd + c * WIDTH) << 16;
                store((Bits*)(into + c * tile + j / 2 * WIDTH), pair);
            }
        }
    }
}

// Arguments as of `attend`.
template <class Tiles, class T>
void attend_by_tiles(const Heads& h, const Cache<T>& cache, const int32_t* pages, int64_t kv, int64_t position,
                     int64_t tokens, const float* q, int64_t q_stride, float* y, int64_t y_stride, float* room) {
    const int64_t group = h.n_heads / h.n_kv_heads, n = tokens * group, d = h.head_dim, padded_n = round_up(n, GROUP);
    const int64_t tile = TILE_LINES * WIDTH;
    room = (float*)round_up(int64_t(room), 64);
    float *out = room, *keys = out + padded_n * d, *values = keys + TILE_KEYS * d / 2, *scores = values + TILE_KEYS * d / 2;
    bf16 *probabilities = (bf16*)(scores + GROUP * TILE_KEYS), *queries = probabilities + GROUP * TILE_KEYS;
    float* most = (float*)(queries + padded_n * d);
    Lanes* sum = (Lanes*)(most + padded_n);  // aligned: padded_n and d are multiples of 32
    bf16* short_rows = (bf16*)(sum + padded_n);
    memset(out, 0, size_t(padded_n * d) * 4);
    const float log2e = 1.44269504f, scale = h.softcap != 0 ? h.scale : h.scale * log2e;
    for (int64_t i = 0; i < padded_n; i++) {
        const float* from = q + i / group * q_stride + i % group * d;
        for (int64_t c = 0; c < d; c += WIDTH)
            store(queries + i * d + c, i < n ? load_lanes(from + c) * scale : Lanes{});
        most[i] = LOWEST;
        sum[i] = Lanes{};
    }
    Tiles tiles;
    tiles.shape(TileShapes());
    const int64_t last = position + tokens - 1;
    const int64_t first = h.window > 0 && position - h.window + 1 > 0 ? position - h.window + 1 : 0;
    for (int64_t start = first / TILE_KEYS * TILE_KEYS; start <= last; start += TILE_KEYS) {
        turn_tiles(h, cache, pages, kv, start, first, last, short_rows, keys, values);
        for (int64_t r = 0; r < n; r += GROUP) {
            if (position + (r + GROUP - 1) / group < start) continue;  // all keys are later
            for (int side = 0; side < 4; side += 2)
                multiply_tiles<PAIRS, Tiles>({queries + r * d, 2 * d, 2 * TILE_LINES * d, TILE_BYTES},
                                             {keys + side * (d / 32) * tile, TILE_BYTES, 4 * (d / 32) * tile, 4 * tile}, d / 32,
                                             scores + side * WIDTH, 4 * TILE_KEYS, false);
            for (int64_t i = 0; i < GROUP; i++) {
                const int64_t own = position + (r + i) / group - start;  // position among the 64
                const int64_t low = h.window > 0 && own - h.window + 1 > 0 ? own - h.window + 1 : 0;
                const int64_t high = r + i < n ? own + 1 < TILE_KEYS ? own + 1 : TILE_KEYS : 0;
                const float correction = soften64(scores + i * TILE_KEYS, probabilities + i * TILE_KEYS, int(low), int(high),
                                                  h.softcap, most[r + i], sum[r + i]);
                if (correction != 1.0f)
                    for (int64_t c = 0; c < d; c += WIDTH)
                        store(out + (r + i) * d + c, load_lanes(out + (r + i) * d + c) * correction);
            }
            for (int64_t c = 0; c < d / 16; c += 2)
                multiply_tiles<PAIRS, Tiles>({probabilities, 2 * TILE_KEYS, 2 * TILE_LINES * TILE_KEYS, TILE_BYTES},
                                             {values + c * tile, TILE_BYTES, 4 * tile, 4 * (d / 16) * tile}, 2,
                                             out + r * d + c * WIDTH, 4 * d, true);
        }
    }
    for (int64_t i = 0; i < n; i++) scores[i] = sum_lanes(sum[i]);
    divide_by_sums(h, kv, n, most, scores, out, d, y, y_stride, log2e, power_of_two);
}
