//! A save: all ranks write their files of a new set, and rank 0 makes it valid.

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::claim::Claim;
use super::contents::{Contents, Item};
use super::folder::{Draft, begin, commit, discard, draft, file_name, sync};
use super::format::{self, FileId, FileSummary, Manifest};
use super::parts::{Parts, check_equal};
use super::{COMPARING, Collect, OPENING, SAVING, Snapshot};
use crate::parameters::Digested;
use bonfire_core::internal::{AgreedOperations, panic_message, process_number, random};
use bonfire_core::{Error, Group};

/// Opens a folder to save sets in it: tries on all ranks what a save does. Returns rank 0's claim.
pub(super) fn open(lane: &Group, folder: &Path) -> Result<Option<Arc<Claim>>, Error> {
    let failed = |error: io::Error| {
        let error = io::Error::new(error.kind(), format!("{error}; to load only, use `Checkpoints::read_only`"));
        Error::io(format!("{OPENING}: writing into {}", folder.display()), error)
    };
    let processes = lane.all_gather_results(process_number())?;
    let leads = lane.rank() == 0;
    let begun = match leads {
        true => Claim::new(folder, processes).and_then(|claim| {
            let trial = draft(folder, 0, format!("{:016x}", random()?)).map_err(failed)?;
            Ok((Some(Arc::new(claim)), Some(trial)))
        }),
        false => Ok((None, None)),
    };
    let (claim, trial) = begun.map_or_else(|error| (None, Err(error)), |(claim, trial)| (claim, Ok(trial)));
    let trial = lane.all_gather_results(trial)?.swap_remove(0);
    let trial = trial.ok_or_else(|| Error::broken(OPENING, "rank 0 has tried nothing"))?;
    let path = trial.path(folder);
    let tried = seen(OPENING, lane.rank(), &path).and_then(|()| {
        let file = path.join(file_name(lane.rank()));
        std::fs::write(&file, []).and_then(|()| std::fs::remove_file(&file)).map_err(failed)
    });
    let opened = lane
        .all_gather_results(tried)
        .and_then(|_| lane.all_gather_results(claim.as_ref().map_or(Ok(()), |claim| claim.open())));
    if leads {
        discard(folder, &trial);
    }
    opened.map(|_| claim)
}

/// Fails if a rank does not see what rank 0 has made.
fn seen(operation: &str, rank: usize, path: &Path) -> Result<(), Error> {
    if path.is_dir() {
        return Ok(());
    }
    let path = path.display();
    let reason = format!(
        "rank {rank} does not see the folder {path}, which rank 0 has made; give a folder that all ranks share"
    );
    Err(Error::argument(operation, reason))
}

/// Lets the threads of the training run before this one, which may take longer.
pub(super) fn lower_priority() {
    // Linux has a priority for each thread, and anyone may lower it. Elsewhere it would be that of the process.
    #[cfg(target_os = "linux")]
    if let Err(error) = rustix::process::setpriority_process(None, 19) {
        log::debug!("the priority of the thread that saves a checkpoint cannot be lowered: {error}");
    }
}

/// A save.
pub(super) struct Saving {
    pub lane: Group,
    pub folder: PathBuf,
    pub keep: usize,
    /// Rank 0 has one.
    pub claim: Option<Arc<Claim>>,
    pub snapshot: Result<Snapshot, Error>,
    pub score: Option<f64>,
}

impl Saving {
    pub fn run(self) -> Result<(), Error> {
        let Saving { lane, folder, keep, claim, snapshot, score } = self;
        let (own, collect) = match snapshot {
            Ok(Snapshot { contents, collect }) => (check_score(score).map(|()| (contents, score)), Some(collect)),
            Err(error) => (Err(error), None),
        };
        let (contents, scores): (Vec<_>, Vec<_>) = lane.all_gather_results(own)?.into_iter().unzip();
        let contents = same_contents(SAVING, &contents)?;
        same_score(&scores)?;
        let failed = |error| Error::io(format!("{SAVING} in {}", folder.display()), error);
        let draft = claim.as_ref().map(|claim| {
            claim.check()?;
            begin(&folder, format!("{:016x}", random()?)).map_err(failed)
        });
        let draft = lane.all_gather_results(draft.transpose())?.swap_remove(0);
        let draft = draft.ok_or_else(|| Error::broken(SAVING, "rank 0 has begun no set"))?;
        let written = catch_unwind(AssertUnwindSafe(|| write(&lane, &folder, &draft, collect)));
        let written = written.unwrap_or_else(|panic| Err(panicked(&*panic)));
        // Another job that has taken the folder over removes this draft: that is the cause of all other errors.
        let written = claim.as_ref().map_or(Ok(()), |claim| claim.check()).and(written);
        let saved = lane.all_gather_results(written).and_then(|written| {
            let (files, digests): (Vec<_>, Vec<_>) = written.into_iter().unzip();
            check_equal(SAVING, &digests)?;
            let manifest = Manifest { score, ..Manifest::new(&draft.id, files, contents) };
            let committed = claim.as_ref().map_or(Ok(()), |claim| {
                claim.check()?;
                commit(&folder, &draft, &manifest, keep).map_err(failed)
            });
            lane.all_gather_results(committed).map(drop)
        });
        if claim.is_some() && saved.is_err() {
            // Another rank may still write there; then the next save removes it.
            discard(&folder, &draft);
        }
        saved
    }
}

