// all_reduce for the smallest tensors: every rank pushes its elements to all others, each 8 bytes in one 16-byte store
// that also carries the call's tag, and computes the whole result from what it received. No addresses are exchanged and
// no separate signal is needed: the data itself is the signal. NCCL calls this protocol LL.
//
// All ranks get bit-identical results because all combine in the order of ranks.
//
// A push and another form do not see each other. So ranks that disagree about the count do not report a mismatch but
// time out, if the count makes one of them push and the other not.
#include "instances.cuh"
#include "reduction.cuh"
#include "signal.cuh"
#include "vector.cuh"

// 8 bytes of data in two halves, each next to the tag, because either half may arrive first.
__device__ __forceinline__ ptx::Pair packet(u64 data, u32 tag) {
    return {(data & 0xffffffff) | u64(tag) << 32, data >> 32 | u64(tag) << 32};
}
__device__ __forceinline__ bool has_arrived(ptx::Pair packet, u32 tag) {
    return u32(packet.low >> 32) == tag && u32(packet.high >> 32) == tag;
}
__device__ __forceinline__ u64 data_of(ptx::Pair packet) { return (packet.low & 0xffffffff) | packet.high << 32; }

// This rank's view of the inboxes for one call.
//
// A packet for epoch e + 2 is written only after its reader has left epoch e, see the invariant in signal.cuh: inboxes
// alternate by parity. The tag is never zero and repeats after 2^32 - 1 epochs. So that a packet of that age is not
// taken for a new one, a reader clears what it has read. That store is done when the reader's kernel ends, and no rank
// reaches epoch e + 2 without that rank's next kernel.
class Push {
  public:
    __device__ explicit Push(Meeting &meeting)
        : meeting(meeting), tag(u32(meeting.epoch % 0xffffffff) + 1), parity(meeting.epoch % 2) {}

    // Sends to all others. Starts with the next rank, so that the ranks do not all write to one.
    template <class Place>
    __device__ void send(u64 data, Place place) {
        u32 ranks = u32(meeting.call.ranks), rank = meeting.rank;
        for (u32 i = 1, to = rank; i < ranks; ++i) {
            to = to + 1 == ranks ? 0 : to + 1;
            ptx::store_pair_relaxed_system(place(meeting.control(to).inbox[parity][rank]), packet(data, tag));
        }
    }

    // Receives from all others; this rank's own entry stays as it is. Loads from all inboxes are in flight together.
    template <class Place>
    __device__ bool receive(u64 (&data)[MAX_RANKS], Place place) {
        u32 ranks = u32(meeting.call.ranks), rank = meeting.rank;
        ptx::Pair got[MAX_RANKS];
        bool well = meeting.await(Failure::ABSENT, [&] {
#pragma unroll
            for (u32 from = 0; from < MAX_RANKS; ++from) {
                if (from < ranks && from != rank) {
                    got[from] = ptx::load_pair_relaxed_system(place(meeting.own.inbox[parity][from]));
                }
            }
            u32 missing = Meeting::NOBODY;
#pragma unroll
            for (u32 from = 0; from < MAX_RANKS; ++from) {
                if (from < ranks && from != rank && !has_arrived(got[from], tag)) missing = from;
            }
            return missing;
        });
        if (!well) return false;
#pragma unroll
        for (u32 from = 0; from < MAX_RANKS; ++from) {
            if (from < ranks && from != rank) {
                data[from] = data_of(got[from]);
                ptx::store_pair_relaxed_system(place(meeting.own.inbox[parity][from]), {0, 0});
            }
        }
        return true;
    }

  private:
    Meeting &meeting;
    const u32 tag;
    const u32 parity;
};

// The number of elements in a packet.
template <class T>
constexpr u32 IN_PACKET = 8 / sizeof(T);

template <class T>
__device__ __forceinline__ u64 gather(const T *from, u64 present) {
    Pack<T, IN_PACKET<T>> elements = {};
#pragma unroll
    for (u32 lane = 0; lane < IN_PACKET<T>; ++lane) {
        if (lane < present) elements.lane[lane] = from[lane];
    }
    u64 data;
    memcpy(&data, &elements, 8);
    return data;
}

template <class R>
__device__ __forceinline__ void reduce_packet(typename R::Element *to, const u64 (&data)[MAX_RANKS], u32 ranks,
                                              u64 present) {
    typedef typename R::Element T;
    typedef typename R::Accumulator A;
    Pack<T, IN_PACKET<T>> elements;
    A sum[IN_PACKET<T>];
    memcpy(&elements, &data[0], 8);
#pragma unroll
    for (u32 lane = 0; lane < IN_PACKET<T>; ++lane) sum[lane] = Widen<A, T>::from(elements.lane[lane]);
#pragma unroll
    for (u32 rank = 1; rank < MAX_RANKS; ++rank) {
        if (rank >= ranks) continue;
        memcpy(&elements, &data[rank], 8);
#pragma unroll
        for (u32 lane = 0; lane < IN_PACKET<T>; ++lane) {
            sum[lane] = R::join(sum[lane], Widen<A, T>::from(elements.lane[lane]));
        }
    }
#pragma unroll
    for (u32 lane = 0; lane < IN_PACKET<T>; ++lane) {
        if (lane < present) to[lane] = Narrow<T, A>::from(R::finish(sum[lane], ranks));
    }
}

template <class R>
__device__ __forceinline__ void push(const Call &call) {
    typedef typename R::Element T;
    Meeting meeting(call, Operation::ALL_REDUCE_PUSH, KIND<R>);
    u32 ranks = u32(call.ranks), rank = meeting.rank;
    const T *from = reinterpret_cast<const T *>(meeting.member.source);
    T *to = reinterpret_cast<T *>(meeting.member.target);
    bool well = meeting.sound() && (call.count <= PUSH_BYTES / sizeof(T) || meeting.refuse());
    Push push(meeting);
    u64 data[MAX_RANKS];
    // The header carries what was called. It is sent first and compared last, like the mail of other operations. It is
    // sent even if the tensor is empty, so that no block ends before every rank has begun.
    auto header = [](Inbox &inbox) { return &inbox.header[blockIdx.y]; };
    if (threadIdx.x == 0 && well) push.send(meeting.digest, header);
    for (u64 i = u64(blockIdx.y) * blockDim.x + threadIdx.x; well; i += u64(gridDim.y) * blockDim.x) {
        u64 at = i * IN_PACKET<T>;
        if (at >= call.count) break;
        u64 mine = gather(from + at, call.count - at);
        auto place = [i](Inbox &inbox) { return &inbox.data[i]; };
        push.send(mine, place);
        well = push.receive(data, place);
#pragma unroll
        for (u32 r = 0; r < MAX_RANKS; ++r) data[r] = r == rank ? mine : data[r];
        if (well) reduce_packet<R>(to + at, data, ranks, call.count - at);
    }
    if (threadIdx.x == 0 && well) {
        well = push.receive(data, header);
#pragma unroll
        for (u32 r = 0; r < MAX_RANKS; ++r) {
            if (well && r < ranks && r != rank) well = meeting.agrees(r, data[r]);
        }
    }
    meeting.end(well);
}

#define PUSH(...) KERNEL(push, __VA_ARGS__)
INSTANCES(PUSH)
