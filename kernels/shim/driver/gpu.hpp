// Software GPUs: work on a stream runs in order and concurrently with the host, on threads of this machine.
//
// Streams are distributed over a GPU's hardware queues. A queue is a thread that runs one item after another, so an
// item blocks all later ones in the same queue, whatever their streams: on a real GPU streams share queues, too, if
// there are more of them than queues. All streams are non-blocking, including the null stream.
//
// The host runs ahead of the queues as it does of a GPU, and random delays before every item expose missing orders.
// SHIM_QUEUES=1 and SHIM_STRICT=1 make deadlocks frequent that a GPU shows rarely.
//
// Kernels of Bonfire's are part of this library, and run as ../cuda.hpp describes: all blocks at once, with random
// delays. Others, such as those of cubecl and of burn, are compiled with g++ against ../include/ when a program passes
// them to NVRTC (nvrtc.cpp), and their blocks run one after another (blocks.cpp).
//
// Settings, from the environment, with their defaults:
//     SHIM_GPUS    number of GPUs; 1
//     SHIM_NVLINK  0: PCIe connects the GPUs, without atomic operations between them; 1
//     SHIM_PEERS   0: no GPU can access another one's memory; 1
//     SHIM_IPC     0: no process can open the memory of another one, as if they were in different containers; 1
//     SHIM_QUEUES  hardware queues of each GPU; 32
//     SHIM_DELAYS  seed of random delays before every item and within kernels; 0: none; 1
//     SHIM_ARCHITECTURE  the compute capability: 90 is 9.0. With 80 or more, burn tries kernels for tensor cores first,
//                  hundreds of them, none of which compiles; 70
//     SHIM_VERSION  the version of CUDA that the driver supports: 12040 is 12.4; 13000
//     SHIM_NVRTC   the highest compute capability for which NVRTC compiles; 1000
//     SHIM_FAULT   GPU:KERNEL:N: the N-th launch on this GPU of a kernel whose name begins with KERNEL accesses an
//                  illegal address. As on a real GPU, this ends all work in the GPU's context, and every later call in
//                  it returns the error; none
//     SHIM_STRICT  1: calls that may wait for the whole context on a real driver (loading a module, the first launch of
//                  a kernel, allocating and freeing) do, and every other call on that context waits for them; 0
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "../../types.cuh"

// Numbers and names are those of the CUDA Driver API, which programs look up in the library.
#define EXPORTED extern "C" __attribute__((visibility("default")))
#define API EXPORTED driver::Returned

// The range of the streams' priorities. Smaller numbers come first.
constexpr int LEAST_PRIORITY = 0, GREATEST_PRIORITY = -5;

// The codes that this driver returns.
#define RESULTS(NAME)                                                                                \
    NAME(SUCCESS, 0) NAME(ERROR_INVALID_VALUE, 1) NAME(ERROR_OUT_OF_MEMORY, 2)                       \
    NAME(ERROR_NOT_INITIALIZED, 3) NAME(ERROR_INVALID_DEVICE, 101) NAME(ERROR_INVALID_CONTEXT, 201)  \
    NAME(ERROR_INVALID_IMAGE, 200) NAME(ERROR_PEER_ACCESS_UNSUPPORTED, 217)                          \
    NAME(ERROR_INVALID_HANDLE, 400) NAME(ERROR_NOT_FOUND, 500) NAME(ERROR_NOT_READY, 600)            \
    NAME(ERROR_ILLEGAL_ADDRESS, 700) NAME(ERROR_LAUNCH_OUT_OF_RESOURCES, 701)                        \
    NAME(ERROR_PEER_ACCESS_ALREADY_ENABLED, 704) NAME(ERROR_PEER_ACCESS_NOT_ENABLED, 705)            \
    NAME(ERROR_CONTEXT_IS_DESTROYED, 709) NAME(ERROR_NOT_SUPPORTED, 801)

enum CUresult {
#define DECLARE_RESULT(name, code) CUDA_##name = code,
    RESULTS(DECLARE_RESULT)
#undef DECLARE_RESULT
};

typedef int CUdevice;
typedef u64 CUdeviceptr;

namespace driver {

// What a function of the driver returns: a code, in a register like any int. Made from one, it counts a call of the
// function that returns it. A function that returns what another one does counts as that one.
struct Returned {
    CUresult code;
    Returned(CUresult code, const char *function = __builtin_FUNCTION());
    operator CUresult() const { return code; }
};
static_assert(sizeof(Returned) == sizeof(int) && std::is_trivially_copyable_v<Returned>);

struct Settings {
    u32 gpus, queues;
    bool peers, nvlink, strict, ipc;
    u64 delays;
    u32 architecture;  // compute capability: 70 is 7.0
    int version;
    // The GPU, the kernel and the launch that faults. The launch is 0 if none does.
    int fault_gpu;
    std::string fault_kernel;
    u64 fault_launch;
};
const Settings &settings();

// The completion of one item of a stream.
struct Completion {
    std::atomic<bool> done{false};
    u64 when = 0;  // nanoseconds, once done

    void finish();
    void wait() { done.wait(false); }
};
typedef std::shared_ptr<Completion> CompletionPtr;

class Queue {
  public:
    explicit Queue(u64 seed);
    CompletionPtr submit(std::function<void()> item);
    // The completion of all that was submitted so far.
    CompletionPtr last();

