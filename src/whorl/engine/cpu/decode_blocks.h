// The reads of attention in place (decode_attention.h): runs of a row's pages, and the products of a query with a block of them.
#pragma once

#include "attention.h"
#include "packed.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define WHORL_INTEGER_PRODUCTS 1
#endif

constexpr int FEW = 8;  // maximum queries
constexpr int RUN = 8;  // rows that are always in one page
constexpr int CHUNK = 256, CHUNK_UNITS = CHUNK / WIDTH;
constexpr int MAX_SPAN = 4;  // units of a block: 16 keys of a head each

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

    template <class T>
    INLINE void prefetch(const T* base, int64_t d, int j) const {
        for (int64_t b = 0; b < d * int64_t(sizeof(T)); b += 64) __builtin_prefetch((const char*)at(base, d, j) + b);
    }

    INLINE Lanes scales(const float* base) const { return join(base + row[0], base + row[1]); }
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

// The scores of 16 keys: a sum for each in a register, then the sums of their lanes. fetch(j, c) is called where a line of a row
// begins.
template <class T, class F>
INLINE Lanes unit_scores(const Query& q, int64_t d, const T* base, const Unit& unit, F fetch) {
#ifdef WHORL_INTEGER_PRODUCTS
    if (sizeof(T) == 1 && q.codes) {
        Ints sums[WIDTH];
        UNROLL16 for (int j = 0; j < WIDTH; j++) sums[j] = Ints{};
        for (int64_t c = 0; c < d; c += 2 * WIDTH) {
            const __m512i part = _mm512_loadu_si512(q.codes + c);
            UNROLL16 for (int j = 0; j < WIDTH; j++) {
                const __m512i key = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)(unit.at(base, d, j) + c)));
                sums[j] = (Ints)_mm512_dpwssd_epi32((__m512i)sums[j], key, part);
            }
        }
        return to_lanes(sums16(sums)) * q.scale;
    }
#endif
    Lanes rows[WIDTH];
    for (int first = 0; first < WIDTH; first += TOGETHER) {
        Lanes sums[TOGETHER];
        UNROLL16 for (int j = 0; j < TOGETHER; j++) sums[j] = Lanes{};
        const auto key = [&](int j) __attribute__((always_inline)) { return unit.at(base, d, first + j); };
        int64_t c = 0;
#ifdef __AVX512BF16__
        if (sizeof(T) == 2)  // two features per lane, exact products; the query is rounded as in torch
            for (; c + 2 * WIDTH <= d; c += 2 * WIDTH) {
                const __m512bh part = (__m512bh)load<Bits>(q.halves + c);
                UNROLL16 for (int j = 0; j < TOGETHER; j++)
                    sums[j] = (Lanes)_mm512_dpbf16_ps((__m512)sums[j], (__m512bh)load<Bits>(key(j) + c), part);
            }
#endif
        for (; c < d; c += WIDTH) {
            const Lanes part = load_lanes(q.floats + c);
            UNROLL16 for (int j = 0; j < TOGETHER; j++) {
                if (c * sizeof(T) % 64 == 0) fetch(first + j, c);
                sums[j] += load_lanes(key(j) + c) * part;
            }
        }
        UNROLL16 for (int j = 0; j < TOGETHER; j++) rows[first + j] = sums[j];
    }
    return sums16(rows);
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
        UNROLL for (int i = 0; i < 4; i += 2) interleave(v[i], v[i + 1]);
}

// Prefetches of fp32 rows are spread over the work, since a burst of them waits for the CPU's few buffers. Those of shorter rows
// are a burst for each unit: the instructions between the products cost more.
template <class T>
constexpr bool BY_ROWS = sizeof(T) == 4;

// Some units of one head, and the block to prefetch meanwhile.
template <class T>
struct Block {
    const T *base, *next;  // of this head
    const Unit *units, *next_units;
    int start, stop, next_size;  // units of the chunk; number of the next ones
    int64_t d;

    // A row of the unit of the next block that corresponds to unit u.
    INLINE void prefetch(int u, int j) const {
        if (u - start < next_size) next_units[u - start].prefetch(next, d, j);
    }
    INLINE void prefetch(int u) const {
        for (int j = 0; j < WIDTH; j++) prefetch(u, j);
    }
    INLINE void prefetch_rest() const {
        for (int u = stop; u - start < next_size; u++) prefetch(u);
    }
};

