// Causal attention in bf16 with fp32 sums: forward, and backward from the log-sum of each row (FlashAttention, Dao et al.
// 2022, arXiv:2205.14135; Dao 2023, arXiv:2307.08691). Products run on AMX tiles.
//
//     S = Q K^T (j <= i),  P = exp(S - lse),  O = P V
//     dV = P^T dO,  dS = P * (dO V^T - rowsum(dO * O)),  dQ = dS K,  dK = dS^T Q
//
// A block has 32 queries or keys; blocks above the diagonal are left out. The forward keeps the scores of one block of
// queries over all keys. The backward keeps those of one block of keys over all later queries, transposed: dV and dK are
// then sums over one row of blocks. dQ^T is summed over groups of keys. For it, dS^T is written as a right operand too.
//
// In packed rows a query sees no key before the start of its document. Starts never fall along a row, so the blocks that a
// query or a key needs are adjacent, and the others are left out.
#include "tiles.h"

#include <cmath>
#include <thread>
#include <vector>

constexpr int64_t GROUP = 4;            // blocks of keys whose dS^T is kept
constexpr float MASKED = 1e30f;         // log-sum of a query that does not exist: its probabilities are 0

struct Matrix {  // [rows][heads][length][d]: numbers between rows, heads and positions
    bf16* data;
    int64_t strides[3];
    bf16* head(int64_t row, int64_t head) const { return data + row * strides[0] + head * strides[1]; }
};

struct Sizes {
    int64_t rows, heads, length, d;
    const int32_t* starts;  // [rows][length], first position of each position's document; null: one document a row
    int64_t blocks() const { return (length + BLOCK - 1) / BLOCK; }

    // Starts of one row, padded to whole blocks with that of the last position.
    void copy_starts(int64_t row, int32_t* to) const {
        for (int64_t t = 0; t < blocks() * BLOCK; t++) {
            const int64_t at = t < length ? t : length - 1;
            to[t] = starts ? starts[row * length + at] : 0;
        }
    }
};

// Rows of one head, padded with 0 to whole blocks: [blocks * 32][d].
static void copy_rows(const bf16* from, int64_t stride, const Sizes& z, bf16* to) {
    for (int64_t t = 0; t < z.length; t++) memcpy(to + t * z.d, from + t * stride, z.d * sizeof(bf16));
    memset(to + z.length * z.d, 0, (z.blocks() * BLOCK - z.length) * z.d * sizeof(bf16));
}

// X^T as a right operand [d][length]: 16 positions by 32 features a tile, in the order [position / 16][feature / 32].
static void pack_transposed(const bf16* rows, const Sizes& z, bf16* to) {
    for (int64_t n = 0; n < z.blocks() * 2; n++)
        for (int64_t k = 0; k < z.d / DEPTH; k++, to += TILE)
            transpose((const pair*)(rows + n * SIDE * z.d + k * DEPTH), z.d / 2, (pair*)to, SIDE);
}

// X as a right operand [length][d]: pairs of positions by 16 features, in the order [feature / 16][position / 32]. With
// `turned`, X^T as a left operand [d][length]: 16 features by 32 positions, in the same order.
static void pack(const bf16* rows, const Sizes& z, bf16* to, bool turned) {
    pair tile[SIDE * SIDE];
    for (int64_t n = 0; n < z.d / SIDE; n++)
        for (int64_t k = 0; k < z.blocks(); k++, to += TILE) {
            pair* into = turned ? tile : (pair*)to;
            for (int64_t p = 0; p < SIDE; p++) {
                const bf16 *low = rows + (k * DEPTH + 2 * p) * z.d + n * SIDE, *high = low + z.d;
                for (int64_t c = 0; c < SIDE; c++) into[p * SIDE + c] = pair(low[c]) | pair(high[c]) << 16;
            }
            if (turned) transpose(tile, SIDE, (pair*)to, SIDE);
        }
}

static void write_rows(const float* from, int64_t stride, float factor, int64_t rows, int64_t d, bf16* to, int64_t to_stride) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < d; c++) to[r * to_stride + c] = bf16(rounded(from[r * stride + c] * factor));
}

