//! Adam, with its whole state on every rank or with a part on each.

use bonfire::tensor::autodiff::CollectiveBackend;
use bonfire::{DataParallel, Group, ShardedOptimizer, Sharding};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{Adam, AdamConfig, GradientsParams, Optimizer};
use burn::record::Recorder;

use crate::Failure;
use crate::checkpoint::Records;
use crate::model::Network;

/// Updates the network in step with all ranks.
pub enum Updates<B: CollectiveBackend> {
    Whole(OptimizerAdaptor<Adam, Network<B>, B>),
    /// And the steps of this run.
    Sharded(Box<ShardedOptimizer<Adam, Network<B>, B>>, u64),
}

impl<B: CollectiveBackend> Updates<B> {
    pub fn new(ddp: &DataParallel<B>, sharding: Option<Sharding>) -> Result<Self, Failure> {
        let adam = AdamConfig::new();
        Ok(match sharding {
            None => Updates::Whole(adam.init()),
            Some(sharding) => Updates::Sharded(Box::new(ShardedOptimizer::new(ddp, adam.init(), sharding)?), 0),
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
            Updates::Whole(optimizer) => {
                let grads = ddp.sync(grads, samples)?;
                *model = optimizer.step(lr, model.clone(), grads);
            }
            Updates::Sharded(optimizer, steps) => {
                optimizer.step(lr, model, grads, samples)?;
                *steps += 1;
            }
        }
        Ok(())
    }

    /// Steps so far, in this run.
    pub fn steps(&self, ddp: &DataParallel<B>) -> u64 {
        match self {
            Updates::Whole(_) => ddp.steps(),
            Updates::Sharded(_, steps) => *steps,
        }
    }

    /// Bytes of a rank's part of the state.
    pub fn part_bytes(&self) -> Result<Option<usize>, Failure> {
        Ok(match self {
            Updates::Whole(_) => None,
            Updates::Sharded(optimizer, _) => Some(optimizer.state_bytes()?),
        })
    }

    /// On rank 0 the state of all ranks, in parts. All ranks call this.
    pub fn save(&self, group: &Group) -> Result<Vec<Vec<u8>>, Failure> {
        Ok(match self {
            Updates::Whole(optimizer) => vec![Recorder::<B>::record(&Records::default(), optimizer.to_record(), ())?],
            Updates::Sharded(optimizer, _) => {
                let (bytes, lens) = group.gather_v(&optimizer.save()?, 0)?.unwrap_or_default();
                let mut bytes = bytes.into_iter();
                lens.into_iter().map(|len| bytes.by_ref().take(len).collect()).collect()
            }
        })
    }

    pub fn load(&mut self, parts: &[Vec<u8>], device: &B::Device) -> Result<(), Failure> {
        match self {
            Updates::Whole(optimizer) => {
                let record = parts.first().cloned().unwrap_or_default();
                *optimizer = optimizer.clone().load_record(Recorder::<B>::load(&Records::default(), record, device)?);
            }
            Updates::Sharded(optimizer, _) => optimizer.load(parts)?,
        }
        Ok(())
    }
}
