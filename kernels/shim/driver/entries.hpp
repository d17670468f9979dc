// The kernels that this driver can run: those of the .cu files, compiled for the host.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "../../types.cuh"

namespace driver {

struct Entry {
    std::vector<u32> sizes;  // of its parameters
    // What one thread does, with the parameters at these addresses.
    std::function<void(void *const *parameters)> run;
};

// Null: a kernel of somebody else.
const Entry *entry(const std::string &name);

}  // namespace driver
