// GPUs in software: each stream runs its kernels in order, several streams run concurrently.
#pragma once

#include <functional>
#include <vector>

#include "cuda.hpp"

namespace shim {

// One item of a stream: a kernel, given as the function of each of its threads, or with an empty grid a function that
// one thread runs alone, such as filling a buffer.
struct Launch {
    Index grid;  // (x, y, 1)
    u32 threads;
    std::function<void()> run;
    // Once it is not zero, the kernel's threads end where they wait: at a poll or a barrier. Null: never.
    const std::atomic<int> *killed = nullptr;
};

// Runs all streams concurrently until they are done. As on a GPU, the launches of one stream run in order, and only the
// kernels themselves order those of different streams. Blocks start in the order of their numbers, x first. No more
// blocks run at a time than `rows` of the grid have.
void run(const std::vector<std::vector<Launch>> &streams, u32 rows = ~0u);

// Enables random delays in synchronisation, with this seed. 0 disables them.
void set_delays(u64 seed);

}  // namespace shim
