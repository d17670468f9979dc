//! `bonfire trace`: the traces of a job's ranks, read together.

mod diagnosis;
#[cfg(test)]
mod fuzz;
mod pace;
mod report;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use bonfire::trace::Trace;
use serde_json::json;

use crate::failure::{Failure, print};
use diagnosis::Diagnosis;

/// Say what ranks did last: which is missing, who disagrees, who is slow
///
/// Reads the traces that ranks write when their group fails or they are interrupted, where BONFIRE_TRACE
/// names a folder, or that a program writes with Group::write_trace.
#[derive(clap::Args)]
#[command(after_help = "Try `bonfire trace --help` for what is compared, examples and exit statuses.",
          after_long_help = LONG_HELP)]
pub struct Args {
    /// Traces, or folders with files named trace-*.json
    #[arg(required = true, value_name = "FILE|FOLDER")]
    paths: Vec<PathBuf>,

    /// How many of the last operations to show
    #[arg(long, value_name = "N", default_value_t = 12)]
    last: usize,

    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

const LONG_HELP: &str = "\
What is compared:
  missing    The first operation that some rank has not done is where the job stands. A rank is
             missing there if it has no trace, if its last call comes before that operation, or
             if it called only after the others had given up.
  disagree   The calls at each number of the group's sequence that several traces still hold: kind,
             element type, count, reduction, root. Also the two sides of each message.
  slow       When ranks began the same operation, on one host only: clocks of hosts differ. A rank
             that comes last makes the others wait for as long as it comes after the last but one.
             `waited` is how long a rank was in its operations: it needs no common clock, and the
             rank that others wait for has the least. When an operation was done is known to some
             milliseconds only, as said below the table, so it tells of longer waits only.
  Operations are in a trace from the moment in which their turn comes, the last 1024 of them.

Examples:
  Four ranks whose traces are read if they fail, or hang and are ended with Ctrl-C:
    BONFIRE_TRACE=traces bonfire run -n 4 -- ./train
    bonfire trace traces
  Traces of several machines, copied to one:
    bonfire trace node0/ node1/ --last 40

Exit status:
  0  every rank has a trace, and nothing is unfinished, failed or called differently
  1  something is, and was printed
  2  bad arguments, a file that is no trace, or none in a folder";

/// Reads, prints, and returns the exit status.
pub fn run(args: &Args) -> Result<u8, Failure> {
    let groups = read(&args.paths).map_err(Failure::with(2))?;
    print(&if args.json {
        let objects: Vec<_> = groups.iter().map(|group| report::object(group, args.last)).collect();
        format!("{}\n", json!({ "groups": objects }))
    } else {
        groups.iter().map(|group| report::text(group, args.last)).collect::<Vec<_>>().join("\n")
    })?;
    Ok(u8::from(!groups.iter().all(Diagnosis::is_well)))
}

/// The groups of all traces in these files and folders.
fn read(paths: &[PathBuf]) -> Result<Vec<Diagnosis>, String> {
    let mut files = Vec::new();
    for path in paths {
        if path.is_dir() { files.extend(list(path)?) } else { files.push(path.clone()) }
    }
    files.sort();
    files.dedup();
    let mut groups: BTreeMap<_, BTreeMap<usize, (PathBuf, Trace)>> = BTreeMap::new();
    for file in files {
        let trace = Trace::read(&file).map(tidy).map_err(|error| error.to_string())?;
        let ranks = groups.entry((trace.group.clone(), trace.world_size)).or_default();
        if let Some((other, _)) = ranks.get(&trace.rank) {
            let (one, other) = (other.display(), file.display());
            return Err(format!(
                "{one} and {other} are both traces of rank {} of one group: give one of them",
                trace.rank
            ));
        }
        ranks.insert(trace.rank, (file, trace));
    }
    Ok(groups
        .into_values()
        .map(|ranks| Diagnosis::new(ranks.into_values().map(|(_, trace)| trace).collect()))
        .collect())
}

/// Texts in a trace are printed: they must not steer the terminal.
fn tidy(mut trace: Trace) -> Trace {
    let sites = trace.operations.iter_mut().map(|record| &mut record.at);
    let optional = trace.group.iter_mut().chain(&mut trace.failure);
    for text in [&mut trace.host, &mut trace.clock].into_iter().chain(optional).chain(sites) {
        if text.contains(char::is_control) {
            *text = text.replace(char::is_control, "?");
        }
    }
    trace
}

/// The traces in a folder, by their names.
fn list(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let failed = |error: io::Error| format!("reading the folder {}: {error}", folder.display());
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with("trace-") && name.ends_with(".json") {
            files.push(path);
        }
    }
    if files.is_empty() {
        return Err(format!(
            "{} has no traces (trace-*.json): ranks write them when their group fails or they are interrupted, if \
             BONFIRE_TRACE named this folder when they started",
            folder.display()
        ));
    }
    Ok(files)
}
