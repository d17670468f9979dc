//! Checkpoints: a single file, which rank 0 writes atomically.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use serde::{Deserialize, Serialize};

use crate::Failure;

/// Identifies the file's format and version.
const FORMAT: &str = "bonfire digits 3";

/// Settings that a resumed run must have in common with the saved run.
#[derive(Clone, Serialize, Deserialize)]
pub struct Settings {
    pub batch: usize,
    pub seed: u64,
    pub lr: f64,
    pub backend: String,
    /// Whether the optimizer's state is sharded over the ranks. The number of ranks may change.
    pub shard: bool,
}

/// A training after some epochs.
#[derive(Serialize, Deserialize)]
struct Checkpoint {
    format: String,
    settings: Settings,
    /// What `TrainingState::save` returned.
    state: Vec<u8>,
}

/// Fails if a checkpoint cannot be written here, which is better found out before an epoch than after it.
pub fn check_writable(path: &Path) -> Result<(), Failure> {
    let part = part(path);
    let tried = File::create(&part).and_then(|_| fs::remove_file(&part));
    tried.map_err(|e| format!("cannot save {}: {e}", path.display()).into())
}

/// Writes a temporary file and renames it to `path` when it is complete and on disk.
pub fn write(path: &Path, settings: &Settings, state: Vec<u8>) -> Result<(), Failure> {
    let part = part(path);
    let checkpoint = Checkpoint { format: FORMAT.into(), settings: settings.clone(), state };
    let write = || -> io::Result<()> {
        let mut encoder = GzEncoder::new(File::create(&part)?, Compression::fast());
        encoder.write_all(&postcard::to_stdvec(&checkpoint).map_err(io::Error::other)?)?;
        encoder.finish()?.sync_all()?;
        fs::rename(&part, path)
    };
    write().map_err(|e| format!("cannot save {}: {e}", path.display()).into())
}

/// Returns the saved state of a training with these settings.
pub fn read(path: &Path, settings: &Settings) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let file = File::open(path).and_then(|file| GzDecoder::new(file).read_to_end(&mut bytes));
    file.map_err(|e| io::Error::new(e.kind(), format!("cannot read the checkpoint {}: {e}", path.display())))?;
    let checkpoint = match postcard::from_bytes::<Checkpoint>(&bytes) {
        Ok(checkpoint) if checkpoint.format == FORMAT => checkpoint,
        _ => return Err(io::Error::other(format!("{} is not a checkpoint of this program", path.display()))),
    };
    let saved = &checkpoint.settings;
    let pairs = [
        ("batch", saved.batch.to_string(), settings.batch.to_string()),
        ("seed", saved.seed.to_string(), settings.seed.to_string()),
        ("lr", saved.lr.to_string(), settings.lr.to_string()),
        ("backend", saved.backend.clone(), settings.backend.clone()),
        ("shard", saved.shard.to_string(), settings.shard.to_string()),
    ];
    match pairs.into_iter().find(|(_, saved, given)| saved != given) {
        Some((name, saved, given)) => {
            Err(io::Error::other(format!("{} was made with --{name} {saved}, not {given}", path.display())))
        }
        None => Ok(checkpoint.state),
    }
}

/// Returns the path of the temporary file for a checkpoint.
fn part(path: &Path) -> PathBuf {
    let mut part = path.as_os_str().to_owned();
    part.push(".part");
    part.into()
}