struct Inputs {
    Sizes z;
    Matrix q, k, v;

    void copy_head(int64_t row, int64_t head, bf16* queries, bf16* keys, bf16* values, int32_t* starts) const {
        copy_rows(q.head(row, head), q.strides[2], z, queries);
        copy_rows(k.head(row, head), k.strides[2], z, keys);
        copy_rows(v.head(row, head), v.strides[2], z, values);
        z.copy_starts(row, starts);
    }
};

struct Forward : Inputs {
    Matrix out;
    float* lse;

    size_t bytes() const {
        const size_t n = z.blocks() * BLOCK;
        return 5 * n * z.d * sizeof(bf16) + BLOCK * (6 * n + 4 * z.d) + 4 * n + 1024;
    }

    void head(int64_t row, int64_t head, Scratch& scratch) const {
        const int64_t n = z.blocks() * BLOCK, d = z.d;
        bf16 *queries = scratch.take<bf16>(n * d), *keys = scratch.take<bf16>(n * d), *values = scratch.take<bf16>(n * d);
        bf16 *right_keys = scratch.take<bf16>(n * d), *right_values = scratch.take<bf16>(n * d);
        float *scores = scratch.take<float>(BLOCK * n), *sums = scratch.take<float>(BLOCK * d);
        bf16* p = scratch.take<bf16>(BLOCK * n);
        int32_t* starts = scratch.take<int32_t>(n);
        copy_head(row, head, queries, keys, values, starts);
        pack_transposed(keys, z, right_keys);
        pack(values, z, right_values, false);
        for (int64_t i = 0; i < z.blocks(); i++) {
            const int64_t first = i * BLOCK, n_keys = first + BLOCK;
            const int64_t n_rows = z.length - first < BLOCK ? z.length - first : BLOCK;
            const int64_t j0 = starts[first] / BLOCK, key = j0 * BLOCK;  // of the first block and key that a query sees
            for (int64_t j = j0; j <= i; j++)
                multiply(queries + first * d, d, DEPTH, SIDE * d, right_keys + j * BLOCK * d, SIDE * d, d / DEPTH,
                         scores + j * BLOCK, n, false);
            for (int64_t r = 0; r < BLOCK; r++) {
                float* s = scores + r * n;
                bf16* to = p + r * n;
                for (int64_t c = first + r + 1; c < n_keys; c++) s[c] = -INFINITY;
                for (int64_t c = key; c < starts[first + r]; c++) s[c] = -INFINITY;
                float most = -INFINITY, sum = 0.0f;
#pragma omp simd reduction(max : most)
                for (int64_t c = key; c < n_keys; c++) most = s[c] > most ? s[c] : most;
#pragma omp simd reduction(+ : sum)
                for (int64_t c = key; c < n_keys; c++) {
                    const float e = exponential(s[c] - most);
                    sum += e;
                    to[c] = bf16(rounded(e));
                }
                s[0] = 1.0f / sum;
                if (r < n_rows) lse[(row * z.heads + head) * z.length + first + r] = most + logf(sum);
            }
            for (int64_t c = 0; c < d; c += BLOCK)
                multiply(p + key, n, DEPTH, SIDE * n, right_values + c * n + j0 * TILE, SIDE * n, i + 1 - j0, sums + c, d, false);
            for (int64_t r = 0; r < n_rows; r++)
                write_rows(sums + r * d, 0, scores[r * n], 1, d, out.head(row, head) + (first + r) * out.strides[2], 0);
        }
    }
};

struct Backward : Inputs {
    Matrix out, d_out, d_q, d_k, d_v;
    const float* lse;

    size_t bytes() const {
        const size_t n = z.blocks() * BLOCK;
        return 9 * n * z.d * sizeof(bf16) + 4 * z.d * n + n * (8 + BLOCK * 12 + GROUP * BLOCK * 2) + 4 * BLOCK * z.d + 4 * n + 2048;
    }

