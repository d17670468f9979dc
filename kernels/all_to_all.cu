// all_to_all: a tensor has as many parts of equal length as there are ranks; part r of rank s becomes part s of rank r.
// The exchange between two ranks involves no third one. Each of the two moves one half of it, in both directions: it
// reads both elements before it writes either, so source and target may be the same.
#include "move.cuh"

// The data that this rank and a peer exchange, and its destinations.
struct Exchange {
    const Byte *mine, *theirs;
    Byte *to_them, *to_me;
};

template <u32 N>
__device__ __forceinline__ void exchange(const Exchange &at, u64 bytes, u32 parts, u32 index) {
    Slots<N> slots(bytes);
    Part part(slots.all, parts, index);
    for_tiles<Byte>(slots, part.first, part.first + part.count, [&](const Reach<Byte, N> &reach) {
        Tile<Byte, N> out = {}, in = {};
        load_two<Byte, N>(out, at.mine, in, at.theirs, reach, true);
        store<Byte, N>(at.to_them, out, reach);
        store<Byte, N>(at.to_me, in, reach);
    });
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS) all_to_all(const __grid_constant__ Call call) {
    Meeting meeting(call, Operation::ALL_TO_ALL, u32(call.width));
    if (!meeting.begin()) return;
    u32 ranks = u32(call.ranks), rank = meeting.rank;
    u64 bytes = call.count / ranks * call.width;
    // Starts with the rank itself. Then each visits its peers in another order, so that they do not all access one.
    for (u32 i = 0, peer = rank; i < ranks; ++i, peer = peer + 1 == ranks ? 0 : peer + 1) {
        Exchange at = {
            meeting.source<Byte>(rank) + peer * bytes,
            meeting.source<Byte>(peer) + rank * bytes,
            meeting.target<Byte>(peer) + rank * bytes,
            meeting.target<Byte>(rank) + peer * bytes,
        };
        u32 parts = peer == rank ? 1 : 2, index = rank > peer;
        // Both ranks see these four addresses, so both divide the part alike.
        switch (widest(u64(at.mine) | u64(at.theirs) | u64(at.to_them) | u64(at.to_me))) {
            case 16: exchange<16>(at, bytes, parts, index); break;
            case 4: exchange<4>(at, bytes, parts, index); break;
            default: exchange<1>(at, bytes, parts, index);
        }
    }
    // Before all ranks are here, peers read this rank's source and write to its target.
    meeting.end(meeting.meet());
}
