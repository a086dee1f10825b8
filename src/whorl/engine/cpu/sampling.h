// Samples ids from logits: engine/sampling/sampler.py's distribution for rows without masks, biases and penalties.
//
// The distribution is inverted in the order of ids: the first id whose cumulative weight exceeds u times the sum. Weights are
// summed in blocks in fp32, and blocks in fp64, so only one block is searched. For top-k and top-p, the bound of
// the kept weights is bisected. A row's bits depend on its own numbers alone.
#pragma once

#include "step.h"
#include "summary.h"

#include <algorithm>

constexpr int64_t WEIGHTS_PER_BLOCK = 128;
constexpr int64_t MIN_SHARED_LOGITS = 1 << 15;  // with fewer, waking a thread takes longer than the work

// Settings and results of draws from the rows of a decode step. In Python: layout.Sampling.
struct Sampling {
    int64_t most;              // Tokens of a row at most.
    const double* u;           // Numbers in [0, 1): [rows][most].
    const float* temperature;  // Of each row; 0 is greedy.
    const int64_t* top_k;      // Most likely ids that are kept; 0 keeps all.
    const double* top_p;       // Mass of more likely ids below which an id is kept; 2 keeps all.
    const float* min_p;        // Smallest weight that is kept, as a share of the largest.
    const int64_t* limits;     // Tokens of each row, 1 to most.
    const uint8_t* banned;     // Ids that are never drawn: [vocab].
    const uint8_t* stops;      // Ids that end a row: [vocab].
    int64_t until_ended;       // Rows that end before all others stop; 0: none stops.
    int64_t* ids;              // Tokens: [rows][most], -1 where nothing can be drawn.
    double* log_probs;         // Of the distribution: [rows][most].
    float* raw;                // Log softmax of the logits: [rows][most].
    int64_t* counts;           // Tokens drawn from each row.
};

struct Drawn {
    int64_t id;
    double log_prob;
    float raw;
};

// The most likely id that is not banned, the first of equal ones; the first NaN, if there is one; -1 without any id.
INLINE int64_t most_likely(const float* z, int64_t n, const uint8_t* banned, int64_t first) {
    if (!banned[first]) return first;
    int64_t best = -1;
    for (int64_t i = 0; i < n; i++) {
        if (banned[i]) continue;
        if (z[i] != z[i]) return i;
        if (best < 0 || z[i] > z[best]) best = i;
    }
    return best;
}

struct Cuts {
    int64_t top_k;
    double top_p;
    float min_p;
};

constexpr int64_t MOST_SORTED = 128;  // Weights that are sorted rather than halved again.
constexpr double SUM_MARGIN = 1e-4;   // Relative error of a sum in fp32, at most.

struct Above {
    double mass;
    int64_t count;
};

// The sum (in fp32, in lanes) and the number of weights above a bound. n: in whole blocks.
INLINE Above above(const float* weights, int64_t n, float bound) {
    Lanes sums[4] = {};
    Ints counts[4] = {};
    for (int64_t i = 0; i < n; i += 4 * WIDTH)
        UNROLL for (int j = 0; j < 4; j++) {
            const Lanes w = load_lanes(weights + i + j * WIDTH);
            const Ints larger = w > all(bound);
            sums[j] += choose(larger, w, Lanes{});
            counts[j] -= larger;
        }
    const Ints count = (counts[0] + counts[1]) + (counts[2] + counts[3]);
    int64_t total = 0;
    for (int j = 0; j < WIDTH; j++) total += count[j];
    return {sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3])), total};
}

