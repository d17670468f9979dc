// One call on all ranks: its kernel, its memory and its expected result.
#pragma once

#include <string>
#include <vector>

#include "../signal.cuh"
#include "device.hpp"
#include "oracle.hpp"

// One kernel of a .cu file.
struct Kernel {
    std::string name;
    Operation operation;
    oracle::Type type;  // for operations that only move data: one of the right width
    oracle::Reduction reduction;
    void (*entry)(Call call);

    bool moves() const { return operation >= Operation::ALL_GATHER; }
    bool runs_on(u32 ranks) const { return operation != Operation::COPY || ranks == 2; }
};
const std::vector<Kernel> &kernels();

u64 draw(u64 below);  // a random number
void seed(u64 seed);

// Counts wrong results, and prints the first ones.
[[gnu::format(printf, 1, 2)]] void complain(const char *format, ...);
u32 wrong();

// A tensor's memory: capacity for the longest one, and guards around the tensor, which no kernel may access.
constexpr u64 CAPACITY = 96 << 10, GUARD = 128;
struct Memory {
    alignas(128) unsigned char bytes[GUARD + CAPACITY + GUARD];
};
constexpr unsigned char UNTOUCHED = 0xa5;

struct Rank {
    Control control{};
    Host host{};
    u64 ready = 0, done = 0;  // words of order.cu
    Memory source, target;
};

struct World {
    std::vector<Rank> ranks;
    explicit World(u32 count) : ranks(count) {}
    u32 size() const { return u32(ranks.size()); }
};

// The ranks that one launch works for.
typedef std::vector<u32> Team;

struct Span {
    unsigned char *start;
    u64 bytes;
};

struct Case {
    const Kernel *kernel;
    u32 ranks;
    u64 count;
    u32 root;
    u32 blocks, threads;
    bool in_place;
    u32 source_shift[MAX_RANKS], target_shift[MAX_RANKS];  // elements past an aligned address
    u64 seed;

    u32 element() const { return oracle::size_of(kernel->type); }
    // A rank's tensors. In place, one is the other or a part of it, and the longer one is in the source's memory.
    Span source(World &world, u32 rank) const;
    Span target(World &world, u32 rank) const;
    Call call(World &world, const Team &team, u64 timeout) const;
    shim::Launch launch(World &world, const Team &team, u64 timeout) const;

    // Launches for one rank, before the kernel and after it.
    shim::Launch fill(World &world, u32 rank) const;
    shim::Launch compare(World &world, u32 rank) const;

    // Whether the target is as fill() left it.
    bool target_untouched(World &world, u32 rank) const;

    std::string describe() const;

  private:
    u64 part_count(u32 rank) const;
    u64 source_count(u32 rank) const;
    u64 target_count(u32 rank) const;
    u64 input(u32 rank, u64 index) const { return oracle::value(kernel->type, seed, rank, index); }
    u64 expected(u32 rank, u64 index) const;
    std::vector<Span> spans(World &world, u32 rank) const;
    void fill_now(World &world, u32 rank) const;
    void compare_now(World &world, u32 rank) const;
};

// A call of this kernel with random parameters, around the edges of packs, parts and tiles.
Case random_case(const Kernel &kernel, u32 ranks);
