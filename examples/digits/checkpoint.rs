//! The settings of a run, which are part of its checkpoints.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::Failure;

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

impl Settings {
    /// Returns the settings as text, for [`check`](Self::check).
    pub fn to_text(&self) -> Result<String, Failure> {
        Ok(serde_json::to_string(self)?)
    }

    /// Fails if the checkpoint in `folder` has other settings.
    pub fn check(&self, folder: &Path, saved: &str) -> Result<(), Failure> {
        let folder = folder.display();
        let saved: Settings =
            serde_json::from_str(saved).map_err(|_| format!("{folder} has no checkpoint of this program"))?;
        let pairs = [
            ("batch", saved.batch.to_string(), self.batch.to_string()),
            ("seed", saved.seed.to_string(), self.seed.to_string()),
            ("lr", saved.lr.to_string(), self.lr.to_string()),
            ("backend", saved.backend.clone(), self.backend.clone()),
            ("shard", saved.shard.to_string(), self.shard.to_string()),
        ];
        match pairs.into_iter().find(|(_, saved, given)| saved != given) {
            Some((name, saved, given)) => Err(format!("{folder} was made with --{name} {saved}, not {given}").into()),
            None => Ok(()),
        }
    }
}
