// The inner loop of operations that copy from one place to several, with accesses as wide as all addresses allow.
//
// As in combine.cuh, one thread reads an element before the same thread writes to it, and no other thread accesses it.
#ifndef BONFIRE_MOVE_CUH
#define BONFIRE_MOVE_CUH

#include "signal.cuh"
#include "vector.cuh"

// The access width in bytes that addresses allow, given the OR of their bits.
__device__ __forceinline__ u32 widest(u64 addresses) { return addresses % 16 == 0 ? 16 : addresses % 4 == 0 ? 4 : 1; }

template <u32 N, class To>
__device__ __forceinline__ void spread_packs(const Meeting &meeting, const Byte *from, u64 bytes, u32 parts, u32 index,
                                             To to) {
    u32 ranks = u32(meeting.call.ranks), rank = meeting.rank;
    Slots<N> slots(bytes);
    Part part(slots.all, parts, index);
    for_tiles<Byte>(slots, part.first, part.first + part.count, [&](const Reach<Byte, N> &reach) {
        Tile<Byte, N> tile = {};
        load<Byte, N>(tile, from, reach);
        // Each rank starts with another target, so that they do not all write to one. There is always one, or else the
        // compiler would put a branch between the loads.
        u32 i = 0, peer = rank;
        do {
            Byte *target = to(peer);
            if (target && target != from) store<Byte, N>(target, tile, reach);
            peer = peer + 1 == ranks ? 0 : peer + 1;
        } while (++i < ranks);
    });
}

// Copies part `index` of `parts` of the bytes at `from` to `to(rank)` for each rank; null means nowhere. Ranks that
// share the parts among them must pass the same addresses, so that all divide them alike.
template <class To>
__device__ __forceinline__ void spread(const Meeting &meeting, const Byte *from, u64 bytes, u32 parts, u32 index,
                                       To to) {
    u64 addresses = u64(from);
    for (u32 rank = 0; rank < meeting.call.ranks; ++rank) addresses |= u64(to(rank));
    switch (widest(addresses)) {
        case 16: return spread_packs<16>(meeting, from, bytes, parts, index, to);
        case 4: return spread_packs<4>(meeting, from, bytes, parts, index, to);
        default: return spread_packs<1>(meeting, from, bytes, parts, index, to);
    }
}

#endif
