//! `bonfire perf`: measures collectives and checks their results.

mod args;
#[cfg(feature = "cuda")]
mod devices;
mod floors;
mod gradients;
mod operation;
mod oracle;
#[cfg(feature = "cuda")]
mod paths;
mod plot;
mod ranks;
mod report;
mod sizes;
mod slices;
mod step;
#[cfg(unix)]
mod tensors;
mod timing;

use bonfire::{DType, Group, ReduceOp};
use bonfire_core::internal::oracle::Sample;
use clap::{ArgMatches, FromArgMatches};
use half::{bf16, f16};

use args::{Args, Common, Level, Transport};
use gradients::Gradients;
use operation::Benchmark;
use report::{Report, Subject};
use slices::Slices;
use step::StepArgs;
use timing::{Measured, RankError, measure, measure_steps};

use crate::failure::Failure;
use crate::text::name;

/// A collective at many sizes, or a training step. A subcommand beside a required argument is more than clap derives.
pub enum Command {
    Collective(Box<Args>),
    Step(StepArgs),
}

const STEP: &str = "step";

impl clap::Args for Command {
    fn augment_args(command: clap::Command) -> clap::Command {
        let step = StepArgs::augment_args(clap::Command::new(STEP));
        let command = Args::augment_args(command).subcommand(step).disable_help_subcommand(true);
        command.args_conflicts_with_subcommands(true).subcommand_negates_reqs(true)
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Command {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        match matches.subcommand() {
            Some((STEP, matches)) => StepArgs::from_arg_matches(matches).map(Command::Step),
            _ => Args::from_arg_matches(matches).map(|args| Command::Collective(Box::new(args))),
        }
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Measures and returns the exit status.
pub fn run(command: Command) -> Result<u8, Failure> {
    match command {
        Command::Collective(args) => collective(*args),
        Command::Step(args) => step::run(&args),
    }
}

fn collective(mut args: Args) -> Result<u8, Failure> {
    let launched = match args.common.transport {
        Transport::Local => None,
        _ => ranks::launched().map_err(Failure::with(1))?,
    };
    args.common.ranks = launched.unwrap_or(args.common.ranks);
    let sizes = args.sizes().map_err(Failure::with(2))?;
    #[cfg(feature = "cuda")]
    if args.paths {
        return match launched {
            Some(_) => Err(Failure::with(2)("--paths starts the ranks itself: run it without a launcher".to_owned())),
            None => paths::compare(&args),
        };
    }
    ranks::measure(&args.common, launched.is_some(), |group| args.measure(group, &sizes))
}

/// Takes a size in bytes and in elements, and its measurements: out of place, then in place if there is such a form.
type RowFn<'a> = dyn FnMut(usize, usize, &[Measured]) -> Result<(), RankError> + 'a;

impl Args {
    /// Measures as one rank. Returns the number of wrong elements over all ranks.
    fn measure(&self, group: &Group, sizes: &[usize]) -> Result<u64, RankError> {
        // Rank 0 measures the floors while the other ranks wait at the barrier.
        let mut report = match group.rank() {
            0 => Some(Report::begin(&self.common, self.subject(group), sizes)?),
            _ => None,
        };
        group.barrier()?;
        let mut wrong = 0;
        let row: &mut RowFn = &mut |bytes, count, sides| {
            wrong += sides.iter().filter_map(|side| side.wrong).sum::<u64>();
            report.as_mut().map_or(Ok(()), |report| Ok(report.row(bytes, count, sides)?))
        };
        match self.dtype {
            _ if self.benchmark == Benchmark::Gradients => {
                let measured = measure_steps(group, gradients::STEPS, &mut Gradients::new(group)?)?;
                row(Gradients::elements() * DType::F32.size(), Gradients::elements(), &[measured])
            }
            DType::F32 => self.measure_sizes::<f32>(group, sizes, row),
            DType::F64 => self.measure_sizes::<f64>(group, sizes, row),
            DType::F16 => self.measure_sizes::<f16>(group, sizes, row),
            DType::BF16 => self.measure_sizes::<bf16>(group, sizes, row),
            DType::I8 => self.measure_sizes::<i8>(group, sizes, row),
            DType::I16 => self.measure_sizes::<i16>(group, sizes, row),
            DType::I32 => self.measure_sizes::<i32>(group, sizes, row),
            DType::I64 => self.measure_sizes::<i64>(group, sizes, row),
            DType::U8 => self.measure_sizes::<u8>(group, sizes, row),
            DType::U16 => self.measure_sizes::<u16>(group, sizes, row),
            DType::U32 => self.measure_sizes::<u32>(group, sizes, row),
            DType::U64 => self.measure_sizes::<u64>(group, sizes, row),
            other => Err(bonfire::Error::argument("perf", format!("{other} is not measured")).into()),
        }?;
        if let Some(report) = report {
            report.end()?;
            if let Some(file) = &self.plot {
                let Common { ranks, transport, .. } = &self.common;
                let title = format!("{}, {ranks} ranks, {}", name(&self.benchmark), name(transport));
                let drawn = plot::draw(&report.rows, &title, file);
                drawn.map_err(|error| RankError::Draw(file.clone(), error.to_string()))?;
            }
        }
        Ok(wrong)
    }

    fn subject(&self, group: &Group) -> Subject {
        let facts = self.benchmark.facts();
        let gradients = self.benchmark == Benchmark::Gradients;
        let (dtype, op) = if gradients { (DType::F32, ReduceOp::Mean) } else { (self.dtype, self.op) };
        let operation = facts.operation.filter(|_| self.level == Level::Slice);
        Subject {
            collective: name(&self.benchmark),
            transport: name(&self.common.transport),
            ranks: self.common.ranks,
            level: name(&self.level),
            algorithms: match self.common.transport.path() {
                None => operation.map(|operation| group.algorithms(operation).to_string()),
                path => path,
            },
            registered: self.register,
            dtype: dtype.to_string(),
            op: facts.reduces.then(|| op.to_string()),
            root: facts.rooted.then_some(self.root),
            facts,
        }
    }

    fn measure_sizes<T: Sample>(&self, group: &Group, sizes: &[usize], row: &mut RowFn) -> Result<(), RankError> {
        #[cfg(unix)]
        let peer = if self.level == Level::Tensor { Some(tensors::Peer::register(group)?) } else { None };
        #[cfg(feature = "cuda")]
        let device = (self.common.transport == Transport::Cuda).then(|| devices::Rank::new(group)).transpose()?;
        for bytes in sizes {
            let count = bytes / size_of::<T>();
            let side = |in_place: bool| -> Result<Option<Measured>, RankError> {
                #[cfg(unix)]
                if let Some(peer) = &peer {
                    let mut work = tensors::Tensors::<T>::new(peer, group, self.op, count, in_place);
                    return measure(group, &self.counts, &mut work).map(Some);
                }
                #[cfg(feature = "cuda")]
                if let Some(device) = &device {
                    let root = self.root as usize;
                    let work =
                        devices::Devices::<T>::new(device, group, self.benchmark, (self.op, root), count, in_place);
                    return work.map(|mut work| measure(group, &self.counts, &mut work)).transpose();
                }
                let (root, kind) = (self.root as usize, [self.register, in_place]);
                let work = Slices::<T>::new(group, self.benchmark, self.op, root, count, kind)?;
                work.map(|mut work| measure(group, &self.counts, &mut work)).transpose()
            };
            let sides: Vec<_> = [side(false)?, side(true)?].into_iter().flatten().collect();
            // As in nccl-tests, the count is that of one part where the size is that of all parts.
            row(*bytes, count / self.benchmark.facts().parts(group.world_size()), &sides)?;
        }
        Ok(())
    }
}
