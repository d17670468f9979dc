#include "device.hpp"

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#elif defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace shim {
namespace {

// Data shared by fibres is atomic and relaxed, so that it is neither reported as a race nor hides one.
template <class T>
struct Relaxed {
    std::atomic<T> value{};
    operator T() const { return value.load(std::memory_order_relaxed); }
    void operator=(T next) { value.store(next, std::memory_order_relaxed); }
};

[[noreturn]] void die(const char *why) {
    fprintf(stderr, "shim: %s\n", why);
    abort();
}

constexpr size_t STACK = 64 << 10;

enum class State { RUNS, WAITS, DONE };

// An execution context, with what a switch back to it needs.
struct Context {
    ucontext_t place;
#if defined(__SANITIZE_THREAD__)
    void *sanitizer = nullptr;
#elif defined(__SANITIZE_ADDRESS__)
    void *fake_stack = nullptr;
    const void *stack = nullptr;
    size_t size = 0;
#endif
};

struct Fibre : Context {
    char *memory;
    Index index{};
    u64 random = 1;
    Relaxed<State> state;
    Relaxed<u64> generation;  // of the barrier, while it waits there
};

struct Block {
    Context worker;
    std::vector<std::unique_ptr<Fibre>> fibres;
    Index index{}, size{}, grid{};
    const std::function<void()> *run = nullptr;
    const std::atomic<int> *killed = nullptr;
    Relaxed<Fibre *> present;
    // The barrier. Two of its rounds may be in progress: some threads leave one while others arrive at the next.
    Relaxed<u64> generation;
    Relaxed<u32> arrived;
    Relaxed<bool> yes, answer[2];
    char order[2];
};

thread_local Block block;

std::atomic<u64> seed{0};

// Unwinds a thread of a kernel that was killed.
struct Killed {};

bool killed() { return block.killed && block.killed->load(std::memory_order_relaxed); }

u64 next_random(u64 &state) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

// Switches contexts. `orders` is whether the switch orders earlier work on one side before later work on the other, as
// the beginning and the end of a kernel do.
void switch_context(Context &from, Context &to, bool orders, bool for_good) {
#if defined(__SANITIZE_THREAD__)
    (void)for_good;
    __tsan_switch_to_fiber(to.sanitizer, orders ? 0 : __tsan_switch_to_fiber_no_sync);
    swapcontext(&from.place, &to.place);
#elif defined(__SANITIZE_ADDRESS__)
    (void)orders;
    __sanitizer_start_switch_fiber(for_good ? nullptr : &from.fake_stack, to.stack, to.size);
    swapcontext(&from.place, &to.place);
    __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#else
    (void)orders;
    (void)for_good;
    swapcontext(&from.place, &to.place);
#endif
}

void fibre_main() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &block.worker.stack, &block.worker.size);
#endif
    Fibre &self = *block.present;
    try {
        (*block.run)();
    } catch (const Killed &) {
    }
    self.state = State::DONE;
    switch_context(self, block.worker, true, true);
    die("a thread ran on after its end");
}

void yield(Fibre &self) { switch_context(self, block.worker, false, false); }

Fibre &make_fibre() {
    auto fibre = std::make_unique<Fibre>();
    void *memory = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) die("no memory for a stack");
    fibre->memory = static_cast<char *>(memory);
#if defined(__SANITIZE_THREAD__)
    fibre->sanitizer = __tsan_create_fiber(0);
#elif defined(__SANITIZE_ADDRESS__)
    fibre->stack = memory;
    fibre->size = STACK;
#endif
    block.fibres.push_back(std::move(fibre));
    return *block.fibres.back();
}

void run_block(u32 number, const Launch &launch, u64 salt) {
    block.index = {number % launch.grid.x, number / launch.grid.x, 0};
    block.size = {launch.threads, 1, 1};
    block.grid = launch.grid;
    block.run = &launch.run;
    block.killed = launch.killed;
    block.generation = block.generation + 1;
    block.arrived = 0;
    block.yes = true;
    while (block.fibres.size() < launch.threads) make_fibre();
    for (u32 i = 0; i < launch.threads; ++i) {
        Fibre &fibre = *block.fibres[i];
        fibre.index = {i, 0, 0};
        fibre.random = (salt * 0x9e3779b97f4a7c15 + number * 0x632be59bd9b4e019ull + i * 0x9e6c63d0876a9a47ull) | 1;
        fibre.state = State::RUNS;
        getcontext(&fibre.place);
        fibre.place.uc_stack.ss_sp = fibre.memory;
        fibre.place.uc_stack.ss_size = STACK;
        fibre.place.uc_link = nullptr;
        makecontext(&fibre.place, fibre_main, 0);
    }
    bool first = true;
    for (u32 left = launch.threads; left > 0; first = false) {
        u32 ran = 0;
        for (u32 i = 0; i < launch.threads; ++i) {
            Fibre &fibre = *block.fibres[i];
            if (fibre.state == State::DONE) continue;
            if (fibre.state == State::WAITS && fibre.generation == block.generation && !killed()) continue;
            block.present = &fibre;
            switch_context(block.worker, fibre, first, false);
            left -= fibre.state == State::DONE;
            ++ran;
        }
        if (ran == 0) die("some threads of a block wait at a barrier that the others have left");
        if (left > 0) sched_yield();
    }
}

}  // namespace

