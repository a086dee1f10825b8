// Causal attention over pages, for one key head of one row: a decoding token or a piece of a prompt, the same code.
//
// Keys and values of a layer lie in pages [n_pages, n_kv_heads, page_size, head_dim]; position p of a row is in the page
// pages[p / page_size] of its table. The keys of a row are gone through in tiles of 32, with the softmax kept as a running
// maximum and sum (Milakov & Gimelshein 2018, arXiv:1805.02867, algorithm 3; Dao et al. 2022, FlashAttention,
// arXiv:2205.14135, algorithm 1), so that no row of scores is ever written:
//
//     m' = max(m, max_j s_j),  c = e^(m - m'),  p_j = e^(s_j - m')
//     l' = c l + sum_j p_j,    o' = c o + sum_j p_j v_j            and at the end y = o / l
//
// All query heads that share the key head are done together, so a key is read once for all of them. Up to three queries
// take their products straight from the keys; more than that are worth a transposed copy of the tile, [head_dim][32], from
// which 8 queries by 32 keys are summed in registers without a single horizontal sum.
//
// Subtle: no position is read that the row does not have, and none before its window: free pages may hold anything (NaN in
// the tests), and pages that have left the window may be gone from the table.
#pragma once

#include "lanes.h"


constexpr int KEYS = 32;      // a tile
constexpr int QUERIES = 32;   // a task has at most so many, or one token's
constexpr float LOWEST = -1e30f;

struct Heads {
    int32_t n_heads, n_kv_heads, head_dim, page_size;
    int64_t window;  // 0: all
    float scale, softcap;
    const float* sink;  // [n_heads] or null
};

template <class T>
struct Cache {
    T *k, *v;
    int64_t page, head, position;  // strides, in elements

    INLINE int64_t at(const Heads& h, const int32_t* pages, int64_t kv, int64_t p) const {
        return pages[p / h.page_size] * page + kv * head + p % h.page_size * position;
    }
};

// Floats of scratch that `attend` wants.
INLINE int64_t attention_room(const Heads& h, int64_t queries) {
    const int64_t d = (h.head_dim + WIDTH - 1) / WIDTH * WIDTH;
    return 2 * queries * d + queries * (KEYS + 4) + 3 * KEYS * d;
}