// The blocks of a chunk in the order of memory: unit by unit, `span` of them together, head by head.
// work(block, head); `then`: what is read after the chunk.
template <class T, class F>
INLINE void each_block(const T* base, const Unit* units, int n_units, int span, int n_kv, int64_t head, int64_t d, const T* then,
                       const Unit* then_units, F work) {
    for (int start = 0; start < n_units; start += span) {
        const int stop = start + span < n_units ? start + span : n_units;
        for (int kv = 0; kv < n_kv; kv++) {
            Block<T> block{base + kv * head, base + (kv + 1) * head, units, units + start, start, stop, stop - start, d};
            if (kv + 1 == n_kv && stop < n_units) {
                block.next = base;
                block.next_units = units + stop;
                block.next_size = n_units - stop < span ? n_units - stop : span;
            } else if (kv + 1 == n_kv) {
                block.next = then;
                block.next_units = then_units;
                block.next_size = span;
            }
            work(block, kv);
            block.prefetch_rest();
        }
    }
}

// The visible keys of a chunk; whether a block is its first or its last one.
struct Range {
    int from, to;
    bool begins, ends;

    // work(row, key) for each visible key of a block
    template <class T, class F>
    INLINE void each(const Block<T>& block, bool first_time, F work) const {
        for (int u = block.start; u < block.stop; u++) {
            const int start = u * WIDTH, stop = to - start < WIDTH ? to - start : WIDTH;
            if (first_time && !BY_ROWS<T>) block.prefetch(u);
            for (int j = from > start ? from - start : 0; j < stop; j++) {
                if (first_time && BY_ROWS<T>) block.prefetch(u, j);
                work(block.units[u].at(block.base, block.d, j), start + j);
            }
        }
    }
};

// out[QN][d] = out * correction + w[QN][CHUNK] v[CHUNK][d] over the blocks of a chunk; sums: [QN][d] between them.
template <int QN, class T>
INLINE void chunk_values(const Block<T>& block, const Range& range, const float* w, const float* correction, float* sums, float* out) {
    const int64_t d = block.d;
    int64_t column = 0;
    for (; column + 64 <= d; column += 64) {
        Lanes acc[QN][4];
        UNROLL for (int i = 0; i < QN; i++)
            UNROLL for (int c = 0; c < 4; c++)
                acc[i][c] = range.begins ? Lanes{} : load_lanes(sums + i * d + column + c * WIDTH);
        range.each(block, column == 0, [&](const T* row, int key) {
            Lanes wide[4];
            widen64(row + column, wide);
            UNROLL for (int i = 0; i < QN; i++)
                UNROLL for (int c = 0; c < 4; c++) acc[i][c] += wide[c] * w[i * CHUNK + key];
        });
        UNROLL for (int i = 0; i < QN; i++) {
            if (range.ends) in_order64<T>(acc[i]);
            UNROLL for (int c = 0; c < 4; c++) {
                const int64_t at = i * d + column + c * WIDTH;
                if (range.ends)
                    store(out + at, load_lanes(out + at) * correction[i] + acc[i][c]);
                else
                    store(sums + at, acc[i][c]);
            }
        }
    }
    for (; column < d; column += WIDTH) {
        Lanes acc[QN];
        UNROLL for (int i = 0; i < QN; i++) acc[i] = range.begins ? Lanes{} : load_lanes(sums + i * d + column);
        range.each(block, column == 0, [&](const T* row, int key) {
            const Lanes wide = load_lanes(row + column);
            UNROLL for (int i = 0; i < QN; i++) acc[i] += wide * w[i * CHUNK + key];
        });
        UNROLL for (int i = 0; i < QN; i++) {
            const int64_t at = i * d + column;
            if (range.ends)
                store(out + at, load_lanes(out + at) * correction[i] + acc[i]);
            else
                store(sums + at, acc[i]);
        }
    }
}

#ifdef WHORL_INTEGER_PRODUCTS
// The same for whole units of codes and weights w_codes * scale; w: [QN][2][CHUNK], high and low bytes; sums: [QN][2][d].
template <int QN>
INLINE void chunk_code_values(const Block<int8_t>& v, const Range& range, const uint8_t* w, const float* scale,
                              const float* correction, int32_t* sums, float* out) {
    for (int64_t column = 0; column < v.d; column += 64) {
        __m512i high[QN][4], low[QN][4];
        UNROLL for (int i = 0; i < QN; i++)
            UNROLL for (int f = 0; f < 4; f++) {
                const int32_t* from = sums + 2 * i * v.d + column + f * WIDTH;
                high[i][f] = range.begins ? _mm512_setzero_si512() : _mm512_loadu_si512(from);
                low[i][f] = range.begins ? _mm512_setzero_si512() : _mm512_loadu_si512(from + v.d);
            }
        for (int u = v.start; u < v.stop; u++) {
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
        if (!range.ends) {
            UNROLL for (int i = 0; i < QN; i++)
                UNROLL for (int f = 0; f < 4; f++) {
                    int32_t* to = sums + 2 * i * v.d + column + f * WIDTH;
                    _mm512_storeu_si512(to, high[i][f]);
                    _mm512_storeu_si512(to + v.d, low[i][f]);
                }
            continue;
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
