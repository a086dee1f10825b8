// Threads that live as long as one call.
#pragma once
#include <algorithm>
#include <thread>
#include <vector>

// Splits n items among threads: work(first, last, part) for each part returns 1 without memory, and so does this function.
template <class F>
static int32_t split(int64_t n, int32_t threads, F work) {
    const int64_t parts = std::max<int64_t>(1, std::min<int64_t>(threads, n));
    std::vector<int32_t> failed(parts);
    const auto run = [&](int64_t part) { failed[part] = work(part * n / parts, (part + 1) * n / parts, part); };
    std::vector<std::thread> others;
    for (int64_t part = 1; part < parts; part++) others.emplace_back(run, part);
    run(0);
    for (auto& one : others) one.join();
    return *std::max_element(failed.begin(), failed.end());
}
