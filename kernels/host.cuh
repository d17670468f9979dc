// What kernels tell the host, and the parameter of those that order streams.
#ifndef BONFIRE_HOST_CUH
#define BONFIRE_HOST_CUH

#include "ptx.cuh"

// A failure is one word: kind | operation << 8 | peer << 16 | epoch << 24. Zero is none. Those that order.cu reports
// have no operation and peer 0, and as epoch the number that was waited for.
enum class Failure : u64 {
    ABSENT = 1,    // the peer has not begun this call, or pushes where this rank does not
    STALLED = 2,   // it has, and has not gone on
    MISMATCH = 3,  // it called something else, or with another count, root or grid
    ABORTED = 4,   // the host gave up; the peer is the rank itself
    REFUSED = 5,   // the host asked for more than the kernel can do; the peer is the rank itself
    LATE = 6,      // the collective itself did not end; only order.cu reports it
};

// Words in host memory that the GPU reaches.
struct Host {
    u64 abort;    // written by the host: not zero ends all waits
    u64 failure;  // written by the GPU: the first failure on this rank
};

// What a kernel of order.cu is given.
struct Order {
    u64 word, value;  // the word's address; words are u64 and only grow
    u64 patience;     // nanoseconds, where it waits
    u64 host;         // address of the rank's Host, where it waits
};
static_assert(sizeof(Order) == 4 * sizeof(u64), "the host passes this many words");

#endif
