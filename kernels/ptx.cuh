// What C++ cannot express for a GPU: memory accesses with an order and a scope, the clock, conversions of f16.
//
// This is the only file with PTX instructions. The host shim (shim/cuda.hpp) defines the same functions for a CPU, and
// this file's include guard, so all other source is the same on both.
//
// Orders and scopes are those of PTX's memory model. "System" includes other GPUs and the host, "device" the blocks on
// this GPU. A thread whose acquire reads the value of a release also sees everything that the releasing thread did or
// saw before it, including what other threads of its block did before a __syncthreads(). Nothing weaker guarantees
// this, `volatile` in particular.
#ifndef BONFIRE_PTX_CUH
#define BONFIRE_PTX_CUH

#include "types.cuh"

namespace ptx {

__device__ __forceinline__ void store_release_system(u64 *at, u64 value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

__device__ __forceinline__ void store_relaxed_system(u64 *at, u64 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

__device__ __forceinline__ u64 load_acquire_system(const u64 *at) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}

__device__ __forceinline__ u64 load_relaxed_system(const u64 *at) {
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}

// Two words in one 16-byte access. The model guarantees that each word is whole, not that both are from the same store:
// a reader must be able to tell from each.
struct alignas(16) Pair {
    u64 low, high;
};

__device__ __forceinline__ void store_pair_relaxed_system(Pair *at, Pair pair) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(at), "l"(pair.low), "l"(pair.high) : "memory");
}

__device__ __forceinline__ Pair load_pair_relaxed_system(const Pair *at) {
    Pair pair;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(pair.low), "=l"(pair.high)
                 : "l"(at)
                 : "memory");
    return pair;
}

// Ordinary accesses to 16 bytes of a tensor at once. Written in PTX, because the compiler splits some of those in C++.
struct alignas(16) Quad {
    u32 word[4];
};

// Leaves `value` as it is if not `present`. The compiler would put a conditional load in C++ into a branch, together
// with what uses it, so that each load waits for the one before.
__device__ __forceinline__ void load_quad_if(bool present, const Quad *at, Quad &value) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];}"
                 : "+r"(value.word[0]), "+r"(value.word[1]), "+r"(value.word[2]), "+r"(value.word[3])
                 : "l"(at), "r"(u32(present))
                 : "memory");
}

__device__ __forceinline__ void store_quad(Quad *at, Quad value) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 ::"l"(at), "r"(value.word[0]), "r"(value.word[1]), "r"(value.word[2]), "r"(value.word[3])
                 : "memory");
}

// Adds `value` and returns the previous value.
__device__ __forceinline__ u64 add_acquire_release_device(u64 *at, u64 value) {
    u64 before;
    asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(at), "l"(value) : "memory");
    return before;
}

// Stores `value` if the word is zero. Returns the previous value.
__device__ __forceinline__ u64 claim_relaxed_device(u64 *at, u64 value) {
    u64 before;
    asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], 0, %2;" : "=l"(before) : "l"(at), "l"(value) : "memory");
    return before;
}

// Time on a clock that all multiprocessors share. It may tick in steps of a microsecond or more.
__device__ __forceinline__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    return now;
}

__device__ __forceinline__ f32 widen(f16 value) {
    f32 wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
    return wide;
}

// Rounds to nearest, ties to even.
__device__ __forceinline__ f16 narrow_to_f16(f32 value) {
    f16 narrow;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
    return narrow;
}

__device__ __forceinline__ u32 bits(f32 value) { return __float_as_uint(value); }
__device__ __forceinline__ f32 from_bits(u32 bits) { return __uint_as_float(bits); }
__device__ __forceinline__ f64 from_bits(u64 bits) { return __longlong_as_double(static_cast<i64>(bits)); }

}  // namespace ptx

#endif
