// Runs the kernels on the shim and compares every bit with the oracle.
//
//   check matrix SECONDS SEED   all ranks, operations, types, reductions; random lengths, alignments, grids, delays
//   check faults                a rank that never comes, ranks that disagree, a host that gives up, a worn-out tag
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define POISON(at, bytes) __asan_poison_memory_region(at, bytes)
#define UNPOISON(at, bytes) __asan_unpoison_memory_region(at, bytes)
#else
#define POISON(at, bytes)
#define UNPOISON(at, bytes)
#endif

#include "../instances.cuh"
#include "../signal.cuh"
#include "device.hpp"
#include "oracle.hpp"

using oracle::Reduction;
using oracle::Type;

typedef void Entry(const void *source, void *target, Call call);

#define DECLARE(reduction, Reduction, type)   \
    extern "C" Entry two_shot_##reduction##_##type; \
    extern "C" Entry one_shot_##reduction##_##type; \
    extern "C" Entry push_##reduction##_##type;
INSTANCES(DECLARE)

struct Kernel {
    std::string name;
    Operation operation;
    Type type;
    Reduction reduction;
    Entry *entry;
};

constexpr Reduction sum = oracle::SUM, mean = oracle::MEAN, max = oracle::MAX, min = oracle::MIN;
const std::vector<Kernel> KERNELS = {
#define ROWS(reduction, Reduction, type)                                                                     \
    {"two_shot_" #reduction "_" #type, Operation::ALL_REDUCE_TWO_SHOT, Type(NUMBER<type>), reduction,        \
     two_shot_##reduction##_##type},                                                                         \
    {"one_shot_" #reduction "_" #type, Operation::ALL_REDUCE_ONE_SHOT, Type(NUMBER<type>), reduction,        \
     one_shot_##reduction##_##type},                                                                         \
    {"push_" #reduction "_" #type, Operation::ALL_REDUCE_PUSH, Type(NUMBER<type>), reduction,                \
     push_##reduction##_##type},
    INSTANCES(ROWS)
};

u64 random_state = 1;
u64 draw(u64 below) { return oracle::hash(random_state++) % below; }

std::mutex output;
u32 wrong = 0;
void complain(const char *format, ...) {
    std::lock_guard<std::mutex> guard(output);
    if (++wrong > 20) return;
    va_list rest;
    va_start(rest, format);
    vfprintf(stderr, format, rest);
    va_end(rest);
    fputc('\n', stderr);
}

// A tensor's memory: room for the longest, and guards on both sides that nobody may touch.
constexpr u64 ROOM = 96 << 10, GUARD = 128;
struct Memory {
    alignas(128) unsigned char bytes[GUARD + ROOM + GUARD];
};

struct Rank {
    Control control{};
    Host host{};
    Memory source, target;
};

struct World {
    std::vector<Rank> ranks;
    explicit World(u32 count) : ranks(count) {}
    u32 size() const { return u32(ranks.size()); }

    Call call(u32 rank, u64 patience) {
        Call call{};
        for (u32 peer = 0; peer < size(); ++peer) call.control[peer] = u64(&ranks[peer].control);
        call.host = u64(&ranks[rank].host);
        call.patience = patience;
        call.rank = rank;
        call.ranks = size();
        return call;
    }
};

// Nanoseconds that nobody needs, and such as only a rank needs that is not there.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr u64 LONG = 60'000'000'000, SHORT = 2'000'000'000;
#else
constexpr u64 LONG = 60'000'000'000, SHORT = 500'000'000;
#endif

// One call of all ranks.
struct Case {
    const Kernel *kernel;
    u64 count;
    u32 blocks, threads;
    bool in_place;
    u32 source_shift[MAX_RANKS], target_shift[MAX_RANKS];  // elements past an aligned address
    u64 seed;

    u32 element() const { return oracle::size_of(kernel->type); }
    unsigned char *source(Rank &rank, u32 number) const { return rank.source.bytes + GUARD + source_shift[number] * element(); }
    unsigned char *target(Rank &rank, u32 number) const {
        return in_place ? source(rank, number) : rank.target.bytes + GUARD + target_shift[number] * element();
    }

    u64 input(u32 rank, u64 index) const { return oracle::value(kernel->type, seed, rank, index); }
    u64 expected(u32 ranks, u64 index) const {
        u64 values[MAX_RANKS];
        for (u32 rank = 0; rank < ranks; ++rank) values[rank] = input(rank, index);
        return oracle::reduce(kernel->type, kernel->reduction, values, ranks);
    }

    std::string describe(u32 ranks) const {
        std::string text = kernel->name + " of " + std::to_string(count) + " on " + std::to_string(ranks) + " ranks, " +
                           std::to_string(blocks) + " x " + std::to_string(threads) + (in_place ? ", in place" : "");
        for (u32 rank = 0; rank < ranks; ++rank) {
            text += (rank ? " " : ", shifts ") + std::to_string(source_shift[rank]) + "/" + std::to_string(target_shift[rank]);
        }
        return text;
    }
};

constexpr unsigned char UNTOUCHED = 0xa5;

// Before the kernel, on the rank's own stream.
void fill(const Case &c, Rank &rank, u32 number) {
    UNPOISON(&rank.source, sizeof(Memory));
    UNPOISON(&rank.target, sizeof(Memory));
    u64 bytes = c.count * c.element();
    unsigned char *source = c.source(rank, number), *target = c.target(rank, number);
    memset(target - GUARD / 2, UNTOUCHED, bytes + GUARD);
    memset(source - GUARD / 2, UNTOUCHED, bytes + GUARD);
    for (u64 i = 0; i < c.count; ++i) {
        u64 bits = c.input(number, i);
        memcpy(source + i * c.element(), &bits, c.element());
    }
    POISON(source - GUARD / 2, GUARD / 2);
    POISON(source + bytes, GUARD / 2);
    POISON(target - GUARD / 2, GUARD / 2);
    POISON(target + bytes, GUARD / 2);
}

// After it.
void compare(const Case &c, Rank &rank, u32 number, u32 ranks) {
    UNPOISON(&rank.source, sizeof(Memory));
    UNPOISON(&rank.target, sizeof(Memory));
    u64 bytes = c.count * c.element();
    unsigned char *source = c.source(rank, number), *target = c.target(rank, number);
    for (u64 i = 0; i < c.count; ++i) {
        u64 got = oracle::load(target + i * c.element(), c.element()), want = c.expected(ranks, i);
        if (got != want) {
            complain("%s: rank %u has %llx and not %llx at %llu", c.describe(ranks).c_str(), number, got, want, i);
            return;
        }
        if (!c.in_place && oracle::load(source + i * c.element(), c.element()) != c.input(number, i)) {
            complain("%s: rank %u's source changed at %llu", c.describe(ranks).c_str(), number, i);
            return;
        }
    }
    for (unsigned char *memory : {source, target}) {
        for (u64 i = 0; i < GUARD / 2; ++i) {
            if (memory[-1 - i64(i)] != UNTOUCHED || memory[bytes + i] != UNTOUCHED) {
                complain("%s: rank %u's memory changed outside its tensor", c.describe(ranks).c_str(), number);
                return;
            }
        }
    }
    if (rank.host.failure) complain("%s: rank %u failed with %llx", c.describe(ranks).c_str(), number, rank.host.failure);
}

shim::Launch launch(const Case &c, World &world, u32 number, u64 patience) {
    Rank &rank = world.ranks[number];
    Call call = world.call(number, patience);
    call.count = c.count;
    const void *source = c.source(rank, number);
    void *target = c.target(rank, number);
    Entry *entry = c.kernel->entry;
    return {c.blocks, c.threads, [=] { entry(source, target, call); }};
}

// What nobody but the rank's own stream orders: fill, kernel, compare, and at once the next fill. So a kernel that ends too
// early, while a peer still reads or writes here, is a race or a wrong result.
void run_cases(World &world, const std::vector<Case> &cases) {
    std::vector<std::vector<shim::Launch>> streams(world.size());
    for (u32 number = 0; number < world.size(); ++number) {
        Rank &rank = world.ranks[number];
        for (const Case &c : cases) {
            streams[number].push_back({0, 0, [&c, &rank, number] { fill(c, rank, number); }});
            streams[number].push_back(launch(c, world, number, LONG));
            streams[number].push_back({0, 0, [&c, &rank, number, &world] { compare(c, rank, number, world.size()); }});
        }
    }
    shim::run(streams);
}

Case random_case(const Kernel &kernel) {
    Case c{};
    c.kernel = &kernel;
    c.blocks = u32(1 + draw(3));
    c.threads = u32(8 << draw(3));
    u32 lanes = 16 / c.element();
    // Around the edges: of packs, of parts, of tiles.
    u64 tile = u64(c.blocks) * c.threads * 4 * lanes;
    u64 lengths[] = {draw(4), lanes + draw(3) - 1, 2 * lanes, draw(8 * lanes), draw(40 * lanes), draw(1500), tile + draw(3) - 1,
                     2 * tile + draw(lanes)};
    c.count = lengths[draw(8)];
    u64 most = kernel.operation == Operation::ALL_REDUCE_PUSH ? PUSH_BYTES : ROOM / 2;
    while (c.count * c.element() > most) c.count /= 2;
    c.in_place = draw(2);
    u32 same = u32(draw(lanes)), odd = u32(draw(MAX_RANKS));
    for (u32 rank = 0; rank < MAX_RANKS; ++rank) c.source_shift[rank] = c.target_shift[rank] = 0;
    switch (draw(4)) {
        case 0:  // all alike
            for (u32 rank = 0; rank < MAX_RANKS; ++rank) c.source_shift[rank] = c.target_shift[rank] = same;
            break;
        case 1:  // one differs
            (draw(2) ? c.source_shift : c.target_shift)[odd] = same;
            break;
    }
    c.seed = draw(~0ull);
    return c;
}

void matrix(double seconds, u64 seed) {
    random_state = oracle::hash(seed) | 1;
    u64 began = ptx::nanoseconds(), calls = 0, sweeps = 0;
    do {
        // Every kernel for every number of ranks, in random order.
        for (u32 ranks = 1; ranks <= MAX_RANKS; ++ranks) {
            std::vector<Case> cases;
            for (const Kernel &kernel : KERNELS) cases.push_back(random_case(kernel));
            for (size_t i = cases.size(); i > 1; --i) std::swap(cases[i - 1], cases[draw(i)]);
            shim::set_delays(sweeps % 2 ? draw(~0ull) | 1 : 0);
            World world(ranks);
            // Whatever the number of calls so far.
            u64 epoch = draw(2) ? 0 : (256ull << (8 * draw(5))) - draw(8);
            for (Rank &rank : world.ranks) rank.control.epoch = epoch;
            run_cases(world, cases);
            calls += cases.size();
        }
        ++sweeps;
    } while (double(ptx::nanoseconds() - began) < seconds * 1e9 && !wrong);
    printf("matrix: %llu calls in %llu sweeps, %u wrong\n", calls, sweeps, wrong);
}

// Faults. Each must end, on every rank that is there, with the one word that says what happened.

struct Word {
    Failure failure;
    Operation operation;
    u32 peer;
    u64 epoch;
    bool operator==(const Word &other) const {
        return failure == other.failure && operation == other.operation && peer == other.peer && epoch == other.epoch;
    }
};
Word decode(u64 word) { return {Failure(word & 0xff), Operation(word >> 8 & 0xff), u32(word >> 16 & 0xff), word >> 24}; }

void expect_failure(const char *what, World &world, u32 number, Word want) {
    Word got = decode(world.ranks[number].host.failure);
    if (got == want) return;
    complain("%s: rank %u of %u says failure %llu in operation %llu by rank %u at %llu, and not %llu in %llu by rank %u at %llu",
             what, number, world.size(), u64(got.failure), u64(got.operation), got.peer, got.epoch, u64(want.failure),
             u64(want.operation), want.peer, want.epoch);
}

Case plain_case(const Kernel &kernel) {
    Case c = random_case(kernel);
    c.count = 1000;
    for (u32 rank = 0; rank < MAX_RANKS; ++rank) c.source_shift[rank] = c.target_shift[rank] = 0;
    c.in_place = false;
    return c;
}

typedef std::vector<std::vector<shim::Launch>> Streams;

// A rank that never makes its third call; then it comes after all, when the others have given up.
void absent(const Kernel &kernel, u32 ranks) {
    World world(ranks);
    u32 missing = u32(draw(ranks));
    Case c = plain_case(kernel);
    Streams streams(ranks), late(ranks);
    for (u32 number = 0; number < ranks; ++number) {
        Rank &rank = world.ranks[number];
        streams[number].push_back({0, 0, [c, &rank, number] { fill(c, rank, number); }});
        for (u32 call = 1; call <= 5; ++call) {
            if (number != missing || call < 3) streams[number].push_back(launch(c, world, number, SHORT));
        }
    }
    late[missing].push_back({0, 0, [c, &rank = world.ranks[missing], missing] { fill(c, rank, missing); }});
    late[missing].push_back(launch(c, world, missing, LONG));
    shim::run(streams);
    for (u32 number = 0; number < ranks; ++number) {
        if (number == missing) continue;
        expect_failure("absent", world, number, {Failure::ABSENT, kernel.operation, missing, 3});
        if (world.ranks[number].control.epoch != 2) complain("absent: rank %u ended a call that failed", number);
    }
    shim::run(late);
    expect_failure("late", world, missing, {Failure::ABSENT, kernel.operation, missing, 3});
    UNPOISON(&world.ranks[missing].target, sizeof(Memory));
    if (c.target(world.ranks[missing], missing)[0] != UNTOUCHED) complain("late: a call that failed wrote its target");
}

// A rank that is slow, and within the bound.
void slow(const Kernel &kernel, u32 ranks) {
    World world(ranks);
    Case c = plain_case(kernel);
    Streams streams(ranks);
    for (u32 number = 0; number < ranks; ++number) {
        Rank &rank = world.ranks[number];
        streams[number].push_back({0, 0, [c, &rank, number] {
            fill(c, rank, number);
            if (number == 1) usleep(30'000);
        }});
        streams[number].push_back(launch(c, world, number, LONG));
        streams[number].push_back({0, 0, [c, &rank, number, ranks] { compare(c, rank, number, ranks); }});
    }
    shim::run(streams);
}

// A rank that comes to the beginning of a call and not to its end.
void stalled(const Kernel &kernel, u32 ranks) {
    World world(ranks);
    u32 missing = u32(draw(ranks));
    Case c = plain_case(kernel);
    Streams streams(ranks);
    for (u32 number = 0; number < ranks; ++number) {
        Rank &rank = world.ranks[number];
        streams[number].push_back({0, 0, [c, &rank, number] { fill(c, rank, number); }});
        if (number != missing) {
            streams[number].push_back(launch(c, world, number, SHORT));
            continue;
        }
        Call call = world.call(number, LONG);
        call.count = c.count;
        u32 kind = u32(kernel.type) | u32(kernel.reduction) << 8;
        streams[number].push_back({c.blocks, c.threads, [=, &rank] {
            Meeting meeting(call, kernel.operation, kind);
            meeting.begin(c.source(rank, number), c.target(rank, number));
        }});
    }
    shim::run(streams);
    for (u32 number = 0; number < ranks; ++number) {
        if (number != missing) expect_failure("stalled", world, number, {Failure::STALLED, kernel.operation, missing, 1});
    }
}

// Ranks that call different things: everybody is told, nobody waits for long.
void mismatch(const Kernel &kernel, const Kernel &other, u32 ranks, int what) {
    World world(ranks);
    u32 odd = ranks - 1;
    Case c = plain_case(kernel), d = c;
    if (what == 0) d.kernel = &other;
    if (what == 1) d.count = 999;
    if (what == 2) d.blocks = c.blocks + 1;
    if (what == 3) d.threads = c.threads * 2;
    Streams streams(ranks);
    for (u32 number = 0; number < ranks; ++number) {
        Rank &rank = world.ranks[number];
        streams[number].push_back({0, 0, [c, &rank, number] { fill(c, rank, number); }});
        streams[number].push_back(launch(number == odd ? d : c, world, number, LONG));
    }
    shim::run(streams);
    for (u32 number = 0; number < ranks; ++number) {
        Word got = decode(world.ranks[number].host.failure);
        // Who is told by a peer first reports what the peer found.
        if (got.failure != Failure::MISMATCH || got.epoch != 1 || got.peer >= ranks) {
            complain("mismatch %d: rank %u of %u reports %llx", what, number, ranks, world.ranks[number].host.failure);
        }
    }
}

// The host of one rank gives up while another rank has not come.
void aborted(const Kernel &kernel, u32 ranks) {
    World world(ranks);
    Case c = plain_case(kernel);
    world.ranks[1].host.abort = 1;
    Streams streams(ranks);
    for (u32 number = 1; number < ranks; ++number) {
        Rank &rank = world.ranks[number];
        streams[number].push_back({0, 0, [c, &rank, number] { fill(c, rank, number); }});
        streams[number].push_back(launch(c, world, number, LONG));
    }
    shim::run(streams);
    for (u32 number = 1; number < ranks; ++number) {
        expect_failure("aborted", world, number, {Failure::ABORTED, kernel.operation, 1, 1});
    }
}

// Tags of packets repeat, on the same side of the inboxes, after 2 * (2^32 - 1) epochs. Packets from then must not be taken for
// those of now.
void worn_tags(const Kernel &kernel, u32 ranks) {
    World world(ranks);
    Case c = plain_case(kernel);
    run_cases(world, {c});
    for (Rank &rank : world.ranks) rank.control.epoch = 2 * 0xffffffffull;
    c.seed += 1;
    run_cases(world, {c});
}

// More than the kernel can do.
void refused(const Kernel &kernel, u32 ranks) {
    World world(ranks);
    Case c = plain_case(kernel);
    c.count = PUSH_BYTES / c.element() + 1;
    Streams streams(ranks);
    for (u32 number = 0; number < ranks; ++number) {
        Rank &rank = world.ranks[number];
        streams[number].push_back({0, 0, [c, &rank, number] { fill(c, rank, number); }});
        streams[number].push_back(launch(c, world, number, LONG));
    }
    shim::run(streams);
    for (u32 number = 0; number < ranks; ++number) {
        if (decode(world.ranks[number].host.failure).failure != Failure::REFUSED) complain("refused: rank %u does it", number);
    }
}

void faults() {
    u32 cases = 0;
    for (u32 ranks : {2u, 5u}) {
        // One kernel of each operation; another with the same memory for the mismatch.
        for (size_t i = 0; i < KERNELS.size(); ++i) {
            bool first = true;
            for (size_t j = 0; j < i; ++j) first &= KERNELS[j].operation != KERNELS[i].operation;
            if (!first) continue;
            const Kernel &kernel = KERNELS[i], *other = nullptr;
            for (const Kernel &candidate : KERNELS) {
                if (candidate.operation == kernel.operation && candidate.type == kernel.type && &candidate != &kernel) {
                    other = &candidate;
                }
            }
            absent(kernel, ranks);
            slow(kernel, ranks);
            // A push has no middle.
            if (kernel.operation != Operation::ALL_REDUCE_PUSH) stalled(kernel, ranks);
            else worn_tags(kernel, ranks), refused(kernel, ranks);
            aborted(kernel, ranks);
            for (int what = 0; what < 4; ++what) {
                if (what > 0 || other) mismatch(kernel, other ? *other : kernel, ranks, what);
            }
            ++cases;
        }
    }
    printf("faults: %u rounds, %u wrong\n", cases, wrong);
}

int main(int argc, char **argv) {
    std::string mode = argc > 1 ? argv[1] : "";
    if (mode == "matrix" && argc == 4) matrix(atof(argv[2]), strtoull(argv[3], nullptr, 10));
    else if (mode == "faults" && argc == 2) faults();
    else {
        fprintf(stderr, "usage: check matrix SECONDS SEED | check faults\n");
        return 2;
    }
    return wrong != 0;
}
