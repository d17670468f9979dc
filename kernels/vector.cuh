// Elements in packs of 16 bytes, for any length and alignment.
//
// A thread processes a tile of UNROLL<T> slots at a time: one slot of each of as many rounds, in which every thread of
// the member has one. So a short tensor is spread over all blocks too. A slot is a whole pack, or one of the last
// elements, which do not fill a pack. If a tensor is not aligned for packs, a pack is one element.
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

// A pack from load to use. If 16 bytes were held as elements, they would be taken apart as soon as they are loaded,
// which waits for the load, and those of 16 bits would take a register each.
template <class T, u32 N, bool WIDE = N * sizeof(T) == 16>
struct Held {
    typedef Pack<T, N> Type;
};
template <class T, u32 N>
struct Held<T, N, true> {
    typedef ptx::Quad Type;
};

template <class T, u32 N>
__device__ __forceinline__ Pack<T, N> unpack(const typename Held<T, N>::Type &held) {
    Pack<T, N> pack;
    memcpy(&pack, &held, sizeof pack);
    return pack;
}

template <class T, u32 N>
__device__ __forceinline__ typename Held<T, N>::Type hold(const Pack<T, N> &pack) {
    typename Held<T, N>::Type held;
    memcpy(&held, &pack, sizeof held);
    return held;
}

template <class T, u32 N>
using Tile = typename Held<T, N>::Type[UNROLL<T>];

// The slots of `count` elements in packs of N.
template <u32 N>
struct Slots {
    u64 packs, all;
    __device__ explicit Slots(u64 count) : packs(count / N), all(count / N + count % N) {}
};

// Threads of all blocks of a member.
__device__ __forceinline__ u64 threads_of_member() { return u64(gridDim.y) * blockDim.x; }

// A thread's share of one tile: the slots from `first` to below `end`.
template <class T, u32 N>
struct Reach {
    u64 first, end, packs;
    bool ragged;  // some slots may be elements

    __device__ Reach(Slots<N> slots, u64 first, u64 end)
        : first(first), end(end), packs(slots.packs),
          ragged(N > 1 && end > slots.packs && first + (UNROLL<T> - 1) * threads_of_member() >= slots.packs) {}

    // Calls `pack(i, at, present)` for each slot i of the tile, whether it is a pack or not; `at` is the index of its
    // first element in the tensor. No branches: loads are in flight together, also if only some slots are packs.
    template <class Body>
    __device__ __forceinline__ void each_pack(Body pack) const {
        u64 below = end < packs ? end : packs;
#pragma unroll
        for (u32 i = 0; i < UNROLL<T>; ++i) {
            u64 slot = first + i * threads_of_member();
            pack(i, slot * N, slot < below);
        }
    }

    // Calls `element(i, at)` for each slot i of the tile that is an element. There is one only in ragged tiles.
    template <class Body>
    __device__ __forceinline__ void each_element(Body element) const {
#pragma unroll
        for (u32 i = 0; i < UNROLL<T>; ++i) {
            u64 slot = first + i * threads_of_member();
            if (slot >= packs && slot < end) element(i, packs * N + (slot - packs));
        }
    }
};

// Loads a tile from the tensor `from`, or stores it to the tensor `to`. Sources are not `const __restrict__`: that
// would allow loads through a cache that does not see other GPUs' stores. What is not loaded stays as it is.
template <class T, u32 N>
__device__ __forceinline__ void load_packs(Tile<T, N> &tile, const T *from, const Reach<T, N> &reach, bool any) {
    typedef typename Held<T, N>::Type Type;
    reach.each_pack([&](u32 i, u64 at, bool present) {
        const Type *pack = reinterpret_cast<const Type *>(from + at);
        if constexpr (sizeof(Type) == 16) ptx::load_quad_if(any && present, pack, tile[i]);
        else if (any && present) tile[i] = *pack;
    });
}

template <class T, u32 N>
__device__ __forceinline__ void load_elements(Tile<T, N> &tile, const T *from, const Reach<T, N> &reach) {
    reach.each_element([&](u32 i, u64 at) { tile[i] = hold(Pack<T, N>{{from[at]}}); });
}

template <class T, u32 N>
__device__ __forceinline__ void load(Tile<T, N> &tile, const T *from, const Reach<T, N> &reach) {
    if (reach.ragged) load_elements<T, N>(tile, from, reach);
    load_packs<T, N>(tile, from, reach, true);
}

// Loads two tiles, the second one only if it is `present`. The packs of both are in flight together: the branch for
// elements comes first, because a branch between a load and its use would let the compiler wait for all loads at once.
// With PACKS_FIRST it does so: for code that the compiler would otherwise mix with the loads.
template <class T, u32 N, bool PACKS_FIRST = false>
__device__ __forceinline__ void load_two(Tile<T, N> &first, const T *from_first, Tile<T, N> &second,
                                         const T *from_second, const Reach<T, N> &reach, bool present) {
    auto load_all_packs = [&] {
        load_packs<T, N>(first, from_first, reach, true);
        load_packs<T, N>(second, from_second, reach, present);
    };
    if constexpr (PACKS_FIRST) load_all_packs();
    if (reach.ragged) {
        load_elements<T, N>(first, from_first, reach);
        if (present) load_elements<T, N>(second, from_second, reach);
    }
    if constexpr (!PACKS_FIRST) load_all_packs();
}

template <class T, u32 N>
__device__ __forceinline__ void store(T *to, const Tile<T, N> &tile, const Reach<T, N> &reach) {
    typedef typename Held<T, N>::Type Type;
    reach.each_pack([&](u32 i, u64 at, bool present) {
        if (!present) return;
        Type *pack = reinterpret_cast<Type *>(to + at);
        if constexpr (sizeof(Type) == 16) ptx::store_quad(pack, tile[i]);
        else *pack = tile[i];
    });
    if (reach.ragged) reach.each_element([&](u32 i, u64 at) { to[at] = unpack<T, N>(tile[i]).lane[0]; });
}

// Calls `tile(reach)` for this thread's tiles of the slots from `first` to below `end`, which all blocks of a member
// share.
template <class T, u32 N, class Body>
__device__ __forceinline__ void for_tiles(Slots<N> slots, u64 first, u64 end, Body tile) {
    u64 round = UNROLL<T> * threads_of_member();
    for (u64 start = first + blockIdx.y * blockDim.x; start < end; start += round) {
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
