//! The folder of a training's sets, and how a set in it becomes valid.
//!
//! A set is written to a folder under a temporary name. When all its files, its manifest and the folder's entries are
//! on disk, one rename makes it valid, and flushing the parent folder makes that last. So a folder with a set's name
//! holds a complete set, whenever the processes or the machine stopped. A set is renamed before it is removed, for the
//! same reason.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use log::warn;
use serde::{Deserialize, Serialize};

use super::contents::Contents;
use super::format::Manifest;

/// The file that says what belongs to a set.
pub(super) const MANIFEST: &str = "set.json";
const SET: &str = "set-";
/// Before the names of sets that are being written or removed.
const DRAFT: &str = ".part-";
const REMOVED: &str = ".old-";

/// A set that is being written.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Draft {
    pub number: u64,
    pub id: String,
}

impl Draft {
    pub fn path(&self, folder: &Path) -> PathBuf {
        folder.join(format!("{DRAFT}{}", self.id))
    }
}

/// Returns the name of a rank's file.
pub(super) fn file_name(rank: usize) -> String {
    format!("rank-{rank}.safetensors")
}

/// A set in a folder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SavedSet {
    /// The number in the name of its folder, which is higher than those of older sets: 12 for `set-00000012`.
    pub number: u64,
    /// The score that it was saved with.
    pub score: Option<f64>,
    /// What it holds. `None` if it is of the first format, which does not say it, or if its manifest cannot be read.
    pub contents: Option<Contents>,
}

/// Begins a set: makes its folder, and removes what an interrupted save has left.
pub(super) fn begin(folder: &Path, id: String) -> io::Result<Draft> {
    create(folder)?;
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if name.starts_with(DRAFT) || name.starts_with(REMOVED) {
            // It is in no set's way. A network file system keeps a folder in which another host has a file open.
            if let Err(error) = remove(&path) {
                warn!("cannot remove {}, which an interrupted save has left: {error}", path.display());
            }
        }
    }
    let number = sets(folder)?.last().map_or(1, |(number, _)| number + 1);
    draft(folder, number, id)
}

/// Makes the folder for a set that is to be written.
pub(super) fn draft(folder: &Path, number: u64, id: String) -> io::Result<Draft> {
    create(folder)?;
    let draft = Draft { number, id };
    fs::create_dir(draft.path(folder))?;
    Ok(draft)
}

/// Writes a file of a folder as a whole: it has the old contents or the new ones. `id` is one that no other call uses.
pub(super) fn replace(folder: &Path, name: &str, id: &str, contents: &[u8]) -> io::Result<()> {
    create(folder)?;
    let draft = folder.join(format!("{DRAFT}{id}-{name}"));
    fs::write(&draft, contents)?;
    fs::rename(&draft, folder.join(name))
}

/// Creates a folder and those above it, and flushes their entries to disk.
fn create(folder: &Path) -> io::Result<()> {
    if folder.is_dir() {
        return Ok(());
    }
    let parent = folder.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    create(parent)?;
    match fs::create_dir(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists || !folder.is_dir() => Err(error),
        _ => sync(parent),
    }
}

/// Makes a set valid whose files are on disk. Removes older sets: all but the newest `keep` and the best.
pub(super) fn commit(folder: &Path, draft: &Draft, manifest: &Manifest, keep: usize) -> io::Result<()> {
    let draft_path = draft.path(folder);
    let mut file = File::create_new(draft_path.join(MANIFEST))?;
    file.write_all(&serde_json::to_vec_pretty(manifest)?)?;
    file.sync_all()?;
    sync(&draft_path)?;
    fs::rename(&draft_path, path(folder, draft.number))?;
    sync(folder)?;
    if let Err(error) = prune(folder, keep, &draft.id) {
        warn!("cannot remove old checkpoints in {}: {error}", folder.display());
    }
    Ok(())
}

/// Removes a set that did not become valid.
pub(super) fn discard(folder: &Path, draft: &Draft) {
    // What is left, the next save removes.
    drop(fs::remove_dir_all(draft.path(folder)));
}

/// `id` tells what this call removes from what others could not remove.
fn prune(folder: &Path, keep: usize, id: &str) -> io::Result<()> {
    let sets = sets(folder)?;
    let Some(older) = sets.len().checked_sub(keep).filter(|older| *older > 0) else { return Ok(()) };
    let best = best(&list(folder)?).map(|best| best.number);
    for (number, path) in sets[..older].iter().filter(|(number, _)| Some(*number) != best) {
        let removed = folder.join(format!("{REMOVED}{number}-{id}"));
        if let Err(error) = fs::rename(path, &removed).and_then(|()| remove(&removed)) {
            warn!("cannot remove the old checkpoint {}: {error}", path.display());
        }
    }
    Ok(())
}

fn remove(path: &Path) -> io::Result<()> {
    if fs::symlink_metadata(path)?.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }
}

/// Returns what there is in a folder, by number.
pub(super) fn list(folder: &Path) -> io::Result<Vec<SavedSet>> {
    let sets = sets(folder)?.into_iter().map(|(number, path)| {
        let manifest = read_manifest(&path).ok();
        let (score, contents) = manifest.map_or((None, None), |manifest| (manifest.score, manifest.contents));
        SavedSet { number, score, contents }
    });
    Ok(sets.collect())
}

/// Returns the set with the highest score; of several, the newest.
pub(super) fn best(sets: &[SavedSet]) -> Option<&SavedSet> {
    let scored = sets.iter().filter_map(|set| Some((set.score?, set)));
    scored.max_by(|(one, _), (other, _)| one.total_cmp(other)).map(|(_, set)| set)
}

/// Returns the folder of a set.
pub(super) fn path(folder: &Path, number: u64) -> PathBuf {
    folder.join(format!("{SET}{number:08}"))
}

/// Reads the manifest of the set in this folder. Returns why it cannot.
pub(super) fn read_manifest(set: &Path) -> Result<Manifest, String> {
    let text = fs::read_to_string(set.join(MANIFEST)).map_err(|error| error.to_string())?;
    Manifest::parse(&text)
}

/// Returns the sets by number: none of a folder that does not exist.
fn sets(folder: &Path) -> io::Result<Vec<(u64, PathBuf)>> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut sets = Vec::new();
    for entry in entries {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if let Some(number) = name.strip_prefix(SET).and_then(|number| number.parse().ok()) {
            sets.push((number, path));
        }
    }
    sets.sort();
    Ok(sets)
}

/// Flushes the entries of a folder to disk.
pub(super) fn sync(folder: &Path) -> io::Result<()> {
    // Only unix systems open folders as files.
    if cfg!(unix) { File::open(folder)?.sync_all() } else { Ok(()) }
}
