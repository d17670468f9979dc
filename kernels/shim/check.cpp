// Runs the kernels on the shim and compares every bit with the oracle.
//
//   check matrix SECONDS SEED   all numbers of ranks and all kernels; random lengths, alignments, grids and delays
//   check faults RANKS          what goes wrong ends with the right words
#include <cstdio>
#include <cstdlib>

#include "cases.hpp"
#include "faults.hpp"

namespace {

constexpr u64 LONG = 60'000'000'000;  // nanoseconds

// What nobody but each rank's own stream orders: fill, kernel, compare, and at once the next fill. So a kernel that
// ends too early, while a peer still reads or writes here, is a race or a wrong result. Calls of all kinds and grids
// follow each other on the same Controls.
void run_cases(World &world, const std::vector<Case> &cases) {
    std::vector<std::vector<shim::Launch>> streams(world.size());
    for (u32 rank = 0; rank < world.size(); ++rank) {
        for (const Case &c : cases) {
            streams[rank].push_back(c.fill(world, rank));
            streams[rank].push_back(c.launch(world, rank, LONG));
            streams[rank].push_back(c.compare(world, rank));
        }
    }
    shim::run(streams);
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
            // Whatever the number of calls so far.
            u64 epoch = draw(2) ? 0 : (256ull << (8 * draw(5))) - draw(8);
            for (Rank &rank : world.ranks) rank.control.epoch = epoch;
            shim::set_delays(sweeps % 2 ? draw(~0ull) | 1 : 0);
            run_cases(world, cases);
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
