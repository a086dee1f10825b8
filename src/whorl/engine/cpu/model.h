// A dense decoder as numbers and addresses; engine/cpu/layout.py mirrors these structures field by field.
#pragma once

#include "decode_attention.h"
#include "product.h"
#include "tile_attention.h"

enum NormKind : int32_t { NO_NORM = 0, RMS, LAYER };

struct Norm {
    const float* gain;  // [d], or null for 1
    const float* bias;  // [d], or null for 0
    float eps;
    int32_t kind;
};

struct Layer {
    Norm mixer_norm, mixer_after, mlp_norm, mlp_after;  // `after`: post-norms of a sandwich block
    Matrix qkv, out, up, down;
    Heads heads;
    Norm q_norm, k_norm;      // over head_dim; gains for all heads, [n_heads * head_dim], [n_kv_heads * head_dim]
    const float* smear;       // [n_kv_heads], fraction of the previous key, or null
    const float *cos, *sin;   // [positions][rotary_dim], or null: no rotary embedding
    int64_t rotary_dim;
    int32_t interleaved;
    int32_t activation;
};

constexpr int ORDERS = 4;

struct Model {
    int64_t vocab, d_model, n_layers;
    const float* embedding;  // [vocab][d_model]
    const float* positions;  // [max_length][d_model], learned, or null
    float embedding_scale;
    float logit_softcap;     // 0: none
    Norm first_norm, final_norm;  // first: of the embedded ids; kind 0: none
    Matrix head;
    const Layer* layers;
    int64_t parallel;        // attention and MLP read the same norm
    int64_t n_orders, orders[ORDERS], buckets;  // n-gram embedding
    const void* tables[ORDERS];                 // [buckets][d_model], float or int8
    const float* table_scales[ORDERS];          // [buckets] of int8, or null
};

// k, v, raw: [n_pages][n_kv_heads][page_size][head_dim] with the given strides; position p of a row is in page
// pages[row][p / page_size]. raw: keys before smearing, in fp32 or bf16, or null. Scales: of int8, a number per row of head_dim.
struct LayerCache {
    void *k, *v, *raw;
    float *k_scale, *v_scale;
    int64_t page, head, position;  // strides, in elements
    const int32_t* pages;
    int64_t pages_stride, n_pages, raw_bf16;
};

struct Batch {
    int64_t n, rows, wanted, cache_kind;  // Kind, of keys and values
    const int64_t* ids;
    const int32_t *starts, *lengths;
    const int64_t* which;   // [W] positions that need logits
    const int64_t* before;  // [n][reach] ids before each, the nearest last, -1 where there are none; or null
    const LayerCache* caches;
    float* hidden;          // [n][d_model], the final norm of every position, or null
};

// y = norm(x), d numbers.
inline void normalise(const Norm& norm, const float* x, int64_t d, float* y) {
    if (norm.kind == NO_NORM) {
        memmove(y, x, size_t(d) * 4);
        return;
    }
    const int64_t whole = d / WIDTH * WIDTH;
    const int rest = int(d - whole);
    float mean = 0;
    if (norm.kind == LAYER) {
        Lanes sum{};
        for (int64_t c = 0; c < whole; c += WIDTH) sum += load_lanes(x + c);
        if (rest) sum += load_some(x + whole, rest);
        mean = sum_lanes(sum) / float(d);
    }
    Lanes squares{};
    for (int64_t c = 0; c < whole; c += WIDTH) {
        const Lanes v = load_lanes(x + c) - mean;
        squares += v * v;
    }
    float total = sum_lanes(squares);
    for (int64_t c = whole; c < d; c++) total += (x[c] - mean) * (x[c] - mean);
    const float scale = 1.0f / std::sqrt(total / float(d) + norm.eps);
    for (int64_t c = 0; c < whole; c += WIDTH) {
        Lanes v = (load_lanes(x + c) - mean) * scale;
        if (norm.gain) v *= load_lanes(norm.gain + c);
        if (norm.bias) v += load_lanes(norm.bias + c);
        store(y + c, v);
    }
    for (int64_t c = whole; c < d; c++) {
        const float v = (x[c] - mean) * scale * (norm.gain ? norm.gain[c] : 1.0f);
        y[c] = norm.bias ? v + norm.bias[c] : v;
    }
}

// Rotate the first rotary_dim features by the tables of a position, in place; nn/rotary.py has the two layouts.
inline void turn(const Layer& layer, int64_t position, float* x) {
    if (!layer.cos) return;
    const int64_t dim = layer.rotary_dim, half = dim / 2;
    const float *cos = layer.cos + position * dim, *sin = layer.sin + position * dim;
    const auto rotate = [&](int64_t step, int64_t other) __attribute__((always_inline)) {
#pragma GCC ivdep
        for (int64_t i = 0; i < half; i++) {
            const int64_t a = i * step, b = a + other;
            const float low = x[a], high = x[b];
            x[a] = low * cos[a] + high * sin[a];
            x[b] = high * cos[b] + low * sin[b];
        }
    };
    layer.interleaved ? rotate(2, 1) : rotate(1, half);
}

// nn/ngram.py, `_hash`: rows of the n-gram tables for one id and the ids before it; 32-bit arithmetic, as there.
inline void add_memory(const Model& model, const int64_t* past, float* x) {
    const uint64_t multiplier = 0x9E3779B1u, mask = 0xffffffffu;
    uint64_t state = uint64_t(past[0] + 1) * multiplier & mask;
    int64_t found = 0;
    for (int64_t back = 1; back < model.orders[model.n_orders - 1]; back++) {
        state = ((state ^ (state >> 15)) * 0x2C1B3C6Du + uint64_t(past[back] + 2) * multiplier) & mask;
        if (model.orders[found] != back + 1) continue;
        const uint64_t mixed = (state ^ (state >> 16)) * 0x45D9F3Bu & mask;
        const int64_t row = int64_t((mixed ^ (mixed >> 13)) % uint64_t(model.buckets));
        const float* scales = model.table_scales[found];
        const void* table = model.tables[found++];
        const int64_t at = row * model.d_model;
        for (int64_t c = 0; c < model.d_model; c++)
            x[c] += scales ? float(((const int8_t*)table)[at + c]) * scales[row] : ((const float*)table)[at + c];
    }
}