// Zeroes all weights but the k largest (k > 0), or those with less than `mass` before them; of equal ones the first are kept.
// n: in whole blocks; weights: 0 to 1. The bound between kept and other weights is bisected, and the last few are sorted.
inline void keep_largest(float* weights, int64_t n, int64_t k, double mass, std::vector<float>& few) {
    const auto too_few = [=](const Above& a) { return k > 0 ? a.count <= k : a.mass < mass * (1 - SUM_MARGIN); };
    const auto enough = [=](const Above& a) { return k > 0 ? a.count >= k : a.mass > mass * (1 + SUM_MARGIN); };
    uint32_t low = 0, high = 0x3f800000;  // the bits of 0 and 1; floats are in the order of their bits
    int64_t at_low = above(weights, n, 0).count, at_high = 0;
    const auto number = [](uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; };
    while (high - low > 1 && at_low - at_high > MOST_SORTED) {
        const uint32_t middle = low + (high - low) / 2;
        const Above found = above(weights, n, number(middle));
        if (too_few(found))
            high = middle, at_high = found.count;
        else if (enough(found))
            low = middle, at_low = found.count;
        else
            break;  // within the error of the sums
    }
    few.clear();
    double before = 0;
    int64_t rank = 0;
    const float from = number(low), to = number(high);
    for (int64_t start = 0; start < n; start += WEIGHTS_PER_BLOCK) {
        Lanes sum{};
        Ints larger{}, between{};
        for (int64_t i = start; i < start + WEIGHTS_PER_BLOCK; i += WIDTH) {
            const Lanes w = load_lanes(weights + i);
            const Ints beyond = w > all(to);
            sum += choose(beyond, w, Lanes{});
            larger -= beyond;
            between |= (w > all(from)) ^ beyond;
        }
        int32_t some = 0;
        for (int j = 0; j < WIDTH; j++) rank += larger[j], some |= between[j];
        before += sum_lanes(sum);
        for (int64_t i = start; some && i < start + WEIGHTS_PER_BLOCK; i++)
            if (weights[i] > from && weights[i] <= to) few.push_back(weights[i]);
    }
    std::sort(few.begin(), few.end(), [](float a, float b) { return a > b; });
    size_t kept = 0;
    while (kept < few.size() && (k > 0 ? rank < k : before < mass)) before += few[kept++], rank++;
    const float least = kept ? few[kept - 1] : number(high + 1);  // the smallest that is kept
    for (int64_t i = 0; i < n; i += WIDTH) {
        const Lanes w = load_lanes(weights + i);
        store(weights + i, choose(w >= all(least), w, Lanes{}));
    }
    if (!kept || kept == few.size() || few[kept] != least) return;
    int64_t equal = 0;
    for (size_t i = kept; i-- > 0 && few[i] == least;) equal++;
    for (int64_t i = 0; i < n; i++)
        if (weights[i] == least && equal-- <= 0) weights[i] = 0;
}

// weights: room for n numbers in whole blocks, and a sum for each block.
inline Drawn draw(const float* z, int64_t n, const uint8_t* banned, float temperature, const Cuts& cuts, double u,
                  float* weights, std::vector<float>& few) {
    const int64_t first = argmax(z, n), best = most_likely(z, n, banned, first);
    if (best < 0 || !std::isfinite(z[best])) return {-1, 0, 0};
    const float log_sum = log_sum_exp(z, n, z[first]), highest = z[best];
    if (temperature <= 0) return {best, 0, highest - log_sum};
    const int64_t blocks = (n + WEIGHTS_PER_BLOCK - 1) / WEIGHTS_PER_BLOCK, padded = blocks * WEIGHTS_PER_BLOCK;
    float* sums = weights + padded;
    int64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) {
        const Lanes x = (load_lanes(z + i) - highest) / temperature;
        store(weights + i, choose(x > all(-87.0f), exp_lanes(x), Lanes{}));
    }
    for (; i < n; i++) weights[i] = std::exp((z[i] - highest) / temperature);
    for (; i < padded; i++) weights[i] = 0;
    for (i = 0; i < n; i++) weights[i] = banned[i] ? 0 : weights[i];
    double total = 0;
    const auto sum_blocks = [&] {
        total = 0;
        for (int64_t b = 0; b < blocks; b++) {
            const float* from = weights + b * WEIGHTS_PER_BLOCK;
            Lanes sum{};
            for (int64_t j = 0; j < WEIGHTS_PER_BLOCK; j += WIDTH) sum += load_lanes(from + j);
            total += sums[b] = sum_lanes(sum);
        }
    };
    if (cuts.top_k > 0 && cuts.top_k < n) keep_largest(weights, padded, cuts.top_k, 0, few);
    sum_blocks();
    if (cuts.top_p < 1) keep_largest(weights, padded, 0, cuts.top_p * total, few);
    if (cuts.min_p > 0)
        for (i = 0; i < n; i++) weights[i] = weights[i] < cuts.min_p ? 0 : weights[i];
    if (cuts.top_p < 1 || cuts.min_p > 0) sum_blocks();
    double left = u * total;
    int64_t b = 0;
    while (b + 1 < blocks && sums[b] <= left) left -= sums[b++];
    int64_t id = -1;  // the last id with a weight, if rounding leads beyond it
    for (i = b * WEIGHTS_PER_BLOCK; i < n && i < (b + 1) * WEIGHTS_PER_BLOCK; i++) {
        if (weights[i] <= 0) continue;
        id = i;
        if (weights[i] > left) break;
        left -= weights[i];
    }
    for (i = b * WEIGHTS_PER_BLOCK; id < 0 && --i >= 0;)
        if (weights[i] > 0) id = i;
    if (id < 0) id = best;
    return {id, std::log(double(weights[id]) / total), z[id] - log_sum};
}

