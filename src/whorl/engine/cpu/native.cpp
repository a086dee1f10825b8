// The functions that Python calls (engine/cpu/build.py): plain C functions over the structures of model.h.
//
// No dependency on torch. The caller owns all memory. Ids and page numbers, which could make a kernel write out of bounds, are
// checked before the first write; the result code names the error.
#include "sampling.h"
#include "step.h"
#include "summary.h"

enum Answer : int32_t { FINE = 0, BAD_ID, BAD_PAGE, NO_MEMORY };

// A page number is checked if some position of this step may read it; entries outside of the window may hold anything.
static bool pages_exist(const Heads& h, const LayerCache& kept, const Batch& batch) {
    for (int64_t row = 0; row < batch.rows; row++) {
        const int64_t length = batch.lengths[row], first = length - (batch.starts[row + 1] - batch.starts[row]);
        if (first < 0 || length > kept.pages_stride * h.page_size) return false;
        const int64_t seen = h.window > 0 && first - h.window + 1 > 0 ? first - h.window + 1 : 0;
        for (int64_t p = seen / h.page_size; p * h.page_size < length; p++) {
            const int32_t page = kept.pages[row * kept.pages_stride + p];
            if (page < 0 || page >= kept.n_pages) return false;
        }
    }
    return true;
}

static int32_t check(const Model& model, const Batch& batch) {
    for (int64_t t = 0; t < batch.n; t++)
        if (batch.ids[t] < 0 || batch.ids[t] >= model.vocab) return BAD_ID;
    for (int64_t l = 0; l < model.n_layers; l++)
        if ((!l || batch.caches[l].pages != batch.caches[l - 1].pages) &&
            !pages_exist(model.layers[l].heads, batch.caches[l], batch))
            return BAD_PAGE;
    return FINE;
}

// The positions with logits as pieces of at most `most`.
static void find_last_pieces(const Batch& batch, int64_t most, std::vector<Piece>& pieces) {
    pieces.clear();
    int64_t row = 0;
    for (int64_t i = 0; i < batch.wanted; i++) {
        const int64_t t = batch.which[i];
        if (t < batch.starts[row]) row = 0;
        while (t >= batch.starts[row + 1]) row++;
        const int32_t at = int32_t(t - batch.starts[row]);
        Piece* before = pieces.empty() ? nullptr : &pieces.back();
        if (before && before->row == row && before->to == at && at - before->from < most)
            before->to++;
        else
            pieces.push_back({int32_t(row), at, at + 1});
    }
}

template <class F>
static int32_t run_guarded(F work) {
    try {
        work();
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    }
    return FINE;
}

template <class T>
static void run(const Model& model, const Batch& batch, Step& step, float* logits, int threads) {
    const int64_t d = model.d_model, n = batch.n, m = batch.wanted;
    step.pieces.clear();
    bool split = false;
    int64_t qkv = 0, y = 0, hidden = 0, room = 0, normed = d;
    bool branch = false;
    Ready input{}, second{}, between{};
    const Heads& h0 = model.layers[0].heads;
    const bool tiles = sizeof(T) < 4 && attends_by_tiles(h0, model.layers[0].qkv);
    const int64_t group0 = h0.n_heads / h0.n_kv_heads, queries = tiles ? TILE_QUERIES : QUERIES;
    const int64_t most = group0 < queries ? queries / group0 : 1;
    for (int64_t row = 0; row < batch.rows; row++) {
        const int64_t tokens = batch.starts[row + 1] - batch.starts[row];
        split |= tokens > most;
        for (int64_t from = 0; from < tokens; from += most)
            step.pieces.push_back({int32_t(row), int32_t(from), int32_t(from + most < tokens ? from + most : tokens)});
    }
    const bool shortens = !batch.hidden && m < n && !model.parallel;
    if (shortens) find_last_pieces(batch, most, step.last_pieces);
    for (int64_t l = 0; l < model.n_layers; l++) {
        const Layer& layer = model.layers[l];
        const int64_t group = layer.heads.n_heads / layer.heads.n_kv_heads;
        const auto larger = [](int64_t& a, int64_t b) { a = b > a ? b : a; };
        larger(qkv, layer.qkv.n);
        larger(y, layer.out.k);
        larger(hidden, layer.down.k);
        larger(room, attention_room(layer.heads, most * group));
        for (const auto* pieces : {&step.pieces, &step.last_pieces})
            larger(room, heads_together(layer.heads, int64_t(pieces->size()), threads, split) * few_attention_room(layer.heads));
        if (attends_by_tiles(layer.heads, layer.qkv)) larger(room, tile_attention_room(layer.heads, most * group));
        branch |= layer.mixer_after.kind || layer.mlp_after.kind;
        input = step.input.reserve(layer.qkv, n);
        second = step.second.reserve(layer.up, n);
        step.between.reserve(layer.out, n);
        between = step.between.reserve(layer.down, n);
    }
    const Ready chosen = step.chosen.reserve(model.head, m);
    room = round_up(room, 1024);
    normed = round_up(normed, 1024);
    const auto floats = [](Room& from, int64_t count) { return (float*)from.at_least(size_t(4 * count)); };
    const Run<T> one{
        model, batch, input, second, between, chosen, step.pieces.data(), step.last_pieces.data(),
        int64_t(step.pieces.size()), int64_t(step.last_pieces.size()), split,
        floats(step.x, n * d), floats(step.normed, threads * normed), floats(step.qkv, n * qkv), floats(step.y, n * y),
        floats(step.hidden, n * hidden), branch ? floats(step.branch, n * d) : nullptr,
        floats(step.attention, threads * room), shortens ? floats(step.last, (m + 1) * d) : nullptr, d, normed, 0, room, threads,
    };
    step.pool.together(threads, size_t(10 * model.n_layers + 4), [one, logits](Team& team) {
        Run<T> mine = one;
        mine(team, logits);
    });
}

