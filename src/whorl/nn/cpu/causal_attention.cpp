// Causal attention in bf16 or fp32 (WHORL_FP32), with fp32 sums: forward, and backward from the log-sum of each row
// (FlashAttention, Dao et al. 2022, arXiv:2205.14135; Dao 2023, arXiv:2307.08691). Products: tiles.h.
//
//     S = Q K^T (j <= i),  P = exp(S - lse),  O = P V
//     dV = P^T dO,  dS = P * (dO V^T - rowsum(dO * O)),  dQ = dS K,  dK = dS^T Q
//
// A block has 32 queries or keys; blocks above the diagonal are left out. The forward keeps the scores of one block of
// queries over all keys. The backward keeps those of one block of keys over all later queries, transposed: dV and dK are
// then sums over one row of blocks. dQ^T is summed over groups of keys. For it, dS^T is written as a right operand too.
//
// A `Prologue` is applied to projected queries and keys before, and its gradient after: keys are mixed with their predecessors
// (smear), both are normed, queries are scaled, and both are rotated.
//
// In packed rows a query sees no key before the start of its document. Starts never fall along a row, so the blocks that a
// query or a key needs are adjacent, and the others are left out.
//
// The positions of a head are not adjacent in memory, and a batch is larger than the second-level cache. So they are prefetched.
// Heads of USUAL_D features have loops of constant length (`Sizes`). Both together save about 30 % of the time on Zen 4 (LOG.md).
#include "operands.h"

#include <cmath>

constexpr int64_t GROUP = 4;            // blocks of keys whose dS^T is kept
constexpr int64_t MAX_D = 256, USUAL_D = 64;
constexpr int64_t AHEAD = 8;            // positions between what is prefetched and what is computed
constexpr float MASKED = 1e30f;         // log-sum of a query that does not exist: its probabilities are 0
static const Lanes LEAST = all(-MASKED);

struct Matrix {  // [rows][heads][length][d]: numbers between rows, heads and positions
    number* data;
    int64_t strides[3];
    number* head(int64_t row, int64_t head) const { return data + row * strides[0] + head * strides[1]; }
    number* at(int64_t row, int64_t head, int64_t t) const { return this->head(row, head) + t * strides[2]; }
};

// The features of one position, for reading, or for writing with W = 1.
template <int W = 0> static inline void prefetch(const number* from, int64_t d) {
    for (int64_t c = 0; c < d; c += 64 / int64_t(sizeof(number))) __builtin_prefetch(from + c, W);
}

// D: features of a head as a constant, so that loops over them are unrolled; 0: `width` of them.
template <int64_t D> struct Sizes {
    int64_t rows, heads, length, width;
    const int32_t* starts;  // [rows][length], first position of each position's document; null: one document a row
    int64_t d() const { return D ? D : width; }
    int64_t blocks() const { return (length + BLOCK - 1) / BLOCK; }

    // Starts of one row, padded to whole blocks with that of the last position.
    void copy_starts(int64_t row, int32_t* to) const {
        for (int64_t t = 0; t < blocks() * BLOCK; t++) {
            const int64_t at = t < length ? t : length - 1;
            to[t] = starts ? starts[row * length + at] : 0;
        }
    }
};

// Rows of one head, `stride` numbers apart: these themselves, or a copy that is padded with 0 to whole blocks, [blocks * 32][d].
struct Rows {
    const number* data;
    int64_t stride;
    Rows(const number* from, int64_t stride) : data(from), stride(stride) {}
    template <int64_t D> Rows(const number* from, int64_t stride, const Sizes<D>& z, number* copy) : Rows(from, stride) {
        if (z.length % BLOCK == 0) return;
        for (int64_t t = 0; t < z.length; t++) memcpy(copy + t * z.d(), from + t * stride, z.d() * sizeof(number));
        memset(copy + z.length * z.d(), 0, (z.blocks() * BLOCK - z.length) * z.d() * sizeof(number));
        data = copy;
        this->stride = z.d();
    }
    const number* at(int64_t t) const { return data + t * stride; }
};

// The layer's operations on a query or key x before the scores:  m = x + share (x before - x),  u = m / rms(m),  y = rotate(factor u).
// Queries have share 0, keys factor 1. The other half of a head's features makes the pairs, and `sin` has the signs.
struct Prologue {
    const float *temperature, *share;  // [heads]: factor of queries, share of keys; null: there is no prologue
    const number *cos, *sin;           // [rows][length][d]
    int64_t stride;                    // numbers between rows of the tables
    float eps;

