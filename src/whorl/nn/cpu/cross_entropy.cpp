// Cross-entropy of rows of logits in bf16 or fp32, and its gradient in their place (`objectives/next_token.py`):
//
//     total = sum over rows of keep (lse - z_target + z_loss lse^2),    dz = keep (p (1 + 2 z_loss lse) - onehot)
//
// A row is read once from memory: its exponentials stay in cache until the gradient is written.
#include "numbers.h"
#include "threads.h"

#include <cmath>
#include <cstdlib>

template <class T>
struct Rows {
    T* logits;
    const int64_t* targets;
    const float* keep;
    int64_t vocabulary;
    float z_loss;

    // Rows first .. last - 1; adds their total and negative log-likelihood to `sums`. Returns 1 without memory.
    int32_t run(int64_t first, int64_t last, double* sums) const {
        float* e = (float*)malloc(vocabulary * sizeof(float));
        if (!e) return 1;
        for (int64_t r = first; r < last; r++) {
            T* z = logits + r * vocabulary;
            if (keep[r] == 0.0f) {
                memset(z, 0, vocabulary * sizeof(T));
                continue;
            }
            float most = -INFINITY, sum = 0.0f;
#pragma omp simd reduction(max : most)
            for (int64_t c = 0; c < vocabulary; c++) {
                e[c] = widen(z[c]);
                most = e[c] > most ? e[c] : most;
            }
#pragma omp simd reduction(+ : sum)
            for (int64_t c = 0; c < vocabulary; c++) {
                e[c] = exponential(e[c] - most);
                sum += e[c];
            }
            const float lse = most + logf(sum), nll = lse - widen(z[targets[r]]);
            const float factor = keep[r] * (1.0f + 2.0f * z_loss * lse) / sum;
            sums[0] += double(keep[r]) * (nll + z_loss * lse * lse);
            sums[1] += double(keep[r]) * nll;
            const float of_target = e[targets[r]] * factor - keep[r];
#pragma omp simd
            for (int64_t c = 0; c < vocabulary; c++) assign(z[c], e[c] * factor);
            assign(z[targets[r]], of_target);
        }
        free(e);
        return 0;
    }
};

// All rows on `threads` threads; returns 1 without memory.
template <class T>
static int32_t run(const Rows<T>& job, int64_t rows, float* sums, int32_t threads) {
    std::vector<double> parts(2 * std::max(1, threads));
    if (split(rows, threads, [&](int64_t first, int64_t last, int64_t part) { return job.run(first, last, &parts[2 * part]); }))
        return 1;
    double total = 0.0, nll = 0.0;
    for (size_t i = 0; i < parts.size(); i += 2) {
        total += parts[i];
        nll += parts[i + 1];
    }
    sums[0] = float(total);
    sums[1] = float(nll);
    return 0;
}

extern "C" {

// logits: [rows, vocabulary] in bf16, or in fp32 if `wide`, overwritten with the gradient of the total; sums: total and negative
// log-likelihood. Returns 1 without memory.
int32_t whorl_cross_entropy(void* logits, const int64_t* targets, const float* keep, int64_t rows, int64_t vocabulary, float z_loss,
                            float* sums, int32_t wide, int32_t threads) {
    if (wide) return run<float>({(float*)logits, targets, keep, vocabulary, z_loss}, rows, sums, threads);
    return run<bf16>({(bf16*)logits, targets, keep, vocabulary, z_loss}, rows, sums, threads);
}
}
