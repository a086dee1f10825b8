// Causal attention over pages, for one key head of one row: the same code for a decoding token and a prefill chunk.
//
// Keys and values are in pages [n_pages, n_kv_heads, page_size, head_dim]; position p of a row is in page
// pages[p / page_size] of its table. The keys of a row are read in tiles of 32. The softmax is a running maximum and sum
// (Milakov & Gimelshein 2018, arXiv:1805.02867, algorithm 3; Dao et al. 2022, FlashAttention, arXiv:2205.14135,
// algorithm 1), so no row of scores is ever written:
//
//     m' = max(m, max_j s_j),  c = e^(m - m'),  p_j = e^(s_j - m')
//     l' = c l + sum_j p_j,    o' = c o + sum_j p_j v_j            and at the end y = o / l
//
// All query heads that share the key head run together, so a key is read once for all of them. Up to three queries use the
// keys in place. More queries use a transposed copy of the tile, [head_dim][32]: 8 queries by 32 keys are summed in
// registers without a horizontal sum.
//
// Subtle: positions outside of the row or of its window never enter a sum. The rest of a page may hold anything (NaN in the
// tests), and pages outside of the window may be missing from the table.
#pragma once

#include "lanes.h"


constexpr int KEYS = 32;      // keys per tile
constexpr int QUERIES = 32;   // maximum queries of a task
constexpr float LOWEST = -1e30f;

