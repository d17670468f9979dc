// The streams that operations are put on: those of the software driver (../driver/) where the process has it when it
// makes the communicator, else the addresses of two numbers of 64 bits: how much work was put there, and how much of
// that is done.
#pragma once

#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>

namespace nccl {

using Item = std::function<void()>;

struct Numbers {
    std::atomic<uint64_t> put, done;
};

// A GPU of the software driver, whose memory is the host's.
class Gpu {
  public:
    void* context = nullptr;  // null: the calling thread had none

    // The one that the calling thread has current; none in a process without the software driver.
    static std::optional<Gpu> current() {
        // Programs load the driver under several names. This one is in the library itself, and finds it under all.
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
                     find(gpu.launch, "cuLaunchHostFunc");
        char text[64] = {};
        if (!whole || name(text, sizeof text, 0) != 0 || strcmp(text, "Bonfire software GPU") != 0) return {};
        return get_current(&gpu.context) == 0 ? std::optional(gpu) : std::nullopt;
    }

    // Puts an item on a stream of this GPU, which is held up until the item has ended; false: it has none such. The
    // calling thread has this GPU's context current afterwards, in which alone the null stream is one.
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

  private:
    int (*set_current)(void*);
    int (*context_of)(void*, void**);
    int (*launch)(void*, void (*)(void*), void*);
};

}  // namespace nccl
