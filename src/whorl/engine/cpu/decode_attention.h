// The attention of attention.h for a few queries of one key head, without a copy of the keys: decoding, mostly.
//
// Three passes over up to 256 keys: all scores, one update of the running softmax, all values. Rows are read where they lie.
// A pass goes page by page, and through all key heads of the task in a page, since these are adjacent in memory. So a page is
// one stream of reads, which the CPU's prefetchers follow. Each block also prefetches the next one.
//
// int8 (cache/kv_int8.py) has one scale per row, a factor of a whole score or weight, so codes are multiplied as integers:
//
//     q . k = (q_codes . k_codes) q_scale k_scale         q_codes: 16 bits (vpdpwssd, sums of two products)
//     sum_p w_p v_p = w_scale sum_p w_codes v_codes       w_p = p v_scale; w_codes: 16 bits as two bytes (vpdpbusd, of four)
//
// The integer sums are exact; 16 bits round 250 times finer than the codes of keys and values. Other CPUs, and head_dims
// that are not whole registers, convert codes to fp32.
//
// Subtle: as in attention.h, rows outside of the visible positions may hold anything. Their scores are replaced. Their values
// are not read in floats; in int8, any code times a weight of 0 is 0.
#pragma once

#include "decode_blocks.h"

// As `soften` for a chunk. v_scale: of int8 values, or null. Weights p v_scale replace the scores; returns the largest of them.
INLINE float soften_chunk(float* scores, const float* v_scale, const Unit* units, int n_units, int from, int to, float softcap,
                          float& most, float& sum, float& correction) {
    correction = 1.0f;
    if (to <= from) {
        memset(scores, 0, size_t(n_units) * WIDTH * 4);
        return 0.0f;
    }
    Lanes highest = all(LOWEST), total{}, largest{};
    const auto partly = [&](int u) { return u * WIDTH < from || (u + 1) * WIDTH > to; };
    for (int u = 0; u < n_units; u++) {
        Lanes s = load_lanes(scores + u * WIDTH);
        if (softcap != 0) s = softcap * tanh_lanes(s / softcap);
        if (partly(u)) s = choose(seen_lanes(u * WIDTH, from, to), s, all(LOWEST));
        highest = max_lanes(highest, s);
        store(scores + u * WIDTH, s);
    }
    const float here = max_of(highest), now = here > most ? here : most;
    for (int u = 0; u < n_units; u++) {
        Lanes p = exp_lanes(load_lanes(scores + u * WIDTH) - now);
        if (partly(u)) p = choose(seen_lanes(u * WIDTH, from, to), p, Lanes{});
        total += p;
        if (v_scale) p *= units[u].scales(v_scale);
        if (v_scale && partly(u)) p = choose(seen_lanes(u * WIDTH, from, to), p, Lanes{});
        largest = max_lanes(largest, p);
        store(scores + u * WIDTH, p);
    }
    if (now != most) correction = exp_lanes(all(most - now))[0];
    sum = sum * correction + sum_lanes(total);
    most = now;
    return max_of(largest);
}

// x[n] in units of `scale`, rounded; n is a multiple of 16.
INLINE void to_codes(const float* x, int64_t n, float scale, int16_t* codes) {
    const Lanes magic = all(12582912.0f);  // 1.5 * 2^23
    for (int64_t c = 0; c < n; c += WIDTH)
        store_as(codes + c, (Ints)(load_lanes(x + c) / scale + magic) - (Ints)magic);
}
// The same for weights >= 0, as high and low bytes.
INLINE void to_byte_codes(const float* w, int n, float scale, uint8_t* high, uint8_t* low) {
    const float inverse = 1.0f / scale;
    for (int c = 0; c < n; c += WIDTH) {
        const Ints code = to_ints(load_lanes(w + c) * inverse + 0.5f);
        store_as(high + c, code >> 8);
        store_as(low + c, code & 255);
    }
}
INLINE float code_scale(float largest, float codes) { return (largest > 1e-30f ? largest : 1e-30f) / codes; }

