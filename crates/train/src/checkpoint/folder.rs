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

/// Begins a set: makes its folder, and removes what an interrupted save has left.
pub(super) fn begin(folder: &Path, id: String) -> io::Result<Draft> {
    create(folder)?;
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if name.starts_with(DRAFT) || name.starts_with(REMOVED) {
            fs::remove_dir_all(&path)?;
        }
    }
    let number = sets(folder)?.last().map_or(1, |(number, _)| number + 1);
    let draft = Draft { number, id };
    fs::create_dir(draft.path(folder))?;
    Ok(draft)
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

/// Makes a set valid whose files are on disk, and removes all but the newest `keep` sets.
pub(super) fn commit(folder: &Path, draft: &Draft, manifest: &Manifest, keep: usize) -> io::Result<()> {
    let path = draft.path(folder);
    let mut file = File::create_new(path.join(MANIFEST))?;
    file.write_all(&serde_json::to_vec_pretty(manifest)?)?;
    file.sync_all()?;
    sync(&path)?;
    fs::rename(&path, folder.join(format!("{SET}{:08}", draft.number)))?;
    sync(folder)?;
    if let Err(error) = prune(folder, keep) {
        warn!("cannot remove old checkpoints in {}: {error}", folder.display());
    }
    Ok(())
}

/// Removes a set that did not become valid.
pub(super) fn discard(folder: &Path, draft: &Draft) {
    // What is left, the next save removes.
    drop(fs::remove_dir_all(draft.path(folder)));
}

fn prune(folder: &Path, keep: usize) -> io::Result<()> {
    let sets = sets(folder)?;
    for (number, path) in &sets[..sets.len().saturating_sub(keep)] {
        let removed = folder.join(format!("{REMOVED}{number}"));
        fs::rename(path, &removed)?;
        fs::remove_dir_all(removed)?;
    }
    Ok(())
}

/// Returns the newest set and the text of its manifest, if there is one.
pub(super) fn newest(folder: &Path) -> io::Result<Option<(PathBuf, io::Result<String>)>> {
    let sets = match sets(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        sets => sets?,
    };
    let newest = sets.into_iter().next_back();
    Ok(newest.map(|(_, path)| (path.clone(), fs::read_to_string(path.join(MANIFEST)))))
}

/// Returns the sets by number.
fn sets(folder: &Path) -> io::Result<Vec<(u64, PathBuf)>> {
    let mut sets = Vec::new();
    for entry in fs::read_dir(folder)? {
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
