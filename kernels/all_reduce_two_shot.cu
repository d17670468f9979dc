// all_reduce for large tensors: every rank reduces one part directly from all sources, and stores it to all targets.
// One kernel, two synchronisations, no intermediate memory. NCCL's term: reduce-scatter by loads, all-gather by stores.
//
// A rank reads and writes `count` elements in total, whatever the number of ranks. Without a switch that adds, nothing
// moves fewer. All ranks get bit-identical results because each element is reduced by one rank.
#include "combine.cuh"
#include "instances.cuh"

template <class R, u32 N>
__device__ __forceinline__ void reduce_own_part(const Meeting &meeting) {
    typedef typename R::Element T;
    u32 ranks = u32(meeting.call.ranks), rank = meeting.rank;
    Slots<N> slots(meeting.call.count);
    Part part(slots.all, ranks, rank);
    for_tiles<T>(slots, part.first, part.first + part.count, [&](const Reach<T, N> &reach) {
        Tile<T, N> result;
        combine<R, N>(result, meeting, 0, reach);
        // Each rank starts with another target, so that they do not all write to one.
        for (u32 i = 0, to = rank; i < ranks; ++i, to = to + 1 == ranks ? 0 : to + 1) {
            store<T, N>(meeting.target<T>(to), result, reach);
        }
    });
}

template <class R>
__device__ __forceinline__ void two_shot(const Call &call) {
    typedef typename R::Element T;
    Meeting meeting(call, Operation::ALL_REDUCE_TWO_SHOT, KIND<R>);
    if (!meeting.begin()) return;
    if (sources_aligned<T>(meeting, 0) && targets_aligned<T>(meeting)) reduce_own_part<R, LANES<T>>(meeting);
    else reduce_own_part<R, 1>(meeting);
    // Before all ranks are here, peers read this rank's source and write to its target.
    meeting.end(meeting.meet());
}

#define TWO_SHOT(...) KERNEL(two_shot, __VA_ARGS__)
INSTANCES(TWO_SHOT)
