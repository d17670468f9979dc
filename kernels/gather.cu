// gather: every rank stores its part, which is its source, to the root's target. `count` refers to the whole tensor;
// parts are those of the host's partition(). The other ranks' targets are not used.
#include "move.cuh"

extern "C" __global__ void __launch_bounds__(MAX_THREADS) gather(const __grid_constant__ Call call) {
    Meeting meeting(call, Operation::GATHER, u32(call.width));
    if (!meeting.begin()) return;
    Part part(call.count, call.ranks, meeting.rank);
    u64 first = part.first * call.width;
    spread(meeting, meeting.source<Byte>(meeting.rank), part.count * call.width, 1, 0,
           [&](u32 rank) { return rank == call.root ? meeting.target<Byte>(rank) + first : nullptr; });
    // Before all ranks are here, peers write to the root's target.
    meeting.end(meeting.meet());
}
