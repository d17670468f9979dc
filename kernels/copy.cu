// copy: from the root's source to the other rank's target, in a group of two. Each of the two moves one part. The
// root's target and the other rank's source are not used.
#include "move.cuh"

extern "C" __global__ void __launch_bounds__(MAX_THREADS) copy(const __grid_constant__ Call call) {
    Meeting meeting(call, Operation::COPY, u32(call.width));
    if (!meeting.begin()) return;
    spread(meeting, meeting.source<Byte>(u32(call.root)), call.count * call.width, u32(call.ranks), meeting.rank,
           [&](u32 rank) { return rank == call.root ? nullptr : meeting.target<Byte>(rank); });
    // Before both are here, each may still access a tensor of the other.
    meeting.end(meeting.meet());
}
