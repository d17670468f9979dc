//! `bonfire perf`: times collectives and checks their results.

mod floors;
mod gradients;
mod operation;
mod oracle;
mod plot;
mod ranks;
mod report;
mod sizes;
mod slices;
#[cfg(unix)]
mod tensors;
mod timing;

use std::path::{Path, PathBuf};

use bonfire::{DType, Group, Operation, ReduceOp, Selection};
use bonfire_core::internal::oracle::Sample;
use clap::ValueEnum;
use half::{bf16, f16};

use crate::machine::Machine;
use gradients::Gradients;
use operation::Benchmark;
use ranks::{RankError, Transport};
use report::{Report, Row, Subject};
use sizes::Sizes;
use slices::Slices;
use timing::{Counts, Measured, measure, measure_steps};

/// Time a collective over a transport, and check its results
///
/// Prints a line for each size: the time of a call, out of place and in place; algbw, the size over that time; busbw,
/// algbw times a factor that makes it comparable with the bandwidth of memory or wire whatever the operation and the
/// number of ranks (both as nccl-tests define them; 1 GB/s is 1e9 bytes per second); the number of wrong elements over
/// all ranks; and what percentage of the time this machine would need at least, as measured before.
#[derive(clap::Args, Clone)]
#[command(arg_required_else_help = true, after_long_help = LONG_HELP,
          after_help = "Try `bonfire perf --help` for examples and what the figures are.")]
pub struct Args {
    /// What to measure
    #[arg(value_enum, value_name = "OPERATION")]
    operation: Benchmark,

    #[command(flatten)]
    common: Common,

    #[command(flatten)]
    sizes: Sizes,

    #[command(flatten)]
    counts: Counts,

    /// Element type: f32, f64, f16, bf16, i8 to i64 or u8 to u64; nccl-tests' names work too
    #[arg(short = 'd', long, value_name = "TYPE", default_value_t = DType::F32, value_parser = parse_dtype)]
    dtype: DType,

    /// Reduction: sum, mean, max, min or product; nccl-tests' names work too
    #[arg(short = 'o', long, value_name = "OP", default_value_t = ReduceOp::Sum, value_parser = parse_op)]
    op: ReduceOp,

    /// Whether the group allocates the buffers, which lets ranks that share memory reach them: 0 or 1
    #[arg(short = 'R', long, value_name = "0|1", default_value = "1", value_parser = parse_switch,
          action = clap::ArgAction::Set)]
    register: bool,

    /// Root of reduce, broadcast, gather and scatter
    #[arg(short = 'r', long, value_name = "RANK", default_value_t = 0)]
    root: u32,

    /// What is called: the group's operation on slices, or burn's collective API on tensors
    #[arg(long, value_enum, default_value_t = Level::Slice)]
    level: Level,

    /// Draw bandwidth and time over size, with the floor
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

#[derive(clap::Args, Clone)]
struct Common {
    /// How the ranks reach each other. Processes are those that a launcher started, such as `bonfire run` on several
    /// hosts, or else as many on this machine as --ranks says
    #[arg(long, value_enum, default_value_t = Transport::Local)]
    transport: Transport,

    /// Number of ranks
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1024))]
    ranks: u32,

    /// Which algorithms run which sizes, such as "native:0-65535;ring:65536-", instead of the default or what
    /// BONFIRE_ALGORITHMS says to processes: bonfire's documentation of Selection has the form
    #[arg(long, value_name = "TABLE")]
    algorithms: Option<Selection>,

    /// Print one JSON object per line instead of a table
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Level {
    Slice,
    #[cfg(unix)]
    Tensor,
}

/// Measures and returns the exit status.
pub fn run(args: &Args) -> u8 {
    let mut args = args.clone();
    if args.common.transport != Transport::Local {
        match ranks::launched() {
            Ok(ranks) => args.common.ranks = ranks.unwrap_or(args.common.ranks),
            Err(error) => {
                eprintln!("error: {error}");
                return 1;
            }
        }
    }
    let sizes = match args.sizes() {
        Ok(sizes) => sizes,
        Err(reason) => {
            eprintln!("error: {reason}");
            return 2;
        }
    };
    let common = args.common.clone();
    ranks::measure(&common, move |group| args.measure(group, &sizes)).unwrap_or_else(|error| {
        eprintln!("error: {} ranks over {}: {error}", common.ranks, common.transport);
        1
    })
}

