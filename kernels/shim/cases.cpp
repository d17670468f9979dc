#include "cases.hpp"

#include <cstdarg>
#include <cstdio>
#include <mutex>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define POISON(at, bytes) __asan_poison_memory_region(at, bytes)
#define UNPOISON(at, bytes) __asan_unpoison_memory_region(at, bytes)
#else
#define POISON(at, bytes) (void)(at)
#define UNPOISON(at, bytes) (void)(at)
#endif

#include "../instances.cuh"

using oracle::part_first;

typedef void KernelFunction(Call call);
extern "C" KernelFunction all_gather, broadcast, all_to_all, gather, scatter, copy;
#define DECLARE(reduction, Reduction, type)                        \
    extern "C" KernelFunction two_shot_##reduction##_##type;       \
    extern "C" KernelFunction one_shot_##reduction##_##type;       \
    extern "C" KernelFunction push_##reduction##_##type;           \
    extern "C" KernelFunction reduce_scatter_##reduction##_##type;
INSTANCES(DECLARE)

const std::vector<Kernel> &kernels() {
    constexpr oracle::Reduction sum = oracle::SUM, mean = oracle::MEAN, max = oracle::MAX, min = oracle::MIN;
#define ROW(form, operation, reduction, type) \
    {#form "_" #reduction "_" #type, operation, oracle::Type(NUMBER<type>), reduction, form##_##reduction##_##type},
#define ROWS(reduction, Reduction, type)                              \
    ROW(two_shot, Operation::ALL_REDUCE_TWO_SHOT, reduction, type)    \
    ROW(one_shot, Operation::ALL_REDUCE_ONE_SHOT, reduction, type)    \
    ROW(push, Operation::ALL_REDUCE_PUSH, reduction, type)            \
    ROW(reduce_scatter, Operation::REDUCE_SCATTER, reduction, type)
#define MOVE(form, operation)                                         \
    {#form " of 1 byte", operation, oracle::U8, sum, form},           \
    {#form " of 2 bytes", operation, oracle::F16, sum, form},         \
    {#form " of 4 bytes", operation, oracle::U32, sum, form},         \
    {#form " of 8 bytes", operation, oracle::U64, sum, form},
    static const std::vector<Kernel> all = {
        INSTANCES(ROWS)
        MOVE(all_gather, Operation::ALL_GATHER)
        MOVE(broadcast, Operation::BROADCAST)
        MOVE(all_to_all, Operation::ALL_TO_ALL)
        MOVE(gather, Operation::GATHER)
        MOVE(scatter, Operation::SCATTER)
        MOVE(copy, Operation::COPY)
    };
    // Unused if only some kernels are compiled.
    (void)mean, (void)max, (void)min;
    return all;
}

namespace {
u64 random_state = 1;
std::mutex output;
u32 complaints = 0;
}  // namespace

void seed(u64 seed) { random_state = oracle::hash(seed); }
u64 draw(u64 below) { return oracle::hash(random_state++) % below; }

void complain(const char *format, ...) {
    std::lock_guard<std::mutex> guard(output);
    if (++complaints > 20) return;
    va_list rest;
    va_start(rest, format);
    vfprintf(stderr, format, rest);
    va_end(rest);
    fputc('\n', stderr);
}
u32 wrong() {
    std::lock_guard<std::mutex> guard(output);
    return complaints;
}

u64 Case::part_count(u32 rank) const { return part_first(count, ranks, rank + 1) - part_first(count, ranks, rank); }

u64 Case::source_count(u32 rank) const {
    switch (kernel->operation) {
        case Operation::ALL_GATHER: case Operation::GATHER: return part_count(rank);
        case Operation::BROADCAST: case Operation::SCATTER: case Operation::COPY: return rank == root ? count : 0;
        default: return count;
    }
}

u64 Case::target_count(u32 rank) const {
    switch (kernel->operation) {
        case Operation::REDUCE_SCATTER: case Operation::SCATTER: return part_count(rank);
        case Operation::GATHER: return rank == root ? count : 0;
        case Operation::COPY: return rank == root ? 0 : count;
        default: return count;
    }
}

Span Case::source(World &world, u32 rank) const {
    u64 first = source_shift[rank];
    bool part = kernel->operation == Operation::ALL_GATHER || kernel->operation == Operation::GATHER;
    if (in_place && part) first += part_first(count, ranks, rank);
    return {world.ranks[rank].source.bytes + GUARD + first * element(), source_count(rank) * element()};
}

Span Case::target(World &world, u32 rank) const {
    if (!in_place) {
        return {world.ranks[rank].target.bytes + GUARD + target_shift[rank] * element(),
                target_count(rank) * element()};
    }
    u64 first = source_shift[rank];
    bool part = kernel->operation == Operation::REDUCE_SCATTER || kernel->operation == Operation::SCATTER;
    if (part) first += part_first(count, ranks, rank);
    return {world.ranks[rank].source.bytes + GUARD + first * element(), target_count(rank) * element()};
}

// The memory that a rank's kernels may access.
std::vector<Span> Case::spans(World &world, u32 rank) const {
    if (in_place) return {{world.ranks[rank].source.bytes + GUARD + source_shift[rank] * element(), count * element()}};
    return {source(world, rank), target(world, rank)};
}

u64 Case::expected(u32 rank, u64 index) const {
    switch (kernel->operation) {
        case Operation::ALL_GATHER: case Operation::GATHER: {
            u32 owner = 0;
            while (part_first(count, ranks, owner + 1) <= index) ++owner;
            return input(owner, index - part_first(count, ranks, owner));
        }
        case Operation::BROADCAST: case Operation::COPY: return input(root, index);
        case Operation::SCATTER: return input(root, part_first(count, ranks, rank) + index);
        case Operation::ALL_TO_ALL: {
            u64 part = count / ranks;
            return input(u32(index / part), rank * part + index % part);
        }
        case Operation::REDUCE_SCATTER: index += part_first(count, ranks, rank); [[fallthrough]];
        default: {
            u64 values[MAX_RANKS];
            for (u32 from = 0; from < ranks; ++from) values[from] = input(from, index);
            return oracle::reduce(kernel->type, kernel->reduction, values, ranks);
        }
    }
}

std::string Case::describe() const {
    std::string text = kernel->name + " of " + std::to_string(count) + " on " + std::to_string(ranks) +
                       " ranks, root " + std::to_string(root) + ", " + std::to_string(blocks) + " x " +
                       std::to_string(threads) + (in_place ? ", in place" : "") + ", shifts";
    for (u32 rank = 0; rank < ranks; ++rank) {
        text += " " + std::to_string(source_shift[rank]) + "/" + std::to_string(target_shift[rank]);
    }
    return text;
}

Call Case::call(World &world, const Team &team, u64 timeout) const {
    Call call{};
    for (u32 rank = 0; rank < ranks; ++rank) call.control[rank] = u64(&world.ranks[rank].control);
    Member *member = call.member;
    for (u32 rank : team) {
        u64 from = u64(source(world, rank).start), to = u64(target(world, rank).start);
        *member++ = {from, to, rank, u64(&world.ranks[rank].host)};
    }
    call.timeout = timeout;
    call.ranks = ranks;
    call.root = root;
    call.count = count;
    call.width = kernel->moves() ? element() : 0;
    return call;
}

shim::Launch Case::launch(World &world, const Team &team, u64 timeout) const {
    Call call = this->call(world, team, timeout);
    return {{u32(team.size()), blocks, 1}, threads, [entry = kernel->entry, call] { entry(call); }};
}

shim::Launch Case::fill(World &world, u32 rank) const {
    return {{}, 0, [c = *this, &world, rank] { c.fill_now(world, rank); }};
}

shim::Launch Case::compare(World &world, u32 rank) const {
    return {{}, 0, [c = *this, &world, rank] { c.compare_now(world, rank); }};
}

void Case::fill_now(World &world, u32 rank) const {
    UNPOISON(&world.ranks[rank].source, sizeof(Memory));
    UNPOISON(&world.ranks[rank].target, sizeof(Memory));
    for (Span span : spans(world, rank)) memset(span.start - GUARD / 2, UNTOUCHED, span.bytes + GUARD);
    unsigned char *to = source(world, rank).start;
    for (u64 i = 0; i < source_count(rank); ++i) {
        u64 bits = input(rank, i);
        memcpy(to + i * element(), &bits, element());
    }
    for (Span span : spans(world, rank)) {
        POISON(span.start - GUARD / 2, GUARD / 2);
        POISON(span.start + span.bytes, GUARD / 2);
    }
}

void Case::compare_now(World &world, u32 rank) const {
    UNPOISON(&world.ranks[rank].source, sizeof(Memory));
    UNPOISON(&world.ranks[rank].target, sizeof(Memory));
    if (u64 failure = world.ranks[rank].host.failure) {
        return complain("%s: rank %u failed with %llx", describe().c_str(), rank, failure);
    }
    const unsigned char *got = target(world, rank).start, *from = source(world, rank).start;
    for (u64 i = 0; i < target_count(rank); ++i) {
        u64 bits = oracle::load(got + i * element(), element()), want = expected(rank, i);
        if (bits == want) continue;
        return complain("%s: rank %u has %llx, expected %llx, at %llu", describe().c_str(), rank, bits, want, i);
    }
    for (u64 i = 0; i < source_count(rank) && !in_place; ++i) {
        if (oracle::load(from + i * element(), element()) == input(rank, i)) continue;
        return complain("%s: rank %u's source changed at %llu", describe().c_str(), rank, i);
    }
    for (Span span : spans(world, rank)) {
        for (u64 i = 0; i < GUARD / 2; ++i) {
            if (span.start[-1 - i64(i)] == UNTOUCHED && span.start[span.bytes + i] == UNTOUCHED) continue;
            return complain("%s: rank %u's memory changed outside its tensors", describe().c_str(), rank);
        }
    }
}

bool Case::target_untouched(World &world, u32 rank) const {
    Span span = target(world, rank);
    for (u64 i = 0; i < span.bytes; ++i) {
        if (span.start[i] != UNTOUCHED) return false;
    }
    return true;
}

Case random_case(const Kernel &kernel, u32 ranks) {
    Case c{};
    c.kernel = &kernel;
    c.ranks = ranks;
    c.root = u32(draw(ranks));
    c.blocks = u32(1 + draw(3));
    c.threads = u32(8 << draw(3));
    c.in_place = kernel.operation != Operation::COPY && draw(2);
    u32 lanes = 16 / c.element();
    u64 tile = u64(c.blocks) * c.threads * 4 * lanes;
    u64 lengths[] = {draw(4),         lanes + draw(3) - 1, 2 * lanes,           draw(8 * lanes),
                     draw(40 * lanes), draw(1500),          tile + draw(3) - 1, 2 * tile + draw(lanes)};
    c.count = lengths[draw(8)];
    u64 most = (kernel.operation == Operation::ALL_REDUCE_PUSH ? u64(PUSH_BYTES) : CAPACITY / 2) / c.element();
    while (c.count > most) c.count /= 2;
    if (kernel.operation == Operation::ALL_TO_ALL) c.count -= c.count % ranks;
    u32 shift = u32(draw(lanes)), odd = u32(draw(MAX_RANKS));
    switch (draw(4)) {
        case 0:  // all equal
            for (u32 rank = 0; rank < MAX_RANKS; ++rank) c.source_shift[rank] = c.target_shift[rank] = shift;
            break;
        case 1:  // one differs
            (draw(2) ? c.source_shift : c.target_shift)[odd] = shift;
            break;
    }
    c.seed = draw(~0ull);
    return c;
}
