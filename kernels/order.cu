// Order between the streams that tensors live on and the stream that a group's kernels run on, through words in the
// host's or the GPU's memory. Both kernels run in one thread on a stream of tensors: `tensors_ready` before a call, whose stream
// waits for the word in the driver, and `await_done` after it, for a word that the driver writes when the call has
// ended. The host submits whatever is waited for before what waits for it, and gives `await_done` more patience than
// kernels have with peers, so that they say first what is wrong.
//
// Their pointers are not used. They are memory that the host has just initialised on the streams that the tensors live
// on, so that cubecl orders the kernel after what is on those, and what follows after the kernel.
#include "host.cuh"

// Release: what came before on the streams of the tensors, which this kernel is ordered after, comes before the word.
// System scope, because no thread of this GPU reads it but the driver, and then other GPUs read the tensors.
extern "C" __global__ void tensors_ready(const void *, const void *, const void *,
                                         const __grid_constant__ Order order) {
    ptx::store_release_system(reinterpret_cast<u64 *>(order.word), order.value);
}

extern "C" __global__ void await_done(const void *, const __grid_constant__ Order order) {
    constexpr u32 POLLS_BETWEEN_LOOKS = 64;
    const u64 *word = reinterpret_cast<const u64 *>(order.word);
    Host &host = *reinterpret_cast<Host *>(order.host);
    u64 began = ptx::nanoseconds();
    // Acquire: what follows on this stream sees what the call stored, which the driver's write of the word comes after.
    // System scope, because it is the driver that writes, and because kernels on other GPUs stored a part of it.
    for (u32 polls = 1; ptx::load_acquire_system(word) < order.value; ++polls) {
        if (polls % POLLS_BETWEEN_LOOKS) continue;
        bool aborted = ptx::load_relaxed_system(&host.abort);
        if (!aborted && ptx::nanoseconds() - began <= order.patience) continue;
        // A call that failed says why itself. Loads and stores only, like its own report: atomic operations on the
        // host's memory are not promised. Should both report at once, either will do.
        if (ptx::load_relaxed_system(&host.failure) == 0) {
            Failure failure = aborted ? Failure::ABORTED : Failure::LATE;
            ptx::store_relaxed_system(&host.failure, u64(failure) | order.value << 24);
        }
        return;
    }
}