// in: 16 rows of 16 -> out: their columns, `stride` apart.
INLINE void transpose16(Lanes* v, float* out, int64_t stride) {
    Lanes w[WIDTH];
    UNROLL for (int i = 0; i < 8; i++) {
        w[2 * i] = __builtin_shufflevector(v[i], v[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        w[2 * i + 1] = __builtin_shufflevector(v[i], v[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
    UNROLL for (int round = 0; round < 3; round++) {  // four perfect shuffles of 16 rows are a transpose
        UNROLL16 for (int i = 0; i < WIDTH; i++) v[i] = w[i];
        UNROLL for (int i = 0; i < 8; i++) {
            w[2 * i] = __builtin_shufflevector(v[i], v[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            w[2 * i + 1] = __builtin_shufflevector(v[i], v[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
    }
    UNROLL16 for (int i = 0; i < WIDTH; i++) store(out + i * stride, w[i]);
}

// One row in fp32, padded with zeros.
template <class T>
INLINE const float* widened(const T* from, int64_t head_dim, float* to) {
    int64_t c = 0;
    for (; c + WIDTH <= head_dim; c += WIDTH) store(to + c, load_lanes(from + c));
    if (c < head_dim) store(to + c, load_some(from + c, int(head_dim - c)));
    return to;
}

// 32 rows of d -> [d][32].
template <class T>
INLINE void turn_keys(const T* const* k, int64_t d, float* turned) {
    Lanes rows[WIDTH];
    for (int side = 0; side < KEYS; side += WIDTH)
        for (int64_t c = 0; c < d; c += WIDTH) {
            UNROLL16 for (int j = 0; j < WIDTH; j++) rows[j] = load_lanes(k[side + j] + c);
            transpose16(rows, turned + c * KEYS + side, KEYS);
        }
}

// scores[32] of one query, straight from 32 rows: 16 sums side by side in registers, then all their lanes at once.
template <class T>
INLINE void few_scores(const float* q, int64_t d, const T* const* k, float* scores) {
    for (int side = 0; side < KEYS; side += WIDTH) {
        Lanes rows[WIDTH];
        UNROLL16 for (int j = 0; j < WIDTH; j++) rows[j] = Lanes{};
        for (int64_t c = 0; c < d; c += WIDTH) {
            const Lanes part = load_lanes(q + c);
            UNROLL16 for (int j = 0; j < WIDTH; j++) rows[j] += load_lanes(k[side + j] + c) * part;
        }
        store(scores + side, sums16(rows));
    }
}

// scores[QN][32] of queries q[QN][d] and turned keys [d][32].
template <int QN>
INLINE void scores_of(const float* q, int64_t d, const float* turned, float* scores) {
    Lanes low[QN], high[QN];
    UNROLL for (int i = 0; i < QN; i++) low[i] = high[i] = Lanes{};
    for (int64_t c = 0; c < d; c++) {
        const Lanes a = load_lanes(turned + c * KEYS), b = load_lanes(turned + c * KEYS + WIDTH);
        UNROLL for (int i = 0; i < QN; i++) {
            low[i] += a * q[i * d + c];
            high[i] += b * q[i * d + c];
        }
    }
    UNROLL for (int i = 0; i < QN; i++) {
        store(scores + i * KEYS, low[i]);
        store(scores + i * KEYS + WIDTH, high[i]);
    }
}

// out[QN][N * 16] = out * correction + p[QN][keys] v[keys][N * 16], columns of rows `d` wide.
template <int QN, int N, class T>
INLINE void values_of(const float* p, const float* correction, const T* const* v, int64_t column, int from, int to,
                      float* out, int64_t d) {
    Lanes acc[QN][N];
    UNROLL for (int i = 0; i < QN; i++)
        UNROLL for (int c = 0; c < N; c++) acc[i][c] = load_lanes(out + i * d + column + c * WIDTH) * correction[i];
    for (int j = from; j < to; j++) {
        UNROLL for (int c = 0; c < N; c++) {
            const Lanes value = load_lanes(v[j] + column + c * WIDTH);
            UNROLL for (int i = 0; i < QN; i++) acc[i][c] += value * p[i * KEYS + j];
        }
    }
    UNROLL for (int i = 0; i < QN; i++)
        UNROLL for (int c = 0; c < N; c++) store(out + i * d + column + c * WIDTH, acc[i][c]);
}

template <int QN, class T>
INLINE void all_values_of(const float* p, const float* correction, const T* const* v, int from, int to, float* out,
                          int64_t d) {
    int64_t column = 0;
    for (; column + 4 * WIDTH <= d; column += 4 * WIDTH) values_of<QN, 4>(p, correction, v, column, from, to, out, d);
    for (; column < d; column += WIDTH) values_of<QN, 1>(p, correction, v, column, from, to, out, d);
}

// One query's scores of a tile -> probabilities against its running maximum, in place; returns the correction.
// [from, to): the keys that it sees.
INLINE float soften(float* scores, int from, int to, float softcap, float& most, float& sum) {
    if (to <= from) {
        store(scores, Lanes{});
        store(scores + WIDTH, Lanes{});
        return 1.0f;
    }
    const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Lanes s[2];
    Ints seen[2];
    for (int h = 0; h < 2; h++) {
        s[h] = load_lanes(scores + h * WIDTH);
        if (softcap != 0) s[h] = softcap * tanh_lanes(s[h] / softcap);
        seen[h] = (lane + h * WIDTH >= from) & (lane + h * WIDTH < to);
        s[h] = seen[h] ? s[h] : all(LOWEST);
    }
    const float highest = max_of(max_lanes(s[0], s[1]));
    const float now = highest > most ? highest : most;
    const Lanes p[2] = {exp_lanes(s[0] - now), exp_lanes(s[1] - now)};
    Lanes total{};
    for (int h = 0; h < 2; h++) {
        const Lanes kept = (Lanes)((Ints)p[h] & seen[h]);
        store(scores + h * WIDTH, kept);
        total += kept;
    }
    const float correction = now == most ? 1.0f : exp_lanes(all(most - now))[0];
    sum = sum * correction + sum_lanes(total);
    most = now;
    return correction;
}

// q: [tokens][q_stride] from the first of the group's heads; y: [tokens][y_stride], the same; position: of the first token.
template <class T>
void attend(const Heads& h, const Cache<T>& cache, const int32_t* pages, int64_t kv, int64_t position, int64_t tokens,
            const float* q, int64_t q_stride, float* y, int64_t y_stride, float* room) {
    const int64_t group = h.n_heads / h.n_kv_heads, n = tokens * group;
    const int64_t d = (h.head_dim + WIDTH - 1) / WIDTH * WIDTH;
    float *queries = room, *out = queries + n * d, *scores = out + n * d, *most = scores + n * KEYS, *sum = most + n,
          *correction = sum + n, *turned = correction + 2 * n, *values = turned + KEYS * d, *keys = values + KEYS * d;
    for (int64_t i = 0; i < n; i++) {
        const float* from = q + i / group * q_stride + i % group * h.head_dim;
        for (int64_t c = 0; c < d; c++) queries[i * d + c] = c < h.head_dim ? from[c] * h.scale : 0.0f;
        for (int64_t c = 0; c < d; c++) out[i * d + c] = 0;
        most[i] = LOWEST;
        sum[i] = 0;
    }
    const bool whole = h.head_dim % WIDTH == 0, many = n > 3;
    const int64_t last = position + tokens - 1;
    const int64_t first = h.window > 0 && position - h.window + 1 > 0 ? position - h.window + 1 : 0;
    for (int64_t start = first / KEYS * KEYS; start <= last; start += KEYS) {
        const int from = int(first > start ? first - start : 0);
        const int to = int(last + 1 - start < KEYS ? last + 1 - start : KEYS);
        // Rows of the tile; those that are not seen are given the address of one that is, and masked below.
        const T *k[KEYS], *v[KEYS];
        for (int j = from; j < to;) {
            const int64_t p = start + j, place = p % h.page_size, at = cache.at(h, pages, kv, p);
            const int run = int(h.page_size - place < to - j ? h.page_size - place : to - j);
            // The next page in time: it may be anywhere, and one head's part of it is too short for the prefetcher.
            if (j + run == to && start + to <= last) {
                const int64_t next = cache.at(h, pages, kv, start + to);
                for (int64_t b = 0; b < KEYS * h.head_dim; b += 64 / int64_t(sizeof(T))) {
                    __builtin_prefetch(cache.k + next + b, 0, 2);
                    __builtin_prefetch(cache.v + next + b, 0, 2);
                }
            }
            for (int i = 0; i < run; i++) {
                k[j + i] = cache.k + at + i * cache.position;
                v[j + i] = cache.v + at + i * cache.position;
            }
            j += run;
        }
        for (int j = 0; j < from; j++) k[j] = k[from];
        for (int j = to; j < KEYS; j++) k[j] = k[from];
        const float *wide_k[KEYS], *wide_v[KEYS];
        if (many || !whole)
            for (int j = from; j < to; j++) wide_v[j] = widened(v[j], h.head_dim, values + j * d);
        if (!whole) {
            for (int j = from; j < to; j++) wide_k[j] = widened(k[j], h.head_dim, keys + j * d);
            for (int j = 0; j < from; j++) wide_k[j] = wide_k[from];
            for (int j = to; j < KEYS; j++) wide_k[j] = wide_k[from];
        }
        if (many) {
            if (whole)
                turn_keys(k, d, turned);
            else
                turn_keys(wide_k, d, turned);
            int64_t i = 0;
            for (; i + 8 <= n; i += 8) scores_of<8>(queries + i * d, d, turned, scores + i * KEYS);
            for (; i + 4 <= n; i += 4) scores_of<4>(queries + i * d, d, turned, scores + i * KEYS);
            for (; i < n; i++) scores_of<1>(queries + i * d, d, turned, scores + i * KEYS);
        } else {
            for (int64_t i = 0; i < n; i++) {
                if (whole)
                    few_scores(queries + i * d, d, k, scores + i * KEYS);
                else
                    few_scores(queries + i * d, d, wide_k, scores + i * KEYS);
            }
        }
        for (int64_t i = 0; i < n; i++) {
            const int64_t own = position + i / group - start;  // its own place in the tile
            const int low = h.window > 0 && own - h.window + 1 > from ? int(own - h.window + 1) : from;
            const int high = own + 1 < to ? int(own + 1) : to;
            correction[i] = soften(scores + i * KEYS, low, high, h.softcap, most[i], sum[i]);
        }
        int64_t i = 0;
        if (many || !whole) {
            for (; i + 4 <= n; i += 4)
                all_values_of<4>(scores + i * KEYS, correction + i, wide_v, from, to, out + i * d, d);
            for (; i < n; i++) all_values_of<1>(scores + i * KEYS, correction + i, wide_v, from, to, out + i * d, d);
        } else {
            for (; i < n; i++) all_values_of<1>(scores + i * KEYS, correction + i, v, from, to, out + i * d, d);
        }
    }
    for (int64_t i = 0; i < n; i++) {
        float total = sum[i];
        if (h.sink) {
            const float sink = h.sink[kv * group + i % group], now = sink > most[i] ? sink : most[i];
            const float shrink = exp_lanes(all(most[i] - now))[0];
            total = total * shrink + exp_lanes(all(sink - now))[0];
            for (int64_t c = 0; c < d; c++) out[i * d + c] *= shrink;
        }
        float* to = y + i / group * y_stride + i % group * h.head_dim;
        for (int64_t c = 0; c < h.head_dim; c++) to[c] = out[i * d + c] / total;
    }
}
