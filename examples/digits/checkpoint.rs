//! Checkpoints: a single file, which rank 0 writes atomically.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use bonfire::Group;
use burn::module::AutodiffModule;
use burn::record::{DoublePrecisionSettings, NamedMpkBytesRecorder, Recorder};
use burn::tensor::backend::AutodiffBackend;
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use serde::{Deserialize, Serialize};

use crate::Failure;

/// Identifies the file's format and version.
const FORMAT: &str = "bonfire digits 2";

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

/// The state of a training after `epochs` epochs.
#[derive(Serialize, Deserialize)]
pub struct Checkpoint {
    format: String,
    settings: Settings,
    pub epochs: usize,
    model: Vec<u8>,
    /// The optimizer's state, in parts: one if it is not sharded, else one per rank.
    pub optimizer: Vec<Vec<u8>>,
}

/// Records floats as f64, so that f32 and f64 are restored exactly.
pub type Records = NamedMpkBytesRecorder<DoublePrecisionSettings>;

impl Checkpoint {
    pub fn new<B: AutodiffBackend, M: AutodiffModule<B>>(
        epochs: usize,
        settings: Settings,
        model: &M,
        optimizer: Vec<Vec<u8>>,
    ) -> Result<Self, Failure> {
        let model = Recorder::<B>::record(&Records::default(), model.clone().into_record(), ())?;
        Ok(Checkpoint { format: FORMAT.into(), settings, epochs, model, optimizer })
    }

    /// Fails if a checkpoint cannot be written here, which is better found out before an epoch than after it.
    pub fn check_writable(path: &Path) -> Result<(), Failure> {
        let part = part(path);
        let tried = File::create(&part).and_then(|_| fs::remove_file(&part));
        tried.map_err(|e| format!("cannot save {}: {e}", path.display()).into())
    }

    /// Writes a temporary file and renames it to `path` when it is complete and on disk.
    pub fn write(&self, path: &Path) -> Result<(), Failure> {
        let part = part(path);
        let write = || -> io::Result<()> {
            let mut encoder = GzEncoder::new(File::create(&part)?, Compression::fast());
            encoder.write_all(&postcard::to_stdvec(self).map_err(io::Error::other)?)?;
            encoder.finish()?.sync_all()?;
            fs::rename(&part, path)
        };
        write().map_err(|e| format!("cannot save {}: {e}", path.display()).into())
    }

    /// Reads the file on rank 0 and broadcasts it. If rank 0 fails, all ranks return its error.
    pub fn read(path: &Path, group: &Group) -> Result<Self, Failure> {
        let mut bytes = Vec::new();
        let mut failure = String::new();
        if group.rank() == 0
            && let Err(e) = File::open(path).and_then(|file| GzDecoder::new(file).read_to_end(&mut bytes))
        {
            failure = format!("cannot read the checkpoint {}: {e}", path.display());
            bytes.clear();
        }
        let mut lens = [bytes.len() as u64, failure.len() as u64];
        group.broadcast(&mut lens, 0)?;
        bytes.resize(lens[0] as usize, 0);
        let mut text = failure.into_bytes();
        text.resize(lens[1] as usize, 0);
        group.broadcast(&mut bytes, 0)?;
        group.broadcast(&mut text, 0)?;
        if !text.is_empty() {
            return Err(String::from_utf8_lossy(&text).into());
        }
        match postcard::from_bytes::<Checkpoint>(&bytes) {
            Ok(checkpoint) if checkpoint.format == FORMAT => Ok(checkpoint),
            _ => Err(format!("{} is not a checkpoint of this program", path.display()).into()),
        }
    }

    /// Fails if a run with these settings cannot resume from this checkpoint.
    pub fn check(&self, path: &Path, settings: &Settings) -> Result<(), Failure> {
        let saved = &self.settings;
        let pairs = [
            ("batch", saved.batch.to_string(), settings.batch.to_string()),
            ("seed", saved.seed.to_string(), settings.seed.to_string()),
            ("lr", saved.lr.to_string(), settings.lr.to_string()),
            ("backend", saved.backend.clone(), settings.backend.clone()),
            ("shard", saved.shard.to_string(), settings.shard.to_string()),
        ];
        match pairs.into_iter().find(|(_, saved, given)| saved != given) {
            Some((name, saved, given)) => {
                Err(format!("{} was made with --{name} {saved}, not {given}", path.display()).into())
            }
            None => Ok(()),
        }
    }

    pub fn model<B: AutodiffBackend, M: AutodiffModule<B>>(&self, model: M, device: &B::Device) -> Result<M, Failure> {
        Ok(model.load_record(Recorder::<B>::load(&Records::default(), self.model.clone(), device)?))
    }
}

/// Returns the path of the temporary file for a checkpoint.
fn part(path: &Path) -> PathBuf {
    let mut part = path.as_os_str().to_owned();
    part.push(".part");
    part.into()
}