impl Args {
    /// The sizes to measure, in bytes; or why these arguments cannot work.
    fn sizes(&self) -> Result<Vec<usize>, String> {
        let (name, ranks) = (self.operation.facts().name, self.common.ranks);
        if self.root >= ranks {
            return Err(format!("--root {} is no rank: give one from 0 to {}", self.root, ranks - 1));
        }
        if self.operation == Benchmark::SendRecv && ranks < 2 {
            return Err("send_recv needs a neighbour: give --ranks 2 or more".into());
        }
        #[cfg(unix)]
        if self.level == Level::Tensor {
            if (self.operation, self.common.transport) != (Benchmark::AllReduce, Transport::Local) {
                return Err("--level tensor is for all_reduce between threads: give --transport local".into());
            }
            if self.common.algorithms.is_some() {
                return Err(
                    "--level tensor: burn's collective API chooses its algorithms: leave --algorithms out".into()
                );
            }
            if tensors::element(self.dtype).is_none() {
                return Err(format!("--dtype {}: burn's collectives take f32, f64, f16 and bf16", self.dtype));
            }
        }
        let sizes = match self.operation {
            Benchmark::Gradients => vec![Gradients::elements() * DType::F32.size()],
            Benchmark::Barrier => vec![0],
            name => self.sizes.list(self.dtype.size() * name.parts(ranks as usize))?,
        };
        if let Some(file) = &self.plot {
            if sizes.len() < 2 {
                return Err(format!(
                    "--plot draws figures over sizes, and {name} would be measured at one: leave it out"
                ));
            }
            let directory = file.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
            if !directory.is_dir() {
                return Err(format!("--plot {}: {} is no directory", file.display(), directory.display()));
            }
        }
        // Each rank has an input and an output, and a third buffer where the transport or the check needs one.
        let need = sizes.iter().max().map_or(0, |largest| 3 * *largest as u128 * u128::from(ranks));
        match Machine::this().memory() {
            Some((_, available)) if need > u128::from(available) => Err(format!(
                "the largest size needs {} MiB on this machine, which has {} to spare: lower --max-bytes or --ranks",
                need >> 20,
                available >> 20
            )),
            _ => Ok(sizes),
        }
    }

    /// Measures as one rank. Gives the number of wrong elements over all ranks.
    fn measure(&self, group: &Group, sizes: &[usize]) -> Result<u64, RankError> {
        let facts = self.operation.facts();
        let gradients = self.operation == Benchmark::Gradients;
        let subject = Subject {
            facts,
            dtype: if gradients { DType::F32 } else { self.dtype },
            op: facts.reduces.then(|| if gradients { ReduceOp::Mean } else { self.op }.to_string()),
            root: facts.rooted.then_some(self.root as usize),
            level: self.level.to_possible_value().map_or(String::new(), |value| value.get_name().to_owned()),
            algorithms: self.called().map(|operation| group.algorithms(operation).to_string()),
            registered: self.register,
        };
        // Floors are measured while the other ranks sleep.
        let report = if group.rank() == 0 { Some(Report::begin(self, subject, sizes.len())?) } else { None };
        group.barrier()?;
        let progress = Progress { report, wrong: 0 };
        match self.dtype {
            _ if gradients => self.measure_gradients(group, progress),
            DType::F32 => self.measure_sizes::<f32>(group, sizes, progress),
            DType::F64 => self.measure_sizes::<f64>(group, sizes, progress),
            DType::F16 => self.measure_sizes::<f16>(group, sizes, progress),
            DType::BF16 => self.measure_sizes::<bf16>(group, sizes, progress),
            DType::I8 => self.measure_sizes::<i8>(group, sizes, progress),
            DType::I16 => self.measure_sizes::<i16>(group, sizes, progress),
            DType::I32 => self.measure_sizes::<i32>(group, sizes, progress),
            DType::I64 => self.measure_sizes::<i64>(group, sizes, progress),
            DType::U8 => self.measure_sizes::<u8>(group, sizes, progress),
            DType::U16 => self.measure_sizes::<u16>(group, sizes, progress),
            DType::U32 => self.measure_sizes::<u32>(group, sizes, progress),
            DType::U64 => self.measure_sizes::<u64>(group, sizes, progress),
        }
    }

    /// The group's operation whose table decides, if one does.
    fn called(&self) -> Option<Operation> {
        match self.operation {
            _ if self.level != Level::Slice => None,
            Benchmark::AllReduce | Benchmark::Gradients => Some(Operation::AllReduce),
            Benchmark::Reduce => Some(Operation::Reduce),
            Benchmark::Broadcast => Some(Operation::Broadcast),
            Benchmark::AllGather | Benchmark::AllGatherV => Some(Operation::AllGather),
            Benchmark::ReduceScatter | Benchmark::ReduceScatterV => Some(Operation::ReduceScatter),
            Benchmark::AllToAll => Some(Operation::AllToAll),
            Benchmark::Gather => Some(Operation::Gather),
            Benchmark::Scatter => Some(Operation::Scatter),
            Benchmark::Barrier => Some(Operation::Barrier),
            Benchmark::SendRecv | Benchmark::AllToAllV => None,
        }
    }

