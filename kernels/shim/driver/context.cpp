// Initialisation, devices, and their contexts. A device has only its primary context.
#include <cstdio>
#include <cstring>

#include "gpu.hpp"

using driver::current;
using driver::Gpu;
using driver::gpu;
using driver::settings;

namespace {

constexpr u64 MEMORY = 8ull << 30;

// The contexts that cuCtxPushCurrent has saved on this thread.
thread_local std::vector<Gpu *> context_stack;

// Returns the GPU of a context handle, or null.
Gpu *context(void *handle) {
    for (int i = 0; gpu(i); ++i) {
        if (gpu(i) == handle) return gpu(i);
    }
    return nullptr;
}

int attribute(int number) {
    switch (number) {
        case 1: return 1024;                       // threads of a block
        case 2: case 3: return 1024;               // and along x and y
        case 4: return 64;                         // and z
        case 5: return 0x7fffffff;                 // blocks along x
        case 6: case 7: return 65535;              // and y, z
        case 8: return 48 << 10;                   // shared memory of a block
        case 9: return 64 << 10;                   // constant memory
        case 10: return 32;                        // threads of a warp
        case 11: return 0x7fffffff;                // pitch
        case 12: case 82: return 64 << 10;         // registers of a block, of a multiprocessor
        case 13: case 36: return 1000000;          // clocks
        case 14: case 51: return 512;              // alignment of textures
        case 15: case 19: case 31: case 41: return 1;  // overlap, mapped host memory, concurrency, one address space
        case 16: return 4;                         // multiprocessors
        case 33: return 1;                         // PCI bus
        case 37: return 4096;                      // bits to memory
        case 38: return 32 << 20;                  // L2 cache
        case 39: return 2048;                      // threads of a multiprocessor
        case 40: return 2;                         // copy engines
        case 75: return int(settings().architecture / 10);  // compute capability
        case 76: return int(settings().architecture % 10);
        case 81: case 97: return 227 << 10;        // shared memory of a multiprocessor, of a block that asks for it
        case 78: case 86: case 91: case 99: return 1;  // priorities, atomics on host memory, registered host memory
        case 92: case 93: case 94: case 121: case 122: case 123: return 1;  // values that streams wait for and write
        case 95: return 1;                         // cooperative launches
        case 106: return 32;                       // blocks of a multiprocessor
        case 115: return 1;                        // memory pools
        default: return 0;
    }
}

}  // namespace

API cuInit(unsigned flags) { return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }

API cuDriverGetVersion(int *version) {
    *version = settings().version;
    return CUDA_SUCCESS;
}

API cuGetErrorName(int code, const char **name) {
    switch (code) {
#define NAME_RESULT(name_, code_) \
    case code_: *name = "CUDA_" #name_; return CUDA_SUCCESS;
        RESULTS(NAME_RESULT)
        default: *name = nullptr; return CUDA_ERROR_INVALID_VALUE;
    }
}

API cuGetErrorString(int code, const char **text) { return cuGetErrorName(code, text); }

API cuDeviceGetCount(int *count) {
    *count = int(settings().gpus);
    return CUDA_SUCCESS;
}

