// How ranks synchronise inside a kernel.
//
// One launch works for several ranks of a group: for all that share its GPU. They are its members, which blockIdx.x
// counts; blockIdx.y counts the blocks of each member. In the following, a rank's kernel means the blocks of one
// member.
//
// The only parameter of every kernel here is a `Call`. All its fields are u64, and the host writes them in this order.
// A rank's source and target may be the same memory (if one is a part of the other: that part of the same memory), and
// must not overlap otherwise. The host orders earlier writes to the tensors before the launch, and later uses after it:
// with order.cu if they are on other streams.
//
// A kernel runs in a grid of (members, blocks, 1) with 1 <= members <= MAX_RANKS and 1 <= blocks <= MAX_BLOCKS, and
// blocks of (threads, 1, 1) with MAX_RANKS <= threads <= MAX_THREADS. Blocks and threads are the same on all ranks of a
// call; the number of members may differ from GPU to GPU. The kernels of a group's rank run one after another, on one
// stream or ordered by events.
//
// Every rank has a `Control` in its GPU's memory. It is zero before the first rank learns its address. Ranks exchange
// the addresses of their tensors by writing to each other's Control, and then access each other's tensors directly. So
// no launch waits until the ranks of another launch have allocated their tensors.
//
// They exchange addresses as distances from the rank's own Control. Ranks of one process have one address space, so
// nothing changes. In another process the Control has another address, and what is in the same allocation is as far
// from it as here: what peers access must be there then. What only the rank itself accesses may be anywhere. The host
// maps a Control to addresses that agree in the bits that decide about the width of accesses.
//
// Time
// Calls are numbered from 1 in the order in which a rank makes them: its epoch. The epoch is not a parameter but is
// kept in the Control, and advances when the last block of a call ends. So a captured graph can be replayed.
//
//   Invariant: no rank ends epoch e before every rank has begun epoch e.
//
// It holds because every block of every kernel waits for the block of the same index on all ranks, and a rank's kernel
// of epoch e begins after its kernel of epoch e - 1 has ended. So no rank is in epoch e + 2 while another is in epoch
// e, and data that alternates between two places, by the parity of the epoch, is never overwritten while it is needed.
//
// The values that ranks wait for only grow: an epoch, or an epoch and a step within it. A signal that remains from an
// earlier call, of any kernel in any grid, is smaller than every value that is waited for, and never mistaken for it.
// With 64 bits nothing wraps.
//
// Only blocks of the same index wait for each other. GPUs start blocks in the order of their numbers, x first (CUDA
// does not guarantee it), so those with one index, of all members, start together. A launch therefore makes progress if
// its GPU has room for one block of each member at a time, whatever room other GPUs have: among the blocks that have
// not ended, those of the smallest index are running or next on every GPU. Two launches on one GPU that wait for each
// other could not rely on that: the second might not start before the first has ended, for lack of room, because both
// are in one hardware queue, or because a module is being loaded. Hence one launch for all ranks of a GPU.
//
// Failures
// Every wait ends: when a peer does not respond for `timeout` nanoseconds, when the host sets its abort word, or when
// another block or a peer reports a failure. The first failure on a rank is stored in its Control, and sent to the host
// and to the peers' Controls, whichever launch they are in. From then on every kernel of that rank returns at once,
// without touching any data. So a group that failed needs new Controls. Before the host creates them, and before it
// frees tensors, it sets the abort words of all ranks and waits for their streams: a late rank may still write to
// tensors whose addresses it received in time.
#ifndef BONFIRE_SIGNAL_CUH
#define BONFIRE_SIGNAL_CUH

#include "host.cuh"

constexpr u32 MAX_RANKS = 8;
constexpr u32 MAX_BLOCKS = 128;
constexpr u32 MAX_THREADS = 512;
// The bytes that a rank can push to another in one call, see all_reduce_push.cu.
constexpr u32 PUSH_BYTES = 32 << 10;

enum class Operation : u64 {
    ALL_REDUCE_TWO_SHOT = 1,
    ALL_REDUCE_ONE_SHOT = 2,
    ALL_REDUCE_PUSH = 3,
    REDUCE_SCATTER = 4,
    ALL_GATHER = 5,
    BROADCAST = 6,
    ALL_TO_ALL = 7,
    COPY = 8,
    GATHER = 9,
    SCATTER = 10,
};

