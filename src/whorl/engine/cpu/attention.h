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
// All query heads that share the key head run together, so a key is read once for all of them. Keys are transposed to
// [head_dim][32]: 8 queries by 32 keys are summed in registers without a horizontal sum. Up to three queries use a plain
// copy. `attend_few` (decode_attention.h) needs no copy, for few queries and whole vectors.
//
// Keys and values in int8 have a scale per row (cache/kv_int8.py): a factor of a score, and of a probability.
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
    float *k_scale, *v_scale;      // of int8: [n_pages][n_kv_heads][page_size], else null
    int64_t page, head, position;  // strides, in elements

    INLINE int64_t at(const Heads& h, const int32_t* pages, int64_t kv, int64_t p) const {
        return pages[p / h.page_size] * page + kv * head + p % h.page_size * position;
    }
};

// Scratch size of `attend`, in floats.
INLINE int64_t attention_room(const Heads& h, int64_t queries) {
    const int64_t d = (h.head_dim + WIDTH - 1) / WIDTH * WIDTH;
    return 2 * queries * d + queries * (KEYS + 5) + 3 * KEYS * d;
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

constexpr int TOGETHER = HELD >= 32 ? WIDTH : HELD / 2;  // keys whose sums stay in registers

// scores[32] of one query from 32 rows: 16 sums, then the sums of their lanes.
INLINE void few_scores(const float* q, int64_t d, const float* k, float* scores) {
    for (int side = 0; side < KEYS; side += WIDTH) {
        Lanes rows[WIDTH];
        for (int first = 0; first < WIDTH; first += TOGETHER) {
            Lanes sums[TOGETHER];
            UNROLL16 for (int j = 0; j < TOGETHER; j++) sums[j] = Lanes{};
            for (int64_t c = 0; c < d; c += WIDTH) {
                const Lanes part = load_lanes(q + c);
                UNROLL16 for (int j = 0; j < TOGETHER; j++) sums[j] += load_lanes(k + (side + first + j) * d + c) * part;
            }
            UNROLL16 for (int j = 0; j < TOGETHER; j++) rows[first + j] = sums[j];
        }
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
template <int QN, int N>
INLINE void values_of(const float* p, const float* correction, const float* v, int64_t column, int from, int to, float* out,
                      int64_t d) {
    Lanes acc[QN][N];
    UNROLL for (int i = 0; i < QN; i++)
        UNROLL for (int c = 0; c < N; c++) acc[i][c] = load_lanes(out + i * d + column + c * WIDTH) * correction[i];
    for (int j = from; j < to; j++) {
        UNROLL for (int c = 0; c < N; c++) {
            const Lanes value = load_lanes(v + j * d + column + c * WIDTH);
            UNROLL for (int i = 0; i < QN; i++) acc[i][c] += value * p[i * KEYS + j];
        }
    }
    UNROLL for (int i = 0; i < QN; i++)
        UNROLL for (int c = 0; c < N; c++) store(out + i * d + column + c * WIDTH, acc[i][c]);
}

template <int QN>
INLINE void all_values_of(const float* p, const float* correction, const float* v, int from, int to, float* out, int64_t d) {
    int64_t column = 0;
    constexpr int N = HELD >= 32 ? 4 : QN > 1 ? 2 : 4;
    for (; column + N * WIDTH <= d; column += N * WIDTH) values_of<QN, N>(p, correction, v, column, from, to, out, d);
    for (; column < d; column += WIDTH) values_of<QN, 1>(p, correction, v, column, from, to, out, d);
}

// Whether keys start .. start + 15 are in [from, to).
INLINE Ints seen_lanes(int start, int from, int to) {
    const Ints key = lane_numbers() + start;
    return (key >= from) & (key < to);
}

// Convert one query's scores of a tile to probabilities relative to its running maximum, in place; returns the correction.
// [from, to) are the visible keys. `scales` of int8 keys and values are [2][32], or null. Those of values become a factor of the
// result.
INLINE float soften(float* scores, const float* scales, int from, int to, float softcap, float& most, float& sum) {
    if (to <= from) {
        store(scores, Lanes{});
        store(scores + WIDTH, Lanes{});
        return 1.0f;
    }
    Lanes s[2];
    Ints seen[2];
    for (int h = 0; h < 2; h++) {
        s[h] = load_lanes(scores + h * WIDTH);
        if (scales) s[h] *= load_lanes(scales + h * WIDTH);
        if (softcap != 0) s[h] = softcap * tanh_lanes(s[h] / softcap);
        seen[h] = seen_lanes(h * WIDTH, from, to);
        s[h] = choose(seen[h], s[h], all(LOWEST));
    }
    const float highest = max_of(max_lanes(s[0], s[1]));
    const float now = highest > most ? highest : most;
    const Lanes p[2] = {exp_lanes(s[0] - now), exp_lanes(s[1] - now)};
    Lanes total{};
    for (int h = 0; h < 2; h++) {
        const Lanes weighted = scales ? p[h] * load_lanes(scales + KEYS + h * WIDTH) : p[h];
        store(scores + h * WIDTH, (Lanes)((Ints)weighted & seen[h]));
        total += (Lanes)((Ints)p[h] & seen[h]);
    }
    const float correction = now == most ? 1.0f : exp_lanes(all(most - now))[0];
    sum = sum * correction + sum_lanes(total);
    most = now;
    return correction;
}

// y = out / sum for the n queries of a key head; a sink is one more number in the sum. d: width of `out`.
// `most` is in units of 1 / unit, in which `power` computes e^x.
INLINE void divide_by_sums(const Heads& h, int64_t kv, int64_t n, const float* most, const float* sum, float* out, int64_t d,
                           float* y, int64_t y_stride, float unit = 1.0f, Lanes (*power)(Lanes) = exp_lanes) {
    const int64_t group = h.n_heads / h.n_kv_heads;
    for (int64_t i = 0; i < n; i++) {
        float total = sum[i];
        if (h.sink) {
            const float sink = h.sink[kv * group + i % group] * unit, now = sink > most[i] ? sink : most[i];
            const float shrink = power(all(most[i] - now))[0];
            total = total * shrink + power(all(sink - now))[0];
            for (int64_t c = 0; c < d; c++) out[i * d + c] *= shrink;
        }
        float* to = y + i / group * y_stride + i % group * h.head_dim;
        for (int64_t c = 0; c < h.head_dim; c++) to[c] = out[i * d + c] / total;
    }
}

// q: [tokens][q_stride] from the first head of the group; y: [tokens][y_stride], likewise; position: of the first token.
template <class T>
void attend(const Heads& h, const Cache<T>& cache, const int32_t* pages, int64_t kv, int64_t position, int64_t tokens,
            const float* q, int64_t q_stride, float* y, int64_t y_stride, float* room) {
    const int64_t group = h.n_heads / h.n_kv_heads, n = tokens * group;
    const int64_t d = (h.head_dim + WIDTH - 1) / WIDTH * WIDTH;
    float *queries = room, *out = queries + n * d, *scores = out + n * d, *most = scores + n * KEYS, *sum = most + n,
          *correction = sum + n, *turned = correction + 2 * n, *keys = turned + KEYS * d, *values = keys + KEYS * d;
    float scales[2 * KEYS] = {};
    for (int64_t i = 0; i < n; i++) {
        const float* from = q + i / group * q_stride + i % group * h.head_dim;
        for (int64_t c = 0; c < d; c++) queries[i * d + c] = c < h.head_dim ? from[c] * h.scale : 0.0f;
        for (int64_t c = 0; c < d; c++) out[i * d + c] = 0;
        most[i] = LOWEST;
        sum[i] = 0;
    }
    // The keys of a tile within one page are transposed from there; others are copied, in fp32 and padded.
    const bool in_place = h.head_dim % WIDTH == 0 && h.page_size % KEYS == 0, many = n > 3;
    const int64_t last = position + tokens - 1;
    const int64_t first = h.window > 0 && position - h.window + 1 > 0 ? position - h.window + 1 : 0;
    for (int64_t start = first / KEYS * KEYS; start <= last; start += KEYS) {
        const int from = int(first > start ? first - start : 0);
        const int to = int(last + 1 - start < KEYS ? last + 1 - start : KEYS);
        for (int j = 0; j < KEYS; j++) {
            if (j < from || j >= to) {
                for (int64_t c = 0; c < d; c++) keys[j * d + c] = 0;
                continue;
            }
            const int64_t at = cache.at(h, pages, kv, start + j);
            if (!many || !in_place) widened(cache.k + at, h.head_dim, keys + j * d);
            widened(cache.v + at, h.head_dim, values + j * d);
            if (sizeof(T) == 1) {
                scales[j] = cache.k_scale[at / h.head_dim];
                scales[KEYS + j] = cache.v_scale[at / h.head_dim];
            }
        }
        if (many) {
            if (in_place)
                turn_keys(cache.k + cache.at(h, pages, kv, start), cache.position, d, turned);
            else
                turn_keys(keys, d, d, turned);
            int64_t i = 0;
            constexpr int MANY = HELD / 4;
            for (; i + MANY <= n; i += MANY) scores_of<MANY>(queries + i * d, d, turned, scores + i * KEYS);
            for (; HELD >= 32 && i + 4 <= n; i += 4) scores_of<4>(queries + i * d, d, turned, scores + i * KEYS);
            for (; i < n; i++) scores_of<1>(queries + i * d, d, turned, scores + i * KEYS);
        } else {
            for (int64_t i = 0; i < n; i++) few_scores(queries + i * d, d, keys, scores + i * KEYS);
        }
        for (int64_t i = 0; i < n; i++) {
            const int64_t own = position + i / group - start;  // position in the tile
            const int low = h.window > 0 && own - h.window + 1 > from ? int(own - h.window + 1) : from;
            const int high = own + 1 < to ? int(own + 1) : to;
            correction[i] = soften(scores + i * KEYS, sizeof(T) == 1 ? scales : nullptr, low, high, h.softcap, most[i], sum[i]);
        }
        int64_t i = 0;
        constexpr int MANY = HELD >= 32 ? 4 : 2;
        for (; i + MANY <= n; i += MANY) all_values_of<MANY>(scores + i * KEYS, correction + i, values, from, to, out + i * d, d);
        for (; i < n; i++) all_values_of<1>(scores + i * KEYS, correction + i, values, from, to, out + i * d, d);
    }
    divide_by_sums(h, kv, n, most, sum, out, d, y, y_stride);
}