    fn measure_gradients(&self, group: &Group, mut progress: Progress) -> Result<u64, RankError> {
        let measured = measure_steps(group, gradients::STEPS, &mut Gradients::new(group)?)?;
        let count = Gradients::elements();
        progress.row(count * DType::F32.size(), count, measured, None)?;
        progress.end(self)
    }

    fn measure_sizes<T: Sample>(
        &self,
        group: &Group,
        sizes: &[usize],
        mut progress: Progress,
    ) -> Result<u64, RankError> {
        #[cfg(unix)]
        let peer = if self.level == Level::Tensor { Some(tensors::Peer::register(group)?) } else { None };
        for bytes in sizes {
            let count = bytes / size_of::<T>();
            let side = |in_place: bool| -> Result<Option<Measured>, RankError> {
                #[cfg(unix)]
                if let Some(peer) = &peer {
                    let mut work = tensors::Tensors::<T>::new(peer, group, self.op, count, in_place);
                    return measure(group, &self.counts, &mut work).map(Some);
                }
                let (root, kind) = (self.root as usize, [self.register, in_place]);
                let work = Slices::<T>::new(group, self.operation, self.op, root, count, kind)?;
                work.map(|mut work| measure(group, &self.counts, &mut work)).transpose()
            };
            if let Some(out_of_place) = side(false)? {
                // As nccl-tests do: the elements of a part where the size is that of all parts.
                let count = count / self.operation.parts(group.world_size());
                progress.row(*bytes, count, out_of_place, side(true)?)?;
            }
        }
        progress.end(self)
    }
}

/// What is known so far: on rank 0 with a report.
struct Progress {
    report: Option<Report>,
    wrong: u64,
}

impl Progress {
    fn row(&mut self, bytes: usize, count: usize, out: Measured, in_place: Option<Measured>) -> Result<(), RankError> {
        self.wrong += [Some(&out), in_place.as_ref()].into_iter().flatten().filter_map(|side| side.wrong).sum::<u64>();
        if let Some(report) = &mut self.report {
            let out_of_place = report.figures(bytes, out, false);
            let in_place = in_place.map(|measured| report.figures(bytes, measured, true));
            report.row(Row { bytes, count, out_of_place, in_place })?;
        }
        Ok(())
    }

    fn end(self, args: &Args) -> Result<u64, RankError> {
        if let Some(report) = &self.report {
            report.end()?;
            if let Some(file) = &args.plot {
                let Common { ranks, transport, .. } = &args.common;
                let title = format!("{}, {ranks} ranks, {transport}", args.operation.facts().name);
                plot::draw(report, &title, file).map_err(|error| RankError::Draw(file.clone(), error.to_string()))?;
            }
        }
        Ok(self.wrong)
    }
}

fn parse_dtype(text: &str) -> Result<DType, String> {
    let name = match text {
        "float" => "f32",
        "double" => "f64",
        "half" => "f16",
        "bfloat16" => "bf16",
        text => &text.replace("uint", "u").replace("int", "i"),
    };
    let all = || DType::ALL.into_iter();
    all().find(|dtype| dtype.to_string() == name).ok_or_else(|| format!("give one of {}", list(all())))
}

fn parse_switch(text: &str) -> Result<bool, String> {
    match text {
        "0" => Ok(false),
        "1" => Ok(true),
        _ => Err("give 0 or 1".into()),
    }
}

fn parse_op(text: &str) -> Result<ReduceOp, String> {
    let name = match text {
        "prod" => "product",
        "avg" => "mean",
        text => text,
    };
    let all = || ReduceOp::ALL.into_iter();
    all().find(|op| op.to_string() == name).ok_or_else(|| format!("give one of {}", list(all())))
}

fn list(all: impl Iterator<Item = impl ToString>) -> String {
    all.map(|one| one.to_string()).collect::<Vec<_>>().join(", ")
}

const LONG_HELP: &str = "\
Examples:
  bonfire perf all_reduce --transport tcp --ranks 4
  bonfire perf all_gather -b 1K -e 64M -f 2 -d f16
  bonfire perf all_reduce --sizes 4K,4100,1M --transport tcp --algorithms 'ring:0-'
  bonfire perf all_reduce --level tensor           # through burn's collective API, on Flex
  bonfire perf gradients --transport tcp --json    # a training step of ResNet-50
  bonfire perf all_reduce --transport shm -R 0     # buffers from anywhere
  bonfire perf reduce_scatter --plot reduce_scatter.svg
  bonfire run -n 2 --nodes 4 ... -- bonfire perf all_reduce --transport auto      # on several hosts

