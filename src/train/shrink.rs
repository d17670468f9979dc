//! Continuing a training without lost ranks.
//!
//! A gradient exchange that fails may have completed on some ranks. They are one step ahead then, and fail in the next
//! exchange. Batches do not depend on the world size, so the survivors end where all ranks would have ended, up to
//! rounding.

use burn::module::AutodiffModule;
use burn::optim::Optimizer;
use burn::record::{BinBytesRecorder, DoublePrecisionSettings, Recorder};
use burn::tensor::backend::AutodiffBackend;

use super::agree::{all_gather_values, broadcast_value};
use super::data_parallel::{DataParallel, describe_parameters};
use bonfire_core::Error;

/// Records floats as f64 and integers as i64, so all narrower types are restored exactly.
type Records = BinBytesRecorder<DoublePrecisionSettings>;

/// The records of a model and of its optimizer.
type Recorded = (Vec<u8>, Vec<u8>);

impl<B: AutodiffBackend> DataParallel<B> {
    /// Continues without lost ranks: makes a group of the remaining ranks ([`Group::shrink`](crate::Group::shrink)) and
    /// brings all of them to the same model and optimizer.
    ///
    /// Ranks may have failed in the same call of [`sync`](Self::sync) or in two consecutive calls, so some ranks may be
    /// one step ahead. The other ranks then take over the model, the optimizer and the parameter ids of the
    /// lowest rank that is ahead. States that differ between ranks are averaged
    /// ([`average_states`](Self::average_states)). Ranks that are lost during this call are left out too.
    ///
    /// Call it on every remaining rank, with its model and optimizer. The gradients of each successful `sync` must have
    /// been applied to them before anything else was done. Afterwards [`steps`](Self::steps) is the position in the
    /// data, the same on all ranks. Everything else that holds the old group must be made anew: samplers, and layers
    /// such as [`SyncBatchNorm`](crate::SyncBatchNorm), by loading the model's record into a model for the new group.
    ///
    /// ```
    /// # use bonfire::{DataParallel, Error, Group, ShardedSampler};
    /// # use burn::backend::{Autodiff, Flex};
    /// # use burn::nn::{Linear, LinearConfig};
    /// # use burn::optim::{GradientsParams, Optimizer, SgdConfig};
    /// # use burn::tensor::Tensor;
    /// # type B = Autodiff<Flex>;
    /// # let device = Default::default();
    /// # let group = Group::threads(1)?.remove(0);
    /// let (mut model, mut ddp) = DataParallel::new(group, LinearConfig::new(2, 1).init::<B>(&device))?;
    /// let mut optimizer = SgdConfig::new().init();
    /// 'training: loop {
    ///     // Batches do not depend on the number of ranks, so the ones already used can be skipped.
    ///     let sampler = ShardedSampler::new(ddp.group(), 100, 16)?;
    ///     for shard in sampler.epoch(0).skip(ddp.steps() as usize) {
    ///         let loss = model.forward(Tensor::<B, 2>::ones([shard.len(), 2], &device)).mean();
    ///         let grads = GradientsParams::from_grads(loss.backward(), &model);
    ///         match ddp.sync(&model, grads, shard.len()) {
    ///             Ok(grads) => model = optimizer.step(0.1, model, grads),
    ///             Err(Error::PeerLost { .. } | Error::Disconnected { .. }) => {
    ///                 ddp.shrink(&mut model, &mut optimizer)?;
    ///                 continue 'training;
    ///             }
    ///             Err(error) => return Err(error),
    ///         }
    ///     }
    ///     break;
    /// }
    /// # assert_eq!(ddp.steps(), 7);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// The errors of [`Group::shrink`](crate::Group::shrink) and of [`Group::all_reduce`](crate::Group::all_reduce).
    /// [`Error::Broken`] on all ranks if a model cannot be recorded, on one rank if that cannot load it. After an
    /// error, model and optimizer are unchanged or one step further.
    ///
    /// # Panics
    /// If a state cannot be read from its device.
    pub fn shrink<M, O>(&mut self, model: &mut M, optimizer: &mut O) -> Result<(), Error>
    where
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
    {
        loop {
            self.group = self.group.shrink()?;
            // This memory is in the old group's shared segment.
            self.memory.clear();
            let result = self.catch_up(model, optimizer).and_then(|()| {
                // A failed pass may have updated the running states of some ranks only.
                *model = self.average_states(model.clone())?;
                Ok(())
            });
            match result {
                Err(Error::PeerLost { .. } | Error::Disconnected { .. } | Error::Left { .. }) => {}
                result => return result,
            }
        }
    }

