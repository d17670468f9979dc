//! What to train, without a tensor.

use std::fs;
use std::path::Path;

use bonfire::{Builder, Checkpoints, Group, ShardedSampler, Sharding};

use crate::Failure;
use crate::checkpoint::Settings;
use crate::data::Digits;

/// A training job, the same on all ranks.
pub struct TrainingJob<'a> {
    /// The training set and the test set.
    pub data: (Digits, Digits),
    pub settings: Settings,
    pub epochs: usize,
    pub save: Option<&'a Path>,
    pub resume: Option<&'a Path>,
    /// Over which ranks the optimizer's state is sharded, if it is.
    pub shard: Option<Sharding>,
    /// The encoding in which gradients travel, if not their own.
    pub compression: Option<&'a str>,
    /// The rank to kill in the middle of the second epoch of this run.
    pub chaos: Option<usize>,
}

/// The results of a training.
#[derive(Default)]
pub struct Outcome {
    /// The mean loss of every epoch.
    pub losses: Vec<f64>,
    /// Bytes of this rank's part of the optimizer's state, if it was sharded.
    pub part_bytes: Option<usize>,
}

impl TrainingJob<'_> {
    /// Fails early for settings that would fail later.
    pub fn check(&self, group: &Group) -> Result<(), Failure> {
        let (batch, ranks) = (self.settings.batch, group.world_size());
        let tail = self.data.0.len() % batch;
        // The batch norms of all ranks take part in every step, and convolutions need at least one image.
        if (1..ranks).contains(&tail) {
            return Err(format!(
                "batches of {batch} leave {tail} images, too few for {ranks} ranks: give another --batch"
            )
            .into());
        }
        match self.save {
            Some(folder) if group.rank() == 0 => {
                fs::create_dir_all(folder).map_err(|e| format!("cannot save in {}: {e}", folder.display()).into())
            }
            _ => Ok(()),
        }
    }

    /// Returns what distributes the training images over the ranks.
    pub fn sampler(&self, group: &Group) -> Result<ShardedSampler, Failure> {
        Ok(ShardedSampler::new(group, self.data.0.len(), self.settings.batch)?.seed(self.settings.seed))
    }

    /// Opens the folder to save in, if there is one.
    pub fn checkpoints(&self, group: &Group) -> Result<Option<Checkpoints>, Failure> {
        Ok(self.save.map(|folder| Checkpoints::new(group, folder)).transpose()?)
    }

    /// Kills this rank as a failing machine would. A thread can only leave the group.
    pub fn kill_self(&self, rank: usize) -> Result<(), Failure> {
        eprintln!("rank {rank} is killed now, because of --chaos");
        #[cfg(unix)]
        if Builder::from_env().is_ok_and(|builder| builder.launched().is_some()) {
            signal_hook::low_level::raise(signal_hook::consts::SIGKILL)?;
        }
        Ok(())
    }
}
