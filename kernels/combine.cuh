// The inner loop of the reductions.
//
// One thread reads an element from all sources before it writes it to any target, and no other thread accesses that
// element. So a target may be the same memory as a source.
#ifndef BONFIRE_COMBINE_CUH
#define BONFIRE_COMBINE_CUH

#include "reduction.cuh"
#include "signal.cuh"
#include "vector.cuh"

// Combines a tile of all ranks' sources, from element `from` on, in the order of ranks, whichever rank does it. To
// start with its own source would spread the load over the links better, but give other bits than the host. The next
// rank's loads are issued before one rank's packs are added.
template <class R, u32 N>
__device__ __forceinline__ void combine(Tile<typename R::Element, N> &result, const Meeting &meeting, u64 from,
                                        const Reach<typename R::Element, N> &reach) {
    typedef typename R::Element T;
    typedef typename R::Accumulator A;
    u32 ranks = u32(meeting.call.ranks);
    // Lanes that are not loaded are computed with, but not stored.
    Tile<T, N> ahead = {};
    A sum[UNROLL<T>][N];
    load<T, N>(ahead, meeting.source<T>(0) + from, reach);
    for (u32 rank = 0; rank < ranks; ++rank) {
        Tile<T, N> now;
#pragma unroll
        for (u32 i = 0; i < UNROLL<T>; ++i) now[i] = ahead[i];
        if (rank + 1 < ranks) load<T, N>(ahead, meeting.source<T>(rank + 1) + from, reach);
#pragma unroll
        for (u32 i = 0; i < UNROLL<T>; ++i) {
#pragma unroll
            for (u32 lane = 0; lane < N; ++lane) {
                A value = Widen<A, T>::from(now[i].lane[lane]);
                sum[i][lane] = rank == 0 ? value : R::join(sum[i][lane], value);
            }
        }
    }
#pragma unroll
    for (u32 i = 0; i < UNROLL<T>; ++i) {
#pragma unroll
        for (u32 lane = 0; lane < N; ++lane) {
            result[i].lane[lane] = Narrow<T, A>::from(R::finish(sum[i][lane], ranks));
        }
    }
}

// The number of elements in 16 bytes.
template <class T>
constexpr u32 LANES = 16 / sizeof(T);

// Whether all ranks' sources, from element `from` on, are aligned for packs.
template <class T>
__device__ __forceinline__ bool sources_aligned(const Meeting &meeting, u64 from) {
    bool all = true;
    for (u32 rank = 0; rank < meeting.call.ranks; ++rank) all &= aligned(meeting.source<T>(rank) + from, 16);
    return all;
}

template <class T>
__device__ __forceinline__ bool targets_aligned(const Meeting &meeting) {
    bool all = true;
    for (u32 rank = 0; rank < meeting.call.ranks; ++rank) all &= aligned(meeting.target<T>(rank), 16);
    return all;
}

#endif