    /// Brings ranks that are a step behind to the state of the lowest rank that is ahead.
    fn catch_up<M, O>(&mut self, model: &mut M, optimizer: &mut O) -> Result<(), Error>
    where
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
    {
        let steps = all_gather_values(&self.group, [self.steps])?;
        let [latest] = steps.iter().copied().max().unwrap_or([self.steps]);
        let leader = steps.iter().position(|steps| *steps == [latest]).unwrap_or(0);
        if steps.iter().all(|steps| *steps == [latest]) {
            return Ok(());
        }
        let failed = |e: &dyn std::fmt::Display| Error::broken("transferring the model", e);
        let own: Result<Recorded, String> = if self.group.rank() == leader {
            record::<B, M, O>(model, optimizer).map_err(|e| e.to_string())
        } else {
            Ok(Default::default())
        };
        let recorded: Result<Recorded, String> = broadcast_value(&self.group, &own, leader)?;
        let (leader_model, leader_optimizer) = recorded.map_err(|e| failed(&e))?;
        if self.steps == latest {
            return Ok(());
        }
        let Some(device) = model.devices().first().cloned() else { return Ok(()) };
        let leader_model = Recorder::<B>::load(&Records::default(), leader_model, &device).map_err(|e| failed(&e))?;
        let leader_optimizer =
            Recorder::<B>::load(&Records::default(), leader_optimizer, &device).map_err(|e| failed(&e))?;
        *model = model.clone().load_record(leader_model);
        *optimizer = optimizer.clone().load_record(leader_optimizer);
        self.parameters = describe_parameters(model).1;
        self.steps = latest;
        Ok(())
    }
}

fn record<B, M, O>(model: &M, optimizer: &O) -> Result<Recorded, burn::record::RecorderError>
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
    O: Optimizer<M, B>,
{
    let model = Recorder::<B>::record(&Records::default(), model.clone().into_record(), ())?;
    Ok((model, Recorder::<B>::record(&Records::default(), optimizer.to_record(), ())?))
}

// burn's feature `distributed` removes the `AutodiffBackend` impl from host backends.
#[cfg(all(test, not(feature = "ddp")))]
mod tests {
    use burn::backend::{Autodiff, Flex};
    use burn::module::Param;
    use burn::nn::{Linear, LinearConfig};
    use burn::optim::{AdamConfig, GradientsParams};
    use burn::tensor::{Tensor, TensorData, Tolerance};

    use super::*;
    use crate::ShardedSampler;
    use bonfire_core::Group;

    type Training = Autodiff<Flex>;

    /// Runs a training step on this rank's shard of a batch.
    fn step<O: Optimizer<Linear<Training>, Training>>(
        ddp: &mut DataParallel<Training>,
        model: &mut Linear<Training>,
        optimizer: &mut O,
        shard: &[usize],
    ) -> Result<(), Error> {
        let device = Default::default();
        let rows: Vec<f32> = shard.iter().flat_map(|i| [*i as f32, (i % 7) as f32, 1.0]).collect();
        let input = Tensor::<Training, 2>::from_data(TensorData::new(rows, [shard.len(), 3]), &device);
        let loss = model.forward(input).powf_scalar(2.0).mean();
        let grads = GradientsParams::from_grads(loss.backward(), model);
        let grads = ddp.sync(model, grads, shard.len())?;
        *model = optimizer.step(0.01, model.clone(), grads);
        Ok(())
    }

