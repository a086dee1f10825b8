// The threads of one step: each runs the same phases and takes pieces of work from them.
//
// A layer has nine phases of a few microseconds, so starting threads and waiting for them must cost little. A phase is two
// counters: pieces taken and pieces done. A thread takes pieces until there are none, then waits until all are done. So the
// team waits for a thread only while it works on a piece. A thread that the system delays costs its share of the work and no
// more; a barrier (as of OpenMP) would cost the whole delay, several milliseconds when another process uses the core. Results
// do not depend on which thread runs a piece.
//
// Pieces are taken from two halves: threads of even number begin with the lower half, the others with the upper one, and each
// continues with the other half. So one of two threads finds the rows (or weights) of its last phase in its own cache.
//
// Subtle: a helper may wake after the step, or during a later one. So counters carry the step number in the upper half, and
// pieces are taken by compare-and-swap; a thread that finds another step number stops. The data that it may have read lives as
// long as the pool: a job is copied when a thread joins it, and its pointers lead to data of the pool's owner or are used only
// within a piece.
//
// Waiting helpers spin for a tenth of a millisecond (a decoding server's next step comes sooner), then sleep.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <sched.h>

#include "lanes.h"

constexpr int SPINS = 4000;
constexpr size_t PHASES = 8192;  // maximum phases of a step
constexpr int64_t MOST_PIECES = 0xffff;  // of a phase: one half has 16 bits of a counter

INLINE void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

struct Phase {
    alignas(64) std::atomic<uint64_t> next{0};  // step number; pieces taken of the upper half, of the lower half
    alignas(64) std::atomic<uint64_t> done{0};
};

struct Team {
    Phase* phases;
    uint64_t tag;  // step number << 32
    int id, size;
    size_t at = 0;      // next phase
    bool over = false;  // the step has ended; only ever true for a helper

    // Runs work(i) for every i below n, split among the threads in pieces of `grain`; all are done when it returns.
    template <class F>
    INLINE void share(int64_t n, F work, int64_t grain = 1) {
        if (size == 1) {
            for (int64_t i = 0; i < n; i++) work(i);
            return;
        }
        if (over) return;
        Phase& phase = phases[at++];
        while (n > grain * MOST_PIECES) grain *= 2;
        const uint64_t pieces = uint64_t((n + grain - 1) / grain), half = (pieces + 1) / 2, all = tag + pieces;
        uint64_t mine = 0, taken = phase.next.load(std::memory_order_relaxed);
        while (!(over = other(taken))) {
            const uint64_t low = taken & 0xffff, high = (taken >> 16) & 0xffff;
            const bool low_left = low < half, high_left = half + high < pieces;
            if (!low_left && !high_left) break;
            const bool upper = high_left && (id % 2 || !low_left);
            if (!phase.next.compare_exchange_weak(taken, taken + (upper ? 0x10000 : 1), std::memory_order_relaxed)) continue;
            const int64_t first = int64_t(upper ? half + high : low) * grain, end = first + grain < n ? first + grain : n;
            for (int64_t i = first; i < end; i++) work(i);
            mine++;
            taken = phase.next.load(std::memory_order_relaxed);
        }
        if (mine) phase.done.fetch_add(mine, std::memory_order_acq_rel);
        uint64_t done = 0;
        for (int spins = 0; !over; spins++) {
            done = phase.done.load(std::memory_order_acquire);
            over = other(done);
            if (over || done >= all) return;
            if (spins < SPINS)
                relax();
            else
                sched_yield();
        }
    }

    // As `share`, for short work on rows: at least four pieces per thread.
    template <class F>
    INLINE void share_rows(int64_t n, F work) {
        share(n, work, n / (4 * size) + 1);
    }

    INLINE bool other(uint64_t counter) const { return (counter ^ tag) >> 32; }
};

class Pool {
    using Job = std::function<void(Team&)>;
    std::unique_ptr<Phase[]> phases{new Phase[PHASES]};
    std::vector<std::thread> helpers;
    std::mutex lock;
    std::condition_variable wake;
    std::atomic<uint64_t> number{0};  // step number
    int size = 1, sleepers = 0;
    bool closing = false;
    Job job;

    void help(int id) {
        for (uint64_t seen = 0;;) {
            for (int spins = 0; spins < SPINS && number.load(std::memory_order_acquire) == seen; spins++) relax();
            Team team{phases.get(), 0, id, 1};
            Job mine;
            {
                std::unique_lock<std::mutex> held(lock);
                sleepers++;
                wake.wait(held, [&] { return closing || number.load(std::memory_order_relaxed) != seen; });
                sleepers--;
                if (closing) return;
                seen = number.load(std::memory_order_relaxed);
                if (!job || id >= size) continue;
                mine = job;
                team.tag = seen << 32;
                team.size = size;
            }
            mine(team);
        }
    }

   public:
    // Runs body(team) on this thread, and on up to threads - 1 helpers that arrive in time. `body` is copied.
    template <class F>
    void together(int threads, size_t n_phases, const F& body) {
        if (threads < 2 || n_phases > PHASES) {
            Team team{nullptr, 0, 0, 1};
            F mine = body;
            mine(team);
            return;
        }
        Team team{phases.get(), 0, 0, threads};
        bool asleep;
        {
            std::unique_lock<std::mutex> held(lock);
            while (int(helpers.size()) < threads - 1) {
                const int id = int(helpers.size()) + 1;
                helpers.emplace_back([this, id] { help(id); });
            }
            const uint64_t now = number.load(std::memory_order_relaxed) + 1;
            team.tag = now << 32;
            for (size_t i = 0; i < n_phases; i++) {
                phases[i].next.store(team.tag, std::memory_order_relaxed);
                phases[i].done.store(team.tag, std::memory_order_relaxed);
            }
            size = threads;
            job = body;
            number.store(now, std::memory_order_release);
            asleep = sleepers > 0;
        }
        if (asleep) wake.notify_all();
        F mine = body;
        mine(team);
        std::unique_lock<std::mutex> held(lock);
        job = nullptr;  // late helpers find no job
    }

    ~Pool() {
        {
            std::unique_lock<std::mutex> held(lock);
            closing = true;
        }
        wake.notify_all();
        for (std::thread& helper : helpers) helper.join();
    }
};
