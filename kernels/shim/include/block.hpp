// What a kernel that was compiled at run time and the driver that runs it know of each other.
#pragma once

namespace compiled {

struct Index {
    unsigned x, y, z;
};

// The 8 bytes that each thread of a warp gave to one operation.
struct Lanes {
    unsigned long long values[32];
    unsigned present;  // bit i: lane i took part; those after the block's last thread and those that ended did not
};

// A block, as its threads see it. The driver sets `thread` whenever it changes from one of them to another.
struct Block {
    Index thread, block, size, grid;
    void *dynamic;  // its dynamic shared memory
    // Waits for all threads of the block that have not ended.
    void (*sync)();
    // Waits for all threads of the warp that have not ended, and gives each of them what all gave.
    const Lanes *(*share)(unsigned long long value);
};

struct Entry {
    unsigned parameters;
    const unsigned *sizes;  // of the parameters, in bytes
    bool waits;  // whether threads wait for each other
    // Runs one thread, with the parameters at these addresses.
    void (*run)(const Block *block, void *const *parameters);
};

}  // namespace compiled
