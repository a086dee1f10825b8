// One step of a dense decoder over a batch of ragged rows, from ids to logits: prefill chunks and decoding tokens together.
//
// It is the torch model's forward (models/transformer.py) with three differences. The residual stream and
// everything between two products is fp32, for any type of the products. Keys and values go to the pages of a cache, and
// attention reads them there. The step is one call: a token of a small model takes some hundred operations of a few
// microseconds each, and calling them from Python costs more than running them.
//
// A layer is nine phases (`share`), each split among the threads; a phase starts when the previous one is complete:
//
//     qkv = W h                              blocks of outputs
//     norm and rotate q and k; k, v -> pages; attend   (row, key head, tokens); two phases if a row has two chunks
//     ready(y)                               rows, to the type of the next weight
//     x += W y                               blocks
//     h = ready(norm(x))                     rows
//     a = act(W h)                           blocks, gate and up projection interleaved
//     ready(a)                               rows
//     x += W a                               blocks
//     h = ready(norm(x)) of the next layer   rows
//
// The last layer computes keys and values of all positions. The steps after them run only at positions with logits:
// for a prompt the last one, or none in the first chunks of a long prompt.
#pragma once

#include "model.h"

constexpr int TASKS_PER_THREAD = 8;  // of attention, at least

struct Piece {
    int32_t row;
    int32_t from, to;  // range of the row's tokens in this batch
};

struct Step {
    Room x, normed, qkv, y, hidden, branch, attention, last, weights;
    ReadyRoom input, second, between, chosen;
    std::vector<Piece> pieces, last_pieces;
    Pool pool;           // last member: its threads end before the data that they read
};

// Key heads of a task of attention: as many as leave enough tasks, since the heads of a page are adjacent in memory.
INLINE int heads_together(const Heads& h, int64_t n_pieces, int threads, bool split) {
    if (split || threads < 2 || !n_pieces) return split ? 1 : h.n_kv_heads;
    const int64_t parts = (TASKS_PER_THREAD * threads + n_pieces - 1) / n_pieces;
    return parts >= h.n_kv_heads ? 1 : int((h.n_kv_heads + parts - 1) / parts);
}

template <class T>
struct Run {
    const Model& model;  // owned by the caller, as long as the pool
    Batch batch;         // a copy
    // Copies: a helper thread that arrives late may still read them.
    Ready input, second, between, chosen;
    const Piece *pieces, *last_pieces;  // last: of the positions with logits
    int64_t n_pieces, n_last_pieces;
    bool split;  // some row has several chunks
    float *x, *normed, *qkv, *y, *hidden, *branch, *attention;
    float* last;  // [W][d_model], the residual stream of the positions with logits; null if the last layer computes all
    int64_t d, normed_room, qkv_width, attention_floats;
    int threads;

    static Cache<T> cache_of(const LayerCache& kept) {
        return {(T*)kept.k, (T*)kept.v, kept.k_scale, kept.v_scale, kept.page, kept.head, kept.position};
    }
    float* own(const Team& team) const { return normed + team.id * normed_room; }

    void embed(int64_t row, int64_t i) {
        const int64_t t = batch.starts[row] + i;
        const float* from = model.embedding + batch.ids[t] * d;
        float* to = x + t * d;
        for (int64_t c = 0; c < d; c++) to[c] = from[c] * model.embedding_scale;
        if (model.positions) {
            const int64_t tokens = batch.starts[row + 1] - batch.starts[row];
            const float* at = model.positions + (batch.lengths[row] - tokens + i) * d;
            for (int64_t c = 0; c < d; c++) to[c] += at[c];
        }
        if (model.n_orders) {
            int64_t past[64];
            const int64_t reach = model.orders[model.n_orders - 1] - 1;
            past[0] = batch.ids[t];
            for (int64_t back = 1; back <= reach; back++) past[back] = batch.before[t * reach + reach - back];
            add_memory(model, past, to);
        }
        if (model.first_norm.kind) normalise(model.first_norm, to, d, to);
    }

