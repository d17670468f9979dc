//! Compares the paths between CUDA devices: `--paths`. A process has one path, so each is measured by a process.

use std::env;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use serde::Deserialize;

use super::args::Args;
use super::operation::Benchmark;
use crate::failure::Failure;
use crate::stream::{complain, print};
use crate::text::name;

/// A path is taken from the one before only where it is faster by more than this: less is noise.
const MARGIN: f64 = 0.03;

/// The most bytes that a rank can push: `PUSH_BYTES` of `kernels/signal.cuh`.
const PUSH_BYTES: usize = 32 << 10;

/// What is used of a row that a process prints.
#[derive(Deserialize)]
struct Row {
    bytes: usize,
    time_us: f64,
    wrong: Option<u64>,
}

/// A path, and its time by size or why it has none.
struct Measured {
    path: &'static str,
    rows: Result<Vec<Row>, String>,
}

/// Measures every path and prints which is the fastest at which size. Returns the exit status. It is an error if fewer
/// than two can be measured.
pub fn compare(args: &Args) -> Result<u8, Failure> {
    let paths: &[&'static str] = match args.benchmark {
        Benchmark::AllReduce | Benchmark::Reduce => &["push", "one-shot", "two-shot", "nccl", "host"],
        _ => &["kernels", "nccl", "host"],
    };
    let mut all = Vec::new();
    for path in paths {
        complain(format_args!("measuring {path} ..."));
        all.push(Measured { path, rows: measure(path).map_err(Failure::with(1))? });
    }
    print(&format!("# {} on {} CUDA devices, in us\n", name(&args.benchmark), args.common.ranks))?;
    for Measured { path, rows } in &all {
        if let Err(why) = rows {
            print(&format!("# {path}: not measured: {why}\n"))?;
        }
    }
    let measured: Vec<_> = all.iter().filter_map(|one| Some((one.path, one.rows.as_ref().ok()?))).collect();
    if measured.len() < 2 {
        return Err(Failure::with(1)("fewer than two paths could be measured, for the reasons above".to_owned()));
    }
    let names: String = measured.iter().map(|(path, _)| format!("{path:>12}")).collect();
    print(&format!("{:>12}{names}  fastest\n", "bytes"))?;
    let mut fastest: Vec<(usize, &str)> = Vec::new();
    let mut wrong = 0;
    let sizes = measured.first().into_iter().flat_map(|(_, rows)| rows.iter()).map(|row| row.bytes);
    for (index, bytes) in sizes.enumerate() {
        let row = |(path, rows): &(&'static str, &Vec<Row>)| {
            // Larger ones are reduced in two shots.
            let skipped = *path == "push" && bytes > PUSH_BYTES;
            rows.get(index).filter(|_| !skipped).map(|row| (*path, row.time_us))
        };
        wrong += measured.iter().filter_map(|(_, rows)| rows.get(index)?.wrong).sum::<u64>();
        let times: Vec<_> = measured.iter().map(row).collect();
        let cells = times.iter().map(|time| time.map_or("-".into(), |(_, time)| format!("{time:.1}")));
        let best = best(&times.iter().flatten().copied().collect::<Vec<_>>(), fastest.last().map(|(_, path)| *path));
        let cells: String = cells.map(|cell: String| format!("{cell:>12}")).collect();
        print(&format!("{bytes:>12}{cells}  {best}\n"))?;
        fastest.push((bytes, best));
    }
    print(&format!("BONFIRE_CUDA='{}'\n", table(&fastest)))?;
    Ok(u8::from(wrong > 0))
}

/// The fastest of these paths, or `before` if it is not slower by more than [`MARGIN`].
fn best<'a>(times: &[(&'a str, f64)], before: Option<&str>) -> &'a str {
    let least = times.iter().min_by(|a, b| a.1.total_cmp(&b.1));
    let kept = times.iter().find(|(path, _)| Some(*path) == before);
    match (least, kept) {
        (Some(least), Some(kept)) if kept.1 <= least.1 * (1.0 + MARGIN) => kept.0,
        (Some(least), _) => least.0,
        (None, _) => "auto",
    }
}

/// The value of `BONFIRE_CUDA` that takes the fastest path: each up to the largest size at which it was.
fn table(fastest: &[(usize, &str)]) -> String {
    let runs: Vec<_> = fastest.chunk_by(|one, next| one.1 == next.1).collect();
    let mut begin = 0;
    let row = |(index, run): (usize, &&[(usize, &str)])| {
        let (last, path) = run[run.len() - 1];
        let row = match index + 1 == runs.len() {
            true => format!("{path}:{begin}-"),
            false => format!("{path}:{begin}-{last}"),
        };
        begin = last + 1;
        row
    };
    runs.iter().enumerate().map(row).collect::<Vec<_>>().join(";")
}

/// Runs this program with the same arguments on one path.
fn measure(path: &str) -> Result<Result<Vec<Row>, String>, String> {
    let failed = |error| format!("cannot measure {path}: {error}");
    let program = env::current_exe().map_err(failed)?;
    let arguments = env::args_os().skip(1).filter(|argument| argument != "--paths");
    let mut child = Command::new(program)
        .args(arguments)
        .arg("--json")
        .env("BONFIRE_CUDA", path)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let errors = child.stderr.take();
    let last_error = std::thread::spawn(move || {
        let lines = errors.into_iter().flat_map(|errors| BufReader::new(errors).lines().map_while(Result::ok));
        lines.filter(|line| !line.trim().is_empty()).last()
    });
    let lines = child.stdout.take().into_iter().flat_map(|out| BufReader::new(out).lines().map_while(Result::ok));
    let rows: Result<Vec<Row>, _> = lines.map(|line| serde_json::from_str(&line)).collect();
    let status = child.wait().map_err(failed)?;
    let last_error = last_error.join().ok().flatten();
    Ok(match rows {
        // Wrong elements are status 1 with rows.
        Ok(rows) if !rows.is_empty() => Ok(rows),
        Ok(_) => Err(last_error.unwrap_or_else(|| format!("its process ended with {status}"))),
        Err(error) => Err(format!("its process printed something else than rows: {error}")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_path_is_taken_up_to_the_largest_size_at_which_it_is_the_fastest() {
        let fastest = [(8, "push"), (1024, "push"), (65536, "one-shot"), (1 << 20, "nccl"), (1 << 21, "nccl")];
        assert_eq!(table(&fastest), "push:0-1024;one-shot:1025-65536;nccl:65537-");
        assert_eq!(table(&[(8, "host")]), "host:0-");
    }

    #[test]
    fn a_path_that_is_hardly_faster_is_not_taken() {
        let times = [("push", 10.0), ("nccl", 9.8)];
        assert_eq!([Some("push"), Some("nccl"), None].map(|before| best(&times, before)), ["push", "nccl", "nccl"]);
        assert_eq!(best(&[("push", 10.0), ("nccl", 9.0)], Some("push")), "nccl");
        assert_eq!(best(&[], None), "auto");
    }
}