// Draws token `at` of each row of logits [rows][n]; number[row]: its row in `to`.
inline void sample_rows(Step& step, const float* logits, int64_t rows, int64_t n, const Sampling& to, const int64_t* number,
                        int64_t at, int threads) {
    if (rows * n < MIN_SHARED_LOGITS) threads = 1;
    const int64_t blocks = (n + WEIGHTS_PER_BLOCK - 1) / WEIGHTS_PER_BLOCK;
    const int64_t room = round_up(blocks * (WEIGHTS_PER_BLOCK + 1), 64);
    float* weights = (float*)step.weights.at_least(size_t(4 * room * threads));
    step.pool.together(threads, 1, [=](Team& team) {
        std::vector<float> few;
        team.share(rows, [&](int64_t row) {
            const int64_t r = number ? number[row] : row, place = r * to.most + at;
            const Cuts cuts = {to.top_k[r], to.top_p[r], to.min_p[r]};
            const Drawn drawn = draw(logits + row * n, n, to.banned, to.temperature[r], cuts, to.u[place],
                                     weights + team.id * room, few);
            to.ids[place] = drawn.id, to.log_probs[place] = drawn.log_prob, to.raw[place] = drawn.raw;
            to.counts[r] = at + 1;
        });
    });
}

// Removes the rows that ended from the arrays of a decode step, and moves the others by one position.
// number: [rows] of each row in `to`; previous: [rows][reach], as Batch.before.
inline void next_inputs(const Model& model, Batch& batch, const Sampling& to, std::vector<int64_t>& number, int64_t* ids,
                        int32_t* lengths, int64_t* previous, int64_t at) {
    const int64_t reach = previous ? model.orders[model.n_orders - 1] - 1 : 0;
    int64_t kept = 0;
    for (int64_t row = 0; row < batch.rows; row++) {
        const int64_t r = number[size_t(row)], id = to.ids[r * to.most + at];
        if (id < 0 || to.stops[id] || to.counts[r] >= to.limits[r]) continue;
        for (int64_t k = 0; k < reach; k++)
            previous[kept * reach + k] = k + 1 < reach ? previous[row * reach + k + 1] : ids[row];
        const int32_t* last = nullptr;
        for (int64_t l = 0; l < model.n_layers && kept < row; l++) {
            const LayerCache& cache = batch.caches[l];
            if (cache.pages == last) continue;  // layers of one group share a table
            last = cache.pages;
            memcpy((int32_t*)cache.pages + kept * cache.pages_stride, cache.pages + row * cache.pages_stride,
                   size_t(4 * cache.pages_stride));
        }
        ids[kept] = id, lengths[kept] = lengths[row] + 1, number[size_t(kept)] = r;
        kept++;
    }
    batch.n = batch.rows = batch.wanted = kept;
}
