// Modules, functions and launches. A module's image comes from this driver's NVRTC: the text of a program of Bonfire,
// whose kernels are part of this library, or the name of a library that contains the kernels.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>

#include "../../signal.cuh"
#include "../device.hpp"
#include "blocks.hpp"
#include "entries.hpp"
#include "gpu.hpp"

using driver::HostKernel;
using driver::Gpu;

namespace {

struct Module {
    Gpu *gpu;
    void *library;  // null if it is one of Bonfire's
};
driver::Handles<Module> &modules() { return driver::global<driver::Handles<Module>>(); }

struct Function {
    Module *module;
    Gpu *gpu;
    std::string name;
    // One of Bonfire's, or else one that was compiled at run time.
    const HostKernel *own;
    const compiled::Entry *other;
    bool launched;

    std::vector<u32> sizes() const {
        return own ? own->sizes : std::vector<u32>(other->sizes, other->sizes + other->parameters);
    }
    u32 most_threads() const { return own ? MAX_THREADS : 1024; }
};
driver::Handles<Function> &functions() { return driver::global<driver::Handles<Function>>(); }

constexpr u32 MULTIPROCESSORS = 4;
constexpr char LIBRARY[] = "library ";  // before the name of a library in an image
constexpr u32 MOST_SHARED_MEMORY = 227 << 10;

u32 blocks_of_multiprocessor(u32 threads) { return std::clamp(2 * MAX_THREADS / std::max(threads, 1u), 1u, 32u); }

// A copy of the parameters at the time of the launch.
struct Parameters {
    std::vector<std::vector<unsigned char>> bytes;
    std::vector<void *> at;
    Parameters(const std::vector<u32> &sizes, void **given) {
        for (size_t i = 0; i < sizes.size(); ++i) {
            auto *first = static_cast<const unsigned char *>(given[i]);
            bytes.emplace_back(first, first + sizes[i]);
        }
        for (auto &one : bytes) at.push_back(one.data());
    }
};

CUresult refuse(const Function &function, const char *why, CUresult result) {
    fprintf(stderr, "software driver: kernel %s: %s\n", function.name.c_str(), why);
    return result;
}

// Whether the launch of this kernel is the one that faults. Called with the lock held.
bool faults(Gpu &gpu, const std::string &name) {
    const driver::Settings &settings = driver::settings();
    if (!settings.fault_launch || gpu.ordinal != settings.fault_gpu || !name.starts_with(settings.fault_kernel)) {
        return false;
    }
    return ++gpu.fault_launches == settings.fault_launch;
}

// Returns the item that runs one of Bonfire's kernels, with all its blocks at once.
std::function<void()> run_own(const Function &function, const driver::Shape &shape,
                              std::shared_ptr<Parameters> parameters) {
    shim::Index grid = {shape.grid.x, shape.grid.y, 1};
    u32 threads = shape.block.x;
    u32 rows = std::max(MULTIPROCESSORS * blocks_of_multiprocessor(threads) / grid.x, 1u);
    return [=, kernel = function.own, gpu = function.gpu] {
        shim::run({{{grid, threads, [=] { kernel->run(parameters->at.data()); }, &gpu->fault}}}, rows);
    };
}

std::function<void()> run_other(const Function &function, const driver::Shape &shape,
                                std::shared_ptr<Parameters> parameters) {
    return [=, entry = function.other, gpu = function.gpu] {
        driver::run_blocks(*entry, shape, parameters->at.data(), gpu->fault);
    };
}

CUresult launch(Function &function, const driver::Shape &shape, void *stream, void **given) {
    return driver::on_stream(stream, [&](driver::Stream &found) {
        const compiled::Index &grid = shape.grid, &block = shape.block;
        if (found.gpu != function.gpu) return CUDA_ERROR_INVALID_HANDLE;
        // Stricter than a driver may be: the context of the stream must be current.
        if (driver::current() != found.gpu) return CUDA_ERROR_INVALID_CONTEXT;
        bool empty = !grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z;
        if (empty || !given || shape.dynamic_shared > MOST_SHARED_MEMORY) return CUDA_ERROR_INVALID_VALUE;
        if (function.own && (grid.z != 1 || block.y != 1 || block.z != 1)) {
            return refuse(function, "grids of (x, y, 1) and blocks of (x, 1, 1) only", CUDA_ERROR_NOT_SUPPORTED);
        }
        if (u64(block.x) * block.y * block.z > function.most_threads()) return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
        // Modules are loaded lazily, at the first launch.
        if (!std::exchange(function.launched, true)) found.gpu->sync_if_strict();
        Gpu *gpu = found.gpu;
        {
            std::lock_guard<std::mutex> guard(driver::record().mutex);
            driver::Record::Kernel &kernel = driver::record().kernels[function.name];
            ++kernel.launches;
            kernel.least_priority = std::max(kernel.least_priority, found.priority);
            kernel.blocks = u64(grid.x) * grid.y * grid.z;
        }
        if (faults(*gpu, function.name)) {
            gpu->submit(found, [gpu] { gpu->fault = CUDA_ERROR_ILLEGAL_ADDRESS; });
            return CUDA_SUCCESS;
        }
        auto parameters = std::make_shared<Parameters>(function.sizes(), given);
        auto run = (function.own ? run_own : run_other)(function, shape, parameters);
        gpu->submit(found, [run, name = function.name] {
            driver::held().wait(name);
            run();
        });
        return CUDA_SUCCESS;
    });
}

}  // namespace