    // Process a chunk's queries in place; write its keys and values to the pages.
    void turn_piece(const Layer& layer, const LayerCache& kept, const Piece& piece, int64_t kv) {
        const Heads& h = layer.heads;
        const Cache<T> cache = cache_of(kept);
        const int64_t hd = h.head_dim, group = h.n_heads / h.n_kv_heads, start = batch.starts[piece.row];
        const int64_t first = batch.lengths[piece.row] - (batch.starts[piece.row + 1] - start);
        const int32_t* pages = kept.pages + piece.row * kept.pages_stride;
        float key[1024];
        for (int64_t i = piece.from; i < piece.to; i++) {
            float* token = qkv + (start + i) * qkv_width;
            for (int64_t head = kv * group; head < (kv + 1) * group; head++) {
                float* q = token + head * hd;
                Norm norm = layer.q_norm;
                if (norm.gain) norm.gain += head * hd;
                normalise(norm, q, hd, q);
                turn(layer, first + i, q);
            }
            const float *k = token + (h.n_heads + kv) * hd, *v = k + h.n_kv_heads * hd;
            memcpy(key, k, size_t(hd) * 4);
            const int64_t at = cache.at(h, pages, kv, first + i);
            if (layer.smear) {
                const auto smear = [&](auto* raw) {
                    if (first + i > 0) {  // k itself is not changed: the next position reads it
                        const auto* before = raw + cache.at(h, pages, kv, first + i - 1);
                        for (int64_t c = 0; c < hd; c++)
                            key[c] += layer.smear[kv] * ((i > 0 ? k[c - qkv_width] : widen(before[c])) - key[c]);
                    }
                    for (int64_t c = 0; c < hd; c++) put(raw + at + c, k[c]);
                };
                kept.raw_bf16 ? smear((bf16*)kept.raw) : smear((float*)kept.raw);
            }
            Norm norm = layer.k_norm;
            if (norm.gain) norm.gain += kv * hd;
            normalise(norm, key, hd, key);
            turn(layer, first + i, key);
            put_row(cache.k + at, cache.k_scale + at / hd, key, hd);
            put_row(cache.v + at, cache.v_scale + at / hd, v, hd);
        }
    }

    // Attention of key heads [kv, kv + n_kv).
    void attend_piece(const Layer& layer, const LayerCache& kept, const Piece& piece, int64_t kv, int n_kv, float* room) {
        const Heads& h = layer.heads;
        const int64_t hd = h.head_dim, group = h.n_heads / h.n_kv_heads, width = h.n_heads * hd;
        const int64_t start = batch.starts[piece.row], tokens = batch.starts[piece.row + 1] - start;
        const int64_t t = start + piece.from, n = piece.to - piece.from;
        const int64_t position = batch.lengths[piece.row] - tokens + piece.from;
        const int32_t* pages = kept.pages + piece.row * kept.pages_stride;
        const float* queries = qkv + t * qkv_width;
        const auto run = [&](auto&& by) {
            for (int64_t k = kv, at = kv * group * hd; k < kv + n_kv; k++, at += group * hd)
                by(h, cache_of(kept), pages, k, position, n, queries + at, qkv_width, y + t * width + at, width, room);
        };
        if constexpr (sizeof(T) < 4) {
            const bool by_tiles = attends_by_tiles(h, layer.qkv) && n * group >= MIN_TILE_QUERIES;
#ifdef WHORL_AMX
            if (by_tiles && layer.qkv.method == TILES) return run(attend_by_tiles<TileRegisters, T>);
#endif
            if (by_tiles && layer.qkv.method == EMULATED_TILES) return run(attend_by_tiles<EmulatedTiles, T>);
#ifdef __AVX512BF16__
            if (by_tiles && layer.qkv.method == VECTORS) return run(attend_by_tiles<PairVectors, T>);
#endif
        }
        if (n * group > FEW || !attends_in_place(h)) return run(attend<T>);
        const int64_t at = kv * group * hd;
        attend_few<T>(h, cache_of(kept), pages, kv, n_kv, position, n, queries + at, qkv_width, y + t * width + at, width, room);
    }

