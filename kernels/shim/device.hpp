// GPUs without a GPU: streams run kernels one after another, and side by side.
#pragma once

#include <functional>
#include <vector>

#include "cuda.hpp"

namespace shim {

// One thing on a stream: a kernel, as what each of its threads does, or an empty grid for something that one thread
// does alone, such as filling a buffer.
struct Launch {
    Index grid;  // (x, y, 1)
    u32 threads;
    std::function<void()> run;
};

// Runs all streams side by side until they are done. As on a GPU, the launches of one stream follow each other, and
// nothing orders those of different streams but the kernels themselves. Blocks start in the order of their numbers, x
// first, and no more run at a time than `rows` of the grid have.
void run(const std::vector<std::vector<Launch>> &streams, u32 rows = ~0u);

// Random delays in whatever synchronises, from this seed on. 0: none.
void set_delays(u64 seed);

}  // namespace shim
