// CUDA C++ for g++, included before a .cu file: its keywords, built-in variables, __syncthreads, and ptx.cuh.
//
// A block is an operating system thread. The block's threads are fibres of it, which take turns at every barrier and
// every poll. So __shared__ is thread_local. Sanitizers see fibres as separate threads, ordered only by what orders
// threads on a GPU: barriers within a block, releases and acquires between blocks.
//
// What this cannot show: PTX's memory model where it differs from C++'s (accesses of mixed sizes, scopes, weak
// accesses), the order in which a GPU starts blocks, and speed.
#pragma once

#include <atomic>
#include <cstring>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static thread_local
#define __grid_constant__
#define __launch_bounds__(...)

#define BONFIRE_PTX_CUH  // replaced by the following
#include "../types.cuh"

namespace shim {

struct Index {
    u32 x, y, z;
};
const Index &thread_index();
const Index &block_index();
const Index &block_size();
const Index &grid_size();

// Waits for all threads of the block. Returns whether all passed true.
bool barrier(bool yes);
// Lets other threads run, now and then for a random time.
void delay();
// Lets the block's other threads run. Called by a thread that polls.
void poll();

template <class T>
std::atomic_ref<T> atomic(const T *at) {
    return std::atomic_ref<T>(*const_cast<T *>(at));
}

}  // namespace shim

#define threadIdx (::shim::thread_index())
#define blockIdx (::shim::block_index())
#define blockDim (::shim::block_size())
#define gridDim (::shim::grid_size())

inline void __syncthreads() { ::shim::barrier(true); }
inline int __syncthreads_and(int yes) { return ::shim::barrier(yes); }

namespace ptx {

inline void store_release_system(u64 *at, u64 value) {
    shim::delay();
    shim::atomic(at).store(value, std::memory_order_release);
}

inline void store_relaxed_system(u64 *at, u64 value) {
    shim::delay();
    shim::atomic(at).store(value, std::memory_order_relaxed);
}

inline u64 load_acquire_system(const u64 *at) {
    shim::poll();
    return shim::atomic(at).load(std::memory_order_acquire);
}

inline u64 load_relaxed_system(const u64 *at) {
    shim::poll();
    return shim::atomic(at).load(std::memory_order_relaxed);
}

struct alignas(16) Pair {
    u64 low, high;
};

// In two halves, in either order, with time between them for a reader.
inline void store_pair_relaxed_system(Pair *at, Pair pair) {
    bool high_first = (pair.low ^ reinterpret_cast<u64>(at) >> 4) & 1;
    store_relaxed_system(high_first ? &at->high : &at->low, high_first ? pair.high : pair.low);
    store_relaxed_system(high_first ? &at->low : &at->high, high_first ? pair.low : pair.high);
}

inline Pair load_pair_relaxed_system(const Pair *at) {
    shim::poll();
    u64 high = shim::atomic(&at->high).load(std::memory_order_relaxed);
    shim::delay();
    return {shim::atomic(&at->low).load(std::memory_order_relaxed), high};
}

struct alignas(16) Quad {
    u32 word[4];
};

inline void load_quad_if(bool present, const Quad *at, Quad &value) {
    if (present) value = *at;
}

inline void store_quad(Quad *at, Quad value) { *at = value; }

inline u64 add_acquire_release_device(u64 *at, u64 value) {
    shim::delay();
    return shim::atomic(at).fetch_add(value, std::memory_order_acq_rel);
}

inline u64 claim_relaxed_device(u64 *at, u64 value) {
    u64 before = 0;
    shim::atomic(at).compare_exchange_strong(before, value, std::memory_order_relaxed);
    return before;
}

u64 nanoseconds();

inline f32 widen(f16 value) {
    _Float16 half;
    memcpy(&half, &value, 2);
    return static_cast<f32>(half);
}

inline f16 narrow_to_f16(f32 value) {
    _Float16 half = static_cast<_Float16>(value);
    f16 narrow;
    memcpy(&narrow, &half, 2);
    return narrow;
}

template <class To, class From>
To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline u32 bits(f32 value) { return same_bits<u32>(value); }
inline f32 from_bits(u32 bits) { return same_bits<f32>(bits); }
inline f64 from_bits(u64 bits) { return same_bits<f64>(bits); }

}  // namespace ptx
