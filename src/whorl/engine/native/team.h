// The threads of one step: they start together, go through the same phases, and wait for each other between them.
//
// One parallel region a step, of the OpenMP runtime that torch has already loaded (so torch's threads are ours, and no second
// pool fights with them for the cores), and inside of it barriers of our own: a layer has ten, and one costs a fraction of a
// microsecond. A thread that waits first spins, then yields: on a machine with more threads than cores it must let the one go
// on for which it waits.
//
// Work is handed out by a counter for each phase (`take`): a thread that was held up takes less. Which thread does a piece
// changes nothing in its result.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif
#include <sched.h>

INLINE void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

struct Shared {
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<int> turn{0};
    alignas(64) int size = 1;
    struct alignas(64) Counter { std::atomic<int64_t> next{0}; };
    std::vector<Counter> counters;

    // Before the region: `phases` loops with `take` will follow.
    void begin(size_t phases) {
        if (counters.size() < phases) counters = std::vector<Counter>(phases);
        for (size_t i = 0; i < phases; i++) counters[i].next.store(0, std::memory_order_relaxed);
    }
};

struct Team {
    Shared& shared;
    int id, size;
    size_t phase = 0;

    void wait() {
        if (size == 1) return;
        const int turn = shared.turn.load(std::memory_order_relaxed);
        if (shared.arrived.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
            shared.arrived.store(0, std::memory_order_relaxed);
            shared.turn.store(turn + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; shared.turn.load(std::memory_order_acquire) == turn; spins++) {
            if (spins < 4000)
                relax();
            else
                sched_yield();
        }
    }

    // Calls work(i) for every i below n, split among the threads, then waits for all.
    template <class F>
    INLINE void share(int64_t n, F work) {
        std::atomic<int64_t>& next = shared.counters[phase++].next;
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) work(i);
        wait();
    }
};

// Runs body(team) on up to `threads` threads.
template <class F>
void together(Shared& shared, int threads, size_t phases, F body) {
    shared.begin(phases);
    shared.size = 1;
#ifdef _OPENMP
    if (threads > 1) {
#pragma omp parallel num_threads(threads)
        {
            Team team{shared, omp_get_thread_num(), omp_get_num_threads()};
            body(team);
        }
        return;
    }
#endif
    Team team{shared, 0, 1};
    body(team);
}