    // m [d]; returns 1 / rms(m). before: null where there is no predecessor.
    INLINE float mix(const number* x, const number* before, float part, int64_t d, float* m) const {
        Lanes total = {};
        for (int64_t c = 0; c < d; c += SIDE) {
            Lanes v = load(x + c);
            if (before) v += part * (load(before + c) - v);
            total += v * v;
            store(m + c, v);
        }
        return 1.0f / sqrtf(sum_lanes(total) / float(d) + eps);
    }

    INLINE void rotate(const float* m, float factor, int64_t at, int64_t d, number* y) const {
        for (int64_t c = 0; c < d; c += SIDE) {
            const int64_t other = c < d / 2 ? c + d / 2 : c - d / 2;
            store(y + c, (load(m + c) * load(cos + at + c) + load(m + other) * load(sin + at + c)) * factor);
        }
    }

    // Overwrites the gradient of y with that of m, and returns the gradient of the factor.
    INLINE float gradient(const float* m, float scale, float factor, int64_t at, int64_t d, float* dy) const {
        Lanes turned[MAX_D / SIDE], total = {};
        for (int64_t c = 0; c < d; c += SIDE) {
            const int64_t other = c < d / 2 ? c + d / 2 : c - d / 2;
            turned[c / SIDE] = load(dy + c) * load(cos + at + c) + load(dy + other) * load(sin + at + other);
            total += turned[c / SIDE] * load(m + c);
        }
        const float of_factor = sum_lanes(total) * scale, mean = of_factor * scale / float(d);
        for (int64_t c = 0; c < d; c += SIDE) store(dy + c, (turned[c / SIDE] - load(m + c) * mean) * (scale * factor));
        return of_factor;
    }

    // Queries or keys of a head, padded with 0 to whole blocks, [blocks * 32][d]. starts: null for queries.
    template <int64_t D>
    void apply(const Rows& rows, const Sizes<D>& z, int64_t row, float factor, float part, const int32_t* starts, number* to) const {
        float m[MAX_D];
        for (int64_t t = 0; t < z.length; t++) {
            prefetch(rows.at(t + AHEAD), z.d());
            const float scale = mix(rows.at(t), starts && t > starts[t] ? rows.at(t - 1) : nullptr, part, z.d(), m);
            rotate(m, scale * factor, row * stride + t * z.d(), z.d(), to + t * z.d());
        }
        memset(to + z.length * z.d(), 0, (z.blocks() * BLOCK - z.length) * z.d() * sizeof(number));
    }
};

// X as a right operand [length][d]: 32 positions by 16 features a tile, in the order [feature / 16][position / 32]. With
// `turned`, X^T as a left operand [d][length]: 16 features by 32 positions, in the same order.
template <int64_t D> static void pack(const Rows& rows, const Sizes<D>& z, number* to, bool turned) {
    for (int64_t n = 0; n < z.d() / SIDE; n++)
        for (int64_t k = 0; k < z.blocks(); k++, to += TILE) {
            const number* from = rows.at(k * DEPTH) + n * SIDE;
            turned ? turn_left(from, rows.stride, to) : copy_right(from, rows.stride, to);
        }
}

// Queries and keys of a head as the scores need them. buffers: two of [blocks * 32][d].
struct Projected {
    Rows queries, keys;
    template <int64_t D>
    Projected(const Matrix& q, const Matrix& k, const Prologue& prologue, const Sizes<D>& z, int64_t row, int64_t head,
              const int32_t* starts, number* buffers)
        : queries(q.head(row, head), q.strides[2]), keys(k.head(row, head), k.strides[2]) {
        number *to_q = buffers, *to_k = buffers + z.blocks() * BLOCK * z.d();
        if (!prologue.share) {
            queries = Rows(queries.data, queries.stride, z, to_q);
            keys = Rows(keys.data, keys.stride, z, to_k);
            return;
        }
        prologue.apply(queries, z, row, prologue.temperature[head], 0.0f, nullptr, to_q);
        prologue.apply(keys, z, row, 1.0f, prologue.share[head], starts, to_k);
        queries = Rows(to_q, z.d());
        keys = Rows(to_k, z.d());
    }
};