// Scratch size for one key head, in floats.
INLINE int64_t few_attention_room(const Heads& h) {
    return round_up(FEW * (9 * h.head_dim / 2 + CHUNK + CHUNK / 2 + 5), WIDTH);
}

// The queries of one key head and their results so far.
template <class T>
struct FewQueries {
    const Heads& h;
    int64_t n, d;
    float *queries, *out, *sums, *scores, *most, *sum, *correction, *weight_scale, *query_scale;
    bf16* halves;
    int16_t* query_codes;  // in the place of `halves`
    uint8_t* weights;
    bool codes;

    FewQueries(const Heads& h, int64_t n, float* room) : h(h), n(n), d(h.head_dim), codes(sizeof(T) == 1 && multiplies_codes(h)) {
        const auto take = [&](int64_t size) {
            float* at = room;
            room += size;
            return at;
        };
        queries = take(n * d), out = take(n * d), sums = take(2 * n * d), scores = take(n * CHUNK);
        weights = (uint8_t*)take(n * CHUNK / 2);
        halves = (bf16*)take(n * d / 2), query_codes = (int16_t*)halves;
        most = take(n), sum = take(n), correction = take(n), weight_scale = take(n), query_scale = take(n);
    }

    INLINE void start(int64_t i, const float* from) {
        float* to = queries + i * d;
        Lanes largest{};
        for (int64_t c = 0; c < d; c += WIDTH) {
            const Lanes v = load_lanes(from + c) * h.scale;
            largest = max_lanes(largest, max_lanes(v, -v));
            store(to + c, v);
            store(out + i * d + c, Lanes{});
        }
        if (sizeof(T) == 2)
            for (int64_t c = 0; c < d; c++) halves[i * d + c] = narrow(to[c]);
        query_scale[i] = code_scale(max_of(largest), 32767);
        if (codes) to_codes(to, d, query_scale[i], query_codes + i * d);
        most[i] = LOWEST;
        sum[i] = 0;
    }

    // k_scale: of this head.
    INLINE void score(const Block<T>& block, const float* k_scale) {
        for (int u = block.start; u < block.stop; u++) {
            if (!BY_ROWS<T>) block.prefetch(u);
            const bool fetches = BY_ROWS<T> && u - block.start < block.next_size;
            const Unit& ahead = fetches ? block.next_units[u - block.start] : block.units[u];
            const T* from = fetches ? block.next : block.base;
            const auto fetch = [&](int j, int64_t c) { __builtin_prefetch(ahead.at(from, d, j) + c); };
            const auto nothing = [](int, int64_t) {};
            for (int64_t i = 0; i < n; i++) {
                const Query query{queries + i * d, halves + i * d, codes ? query_codes + i * d : nullptr, query_scale[i]};
                const Lanes s = BY_ROWS<T> && i == 0 ? unit_scores(query, d, block.base, block.units[u], fetch)
                                                     : unit_scores(query, d, block.base, block.units[u], nothing);
                store(scores + i * CHUNK + u * WIDTH, sizeof(T) == 1 ? s * block.units[u].scales(k_scale) : s);
            }
        }
    }

    // first: position of query 0 in the chunk; the last key of the chunk is to - 1.
    INLINE void soften(int64_t first, int from, int to, const float* v_scale, const Unit* units, int n_units) {
        const int64_t group = h.n_heads / h.n_kv_heads;
        for (int64_t i = 0; i < n; i++) {
            const int64_t own = first + i / group;
            const int low = h.window > 0 && own - h.window + 1 > from ? int(own - h.window + 1) : from;
            const int high = own + 1 < to ? int(own + 1) : to;
            const float largest = soften_chunk(scores + i * CHUNK, v_scale, units, n_units, low, high, h.softcap, most[i], sum[i],
                                               correction[i]);
            if (!codes) continue;
            weight_scale[i] = code_scale(largest, 65535);
            uint8_t* bytes = weights + 2 * i * CHUNK;
            to_byte_codes(scores + i * CHUNK, n_units * WIDTH, weight_scale[i], bytes, bytes + CHUNK);
        }
    }

