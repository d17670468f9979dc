// The streams of operations: those of the software driver (../driver/) if it is loaded when the communicator is made,
// else addresses of two 64-bit counters, of the work that was put there and of the work that is done.
#pragma once

#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>

namespace nccl {

using Item = std::function<void()>;

struct Counters {
    std::atomic<uint64_t> put, done;
};

// A GPU of the software driver. Its memory is the host's.
class Gpu {
  public:
    void* context = nullptr;  // null: no context was current

    // The GPU whose context is current on this thread. None in a process without the software driver.
    static std::optional<Gpu> current() {
        // Programs load the driver under several names. This one is its soname, which finds it under all of them.
        void* library = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_LAZY);
        if (!library) return {};
        auto find = [=](auto& function, const char* name) {
            function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
            return function != nullptr;
        };
        Gpu gpu;
        int (*name)(char*, int, int), (*get_current)(void**);
        bool whole = find(name, "cuDeviceGetName") && find(get_current, "cuCtxGetCurrent") &&
                     find(gpu.set_current, "cuCtxSetCurrent") && find(gpu.context_of, "cuStreamGetCtx") &&
                     find(gpu.launch, "cuLaunchHostFunc") && find(gpu.synchronize, "cuCtxSynchronize");
        char text[64] = {};
        if (!whole || name(text, sizeof text, 0) != 0 || strcmp(text, "Bonfire software GPU") != 0) return {};
        return get_current(&gpu.context) == 0 ? std::optional(gpu) : std::nullopt;
    }

    // Puts an item on a stream of this GPU, which blocks the stream until it has ended. Returns false if the stream is
    // of another GPU. Leaves this GPU's context current on the thread, as the null stream needs.
    bool put(void* stream, Item item) const {
        void* context_of_stream = nullptr;
        if (set_current(context) != 0 || context_of(stream, &context_of_stream) != 0) return false;
        if (context_of_stream != context) return false;
        auto* given = new Item(std::move(item));
        auto run = [](void* data) {
            auto* taken = static_cast<Item*>(data);
            (*taken)();
            delete taken;
        };
        if (launch(stream, run, given) == 0) return true;
        delete given;
        return false;
    }

    // Waits for all work on this GPU.
    void wait() const {
        if (set_current(context) == 0) synchronize();
    }

  private:
    int (*set_current)(void*);
    int (*synchronize)();
    int (*context_of)(void*, void**);
    int (*launch)(void*, void (*)(void*), void*);
};

}  // namespace nccl
