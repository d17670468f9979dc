//! What settings change: operations on tensors by each path, and computation beside all-reduces. A process has one
//! setting, so each is measured by a process of its own.

use std::ops::Range;
use std::process::Command;
use std::time::Instant;

use bonfire::tensor::operation;
use bonfire::{Cuda, CudaDevice, Error, Group};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor, TensorData};
use clap::ValueEnum;

use crate::Failure;
use crate::api::slowest;
use crate::kernels::Extent;
use crate::report::Report;

type B = Cuda;

const MESSAGES: [usize; 7] = [8, 512, 8 << 10, 128 << 10, 2 << 20, 32 << 20, 256 << 20];

/// Ranks with parts of unequal sizes.
const RANKS: usize = 8;
/// The longest part, over the mean.
const LONGEST: [usize; 3] = [1, 2, 4];
const WHOLES: [usize; 2] = [1 << 20, 64 << 20];

/// What a process measures for another one.
#[derive(Clone, Copy, ValueEnum)]
pub enum Measured {
    #[cfg(feature = "nccl")]
    GroupCalls,
    Messages,
    Unequal,
    Overlap,
    Order,
    Containers,
}

impl Measured {
    /// Prints the seconds of each call; of `Overlap` and `Order`, of so many rounds.
    pub fn print(self, extent: Extent, rounds: usize) -> Result<(), Failure> {
        let all = match self {
            #[cfg(feature = "nccl")]
            Measured::GroupCalls => crate::nccl::group_seconds(extent.calls)?,
            Measured::Messages => {
                let message = |bytes: usize| slowest(Group::threads(2)?, |group| message(&group, bytes, extent.calls));
                up_to(extent.largest, &MESSAGES).map(message).collect::<Result<Vec<_>, _>>()?
            }
            Measured::Unequal => unequal_parts(extent)?,
            Measured::Overlap => crate::api::overlap_seconds(extent.largest, rounds)?,
            Measured::Order => crate::processes::order_seconds(extent, rounds)?,
            Measured::Containers => crate::processes::container_seconds(extent)?,
        };
        all.iter().for_each(|seconds| println!("{seconds:e}"));
        Ok(())
    }

    /// Returns the seconds that a process prints with this setting of `BONFIRE_CUDA`.
    pub fn by(self, path: &str, extent: Extent) -> Result<Vec<f64>, Failure> {
        self.with(("BONFIRE_CUDA", path), extent, 1)
    }

    /// Returns the seconds that a process prints with this variable.
    pub fn with(self, (variable, value): (&str, &str), extent: Extent, rounds: usize) -> Result<Vec<f64>, Failure> {
        let ended = self.command(extent, rounds)?.env(variable, value).output()?;
        if !ended.status.success() {
            return Err(String::from_utf8_lossy(&ended.stderr).trim().to_owned().into());
        }
        String::from_utf8(ended.stdout)?.lines().map(|line| Ok(line.parse()?)).collect()
    }

    /// Returns the command of a process that prints the seconds.
    pub fn command(self, extent: Extent, rounds: usize) -> Result<Command, Failure> {
        let mut command = Command::new(std::env::current_exe()?);
        let name = self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
        let numbers = [extent.largest >> 20, extent.calls, rounds].map(|number| number.to_string());
        let [largest, calls, rounds] = &numbers;
        command.args(["--measured", &name, "--largest", largest, "--calls", calls, "--rounds", rounds]);
        Ok(command)
    }
}

/// Reports what processes print, in microseconds.
fn report_all(report: &mut Report, measured: Measured, extent: Extent, names: &[String]) {
    for path in ["kernels", "host"] {
        let micros = |seconds: Vec<f64>| -> Vec<f64> { seconds.into_iter().map(|seconds| 1e6 * seconds).collect() };
        let rounds = (0..report.rounds()).map(|_| measured.by(path, extent).map(micros)).collect();
        report.figures(names.iter().map(|name| format!("{name}, {path}")), "us", &rounds);
    }
}

/// Measures a message between two devices of a process, half of the time there and back.
pub fn messages(report: &mut Report, extent: Extent) {
    let names: Vec<_> = up_to(extent.largest, &MESSAGES).map(|bytes| format!("a message of {bytes} bytes")).collect();
    report_all(report, Measured::Messages, extent, &names);
}

/// Measures operations on parts of which one is longer than the others.
pub fn unequal(report: &mut Report, extent: Extent) {
    report_all(report, Measured::Unequal, extent, &unequal_names(extent.largest));
}

fn unequal_names(largest: usize) -> Vec<String> {
    let names = |whole: usize| {
        LONGEST.map(|longest| {
            let what = format!("{} MiB, {RANKS} ranks, the longest part {longest} times the mean", whole >> 20);
            ["all_gather_v", "all_to_all_v"].map(|operation| format!("{operation} of {what}"))
        })
    };
    up_to(largest, &WHOLES).flat_map(names).flatten().collect()
}

