// Kernels that were compiled at run time.
#pragma once

#include <atomic>

#include "../../types.cuh"
#include "../include/block.hpp"

namespace driver {

struct Shape {
    compiled::Index grid, block;
    u32 dynamic_shared;  // bytes
};

// Runs all blocks of a kernel, one after another, on this thread. Begins no further one once `killed` is not zero.
void run_blocks(const compiled::Entry &entry, const Shape &shape, void *const *parameters,
                const std::atomic<int> &killed);

}  // namespace driver
