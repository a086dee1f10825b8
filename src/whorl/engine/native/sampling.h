// Samples ids from logits: engine/sampling/sampler.py's distribution for rows with a temperature and no other option.
//
// The distribution is inverted in the order of ids: the first id whose cumulative weight exceeds u times the sum. Weights are
// summed in blocks in fp32, and blocks in fp64, so only one block is searched. A row's bits depend on its own numbers alone.
#pragma once

#include "step.h"
#include "summary.h"

constexpr int64_t WEIGHTS_PER_BLOCK = 128;
constexpr int64_t MIN_SHARED_LOGITS = 1 << 15;  // with fewer, waking a thread takes longer than the work

// Settings and results of draws from the rows of a decode step. In Python: layout.Sampling.
struct Sampling {
    int64_t most;              // Tokens of a row at most.
    const double* u;           // Numbers in [0, 1): [rows][most].
    const float* temperature;  // Of each row; 0 is greedy.
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

// weights: room for n numbers in whole blocks, and a sum for each block.
inline Drawn draw(const float* z, int64_t n, const uint8_t* banned, float temperature, double u, float* weights) {
    const int64_t first = argmax(z, n), best = most_likely(z, n, banned, first);
    if (best < 0 || !std::isfinite(z[best])) return {-1, 0, 0};
    const float log_sum = log_sum_exp(z, n, z[first]), highest = z[best];
    if (temperature <= 0) return {best, 0, highest - log_sum};
    const int64_t blocks = (n + WEIGHTS_PER_BLOCK - 1) / WEIGHTS_PER_BLOCK, padded = blocks * WEIGHTS_PER_BLOCK;
    float* sums = weights + padded;
    int64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) {
        const Lanes x = (load_lanes(z + i) - highest) / temperature;
        store(weights + i, x > all(-87.0f) ? exp_lanes(x) : Lanes{});
    }
    for (; i < n; i++) weights[i] = std::exp((z[i] - highest) / temperature);
    for (; i < padded; i++) weights[i] = 0;
    for (i = 0; i < n; i++) weights[i] = banned[i] ? 0 : weights[i];
    double total = 0;
    for (int64_t b = 0; b < blocks; b++) {
        const float* from = weights + b * WEIGHTS_PER_BLOCK;
        Lanes sum{};
        for (int64_t j = 0; j < WEIGHTS_PER_BLOCK; j += WIDTH) sum += load_lanes(from + j);
        total += sums[b] = sum_lanes(sum);
    }
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
        team.share(rows, [&](int64_t row) {
            const int64_t r = number ? number[row] : row, place = r * to.most + at;
            const Drawn drawn =
                draw(logits + row * n, n, to.banned, to.temperature[r], to.u[place], weights + team.id * room);
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
