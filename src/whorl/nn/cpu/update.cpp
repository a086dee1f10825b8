// Parts of an optimizer's step (`train/optim`), each in one pass over memory: the sum of the replicas' gradients, Muon's
// momentum and its update, and Adagrad of the rows of a lookup table.
#include "numbers.h"

#include <algorithm>
#include <cmath>
#include <vector>

constexpr int64_t SIDE = 32;  // of the blocks of a transposition
constexpr size_t AHEAD = 8;   // entries between the row that is updated and the one that is fetched

// momentum += (gradient - momentum) (1 - mu); then direction = gradient + (momentum - gradient) mu, of the matrix
// or of its transpose [columns][rows]. direction: null to leave it out.
template <class T>
static void average(const float* gradient, float* momentum, int64_t rows, int64_t columns, float mu, T* direction, int32_t turned) {
    const float rest = 1.0f - mu;
    const int64_t n = rows * columns;
    if (!direction || !turned) {
#pragma omp simd
        for (int64_t c = 0; c < n; c++) {
            const float g = gradient[c], m = momentum[c] + (g - momentum[c]) * rest;
            momentum[c] = m;
            if (direction) assign(direction[c], g + (m - g) * mu);
        }
        return;
    }
    T block[SIDE][SIDE];
    for (int64_t r = 0; r < rows; r += SIDE)
        for (int64_t c = 0; c < columns; c += SIDE) {
            const int64_t height = std::min(SIDE, rows - r), width = std::min(SIDE, columns - c);
            for (int64_t i = 0; i < height; i++) {
                const float* g = gradient + (r + i) * columns + c;
                float* m = momentum + (r + i) * columns + c;
#pragma omp simd
                for (int64_t j = 0; j < width; j++) {
                    m[j] += (g[j] - m[j]) * rest;
                    assign(block[i][j], g[j] + (m[j] - g[j]) * mu);
                }
            }
            for (int64_t j = 0; j < width; j++)
                for (int64_t i = 0; i < height; i++) direction[(c + j) * rows + r + i] = block[i][j];
        }
}

// weight = weight * keep + update * factor; update: the matrix or its transpose.
template <class T>
static void add(float* weight, const T* update, int64_t rows, int64_t columns, float keep, float factor, int32_t turned) {
    if (!turned) {
#pragma omp simd
        for (int64_t c = 0; c < rows * columns; c++) weight[c] = weight[c] * keep + widen(update[c]) * factor;
        return;
    }
    T block[SIDE][SIDE];
    for (int64_t r = 0; r < rows; r += SIDE)
        for (int64_t c = 0; c < columns; c += SIDE) {
            const int64_t height = std::min(SIDE, rows - r), width = std::min(SIDE, columns - c);
            for (int64_t j = 0; j < width; j++)
                for (int64_t i = 0; i < height; i++) block[i][j] = update[(c + j) * rows + r + i];
            for (int64_t i = 0; i < height; i++) {
                float* w = weight + (r + i) * columns + c;
#pragma omp simd
                for (int64_t j = 0; j < width; j++) w[j] = w[j] * keep + widen(block[i][j]) * factor;
            }
        }
}

extern "C" {

// For each of `n` tensors (address of the parts, address of the sum, numbers): the sum of its parts, which follow each other
// in memory, in their order. squares: the sum of the squares of each.
void whorl_sum_parts(const int64_t* tensors, int64_t n, int64_t parts, double* squares) {
    for (int64_t i = 0; i < n; i++, tensors += 3) {
        const float* from = (const float*)tensors[0];
        float* to = (float*)tensors[1];
        const int64_t count = tensors[2];
        double total = 0.0;
        for (int64_t start = 0; start < count; start += 4096) {
            const int64_t end = std::min(count, start + 4096);
            float square = 0.0f;
            if (parts == 2) {
#pragma omp simd reduction(+ : square)
                for (int64_t c = start; c < end; c++) {
                    const float sum = from[c] + from[count + c];
                    to[c] = sum;
                    square += sum * sum;
                }
            } else {
                for (int64_t p = 0; p < parts; p++)
                    for (int64_t c = start; c < end; c++) to[c] = p ? to[c] + from[p * count + c] : from[c];
#pragma omp simd reduction(+ : square)
                for (int64_t c = start; c < end; c++) square += to[c] * to[c];
            }
            total += square;
        }
        squares[i] = total;
    }
}

// direction: bf16, or fp32 if `wide`; null to leave it out.
void whorl_momentum(const float* gradient, float* momentum, int64_t rows, int64_t columns, float mu, void* direction, int32_t wide,
                    int32_t turned) {
    wide ? average(gradient, momentum, rows, columns, mu, (float*)direction, turned)
         : average(gradient, momentum, rows, columns, mu, (bf16*)direction, turned);
}

// update: bf16, or fp32 if `wide`.
void whorl_add_update(float* weight, const void* update, int64_t rows, int64_t columns, float keep, float factor, int32_t wide,
                      int32_t turned) {
    wide ? add(weight, (const float*)update, rows, columns, keep, factor, turned)
         : add(weight, (const bf16*)update, rows, columns, keep, factor, turned);
}

// Adagrad with one accumulator a row, of the rows r with r mod parts = part. ids and gradients: the addresses of `parts`
// lists of counts[p] rows, with repeats. The gradient of a row is the sum of its entries over `divisor`.
void whorl_row_adagrad(float* table, float* squares, int64_t d, const int64_t* ids, const int64_t* gradients, const int64_t* counts,
                       int64_t parts, int64_t part, float divisor, float rate, float eps) {
    std::vector<std::pair<int64_t, const float*>> found;
    for (int64_t p = 0; p < parts; p++)
        for (int64_t i = 0; i < counts[p]; i++) {
            const int64_t row = ((const int64_t*)ids[p])[i];
            if (row % parts == part) found.emplace_back(row, (const float*)gradients[p] + i * d);
        }
    std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    std::vector<float> sum(d);
    for (size_t i = 0; i < found.size();) {
        const int64_t row = found[i].first;
        if (i + AHEAD < found.size()) {  // rows lie far apart in a table that no cache holds
            const int64_t next = found[i + AHEAD].first;
            __builtin_prefetch(squares + next, 1);
            for (int64_t c = 0; c < d; c += 16) __builtin_prefetch(table + next * d + c, 1);
        }
        std::fill(sum.begin(), sum.end(), 0.0f);
        for (; i < found.size() && found[i].first == row; i++)
            for (int64_t c = 0; c < d; c++) sum[c] += found[i].second[c];
        float square = 0.0f;
#pragma omp simd reduction(+ : square)
        for (int64_t c = 0; c < d; c++) {
            sum[c] /= divisor;
            square += sum[c] * sum[c];
        }
        squares[row] += square / float(d);
        const float step = -rate / (sqrtf(squares[row]) + eps);
        for (int64_t c = 0; c < d; c++) table[row * d + c] += step * sum[c];
    }
}
}
