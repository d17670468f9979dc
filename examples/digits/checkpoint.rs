//! Checkpoints: one file, written by rank 0, complete or not there at all.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use bonfire::Group;
use burn::module::AutodiffModule;
use burn::optim::Optimizer;
use burn::record::{DoublePrecisionSettings, NamedMpkBytesRecorder, Recorder};
use burn::tensor::backend::AutodiffBackend;
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use serde::{Deserialize, Serialize};

use crate::Failure;

/// Says what the file is, and of which version.
const FORMAT: &str = "bonfire digits 1";

/// What a resumed run must have in common with the one that was saved.
#[derive(Clone, Serialize, Deserialize)]
pub struct Settings {
    pub batch: usize,
    pub seed: u64,
    pub lr: f64,
    pub backend: String,
}

/// A training after so many epochs.
#[derive(Serialize, Deserialize)]
pub struct Checkpoint {
    format: String,
    settings: Settings,
    pub epochs: usize,
    model: Vec<u8>,
    optimizer: Vec<u8>,
}

/// Floats are recorded as f64, so f32 and f64 come back as they were.
type Records = NamedMpkBytesRecorder<DoublePrecisionSettings>;

impl Checkpoint {
    pub fn new<B, M, O>(epochs: usize, settings: Settings, model: &M, optimizer: &O) -> Result<Self, Failure>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
    {
        let model = Recorder::<B>::record(&Records::default(), model.clone().into_record(), ())?;
        let optimizer = Recorder::<B>::record(&Records::default(), optimizer.to_record(), ())?;
        Ok(Checkpoint { format: FORMAT.into(), settings, epochs, model, optimizer })
    }

    /// Whether a checkpoint can be written here: better to know before an epoch than after.
    pub fn try_place(path: &Path) -> Result<(), Failure> {
        let part = part(path);
        let tried = File::create(&part).and_then(|_| fs::remove_file(&part));
        tried.map_err(|e| format!("cannot save {}: {e}", path.display()).into())
    }

    /// Writes the file next to its place and moves it there when it is complete and on disk.
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

    /// Reads the file on rank 0 for all ranks. They all fail where it does.
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
            _ => Err(format!("{} is no checkpoint of this program", path.display()).into()),
        }
    }

    /// Whether a run with these settings can go on from here.
    pub fn check(&self, path: &Path, settings: &Settings) -> Result<(), Failure> {
        let saved = &self.settings;
        let pairs = [
            ("batch", saved.batch.to_string(), settings.batch.to_string()),
            ("seed", saved.seed.to_string(), settings.seed.to_string()),
            ("lr", saved.lr.to_string(), settings.lr.to_string()),
            ("backend", saved.backend.clone(), settings.backend.clone()),
        ];
        match pairs.into_iter().find(|(_, saved, given)| saved != given) {
            Some((name, saved, given)) => {
                Err(format!("{} was made with --{name} {saved}, not {given}", path.display()).into())
            }
            None => Ok(()),
        }
    }

    pub fn restore<B, M, O>(self, model: M, optimizer: O, device: &B::Device) -> Result<(M, O), Failure>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
    {
        let model = model.load_record(Recorder::<B>::load(&Records::default(), self.model, device)?);
        let optimizer = optimizer.load_record(Recorder::<B>::load(&Records::default(), self.optimizer, device)?);
        Ok((model, optimizer))
    }
}

/// Where a checkpoint is written until it is complete.
fn part(path: &Path) -> PathBuf {
    let mut part = path.as_os_str().to_owned();
    part.push(".part");
    part.into()
}
