// Memory of kernels that is kept between calls.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>
#ifdef __linux__
#include <sys/mman.h>
#endif

constexpr size_t LARGE_PAGE = size_t(1) << 21;

// Memory that only grows, on large pages if the system provides them.
struct Room {
    void* data = nullptr;
    size_t bytes = 0, used = 0;

    // Also gives all of it back to `take`. False without memory.
    bool reserve(size_t wanted) {
        used = 0;
        if (wanted <= bytes) return true;
        free(data);
        const size_t page = wanted >= LARGE_PAGE ? LARGE_PAGE : 4096;
        bytes = (wanted + wanted / 4 + page - 1) / page * page;
        data = aligned_alloc(page, bytes);
        if (!data) bytes = 0;
#ifdef MADV_HUGEPAGE
        if (data && page == LARGE_PAGE) madvise(data, bytes, MADV_HUGEPAGE);
#endif
        return data != nullptr;
    }
    char* at_least(size_t wanted) {
        if (!reserve(wanted)) throw std::bad_alloc();
        return (char*)data;
    }
    // The next numbers of what is reserved, from a whole cache line.
    template <class T>
    T* take(int64_t count) {
        T* found = (T*)((char*)data + used);
        used += (size_t(count) * sizeof(T) + 63) / 64 * 64;
        return found;
    }
    ~Room() { free(data); }
};