// Where one rank's tensors are in this call. Written by that rank.
struct alignas(32) Mail {
    u64 source, target;  // distances from that rank's Control
    u64 digest;  // of what was called
    u64 epoch;   // written last: a reader that sees it sees the rest
};

// The data that one rank pushes to another. A packet is 8 bytes of data, each half next to a tag.
struct Inbox {
    ptx::Pair header[MAX_BLOCKS];
    ptx::Pair data[PUSH_BYTES / 8];
};

struct alignas(128) Control {
    u64 epoch;            // calls that have ended
    u64 ended;            // blocks of the current call that have ended
    u64 failure;          // the first failure on this rank
    u64 news[MAX_RANKS];  // the first failure on each other rank, written by that rank
    alignas(64) u64 step[MAX_BLOCKS][MAX_RANKS];  // epoch << 20 | step, each written by that rank
    Mail mail[MAX_BLOCKS][MAX_RANKS];             // each written by that rank
    Inbox inbox[2][MAX_RANKS];  // by the epoch's parity; each written by that rank, cleared by this one
};
static_assert(sizeof(Control) == 1122432 && alignof(Control) == 128, "the host allocates this much");

// A rank that a launch works for.
struct Member {
    u64 source, target;  // addresses of its tensors
    u64 rank;
    u64 host;  // address of its Host
};

struct Call {
    u64 control[MAX_RANKS];    // addresses of all ranks' Controls, by rank
    Member member[MAX_RANKS];  // by blockIdx.x
    u64 timeout;               // timeout in nanoseconds for a kernel's wait for a peer
    u64 ranks;                 // of the group, whether members of this launch or not
    u64 root;                  // for operations that have one, else 0
    u64 count;                 // elements; of the whole tensor if ranks have parts of it
    u64 width;                 // bytes of an element, for operations that only move data, else 0
};
static_assert(sizeof(Call) == 45 * sizeof(u64), "the host passes this many words");

// One rank's call, as seen by one of its blocks. All threads of the block call all methods, and all get the same
// result: once it is false, the call has failed and the block returns.
class Meeting {
  public:
    // `kind` distinguishes calls of the same operation: element type and reduction, or the width of elements.
    __device__ Meeting(const Call &call, Operation operation, u32 kind)
        : call(call), member(call.member[blockIdx.x]), rank(u32(member.rank)), operation(operation), own(control(rank)),
          epoch(own.epoch + 1), step(0) {
        u64 what = u64(operation) | u64(kind) << 8 | call.root << 24 | u64(gridDim.y) << 32 | u64(blockDim.x) << 48;
        // An odd factor keeps different counts different; collisions of the sum of both words are negligible.
        digest = what + call.count * 0x9e3779b97f4a7c15;
    }

    // Tells all ranks where this rank's tensors are, and learns where theirs are. Writes of a rank's earlier kernels
    // are visible afterwards: those kernels ended before this one began, so the writes happen before its release.
    __device__ bool begin() {
        bool well = true;
        if (threadIdx.x < call.ranks) {
            u32 peer = threadIdx.x;
            well = sound();
            if (well) {
                Mail &out = control(peer).mail[blockIdx.y][rank];
                out.source = member.source - call.control[rank];
                out.target = member.target - call.control[rank];
                out.digest = digest;
                // Release: the mail's other words and the source's contents are stored first. No older mail is still
                // needed by the peer: it read that before the step in which this rank ended that call. Relaxed stores
                // and loads do not suffice at the start of a call: other projects report stale tensors with them.
                ptx::store_release_system(&out.epoch, epoch);
                const Mail &in = own.mail[blockIdx.y][peer];
                well = await(Failure::ABSENT, [&] {
                    // Acquire: pairs with that release.
                    return ptx::load_acquire_system(&in.epoch) == epoch ? NOBODY : peer;
                });
                if (well) {
                    well = agrees(peer, in.digest);
                    places().source[peer] = call.control[peer] + in.source;
                    places().target[peer] = call.control[peer] + in.target;
                }
            }
        }
        // Makes what one thread acquired visible to all, including where the tensors are.
        return __syncthreads_and(well);
    }

