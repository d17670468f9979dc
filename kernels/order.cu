// Orders the streams of tensors against the stream that a group's kernels run on, through words in the host's or the
// GPU's memory. Both kernels run as one thread on a stream of tensors. `tensors_ready` runs before a call, whose stream
// waits for the word in the driver. `await_done` runs after it and waits for a word that the driver writes when the
// call has ended. The host submits work before whatever waits for it. It gives `await_done` a longer timeout than
// kernels have for peers, so that those report first what is wrong.
//
// The pointer parameters are not used. They point to memory that the host has just initialised on the tensors' streams,
// so that cubecl orders the kernel after the work there, and later work after the kernel.
#include "host.cuh"

// Release: earlier work on the tensors' streams, which this kernel is ordered after, happens before the word's store.
// System scope, because the driver, which is no thread of this GPU, reads the word.
extern "C" __global__ void tensors_ready(const void *, const void *, const void *,
                                         const __grid_constant__ Order order) {
    ptx::store_release_system(reinterpret_cast<u64 *>(order.word), order.value);
}

extern "C" __global__ void await_done(const void *, const __grid_constant__ Order order) {
    constexpr u32 POLLS_BETWEEN_LOOKS = 64;
    const u64 *word = reinterpret_cast<const u64 *>(order.word);
    Host &host = *reinterpret_cast<Host *>(order.host);
    u64 began = ptx::nanoseconds();
    // Acquire: later work on this stream sees the call's stores, which precede the driver's write of the word. System
    // scope, because the driver, which is no thread of this GPU, writes it.
    for (u32 polls = 1; ptx::load_acquire_system(word) < order.value; ++polls) {
        if (polls % POLLS_BETWEEN_LOOKS) continue;
        bool aborted = ptx::load_relaxed_system(&host.abort);
        if (!aborted && ptx::nanoseconds() - began <= order.timeout) continue;
        // A failed call reports the reason itself. Only loads and stores, as in its own report: atomic operations on
        // host memory are not guaranteed to work. If both report at once, either report will do.
        if (ptx::load_relaxed_system(&host.failure) == 0) {
            Failure failure = aborted ? Failure::ABORTED : Failure::LATE;
            ptx::store_relaxed_system(&host.failure, u64(failure) | order.value << 24);
        }
        return;
    }
}
