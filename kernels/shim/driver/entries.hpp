// The kernels that this driver can run: those of the .cu files, compiled for the host.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "../../types.cuh"

namespace driver {

struct HostKernel {
    std::vector<u32> sizes;  // of its parameters, in bytes
    // Runs one thread of the kernel, with the parameters at these addresses.
    std::function<void(void *const *parameters)> run;
};

// Finds a kernel by name. Null if it is not one of ours.
const HostKernel *find_kernel(const std::string &name);

}  // namespace driver