// Numbers c of queries 0 .. 15, for c < 16, as columns: rows of queries, of which there are `n`.
static void write_turned(const float* from, int64_t stride, int64_t n, number* to, int64_t to_stride) {
    alignas(64) float tile[SIDE * SIDE];
    transpose((const pair*)from, stride, (pair*)tile, SIDE);
    for (int64_t r = 0; r < n; r++) store(to + r * to_stride, load(tile + r * SIDE));
}

// exp(x) for x <= 0, 0 below -87. For bf16 the relative error is below 3e-6, for fp32 two units in the last place.
static inline Lanes exponential(Lanes x) {
#ifdef WHORL_FP32
    return choose(x < -87.0f, all(0.0f), exp_lanes(x));
#else
    const Lanes y = max_lanes(x, all(-87.0f)) * 1.44269504f, shifted = y + 12582912.0f;
    const Lanes f = y - (shifted - 12582912.0f);  // the last bits of `shifted` are the nearest integer
    const Lanes power = (((f * 9.56056e-3f + 5.591746e-2f) * f + 0.24024984f) * f + 0.69312192f) * f + 0.99999919f;
    const Lanes e = (Lanes)((Bits)power + ((Bits)shifted << 23u));
    return choose(x < -87.0f, all(0.0f), e);
#endif
}

// Whether queries t .. t + 15 see a key.
static inline Ints seen(int64_t key, int64_t t, const int32_t* starts) {
    return (lane_numbers() + int32_t(t) >= int32_t(key)) & (all_ints(int32_t(key)) >= load<Ints>(starts + t));
}

template <int64_t D> struct Forward {
    Sizes<D> z;
    Matrix q, k, v, out;
    Prologue prologue;
    float* lse;

    size_t bytes() const {
        const size_t n = z.blocks() * BLOCK;
        return (5 * z.d() + BLOCK) * n * sizeof(number) + 4 * n * BLOCK + 4 * n + 4 * AREA + 1024;
    }

    void head(int64_t row, int64_t head, Room& scratch) const {
        const int64_t n = z.blocks() * BLOCK, d = z.d();
        int32_t* starts = scratch.take<int32_t>(n);
        z.copy_starts(row, starts);
        const Projected projected(q, k, prologue, z, row, head, starts, scratch.take<number>(2 * n * d));
        const Rows &queries = projected.queries, &keys = projected.keys;
        const Rows values(v.head(row, head), v.strides[2], z, scratch.take<number>(n * d));
        number *right_queries = scratch.take<number>(n * d), *turned_values = scratch.take<number>(n * d);
        float *scores = scratch.take<float>(BLOCK * n), *sums = scratch.take<float>(AREA);
        number* p = scratch.take<number>(BLOCK * n);
        pack_transposed(queries.data, queries.stride, n, d, right_queries);
        pack(values, z, turned_values, true);
        for (int64_t i = 0; i < z.blocks(); i++) {
            const int64_t first = i * BLOCK, j0 = starts[first] / BLOCK, steps = i + 1 - j0;  // blocks that a query sees
            Lanes most[2] = {LEAST, LEAST}, total[2] = {}, factor[2];
            for (int64_t j = j0; j <= i; j++) {
                float* s = scores + (j - j0) * AREA;
                multiply(keys.at(j * BLOCK), keys.stride, DEPTH, SIDE * keys.stride, right_queries + first * d, SIDE * d, d / DEPTH,
                         s, BLOCK, false);
                const bool all = j < i && !z.starts;
                for (int64_t r = 0; r < BLOCK; r++)
                    for (int64_t h = 0; h < 2; h++) {
                        Lanes x = load(s + r * BLOCK + h * SIDE);
                        if (!all) store(s + r * BLOCK + h * SIDE, x = choose(seen(j * BLOCK + r, first + h * SIDE, starts), x, LEAST));
                        most[h] = max_lanes(most[h], x);
                    }
            }
            for (int64_t h = 0; h < 2; h++)
                for (int64_t j = 0; j < steps; j++) {
                    const float* s = scores + j * AREA + h * SIDE;
                    for (int64_t r = 0; r < BLOCK; r += 2) {
                        const Lanes low = exponential(load(s + r * BLOCK) - most[h]);
                        const Lanes high = exponential(load(s + (r + 1) * BLOCK) - most[h]);
                        total[h] += low + high;
                        put_rows(p + (h * steps + j) * TILE, r, low, high);
                    }
                }
            const int64_t n_rows = z.length - first < BLOCK ? z.length - first : BLOCK;
            for (int64_t r = 0; r < n_rows; r++)
                lse[(row * z.heads + head) * z.length + first + r] = most[r / SIDE][r % SIDE] + logf(total[r / SIDE][r % SIDE]);
            for (int64_t h = 0; h < 2; h++) factor[h] = 1.0f / total[h];
            for (int64_t c = 0; c < d; c += BLOCK) {
                multiply(turned_values + c * n + j0 * TILE, DEPTH, TILE, SIDE * n, p, steps * TILE, steps, sums, BLOCK, false);
                for (int64_t x = 0; x < 2 * BLOCK; x++) store(sums + x * SIDE, load(sums + x * SIDE) * factor[x % 2]);
                for (int64_t h = 0; h < n_rows; h += SIDE)
                    for (int64_t x = 0; x < BLOCK; x += SIDE)
                        write_turned(sums + x * BLOCK + h, BLOCK, n_rows - h < SIDE ? n_rows - h : SIDE,
                                     out.head(row, head) + (first + h) * out.strides[2] + c + x, out.strides[2]);
            }
        }
    }
};