/// Writes this rank's file of a set.
fn write(
    lane: &Group,
    folder: &Path,
    draft: &Draft,
    collect: Option<Collect>,
) -> Result<(FileSummary, Vec<Digested>), Error> {
    let (rank, world_size, path) = (lane.rank(), lane.world_size(), draft.path(folder));
    seen(SAVING, rank, &path)?;
    let mut parts = Parts::new(rank, world_size);
    if let Some(collect) = collect {
        collect(&mut parts)?;
    }
    let id = FileId::new(&draft.id, rank, world_size);
    let (parts, digests) = parts.into_list();
    let summary = format::write(&path.join(file_name(rank)), id, parts)?;
    sync(&path).map_err(|e| Error::io(format!("{SAVING}: flushing {}", path.display()), e))?;
    Ok((summary, digests))
}

fn check_score(score: Option<f64>) -> Result<(), Error> {
    match score.filter(|score| !score.is_finite()) {
        None => Ok(()),
        Some(score) => Err(Error::argument(SAVING, format!("the score is {score}; give a finite one, or none"))),
    }
}

/// Fails if the ranks give different scores.
fn same_score(of_ranks: &[Option<f64>]) -> Result<(), Error> {
    let Some((rank, other)) = (0..).zip(of_ranks).find(|(_, score)| **score != of_ranks[0]) else { return Ok(()) };
    let text = |score: &Option<f64>| score.map_or("none".into(), |score| score.to_string());
    let (first, other) = (text(&of_ranks[0]), text(other));
    let reason = format!(
        "rank 0 gives the score {first}, and rank {rank} {other}; give the same on all ranks, such as a mean over them"
    );
    Err(Error::argument(SAVING, reason))
}

/// Compares what the ranks would save, and writes nothing.
pub(super) fn compare(lane: &Group, snapshot: Result<Snapshot, Error>) -> Result<(), Error> {
    let (own, collect) = match snapshot {
        Ok(Snapshot { contents, collect }) => (Ok(contents), Some(collect)),
        Err(error) => (Err(error), None),
    };
    same_contents(COMPARING, &lane.all_gather_results(own)?)?;
    let mut parts = Parts::new(lane.rank(), lane.world_size());
    let collected = collect.map_or(Ok(()), |collect| collect(&mut parts)).map(|()| parts.into_list().1);
    check_equal(COMPARING, &lane.all_gather_results(collected)?)
}

/// Returns what all ranks save. Fails if they are not at the same position, or save different things.
fn same_contents(operation: &str, of_ranks: &[Contents]) -> Result<Contents, Error> {
    let first = of_ranks[0].clone();
    let Some((rank, other)) = (0..).zip(of_ranks).find(|(_, contents)| **contents != first) else { return Ok(first) };
    let position = |contents: &Contents| format!("epoch {}, sample {}", contents.epoch, contents.samples);
    let items = |contents: &Contents| contents.items.iter().map(Item::to_string).collect::<Vec<_>>().join(", ");
    let reason = if first.items == other.items {
        let (first, other) = (position(&first), position(other));
        format!("rank 0 is at {first}, rank {rank} at {other}; call this on all ranks after the same step")
    } else {
        let (first, other) = (items(&first), items(other));
        format!("rank 0 saves {first}, and rank {rank} {other}; save the same on all ranks")
    };
    Err(Error::argument(operation, reason))
}

pub(super) fn panicked(panic: &(dyn Any + Send)) -> Error {
    Error::broken(SAVING, format!("it panicked: {}", panic_message(panic)))
}
