// Memory. A GPU's memory is host memory at the same address, so kernels and copies of any GPU can access all of it. New
// memory contains garbage and is followed by an inaccessible page. Freed memory is unmapped.
//
// Memory of cuMemAlloc is a file without a name, which other processes find under /proc and map: atomic operations work
// between them as within one. A mapping that is open stays usable when the memory is freed, and when its owner ends.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <map>

#include "gpu.hpp"

using driver::current;
using driver::Gpu;
using driver::gpu;

namespace {

constexpr u64 PAGE = 4096;
constexpr unsigned char GARBAGE = 0xcb;
// How much of new memory is filled: more than any words of ours take, and quickly done.
constexpr u64 GARBAGE_BYTES = 4 << 20;

enum class Kind {
    OWN,
    REGISTERED,  // it belongs to the program
    OPENED,      // it belongs to another process, whose handle was opened
};

struct Region {
    u64 bytes;
    Gpu *gpu;  // null: memory of the host
    Kind kind;
    int file;     // -1: other processes cannot map it
    u64 object;   // of opened memory: the file's number
    u32 opened;   // of opened memory: how often
};

u64 mapped_bytes(u64 bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

struct Regions {
    std::mutex mutex;
    std::map<u64, Region> all;  // by first address

    void add(u64 at, Region region) {
        std::lock_guard<std::mutex> guard(mutex);
        all[at] = region;
    }
    // Returns the region that contains this address, and its start, which is 0 if there is none.
    std::pair<u64, Region> find(u64 at) {
        std::lock_guard<std::mutex> guard(mutex);
        auto next = all.upper_bound(at);
        if (next == all.begin()) return {};
        auto [start, region] = *--next;
        return at < start + region.bytes ? std::pair(start, region) : std::pair(u64(0), Region{});
    }
};
Regions &regions() { return driver::global<Regions>(); }

// Maps new memory, or that of a file, and an inaccessible page after it. Null: there is no room.
void *map_with_guard(u64 bytes, int file) {
    u64 whole = mapped_bytes(bytes);
    constexpr int HOW = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *memory = mmap(nullptr, whole + PAGE, PROT_READ | PROT_WRITE, HOW, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    if (file >= 0 && mmap(memory, whole, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED) {
        munmap(memory, whole + PAGE);
        return nullptr;
    }
    mprotect(static_cast<char *>(memory) + whole, PAGE, PROT_NONE);
    return memory;
}

// Allocates memory; if it is `shared`, other processes can map it.
CUresult allocate(u64 *at, u64 bytes, Gpu *gpu, bool shared = false) {
    if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    if (gpu && gpu->exhausted) return CUDA_ERROR_OUT_OF_MEMORY;
    int file = shared ? memfd_create("software GPU", MFD_CLOEXEC) : -1;
    bool failed = shared && (file < 0 || ftruncate(file, off_t(mapped_bytes(bytes))));
    void *memory = failed ? nullptr : map_with_guard(bytes, file);
    if (!memory) {
        if (file >= 0) close(file);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *at = u64(memory);
    memset(memory, GARBAGE, std::min(mapped_bytes(bytes), GARBAGE_BYTES));
    regions().add(*at, {bytes, gpu, Kind::OWN, file, 0, 0});
    return CUDA_SUCCESS;
}

void unmap(u64 at, const Region &region) {
    munmap(reinterpret_cast<void *>(at), mapped_bytes(region.bytes) + PAGE);
    if (region.file >= 0) close(region.file);
}

// Frees the region that begins at this address, of a GPU or of the host.
CUresult release(u64 at, bool of_host) {
    std::lock_guard<std::mutex> guard(regions().mutex);
    auto found = regions().all.find(at);
    if (found == regions().all.end() || !found->second.gpu != of_host) return CUDA_ERROR_INVALID_VALUE;
    if (found->second.kind == Kind::OPENED) return CUDA_ERROR_INVALID_VALUE;
    if (found->second.kind == Kind::OWN) unmap(at, found->second);
    regions().all.erase(found);
    return CUDA_SUCCESS;
}

// Runs an item on the stream and waits for it.
CUresult submit_and_wait(void *stream, std::function<void()> item) {
    driver::CompletionPtr completion;
    CUresult result = driver::on_stream(stream, [&](driver::Stream &found) {
        completion = found.gpu->submit(found, std::move(item));
        return CUDA_SUCCESS;
    });
    if (!completion) return result;
    completion->wait();
    // A fault may have ended it.
    return driver::on_stream(stream, [](driver::Stream &) { return CUDA_SUCCESS; });
}

struct Rows {
    u64 first, pitch;
    u64 extent(u64 width, u64 height) const { return (height - 1) * pitch + width; }
};

enum class Side { DEVICE, HOST, EITHER };

// As the driver does with host memory that it did not allocate: such a source has been read, and such a target has been
// written, when the call returns.
CUresult copy(void *stream, Rows to, Side target, Rows from, Side source, u64 width, u64 height, bool wait) {
    if (width == 0 || height == 0) return CUDA_SUCCESS;
    bool from_known = driver::allocated(from.first, from.extent(width, height));
    bool to_known = driver::allocated(to.first, to.extent(width, height));
    if (source == Side::DEVICE && !from_known) return CUDA_ERROR_INVALID_VALUE;
    if (target == Side::DEVICE && !to_known) return CUDA_ERROR_INVALID_VALUE;
    bool from_gpu = regions().find(from.first).second.gpu, to_gpu = regions().find(to.first).second.gpu;
    if (from_gpu != to_gpu) {
        std::lock_guard<std::mutex> guard(driver::record().mutex);
        (from_gpu ? driver::record().downloaded : driver::record().uploaded) += width * height;
    }
    std::shared_ptr<std::vector<unsigned char>> read;
    if (!from_known && !wait) {
        auto *start = reinterpret_cast<const unsigned char *>(from.first);
        read = std::make_shared<std::vector<unsigned char>>(start, start + from.extent(width, height));
        from.first = u64(read->data());
    }
    auto item = [=] {
        (void)read;
        for (u64 row = 0; row < height; ++row) {
            memmove(reinterpret_cast<void *>(to.first + row * to.pitch),
                    reinterpret_cast<const void *>(from.first + row * from.pitch), width);
        }
    };
    return wait || !to_known ? submit_and_wait(stream, item) : driver::submit(stream, item);
}

CUresult copy(void *stream, u64 to, Side target, u64 from, Side source, u64 bytes, bool wait) {
    return copy(stream, Rows{to, 0}, target, Rows{from, 0}, source, bytes, 1, wait);
}

template <class T>
CUresult fill(void *stream, u64 at, T value, u64 count, bool wait) {
    if (at % sizeof(T) || !driver::allocated(at, count * sizeof(T))) return CUDA_ERROR_INVALID_VALUE;
    auto item = [=] { std::fill_n(reinterpret_cast<T *>(at), count, value); };
    return wait ? submit_and_wait(stream, item) : driver::submit(stream, item);
}

CUresult allocate_in_order(u64 *at, u64 bytes, void *stream) {
    return driver::on_stream(stream, [&](driver::Stream &found) { return allocate(at, bytes, found.gpu); });
}

CUresult allocate_host(void **at, u64 bytes) {
    return driver::in_context([&](Gpu &own) {
        own.sync_if_strict();
        return allocate(reinterpret_cast<u64 *>(at), bytes, nullptr);
    });
}

}  // namespace

bool driver::allocated(CUdeviceptr at, u64 bytes) {
    auto [start, region] = regions().find(at);
    return start && at + bytes <= start + region.bytes;
}

bool driver::takes_words(CUdeviceptr at, u64 bytes) {
    auto region = regions().find(at).second;
    bool of_pool = region.gpu && region.kind == Kind::OWN && region.file < 0;
    return !of_pool && allocated(at, bytes);
}

API cuMemAlloc_v2(u64 *at, size_t bytes) {
    return driver::in_context([&](Gpu &own) {
        own.sync_if_strict();
        return allocate(at, bytes, &own, true);
    });
}

API cuMemFree_v2(u64 at) {
    if (!at) return CUDA_SUCCESS;
    return driver::in_context([&](Gpu &own) {
        own.sync_if_strict();
        return release(at, false);
    });
}

API cuMemAllocAsync(u64 *at, size_t bytes, void *stream) { return allocate_in_order(at, bytes, stream); }
API cuMemAllocFromPoolAsync(u64 *at, size_t bytes, void *, void *stream) {
    return allocate_in_order(at, bytes, stream);
}

API cuMemFreeAsync(u64 at, void *stream) {
    auto [start, region] = regions().find(at);
    if (start != at || !region.gpu || region.kind != Kind::OWN) return CUDA_ERROR_INVALID_VALUE;
    return driver::submit(stream, [at] { release(at, false); });
}

// What another process gets to know about some memory.
struct IpcHandle {
    u64 process, file, object, bytes, ordinal;
    u64 unused[3];
};
static_assert(sizeof(IpcHandle) == 64, "as in the driver");

// As in the driver, memory of a pool has no handle.
API cuIpcGetMemHandle(IpcHandle *handle, u64 at) {
    return driver::in_context([&](Gpu &) {
        auto [start, region] = regions().find(at);
        struct stat file;
        if (!start || region.file < 0 || fstat(region.file, &file)) return CUDA_ERROR_INVALID_VALUE;
        u64 ordinal = u64(region.gpu->ordinal);
        *handle = {u64(getpid()), u64(region.file), file.st_ino, region.bytes, ordinal, {}};
        return CUDA_SUCCESS;
    });
}

// The memory's GPU must be one that the current one can access. Opened once more, memory has the same address. With
// SHIM_IPC=0 the error is that of a process that the driver cannot find, in another container.
API cuIpcOpenMemHandle_v2(u64 *at, IpcHandle handle, unsigned flags) {
    constexpr unsigned LAZY_ENABLE_PEER_ACCESS = 1;
    if (flags != LAZY_ENABLE_PEER_ACCESS) return CUDA_ERROR_INVALID_VALUE;
    return driver::in_context([&](Gpu &own) {
        own.sync_if_strict();
        if (!driver::settings().ipc || handle.process == u64(getpid())) return CUDA_ERROR_INVALID_CONTEXT;
        Gpu *of = gpu(int(handle.ordinal));
        if (!of) return CUDA_ERROR_INVALID_DEVICE;
        if (of != &own && !driver::settings().peers) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
        std::lock_guard<std::mutex> guard(regions().mutex);
        for (auto &[start, region] : regions().all) {
            if (region.kind != Kind::OPENED || region.object != handle.object) continue;
            ++region.opened;
            *at = start;
            return CUDA_SUCCESS;
        }
        char name[64];
        snprintf(name, sizeof name, "/proc/%llu/fd/%llu", handle.process, handle.file);
        int file = open(name, O_RDWR | O_CLOEXEC);
        if (file < 0) return CUDA_ERROR_INVALID_VALUE;
        struct stat found;
        // The number may belong to another file by now.
        bool other = fstat(file, &found) || found.st_ino != handle.object;
        void *memory = other ? nullptr : map_with_guard(handle.bytes, file);
        close(file);
        if (!memory) return CUDA_ERROR_INVALID_VALUE;
        *at = u64(memory);
        regions().all[*at] = {handle.bytes, of, Kind::OPENED, -1, handle.object, 1};
        return CUDA_SUCCESS;
    });
}

API cuIpcCloseMemHandle(u64 at) {
    return driver::in_context([&](Gpu &own) {
        own.sync_if_strict();
        std::lock_guard<std::mutex> guard(regions().mutex);
        auto found = regions().all.find(at);
        if (found == regions().all.end() || found->second.kind != Kind::OPENED) return CUDA_ERROR_INVALID_VALUE;
        if (--found->second.opened == 0) {
            unmap(at, found->second);
            regions().all.erase(found);
        }
        return CUDA_SUCCESS;
    });
}

API cuMemAllocHost_v2(void **at, size_t bytes) { return allocate_host(at, bytes); }
API cuMemHostAlloc(void **at, size_t bytes, unsigned) { return allocate_host(at, bytes); }

API cuMemFreeHost(void *at) {
    return driver::in_context([&](Gpu &own) {
        own.sync_if_strict();
        return release(u64(at), true);
    });
}

API cuMemHostRegister_v2(void *at, size_t bytes, unsigned) {
    return driver::in_context([&](Gpu &) {
        regions().add(u64(at), {bytes, nullptr, Kind::REGISTERED, -1, 0, 0});
        return CUDA_SUCCESS;
    });
}
API cuMemHostUnregister(void *at) {
    return driver::in_context([&](Gpu &) { return release(u64(at), true); });
}

API cuMemHostGetDevicePointer_v2(u64 *device, void *at, unsigned) {
    *device = u64(at);
    return driver::allocated(u64(at), 1) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API cuMemGetAddressRange_v2(u64 *first, size_t *bytes, u64 at) {
    auto [start, region] = regions().find(at);
    if (!start) return CUDA_ERROR_NOT_FOUND;
    if (first) *first = start;
    if (bytes) *bytes = region.bytes;
    return CUDA_SUCCESS;
}

API cuPointerGetAttribute(void *value, int attribute, u64 at) {
    auto [start, region] = regions().find(at);
    if (!start) return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
        case 1: *static_cast<void **>(value) = region.gpu; return CUDA_SUCCESS;               // context
        case 2: *static_cast<u32 *>(value) = region.gpu ? 2 : 1; return CUDA_SUCCESS;         // device or host
        case 3: case 4: *static_cast<u64 *>(value) = at; return CUDA_SUCCESS;                 // its addresses
        case 8: *static_cast<u32 *>(value) = 0; return CUDA_SUCCESS;                          // not managed
        case 9: *static_cast<int *>(value) = region.gpu ? region.gpu->ordinal : 0; return CUDA_SUCCESS;
        case 11: *static_cast<u64 *>(value) = start; return CUDA_SUCCESS;
        case 12: *static_cast<u64 *>(value) = region.bytes; return CUDA_SUCCESS;
        default: return CUDA_ERROR_NOT_SUPPORTED;
    }
}

API cuPointerGetAttributes(unsigned count, const int *attributes, void **values, u64 at) {
    for (unsigned i = 0; i < count; ++i) {
        CUresult result = cuPointerGetAttribute(values[i], attributes[i], at);
        if (result != CUDA_SUCCESS) return result;
    }
    return CUDA_SUCCESS;
}

API cuMemcpyHtoD_v2(u64 to, const void *from, size_t bytes) {
    return copy(nullptr, to, Side::DEVICE, u64(from), Side::HOST, bytes, true);
}
API cuMemcpyDtoH_v2(void *to, u64 from, size_t bytes) {
    return copy(nullptr, u64(to), Side::HOST, from, Side::DEVICE, bytes, true);
}
API cuMemcpyDtoD_v2(u64 to, u64 from, size_t bytes) {
    return copy(nullptr, to, Side::DEVICE, from, Side::DEVICE, bytes, true);
}
API cuMemcpyHtoDAsync_v2(u64 to, const void *from, size_t bytes, void *stream) {
    return copy(stream, to, Side::DEVICE, u64(from), Side::HOST, bytes, false);
}
API cuMemcpyDtoHAsync_v2(void *to, u64 from, size_t bytes, void *stream) {
    return copy(stream, u64(to), Side::HOST, from, Side::DEVICE, bytes, false);
}
API cuMemcpyDtoDAsync_v2(u64 to, u64 from, size_t bytes, void *stream) {
    return copy(stream, to, Side::DEVICE, from, Side::DEVICE, bytes, false);
}
API cuMemcpyAsync(u64 to, u64 from, size_t bytes, void *stream) {
    return copy(stream, to, Side::EITHER, from, Side::EITHER, bytes, false);
}
API cuMemcpyPeerAsync(u64 to, void *, u64 from, void *, size_t bytes, void *stream) {
    return copy(stream, to, Side::DEVICE, from, Side::DEVICE, bytes, false);
}

struct Copy2D {
    struct End {
        size_t x, y;
        int type;
        u64 host, device;
        void *array;
        size_t pitch;
        Rows rows() const { return {(type == 1 ? host : device) + y * pitch + x, pitch}; }
        Side side() const { return type == 1 ? Side::HOST : type == 2 ? Side::DEVICE : Side::EITHER; }
    } source, target;
    size_t width, height;
};

API cuMemcpy2DAsync_v2(const Copy2D *what, void *stream) {
    if (what->source.type == 3 || what->target.type == 3) return CUDA_ERROR_NOT_SUPPORTED;
    return copy(stream, what->target.rows(), what->target.side(), what->source.rows(), what->source.side(), what->width,
                what->height, false);
}

// Whether this GPU has no memory left from now on.
EXPORTED void shimExhaust(int ordinal, int exhausted) {
    if (Gpu *found = gpu(ordinal)) found->exhausted = exhausted != 0;
}

// The bytes that copies have moved from GPUs to the host so far.
EXPORTED u64 shimDownloaded() {
    std::lock_guard<std::mutex> guard(driver::record().mutex);
    return driver::record().downloaded;
}

// And from the host to GPUs.
EXPORTED u64 shimUploaded() {
    std::lock_guard<std::mutex> guard(driver::record().mutex);
    return driver::record().uploaded;
}

API cuMemsetD8_v2(u64 at, unsigned char value, size_t count) { return fill(nullptr, at, value, count, true); }
API cuMemsetD32_v2(u64 at, unsigned value, size_t count) { return fill(nullptr, at, value, count, true); }
API cuMemsetD8Async(u64 at, unsigned char value, size_t count, void *stream) {
    return fill(stream, at, value, count, false);
}
API cuMemsetD32Async(u64 at, unsigned value, size_t count, void *stream) {
    return fill(stream, at, value, count, false);
}

// A GPU has one pool, which allocates like every other call.
API cuDeviceGetDefaultMemPool(void **pool, CUdevice device) {
    *pool = gpu(device);
    return gpu(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
API cuDeviceGetMemPool(void **pool, CUdevice device) { return cuDeviceGetDefaultMemPool(pool, device); }
API cuMemPoolSetAccess(void *, const void *, size_t) {
    return driver::settings().peers ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
}
API cuMemPoolTrimTo(void *, size_t) { return CUDA_SUCCESS; }

constexpr int RELEASE_THRESHOLD = 4;
API cuMemPoolSetAttribute(void *pool, int attribute, void *value) {
    if (attribute == RELEASE_THRESHOLD) static_cast<Gpu *>(pool)->release_threshold = *static_cast<u64 *>(value);
    return CUDA_SUCCESS;
}
API cuMemPoolGetAttribute(void *pool, int attribute, void *value) {
    if (attribute != RELEASE_THRESHOLD) return CUDA_ERROR_NOT_SUPPORTED;
    *static_cast<u64 *>(value) = static_cast<Gpu *>(pool)->release_threshold;
    return CUDA_SUCCESS;
}
