// broadcast: every rank takes one part of the root's source and stores it to all targets. So no byte leaves the root
// more than about twice, however many ranks there are. The other ranks' sources are not used.
#include "move.cuh"

extern "C" __global__ void __launch_bounds__(MAX_THREADS) broadcast(const __grid_constant__ Call call) {
    Meeting meeting(call, Operation::BROADCAST, u32(call.width));
    if (!meeting.begin()) return;
    spread(meeting, meeting.source<Byte>(u32(call.root)), call.count * call.width, u32(call.ranks), meeting.rank,
           [&](u32 rank) { return meeting.target<Byte>(rank); });
    // Before all ranks are here, peers read the root's source and write to all targets.
    meeting.end(meeting.meet());
}