    void head(int64_t row, int64_t head, Scratch& scratch) const {
        const int64_t n = z.blocks() * BLOCK, d = z.d, blocks = z.blocks();
        bf16 *queries = scratch.take<bf16>(n * d), *keys = scratch.take<bf16>(n * d), *values = scratch.take<bf16>(n * d);
        bf16 *grads = scratch.take<bf16>(n * d), *turned_queries = scratch.take<bf16>(n * d);
        bf16 *turned_grads = scratch.take<bf16>(n * d), *right_queries = scratch.take<bf16>(n * d);
        bf16 *right_grads = scratch.take<bf16>(n * d), *turned_keys = scratch.take<bf16>(n * d);
        float *sum_q = scratch.take<float>(d * n), *normalizer = scratch.take<float>(n), *mean = scratch.take<float>(n);
        float *scores = scratch.take<float>(BLOCK * n), *d_p = scratch.take<float>(BLOCK * n);
        bf16 *p = scratch.take<bf16>(BLOCK * n), *d_s = scratch.take<bf16>(BLOCK * n);
        bf16* right_d_s = scratch.take<bf16>(GROUP * BLOCK * n);
        float* sums = scratch.take<float>(BLOCK * d);
        int32_t* starts = scratch.take<int32_t>(n);
        copy_head(row, head, queries, keys, values, starts);
        copy_rows(d_out.head(row, head), d_out.strides[2], z, grads);
        pack_transposed(queries, z, turned_queries);
        pack_transposed(grads, z, turned_grads);
        pack(queries, z, right_queries, false);
        pack(grads, z, right_grads, false);
        pack(keys, z, turned_keys, true);
        for (int64_t t = 0; t < n; t++) {
            normalizer[t] = t < z.length ? lse[(row * z.heads + head) * z.length + t] : MASKED;
            float sum = 0.0f;
            if (t < z.length) {
                const bf16* o = out.head(row, head) + t * out.strides[2];
#pragma omp simd reduction(+ : sum)
                for (int64_t c = 0; c < d; c++) sum += widen(o[c]) * widen(grads[t * d + c]);
            }
            mean[t] = sum;
        }
        for (int64_t g = 0; g < blocks; g += GROUP) {
            const int64_t last = g + GROUP < blocks ? g + GROUP : blocks;
            for (int64_t j = g; j < last; j++) {
                const int64_t first = j * BLOCK;  // of the keys, and of the queries that see them
                int64_t stop = j + 1;  // of the blocks of queries
                while (stop < blocks && starts[stop * BLOCK] < first + BLOCK) stop++;
                for (int64_t i = j; i < stop; i++) {
                    multiply(keys + first * d, d, DEPTH, SIDE * d, turned_queries + i * BLOCK * d, SIDE * d, d / DEPTH,
                             scores + i * BLOCK, n, false);
                    multiply(values + first * d, d, DEPTH, SIDE * d, turned_grads + i * BLOCK * d, SIDE * d, d / DEPTH,
                             d_p + i * BLOCK, n, false);
                }
                for (int64_t r = 0; r < BLOCK; r += 2)
                    softmax_gradient(r, first, stop * BLOCK, n, j - g, starts, scores, d_p, normalizer, mean, p, d_s, right_d_s);
                const int64_t n_rows = z.length - first < BLOCK ? z.length - first : BLOCK;
                for (const bool of_values : {true, false}) {
                    const bf16 *left = of_values ? p : d_s, *right = of_values ? right_grads : right_queries;
                    const Matrix& to = of_values ? d_v : d_k;
                    for (int64_t c = 0; c < d; c += BLOCK)
                        multiply(left + first, n, DEPTH, SIDE * n, right + c * n + j * TILE, SIDE * n, stop - j, sums + c, d, false);
                    write_rows(sums, d, 1.0f, n_rows, d, to.head(row, head) + first * to.strides[2], to.strides[2]);
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
        alignas(64) float tile[SIDE * SIDE];
        for (int64_t t = 0; t < z.length; t += SIDE)
            for (int64_t c = 0; c < d; c += SIDE) {
                transpose((const pair*)(sum_q + c * n + t), n, (pair*)tile, SIDE);
                write_rows(tile, SIDE, 1.0f, z.length - t < SIDE ? z.length - t : SIDE, SIDE,
                           d_q.head(row, head) + t * d_q.strides[2] + c, d_q.strides[2]);
            }
    }

    // P^T and dS^T of keys `first` + r and `first` + r + 1, and both rows of dS^T as a row of pairs of right tiles.
    static void softmax_gradient(int64_t r, int64_t first, int64_t stop, int64_t n, int64_t step, const int32_t* starts,
                                 const float* scores, const float* d_p, const float* normalizer, const float* mean, bf16* p,
                                 bf16* d_s, bf16* right_d_s) {
        const int32_t key0 = int32_t(first + r), key1 = key0 + 1;
        const float *s0 = scores + r * n, *s1 = s0 + n, *g0 = d_p + r * n, *g1 = g0 + n;
        bf16 *p0 = p + r * n, *p1 = p0 + n, *d0 = d_s + r * n, *d1 = d0 + n;
        for (int64_t t = first; t < stop; t += SIDE) {
            pair* tile = (pair*)(right_d_s + (t / SIDE * GROUP + step) * TILE) + r / 2 * SIDE;
            const int64_t from0 = first + r - t, from1 = from0 + 1;  // queries before these do not see the key
#pragma omp simd
            for (int64_t c = 0; c < SIDE; c++) {
                const float e0 = c < from0 || starts[t + c] > key0 ? 0.0f : exponential(s0[t + c] - normalizer[t + c]);
                const float e1 = c < from1 || starts[t + c] > key1 ? 0.0f : exponential(s1[t + c] - normalizer[t + c]);
                const uint32_t low = rounded(e0 * (g0[t + c] - mean[t + c])), high = rounded(e1 * (g1[t + c] - mean[t + c]));
                p0[t + c] = bf16(rounded(e0));
                p1[t + c] = bf16(rounded(e1));
                d0[t + c] = bf16(low);
                d1[t + c] = bf16(high);
                tile[c] = low | high << 16;
            }
        }
    }
};

// All heads on `threads` threads. Returns 0, or 1 without memory.
template <class Job> static int32_t run(const Job& job, int32_t threads) {
    const int64_t heads = job.z.rows * job.z.heads, n = threads < heads ? threads : heads;
    std::vector<int32_t> failed(n > 0 ? n : 1, 0);
    const auto work = [&](int64_t t) {
        static thread_local Scratch scratch;
        const WholeTiles tiles;
        for (int64_t h = t * heads / n; h < (t + 1) * heads / n; h++) {
            if (!scratch.reserve(job.bytes())) {
                failed[t] = 1;
                break;
            }
            job.head(h / job.z.heads, h % job.z.heads, scratch);
        }
    };
    std::vector<std::thread> others;
    for (int64_t t = 1; t < n; t++) others.emplace_back(work, t);
    if (n > 0) work(0);
    for (auto& one : others) one.join();
    for (int32_t one : failed)
        if (one) return 1;
    return 0;
}

static Matrix matrix(const int64_t*& m) {
    const Matrix found = {(bf16*)m[0], {m[1], m[2], m[3]}};
    m += 4;
    return found;
}

extern "C" {

// matrices: address and strides (row, head, position) of q, k, v and out; features are adjacent. lse: [rows, heads, length].
// starts: of `Sizes`, or null.
int32_t whorl_attention(const int64_t* matrices, float* lse, const int32_t* starts, const int64_t* sizes, int32_t threads) {
    const int64_t* m = matrices;
    Forward job = {{{sizes[0], sizes[1], sizes[2], sizes[3], starts}}};
    for (Matrix* one : {&job.q, &job.k, &job.v, &job.out}) *one = matrix(m);
    job.lse = lse;
    return run(job, threads);
}

// matrices: q, k, v, out, and the gradients of out, q, k and v.
int32_t whorl_attention_backward(const int64_t* matrices, const float* lse, const int32_t* starts, const int64_t* sizes,
                                 int32_t threads) {
    const int64_t* m = matrices;
    Backward job = {{{sizes[0], sizes[1], sizes[2], sizes[3], starts}}};
    for (Matrix* one : {&job.q, &job.k, &job.v, &job.out, &job.d_out, &job.d_q, &job.d_k, &job.d_v}) *one = matrix(m);
    job.lse = lse;
    return run(job, threads);
}
}
