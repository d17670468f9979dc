// Runs the kernels on the shim and compares every bit with the oracle.
//
//     check matrix SECONDS SEED   all numbers of ranks and all kernels; random lengths, alignments, grids and delays
//     check faults RANKS          every fault ends the calls with the right reports
#include <cstdio>
#include <cstdlib>

#include "cases.hpp"
#include "faults.hpp"
#include "order.hpp"

namespace {

constexpr u64 LONG = 60'000'000'000;  // nanoseconds

typedef std::vector<std::vector<shim::Launch>> Streams;

// Only each team's own stream orders its work: fill, kernel, compare, and at once the next fill. So a kernel that ends
// too early, while a peer still accesses its tensors, is a race or a wrong result. Calls of all kinds and grids follow
// each other on the same Controls.
Streams on_one_stream(World &world, const std::vector<Team> &teams, const std::vector<Case> &cases) {
    Streams streams(teams.size());
    for (u32 t = 0; t < teams.size(); ++t) {
        for (const Case &c : cases) {
            for (u32 rank : teams[t]) streams[t].push_back(c.fill(world, rank));
            streams[t].push_back(c.launch(world, teams[t], LONG));
            for (u32 rank : teams[t]) streams[t].push_back(c.compare(world, rank));
        }
    }
    return streams;
}

// The same, but each rank's tensors have their own stream, which only order.cu orders with the team's.
Streams on_streams_of_tensors(World &world, const std::vector<Team> &teams, const std::vector<Case> &cases) {
    Streams streams(teams.size() + world.size());
    for (u32 t = 0; t < teams.size(); ++t) {
        u64 &done = world.ranks[teams[t][0]].done;
        for (u64 number = 1; const Case &c : cases) {
            for (u32 rank : teams[t]) {
                Rank &own = world.ranks[rank];
                for (shim::Launch &next : std::vector<shim::Launch>{
                         c.fill(world, rank),
                         order::ready(own.ready, number),
                         order::done(done, number, LONG, own.host),
                         c.compare(world, rank),
                     }) {
                    streams[teams.size() + rank].push_back(next);
                }
                streams[t].push_back(order::driver_waits(own.ready, number));
            }
            streams[t].push_back(c.launch(world, teams[t], LONG));
            streams[t].push_back(order::driver_writes(done, number));
            ++number;
        }
    }
    return streams;
}

// One launch per rank, one for all, or random teams, in random order. Half of all cases are of the first kind: an order
// that is missing between two ranks shows only where nothing else orders them.
std::vector<Team> random_teams(u32 ranks) {
    Team all(ranks);
    for (u32 rank = 0; rank < ranks; ++rank) all[rank] = rank;
    for (u32 i = ranks; i > 1; --i) std::swap(all[i - 1], all[draw(i)]);
    std::vector<Team> teams;
    u64 choice = draw(4);
    for (u32 rank : all) {
        if (teams.empty() || choice < 2 || choice == 2 && draw(3) == 0) teams.emplace_back();
        teams.back().push_back(rank);
    }
    return teams;
}

void matrix(double seconds, u64 with_seed) {
    seed(with_seed);
    u64 began = ptx::nanoseconds(), calls = 0, sweeps = 0;
    do {
        for (u32 ranks = 1; ranks <= MAX_RANKS; ++ranks) {
            // Every kernel, in random order.
            std::vector<Case> cases;
            for (const Kernel &kernel : kernels()) {
                if (kernel.runs_on(ranks)) cases.push_back(random_case(kernel, ranks));
            }
            for (size_t i = cases.size(); i > 1; --i) std::swap(cases[i - 1], cases[draw(i)]);
            World world(ranks);
            // Starts at any number of earlier calls.
            u64 epoch = draw(2) ? 0 : (256ull << (8 * draw(5))) - draw(8);
            for (Rank &rank : world.ranks) rank.control.epoch = epoch;
            shim::set_delays(sweeps % 2 ? draw(~0ull) | 1 : 0);
            std::vector<Team> teams = random_teams(ranks);
            auto streams = draw(2) ? on_one_stream : on_streams_of_tensors;
            shim::run(streams(world, teams, cases), u32(1 + draw(3)));
            calls += cases.size();
        }
        ++sweeps;
    } while ((sweeps < 2 || double(ptx::nanoseconds() - began) < seconds * 1e9) && !wrong());
    printf("matrix: %llu calls in %llu sweeps, %u wrong\n", calls, sweeps, wrong());
}

}  // namespace

int main(int argc, char **argv) {
    std::string mode = argc > 1 ? argv[1] : "";
    if (mode == "matrix" && argc == 4) matrix(atof(argv[2]), strtoull(argv[3], nullptr, 10));
    else if (mode == "faults" && argc == 3) faults(u32(atoi(argv[2])));
    else {
        fprintf(stderr, "usage: check matrix SECONDS SEED | check faults RANKS\n");
        return 2;
    }
    return wrong() != 0;
}