API cuDeviceGet(CUdevice *device, int ordinal) {
    if (!gpu(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

API cuDeviceGetName(char *name, int length, CUdevice device) {
    if (!gpu(device)) return CUDA_ERROR_INVALID_DEVICE;
    snprintf(name, size_t(length), "Bonfire software GPU");
    return CUDA_SUCCESS;
}

API cuDeviceGetUuid_v2(unsigned char *uuid, CUdevice device) {
    if (!gpu(device)) return CUDA_ERROR_INVALID_DEVICE;
    memset(uuid, 0xb0, 16);
    uuid[15] = static_cast<unsigned char>(device);
    return CUDA_SUCCESS;
}
API cuDeviceGetUuid(unsigned char *uuid, CUdevice device) { return cuDeviceGetUuid_v2(uuid, device); }

API cuDeviceGetPCIBusId(char *id, int length, CUdevice device) {
    if (!gpu(device)) return CUDA_ERROR_INVALID_DEVICE;
    snprintf(id, size_t(length), "0000:%02x:00.0", unsigned(device) + 1);
    return CUDA_SUCCESS;
}

API cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    if (!gpu(device)) return CUDA_ERROR_INVALID_DEVICE;
    *bytes = MEMORY;
    return CUDA_SUCCESS;
}

API cuMemGetInfo_v2(size_t *free, size_t *total) {
    *free = *total = MEMORY;
    return current() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

API cuDeviceGetAttribute(int *value, int number, CUdevice device) {
    if (!gpu(device)) return CUDA_ERROR_INVALID_DEVICE;
    *value = number == 33 ? device + 1 : attribute(number);
    return CUDA_SUCCESS;
}

API cuDevicePrimaryCtxRetain(void **handle, CUdevice device) {
    Gpu *own = gpu(device);
    if (!own) return CUDA_ERROR_INVALID_DEVICE;
    std::lock_guard<std::mutex> guard(own->lock);
    ++own->retained;
    *handle = own;
    return CUDA_SUCCESS;
}

API cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    Gpu *own = gpu(device);
    if (!own) return CUDA_ERROR_INVALID_DEVICE;
    std::lock_guard<std::mutex> guard(own->lock);
    if (!own->retained) return CUDA_ERROR_INVALID_CONTEXT;
    --own->retained;
    return CUDA_SUCCESS;
}

API cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    Gpu *own = gpu(device);
    if (!own) return CUDA_ERROR_INVALID_DEVICE;
    std::lock_guard<std::mutex> guard(own->lock);
    *flags = 0;
    *active = own->retained > 0;
    return CUDA_SUCCESS;
}

API cuCtxSetCurrent(void *handle) {
    if (handle && !context(handle)) return CUDA_ERROR_INVALID_CONTEXT;
    driver::set_current(context(handle));
    return CUDA_SUCCESS;
}

API cuCtxGetCurrent(void **handle) {
    *handle = current();
    return CUDA_SUCCESS;
}

API cuCtxPushCurrent_v2(void *handle) {
    if (!context(handle)) return CUDA_ERROR_INVALID_CONTEXT;
    context_stack.push_back(current());
    driver::set_current(context(handle));
    return CUDA_SUCCESS;
}

API cuCtxPopCurrent_v2(void **handle) {
    if (!current()) return CUDA_ERROR_INVALID_CONTEXT;
    if (handle) *handle = current();
    driver::set_current(context_stack.empty() ? nullptr : context_stack.back());
    if (!context_stack.empty()) context_stack.pop_back();
    return CUDA_SUCCESS;
}

API cuCtxGetDevice(CUdevice *device) {
    if (!current()) return CUDA_ERROR_INVALID_CONTEXT;
    *device = current()->ordinal;
    return CUDA_SUCCESS;
}

API cuCtxSetFlags(unsigned) { return current() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT; }

API cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    *least = LEAST_PRIORITY;
    *greatest = GREATEST_PRIORITY;
    return current() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

// Waits without the lock, so other threads can call meanwhile, as in every wait for a stream.
API cuCtxSynchronize() {
    std::vector<driver::CompletionPtr> all;
    CUresult result = driver::in_context([&](Gpu &own) {
        for (auto &queue : own.queues) all.push_back(queue->last());
        return CUDA_SUCCESS;
    });
    for (driver::CompletionPtr &completion : all) completion->wait();
    return result == CUDA_SUCCESS ? driver::in_context([](Gpu &) { return CUDA_SUCCESS; }) : result;
}

API cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    if (!gpu(device) || !gpu(peer)) return CUDA_ERROR_INVALID_DEVICE;
    *can = settings().peers && device != peer;
    return CUDA_SUCCESS;
}

API cuDeviceGetP2PAttribute(int *value, int attribute, CUdevice device, CUdevice peer) {
    enum { PERFORMANCE_RANK = 1, NATIVE_ATOMICS = 3 };
    CUresult result = cuDeviceCanAccessPeer(value, device, peer);
    if (attribute == NATIVE_ATOMICS) *value = *value && settings().nvlink;
    if (attribute == PERFORMANCE_RANK) *value = settings().nvlink ? 0 : 1;
    return result;
}

API cuCtxEnablePeerAccess(void *handle, unsigned flags) {
    Gpu *peer = context(handle);
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    return driver::in_context([&](Gpu &own) {
        if (!peer) return CUDA_ERROR_INVALID_CONTEXT;
        if (!settings().peers || peer == &own) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
        return own.peers.insert(peer).second ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
    });
}

API cuCtxDisablePeerAccess(void *handle) {
    Gpu *peer = context(handle);
    return driver::in_context([&](Gpu &own) {
        return own.peers.erase(peer) ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
    });
}