    void operator()(Team& team, float* logits) {
        int64_t n = batch.n;
        const Layer* layers = model.layers;
        // Prepare the rows for the products that read a layer's first norm.
        const auto ready_layer = [&](const Layer& layer, int64_t t) {
            normalise(layer.mixer_norm, x + t * d, d, own(team));
            ready_row(layer.qkv, input.rows(layer.qkv), t, own(team));
            if (model.parallel) ready_row(layer.up, second.rows(layer.up), t, own(team));
        };
        // Add a branch that has a post-norm.
        const auto add_normed = [&](const Norm& after, int64_t t) {
            if (!after.kind) return;
            normalise(after, branch + t * d, d, branch + t * d);
            for (int64_t c = 0; c < d; c++) x[t * d + c] += branch[t * d + c];
        };
        team.share(n_pieces, [&](int64_t p) {
            const Piece& piece = pieces[p];
            for (int64_t i = piece.from; i < piece.to; i++) {
                embed(piece.row, i);
                ready_layer(layers[0], batch.starts[piece.row] + i);
            }
        });
        for (int64_t l = 0; l < model.n_layers; l++) {
            const Layer& layer = layers[l];
            const LayerCache& kept = batch.caches[l];
            const Heads& h = layer.heads;
            qkv_width = layer.qkv.n;
            product(team, layer.qkv, input.rows(layer.qkv), n, {PUT, qkv, qkv_width});
            float* room = attention + team.id * attention_floats;
            const bool shortened = last && l + 1 == model.n_layers;
            // work(piece, key head, number of heads) for each piece and some heads.
            const auto share_heads = [&](const Piece* of, int64_t count, auto work) {
                const int together = heads_together(h, count, threads, split);
                const int64_t parts = (h.n_kv_heads + together - 1) / together;
                team.share(count * parts, [&](int64_t i) {
                    const int64_t kv = i % parts * together, left = h.n_kv_heads - kv;
                    work(of[i / parts], kv, int(left < together ? left : together));
                });
            };
            const auto turn_heads = [&](const Piece& piece, int64_t kv, int n_kv) {
                for (int64_t k = kv; k < kv + n_kv; k++) turn_piece(layer, kept, piece, k);
            };
            const bool separate = split || shortened;
            if (separate) share_heads(pieces, n_pieces, turn_heads);
            if (shortened && !batch.wanted) return;
            share_heads(shortened ? last_pieces : pieces, shortened ? n_last_pieces : n_pieces,
                        [&](const Piece& piece, int64_t kv, int n_kv) {
                            if (!separate) turn_heads(piece, kv, n_kv);
                            attend_piece(layer, kept, piece, kv, n_kv, room);
                        });
            if (shortened) n = batch.wanted;
            team.share_rows(n, [&](int64_t t) {
                const int64_t from = shortened ? batch.which[t] : t;
                if (shortened) memcpy(last + t * d, x + from * d, size_t(d) * 4);
                ready_row(layer.out, between.rows(layer.out), t, y + from * layer.out.k);
            });
            if (shortened) x = last;
            product(team, layer.out, between.rows(layer.out), n,
                    layer.mixer_after.kind ? Target{PUT, branch, d} : Target{ADD, x, d});
            if (!model.parallel)
                team.share_rows(n, [&](int64_t t) {
                    add_normed(layer.mixer_after, t);
                    normalise(layer.mlp_norm, x + t * d, d, own(team));
                    ready_row(layer.up, second.rows(layer.up), t, own(team));
                });
            product(team, layer.up, second.rows(layer.up), n,
                    {ACTIVATE, hidden, layer.down.k, ::Activation(layer.activation)});
            team.share_rows(n, [&](int64_t t) { ready_row(layer.down, between.rows(layer.down), t, hidden + t * layer.down.k); });
            product(team, layer.down, between.rows(layer.down), n,
                    layer.mlp_after.kind ? Target{PUT, branch, d} : Target{ADD, x, d});
            if (layer.mlp_after.kind || l + 1 < model.n_layers)
                team.share_rows(n, [&](int64_t t) {
                    add_normed(layer.mlp_after, t);
                    if (l + 1 < model.n_layers) ready_layer(layers[l + 1], t);
                });
        }
        if (batch.hidden)
            team.share_rows(n, [&](int64_t t) { normalise(model.final_norm, x + t * d, d, batch.hidden + t * d); });
        if (!batch.wanted) return;
        team.share(batch.wanted, [&](int64_t i) {
            normalise(model.final_norm, x + (last ? i : batch.which[i]) * d, d, own(team));
            ready_row(model.head, chosen.rows(model.head), i, own(team));
        });
        Target to{PUT, logits, model.vocab};
        to.cap = model.logit_softcap;
        product(team, model.head, chosen.rows(model.head), batch.wanted, to);
    }
};
