// Order between a tensor's stream and the stream of a launch, through words that only grow: the kernels of order.cu,
// and the driver's waits and writes between them.
#pragma once

#include <sched.h>

#include "../host.cuh"
#include "device.hpp"

extern "C" void tensors_ready(const void *, const void *, const void *, Order order);
extern "C" void await_done(const void *, Order order);

namespace order {

inline shim::Launch ready(u64 &word, u64 value) {
    Order order = {u64(&word), value, 0, 0};
    return {{1, 1, 1}, 1, [order] { tensors_ready(nullptr, nullptr, nullptr, order); }};
}

inline shim::Launch done(u64 &word, u64 value, u64 timeout, Host &host) {
    Order order = {u64(&word), value, timeout, u64(&host)};
    return {{1, 1, 1}, 1, [order] { await_done(nullptr, order); }};
}

inline shim::Launch driver_waits(u64 &word, u64 value) {
    return {{}, 0, [&word, value] {
                while (shim::atomic(&word).load(std::memory_order_acquire) < value) sched_yield();
            }};
}

inline shim::Launch driver_writes(u64 &word, u64 value) {
    return {{}, 0, [&word, value] { shim::atomic(&word).store(value, std::memory_order_release); }};
}

}  // namespace order
