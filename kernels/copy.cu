// copy: from the root's source to the target of the other rank, in a group of two. Each of the two moves a part. The
// root's target and the other rank's source are not used.
#include "move.cuh"

extern "C" __global__ void __launch_bounds__(MAX_THREADS) copy(const __grid_constant__ Call call) {
    Meeting meeting(call, Operation::COPY, u32(call.width));
    if (!meeting.begin()) return;
    spread(meeting, meeting.source<Byte>(u32(call.root)), call.count * call.width, u32(call.ranks), meeting.rank,
           [&](u32 rank) { return rank == call.root ? nullptr : meeting.target<Byte>(rank); });
    // Until both are here, one reads the source and one writes to the target of the other.
    meeting.end(meeting.meet());
}
