// scatter: every rank reads its part of the root's source into its target. `count` refers to the whole tensor; parts
// are those of the host's partition(). The other ranks' sources are not used.
#include "move.cuh"

extern "C" __global__ void __launch_bounds__(MAX_THREADS) scatter(const __grid_constant__ Call call) {
    Meeting meeting(call, Operation::SCATTER, u32(call.width));
    if (!meeting.begin()) return;
    Part part(call.count, call.ranks, meeting.rank);
    spread(meeting, meeting.source<Byte>(u32(call.root)) + part.first * call.width, part.count * call.width, 1, 0,
           [&](u32 rank) { return rank == meeting.rank ? meeting.target<Byte>(rank) : nullptr; });
    // Before all ranks are here, peers read the root's source.
    meeting.end(meeting.meet());
}
