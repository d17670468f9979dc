//! `bonfire trace`: diagnoses a job from the traces of its ranks.

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

use crate::failure::Failure;
use crate::stream::print;
use diagnosis::Diagnosis;

/// Diagnose a failure or hang from traces: missing ranks, mismatched calls, stragglers
///
/// If BONFIRE_TRACE names a folder, ranks write their traces to it when their group fails or they are interrupted. A
/// program can also write them with Group::write_trace.
#[derive(clap::Args)]
#[command(after_help = "See `bonfire trace --help` for what is compared, examples and exit statuses.",
          after_long_help = LONG_HELP)]
pub struct Args {
    /// Traces, or folders with files named trace-*.json
    #[arg(required = true, value_name = "FILE|FOLDER")]
    paths: Vec<PathBuf>,

    /// Number of last operations to show
    #[arg(long, value_name = "N", default_value_t = 12)]
    last: usize,

    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

const LONG_HELP: &str = "\
What is compared:
  where      Where in the program each rank was when its trace was taken. Of a rank without a trace, what it
             has told a rank that waited for it until its deadline.
  missing    The job is stuck at the first operation that some rank has not completed. A rank is
             missing there if it has no trace, if its last call precedes that operation, or if it
             called the operation only after it had failed on another rank of its host.
  disagree   The calls at each number in the group's sequence that several traces contain: kind,
             element type, count, reduction, root. Also the two sides of each message.
  slow       The times at which ranks began the same operation, on one host only, because the clocks
             of hosts differ. The last rank makes the others wait from when the last but one began.
             Reported from 5 % of the time and 10 ms in all: less happens by chance, as at the start.
             `waited` is the time that a rank spent in its operations. It needs no common clock; the
             straggler has the least. The end of an operation is known to some milliseconds only,
             as printed below the table, so `waited` shows longer waits only.
  A trace has the last 1024 operations, each from the moment when its turn came.

Examples:
  Four ranks that fail, or that hang and are ended with Ctrl-C:
    BONFIRE_TRACE=traces bonfire run -n 4 -- ./train
    bonfire trace traces
  Traces of several machines, copied to one:
    bonfire trace node0/ node1/ --last 40

Exit status:
  0  every rank has a trace, and no operation is unfinished, failed or mismatched
  1  a trace is absent, or an operation is unfinished, failed or mismatched
  2  bad arguments, a file that is not a trace, or a folder without traces";

/// Reads traces, prints their diagnosis and returns the exit status.
pub fn run(args: &Args) -> Result<u8, Failure> {
    let groups = read(&args.paths).map_err(Failure::with(2))?;
    print(&if args.json {
        let objects: Vec<_> = groups.iter().map(|group| report::object(group, args.last)).collect();
        format!("{}\n", json!({ "groups": objects }))
    } else {
        groups.iter().map(|group| report::text(group, args.last)).collect::<Vec<_>>().join("\n")
    })?;
    Ok(u8::from(!groups.iter().all(Diagnosis::is_healthy)))
}

/// Reads the traces in these files and folders, and diagnoses each group.
fn read(paths: &[PathBuf]) -> Result<Vec<Diagnosis>, String> {
    let mut files = Vec::new();
    for path in paths {
        if path.is_dir() { files.extend(list(path)?) } else { files.push(path.clone()) }
    }
    files.sort();
    files.dedup();
    let mut groups: BTreeMap<_, BTreeMap<usize, (PathBuf, Trace)>> = BTreeMap::new();
    for file in files {
        let trace = Trace::read(&file).map(sanitise).map_err(|error| error.to_string())?;
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
    let diagnoses = groups.into_values().map(|ranks| ranks.into_values().map(|(_, trace)| trace).collect());
    let mut diagnoses: Vec<_> = diagnoses.map(Diagnosis::new).collect();
    // A group of which only some ranks have written a trace is most often one that failed with another.
    diagnoses.sort_by_key(|group| group.absent.len());
    Ok(diagnoses)
}

/// Replaces control characters in a trace: its texts are printed and must not control the terminal.
fn sanitise(mut trace: Trace) -> Trace {
    let sites = trace.operations.iter_mut().map(|record| &mut record.at);
    let optional = trace.group.iter_mut().chain(&mut trace.job).chain(&mut trace.failure);
    let places = trace.whereabouts.iter_mut().flat_map(|(_, whereabouts)| {
        let calls = whereabouts.calls.iter_mut().chain(&mut whereabouts.background).chain(&mut whereabouts.last);
        calls.flat_map(|call| [&mut call.function, &mut call.at]).chain([&mut whereabouts.progress])
    });
    for text in [&mut trace.host, &mut trace.clock].into_iter().chain(optional).chain(sites).chain(places) {
        if text.contains(char::is_control) {
            *text = text.replace(char::is_control, "?");
        }
    }
    trace
}

/// Lists the traces in a folder, which are recognised by their names.
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
