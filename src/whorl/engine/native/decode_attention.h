// The attention of attention.h for a few queries of one key head, without a copy of the keys: decoding, mostly.
//
// Three passes over up to 256 keys: all scores, one update of the running softmax, all values. Rows are read where they lie,
// and those some kilobytes ahead are prefetched: the keys of a chunk, its values, the keys of the next chunk.
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

#include "attention.h"
#include "tiles.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define WHORL_INTEGER_PRODUCTS 1
#endif

constexpr int FEW = 8;  // maximum queries
constexpr int RUN = 8;  // rows that are always in one page
constexpr int CHUNK = 256, CHUNK_UNITS = CHUNK / WIDTH;
constexpr int64_t AHEAD_BYTES = 4096;  // of prefetches
constexpr int MAX_AHEAD = 8;           // units

INLINE bool attends_in_place(const Heads& h) { return h.head_dim % WIDTH == 0 && h.page_size % RUN == 0; }

// The maximum dimension keeps a sum of `q_codes . k_codes` below 2^31.
INLINE bool multiplies_codes(const Heads& h) {
#ifdef WHORL_INTEGER_PRODUCTS
    return h.head_dim % 64 == 0 && h.head_dim <= 512;
#else
    return false;
#endif
}

// Sixteen rows of d: two runs of eight, that begin at these rows of the tensor.
struct Unit {
    int64_t row[2];

    template <class T>
    INLINE const T* at(const T* base, int64_t d, int j) const { return base + (row[j / RUN] + j % RUN) * d; }

    // To the second-level cache: prefetches to the first wait for its few buffers.
    template <class T>
    INLINE void prefetch(const T* base, int64_t d) const {
        for (int64_t from : row)
            for (int64_t b = 0; b < RUN * d * int64_t(sizeof(T)); b += 64)
                __builtin_prefetch((const char*)(base + from * d) + b, 0, 1);
    }

    INLINE Lanes scales(const float* base) const {
        typedef float Half __attribute__((vector_size(32)));
        return __builtin_shufflevector(load<Half>(base + row[0]), load<Half>(base + row[1]), 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10,
                                       11, 12, 13, 14, 15);
    }
};

// The units of a row's positions, in order. Positions outside of [first, last] get rows inside, since the table may lack
// their pages.
struct UnitWalk {
    const Heads& h;
    const int32_t* pages;
    int64_t kv, first, last, position;
    int64_t page = position / h.page_size, offset = position % h.page_size;

    INLINE int64_t row(int64_t p, int64_t from) const { return (pages[p] * h.n_kv_heads + kv) * h.page_size + from; }

    INLINE int64_t next_run() {
        const int64_t inside = position > last ? last : position + RUN <= first ? first : position;
        const int64_t found =
            inside == position ? row(page, offset) : row(inside / h.page_size, inside % h.page_size / RUN * RUN);
        position += RUN;
        if ((offset += RUN) == h.page_size) {
            offset = 0;
            page++;
        }
        return found;
    }
    INLINE Unit next() { return {{next_run(), next_run()}}; }
};

// A query as keys are multiplied with it: fp32, rounded to bf16 for keys in bf16, codes for int8 (or null).
struct Query {
    const float* floats;
    const bf16* halves;
    const int16_t* codes;
    float scale;
};

// The scores of 16 keys: a sum in a register for each, then the sums of their lanes.
template <class T>
INLINE Lanes unit_scores(const Query& q, int64_t d, const T* base, const Unit& unit) {
    int64_t c = 0;
#ifdef WHORL_INTEGER_PRODUCTS
    if (sizeof(T) == 1 && q.codes) {
        Ints sums[WIDTH];
        UNROLL16 for (int j = 0; j < WIDTH; j++) sums[j] = Ints{};
        for (; c < d; c += 2 * WIDTH) {
            const __m512i part = _mm512_loadu_si512(q.codes + c);
            UNROLL16 for (int j = 0; j < WIDTH; j++) {
                const __m512i key = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)(unit.at(base, d, j) + c)));
                sums[j] = (Ints)_mm512_dpwssd_epi32((__m512i)sums[j], key, part);
            }
        }
        return __builtin_convertvector(sums16(sums), Lanes) * q.scale;
    }
#endif
    Lanes sums[WIDTH];
    UNROLL16 for (int j = 0; j < WIDTH; j++) sums[j] = Lanes{};
#ifdef __AVX512BF16__
    if (sizeof(T) == 2)  // two features per lane, exact products; the query is rounded as in torch
        for (; c + 2 * WIDTH <= d; c += 2 * WIDTH) {
            const __m512bh part = (__m512bh)load<Bits>(q.halves + c);
            UNROLL16 for (int j = 0; j < WIDTH; j++)
                sums[j] = (Lanes)_mm512_dpbf16_ps((__m512)sums[j], (__m512bh)load<Bits>(unit.at(base, d, j) + c), part);
        }
