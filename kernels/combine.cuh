// The inner loop of the reductions.
//
// One thread reads an element from all sources before it writes it to any target, and no other thread accesses that
// element. So a target may be the same memory as a source.
#ifndef BONFIRE_COMBINE_CUH
#define BONFIRE_COMBINE_CUH

#include "reduction.cuh"
#include "signal.cuh"
#include "vector.cuh"

// The accumulators of a tile.
template <class R, u32 N>
using Sums = typename R::Accumulator[UNROLL<typename R::Element>][N];

template <class R, u32 N, bool FIRST>
__device__ __forceinline__ void join(Sums<R, N> &sums, const Tile<typename R::Element, N> &tile) {
    typedef typename R::Element T;
    typedef typename R::Accumulator A;
#pragma unroll
    for (u32 i = 0; i < UNROLL<T>; ++i) {
        Pack<T, N> pack = unpack<T, N>(tile[i]);
#pragma unroll
        for (u32 lane = 0; lane < N; ++lane) {
            A value = Widen<A, T>::from(pack.lane[lane]);
            if constexpr (FIRST) sums[i][lane] = value;
            else sums[i][lane] = R::join(sums[i][lane], value);
        }
    }
}

// Whether all loads must come before a branch, see load_two(). For these, NVRTC's code for sm_100 and sm_120 would wait
// for the first pack before it loads the others.
template <class R> constexpr bool PACKS_FIRST = false;
template <> constexpr bool PACKS_FIRST<Max<f32>> = true;
template <> constexpr bool PACKS_FIRST<Min<f32>> = true;

// Joins the packs of rank 0.
template <class R, u32 N>
__device__ __forceinline__ void join_one(Sums<R, N> &sums, const Meeting &meeting, u64 from,
                                         const Reach<typename R::Element, N> &reach) {
    typedef typename R::Element T;
    // Lanes that are not loaded are computed with, but not stored.
    Tile<T, N> only = {};
    load<T, N>(only, meeting.source<T>(0) + from, reach);
    join<R, N, true>(sums, only);
}

// Joins the packs of `rank` and of the next one, if there is a `second`. Both ranks' loads are in flight before packs
// of either are used.
template <class R, u32 N, bool FIRST>
__device__ __forceinline__ void join_two(Sums<R, N> &sums, const Meeting &meeting, u32 rank, bool second, u64 from,
                                         const Reach<typename R::Element, N> &reach) {
    typedef typename R::Element T;
    Tile<T, N> one = {}, other = {};
    const T *source = meeting.source<T>(rank) + from, *next = meeting.source<T>(rank + second) + from;
    load_two<T, N, PACKS_FIRST<R>>(one, source, other, next, reach, second);
    join<R, N, FIRST>(sums, one);
    if (second) join<R, N, false>(sums, other);
}

// Combines a tile of all ranks' sources, from element `from` on, in the order of ranks, whichever rank does it. To
// start with its own source would spread the load over the links better, but give other bits than the host.
template <class R, u32 N>
__device__ __forceinline__ void combine(Tile<typename R::Element, N> &result, const Meeting &meeting, u64 from,
                                        const Reach<typename R::Element, N> &reach) {
    typedef typename R::Element T;
    u32 ranks = u32(meeting.call.ranks);
    Sums<R, N> sums;
    // One rank is a case of its own: a branch between the first two ranks' loads and their use would let the compiler
    // move the second one's loads behind it, where it has waited for the first one's.
    if (ranks > 1) join_two<R, N, true>(sums, meeting, 0, true, from, reach);
    else join_one<R, N>(sums, meeting, from, reach);
#pragma unroll 1
    for (u32 rank = 2; rank < ranks; rank += 2) {
        join_two<R, N, false>(sums, meeting, rank, rank + 1 < ranks, from, reach);
    }
#pragma unroll
    for (u32 i = 0; i < UNROLL<T>; ++i) {
        Pack<T, N> pack;
#pragma unroll
        for (u32 lane = 0; lane < N; ++lane) {
            pack.lane[lane] = Narrow<T, typename R::Accumulator>::from(R::finish(sums[i][lane], ranks));
        }
        result[i] = hold(pack);
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
