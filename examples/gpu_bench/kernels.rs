//! Benchmarks of the kernels alone, on one GPU and between GPUs. Times are between events on a GPU.

use bonfire::server::cuda::bench::{copy_bandwidth, seconds};
use bonfire::{Call, DType, Operation, ReduceOp};

use crate::Failure;
use crate::report::{Goal, Report};

pub const FORMS: [&str; 3] = ["push", "one-shot", "two-shot"];
/// Float types that the kernels compute with in different ways: as they are, in f32, and in two registers each.
const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F64];
/// Operations that only move bytes, of whatever element type.
const MOVES: [Operation; 5] =
    [Operation::AllGather, Operation::AllToAll, Operation::Broadcast, Operation::Gather, Operation::Scatter];
/// The push form's buffers hold no more.
const PUSH_BYTES: usize = 32 << 10;

/// How much is measured.
#[derive(Clone, Copy)]
pub struct Extent {
    /// The largest buffer of a rank, in bytes.
    pub largest: usize,
    /// Calls of a measurement of small buffers.
    pub calls: usize,
}

impl Extent {
    /// Returns how many calls of this size take about as long as all those of small ones.
    fn calls(self, bytes: usize) -> usize {
        (self.calls << 20).div_ceil(bytes.max(1 << 20)).max(5)
    }
}

/// A call with `bytes` bytes in the whole tensor.
fn call(operation: Operation, dtype: DType, bytes: usize) -> Call {
    let call = Call::new(operation, dtype, bytes / dtype.size());
    match operation {
        Operation::AllReduce | Operation::ReduceScatter => call.reducing(ReduceOp::Sum),
        Operation::Broadcast | Operation::Gather | Operation::Scatter => call.rooted(0),
        _ => call,
    }
}

pub fn all_reduce(dtype: DType, bytes: usize) -> Call {
    call(Operation::AllReduce, dtype, bytes)
}

/// Measures large buffers against a copy in the same round: the floor is to read and write once what the operation
/// must.
pub fn large(report: &mut Report, extent: Extent) {
    let bytes = extent.largest;
    let mib = bytes >> 20;
    let copied = || Ok::<f64, Failure>(copy_bandwidth(bytes)?);
    report.figure(format!("copy of {mib} MiB, read and written"), "GB/s", Goal::None, || Ok(copied()? / 1e9));
    let mut of_the_floor = |what: &str, call: Call, ranks: usize, goal| {
        // All ranks' reads and writes, in buffers.
        let buffers = match call.operation {
            Operation::AllReduce | Operation::AllToAll => 2 * ranks,
            // The ranks have parts of one.
            Operation::Gather | Operation::Scatter => 2,
            _ => ranks + 1,
        };
        let what = format!("{what} of {mib} MiB of {}, {ranks} ranks: of the floor", call.dtype);
        report.figure(what, "%", goal, || {
            let floor = (buffers * bytes) as f64 / copied()?;
            Ok(100.0 * floor / seconds(&call, ranks, 1, Some("two-shot"), extent.calls(bytes))?)
        });
    };
    for ranks in [2, 4] {
        for dtype in DTYPES {
            // Models train with the other two.
            let goal = if dtype == DType::F64 { Goal::None } else { Goal::AtLeast(80.0) };
            of_the_floor("two-shot all_reduce", all_reduce(dtype, bytes), ranks, goal);
            of_the_floor("reduce_scatter", call(Operation::ReduceScatter, dtype, bytes), ranks, Goal::None);
        }
        for operation in MOVES {
            of_the_floor(&operation.to_string(), call(operation, DType::F32, bytes), ranks, Goal::None);
        }
    }
}

/// Measures 8 KiB between two ranks.
pub fn small(report: &mut Report, extent: Extent) {
    let micros = |form| Ok(1e6 * seconds(&all_reduce(DType::F32, 8192), 2, 1, form, extent.calls)?);
    report.figure("all_reduce of 8 KiB, 2 ranks, kernels", "us", Goal::AtMost(10.0), || micros(None));
    for form in FORMS {
        report.figure(format!("  by {form}"), "us", Goal::None, || micros(Some(form)));
    }
}

/// Measures the kernels, element types and sizes for which `docs/measurements/gpu.md` predicts times: with all ranks on
/// one GPU, and between as many of the machine's GPUs as there are ranks.
pub fn predicted(report: &mut Report, extent: Extent, gpus: usize) {
    let mut figure = |what: &str, call: Call, (ranks, gpus): (usize, usize), form| {
        let place = if gpus == 1 { "on one GPU" } else { "between GPUs" };
        let what = format!("{what} of {}, {} bytes, {ranks} ranks {place}", call.dtype, call.bytes());
        let calls = extent.calls(call.bytes() * ranks / gpus);
        let micros = || Ok(1e6 * seconds(&call, ranks, gpus, form, calls)?);
        // GPUs need not be able to access each other's memory.
        if gpus == 1 {
            report.figure(what, "us", Goal::None, micros);
        } else {
            report.optional_figure(what, "us", micros);
        }
    };
    for bytes in [8 << 10, 256 << 10, 8 << 20, 256 << 20].into_iter().filter(|bytes| *bytes <= extent.largest) {
        for place in [(2, 1), (4, 1), (2, 2), (4, 4), (8, 8)].into_iter().filter(|place| place.1 <= gpus) {
            for dtype in DTYPES {
                for form in FORMS.into_iter().filter(|form| *form != "push" || bytes <= PUSH_BYTES) {
                    figure(form, all_reduce(dtype, bytes), place, Some(form));
                }
                figure("reduce_scatter", call(Operation::ReduceScatter, dtype, bytes), place, None);
            }
            for operation in MOVES {
                figure(&operation.to_string(), call(operation, DType::F32, bytes), place, None);
            }
        }
    }
}

/// Measures every form at every size, to choose between them.
pub fn sizes(report: &mut Report, extent: Extent) {
    for ranks in [2, 4, 8] {
        let mut bytes = 512;
        while bytes <= extent.largest {
            for form in FORMS.into_iter().filter(|form| *form != "push" || bytes <= PUSH_BYTES) {
                let call = all_reduce(DType::F32, bytes);
                let calls = extent.calls(bytes * ranks);
                let micros = || Ok(1e6 * seconds(&call, ranks, 1, Some(form), calls)?);
                report.figure(format!("{bytes} bytes, {ranks} ranks, {form}"), "us", Goal::None, micros);
            }
            bytes *= 4;
        }
    }
}
