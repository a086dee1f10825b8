// bf16 numbers, and the tile registers (AMX) of this process, for the C++ code of `nn/cpu` and `engine/cpu`.
//
// Tile registers need a permission of the kernel (Intel 64 and IA-32 Architectures Software Developer's Manual, vol. 1,
// ch. 18; Linux Documentation/arch/x86/xstate.rst). Each thread requests it before its first tile; without it, the kernel
// would kill the process there. WHORL_VECTORS, WHORL_EMULATED and WHORL_FP32 compile without tiles.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__linux__) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && !defined(WHORL_VECTORS) && \
    !defined(WHORL_EMULATED) && !defined(WHORL_FP32)
#define WHORL_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define INLINE inline __attribute__((always_inline))

typedef uint16_t bf16;  // the upper half of a float

INLINE float widen(bf16 x) {
    const uint32_t bits = uint32_t(x) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
INLINE float widen(float x) { return x; }

// To the nearest bf16, ties to even. Of the NaNs, only the usual ones stay NaN; `narrow` in lanes.h keeps all.
INLINE uint32_t rounded(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

constexpr int TILE_LINES = 16, TILE_BYTES = 64;  // of a line

// Operand of ldtilecfg, palette 1: eight whole tiles.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES};
    uint8_t lines[16] = {TILE_LINES, TILE_LINES, TILE_LINES, TILE_LINES, TILE_LINES, TILE_LINES, TILE_LINES, TILE_LINES};
};

// Whether this thread may use tile registers; requests it once. False: compiled without them, refused, or before Linux 5.16.
INLINE bool tiles_permitted() {
#ifdef WHORL_AMX
    thread_local const bool permitted = [] {
        const long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
        return syscall(SYS_arch_prctl, request, tile_data) == 0;
    }();
    return permitted;
#else
    return false;
#endif
}

// This thread's tile registers, while the object lives; nothing without AMX.
struct TileRegisters {
#ifdef WHORL_AMX
    TileRegisters() { tiles_permitted(); }
    ~TileRegisters() { asm volatile("tilerelease" ::: "memory"); }
    static INLINE void shape(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
    template <int T>
    static INLINE void clear() { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }
    template <int T>
    static INLINE void load(const void* from, int64_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
    }
    template <int T>
    static INLINE void store(void* to, int64_t stride) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
    }
    template <int C, int A, int B>
    static INLINE void add_pairs() { asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B)); }
    template <int C, int A, int B>
    static INLINE void add_fours() { asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B)); }
    template <int C, int A, int B>
    static INLINE void add_signed_fours() { asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B)); }
#else
    static void shape(const TileShapes&) {}
#endif
};