template <int64_t D> struct Backward {
    Sizes<D> z;
    Matrix q, k, v, out, d_out, d_q, d_k, d_v;
    Prologue prologue;
    const float* lse;
    float* scalars;  // [2][rows][heads]: gradients of the temperature and of the share

    size_t bytes() const {
        const size_t n = z.blocks() * BLOCK;
        const size_t matrices = (9 * z.d() + 2 * BLOCK + GROUP * BLOCK) * n * sizeof(number) + 4 * z.d() * n + 8 * n;
        return matrices + 4 * BLOCK * z.d() + 4 * n + 8 * AREA + 2048;
    }

    void head(int64_t row, int64_t head, Room& scratch) const {
        const int64_t n = z.blocks() * BLOCK, d = z.d(), blocks = z.blocks();
        int32_t* starts = scratch.take<int32_t>(n);
        z.copy_starts(row, starts);
        const Projected projected(q, k, prologue, z, row, head, starts, scratch.take<number>(2 * n * d));
        const Rows &queries = projected.queries, &keys = projected.keys;
        const Rows values(v.head(row, head), v.strides[2], z, scratch.take<number>(n * d));
        const Rows grads(d_out.head(row, head), d_out.strides[2], z, scratch.take<number>(n * d));
        number *turned_queries = scratch.take<number>(n * d), *turned_grads = scratch.take<number>(n * d);
        number *right_queries = scratch.take<number>(n * d), *right_grads = scratch.take<number>(n * d);
        number* turned_keys = scratch.take<number>(n * d);
        float *sum_q = scratch.take<float>(d * n), *normalizer = scratch.take<float>(n), *mean = scratch.take<float>(n);
        float *scores = scratch.take<float>(AREA), *d_p = scratch.take<float>(AREA);
        number *p = scratch.take<number>(BLOCK * n), *d_s = scratch.take<number>(BLOCK * n);
        number* right_d_s = scratch.take<number>(GROUP * BLOCK * n);
        float* sums = scratch.take<float>(BLOCK * d);
        KeyGradient key_gradient(*this, row, head, starts);
        pack_transposed(queries.data, queries.stride, n, d, turned_queries);
        pack_transposed(grads.data, grads.stride, n, d, turned_grads);
        pack(queries, z, right_queries, false);
        pack(grads, z, right_grads, false);
        pack(keys, z, turned_keys, true);
        for (int64_t t = 0; t < n; t++) {
            prefetch(out.at(row, head, t + AHEAD), d);
            prefetch(grads.at(t + AHEAD), d);
            normalizer[t] = t < z.length ? lse[(row * z.heads + head) * z.length + t] : MASKED;
            Lanes total = {};
            for (int64_t c = 0; c < d && t < z.length; c += SIDE)
                total += load(out.head(row, head) + t * out.strides[2] + c) * load(grads.at(t) + c);
            mean[t] = sum_lanes(total);
        }
        for (int64_t g = 0; g < blocks; g += GROUP) {
            const int64_t last = g + GROUP < blocks ? g + GROUP : blocks;
            for (int64_t j = g; j < last; j++) {
                const int64_t first = j * BLOCK;  // of the keys, and of the queries that see them
                int64_t stop = j + 1;  // of the blocks of queries
                while (stop < blocks && starts[stop * BLOCK] < first + BLOCK) stop++;
                for (int64_t i = j; i < stop; i++) {
                    multiply(keys.at(first), keys.stride, DEPTH, SIDE * keys.stride, turned_queries + i * BLOCK * d, SIDE * d,
                             d / DEPTH, scores, BLOCK, false);
                    multiply(values.at(first), values.stride, DEPTH, SIDE * values.stride, turned_grads + i * BLOCK * d, SIDE * d,
                             d / DEPTH, d_p, BLOCK, false);
                    for (int64_t t = i * BLOCK; t < (i + 1) * BLOCK; t += SIDE)
                        softmax_gradient(first, t, i > j && !z.starts ? nullptr : starts, scores + t % BLOCK, d_p + t % BLOCK,
                                         load(normalizer + t), load(mean + t), p + (i - j) * 2 * TILE + t % BLOCK,
                                         d_s + (i - j) * 2 * TILE + t % BLOCK, right_d_s + (t / SIDE * GROUP + j - g) * TILE);
                }
                const int64_t n_rows = z.length - first < BLOCK ? z.length - first : BLOCK;
                for (int64_t r = 0; r < n_rows; r++) {
                    prefetch<1>(d_v.at(row, head, first + r), d);
                    prefetch<1>(d_k.at(row, head, first + r), d);
                    prefetch(k.at(row, head, first + r), d);
                }
                for (const bool of_values : {true, false}) {
                    const number *left = of_values ? p : d_s, *right = of_values ? right_grads : right_queries;
                    for (int64_t c = 0; c < d; c += BLOCK)
                        multiply(left, DEPTH, 2 * TILE, TILE, right + c * n + j * TILE, SIDE * n, stop - j, sums + c, d, false);
                    for (int64_t r = 0; r < n_rows; r++)
                        if (!of_values && prologue.share)
                            key_gradient.add(first + r, sums + r * d);
                        else
                            narrow(sums + r * d, (of_values ? d_v : d_k).at(row, head, first + r), d);
                }
            }
            for (int64_t i = g; i < blocks; i++) {
                const int64_t j0 = starts[i * BLOCK] / BLOCK, from = j0 > g ? j0 : g, to = i + 1 < last ? i + 1 : last;
                if (from >= to) continue;
                for (int64_t c = 0; c < d; c += BLOCK)
                    multiply(turned_keys + c * n + from * TILE, DEPTH, TILE, SIDE * n, right_d_s + (i * 2 * GROUP + from - g) * TILE,
                             GROUP * TILE, to - from, sum_q + c * n + i * BLOCK, n, from > j0);
            }
        }
        float of_temperature = 0.0f, m[MAX_D];
        for (int64_t t = 0; t < z.length; t++) {
            if (t % SIDE == 0)
                for (int64_t c = 0; c < d; c += SIDE) transpose((const pair*)(sum_q + c * n + t), n, (pair*)(sums + c), d);
            float* dy = sums + t % SIDE * d;
            prefetch(q.at(row, head, t + AHEAD), d);
            prefetch<1>(d_q.at(row, head, t + AHEAD), d);
            if (prologue.share) {
                const float scale = prologue.mix(q.at(row, head, t), nullptr, 0.0f, d, m);
                of_temperature += prologue.gradient(m, scale, prologue.temperature[head], row * prologue.stride + t * d, d, dy);
            }
            narrow(dy, d_q.at(row, head, t), d);
        }
        if (!prologue.share) return;
        key_gradient.write_last();
        scalars[row * z.heads + head] = of_temperature;
        scalars[(z.rows + row) * z.heads + head] = key_gradient.of_share;
    }

    // Gradients of the keys before the prologue, in the order of positions: a key waits for what its successor adds.
    struct KeyGradient {
        const Backward& job;
        int64_t row, head, next = 0;
        const int32_t* starts;
        float of_share = 0.0f, waiting[MAX_D];
        KeyGradient(const Backward& job, int64_t row, int64_t head, const int32_t* starts)
            : job(job), row(row), head(head), starts(starts) {}

        void add(int64_t t, float* dy) {
            const int64_t d = job.z.d();
            const bool mixed = t > starts[t];
            const number *x = job.k.at(row, head, t), *before = mixed ? job.k.at(row, head, t - 1) : nullptr;
            const float share = job.prologue.share[head], kept = mixed ? 1.0f - share : 1.0f;
            float m[MAX_D];
            const float scale = job.prologue.mix(x, before, share, d, m);
            job.prologue.gradient(m, scale, 1.0f, row * job.prologue.stride + t * d, d, dy);
            Lanes total = {};
            for (int64_t c = 0; c < d && mixed; c += SIDE) {
                total += load(dy + c) * (load(before + c) - load(x + c));
                store(waiting + c, load(waiting + c) + share * load(dy + c));
            }
            of_share += sum_lanes(total);
            write_last();
            for (int64_t c = 0; c < d; c += SIDE) store(waiting + c, kept * load(dy + c));
            next = t + 1;
        }

        void write_last() const {
            if (next > 0) narrow(waiting, job.d_k.at(row, head, next - 1), job.z.d());
        }
    };

    // P^T and dS^T of 32 keys and queries t .. t + 15 as left tiles, and dS^T as a right tile. starts: null if all is seen.
    static inline void softmax_gradient(int64_t first, int64_t t, const int32_t* starts, const float* scores, const float* d_p,
                                        Lanes normalizer, Lanes mean, number* p, number* d_s, number* right_d_s) {
        const Lanes none = all(0.0f);
        for (int64_t r = 0; r < BLOCK; r += 2) {
            Lanes change[2];
            for (int64_t x = r; x < r + 2; x++) {
                Lanes e = exponential(load(scores + x * BLOCK) - normalizer);
                if (starts) e = choose(seen(first + x, t, starts), e, none);
                change[x - r] = e * (load(d_p + x * BLOCK) - mean);
                store(p + x * DEPTH, e);
                store(d_s + x * DEPTH, change[x - r]);
            }
            put_rows(right_d_s, r, change[0], change[1]);
        }
    }
};

