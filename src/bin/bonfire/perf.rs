//! `bonfire perf`: times collectives and checks their results.

mod all_reduce;
mod gradients;
mod ranks;
mod report;

use bonfire::{Error, Group, ReduceOp};

use ranks::Transport;

/// Time a collective over a transport, and check its results
///
/// Prints a line per size: the slowest rank's mean time per call; algbw, the bytes of one rank's buffer over that time;
/// busbw, algbw times 2(n-1)/n for n ranks, which can be compared with the bandwidth of memory or wire whatever the
/// number of ranks (as nccl-tests define them; 1 GB/s is 1e9 bytes per second); and the number of wrong elements over
/// all ranks. Exits with status 1 if any element was wrong.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    workload: Workload,
}

#[derive(clap::Subcommand)]
enum Workload {
    /// All-reduce of f32, out of place, over a range of sizes
    #[command(name = "all_reduce")]
    AllReduce {
        #[command(flatten)]
        common: Common,
        #[command(flatten)]
        sizes: all_reduce::Sizes,
    },
    /// One training step's gradient synchronisation by DataParallel: ResNet-50's 161 gradients, 25,557,032 f32
    Gradients {
        #[command(flatten)]
        common: Common,
    },
}

#[derive(clap::Args)]
struct Common {
    /// How the ranks reach each other: threads of one process, or processes over TCP or in shared memory
    #[arg(long, value_enum, default_value_t = Transport::Local)]
    transport: Transport,

    /// Number of ranks
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1024))]
    ranks: u32,

    /// Print one JSON object per line instead of a table
    #[arg(long)]
    json: bool,

    /// This process is one of the ranks that the measurement started
    #[arg(long, hide = true)]
    as_rank: bool,
}

/// Measures and returns the exit status.
pub fn run(args: &Args) -> u8 {
    let (common, result) = match &args.workload {
        Workload::AllReduce { common, sizes } => match sizes.list() {
            Ok(sizes) => (common, ranks::measure(common, move |group, report| all_reduce::run(group, &sizes, report))),
            Err(reason) => {
                eprintln!("error: {reason}");
                return 2;
            }
        },
        Workload::Gradients { common } => (common, ranks::measure(common, gradients::run)),
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {} ranks over {}: {error}", common.ranks, common.transport);
        1
    })
}

/// The largest of all ranks' values and the sum of all ranks' counts.
fn slowest_and_total(group: &Group, seconds: f64, wrong: u64) -> Result<(f64, u64), Error> {
    let (mut seconds, mut wrong) = ([seconds], [wrong]);
    group.all_reduce(&mut seconds, ReduceOp::Max)?;
    group.all_reduce(&mut wrong, ReduceOp::Sum)?;
    Ok((seconds[0], wrong[0]))
}
