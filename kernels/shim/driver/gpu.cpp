#include "gpu.hpp"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "../device.hpp"

namespace driver {

namespace {

u64 setting(const char *name, u64 otherwise) {
    const char *value = getenv(name);
    return value && *value ? strtoull(value, nullptr, 10) : otherwise;
}

thread_local Gpu *current_gpu = nullptr;

u64 next_random(u64 &state) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

}  // namespace

const Settings &settings() {
    static const Settings *all = [] {
        auto *made = new Settings{
            u32(setting("SHIM_GPUS", 1)), std::max(u32(setting("SHIM_QUEUES", 32)), 1u), setting("SHIM_PEERS", 1) != 0,
            setting("SHIM_NVLINK", 1) != 0, setting("SHIM_STRICT", 0) != 0, setting("SHIM_IPC", 1) != 0,
            setting("SHIM_DELAYS", 1), u32(setting("SHIM_ARCHITECTURE", 70)), int(setting("SHIM_VERSION", 13000)),
            0, "", 0,
        };
        if (const char *fault = getenv("SHIM_FAULT")) {
            char kernel[64];
            unsigned long launch;
            if (sscanf(fault, "%d:%63[^:]:%lu", &made->fault_gpu, kernel, &launch) == 3) {
                made->fault_kernel = kernel;
                made->fault_launch = launch;
            }
        }
        shim::set_delays(made->delays);
        return made;
    }();
    return *all;
}

Returned::Returned(CUresult code, const char *function) : code(code) {
    std::lock_guard<std::mutex> guard(record().mutex);
    ++record().calls[function];
}

void Completion::finish() {
    when = ptx::nanoseconds();
    done = true;
    done.notify_all();
}

Queue::Queue(u64 seed) : newest(std::make_shared<Completion>()), random(seed * 0x9e3779b97f4a7c15 | 1) {
    newest->finish();
    std::thread([this] { work(); }).detach();
}

CompletionPtr Queue::submit(std::function<void()> item) {
    std::lock_guard<std::mutex> guard(mutex);
    newest = std::make_shared<Completion>();
    items.emplace_back(std::move(item), newest);
    more.notify_one();
    return newest;
}

CompletionPtr Queue::last() {
    std::lock_guard<std::mutex> guard(mutex);
    return newest;
}

void Queue::work() {
    for (;;) {
        std::unique_lock<std::mutex> guard(mutex);
        more.wait(guard, [this] { return !items.empty(); });
        auto [item, completion] = std::move(items.front());
        items.pop_front();
        guard.unlock();
        if (settings().delays) {
            // Mostly none, often a short one, rarely one that is longer than anything the host does meanwhile.
            u64 chance = next_random(random) >> 32;
            if (chance % 64 == 0) usleep(2000);
            else if (chance % 4 == 1) usleep(chance >> 8 & 127);
        }
        item();
        completion->finish();
    }
}

Stream Gpu::make_stream(unsigned flags, int priority) {
    u32 number = streams++ % settings().queues;
    if (number == queues.size()) {
        queues.push_back(std::make_unique<Queue>(settings().delays + u64(ordinal) * 1000 + number));
    }
    Queue *queue = queues[number].get();
    CompletionPtr done = std::make_shared<Completion>();
    done->finish();
    return {this, queue, flags, priority, done};
}

CompletionPtr Gpu::submit(Stream &stream, std::function<void()> item) {
    stream.last = stream.queue->submit([this, item = std::move(item)] {
        if (fault == CUDA_SUCCESS) item();
    });
    return stream.last;
}

void Gpu::wait_for_all() {
    for (auto &queue : queues) queue->last()->wait();
}

void Gpu::sync_if_strict() {
    if (settings().strict) wait_for_all();
}

Gpu *gpu(int ordinal) {
    static const std::vector<Gpu *> *all = [] {
        auto *made = new std::vector<Gpu *>;
        for (u32 i = 0; i < settings().gpus; ++i) {
            auto *gpu = new Gpu;
            gpu->ordinal = int(i);
            gpu->null_stream = gpu->make_stream(0, LEAST_PRIORITY);
            made->push_back(gpu);
        }
        return made;
    }();
    return ordinal >= 0 && size_t(ordinal) < all->size() ? (*all)[size_t(ordinal)] : nullptr;
}

void set_current(Gpu *gpu) { current_gpu = gpu; }
Gpu *current() { return current_gpu; }

// Handles 0, 1 and 2 are the null stream: the default, legacy and per-thread ones.
Stream *find_stream(void *handle) {
    if (u64(handle) > 2) return streams().find(handle);
    return current() ? &current()->null_stream : nullptr;
}

CUresult no_stream(void *handle) { return u64(handle) > 2 ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_CONTEXT; }

}  // namespace driver

// Writes the number of calls of each function of the driver so far, as lines of a name and a number, if there is room.
// Returns the length of the text.
EXPORTED u64 shimCalls(char *text, u64 room) {
    std::string lines;
    {
        std::lock_guard<std::mutex> guard(driver::record().mutex);
        for (auto &[name, calls] : driver::record().calls) lines += name + " " + std::to_string(calls) + "\n";
    }
    if (lines.size() < room) memcpy(text, lines.c_str(), lines.size() + 1);
    return lines.size();
}
