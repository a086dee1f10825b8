// The threads of one step: they start together and go through the same phases.
//
// One parallel region a step, of the OpenMP runtime that torch has already loaded: so torch's threads are ours, and no second
// pool fights with them for the cores. Inside of it a phase is two counters: pieces handed out and pieces done. A thread takes
// pieces until there are none, then waits until all are done, not until all threads have come: one that the system holds up,
// or that wakes late, is waited for only if it has a piece in hand. Which thread does a piece changes nothing in its result.
//
// Who waits first spins (a phase of a small model lasts microseconds), then yields: where there are more threads than cores,
// the one that is waited for must get on.
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
    struct Phase {
        alignas(64) std::atomic<int64_t> next{0};
        alignas(64) std::atomic<int64_t> done{0};
    };
    std::vector<Phase> phases;

    // Before the region: `n` phases will follow.
    void begin(size_t n) {
        if (phases.size() < n) phases = std::vector<Phase>(n);
        for (size_t i = 0; i < n; i++) {
            phases[i].next.store(0, std::memory_order_relaxed);
            phases[i].done.store(0, std::memory_order_relaxed);
        }
    }
};

struct Team {
    Shared& shared;
    int id, size;
    size_t at = 0;  // the phase that comes next

    // Calls work(i) for every i below n, split among the threads; all are done when it returns.
    template <class F>
    INLINE void share(int64_t n, F work) {
        Shared::Phase& phase = shared.phases[at++];
        if (size == 1) {
            for (int64_t i = 0; i < n; i++) work(i);
            return;
        }
        int64_t mine = 0;
        for (int64_t i; (i = phase.next.fetch_add(1, std::memory_order_relaxed)) < n; mine++) work(i);
        if (mine) phase.done.fetch_add(mine, std::memory_order_acq_rel);
        for (int spins = 0; phase.done.load(std::memory_order_acquire) < n; spins++) {
            if (spins < 4000)
                relax();
            else
                sched_yield();
        }
    }
};

// Runs body(team) on up to `threads` threads.
template <class F>
void together(Shared& shared, int threads, size_t phases, F body) {
    shared.begin(phases);
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