Sizes are rounded down to whole elements, where every rank has a part of them to as many
on every rank, but to one at least. Flags that an operation has no use for, such as a root for
all_reduce, change nothing.

What is timed:
  Results are checked first, on inputs whose reduction is exact in every order. Then calls run back
  to back: many together for the mean, and up to 1000 one by one for the JSON keys median_us, p99_us
  and min_us. Every figure is that of the rank where it is largest. gradients times single steps, and
  its time is their median. send_recv and barrier do not come in place.

Buffers:
  The group allocates them, as Group::allocate does for a program; --register 0 takes memory from
  anywhere instead. It makes a difference over shm, above 1 KiB: there ranks reach each other's
  buffers if they are the group's, and copy through shared memory if not. On other transports they
  are ordinary memory either way. gradients has those that DataParallel makes.

Floors:
  %floor says how much of the time this machine needs at least, as measured before the first size.
  Between ranks that reach each other's memory: the bytes that must be read and written, at the rate
  at which as many threads copy or add arrays as large; or the hand-over of one cache line. Over TCP:
  the bytes that each rank must send, at the rate of one stream on loopback; or one message of 8
  bytes. With auto there is none: what is between hosts is not known. Nothing in a floor waits for
  another rank, so 100 is out of reach; more means that something else ran while the floor was
  measured.

Exit status:
  0  every checked element was right
  1  wrong elements, or a rank failed
  2  bad arguments; nothing was measured";

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn sizes(line: &str) -> Result<Vec<usize>, String> {
        let line = ["perf"].into_iter().chain(line.split_whitespace());
        Cli::try_parse_from(line).map_err(|error| error.to_string())?.args.sizes()
    }

    #[test]
    fn flags_are_those_of_nccl_tests() {
        assert_eq!(sizes("all_reduce -b 8 -e 1K -f 8 -n 5 -w 1 -c 0 -d float -o prod -r 1").unwrap(), [8, 64, 512]);
        assert_eq!(sizes("all_reduce --min-bytes 1K --max-bytes 3K --step-bytes 1K").unwrap(), [1024, 2048, 3072]);
        assert_eq!(sizes("all_gather --ranks 3 -b 8 -e 100 -d f64").unwrap(), [24]);
        assert_eq!(sizes("all_reduce --sizes 4100,4K,1K").unwrap(), [4100, 4096, 1024]);
        assert_eq!(sizes("gradients").unwrap(), [102_228_128]);
        assert_eq!(sizes("barrier").unwrap(), [0]);
    }

    #[test]
    fn types_and_reductions_have_nccl_tests_names_too() {
        let types = [("half", DType::F16), ("int8", DType::I8), ("uint64", DType::U64), ("bf16", DType::BF16)];
        assert!(types.iter().all(|(name, dtype)| parse_dtype(name).as_ref() == Ok(dtype)));
        assert_eq!((parse_op("avg"), parse_op("max")), (Ok(ReduceOp::Mean), Ok(ReduceOp::Max)));
    }

    #[test]
    fn wrong_arguments_are_refused_with_the_remedy() {
        for (line, remedy) in [
            ("all_reduce -d f8", "one of f32, f64"),
            ("all_reduce -o xor", "one of sum, mean"),
            ("all_reduce -b 1X", "4K, 32M, 1G"),
            ("all_reduce -b 1M -e 1K", "swap them"),
            ("reduce -r 2", "from 0 to 1"),
            ("send_recv --ranks 1", "--ranks 2"),
            ("broadcast --level tensor", "all_reduce between threads"),
            ("all_reduce --level tensor --transport tcp", "all_reduce between threads"),
            ("all_reduce --level tensor -d i32", "f16 and bf16"),
            ("all_reduce --level tensor --algorithms ring:0-", "leave --algorithms out"),
            ("all_reduce --algorithms ring:1-", "no path for sizes from 0 to 0"),
            ("all_reduce --sizes 1K,", "4K, 32M, 1G"),
            ("all_reduce --sizes 1K -e 8", "cannot be used with"),
            ("all_gather --sizes 1K,4", "--sizes"),
            ("barrier --plot x.svg", "leave it out"),
            ("all_reduce --plot none/x.svg", "no directory"),
            ("all_reduce -f 1", "2.."),
            ("all_reduce -f 2 -i 8", "cannot be used with"),
        ] {
            let error = sizes(line).unwrap_err();
            assert!(error.contains(remedy), "{line}: {error}");
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn more_memory_than_there_is_is_refused() {
        assert!(sizes("all_reduce -e 8000000G").unwrap_err().contains("lower --max-bytes or --ranks"));
    }
}