extern "C" {

// Bits: 1 AVX-512, 2 its bf16 products, 4 its byte products, 8 tile registers that this process may use.
int32_t whorl_features() {
    int32_t bits = 0;
#ifdef __AVX512F__
    bits |= 1;
#endif
#ifdef __AVX512BF16__
    bits |= 2;
#endif
#ifdef __AVX512VNNI__
    bits |= 4;
#endif
    if (tiles_permitted()) bits |= 8;
    return bits;
}

int64_t whorl_sizeof(int32_t what) {
    const int64_t sizes[] = {sizeof(Matrix), sizeof(Norm), sizeof(Layer), sizeof(Model), sizeof(LayerCache), sizeof(Batch), sizeof(Sampling)};
    return sizes[what];
}

// Bytes of a packed matrix: data, scales, sums.
void whorl_packed_bytes(const Matrix* w, int64_t* bytes) {
    const int64_t per_output = blocks(*w) * BLOCK * groups(*w);
    bytes[0] = blocks(*w) * block_bytes(*w);
    bytes[1] = (w->scale_kind == FLOAT32 ? 4 : 2) * per_output;
    bytes[2] = w->kind == INT8 ? 4 * per_output : 0;
}

// Requests large pages for [from, from + bytes) where they fit, also after the memory has been written.
void whorl_large_pages(void* from, int64_t bytes) {
#ifdef MADV_HUGEPAGE
    const size_t large = LARGE_PAGE, first = (size_t(from) + large - 1) / large * large;
    const size_t last = (size_t(from) + size_t(bytes)) / large * large;
    if (last <= first) return;
    madvise((void*)first, last - first, MADV_HUGEPAGE);
    madvise((void*)first, last - first, 25);  // MADV_COLLAPSE, of Linux 6.1
#else
    (void)from, (void)bytes;
#endif
}

// weights: [n][k]; or null, with codes [n][k] and scales [n][groups].
void whorl_pack(const Matrix* w, const float* weights, const int8_t* codes, const float* scales, int32_t threads) {
    const auto pack = !w->inputs        ? pack_floats
                      : w->kind == INT8 ? codes ? pack_integers<true, true> : pack_integers<true, false>
                                        : codes ? pack_integers<false, true> : pack_integers<false, false>;
    Pool().together(threads, 1, [w = *w, weights, given = Codes{codes, scales}, pack](Team& team) {
        team.share(blocks(w), [&](int64_t block) { pack(w, block, weights, given); });
    });
}

void* whorl_open() { return new (std::nothrow) Step; }
void whorl_close(void* step) { delete (Step*)step; }

// y [m][n] = x [m][k] w^T; cap: of logits, or 0.
int32_t whorl_product(void* step, const Matrix* w, const float* x, int64_t m, float* y, int32_t activation, float cap,
                      int32_t threads) {
    return run_guarded([&] {
        Step& s = *(Step*)step;
        const Rows into = s.input.reserve(*w, m).rows(*w);
        const Target to{activation ? ACTIVATE : PUT, y, w->gated ? w->n / 2 : w->n, Activation(activation), cap};
        s.pool.together(threads, 2, [w = *w, rows = into, x, m, to](Team& team) {
            team.share_rows(m, [&](int64_t i) { ready_row(w, rows, i, x + i * w.k); });
            product(team, w, rows, m, to);
        });
    });
}

int32_t whorl_step(void* step, const Model* model, const Batch* batch, float* logits, int32_t threads) {
    const int32_t answer = check(*model, *batch);
    if (answer != FINE) return answer;
    return run_guarded([&] {
        if (batch->cache_kind == BFLOAT16)
            run<bf16>(*model, *batch, *(Step*)step, logits, threads);
        else if (batch->cache_kind == INT8)
            run<int8_t>(*model, *batch, *(Step*)step, logits, threads);
        else
            run<float>(*model, *batch, *(Step*)step, logits, threads);
    });
}

// Draws one token from each row of logits [rows][n].
int32_t whorl_sample(void* step, const float* logits, int64_t rows, int64_t n, const Sampling* to, int32_t threads) {
    return run_guarded([&] { sample_rows(*(Step*)step, logits, rows, n, *to, nullptr, 0, threads); });
}

// Decode steps of rows of one position, and the tokens drawn from them, until each row has ended or has its limit of tokens.
// The arrays of the batch are overwritten. logits: room for [rows][vocab].
int32_t whorl_decode(void* step, const Model* model, const Batch* batch, const Sampling* to, float* logits, int32_t threads) {
    Batch now = *batch;
    std::vector<int64_t> number(size_t(now.rows));
    for (int64_t row = 0; row < now.rows; row++) number[size_t(row)] = row;
    for (int64_t at = 0; at < to->most && now.rows; at++) {
        int32_t answer = whorl_step(step, model, &now, logits, threads);
        if (answer == FINE)
            answer = run_guarded([&] { sample_rows(*(Step*)step, logits, now.rows, model->vocab, *to, number.data(), at, threads); });
        if (answer != FINE) return answer;
        next_inputs(*model, now, *to, number, (int64_t*)now.ids, (int32_t*)now.lengths, (int64_t*)now.before, at);
        if (to->until_ended && batch->rows - now.rows >= to->until_ended) break;
    }
    return FINE;
}

// logits: [rows][n], `stride` numbers apart -> the index of the largest and log(sum(exp)) of each row; no NaN in a finite one.
// step: whose threads are used; null: the calling thread.
void whorl_summarize(void* step, const float* logits, int64_t rows, int64_t n, int64_t stride, int64_t* largest,
                     float* log_sums, int32_t threads) {
    const auto summarize = [=](int64_t row) {
        const float* from = logits + row * stride;
        largest[row] = argmax(from, n);
        log_sums[row] = log_sum_exp(from, n, from[largest[row]]);
    };
    if (!step || threads < 2 || rows < 2)
        for (int64_t row = 0; row < rows; row++) summarize(row);
    else
        ((Step*)step)->pool.together(threads, 1, [=](Team& team) { team.share(rows, summarize); });
}

// Uses the instructions of the products once, for a trial in a child process.
void whorl_try() {
    static const float zeros[BLOCK * BLOCK] = {};
    std::vector<Method> methods = {VECTORS};
    if (tiles_permitted()) methods.push_back(TILES);
    for (Kind kind : {FLOAT32, BFLOAT16, INT8})
        for (Method method : methods) {
            if (kind == FLOAT32 && method == TILES) continue;
            const int32_t k = kind == INT8 ? BLOCK : 0;
            std::vector<char> data(4 * BLOCK * BLOCK), scales(4 * BLOCK);
            std::vector<int32_t> moved(BLOCK);
            const Matrix w = {kind, k, k, BFLOAT16, BLOCK, BLOCK, 0, method, data.data(), scales.data(), moved.data(), nullptr};
            Step step;
            whorl_pack(&w, zeros, nullptr, nullptr, 1);
            for (int64_t m : {int64_t(1), int64_t(1) + FEW_ROWS}) {
                std::vector<float> out(size_t(m * BLOCK));
                whorl_product(&step, &w, zeros, m, out.data(), 0, 0, 1);
            }
        }
}

// Reads memory as the products do, without arithmetic: the bandwidth reference.
void whorl_read(void* step, const void* from, int64_t bytes, int32_t threads) {
    const int64_t piece = int64_t(1) << 17;
    ((Step*)step)->pool.together(threads, 1, [from, bytes, piece](Team& team) {
        Ints sum[4] = {};
        team.share(bytes / piece, [&](int64_t i) {
            const char* at = (const char*)from + i * piece;
            for (int64_t j = 0; j < piece; j += 256)
                UNROLL for (int p = 0; p < 4; p++) {
                    __builtin_prefetch(at + j + 4096 + 64 * p);
                    sum[p] += load<Ints>(at + j + 64 * p);
                }
        });
        const Ints total = sum[0] + sum[1] + sum[2] + sum[3];
        volatile int32_t kept = total[0];  // keeps the compiler from deleting the reads
        (void)kept;
    });
}
}