  private:
    void work();

    std::mutex mutex;
    std::condition_variable more;
    std::deque<std::pair<std::function<void()>, CompletionPtr>> items;
    CompletionPtr newest;
    u64 random;
};

struct Gpu;

struct Stream {
    Gpu *gpu;
    Queue *queue;
    unsigned flags;
    int priority;
    CompletionPtr last;  // under the GPU's lock
};

// A GPU and its one context.
struct Gpu {
    int ordinal = 0;
    std::mutex lock;  // of the context: held by calls that change it or submit work
    u32 retained = 0;
    std::set<Gpu *> peers;  // GPUs whose memory it may access
    std::vector<std::unique_ptr<Queue>> queues;
    u32 streams = 0;  // created so far
    Stream null_stream{};
    u64 release_threshold = 0;  // of its memory pool
    std::atomic<bool> exhausted{false};  // it has no memory left
    u64 fault_launches = 0;  // of the kernel that faults, so far; under the lock
    std::atomic<int> fault{CUDA_SUCCESS};  // the error of a fault, from then on

    // The following are called with the lock held.
    Stream make_stream(unsigned flags, int priority);
    CompletionPtr submit(Stream &stream, std::function<void()> item);
    // Waits for all submitted work, if the settings are strict.
    void sync_if_strict();
    void wait_for_all();
};

Gpu *gpu(int ordinal);  // null: there is none

// The context that is current on this thread.
void set_current(Gpu *gpu);
Gpu *current();

// Objects for which a program holds handles.
template <class T>
class Handles {
  public:
    T *add(T value) {
        std::lock_guard<std::mutex> guard(mutex);
        T *handle = new T(std::move(value));
        live.insert(handle);
        return handle;
    }
    // Returns the object of a handle, or null if there is none.
    T *find(void *handle) {
        std::lock_guard<std::mutex> guard(mutex);
        T *known = static_cast<T *>(handle);
        return live.count(known) ? known : nullptr;
    }
    bool remove(void *handle) {
        std::lock_guard<std::mutex> guard(mutex);
        T *known = static_cast<T *>(handle);
        if (!live.erase(known)) return false;
        delete known;
        return true;
    }

  private:
    std::mutex mutex;
    std::set<T *> live;
};

// Never destroyed: queues work until the process ends.
template <class T>
T &global() {
    static T *value = new T;
    return *value;
}

inline Handles<Stream> &streams() { return global<Handles<Stream>>(); }

// Returns the stream of a handle, or null. The null stream is that of the current context.
Stream *find_stream(void *handle);
// The error of a function that did not find its stream.
CUresult no_stream(void *handle);

// The state of a context: destroyed, ended by a fault, or sound.
inline CUresult state_of(const Gpu &gpu) {
    return gpu.retained ? CUresult(gpu.fault.load()) : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

// Runs `action` with the lock of the current context, if there is one.
template <class Action>
CUresult in_context(Action action) {
    Gpu *gpu = current();
    if (!gpu) return CUDA_ERROR_INVALID_CONTEXT;
    std::lock_guard<std::mutex> guard(gpu->lock);
    CUresult state = state_of(*gpu);
    return state == CUDA_SUCCESS ? action(*gpu) : state;
}

// Runs `action` with the lock of the stream's context.
template <class Action>
CUresult on_stream(void *handle, Action action) {
    Stream *stream = find_stream(handle);
    if (!stream) return no_stream(handle);
    std::lock_guard<std::mutex> guard(stream->gpu->lock);
    CUresult state = state_of(*stream->gpu);
    return state == CUDA_SUCCESS ? action(*stream) : state;
}

// Submits an item to a stream.
inline CUresult submit(void *handle, std::function<void()> item) {
    return on_stream(handle, [&](Stream &stream) {
        stream.gpu->submit(stream, std::move(item));
        return CUDA_SUCCESS;
    });
}

// What programs have done, for tests: the functions whose names begin with `shim` return it.
struct Record {
    struct Kernel {
        u64 launches = 0;
        int least_priority = GREATEST_PRIORITY;  // of the streams that it was launched on
        u64 blocks = 0;  // of the last launch
    };
    std::mutex mutex;
    std::map<std::string, Kernel> kernels;  // by name
    std::map<std::string, u64> calls;  // of the driver's functions, by name
    u64 host_functions = 0;
    u64 downloaded = 0, uploaded = 0;  // bytes that copies moved from GPUs to the host, and to GPUs
};
inline Record &record() { return global<Record>(); }

// The kernel whose launches wait in their streams, as behind other work of a busy GPU.
struct Held {
    std::mutex mutex;
    std::condition_variable released;
    std::string kernel;

    void wait(const std::string &name) {
        std::unique_lock<std::mutex> guard(mutex);
        released.wait(guard, [&] { return kernel != name; });
    }
};
inline Held &held() { return global<Held>(); }

// Whether the driver allocated all of this memory, on a GPU or on the host.
bool allocated(CUdeviceptr at, u64 bytes);
// Whether streams may wait for words there, and write them. As in the driver (580, on an H100), a pool's memory is
// refused.
bool takes_words(CUdeviceptr at, u64 bytes);

}  // namespace driver