    fn values(model: &Linear<Training>) -> (TensorData, TensorData) {
        (model.weight.to_data(), model.bias.as_ref().expect("a bias").to_data())
    }

    fn on_ranks<T: Send + 'static>(n: usize, rank: impl Fn(Group) -> T + Clone + Send + 'static) -> Vec<T> {
        let threads = Group::threads(n).unwrap().into_iter().map(|group| {
            let rank = rank.clone();
            std::thread::spawn(move || rank(group))
        });
        threads.collect::<Vec<_>>().into_iter().map(|thread| thread.join().unwrap()).collect()
    }

    #[test]
    fn a_rank_that_is_a_step_behind_takes_over_model_optimizer_and_ids() {
        let results = on_ranks(3, |group| {
            let (device, rank) = (Default::default(), group.rank());
            let (mut model, mut ddp) =
                DataParallel::new(group.clone(), LinearConfig::new(3, 2).init::<Training>(&device)).unwrap();
            let mut optimizer = AdamConfig::new().init();
            for i in 0..3 {
                step(&mut ddp, &mut model, &mut optimizer, &[rank + i, rank + 2 * i]).unwrap();
            }
            // The state of a rank whose last `sync` failed when that of another rank had succeeded.
            let behind = (model.clone(), optimizer.clone());
            step(&mut ddp, &mut model, &mut optimizer, &[rank + 5]).unwrap();
            let ahead = values(&model);
            if rank != 1 {
                (model, optimizer) = behind;
                ddp.steps -= 1;
            }
            let id = model.weight.id;
            ddp.shrink(&mut model, &mut optimizer).unwrap();
            assert_eq!((values(&model), ddp.steps()), (ahead, 4));
            assert_eq!(model.weight.id == id, rank == 1);
            // The optimizer's moments are the same, too.
            step(&mut ddp, &mut model, &mut optimizer, &[rank + 7]).unwrap();
            values(&model)
        });
        assert!(results.iter().all(|result| *result == results[0]));
    }

    #[test]
    fn survivors_train_the_same_model_as_without_a_loss() {
        const BATCHES: u64 = 12;
        let train = |group: Group, dies: Option<usize>| {
            let (device, identity) = (Default::default(), group.rank());
            let mut model = LinearConfig::new(3, 2).with_bias(false).init::<Training>(&device);
            model.weight = Param::from_data(TensorData::new(vec![0.1f32, 0.2, -0.3, 0.4, -0.5, 0.6], [3, 2]), &device);
            let (mut model, mut ddp) = DataParallel::new(group, model).unwrap();
            let mut optimizer = AdamConfig::new().init();
            while ddp.steps() < BATCHES {
                if ddp.steps() == 5 && dies == Some(identity) {
                    return None;
                }
                let sampler = ShardedSampler::new(ddp.group(), 16 * BATCHES as usize, 16).unwrap();
                let shard = sampler.epoch(0).nth(ddp.steps() as usize).unwrap();
                match step(&mut ddp, &mut model, &mut optimizer, &shard) {
                    Err(Error::Left { .. }) => ddp.shrink(&mut model, &mut optimizer).unwrap(),
                    result => result.unwrap(),
                }
            }
            Some(model.weight.to_data())
        };
        let reference = on_ranks(1, move |group| train(group, None)).remove(0).unwrap();
        for dies in 0..3 {
            let results = on_ranks(3, move |group| train(group, Some(dies)));
            let survivors: Vec<_> = results.into_iter().flatten().collect();
            assert_eq!((survivors.len(), &survivors[0]), (2, &survivors[1]));
            survivors[0].assert_approx_eq::<f32>(&reference, Tolerance::absolute(1e-4));
        }
    }
}
