#include "faults.hpp"

#include <unistd.h>

#include <cstdio>

#include "cases.hpp"
#include "order.hpp"

namespace {

// Timeouts in nanoseconds: LONG never expires, SHORT expires if a rank is absent.
constexpr u64 LONG = 20'000'000'000;
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr u64 SHORT = 2'000'000'000;
#else
constexpr u64 SHORT = 500'000'000;
#endif

typedef std::vector<std::vector<shim::Launch>> Streams;

struct FailureReport {
    Failure failure;
    Operation operation;
    u32 peer;
    u64 epoch;
};

FailureReport failure_of(World &world, u32 rank) {
    u64 word = world.ranks[rank].host.failure;
    return {Failure(word & 0xff), Operation(word >> 8 & 0xff), u32(word >> 16 & 0xff), word >> 24};
}

void expect(const char *what, const Case &c, World &world, u32 rank, Failure failure, u32 peer, u64 epoch) {
    FailureReport got = failure_of(world, rank);
    bool same = got.failure == failure && got.peer == peer && got.epoch == epoch;
    if (same && got.operation == c.kernel->operation) return;
    complain("%s: %s: rank %u reports failure %llu by rank %u at %llu, expected %llu by rank %u at %llu", what,
             c.describe().c_str(), rank, u64(got.failure), got.peer, got.epoch, u64(failure), peer, epoch);
}

// Splits the ranks into teams: one rank alone, the others in one launch or each in its own.
std::vector<Team> teams_beside(u32 alone, u32 ranks) {
    std::vector<Team> teams = {{alone}};
    bool together = draw(2);
    for (u32 rank = 0; rank < ranks; ++rank) {
        if (rank == alone) continue;
        if (!together || teams.size() == 1) teams.emplace_back();
        teams.back().push_back(rank);
    }
    return teams;
}

Case plain_case(const Kernel &kernel, u32 ranks) {
    Case c = random_case(kernel, ranks);
    c.count = 120 * ranks;
    c.in_place = false;
    for (u32 rank = 0; rank < MAX_RANKS; ++rank) c.source_shift[rank] = c.target_shift[rank] = 0;
    return c;
}

// A rank does not make its third call, while the others make later ones. It makes the call after they have timed out.
void absent(const Case &c) {
    World world(c.ranks);
    u32 missing = u32(draw(c.ranks));
    Streams streams, late(1);
    for (const Team &team : teams_beside(missing, c.ranks)) {
        streams.emplace_back();
        for (u32 rank : team) streams.back().push_back(c.fill(world, rank));
        for (u32 call = 1; call <= 5; ++call) {
            if (team[0] != missing || call < 3) streams.back().push_back(c.launch(world, team, SHORT));
        }
    }
    shim::run(streams);
    for (u32 rank = 0; rank < c.ranks; ++rank) {
        if (rank == missing) continue;
        expect("absent", c, world, rank, Failure::ABSENT, missing, 3);
        if (world.ranks[rank].control.epoch != 2) complain("absent: rank %u ended a call that failed", rank);
    }
    late[0] = {c.fill(world, missing), c.launch(world, {missing}, LONG)};
    shim::run(late);
    expect("late", c, world, missing, Failure::ABSENT, missing, 3);
    if (!c.target_untouched(world, missing))
        complain("late: %s: a call that failed wrote its target", c.describe().c_str());
}

// A rank is slow, but within the timeout.
void slow(const Case &c) {
    World world(c.ranks);
    Streams streams;
    for (const Team &team : teams_beside(1, c.ranks)) {
        streams.emplace_back();
        for (u32 rank : team) streams.back().push_back(c.fill(world, rank));
        streams.back().push_back(c.launch(world, team, LONG));
        for (u32 rank : team) streams.back().push_back(c.compare(world, rank));
    }
    streams[0].insert(streams[0].begin(), {{}, 0, [] { usleep(30'000); }});
    shim::run(streams);
}

// Many pushes without anything between them, so that some ranks begin the next one before others have read the last.
void back_to_back(const Case &c) {
    World world(c.ranks);
    Streams streams(c.ranks);
    for (u32 rank = 0; rank < c.ranks; ++rank) {
        streams[rank].push_back(c.fill(world, rank));
        for (u32 call = 0; call < 500; ++call) streams[rank].push_back(c.launch(world, {rank}, LONG));
        streams[rank].push_back(c.compare(world, rank));
    }
    shim::set_delays(draw(~0ull) | 1);
    shim::run(streams);
    shim::set_delays(0);
}

// A rank begins a call and does not end it. A push has no steps in between.
void stalled(const Case &c) {
    if (c.kernel->operation == Operation::ALL_REDUCE_PUSH) return;
    World world(c.ranks);
    u32 missing = u32(draw(c.ranks));
    Streams streams;
    for (const Team &team : teams_beside(missing, c.ranks)) {
        streams.emplace_back();
        for (u32 rank : team) streams.back().push_back(c.fill(world, rank));
        streams.back().push_back(c.launch(world, team, SHORT));
    }
    Call call = c.call(world, {missing}, LONG);
    u32 kind = c.kernel->moves() ? c.element() : u32(c.kernel->type) | u32(c.kernel->reduction) << 8;
    streams[0].back().run = [&, call] { Meeting(call, c.kernel->operation, kind).begin(); };
    shim::run(streams);
    for (u32 rank = 0; rank < c.ranks; ++rank) {
        if (rank != missing) expect("stalled", c, world, rank, Failure::STALLED, missing, 1);
    }
}

// The last rank calls something else: all ranks get a report, and none waits for long.
void mismatch(const Case &c, const Case &odd) {
    World world(c.ranks);
    Streams streams(c.ranks);
    for (u32 rank = 0; rank < c.ranks; ++rank) {
        const Case &mine = rank + 1 == c.ranks ? odd : c;
        streams[rank] = {mine.fill(world, rank), mine.launch(world, {rank}, LONG)};
    }
    shim::run(streams);
    for (u32 rank = 0; rank < c.ranks; ++rank) {
        // A rank that is told by a peer reports what the peer found, so the ranks need not all name the same pair.
        FailureReport got = failure_of(world, rank);
        if (got.failure == Failure::MISMATCH && got.epoch == 1 && got.peer < c.ranks) continue;
        complain("mismatch: %s and %s: rank %u reports failure %llu by rank %u at %llu", c.describe().c_str(),
                 odd.describe().c_str(), rank, u64(got.failure), got.peer, got.epoch);
    }
}

void mismatches(const Case &c) {
    Case odd = c;
    odd.count = c.count - c.ranks;  // still a multiple, for all_to_all
    mismatch(c, odd);
    odd = c;
    odd.blocks += 1;
    mismatch(c, odd);
    odd = c;
    odd.threads *= 2;
    mismatch(c, odd);
    odd = c;
    odd.root = (c.root + 1) % c.ranks;
    mismatch(c, odd);
    for (const Kernel &other : kernels()) {
        odd = c;
        odd.kernel = &other;
        // A call that pushes and one that does not cannot see each other.
        bool pushes = c.kernel->operation == Operation::ALL_REDUCE_PUSH;
        if (&other == c.kernel || pushes != (other.operation == Operation::ALL_REDUCE_PUSH)) continue;
        if (draw(kernels().size()) < 3) mismatch(c, odd);
    }
}

// One rank's host aborts while another rank is absent.
void aborted(const Case &c) {
    World world(c.ranks);
    world.ranks[1].host.abort = 1;
    Streams streams(c.ranks);
    for (u32 rank = 1; rank < c.ranks; ++rank) streams[rank] = {c.fill(world, rank), c.launch(world, {rank}, LONG)};
    shim::run(streams);
    for (u32 rank = 1; rank < c.ranks; ++rank) expect("aborted", c, world, rank, Failure::ABORTED, 1, 1);
}

// Tags of packets repeat, on the same side of the inboxes, after 2 * (2^32 - 1) epochs. Packets of that age must not be
// taken for new ones.
void reused_tags(Case c) {
    World world(c.ranks);
    Streams streams(c.ranks);
    for (u64 epoch : {0ull, 2 * 0xffffffffull}) {
        for (u32 rank = 0; rank < c.ranks; ++rank) {
            streams[rank] = {c.fill(world, rank), c.launch(world, {rank}, LONG), c.compare(world, rank)};
            world.ranks[rank].control.epoch = epoch;
        }
        shim::run(streams);
        ++c.seed;
    }
}

// A call larger than a push supports.
void refused(Case c) {
    World world(c.ranks);
    c.count = PUSH_BYTES / c.element() + 1;
    Team all(c.ranks);
    for (u32 rank = 0; rank < c.ranks; ++rank) all[rank] = rank;
    shim::run({{c.launch(world, all, LONG)}});
    for (u32 rank = 0; rank < c.ranks; ++rank) {
        if (failure_of(world, rank).failure != Failure::REFUSED) complain("refused: rank %u accepts it", rank);
    }
}

// A tensor's stream waits for the end of call 3.
void order_of_streams() {
    constexpr u64 NUMBER = 3, OLD = 77;
    const struct {
        const char *name;
        u64 done;
        bool ends;  // during the wait
        u64 timeout;
        Host host;
        u64 failure;
    } cases[] = {
        {"ended before", NUMBER, false, LONG, {1, 0}, 0},
        {"a later one ended before", NUMBER + 4, false, LONG, {0, 0}, 0},
        {"ends after", NUMBER - 1, true, LONG, {0, 0}, 0},
        {"never ends", NUMBER - 1, false, SHORT, {0, 0}, u64(Failure::LATE) | NUMBER << 24},
        {"never ends and has failed", NUMBER - 1, false, SHORT, {0, OLD}, OLD},
        {"is aborted", NUMBER - 1, false, LONG, {1, 0}, u64(Failure::ABORTED) | NUMBER << 24},
    };
    for (const auto &now : cases) {
        u64 done = now.done, tensor = 0, seen = 0;
        Host host = now.host;
        Streams streams(2);
        streams[0] = {order::done(done, NUMBER, now.timeout, host), {{}, 0, [&] { seen = tensor; }}};
        if (now.ends) streams[1] = {{{}, 0, [&] { usleep(30'000), tensor = 1; }}, order::ready(done, NUMBER)};
        shim::run(streams);
        if (host.failure == now.failure && seen == now.ends) continue;
        complain("a call that %s: failure %llx, expected %llx, saw %llu", now.name, host.failure, now.failure, seen);
    }
}

}  // namespace

void faults(u32 ranks) {
    order_of_streams();
    u32 rounds = 0;
    // One kernel of each operation.
    Operation last{};
    for (u64 number = 1; number <= u64(Operation::COPY) && !wrong(); ++number) {
        for (const Kernel &kernel : kernels()) {
            if (u64(kernel.operation) != number || kernel.operation == last || !kernel.runs_on(ranks)) continue;
            last = kernel.operation;
            Case c = plain_case(kernel, ranks);
            absent(c);
            slow(c);
            stalled(c);
            mismatches(c);
            aborted(c);
            if (kernel.operation == Operation::ALL_REDUCE_PUSH) {
                back_to_back(c);
                reused_tags(c);
                refused(c);
            }
            ++rounds;
            if (wrong()) break;
        }
    }
    printf("faults: %u ranks, %u operations, %u wrong\n", ranks, rounds, wrong());
}
