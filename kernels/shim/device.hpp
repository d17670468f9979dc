// GPUs without a GPU: every rank has a stream that runs kernels one after another, beside those of the other ranks.
#pragma once

#include <functional>
#include <vector>

#include "cuda.hpp"

namespace shim {

// One thing on a stream: a kernel, as what each of its threads does, or a grid of 0 blocks for something that one
// thread does alone, such as filling a buffer.
struct Launch {
    u32 blocks, threads;
    std::function<void()> run;
};

// Runs all streams side by side until they are done. As on a GPU, the launches of one stream follow each other, and
// nothing orders those of different streams but the kernels themselves.
void run(const std::vector<std::vector<Launch>> &streams);

// Random delays in whatever synchronises, from this seed on. 0: none.
void set_delays(u64 seed);

}  // namespace shim