    // Waits until all ranks have called this as often. What their blocks did before is visible afterwards.
    __device__ bool meet() {
        u64 now = epoch << 20 | ++step;
        bool well = true;
        // All threads have done their part, which the releases below cover.
        __syncthreads();
        if (threadIdx.x < call.ranks) {
            u32 peer = threadIdx.x;
            // Release: reads of the peer's tensors come first, so the peer may overwrite them; writes to them come
            // first, so the peer may read them.
            ptx::store_release_system(&control(peer).step[blockIdx.y][rank], now);
            const u64 &theirs = own.step[blockIdx.y][peer];
            well = await(Failure::STALLED, [&] {
                // Acquire: pairs with that release. A peer may be a step ahead.
                return ptx::load_acquire_system(&theirs) >= now ? NOBODY : peer;
            });
        }
        return __syncthreads_and(well);
    }

    // Ends this block, after the last meeting or after the block has received from all ranks in another way. `well` is
    // this thread's own result; a call that failed does not advance the epoch.
    __device__ void end(bool well) {
        if (!__syncthreads_and(well) || threadIdx.x != 0) return;
        // Acquire and release: all blocks of this rank have read the epoch before the last one advances it.
        if (ptx::add_acquire_release_device(&own.ended, 1) + 1 == gridDim.y) {
            own.ended = 0;
            own.epoch = epoch;
        }
    }

    // Whether nothing has failed yet, here or on a peer. A peer's failure is reported as this rank's failure. The loads
    // are in flight together, also of the words of ranks that the group lacks, which stay zero: a call waits for this
    // before its first signal.
    __device__ bool sound() {
        u64 failure = ptx::load_relaxed_system(&own.failure);
        u64 news[MAX_RANKS];
#pragma unroll
        for (u32 peer = 0; peer < MAX_RANKS; ++peer) news[peer] = ptx::load_relaxed_system(&own.news[peer]);
        // Not the first failure, for which the compiler would make a load depend on the others.
        u64 any = failure;
#pragma unroll
        for (u32 peer = 0; peer < MAX_RANKS; ++peer) any |= news[peer];
        if (!any) return true;
#pragma unroll
        for (u32 peer = 0; peer < MAX_RANKS; ++peer) failure = failure ? failure : news[peer];
        return fail(failure);
    }

    // Waits until `missing()` returns NOBODY instead of the rank that is waited for.
    template <class Missing>
    __device__ bool await(Failure failure, Missing missing) {
        if (missing() == NOBODY) return true;
        u64 began = ptx::nanoseconds();
        for (u32 polls = 1;; ++polls) {
            u32 peer = missing();
            if (peer == NOBODY) return true;
            // Only now and then: the host's word is far away.
            if (polls % POLLS_BETWEEN_LOOKS) continue;
            if (!sound()) return false;
            if (ptx::load_relaxed_system(&host().abort)) return fail(word(Failure::ABORTED, rank));
            if (ptx::nanoseconds() - began > call.timeout) return fail(word(failure, peer));
        }
    }

    __device__ bool agrees(u32 peer, u64 theirs) {
        return theirs == digest || fail(word(Failure::MISMATCH, peer));
    }

    __device__ bool refuse() { return fail(word(Failure::REFUSED, rank)); }

    // Where a rank's tensors are; valid after begin().
    template <class T>
    __device__ const T *source(u32 of) const { return reinterpret_cast<const T *>(places().source[of]); }
    template <class T>
    __device__ T *target(u32 of) const { return reinterpret_cast<T *>(places().target[of]); }

    __device__ Control &control(u32 of) const { return *reinterpret_cast<Control *>(call.control[of]); }
    __device__ Host &host() const { return *reinterpret_cast<Host *>(member.host); }

    static constexpr u32 NOBODY = ~0u;

    const Call &call;
    const Member &member;
    const u32 rank;
    const Operation operation;
    Control &own;
    const u64 epoch;
    u64 digest;

  private:
    static constexpr u32 POLLS_BETWEEN_LOOKS = 64;

    struct Places {
        u64 source[MAX_RANKS], target[MAX_RANKS];
    };
    static __device__ Places &places() {
        __shared__ Places places;
        return places;
    }

    __device__ u64 word(Failure failure, u32 peer) const {
        return u64(failure) | u64(operation) << 8 | u64(peer) << 16 | epoch << 24;
    }

    // A failure orders nothing: a thread that sees one uses no data.
    __device__ bool fail(u64 word) {
        if (ptx::claim_relaxed_device(&own.failure, word) == 0) {
            ptx::store_relaxed_system(&host().failure, word);
            for (u32 peer = 0; peer < call.ranks; ++peer) {
                ptx::store_relaxed_system(&control(peer).news[rank], word);
            }
        }
        return false;
    }

    u32 step;
};

#endif