const Index &thread_index() { return static_cast<Fibre *>(block.present)->index; }
const Index &block_index() { return block.index; }
const Index &block_size() { return block.size; }
const Index &grid_size() { return block.grid; }

bool barrier(bool yes) {
    Fibre &self = *block.present;
    u64 generation = block.generation;
    char *order = &block.order[generation % 2];
#if defined(__SANITIZE_THREAD__)
    __tsan_release(order);
#endif
    if (!yes) block.yes = false;
    block.arrived = block.arrived + 1;
    if (block.arrived == block.size.x) {
        block.answer[generation % 2] = bool(block.yes);
        block.yes = true;
        block.arrived = 0;
        block.generation = generation + 1;
    } else {
        self.generation = generation;
        self.state = State::WAITS;
        while (block.generation == generation) {
            yield(self);
            if (killed()) throw Killed();
        }
        self.state = State::RUNS;
    }
#if defined(__SANITIZE_THREAD__)
    __tsan_acquire(order);
#else
    (void)order;
#endif
    return block.answer[generation % 2];
}

void delay() {
    if (seed.load(std::memory_order_relaxed) == 0) return;
    Fibre &self = *block.present;
    u64 random = next_random(self.random);
    if (random % 16 == 0) yield(self);
    else if (random % 16 == 1) sched_yield();
    else if (random % 1024 == 2) usleep(random >> 40 & 255);
}

void poll() {
    delay();
    yield(*block.present);
    if (killed()) throw Killed();
}

void set_delays(u64 value) { seed.store(value, std::memory_order_relaxed); }

void run(const std::vector<std::vector<Launch>> &streams, u32 rows) {
    struct Stream {
        pthread_barrier_t between;
        u32 workers = 1;
        std::vector<Relaxed<u32>> started;  // blocks of each launch
    };
    auto concurrent_blocks = [rows](const Launch &launch) { return launch.grid.x * std::min(launch.grid.y, rows); };
    std::vector<Stream> all(streams.size());
    std::vector<std::thread> threads;
    for (size_t s = 0; s < streams.size(); ++s) {
        all[s].started = std::vector<Relaxed<u32>>(streams[s].size());
        for (const Launch &launch : streams[s]) all[s].workers = std::max(all[s].workers, concurrent_blocks(launch));
        pthread_barrier_init(&all[s].between, nullptr, all[s].workers);
    }
    for (size_t s = 0; s < streams.size(); ++s) {
        for (u32 worker = 0; worker < all[s].workers; ++worker) {
            threads.emplace_back([&, s, worker] {
#if defined(__SANITIZE_THREAD__)
                block.worker.sanitizer = __tsan_get_current_fiber();
#endif
                for (size_t l = 0; l < streams[s].size(); ++l) {
                    const Launch &launch = streams[s][l];
                    u32 blocks = launch.grid.x * launch.grid.y;
                    u64 salt = seed.load(std::memory_order_relaxed) + s + l;
                    auto next = [&] { return all[s].started[l].value.fetch_add(1, std::memory_order_relaxed); };
                    if (blocks == 0 && worker == 0) launch.run();
                    else if (worker < concurrent_blocks(launch)) {
                        for (u32 number = next(); number < blocks; number = next()) run_block(number, launch, salt);
                    }
                    pthread_barrier_wait(&all[s].between);
                }
                for (auto &fibre : block.fibres) {
                    munmap(fibre->memory, STACK);
#if defined(__SANITIZE_THREAD__)
                    __tsan_destroy_fiber(fibre->sanitizer);
#endif
                }
                block.fibres.clear();
            });
        }
    }
    for (std::thread &thread : threads) thread.join();
    for (Stream &stream : all) pthread_barrier_destroy(&stream.between);
}

}  // namespace shim

u64 ptx::nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return u64(now.tv_sec) * 1000000000 + u64(now.tv_nsec);
}