    template <int QN>
    INLINE void add_values(const Block<T>& block, const Range& range, int64_t i) {
#ifdef WHORL_INTEGER_PRODUCTS
        if constexpr (sizeof(T) == 1)
            if (codes) {
                int32_t* totals = (int32_t*)sums + 2 * i * d;
                return chunk_code_values<QN>(block, range, weights + 2 * i * CHUNK, weight_scale + i, correction + i, totals, out + i * d);
            }
#endif
        chunk_values<QN>(block, range, scores + i * CHUNK, correction + i, sums + i * d, out + i * d);
    }

    INLINE void add_values(const Block<T>& block, const Range& range) {
        int64_t i = 0;
        if (codes)
            for (; i + 2 <= n; i += 2) add_values<2>(block, range, i);
        else
            for (constexpr int MANY = HELD >= 32 ? 4 : 1; i + MANY <= n; i += MANY) add_values<MANY>(block, range, i);
        for (; i < n; i++) add_values<1>(block, range, i);
    }
};

// Arguments as of `attend`, for `n_kv` key heads from `kv`; at most FEW queries of each, over pages that `attends_in_place`.
// room: `few_attention_room` for each head.
template <class T>
void attend_few(const Heads& h, const Cache<T>& cache, const int32_t* pages, int64_t kv, int n_kv, int64_t position,
                int64_t tokens, const float* q, int64_t q_stride, float* y, int64_t y_stride, float* room) {
    const int64_t group = h.n_heads / h.n_kv_heads, n = tokens * group, d = h.head_dim, head = h.page_size * d;
    const auto queries = [&](int i) { return FewQueries<T>(h, n, room + i * few_attention_room(h)); };
    for (int k = 0; k < n_kv; k++)
        for (int64_t i = 0; i < n; i++) queries(k).start(i, q + i / group * q_stride + (k * group + i % group) * d);
    const int64_t last = position + tokens - 1;
    const int64_t first = h.window > 0 && position - h.window + 1 > 0 ? position - h.window + 1 : 0;
    const int in_page = h.page_size / WIDTH, span = in_page < 1 ? 1 : in_page > MAX_SPAN ? MAX_SPAN : in_page;
    UnitWalk walk{h, pages, kv, first, last, first / RUN * RUN};
    Unit units[CHUNK_UNITS + MAX_SPAN];  // of the chunk, and the next ones
    int have = 0;
    for (int64_t start = first / RUN * RUN; start <= last; start += CHUNK) {
        const int from = int(first > start ? first - start : 0);
        const int to = int(last + 1 - start < CHUNK ? last + 1 - start : CHUNK);
        const int n_units = (to + WIDTH - 1) / WIDTH;
        while (have < n_units + span) units[have++] = walk.next();
        const auto scales = [&](const float* base, int k) { return base + k * h.page_size; };
        each_block(cache.k, units, n_units, span, n_kv, head, d, cache.v, units, [&](const Block<T>& block, int k) {
            queries(k).score(block, scales(cache.k_scale, k));
        });
        for (int k = 0; k < n_kv; k++)
            queries(k).soften(position - start, from, to, sizeof(T) == 1 ? scales(cache.v_scale, k) : nullptr, units, n_units);
        each_block(cache.v, units, n_units, span, n_kv, head, d, cache.k, units + n_units, [&](const Block<T>& block, int k) {
            queries(k).add_values(block, {from, to, block.start == 0, block.stop == n_units});
        });
        have -= n_units;
        for (int u = 0; u < have; u++) units[u] = units[n_units + u];
    }
    for (int k = 0; k < n_kv; k++) {
        const FewQueries<T> done = queries(k);
        divide_by_sums(h, kv + k, n, done.most, done.sum, done.out, d, y + k * group * d, y_stride);
    }
}
