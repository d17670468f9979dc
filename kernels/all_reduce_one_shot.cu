// all_reduce for small tensors: every rank reads all sources and computes the whole result for itself. It moves more
// data than two-shot (`count` elements from each rank to each), but no rank waits for the sums of another.
//
// All ranks get bit-identical results because all combine in the order of ranks.
#include "combine.cuh"
#include "instances.cuh"

template <class R, u32 N>
__device__ __forceinline__ bool reduce_everything(Meeting &meeting) {
    typedef typename R::Element T;
    Slots<N> slots(meeting.call.count);
    T *target = meeting.target<T>(meeting.rank);
    u64 start = blockIdx.y * blockDim.x + threadIdx.x, round = UNROLL<T> * threads_of_member(), done = 0;
    // All blocks of all ranks take the same number of rounds, each with a synchronisation: one if a rank's blocks cover
    // the tensor, and one for an empty tensor too. Without it a peer might write its next mail before this one is read
    // (an earlier form lacked it; the matrix of shim/check.cpp found that).
    do {
        Reach<T, N> reach(slots, done + start, slots.all);
        Tile<T, N> result;
        combine<R, N>(result, meeting, 0, reach);
        // In place, peers still read the target, so results stay in registers until all ranks have read.
        if (!meeting.meet()) return false;
        store<T, N>(target, result, reach);
        done += round;
    } while (done < slots.all);
    return true;
}

template <class R>
__device__ __forceinline__ void one_shot(const Call &call) {
    typedef typename R::Element T;
    Meeting meeting(call, Operation::ALL_REDUCE_ONE_SHOT, KIND<R>);
    if (!meeting.begin()) return;
    // All ranks must take the same path, which determines the number of rounds. So the alignment of all targets counts.
    bool packs = sources_aligned<T>(meeting, 0) && targets_aligned<T>(meeting);
    bool well = packs ? reduce_everything<R, LANES<T>>(meeting) : reduce_everything<R, 1>(meeting);
    if (well) meeting.end(true);
}

#define ONE_SHOT(...) KERNEL(one_shot, __VA_ARGS__)
INSTANCES(ONE_SHOT)