// All heads on `threads` threads. Returns 0, or 1 without memory.
template <class Job> static int32_t run(const Job& job, int32_t threads) {
    return each_with_room(job.z.rows * job.z.heads, threads, job.bytes(), [&](int64_t i, Room& scratch) {
        job.head(i / job.z.heads, i % job.z.heads, scratch);
    });
}

static Matrix matrix(const int64_t*& m) {
    const Matrix found = {(number*)m[0], {m[1], m[2], m[3]}};
    m += 4;
    return found;
}

// Addresses of temperature, share, cos and sin, and the stride of the tables; null: no prologue.
static Prologue prologue_of(const int64_t* p, float eps) {
    if (!p) return {};
    return {(const float*)p[0], (const float*)p[1], (const number*)p[2], (const number*)p[3], p[4], eps};
}

extern "C" {

// matrices: address and strides (row, head, position) of q, k, v and out; features are adjacent. lse: [rows, heads, length].
// starts: of `Sizes`, or null. prologue, eps: of `prologue_of`.
int32_t whorl_attention(const int64_t* matrices, float* lse, const int32_t* starts, const int64_t* sizes, int32_t threads,
                        const int64_t* prologue, float eps) {
    const int64_t* m = matrices;
    const auto call = [&](auto job) {
        job.z = {sizes[0], sizes[1], sizes[2], sizes[3], starts};
        for (Matrix* one : {&job.q, &job.k, &job.v, &job.out}) *one = matrix(m);
        job.prologue = prologue_of(prologue, eps);
        job.lse = lse;
        return run(job, threads);
    };
    return sizes[3] == USUAL_D ? call(Forward<USUAL_D>()) : call(Forward<0>());
}

// matrices: q, k, v, out, and the gradients of out, q, k and v. scalars: of `Backward`, for a prologue.
int32_t whorl_attention_backward(const int64_t* matrices, const float* lse, const int32_t* starts, const int64_t* sizes,
                                 int32_t threads, const int64_t* prologue, float eps, float* scalars) {
    const int64_t* m = matrices;
    const auto call = [&](auto job) {
        job.z = {sizes[0], sizes[1], sizes[2], sizes[3], starts};
        for (Matrix* one : {&job.q, &job.k, &job.v, &job.out, &job.d_out, &job.d_q, &job.d_k, &job.d_v}) *one = matrix(m);
        job.prologue = prologue_of(prologue, eps);
        job.lse = lse;
        job.scalars = scalars;
        return run(job, threads);
    };
    return sizes[3] == USUAL_D ? call(Backward<USUAL_D>()) : call(Backward<0>());
}
}
