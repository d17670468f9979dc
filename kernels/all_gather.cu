// all_gather: every rank stores its part, which is its source, to all targets. `count` refers to the whole tensor;
// parts are those of the host's partition().
#include "move.cuh"

extern "C" __global__ void __launch_bounds__(MAX_THREADS) all_gather(const __grid_constant__ Call call) {
    Meeting meeting(call, Operation::ALL_GATHER, u32(call.width));
    if (!meeting.begin()) return;
    Part part(call.count, call.ranks, meeting.rank);
    u64 first = part.first * call.width;
    spread(meeting, meeting.source<Byte>(meeting.rank), part.count * call.width, 1, 0,
           [&](u32 rank) { return meeting.target<Byte>(rank) + first; });
    // Before all ranks are here, peers write to this rank's target.
    meeting.end(meeting.meet());
}