/// The sizes up to the largest one.
fn up_to(largest: usize, sizes: &[usize]) -> impl Iterator<Item = usize> {
    sizes.iter().copied().filter(move |bytes| *bytes <= largest)
}

/// Returns how many calls of this size take about as long as all those of small ones.
fn calls_of(bytes: usize, calls: usize) -> usize {
    ((calls << 16) / bytes.max(1 << 16)).max(5)
}

fn device(group: &Group) -> CudaDevice {
    CudaDevice::new(Default::default(), group.rank() as u8)
}

/// Returns the seconds of one of `calls` calls, which all use this device.
fn seconds(
    group: &Group,
    device: &CudaDevice,
    calls: usize,
    call: impl Fn() -> Result<(), Error>,
) -> Result<f64, Failure> {
    let run = |calls: usize| -> Result<(), Failure> {
        (0..calls).try_for_each(|_| call())?;
        Ok(B::sync(device)?)
    };
    // The first calls find and load their kernels.
    run(3)?;
    group.barrier()?;
    let clock = Instant::now();
    run(calls)?;
    Ok(clock.elapsed().as_secs_f64() / calls as f64)
}

/// Some of the elements of a rank, which differ from those of the others.
fn elements(rank: usize, range: Range<usize>) -> impl Iterator<Item = f32> {
    range.map(move |i| ((31 * i + rank) % 1009) as f32)
}

fn tensor(elements: impl Iterator<Item = f32>, device: &CudaDevice) -> Tensor<B, 1> {
    let elements: Vec<f32> = elements.collect();
    let count = elements.len();
    Tensor::from_data(TensorData::new(elements, [count]), device)
}

/// It is an error if the result of a call has other elements.
fn check(result: Tensor<B, 1>, expected: impl Iterator<Item = f32>) -> Result<(), Failure> {
    let bytes = 4 * result.dims()[0];
    if result.into_data().iter::<f32>().eq(expected) { Ok(()) } else { Err(format!("{bytes} bytes are wrong").into()) }
}

/// Returns the seconds of a message, of a rank that sends one and gets it back.
fn message(group: &Group, bytes: usize, calls: usize) -> Result<f64, Failure> {
    let (device, other, sent) = (device(group), 1 - group.rank(), || elements(0, 0..bytes / 4));
    let tensor = tensor(sent(), &device);
    let there_and_back = || {
        if group.rank() == 0 {
            operation::send(tensor.clone(), other, group)?;
        }
        let received: Tensor<B, 1> = operation::recv(tensor.dims(), other, (&device, DType::F32), group)?;
        if group.rank() == 1 {
            operation::send(received.clone(), other, group)?;
        }
        Ok(received)
    };
    let seconds = seconds(group, &device, calls_of(bytes, calls), || there_and_back().map(drop))? / 2.0;
    check(there_and_back()?, sent())?;
    Ok(seconds)
}

/// Returns the seconds of each operation, in the order of `unequal_names`.
fn unequal_parts(extent: Extent) -> Result<Vec<f64>, Failure> {
    let mut all = Vec::new();
    for whole in up_to(extent.largest, &WHOLES) {
        for longest in LONGEST {
            let (sizes, calls) = (sizes(whole / 4, longest), calls_of(whole, extent.calls));
            all.push(slowest(Group::threads(RANKS)?, |group| {
                let (device, own) = (device(&group), sizes[group.rank()]);
                let part = tensor(elements(group.rank(), 0..own), &device);
                let gather = || operation::all_gather_v(part.clone(), 0, Some(&sizes), &group);
                let seconds = seconds(&group, &device, calls, || gather().map(drop))?;
                check(gather()?, (0..RANKS).flat_map(|rank| elements(rank, 0..sizes[rank])))?;
                Ok(seconds)
            })?);
            all.push(slowest(Group::threads(RANKS)?, |group| {
                let (device, own) = (device(&group), sizes[group.rank()]);
                let parts = tensor(elements(group.rank(), 0..sizes.iter().sum()), &device);
                // Every rank sends most to the first one.
                let received = [own; RANKS];
                let exchange = || operation::all_to_all_v(parts.clone(), 0, &sizes, Some(&received), &group);
                let seconds = seconds(&group, &device, calls, || exchange().map(drop))?;
                let start = sizes[..group.rank()].iter().sum();
                check(exchange()?, (0..RANKS).flat_map(|rank| elements(rank, start..start + own)))?;
                Ok(seconds)
            })?);
        }
    }
    Ok(all)
}

/// The lengths of all parts of `whole` elements: the first is so many times the mean.
fn sizes(whole: usize, longest: usize) -> [usize; RANKS] {
    let first = whole / RANKS * longest;
    std::array::from_fn(|rank| if rank == 0 { first } else { (whole - first) / (RANKS - 1) })
}