#endif
    for (; c < d; c += WIDTH) {
        const Lanes part = load_lanes(q.floats + c);
        UNROLL16 for (int j = 0; j < WIDTH; j++) sums[j] += load_lanes(unit.at(base, d, j) + c) * part;
    }
    return sums16(sums);
}

// 64 features of a row as four vectors. Of bf16, the even and the odd features of 32, which takes no shuffle; `in_order64`
// restores the order.
INLINE void widen64(const float* row, Lanes (&v)[4]) {
    UNROLL for (int i = 0; i < 4; i++) v[i] = load_lanes(row + i * WIDTH);
}
INLINE void widen64(const int8_t* row, Lanes (&v)[4]) {
    UNROLL for (int i = 0; i < 4; i++) v[i] = load_lanes(row + i * WIDTH);
}
INLINE void widen64(const bf16* row, Lanes (&v)[4]) {
    UNROLL for (int i = 0; i < 2; i++) {
        const Bits pairs = load<Bits>(row + 2 * WIDTH * i);
        v[2 * i] = as_lanes(pairs << 16);
        v[2 * i + 1] = as_lanes(pairs & 0xffff0000u);
    }
}
template <class T>
INLINE void in_order64(Lanes (&v)[4]) {
    if constexpr (sizeof(T) == 2)
        UNROLL for (int i = 0; i < 4; i += 2) {
            const Lanes even = v[i], odd = v[i + 1];
            v[i] = __builtin_shufflevector(even, odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            v[i + 1] = __builtin_shufflevector(even, odd, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
}

// The values of a chunk, and what to prefetch meanwhile.
template <class T>
struct Values {
    const T *base, *next;  // next: the keys
    const Unit* units;
    int ahead, from, to;
    int64_t d;

    INLINE int n_units() const { return (to + WIDTH - 1) / WIDTH; }
    INLINE void prefetch(int u) const { units[u + ahead].prefetch(u + ahead < n_units() ? base : next, d); }

    // work(row, key) for each visible key
    template <class F>
    INLINE void each(bool first_time, F work) const {
        for (int u = from / WIDTH; u * WIDTH < to; u++) {
            if (first_time) prefetch(u);
            const int start = u * WIDTH, stop = to - start < WIDTH ? to - start : WIDTH;
            for (int j = from > start ? from - start : 0; j < stop; j++) work(units[u].at(base, d, j), start + j);
        }
    }
};

// out[QN][d] = out * correction + w[QN][CHUNK] v[CHUNK][d].
template <int QN, class T>
INLINE void chunk_values(const Values<T>& v, const float* w, const float* correction, float* out) {
    const int64_t d = v.d;
    int64_t column = 0;
    for (; column + 64 <= d; column += 64) {
        Lanes acc[QN][4];
        clear(acc);
        v.each(column == 0, [&](const T* row, int key) {
            Lanes wide[4];
            widen64(row + column, wide);
            UNROLL for (int i = 0; i < QN; i++)
                UNROLL for (int c = 0; c < 4; c++) acc[i][c] += wide[c] * w[i * CHUNK + key];
        });
        UNROLL for (int i = 0; i < QN; i++) {
            in_order64<T>(acc[i]);
            UNROLL for (int c = 0; c < 4; c++) {
                float* to = out + i * d + column + c * WIDTH;
                store(to, load_lanes(to) * correction[i] + acc[i][c]);
            }
        }
    }
    for (; column < d; column += WIDTH) {
        Lanes acc[QN];
        UNROLL for (int i = 0; i < QN; i++) acc[i] = Lanes{};
        v.each(column == 0, [&](const T* row, int key) {
            const Lanes wide = load_lanes(row + column);
            UNROLL for (int i = 0; i < QN; i++) acc[i] += wide * w[i * CHUNK + key];
        });
        UNROLL for (int i = 0; i < QN; i++) {
            float* to = out + i * d + column;
            store(to, load_lanes(to) * correction[i] + acc[i]);
        }
    }
}

#ifdef WHORL_INTEGER_PRODUCTS
// The same for whole units of codes and weights w_codes * scale; w: [QN][2][CHUNK], high and low bytes.
template <int QN>
INLINE void chunk_code_values(const Values<int8_t>& v, const uint8_t* w, const float* scale, const float* correction,
                              float* out) {
    for (int64_t column = 0; column < v.d; column += 64) {
        __m512i high[QN][4], low[QN][4];
        UNROLL for (int i = 0; i < QN; i++)
            UNROLL for (int f = 0; f < 4; f++) high[i][f] = low[i][f] = _mm512_setzero_si512();
        for (int u = 0; u < v.n_units(); u++) {
            if (column == 0) v.prefetch(u);
            UNROLL for (int j = 0; j < WIDTH; j += 4) {
                __m512i rows[4], fours[4];  // `fours`: four positions of a feature; vector f has features 4 f .. 4 f + 3 of each 16
                UNROLL for (int r = 0; r < 4; r++) rows[r] = _mm512_loadu_si512(v.units[u].at(v.base, v.d, j + r) + column);
                UNROLL for (int half = 0; half < 2; half++) {
                    const auto pairs = [&](int r) {
                        return half ? _mm512_unpackhi_epi8(rows[r], rows[r + 1]) : _mm512_unpacklo_epi8(rows[r], rows[r + 1]);
                    };
                    fours[2 * half] = _mm512_unpacklo_epi16(pairs(0), pairs(2));
                    fours[2 * half + 1] = _mm512_unpackhi_epi16(pairs(0), pairs(2));
                }
                UNROLL for (int i = 0; i < QN; i++) {
                    int32_t more, less;
                    memcpy(&more, w + 2 * i * CHUNK + u * WIDTH + j, 4);
                    memcpy(&less, w + (2 * i + 1) * CHUNK + u * WIDTH + j, 4);
                    UNROLL for (int f = 0; f < 4; f++) {
                        high[i][f] = _mm512_dpbusd_epi32(high[i][f], _mm512_set1_epi32(more), fours[f]);
                        low[i][f] = _mm512_dpbusd_epi32(low[i][f], _mm512_set1_epi32(less), fours[f]);
                    }
                }
            }
        }
        UNROLL for (int i = 0; i < QN; i++) {
            Lanes s[4], t[4];
            UNROLL for (int f = 0; f < 4; f++)
                s[f] = __builtin_convertvector(((Ints)high[i][f] << 8) + (Ints)low[i][f], Lanes) * scale[i];
            UNROLL for (int f = 0; f < 4; f++)  // a transpose of 4 x 4 fours
                t[f] = f % 2 ? __builtin_shufflevector(s[f - 1], s[f], 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31)
                             : __builtin_shufflevector(s[f], s[f + 1], 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
            UNROLL for (int f = 0; f < 4; f++) {
                float* to = out + i * v.d + column + f * WIDTH;
                const Lanes a = t[f / 2], b = t[f / 2 + 2];
                const Lanes sum =
                    f % 2 ? __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)
                          : __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
                store(to, load_lanes(to) * correction[i] + sum);
            }
        }
    }
}
#endif

INLINE Lanes seen_lanes(Lanes v, int start, int from, int to, float otherwise) {
    const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (lane + start >= from) & (lane + start < to) ? v : all(otherwise);
}

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
        if (partly(u)) s = seen_lanes(s, u * WIDTH, from, to, LOWEST);
        highest = max_lanes(highest, s);
        store(scores + u * WIDTH, s);
    }
    const float here = max_of(highest), now = here > most ? here : most;
    for (int u = 0; u < n_units; u++) {
        Lanes p = exp_lanes(load_lanes(scores + u * WIDTH) - now);
        if (partly(u)) p = seen_lanes(p, u * WIDTH, from, to, 0.0f);
        total += p;
        if (v_scale) p *= units[u].scales(v_scale);
        if (v_scale && partly(u)) p = seen_lanes(p, u * WIDTH, from, to, 0.0f);
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
    typedef int16_t Shorts __attribute__((vector_size(32)));
    const Lanes magic = all(12582912.0f);  // 1.5 * 2^23
    for (int64_t c = 0; c < n; c += WIDTH)
        store(codes + c, __builtin_convertvector((Ints)(load_lanes(x + c) / scale + magic) - (Ints)magic, Shorts));
}
// The same for weights >= 0, as high and low bytes.
INLINE void to_byte_codes(const float* w, int n, float scale, uint8_t* high, uint8_t* low) {
    const float inverse = 1.0f / scale;
    for (int c = 0; c < n; c += WIDTH) {
        const Ints code = __builtin_convertvector(load_lanes(w + c) * inverse + 0.5f, Ints);
        store(high + c, __builtin_convertvector(code >> 8, Bytes));
        store(low + c, __builtin_convertvector(code & 255, Bytes));
    }
}
INLINE float code_scale(float largest, float codes) { return (largest > 1e-30f ? largest : 1e-30f) / codes; }

// Scratch size, in floats.
INLINE int64_t few_attention_room(const Heads& h) { return FEW * (5 * h.head_dim / 2 + CHUNK + CHUNK / 2 + 5); }

// Arguments as of `attend`; at most FEW queries, over pages that `attends_in_place`.
template <class T>
void attend_few(const Heads& h, const Cache<T>& cache, const int32_t* pages, int64_t kv, int64_t position, int64_t tokens,
                const float* q, int64_t q_stride, float* y, int64_t y_stride, float* room) {
    const int64_t group = h.n_heads / h.n_kv_heads, n = tokens * group, d = h.head_dim;
    const bool codes = sizeof(T) == 1 && multiplies_codes(h);
    float *queries = room, *out = queries + n * d, *scores = out + n * d, *most = scores + n * CHUNK, *sum = most + n,
          *correction = sum + n, *weight_scale = correction + n, *query_scale = weight_scale + n;
    bf16* halves = (bf16*)(query_scale + n);
    int16_t* query_codes = (int16_t*)halves;  // either
    uint8_t* weights = (uint8_t*)(halves + n * d);
    for (int64_t i = 0; i < n; i++) {
        const float* from = q + i / group * q_stride + i % group * d;
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
    const int64_t last = position + tokens - 1, unit_bytes = WIDTH * d * int64_t(sizeof(T));
    const int64_t first = h.window > 0 && position - h.window + 1 > 0 ? position - h.window + 1 : 0;
    const int ahead = unit_bytes * MAX_AHEAD > AHEAD_BYTES ? int(AHEAD_BYTES / unit_bytes) + 1 : MAX_AHEAD;
    UnitWalk walk{h, pages, kv, first, last, first / RUN * RUN};
    Unit units[CHUNK_UNITS + MAX_AHEAD];  // of the chunk, and the next ones
    for (int u = 0; u < ahead; u++) {
        units[u] = walk.next();
        units[u].prefetch(cache.k, d);
    }
    for (int64_t start = first / RUN * RUN; start <= last; start += CHUNK) {
        const int from = int(first > start ? first - start : 0);
        const int to = int(last + 1 - start < CHUNK ? last + 1 - start : CHUNK);
        const Values<T> values{cache.v, cache.k, units, ahead, from, to, d};
        const int n_units = values.n_units();
        for (int u = 0; u < n_units; u++) units[ahead + u] = walk.next();
        for (int u = 0; u < n_units; u++) {
            for (int64_t i = 0; i < n; i++) {
                const Query query{queries + i * d, halves + i * d, codes ? query_codes + i * d : nullptr, query_scale[i]};
                const Lanes s = unit_scores(query, d, cache.k, units[u]);
                store(scores + i * CHUNK + u * WIDTH, sizeof(T) == 1 ? s * units[u].scales(cache.k_scale) : s);
            }
            const bool within = u + ahead < n_units;
            units[within ? u + ahead : u + ahead - n_units].prefetch(within ? cache.k : cache.v, d);
        }
        for (int64_t i = 0; i < n; i++) {
            const int64_t own = position + i / group - start;  // position in the chunk
            const int low = h.window > 0 && own - h.window + 1 > from ? int(own - h.window + 1) : from;
            const int high = own + 1 < to ? int(own + 1) : to;
            const float largest = soften_chunk(scores + i * CHUNK, sizeof(T) == 1 ? cache.v_scale : nullptr, units, n_units, low,
                                               high, h.softcap, most[i], sum[i], correction[i]);
            if (!codes) continue;
            weight_scale[i] = code_scale(largest, 65535);
            uint8_t* bytes = weights + 2 * i * CHUNK;
            to_byte_codes(scores + i * CHUNK, n_units * WIDTH, weight_scale[i], bytes, bytes + CHUNK);
        }
        int64_t i = 0;
#ifdef WHORL_INTEGER_PRODUCTS
        if constexpr (sizeof(T) == 1)
            if (codes) {
                const auto add = [&](auto&& chunk) {
                    chunk(values, weights + 2 * i * CHUNK, weight_scale + i, correction + i, out + i * d);
                };
                for (; i + 2 <= n; i += 2) add(chunk_code_values<2>);
                for (; i < n; i++) add(chunk_code_values<1>);
            }
#endif
        for (; i + 4 <= n; i += 4) chunk_values<4>(values, scores + i * CHUNK, correction + i, out + i * d);
        for (; i < n; i++) chunk_values<1>(values, scores + i * CHUNK, correction + i, out + i * d);
        for (int u = 0; u < ahead; u++) units[u] = units[n_units + u];
    }
    divide_by_sums(h, kv, n, most, sum, out, d, y, y_stride);
}
