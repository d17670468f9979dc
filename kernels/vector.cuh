// Elements in packs of 16 bytes, for any length and alignment.
//
// A thread processes a tile of UNROLL<T> slots at a time: one slot and then every blockDim.x-th after it. A slot is a
// whole pack, or one of the last elements, which do not fill a pack. If a tensor is not aligned for packs, a pack is
// one element.
#ifndef BONFIRE_VECTOR_CUH
#define BONFIRE_VECTOR_CUH

#include "ptx.cuh"

template <class T, u32 N>
struct alignas(N * sizeof(T)) Pack {
    T lane[N];
};

// Packs that a thread processes at a time, so that their loads are in flight together. Single bytes take a register
// each when they are combined, so there are fewer of those.
template <class T>
constexpr u32 UNROLL = sizeof(T) == 1 ? 2 : 4;

// An element that is only moved.
struct Byte {
    u8 bits;
};
template <>
constexpr u32 UNROLL<Byte> = 4;

template <class T, u32 N>
using Tile = Pack<T, N>[UNROLL<T>];

// The slots of `count` elements in packs of N.
template <u32 N>
struct Slots {
    u64 packs, all;
    __device__ explicit Slots(u64 count) : packs(count / N), all(count / N + count % N) {}
};

// A thread's share of one tile: the slots from `first` to below `end`.
template <class T, u32 N>
struct Reach {
    u64 first, end, packs;
    bool whole;  // all are packs

    __device__ Reach(Slots<N> slots, u64 first, u64 end)
        : first(first), end(end), packs(slots.packs),
          whole(first + (UNROLL<T> - 1) * blockDim.x < (end < slots.packs ? end : slots.packs)) {}

    // Calls `pack(i, at)` or `element(i, at)` for slot i of the tile; `at` is its first element's index in the tensor.
    template <class OfPack, class OfElement>
    __device__ __forceinline__ void each(OfPack pack, OfElement element) const {
#pragma unroll
        for (u32 i = 0; i < UNROLL<T>; ++i) {
            u64 slot = first + i * blockDim.x;
            if (whole || slot < packs && slot < end) pack(i, slot * N);
            else if (slot < end) element(i, packs * N + (slot - packs));
        }
    }
};

// One pack.
template <class T, u32 N>
__device__ __forceinline__ Pack<T, N> load(const T *at) {
    const Pack<T, N> *pack = reinterpret_cast<const Pack<T, N> *>(at);
    if constexpr (sizeof(Pack<T, N>) == 16) return ptx::load_16(pack);
    else return *pack;
}

template <class T, u32 N>
__device__ __forceinline__ void store(T *at, const Pack<T, N> &value) {
    Pack<T, N> *pack = reinterpret_cast<Pack<T, N> *>(at);
    if constexpr (sizeof(Pack<T, N>) == 16) ptx::store_16(pack, value);
    else *pack = value;
}

// Loads a tile from the tensor `from`, or stores it to the tensor `to`. Sources are not `const __restrict__`: that
// would allow loads through a cache that does not see other GPUs' stores.
template <class T, u32 N>
__device__ __forceinline__ void load(Tile<T, N> &tile, const T *from, const Reach<T, N> &reach) {
    reach.each([&](u32 i, u64 at) { tile[i] = load<T, N>(from + at); },
               [&](u32 i, u64 at) { tile[i].lane[0] = from[at]; });
}

template <class T, u32 N>
__device__ __forceinline__ void store(T *to, const Tile<T, N> &tile, const Reach<T, N> &reach) {
    reach.each([&](u32 i, u64 at) { store<T, N>(to + at, tile[i]); },
               [&](u32 i, u64 at) { to[at] = tile[i].lane[0]; });
}

// Calls `tile(reach)` for this thread's tiles of the slots from `first` to below `end`, which all blocks of a member
// share.
template <class T, u32 N, class Body>
__device__ __forceinline__ void for_tiles(Slots<N> slots, u64 first, u64 end, Body tile) {
    u64 width = u64(blockDim.x) * UNROLL<T>;
    for (u64 start = first + blockIdx.y * width; start < end; start += gridDim.y * width) {
        tile(Reach<T, N>(slots, start + threadIdx.x, end));
    }
}

// Part `index` of `count` items, as in the host's partition(): the first `count % parts` parts are one longer.
struct Part {
    u64 first, count;
    __device__ Part(u64 all, u64 parts, u64 index)
        : first(index * (all / parts) + (index < all % parts ? index : all % parts)),
          count(all / parts + (index < all % parts)) {}
};

__device__ __forceinline__ bool aligned(const void *pointer, u64 bytes) { return u64(pointer) % bytes == 0; }

#endif
