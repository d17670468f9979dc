//! Adam, with replicated or sharded state.

use bonfire::tensor::autodiff::CollectiveBackend;
use bonfire::{DataParallel, Group, ShardedOptimizer, Sharding};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{Adam, AdamConfig, GradientsParams, Optimizer};
use burn::record::Recorder;

use crate::Failure;
use crate::checkpoint::Records;
use crate::model::Network;

/// Adam that updates the network in the same way on all ranks.
pub enum SyncAdam<B: CollectiveBackend> {
    /// With its whole state on every rank.
    Whole(OptimizerAdaptor<Adam, Network<B>, B>),
    /// With a part of its state on each rank; also has the number of steps in this run.
    Sharded(Box<ShardedOptimizer<Adam, Network<B>, B>>, u64),
}

impl<B: CollectiveBackend> SyncAdam<B> {
    pub fn new(ddp: &DataParallel<B>, sharding: Option<Sharding>) -> Result<Self, Failure> {
        let adam = AdamConfig::new();
        Ok(match sharding {
            None => SyncAdam::Whole(adam.init()),
            Some(sharding) => SyncAdam::Sharded(Box::new(ShardedOptimizer::new(ddp, adam.init(), sharding)?), 0),
        })
    }

    pub fn step(
        &mut self,
        lr: f64,
        model: &mut Network<B>,
        ddp: &mut DataParallel<B>,
        grads: GradientsParams,
        samples: usize,
    ) -> Result<(), Failure> {
        match self {
            SyncAdam::Whole(optimizer) => {
                let grads = ddp.sync(model, grads, samples)?;
                *model = optimizer.step(lr, model.clone(), grads);
            }
            SyncAdam::Sharded(optimizer, steps) => {
                optimizer.step(lr, model, grads, samples)?;
                *steps += 1;
            }
        }
        Ok(())
    }

    /// Returns the steps so far in this run.
    pub fn steps(&self, ddp: &DataParallel<B>) -> u64 {
        match self {
            SyncAdam::Whole(_) => ddp.steps(),
            SyncAdam::Sharded(_, steps) => *steps,
        }
    }

    /// Returns the bytes of this rank's part of the state, None if the state is not sharded.
    pub fn part_bytes(&self) -> Result<Option<usize>, Failure> {
        Ok(match self {
            SyncAdam::Whole(_) => None,
            SyncAdam::Sharded(optimizer, _) => Some(optimizer.state_bytes()?),
        })
    }

    /// Returns the state of all ranks, in parts, on rank 0. All ranks must call this.
    pub fn save(&self, group: &Group) -> Result<Vec<Vec<u8>>, Failure> {
        Ok(match self {
            SyncAdam::Whole(optimizer) => vec![Recorder::<B>::record(&Records::default(), optimizer.to_record(), ())?],
            SyncAdam::Sharded(optimizer, _) => {
                let (bytes, lens) = group.gather_v(&optimizer.save()?, 0)?.unwrap_or_default();
                let mut bytes = bytes.into_iter();
                lens.into_iter().map(|len| bytes.by_ref().take(len).collect()).collect()
            }
        })
    }

    pub fn load(&mut self, parts: &[Vec<u8>], device: &B::Device) -> Result<(), Failure> {
        match self {
            SyncAdam::Whole(optimizer) => {
                let record = parts.first().cloned().unwrap_or_default();
                *optimizer = optimizer.clone().load_record(Recorder::<B>::load(&Records::default(), record, device)?);
            }
            SyncAdam::Sharded(optimizer, _) => optimizer.load(parts)?,
        }
        Ok(())
    }
}
