// Blocks of kernels that were compiled at run time. They do not wait for other blocks, so they run one after another.
//
// Where threads of a block wait for each other, each is a fibre, which runs until it waits. Else they are a loop. There
// are no random delays: with no other block running, they could show nothing.
//
// A fibre's first switch is setcontext's, all others are longjmp's, which makes no system call.
#undef _FORTIFY_SOURCE  // whose longjmp refuses to go to another stack
#include "blocks.hpp"

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

namespace driver {

namespace {

constexpr size_t STACK = 256 << 10, PAGE = 4096;
constexpr u32 WARP = 32;

[[noreturn]] void die(const char *why) {
    fprintf(stderr, "software driver: %s\n", why);
    abort();
}

// Threads that wait for each other: a block's, or a warp's.
struct Group {
    u32 alive = 0, arrived = 0;
    u64 generation = 0;

    void release_if_complete() {
        if (arrived < alive || arrived == 0) return;
        arrived = 0;
        ++generation;
    }
};

// What its lanes gave to this operation and to the one before: a lane may still read that when another one goes on.
struct Warp : Group {
    compiled::Lanes lanes[2];
};

struct Fibre {
    ucontext_t start;
    jmp_buf place;
    bool started = false, done = false;
    const Group *awaits = nullptr;
    u64 generation = 0;  // of what it waits for, when it began to

    bool can_run() const { return !done && (!awaits || awaits->generation != generation); }
};

// The blocks of one operating system thread, and their fibres, which are used again by later blocks.
struct Machine {
    compiled::Block block{};
    std::vector<std::unique_ptr<Fibre>> fibres;
    std::vector<Warp> warps;
    Group all;
    u32 present = 0;  // the thread that runs
    jmp_buf scheduler;
    const compiled::Entry *entry = nullptr;
    void *const *parameters = nullptr;
    std::vector<unsigned char> dynamic;
};

thread_local Machine machine;

// Neither of the following two may be inlined: its caller's variables would be lost in a jump.
__attribute__((noinline)) void resume(Fibre &fibre) {
    if (_setjmp(machine.scheduler)) return;
    if (fibre.started) _longjmp(fibre.place, 1);
    fibre.started = true;
    setcontext(&fibre.start);
}

__attribute__((noinline)) void leave(Fibre &fibre) {
    if (!_setjmp(fibre.place)) _longjmp(machine.scheduler, 1);
}

void wait_for(Group &group) {
    Fibre &self = *machine.fibres[machine.present];
    self.awaits = &group;
    self.generation = group.generation;
    ++group.arrived;
    group.release_if_complete();
    if (!self.can_run()) leave(self);
    self.awaits = nullptr;
}

void sync() { wait_for(machine.all); }

const compiled::Lanes *share(unsigned long long value) {
    Warp &warp = machine.warps[machine.present / WARP];
    compiled::Lanes &lanes = warp.lanes[warp.generation % 2];
    if (warp.arrived == 0) lanes.present = 0;
    lanes.values[machine.present % WARP] = value;
    lanes.present |= 1u << machine.present % WARP;
    wait_for(warp);
    return &lanes;
}

// Runs one thread after another, each in another block.
void fibre_main() {
    for (;;) {
        machine.entry->run(&machine.block, machine.parameters);
        Fibre &self = *machine.fibres[machine.present];
        self.done = true;
        for (Group *group : {&machine.all, static_cast<Group *>(&machine.warps[machine.present / WARP])}) {
            --group->alive;
            group->release_if_complete();
        }
        leave(self);
    }
}

void add_fibre() {
    auto fibre = std::make_unique<Fibre>();
    constexpr int HOW = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *memory = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, HOW, -1, 0);
    // An overflow ends the process.
    if (memory == MAP_FAILED || mprotect(memory, PAGE, PROT_NONE)) die("no memory for a stack");
    getcontext(&fibre->start);
    fibre->start.uc_stack.ss_sp = memory;
    fibre->start.uc_stack.ss_size = STACK;
    fibre->start.uc_link = nullptr;
    makecontext(&fibre->start, fibre_main, 0);
    machine.fibres.push_back(std::move(fibre));
}

compiled::Index thread_index(u32 number, compiled::Index size) {
    return {number % size.x, number / size.x % size.y, number / size.x / size.y};
}

void run_block_of_fibres(u32 threads) {
    while (machine.fibres.size() < threads) add_fibre();
    machine.warps.resize(std::max<size_t>(machine.warps.size(), (threads + WARP - 1) / WARP));
    machine.all.alive = threads;
    for (u32 first = 0; first < threads; first += WARP) {
        machine.warps[first / WARP].alive = std::min(threads - first, WARP);
    }
    for (u32 i = 0; i < threads; ++i) machine.fibres[i]->done = false;
    while (machine.all.alive) {
        bool ran = false;
        for (u32 i = 0; i < threads; ++i) {
            if (!machine.fibres[i]->can_run()) continue;
            ran = true;
            machine.present = i;
            machine.block.thread = thread_index(i, machine.block.size);
            resume(*machine.fibres[i]);
        }
        if (!ran) die("some threads of a block wait at a barrier, others at another one or in a warp's operation");
    }
}

}  // namespace

void run_blocks(const compiled::Entry &entry, const Shape &shape, void *const *parameters,
                const std::atomic<int> &killed) {
    constexpr size_t ALIGNMENT = 1024;
    constexpr unsigned char GARBAGE = 0xcb;
    const compiled::Index &grid = shape.grid, &size = shape.block;
    u32 threads = size.x * size.y * size.z;
    machine.dynamic.resize(std::max<size_t>(machine.dynamic.size(), shape.dynamic_shared + ALIGNMENT), GARBAGE);
    u64 dynamic = (u64(machine.dynamic.data()) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    machine.block = {{}, {}, size, grid, reinterpret_cast<void *>(dynamic), sync, share};
    machine.entry = &entry;
    machine.parameters = parameters;
    for (u64 number = 0; number < u64(grid.x) * grid.y * grid.z && !killed; ++number) {
        u32 rest = u32(number / grid.x);
        machine.block.block = {u32(number % grid.x), rest % grid.y, rest / grid.y};
        if (entry.waits) {
            run_block_of_fibres(threads);
            continue;
        }
        for (u32 i = 0; i < threads; ++i) {
            machine.block.thread = thread_index(i, size);
            entry.run(&machine.block, parameters);
        }
    }
}

}  // namespace driver