struct Heads {
    int32_t n_heads, n_kv_heads, head_dim, page_size;
    int64_t window;  // 0: full attention
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

// Scratch size of `attend`, in floats.
INLINE int64_t attention_room(const Heads& h, int64_t queries) {
    const int64_t d = (h.head_dim + WIDTH - 1) / WIDTH * WIDTH;
    return 3 * queries * d + queries * (KEYS + 4) + 3 * KEYS * d;
}

// Transpose: in 16 rows of 16 -> out, with distance `stride` between columns.
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

// Convert one row to fp32, padded with zeros.
template <class T>
INLINE const float* widened(const T* from, int64_t head_dim, float* to) {
    int64_t c = 0;
    for (; c + WIDTH <= head_dim; c += WIDTH) store(to + c, load_lanes(from + c));
    if (c < head_dim) store(to + c, load_some(from + c, int(head_dim - c)));
    return to;
}

// Transpose 32 rows of d, at distance `stride` -> [d][32].
template <class T>
INLINE void turn_keys(const T* k, int64_t stride, int64_t d, float* turned) {
    Lanes rows[WIDTH];
    for (int side = 0; side < KEYS; side += WIDTH)
        for (int64_t c = 0; c < d; c += WIDTH) {
            UNROLL16 for (int j = 0; j < WIDTH; j++) rows[j] = load_lanes(k + (side + j) * stride + c);
            transpose16(rows, turned + c * KEYS + side, KEYS);
        }
}

INLINE void fetch(const void* from, int64_t bytes) {
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch((const char*)from + b);
}

// scores[32] of one query from 32 rows in place: 16 sums in registers, then the sums of their lanes. The rows of the next
// tile are prefetched.
template <class T>
INLINE void few_scores(const float* q, const bf16* short_q, int64_t d, const T* k, const T* next, int64_t stride,
                       float* scores) {
    (void)short_q;
    for (int side = 0; side < KEYS; side += WIDTH) {
        Lanes rows[WIDTH];
        UNROLL16 for (int j = 0; j < WIDTH; j++) rows[j] = Lanes{};
        int64_t c = 0;
#ifdef __AVX512BF16__
        if (sizeof(T) == 2)  // two features per lane, exact products; the query is rounded as in torch
            for (; c + 2 * WIDTH <= d; c += 2 * WIDTH) {
                const __m512bh part = (__m512bh)load<Bits>(short_q + c);
                UNROLL16 for (int j = 0; j < WIDTH; j++)
                    rows[j] = (Lanes)_mm512_dpbf16_ps((__m512)rows[j], (__m512bh)load<Bits>(k + (side + j) * stride + c), part);
            }
#endif
        for (; c < d; c += WIDTH) {
            const Lanes part = load_lanes(q + c);
            UNROLL16 for (int j = 0; j < WIDTH; j++) rows[j] += load_lanes(k + (side + j) * stride + c) * part;
        }
        for (int j = 0; j < WIDTH; j++) fetch(next + (side + j) * stride, d * int64_t(sizeof(T)));
        store(scores + side, sums16(rows));
    }
}

// scores[QN][32] of queries q[QN][d] and transposed keys [d][32].
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
INLINE void values_of(const float* p, const float* correction, const T* v, const T* next, int64_t stride, int64_t column,
                      int from, int to, float* out, int64_t d) {
    Lanes acc[QN][N];
    UNROLL for (int i = 0; i < QN; i++)
        UNROLL for (int c = 0; c < N; c++) acc[i][c] = load_lanes(out + i * d + column + c * WIDTH) * correction[i];
    for (int j = from; j < to; j++) {
        if (QN == 1) fetch(next + j * stride + column, N * WIDTH * int64_t(sizeof(T)));
        UNROLL for (int c = 0; c < N; c++) {
            const Lanes value = load_lanes(v + j * stride + column + c * WIDTH);
            UNROLL for (int i = 0; i < QN; i++) acc[i][c] += value * p[i * KEYS + j];
        }
    }
    UNROLL for (int i = 0; i < QN; i++)
        UNROLL for (int c = 0; c < N; c++) store(out + i * d + column + c * WIDTH, acc[i][c]);
}

template <int QN, class T>
INLINE void all_values_of(const float* p, const float* correction, const T* v, const T* next, int64_t stride, int from,
                          int to, float* out, int64_t d) {
    int64_t column = 0;
    for (; column + 4 * WIDTH <= d; column += 4 * WIDTH)
        values_of<QN, 4>(p, correction, v, next, stride, column, from, to, out, d);
    for (; column < d; column += WIDTH) values_of<QN, 1>(p, correction, v, next, stride, column, from, to, out, d);
}

// Convert one query's scores of a tile to probabilities relative to its running maximum, in place; returns the correction.
// [from, to): the visible keys.
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

// q: [tokens][q_stride] from the first head of the group; y: [tokens][y_stride], likewise; position: of the first token.
template <class T>
void attend(const Heads& h, const Cache<T>& cache, const int32_t* pages, int64_t kv, int64_t position, int64_t tokens,
            const float* q, int64_t q_stride, float* y, int64_t y_stride, float* room) {
    const int64_t group = h.n_heads / h.n_kv_heads, n = tokens * group;
    const int64_t d = (h.head_dim + WIDTH - 1) / WIDTH * WIDTH;
    float *queries = room, *out = queries + n * d, *scores = out + n * d, *most = scores + n * KEYS, *sum = most + n,
          *correction = sum + n, *turned = correction + 2 * n, *keys = turned + KEYS * d, *values = keys + KEYS * d;
    bf16* short_q = (bf16*)(values + KEYS * d);
    for (int64_t i = 0; i < n; i++) {
        const float* from = q + i / group * q_stride + i % group * h.head_dim;
        for (int64_t c = 0; c < d; c++) queries[i * d + c] = c < h.head_dim ? from[c] * h.scale : 0.0f;
        if (sizeof(T) == 2)
            for (int64_t c = 0; c < d; c++) short_q[i * d + c] = narrow(queries[i * d + c]);
        for (int64_t c = 0; c < d; c++) out[i * d + c] = 0;
        most[i] = LOWEST;
        sum[i] = 0;
    }
    // A tile within one page is read in place; others are copied, in fp32 and padded.
    const bool in_place = h.head_dim % WIDTH == 0 && h.page_size % KEYS == 0, many = n > 3;
    const int64_t last = position + tokens - 1, stride = cache.position;
    const int64_t first = h.window > 0 && position - h.window + 1 > 0 ? position - h.window + 1 : 0;
    for (int64_t start = first / KEYS * KEYS; start <= last; start += KEYS) {
        const int from = int(first > start ? first - start : 0);
        const int to = int(last + 1 - start < KEYS ? last + 1 - start : KEYS);
        const int64_t here = in_place ? cache.at(h, pages, kv, start) : 0;
        const int64_t then = in_place && start + KEYS <= last ? cache.at(h, pages, kv, start + KEYS) : here;
        const T *k = cache.k + here, *v = cache.v + here;
        if (!in_place) {
            for (int j = 0; j < KEYS; j++) {
                if (j < from || j >= to) {
                    for (int64_t c = 0; c < d; c++) keys[j * d + c] = 0;
                    continue;
                }
                const int64_t at = cache.at(h, pages, kv, start + j);
                widened(cache.k + at, h.head_dim, keys + j * d);
                widened(cache.v + at, h.head_dim, values + j * d);
            }
        } else if (many) {
            for (int j = from; j < to; j++) widened(v + j * stride, h.head_dim, values + j * d);
        }
        if (many) {
            if (in_place)
                turn_keys(k, stride, d, turned);
            else
                turn_keys(keys, d, d, turned);
            int64_t i = 0;
            for (; i + 8 <= n; i += 8) scores_of<8>(queries + i * d, d, turned, scores + i * KEYS);
            for (; i + 4 <= n; i += 4) scores_of<4>(queries + i * d, d, turned, scores + i * KEYS);
            for (; i < n; i++) scores_of<1>(queries + i * d, d, turned, scores + i * KEYS);
        } else {
            for (int64_t i = 0; i < n; i++) {
                if (in_place)
                    few_scores(queries + i * d, short_q + i * d, d, k, cache.k + then, stride, scores + i * KEYS);
                else
                    few_scores(queries + i * d, short_q + i * d, d, keys, keys, d, scores + i * KEYS);
            }
        }
        for (int64_t i = 0; i < n; i++) {
            const int64_t own = position + i / group - start;  // position in the tile
            const int low = h.window > 0 && own - h.window + 1 > from ? int(own - h.window + 1) : from;
            const int high = own + 1 < to ? int(own + 1) : to;
            correction[i] = soften(scores + i * KEYS, low, high, h.softcap, most[i], sum[i]);
        }
        int64_t i = 0;
        if (many || !in_place) {
            for (; i + 4 <= n; i += 4)
                all_values_of<4>(scores + i * KEYS, correction + i, values, values, d, from, to, out + i * d, d);
            for (; i < n; i++)
                all_values_of<1>(scores + i * KEYS, correction + i, values, values, d, from, to, out + i * d, d);
        } else {
            for (; i < n; i++)
                all_values_of<1>(scores + i * KEYS, correction + i, v, cache.v + then, stride, from, to, out + i * d, d);
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
