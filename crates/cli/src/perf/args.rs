//! Command line arguments of `bonfire perf`.

use std::path::{Path, PathBuf};

use bonfire::{DType, ReduceOp, Selection};
use clap::ValueEnum;
use clap::builder::{PossibleValuesParser, TypedValueParser};

use super::gradients::Gradients;
use super::operation::Benchmark;
use super::sizes::Sizes;
#[cfg(unix)]
use super::tensors;
use super::timing::Counts;
use crate::machine::Machine;
use crate::text::{list, name};

/// Measure a collective over a transport and check its results, or measure a training step
///
/// Prints one line per size, with figures out of place and in place: the time of a call; algbw, the size divided by
/// the time; busbw, algbw times a factor that makes it comparable with the hardware's bandwidth for any operation and
/// number of ranks; the number of wrong elements over all ranks; and the floor, the least time that this machine needs,
/// in percent of the time. algbw and busbw are defined as in nccl-tests; 1 GB/s is 1e9 bytes per second.
#[derive(clap::Args, Clone)]
#[command(arg_required_else_help = true, after_long_help = LONG_HELP,
          after_help = "See `bonfire perf --help` for examples and the meaning of the figures.")]
pub struct Args {
    /// Operation to measure
    #[arg(value_enum, value_name = "OPERATION")]
    pub benchmark: Benchmark,

    #[command(flatten)]
    pub common: Common,

    #[command(flatten)]
    sizes: Sizes,

    #[command(flatten)]
    pub counts: Counts,

    /// Element type: f32, f64, f16, bf16, i8 to i64 or u8 to u64; nccl-tests' names work too
    #[arg(short = 'd', long, value_name = "TYPE", default_value_t = DType::F32, value_parser = parse_dtype)]
    pub dtype: DType,

    /// Reduction: sum, mean, max, min or product; nccl-tests' names work too
    #[arg(short = 'o', long, value_name = "OP", default_value_t = ReduceOp::Sum, value_parser = parse_op)]
    pub op: ReduceOp,

    /// Use buffers that the group allocates, which peers in shared memory access directly: 0 or 1
    #[arg(short = 'R', long, value_name = "0|1", default_value = "1", action = clap::ArgAction::Set,
          hide_possible_values = true, value_parser = PossibleValuesParser::new(["0", "1"]).map(|value| value == "1"))]
    pub register: bool,

    /// Root of reduce, broadcast, gather and scatter
    #[arg(short = 'r', long, value_name = "RANK", default_value_t = 0)]
    pub root: u32,

    /// API to measure: the group's operations on slices, or burn's collective API on tensors (all_reduce between
    /// threads)
    #[arg(long, value_enum, default_value_t = Level::Slice)]
    pub level: Level,

    /// With --transport cuda: measure by every path, and print the fastest by size as a value for BONFIRE_CUDA
    #[cfg(feature = "cuda")]
    #[arg(long, conflicts_with_all = ["plot", "json"])]
    pub paths: bool,

    /// Plot bandwidth and time over size, with the floor
    #[arg(long, value_name = "FILE.svg")]
    pub plot: Option<PathBuf>,
}

#[derive(clap::Args, Clone)]
pub struct Common {
    /// Transport between the ranks. With processes: those that a launcher has started, such as `bonfire run` on several
    /// hosts, or else --ranks processes on this machine
    #[arg(long, value_enum, default_value_t = Transport::Local)]
    pub transport: Transport,

    /// Number of ranks; if a launcher has started them, its number counts instead
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub ranks: u32,

    /// Algorithms by size, such as "native:0-65535;ring:65536-", instead of the default or, for processes, of
    /// BONFIRE_ALGORITHMS; the format is in bonfire's documentation of Selection
    #[arg(long, value_name = "TABLE")]
    pub algorithms: Option<Selection>,

    /// Print one JSON object per line instead of a table
    #[arg(long)]
    pub json: bool,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub enum Transport {
    /// Threads of one process
    Local,
    /// Processes over TCP; over loopback if this program starts them
    Tcp,
    /// Processes of one host in shared memory
    Shm,
    /// Processes in shared memory on a host and over TCP between hosts
    Auto,
    /// Processes that MPI's launcher started, over MPI
    #[cfg(feature = "mpi")]
    Mpi,
    /// The same, with MPI's blocking calls
    #[cfg(feature = "mpi")]
    MpiBlocking,
    /// CUDA devices, each with a thread of this process, or with a process if a launcher started them: by the path that
    /// BONFIRE_CUDA names
    #[cfg(feature = "cuda")]
    Cuda,
}

impl Transport {
    /// Whether the ranks are threads, unless a launcher started them.
    pub fn has_threads(self) -> bool {
        #[cfg(feature = "cuda")]
        if self == Transport::Cuda {
            return true;
        }
        self == Transport::Local
    }

