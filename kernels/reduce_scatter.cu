// reduce_scatter: every rank reduces its own part of the tensor from all sources into its target. `count` refers to the
// whole tensor; parts are those of the host's partition(). It is the first half of a two-shot all_reduce.
#include "combine.cuh"
#include "instances.cuh"

template <class R, u32 N>
__device__ __forceinline__ void reduce_part(const Meeting &meeting, Part part) {
    typedef typename R::Element T;
    Slots<N> slots(part.count);
    T *target = meeting.target<T>(meeting.rank);
    for_tiles<T>(slots, 0, slots.all, [&](const Reach<T, N> &reach) {
        Tile<T, N> result;
        combine<R, N>(result, meeting, part.first, reach);
        store<T, N>(target, result, reach);
    });
}

template <class R>
__device__ __forceinline__ void reduce_scatter(const Call &call) {
    typedef typename R::Element T;
    Meeting meeting(call, Operation::REDUCE_SCATTER, KIND<R>);
    if (!meeting.begin()) return;
    // With uneven parts only the first ones may be aligned. Each rank takes the path that its own part allows.
    Part part(call.count, call.ranks, meeting.rank);
    bool packs = sources_aligned<T>(meeting, part.first) && aligned(meeting.target<T>(meeting.rank), 16);
    if (packs) reduce_part<R, LANES<T>>(meeting, part);
    else reduce_part<R, 1>(meeting, part);
    // Before all ranks are here, peers read this rank's source.
    meeting.end(meeting.meet());
}

#define REDUCE_SCATTER(...) KERNEL(reduce_scatter, __VA_ARGS__)
INSTANCES(REDUCE_SCATTER)
