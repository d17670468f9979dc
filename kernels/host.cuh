// The interface between kernels and host: failure reports, and the parameter of the kernels that order streams.
#ifndef BONFIRE_HOST_CUH
#define BONFIRE_HOST_CUH

#include "ptx.cuh"

// A failure is one word: kind | operation << 8 | peer << 16 | epoch << 24. Zero means no failure. Reports of order.cu
// have no operation, peer 0, and as epoch the number that was waited for.
enum class Failure : u64 {
    ABSENT = 1,    // the peer has not begun this call, or pushes where this rank does not
    STALLED = 2,   // the peer has begun this call, but has stopped in it
    MISMATCH = 3,  // the peer called something else, or with another count, root or grid
    ABORTED = 4,   // the host aborted the call; the peer is the rank itself
    REFUSED = 5,   // the host requested more than the kernel supports; the peer is the rank itself
    LATE = 6,      // the collective itself did not end; reported by order.cu only
};

// Words in host memory that the GPU can access.
struct Host {
    u64 abort;    // written by the host: a value other than zero ends all waits
    u64 failure;  // written by the GPU: the first failure on this rank
};

// The parameter of a kernel of order.cu.
struct Order {
    u64 word, value;  // the word's address; words are u64 and only grow
    u64 timeout;      // timeout in nanoseconds, if the kernel waits
    u64 host;         // address of the rank's Host, if the kernel waits
};
static_assert(sizeof(Order) == 4 * sizeof(u64), "the host passes this many words");

#endif