    /// Returns the requested path between devices, in place of algorithms.
    pub fn path(self) -> Option<String> {
        #[cfg(feature = "cuda")]
        if self == Transport::Cuda {
            let path = std::env::var("BONFIRE_CUDA").unwrap_or_else(|_| "auto".into());
            return Some(format!("BONFIRE_CUDA={path}"));
        }
        None
    }
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub enum Level {
    Slice,
    #[cfg(unix)]
    Tensor,
}

impl Args {
    /// Returns the sizes to measure, in bytes, or why these arguments cannot work.
    pub fn sizes(&self) -> Result<Vec<usize>, String> {
        let (facts, ranks) = (self.benchmark.facts(), self.common.ranks);
        if self.root >= ranks {
            return Err(format!("--root {} is not a rank: give one from 0 to {}", self.root, ranks - 1));
        }
        if self.benchmark == Benchmark::SendRecv && ranks < 2 {
            return Err("send_recv needs a neighbour: give --ranks 2 or more".into());
        }
        #[cfg(feature = "cuda")]
        self.check_devices()?;
        #[cfg(unix)]
        if self.level == Level::Tensor {
            if (self.benchmark, self.common.transport) != (Benchmark::AllReduce, Transport::Local) {
                return Err("--level tensor is for all_reduce between threads: give --transport local".into());
            }
            if self.common.algorithms.is_some() {
                let reason = "burn's collective API chooses its algorithms: leave --algorithms out";
                return Err(format!("--level tensor: {reason}"));
            }
            if tensors::element(self.dtype).is_none() {
                return Err(format!("--dtype {}: burn's collectives take f32, f64, f16 and bf16", self.dtype));
            }
        }
        let sizes = match self.benchmark {
            Benchmark::Gradients => vec![Gradients::elements() * DType::F32.size()],
            Benchmark::Barrier => vec![0],
            _ => self.sizes.list(self.dtype.size() * facts.parts(ranks as usize))?,
        };
        if let Some(file) = &self.plot {
            if sizes.len() < 2 {
                let name = name(&self.benchmark);
                return Err(format!("--plot needs several sizes, and {name} would be measured at one: leave it out"));
            }
            let directory = file.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
            if !directory.is_dir() {
                return Err(format!("--plot {}: {} is not a directory", file.display(), directory.display()));
            }
        }
        // Each rank has an input and an output, and a third buffer where the transport or the check needs one.
        let need = sizes.iter().max().map_or(0, |largest| 3 * *largest as u128 * u128::from(ranks));
        match Machine::this().memory() {
            Some((_, available)) if need > u128::from(available) => Err(format!(
                "the largest size needs {} MiB on this machine, but {} MiB are free: lower --max-bytes or --ranks",
                need >> 20,
                available >> 20
            )),
            _ => Ok(sizes),
        }
    }
}

#[cfg(feature = "cuda")]
impl Args {
    fn check_devices(&self) -> Result<(), String> {
        if self.common.transport != Transport::Cuda {
            return if self.paths { Err("--paths is for devices: give --transport cuda".into()) } else { Ok(()) };
        }
        if !super::devices::measures(self.benchmark) {
            let name = name(&self.benchmark);
            return Err(format!("{name} has no form on devices: give another operation, or --transport local"));
        }
        match &self.common.algorithms {
            Some(_) => Err("--transport cuda: BONFIRE_CUDA chooses the path: leave --algorithms out".into()),
            None => Ok(()),
        }
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
    named(DType::ALL, name)
}

fn parse_op(text: &str) -> Result<ReduceOp, String> {
    let name = match text {
        "prod" => "product",
        "avg" => "mean",
        text => text,
    };
    named(ReduceOp::ALL, name)
}

fn named<T: ToString + Copy>(all: &[T], name: &str) -> Result<T, String> {
    let names = list(all);
    all.iter().copied().find(|one| one.to_string() == name).ok_or_else(|| format!("give one of {names}"))
}

const LONG_HELP: &str = "\
Examples:
  bonfire perf all_reduce --transport tcp --ranks 4
  bonfire perf all_gather -b 1K -e 64M -f 2 -d f16
  bonfire perf all_reduce --sizes 4K,4100,1M --transport tcp --algorithms 'ring:0-'
  bonfire perf all_reduce --level tensor           # through burn's collective API, on Flex
  bonfire perf gradients --transport tcp --json    # a training step of ResNet-50
  bonfire perf step --transport tcp                # how much of the exchange a backward pass hides
  bonfire perf all_reduce --transport shm -R 0     # buffers in ordinary memory
  bonfire perf reduce_scatter --plot reduce_scatter.svg
  bonfire perf all_reduce --transport cuda --paths # GPUs: which path is the fastest at which size
  bonfire run -n 2 --nodes 4 ... -- bonfire perf all_reduce --transport auto      # on several hosts

Sizes are rounded down to whole elements, but at least one; for operations on parts, to the same
number of elements in each rank's part. Flags that an operation does not use, such as --root for
all_reduce, have no effect.

What is timed:
  Results are checked first, on inputs whose reduction is exact in every order. Then calls run back
  to back: many timed together for the mean, and up to 1000 timed one by one for the JSON keys
  median_us, p99_us and min_us. Each figure is the largest over all ranks. gradients times single
  steps and reports their median. It has no in-place form, nor have send_recv, barrier and the
  operations named _v.

Buffers:
  By default the group allocates them, with Group::allocate; --register 0 uses ordinary memory. This
  matters over shm, above 1 KiB: peers access buffers of the group directly, and copy other buffers
  through shared memory. On other transports all buffers are ordinary memory. gradients uses the
  buffers of DataParallel.

Floors:
  The floor is the least time that this machine needs, as measured before the first size; %floor is
  the floor in percent of the time. Between ranks that share memory: the bytes that must be read and
  written, at the rate at which as many threads copy or add arrays of that size; or the hand-off of
  one cache line. Over TCP: the bytes that each rank must send, at the rate of one loopback stream;
  or one message of 8 bytes. With auto there is no floor, as the links between hosts are unknown. A
  floor includes no waiting for other ranks, so 100 is out of reach; >100 means that other programs
  ran while the floor was measured, which is then no bound.

Exit status:
  0  every checked element was correct
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
    fn nccl_tests_names_of_types_and_reductions_are_accepted() {
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
            ("all_reduce --plot none/x.svg", "not a directory"),
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