API cuModuleLoadData(void **module, const void *image) {
    return driver::in_context([&](Gpu &own) {
        own.sync_if_strict();
        std::string text = static_cast<const char *>(image);
        void *library = nullptr;
        if (text.starts_with(LIBRARY)) {
            library = dlopen(text.c_str() + strlen(LIBRARY), RTLD_NOW | RTLD_LOCAL);
            if (!library) {
                fprintf(stderr, "software driver: %s\n", dlerror());
                return CUDA_ERROR_INVALID_IMAGE;
            }
        }
        *module = modules().add({&own, library});
        return CUDA_SUCCESS;
    });
}
API cuModuleLoadDataEx(void **module, const void *image, unsigned, int *, void **) {
    return cuModuleLoadData(module, image);
}

API cuModuleUnload(void *module) {
    return driver::in_context([&](Gpu &own) {
        own.sync_if_strict();
        return modules().remove(module) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
    });
}

API cuModuleGetFunction(void **function, void *handle, const char *name) {
    Module *module = modules().find(handle);
    if (!module) return CUDA_ERROR_INVALID_HANDLE;
    const HostKernel *own = module->library ? nullptr : driver::find_kernel(name);
    void *other = module->library ? dlsym(module->library, ("shim_entry_" + std::string(name)).c_str()) : nullptr;
    if (!own && !other) return CUDA_ERROR_NOT_FOUND;
    *function = functions().add({module, module->gpu, name, own, static_cast<const compiled::Entry *>(other), false});
    return CUDA_SUCCESS;
}

API cuFuncGetModule(void **module, void *handle) {
    Function *function = functions().find(handle);
    if (!function) return CUDA_ERROR_INVALID_HANDLE;
    *module = function->module;
    return CUDA_SUCCESS;
}

API cuFuncSetCacheConfig(void *function, int) {
    return functions().find(function) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
API cuFuncSetAttribute(void *function, int, int) {
    return functions().find(function) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

API cuFuncGetAttribute(int *value, int attribute, void *function) {
    Function *found = functions().find(function);
    if (!found) return CUDA_ERROR_INVALID_HANDLE;
    switch (attribute) {
        case 0: *value = int(found->most_threads()); return CUDA_SUCCESS;  // of a block
        case 4: *value = 64; return CUDA_SUCCESS;                 // registers
        case 5: case 6: *value = int(driver::settings().architecture); return CUDA_SUCCESS;  // compiled for
        default: *value = 0; return CUDA_SUCCESS;
    }
}

API cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads, size_t) {
    Function *found = functions().find(function);
    if (!found) return CUDA_ERROR_INVALID_HANDLE;
    if (threads < 1) return CUDA_ERROR_INVALID_VALUE;
    *blocks = u32(threads) > found->most_threads() ? 0 : int(blocks_of_multiprocessor(u32(threads)));
    return CUDA_SUCCESS;
}
API cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, void *function, int threads, size_t bytes,
                                                         unsigned) {
    return cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, bytes);
}

// The number of launches of this kernel so far.
EXPORTED u64 shimLaunches(const char *kernel) {
    std::lock_guard<std::mutex> guard(driver::record().mutex);
    return driver::record().kernels[kernel].launches;
}

// The blocks of its last launch, in all of its grid.
EXPORTED u64 shimBlocks(const char *kernel) {
    std::lock_guard<std::mutex> guard(driver::record().mutex);
    return driver::record().kernels[kernel].blocks;
}

// From now on launches of this kernel do not run, and those of the kernel held before do. None has an empty name.
EXPORTED void shimHold(const char *kernel) {
    {
        std::lock_guard<std::mutex> guard(driver::held().mutex);
        driver::held().kernel = kernel;
    }
    driver::held().released.notify_all();
}

// The priority of the least urgent stream on which this kernel was launched so far.
EXPORTED int shimLeastPriority(const char *kernel) {
    std::lock_guard<std::mutex> guard(driver::record().mutex);
    return driver::record().kernels[kernel].least_priority;
}

API cuLaunchKernel(void *handle, unsigned x, unsigned y, unsigned z, unsigned block_x, unsigned block_y,
                   unsigned block_z, unsigned shared, void *stream, void **parameters, void **) {
    Function *function = functions().find(handle);
    if (!function) return CUDA_ERROR_INVALID_HANDLE;
    return launch(*function, {{x, y, z}, {block_x, block_y, block_z}, shared}, stream, parameters);
}

struct LaunchConfig {
    unsigned x, y, z, block_x, block_y, block_z, shared;
    void *stream, *attributes;
    unsigned attribute_count;
};

API cuLaunchKernelEx(const LaunchConfig *how, void *handle, void **parameters, void **) {
    Function *function = functions().find(handle);
    if (!function) return CUDA_ERROR_INVALID_HANDLE;
    if (how->attribute_count) return refuse(*function, "launch attributes", CUDA_ERROR_NOT_SUPPORTED);
    compiled::Index grid = {how->x, how->y, how->z}, block = {how->block_x, how->block_y, how->block_z};
    return launch(*function, {grid, block, how->shared}, how->stream, parameters);
}
