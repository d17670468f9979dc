//! Benchmarks of the kernels alone, each rank on its own stream, all on one GPU.

use bonfire::server::cuda::bench::{all_reduce_seconds, copy_bandwidth};

use crate::Failure;
use crate::report::{Goal, Report};

const FORMS: [&str; 3] = ["push", "one-shot", "two-shot"];

/// Returns how many calls of this size take about as long as a thousand small ones.
fn calls(bytes: usize) -> usize {
    ((1 << 30) / bytes.max(1 << 20)).clamp(5, 1000)
}

/// Measures large buffers against a copy in the same round: the floor is to read and write every rank's bytes once.
pub fn large(report: &mut Report, bytes: usize) {
    let mib = bytes >> 20;
    let copied = || Ok::<f64, Failure>(copy_bandwidth(bytes)?);
    report.figure(format!("copy of {mib} MiB, read and written"), "GB/s", Goal::None, || Ok(copied()? / 1e9));
    for ranks in [2, 4] {
        let what = format!("two-shot all_reduce of {mib} MiB, {ranks} ranks: of the floor");
        report.figure(what, "%", Goal::AtLeast(80.0), || {
            let floor = 2.0 * (ranks * bytes) as f64 / copied()?;
            Ok(100.0 * floor / all_reduce_seconds(ranks, bytes, Some("two-shot"), calls(bytes))?)
        });
    }
}

/// Measures 8 KiB between two ranks, and small sizes against NCCL if its library supports two ranks on a GPU.
pub fn small(report: &mut Report) {
    let seconds = |form| Ok(1e6 * all_reduce_seconds(2, 8192, form, 1000)?);
    report.figure("all_reduce of 8 KiB, 2 ranks, kernels", "us", Goal::AtMost(10.0), || seconds(None));
    for form in FORMS {
        report.figure(format!("  by {form}"), "us", Goal::None, || seconds(Some(form)));
    }
    #[cfg(feature = "nccl")]
    for bytes in [8, 512, 8 << 10, 32 << 10, 128 << 10, 256 << 10] {
        report.optional_figure(format!("NCCL's time over ours, {bytes} bytes, 2 ranks"), "times", || {
            let own = all_reduce_seconds(2, bytes, None, 1000)?;
            Ok(crate::nccl::all_reduce_seconds(2, bytes, 1000)? / own)
        });
    }
}

/// Measures every form at every size, to choose between them.
pub fn sizes(report: &mut Report, largest: usize) {
    for ranks in [2, 4, 8] {
        let mut bytes = 512;
        while bytes <= largest {
            for form in FORMS {
                // The push form's buffers hold no more.
                if form == "push" && bytes > 32 << 10 {
                    continue;
                }
                let what = format!("{bytes} bytes, {ranks} ranks, {form}");
                let calls = calls(bytes * ranks);
                report.figure(
                    what,
                    "us",
                    Goal::None,
                    || Ok(1e6 * all_reduce_seconds(ranks, bytes, Some(form), calls)?),
                );
            }
            bytes *= 4;
        }
    }
}
